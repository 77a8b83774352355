package counter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"testing"
	"time"
)

// held is a delay that only a flush ends.
const held = 12345 * time.Second

type heldClock struct{ *fakeClock }

func (c heldClock) Sleep(ctx context.Context, d time.Duration) error {
	if d == held {
		<-ctx.Done()
		return ctx.Err()
	}
	return c.fakeClock.Sleep(ctx, d)
}

func newBuffer(t *testing.T, config BufferConfig, answers ...func(*http.Request) (*http.Response, error)) (*Buffer, *transport) {
	t.Helper()
	client, sent, clock := newClient(t, Config{}, answers...)
	client.clock = heldClock{clock}
	if config.MaxDelay == 0 {
		config.MaxDelay = held
	}
	buffer, err := client.Buffer(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancelled, cancel := context.WithCancel(context.Background())
		cancel()
		// What a test leaves in the buffer has failed.
		_ = buffer.Close(cancelled)
	})
	return buffer, sent
}

func add(t *testing.T, buffer *Buffer, counter string, delta int64) {
	t.Helper()
	if err := buffer.Add(counter, delta); err != nil {
		t.Fatal(err)
	}
}

// batches returns the items of each request.
func (t *transport) batches() [][]wireItem {
	t.lock.Lock()
	defer t.lock.Unlock()
	var found [][]wireItem
	for _, each := range t.bodies {
		var body struct{ Items []wireItem }
		if err := json.Unmarshal([]byte(each), &body); err != nil {
			panic(err)
		}
		found = append(found, body.Items)
	}
	return found
}

// result answers a batch with one problem for each item.
func result(problem string) func(*http.Request) (*http.Response, error) {
	return status(200, `{"results":[`+problem+`]}`)
}

const (
	conflicting = `{"code":"token_conflict","retry":"never","applied":null,"detail":"used"}`
	cancelling  = `{"code":"token_cancelled","retry":"never","applied":false,"detail":"cancelled"}`
	forgetting  = `{"code":"namespace_unknown","retry":"never","applied":null,"detail":"gone"}`
)

func TestABufferSendsOneTotalUnderOneToken(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{}, lost, busy, added)
	add(t, buffer, "a", 1)
	add(t, buffer, "b", 2)
	add(t, buffer, "a", -5)
	if err := buffer.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := sent.headers[0].Get("Request-Timeout"); got != "2500ms" {
		t.Error(got)
	}
	batches := sent.batches()
	if len(batches) != 3 || sent.bodies[0] != sent.bodies[1] || sent.bodies[0] != sent.bodies[2] {
		t.Fatal(sent.bodies)
	}
	first := batches[0]
	if len(first) != 2 || first[0].Counter != "a" || first[0].Delta != -4 || first[1].Delta != 2 || *first[0].Token == *first[1].Token {
		t.Error(sent.bodies[0])
	}
	add(t, buffer, "a", 1)
	if err := buffer.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	batches = sent.batches()
	if len(batches) != 4 || batches[3][0].Delta != 1 || *batches[3][0].Token == *first[0].Token {
		t.Error(sent.bodies)
	}
}

func TestManyTotalsAreSentInPieces(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{}, added)
	for i := 0; i < 2*batchItemsMax+500; i++ {
		add(t, buffer, fmt.Sprint("c", i), 1)
	}
	if err := buffer.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if batches := sent.batches(); len(batches) != 3 || batches[0][0].Counter != "c0" || len(totals(sent)) != 2*batchItemsMax+500 {
		t.Error(len(batches), "batches")
	}
}

func TestABufferFlushesByItself(t *testing.T) {
	arrived := make(chan struct{}, 1)
	buffer, _ := newBuffer(t, BufferConfig{MaxDelay: time.Second}, func(request *http.Request) (*http.Response, error) {
		arrived <- struct{}{}
		return added(request)
	})
	add(t, buffer, "a", 1)
	<-arrived
	if err := buffer.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestATotalThatIsTooLargeIsSentInParts(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{}, added)
	for _, delta := range []int64{math.MaxInt64, 1, math.MaxInt64, -3, math.MinInt64, math.MinInt64} {
		add(t, buffer, "a", delta)
	}
	if err := buffer.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	var got []int64
	for _, each := range sent.batches()[0] {
		got = append(got, each.Delta)
	}
	if want := []int64{math.MaxInt64, 1, -4, math.MinInt64}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Error(got)
	}
}

func TestAddNeverWaitsForTheNetwork(t *testing.T) {
	release := make(chan struct{})
	arrived := make(chan struct{})
	buffer, sent := newBuffer(t, BufferConfig{MaxDelay: time.Second, MaxItems: 3}, func(request *http.Request) (*http.Response, error) {
		arrived <- struct{}{}
		<-release
		return added(request)
	}, added)
	add(t, buffer, "a", 1)
	<-arrived
	add(t, buffer, "a", 10)
	add(t, buffer, "b", 1)
	add(t, buffer, "b", 1)
	var refused *RefusedError
	if err := buffer.Add("c", 1); !errors.As(err, &refused) || refused.Code != "buffer_full" {
		t.Error(err)
	}
	close(release)
	if err := buffer.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := totals(sent); got["a"] != 11 || got["b"] != 2 || got["c"] != 0 {
		t.Error(got)
	}
	if err := buffer.Add("a", 1); !errors.As(err, &refused) || refused.Code != "buffer_closed" {
		t.Error(err)
	}
}

// totals returns what all tokens that were sent add.
func totals(sent *transport) map[string]int64 {
	tokens, found := map[Token]bool{}, map[string]int64{}
	for _, batch := range sent.batches() {
		for _, each := range batch {
			if !tokens[*each.Token] {
				tokens[*each.Token] = true
				found[each.Counter] += each.Delta
			}
		}
	}
	return found
}

func TestBoundsOfABufferAreChecked(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{}, added)
	var refused *RefusedError
	if err := buffer.Add("", 1); !errors.As(err, &refused) || refused.Code != "invalid_parameter" {
		t.Error(err)
	}
	for _, bad := range []BufferConfig{{MaxDelay: -1}, {MaxItems: -1}} {
		if _, err := buffer.client.Buffer(bad); !errors.As(err, &refused) {
			t.Error(bad, err)
		}
	}
	if err := buffer.Close(context.Background()); err != nil || len(sent.bodies) != 0 {
		t.Error(err, sent.bodies)
	}
}

func TestARefusedTotalIsReportedOnce(t *testing.T) {
	buffer, _ := newBuffer(t, BufferConfig{}, result(conflicting), added)
	add(t, buffer, "a", 1)
	err := buffer.Flush(context.Background())
	var failed *BufferError
	var refused *RefusedError
	if !errors.As(err, &failed) || len(failed.Failed) != 1 || failed.Pending != 0 || errors.As(err, &refused) {
		t.Fatal(err)
	}
	if each := failed.Failed[0]; each.Counter != "a" || each.Delta != 1 || !errors.As(each.Err, &refused) {
		t.Error(each)
	}
	add(t, buffer, "a", 1)
	if err := buffer.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestFailedTotalsFillABufferUntilTheyAreReported(t *testing.T) {
	buffer, _ := newBuffer(t, BufferConfig{MaxItems: 1}, result(conflicting), added)
	add(t, buffer, "a", 1)
	buffer.lock.Lock()
	for len(buffer.failed) == 0 {
		changed := buffer.changed
		buffer.lock.Unlock()
		<-changed
		buffer.lock.Lock()
	}
	buffer.lock.Unlock()
	var refused *RefusedError
	if err := buffer.Add("b", 1); !errors.As(err, &refused) || refused.Code != "buffer_full" {
		t.Error(err)
	}
	if err := buffer.Flush(context.Background()); err == nil {
		t.Error("nothing is reported")
	}
	add(t, buffer, "b", 1)
}

func TestAClosedBufferReportsAllThatItHolds(t *testing.T) {
	arrived := make(chan struct{}, 1)
	buffer, sent := newBuffer(t, BufferConfig{MaxDelay: time.Second}, func(request *http.Request) (*http.Response, error) {
		arrived <- struct{}{}
		<-request.Context().Done()
		return nil, request.Context().Err()
	})
	add(t, buffer, "sent", 1)
	<-arrived
	add(t, buffer, "waiting", 2)
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	err := buffer.Close(cancelled)
	var failed *BufferError
	if !errors.As(err, &failed) || !errors.Is(err, context.Canceled) || len(failed.Failed) != 2 || failed.Pending != 0 {
		t.Fatal(err)
	}
	var unknown *UnknownOutcomeError
	var unsent *UnsentError
	if each := failed.Failed[0]; each.Counter != "sent" || !errors.As(each.Err, &unknown) || unknown.Unfinished.Credential != *sent.batches()[0][0].Token {
		t.Error(each)
	}
	if each := failed.Failed[1]; each.Counter != "waiting" || each.Delta != 2 || !errors.As(each.Err, &unsent) || unsent.Unfinished.Credential == nil {
		t.Error(each)
	}
	if err := buffer.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestABufferThatIsRefusedKeepsItsAdds(t *testing.T) {
	var lock sync.Mutex
	isBack := false
	buffer, sent := newBuffer(t, BufferConfig{}, func(request *http.Request) (*http.Response, error) {
		lock.Lock()
		defer lock.Unlock()
		if isBack {
			return added(request)
		}
		return gone(request)
	})
	add(t, buffer, "a", 1)
	err := buffer.Flush(context.Background())
	var failed *BufferError
	var refused *RefusedError
	if !errors.As(err, &failed) || failed.Pending != 1 || len(failed.Failed) != 0 || errors.As(err, &refused) {
		t.Fatal(err)
	}
	lock.Lock()
	isBack = true
	lock.Unlock()
	for err != nil {
		// The refusals before are still in flight.
		err = buffer.Flush(context.Background())
	}
	if got := totals(sent); got["a"] != 1 {
		t.Error(got)
	}
}

func TestABufferGivesUpATokenThatIsHonouredNoMore(t *testing.T) {
	over := func(request *http.Request) (*http.Response, error) {
		response, err := busy(request)
		response.Header.Set("Idempotency-TTL", "0")
		return response, err
	}
	buffer, sent := newBuffer(t, BufferConfig{}, over)
	add(t, buffer, "a", 1)
	var failed *BufferError
	var unknown *UnknownOutcomeError
	if err := buffer.Flush(context.Background()); !errors.As(err, &failed) || !errors.As(failed.Failed[0].Err, &unknown) || unknown.Unfinished.Until.IsZero() {
		t.Error(err)
	}
	if len(sent.bodies) != 1 {
		t.Error(len(sent.bodies), "requests")
	}
}

// hookedContext calls hook whenever it is waited for.
type hookedContext struct {
	context.Context
	hook func()
}

func (c hookedContext) Done() <-chan struct{} {
	c.hook()
	return c.Context.Done()
}

// Regression: the error of the refusal was looked up after the retry, where it was nil.
func TestAFlushReportsARefusalThatIsOver(t *testing.T) {
	isWaiting, isOver, isReported := make(chan struct{}), make(chan struct{}), make(chan struct{})
	buffer, sent := newBuffer(t, BufferConfig{}, func(request *http.Request) (*http.Response, error) {
		<-isWaiting
		return gone(request)
	}, added, func(request *http.Request) (*http.Response, error) {
		close(isOver)
		select {
		case <-isReported:
		case <-request.Context().Done():
		}
		return added(request)
	})
	for i := 0; i <= batchItemsMax; i++ {
		add(t, buffer, fmt.Sprint("c", i), 1)
	}
	var once sync.Once
	err := buffer.Flush(hookedContext{context.Background(), func() {
		once.Do(func() {
			close(isWaiting)
			<-isOver
		})
	}})
	close(isReported)
	var failed *BufferError
	if !errors.As(err, &failed) || failed.Pending != 1 || !strings.Contains(err.Error(), "gone") {
		t.Error(err)
	}
	if err := buffer.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if got := totals(sent); len(got) != batchItemsMax+1 {
		t.Error(len(got), "totals")
	}
}

// forbidden refuses whole batches, which a buffer sends again after an hour.
var forbidden = status(403, `{"code":"scope_insufficient","retry":"never","applied":null,"detail":"no","retry_after":3600}`)

func TestABufferThatIsRefusedAsAWholeEndsAsRefused(t *testing.T) {
	client, sent, clock := newClient(t, Config{}, forbidden)
	client.clock = waitingClock{clock}
	buffer, err := client.Buffer(BufferConfig{MaxDelay: held})
	if err != nil {
		t.Fatal(err)
	}
	add(t, buffer, "a", 1)
	var failed *BufferError
	var refused *RefusedError
	if err := buffer.Close(context.Background()); !errors.As(err, &failed) || !errors.As(failed.Failed[0].Err, &refused) || refused.Code != "scope_insufficient" {
		t.Error(err)
	}
	if len(sent.bodies) != 1 {
		t.Error(len(sent.bodies), "requests")
	}
}

// waitingClock is a clock whose time does not pass.
type waitingClock struct{ *fakeClock }

func (c waitingClock) Sleep(ctx context.Context, _ time.Duration) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestARefusalOfAWholeBatchCountsNothing(t *testing.T) {
	var refused *RefusedError
	var unknown *UnknownOutcomeError
	page := status(403, "a page")
	for _, each := range []struct {
		answers []func(*http.Request) (*http.Response, error)
		want    any
	}{
		{[]func(*http.Request) (*http.Response, error){forbidden, result(forgetting)}, &refused},
		{[]func(*http.Request) (*http.Response, error){lost, forbidden, result(forgetting)}, &unknown},
		{[]func(*http.Request) (*http.Response, error){page, result(forgetting)}, &unknown},
	} {
		buffer, _ := newBuffer(t, BufferConfig{}, each.answers...)
		add(t, buffer, "a", 1)
		var failed *BufferError
		for failed == nil || len(failed.Failed) == 0 {
			// A refusal of the whole batch ends a flush early.
			if err := buffer.Flush(context.Background()); !errors.As(err, &failed) {
				t.Fatal(err)
			}
		}
		if !errors.As(failed.Failed[0].Err, each.want) {
			t.Error(failed.Failed[0].Err)
		}
	}
}

func TestACloseReportsNothingIfItsLastAttemptSucceeds(t *testing.T) {
	arrived := make(chan struct{}, 1)
	buffer, _ := newBuffer(t, BufferConfig{MaxDelay: time.Second}, func(request *http.Request) (*http.Response, error) {
		arrived <- struct{}{}
		<-request.Context().Done()
		return added(request)
	})
	add(t, buffer, "a", 1)
	<-arrived
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	if err := buffer.Close(cancelled); err != nil {
		t.Error(err)
	}
}

func TestABufferSplitsABatchOfTooManyItems(t *testing.T) {
	tooMany := status(400, `{"code":"invalid_body","retry":"never","applied":null,"detail":"most","field":"items"}`)
	buffer, sent := newBuffer(t, BufferConfig{}, tooMany, added)
	for i := 0; i < 4; i++ {
		add(t, buffer, fmt.Sprint("c", i), 1)
	}
	if err := buffer.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	var sizes []int
	for _, each := range sent.batches() {
		sizes = append(sizes, len(each))
	}
	if fmt.Sprint(sizes) != "[4 2 2]" {
		t.Error(sizes)
	}
}

// unconnected fails before it has a connection, as an [http.Transport] reports it.
func unconnected(request *http.Request) (*http.Response, error) {
	httptrace.ContextClientTrace(request.Context()).GetConn("")
	return nil, errors.New("connection refused")
}

const forgotten = `{"code":"token_too_old","retry":"never","applied":null,"detail":"too old"}`

func TestATokenThatWasNeverCountedIsRenewedWhenItIsTooOld(t *testing.T) {
	none := status(404, "no tokens")
	buffer, sent := newBuffer(t, BufferConfig{}, unconnected, forbidden, unconnected, result(forgotten), none, added)
	add(t, buffer, "a", 1)
	for err := error(&BufferError{}); err != nil; {
		// The refusal ends a flush early.
		var failed *BufferError
		if err = buffer.Flush(context.Background()); errors.As(err, &failed) && len(failed.Failed) != 0 {
			t.Fatal(failed.Failed[0].Err)
		}
	}
	var tokens []Token
	for i, each := range sent.batches() {
		if i != 4 {
			tokens = append(tokens, *each[0].Token)
		}
	}
	if len(tokens) != 5 || tokens[0] != tokens[3] || tokens[3] == tokens[4] {
		t.Error(sent.bodies)
	}
}

func TestATokenThatMayBeCountedIsNotRenewed(t *testing.T) {
	buffer, _ := newBuffer(t, BufferConfig{}, lost, result(forgotten))
	add(t, buffer, "a", 1)
	var failed *BufferError
	var unknown *UnknownOutcomeError
	if err := buffer.Flush(context.Background()); !errors.As(err, &failed) || !errors.As(failed.Failed[0].Err, &unknown) {
		t.Error(err)
	}
}

func TestATokenThatWasNeverCountedIsRenewedInTime(t *testing.T) {
	over := func(request *http.Request) (*http.Response, error) {
		response, err := forbidden(request)
		response.Header.Set("Idempotency-TTL", "60")
		return response, err
	}
	buffer, sent := newBuffer(t, BufferConfig{}, over, status(404, "no tokens"), added)
	add(t, buffer, "a", 1)
	for err := error(&BufferError{}); err != nil; {
		var failed *BufferError
		if err = buffer.Flush(context.Background()); errors.As(err, &failed) && len(failed.Failed) != 0 {
			t.Fatal(failed.Failed[0].Err)
		}
	}
	if batches := sent.batches(); len(batches) != 3 || *batches[0][0].Token == *batches[2][0].Token {
		t.Error(sent.bodies)
	}
}

func TestARefusedRetryOfABufferIsUnknown(t *testing.T) {
	buffer, _ := newBuffer(t, BufferConfig{}, lost, result(forgetting))
	add(t, buffer, "a", 1)
	var failed *BufferError
	var unknown *UnknownOutcomeError
	if err := buffer.Close(context.Background()); !errors.As(err, &failed) || !errors.As(failed.Failed[0].Err, &unknown) {
		t.Error(err)
	}
}

func TestACancelledTotalLeavesTheBufferAsNotCounted(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{}, lost, result(cancelling))
	add(t, buffer, "a", 1)
	var failed *BufferError
	if err := buffer.Close(context.Background()); !errors.As(err, &failed) || !errors.Is(failed.Failed[0].Err, ErrTokenCancelled) {
		t.Error(err)
	}
	if batches := sent.batches(); len(batches) != 2 || *batches[0][0].Token != *batches[1][0].Token {
		t.Error(sent.bodies)
	}
}

func TestABufferIsSharedByGoroutines(t *testing.T) {
	buffer, sent := newBuffer(t, BufferConfig{MaxDelay: time.Second}, lost, busy, lost, added)
	var running sync.WaitGroup
	for i := 0; i < 20; i++ {
		i := i
		running.Add(1)
		go func() {
			defer running.Done()
			for j := 0; j < 100; j++ {
				if err := buffer.Add(fmt.Sprint("c", j%7), 1); err != nil {
					t.Error(err)
				}
			}
			if i%5 == 0 {
				if err := buffer.Flush(context.Background()); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	running.Wait()
	if err := buffer.Close(context.Background()); err != nil {
		t.Error(err)
	}
	total := int64(0)
	for _, each := range totals(sent) {
		total += each
	}
	if total != 2000 {
		t.Error(total)
	}
}
