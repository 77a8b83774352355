package counter

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"sync"
	"time"
)

const (
	codeBound     = "bound_reached"
	codeCancelled = "token_cancelled"
	codeConflict  = "token_conflict"
	codeExpired   = "hold_expired"
	codeReleased  = "hold_released"
	codeSettled   = "hold_settled"
	codeTooOld    = "token_too_old"
	// endlessPauseMax bounds the pauses of a delivery without a deadline, whatever Retry-After says.
	endlessPauseMax = time.Hour
)

// How to go on after an attempt.
type next string

const (
	sameToken next = "same_token"
	newToken  next = "new_token"
	never     next = "never"
)

// A failure is an attempt that did not succeed.
type failure struct {
	err  error
	next next
	// wait is how long the service asks to wait.
	wait time.Duration
	// arrived is whether the attempt may have reached the service.
	arrived bool
	// problem is the service's own refusal, and nil if the answer is from no counter service.
	problem *RefusedError
	// isFinal is whether it would end any call, and only an endless delivery goes on.
	isFinal bool
}

func (f *failure) Error() string { return f.err.Error() }

// isOpen is whether the attempt may have been counted.
func (f *failure) isOpen() bool {
	return f.arrived && (f.problem == nil || f.next == sameToken && !f.isFinal)
}

// voids is whether the attempt's token must be replaced by a new one. isUnknown is whether an attempt
// before may have been counted: then one that is too old to look up may be counted, and stays.
func (f *failure) voids(isUnknown bool) bool {
	return f.next == newToken || f.problem != nil && f.problem.Code == codeTooOld && !isUnknown
}

// A call is a request, and what is known of it.
type call struct {
	method, path, operation string
	body                    []byte
	key                     string
	// precondition is the name of a header whose value is *.
	precondition string
	// isWrite is whether the service may reject it before it starts.
	isWrite bool
	// hasMany is whether its answer has many items.
	hasMany bool
	// isEmpty is whether it succeeds only without content; then there is nothing to read.
	isEmpty bool
	// read reads the body of a success. A *failure is a problem in it; any other error says that it
	// is not from a counter service.
	read func([]byte) error
	// unfinished is nil for reads.
	unfinished *Unfinished
	// ttl is how long the service honours a token by the last answer, and negative if it did not say.
	ttl time.Duration
	// renew changes the token, and is nil if the program chose it.
	renew func(Token)
}

type clock interface {
	Now() time.Time
	// Sleep waits, or returns the context's error.
	Sleep(ctx context.Context, d time.Duration) error
}

type realClock struct{}

func (realClock) Now() time.Time { return time.Now() }

func (realClock) Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A schedule is the deadline of a call, and its attempts.
type schedule struct {
	client   *Client
	end      time.Time
	attempts int
	// isEndless is whether there is no deadline. Then retries take nothing from the budget.
	isEndless bool
}

func (c *Client) begin(ctx context.Context) *schedule {
	end := c.clock.Now().Add(c.config.Timeout)
	if until, ok := ctx.Deadline(); ok && until.Before(end) {
		end = until
	}
	c.budget.call()
	return &schedule{client: c, end: end}
}

// attemptTime returns the limit on the next attempt.
func (s *schedule) attemptTime() time.Duration {
	left := s.end.Sub(s.client.clock.Now())
	if s.isEndless || left > s.client.config.AttemptTimeout {
		left = s.client.config.AttemptTimeout
	}
	if left < time.Millisecond {
		left = time.Millisecond
	}
	return left
}

// pause waits before the next attempt after f. It returns an error if there is no time or no budget
// for one; the error names the reason.
func (s *schedule) pause(ctx context.Context, f *failure, failures int) error {
	client := s.client
	pause := f.wait + jitter(backoffMax(client.config, failures))
	made := fmt.Sprintf("no definite answer in %d attempts", s.attempts)
	if s.isEndless {
		if pause > endlessPauseMax {
			pause = endlessPauseMax
		}
	} else {
		left := s.end.Sub(client.clock.Now()) - pause
		if left <= 0 {
			return fmt.Errorf("%s, and the next would be past the deadline: %w", made, f.err)
		}
		wait, ok := client.budget.take(client.clock.Now(), left)
		if !ok {
			return fmt.Errorf("%s, and the retries that all calls share are used up: %w", made, f.err)
		}
		if wait > pause {
			pause = wait
		}
	}
	if err := client.clock.Sleep(ctx, pause); err != nil {
		return fmt.Errorf("%s, and the caller waits no longer: %w; the last one: %v", made, err, f.err)
	}
	return nil
}

// do repeats call until there is a definite answer or its deadline passes.
func (c *Client) do(ctx context.Context, call *call) error {
	schedule := c.begin(ctx)
	isUnknown, sent := false, false
	// void is whether the client's own token is void and has no successor yet.
	void := false
	first := c.clock.Now()
	for {
		if err := ctx.Err(); err != nil {
			return call.givenUp(err, sent)
		}
		timeout := schedule.attemptTime()
		if call.unfinished != nil && call.unfinished.isOver(c.clock.Now().Add(timeout)) {
			// What the program resolves was sent by another call.
			return call.givenUp(errTooLate, sent || schedule.attempts == 0)
		}
		f := c.attempt(ctx, call, timeout)
		schedule.attempts++
		if f == nil {
			return nil
		}
		if call.unfinished != nil {
			told := call.unfinished.told(call.ttl, first)
			call.unfinished = &told
		}
		sent = sent || f.arrived
		switch {
		case f.voids(isUnknown) && call.renew != nil:
			// The old token can never count, and the program did not choose it.
			isUnknown, sent, void = false, false, true
		case f.next != sameToken:
			if f.problem != nil && (!isUnknown || call.unfinished == nil || decides(f.problem)) {
				return f.problem
			}
			return call.givenUp(f.err, sent)
		case f.arrived:
			isUnknown = true
		}
		if err := schedule.pause(ctx, f, schedule.attempts); err != nil {
			if void {
				return f.problem
			}
			return call.givenUp(err, sent)
		}
		if void {
			// After the pause, which may be longer than the service accepts a token.
			call.renew(c.freshTokens(ctx, 1, schedule.attemptTime())[0])
			void = false
		}
	}
}

// decides is whether a refused retry says what became of the attempts before it.
func decides(problem *RefusedError) bool {
	return problem.Code == codeConflict || problem.Code == codeSettled || isFalse(problem.Applied)
}

// givenUp returns the error of a call that ends without a definite answer.
func (call *call) givenUp(err error, sent bool) error {
	if refused := (*RefusedError)(nil); errors.As(err, &refused) {
		// A refusal that decides nothing is no cause to unwrap: errors.As would find it definite.
		err = errors.New(err.Error())
	}
	isOfCancel := call.operation == opCancel
	switch {
	case call.unfinished == nil:
		return &UnavailableError{err}
	case sent:
		return &UnknownOutcomeError{*call.unfinished, err, isOfCancel}
	default:
		return &UnsentError{*call.unfinished, err, isOfCancel}
	}
}

// freshTokens returns new tokens with the service's time, because a wrong clock may have made the
// old ones void; with this machine's time if there is no answer.
func (c *Client) freshTokens(ctx context.Context, count int, timeout time.Duration) []Token {
	var found []Token
	isAnswered := c.attempt(ctx, tokensCall(count, &found), timeout) == nil
	made := make([]Token, count)
	for i := range made {
		made[i] = NewToken()
		if isAnswered {
			// A proxy may give the same answer to two clients: only the time is the service's.
			made[i].timeUS = found[i].timeUS
		}
	}
	return made
}

// backoffMax returns the longest pause after so many attempts.
func backoffMax(config Config, attempts int) time.Duration {
	longest := config.BackoffFirst
	for ; attempts > 0 && longest < config.BackoffMax; attempts-- {
		longest *= 2
	}
	if longest > config.BackoffMax {
		longest = config.BackoffMax
	}
	return longest
}

// jitter returns a random duration from 0 to most (full jitter).
func jitter(most time.Duration) time.Duration {
	drawn, err := rand.Int(rand.Reader, big.NewInt(int64(most)+1))
	if err != nil {
		return most
	}
	return time.Duration(drawn.Int64())
}

// A budget is a token bucket of retries, shared by all calls of a client and filled by time and
// calls. Without it, clients would multiply their load during an outage.
type budget struct {
	size, perSecond, perCall float64

	lock sync.Mutex
	left float64
	then time.Time
}

func newBudget(size, perSecond, perCall float64, now time.Time) *budget {
	return &budget{size: size, perSecond: perSecond, perCall: perCall, left: size, then: now}
}

// call adds a call's share.
func (b *budget) call() {
	b.lock.Lock()
	defer b.lock.Unlock()
	b.add(b.perCall)
}

func (b *budget) add(retries float64) {
	b.left += retries
	if b.left > b.size {
		b.left = b.size
	}
}

// take takes one retry, and returns how long to wait for it; false, and nothing is taken, if that is
// longer than most.
func (b *budget) take(now time.Time, most time.Duration) (time.Duration, bool) {
	b.lock.Lock()
	defer b.lock.Unlock()
	if since := now.Sub(b.then); since > 0 {
		b.add(since.Seconds() * b.perSecond)
	}
	b.then = now
	if b.left >= 1 {
		b.left--
		return 0, true
	}
	seconds := (1 - b.left) / b.perSecond
	if b.perSecond == 0 || seconds > most.Seconds() {
		return 0, false
	}
	b.left--
	return time.Duration(seconds * float64(time.Second)), true
}
