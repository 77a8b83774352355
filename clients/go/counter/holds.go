package counter

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math/big"
	"net/http"
	"net/url"
	"sync"
	"time"
)

const (
	opHold    = "hold"
	opSettle  = "settle"
	opRelease = "release"

	stateOpen     = "open"
	stateSettled  = "settled"
	stateReleased = "released"
	stateExpired  = "expired"

	tokenBytes = 24
)

// HoldState is a hold: open, or with its end.
type HoldState struct {
	ID      string
	Counter string
	Amount  int64
	// State is open, settled, released or expired.
	State string
	// ExpiresAt is zero unless it is open, and EndedAt if it is.
	ExpiresAt, EndedAt time.Time
	// Settled is what counts, of a hold that was settled. Over is whether that is more than was held.
	Settled int64
	Over    bool
}

// HoldCount is a hold, and its counter right after the call. Both numbers are exact as of AsOf.
type HoldCount struct {
	HoldState
	Count *big.Int
	// Held is what open holds that go the same way reserve together.
	Held *big.Int
	AsOf time.Time
}

// A Hold is an open hold; [Client.Hold] begins one. It is safe for concurrent use.
type Hold struct {
	// Began is the hold and its counter right after it began.
	Began  HoldCount
	client *Client

	lock sync.Mutex
	// isOver is whether the hold has ended, or may be settled.
	isOver bool
}

// Hold reserves an amount of the counter: bounded adds and other holds leave room for it until it is settled,
// released, or expires after expiresIn. It takes [AtLeast], [AtMost] and [WithCredential]. If there is no room, the
// error is a [BoundReachedError], and if the credential's hold has ended, a [HoldEndedError].
//
//	hold, err := client.Hold(ctx, "budget", 50, 15*time.Minute, counter.AtMost(1000))
//	if err != nil {
//		return err
//	}
//	defer hold.Release(ctx) // does nothing after a settle
//	...
//	_, err = hold.Settle(ctx, 37)
//
// Errors are those of [Client.Add]. A hold whose begin is not known can be cancelled by its Unfinished; else it
// expires by itself.
func (c *Client) Hold(ctx context.Context, counter string, amount int64, expiresIn time.Duration, opts ...Option) (*Hold, error) {
	made := &Hold{client: c}
	opts = append(opts, lasts(durationText(expiresIn)))
	err := c.tokened(ctx, opHold, []Item{{Counter: counter, Delta: amount}}, opts, made.Began.as(stateOpen))
	if err != nil {
		return nil, err
	}
	return made, nil
}

// WithHold holds as [Client.Hold] does, calls use, and releases the hold unless use has settled it. It returns the
// error of use, or else that of the release.
func (c *Client) WithHold(ctx context.Context, counter string, amount int64, expiresIn time.Duration,
	use func(context.Context, *Hold) error, opts ...Option) (err error) {
	hold, err := c.Hold(ctx, counter, amount, expiresIn, opts...)
	if err != nil {
		return err
	}
	defer func() {
		if failed := hold.Release(ctx); err == nil {
			err = failed
		}
	}()
	return use(ctx, hold)
}

// ID returns the id of the hold, for [Client.SettleHold] and the other calls, in any process.
func (h *Hold) ID() string { return h.Began.ID }

// Settle counts what the work cost, 0 or with the sign of the hold, and ends the hold. The work is done, so it is
// sent also if ctx is done: then for at most Config.AttemptTimeout. If the error is an [UnknownOutcomeError] or an
// [UnsentError], [Hold.Release] does nothing, because it could win and the cost would be lost: settle again, or pass
// its Unfinished to [Client.Resolve].
func (h *Hold) Settle(ctx context.Context, amount int64) (HoldCount, error) {
	ctx, cancel := h.client.detached(ctx)
	defer cancel()
	h.setOver(true)
	found, err := h.client.SettleHold(ctx, h.ID(), amount)
	var refused *RefusedError
	var ended *HoldEndedError
	if errors.As(err, &refused) && !errors.As(err, &ended) {
		h.setOver(false)
	}
	return found, err
}

// Release gives everything back. It does nothing if the hold has ended or may be settled, so that it can be
// deferred. It is sent also if ctx is done: then for at most Config.AttemptTimeout. What cannot be released expires
// by itself.
func (h *Hold) Release(ctx context.Context) error {
	h.lock.Lock()
	isOver := h.isOver
	h.lock.Unlock()
	if isOver {
		return nil
	}
	ctx, cancel := h.client.detached(ctx)
	defer cancel()
	_, err := h.client.ReleaseHold(ctx, h.ID())
	var ended *HoldEndedError
	if err != nil && !errors.As(err, &ended) {
		return err
	}
	h.setOver(true)
	return nil
}

// Extend lets the hold expire so long from now, or when no hold may live longer; never earlier.
func (h *Hold) Extend(ctx context.Context, expiresIn time.Duration) (HoldState, error) {
	return h.client.ExtendHold(ctx, h.ID(), expiresIn)
}

func (h *Hold) setOver(isOver bool) {
	h.lock.Lock()
	defer h.lock.Unlock()
	h.isOver = isOver
}

// SettleHold counts an amount, 0 or with the sign of the hold, and ends the hold with this id. If the hold has ended
// otherwise, the error is a [HoldEndedError]; other errors are those of [Client.Add].
func (c *Client) SettleHold(ctx context.Context, id string, amount int64) (HoldCount, error) {
	var found HoldCount
	err := c.end(ctx, opSettle, id, amount, found.as(stateSettled))
	return found, err
}

// ReleaseHold gives back all that the hold with this id reserves. Errors are those of [Client.SettleHold].
func (c *Client) ReleaseHold(ctx context.Context, id string) (HoldCount, error) {
	var found HoldCount
	err := c.end(ctx, opRelease, id, 0, found.as(stateReleased))
	return found, err
}

func (c *Client) end(ctx context.Context, operation, id string, amount int64, read reader) error {
	token, counter, err := parseHold(id)
	if err != nil {
		return err
	}
	return c.tokened(ctx, operation, []Item{{Counter: counter, Delta: amount}}, []Option{WithCredential(token)}, read)
}

// ExtendHold lets the hold with this id expire so long from now, or when no hold may live longer; never earlier. If
// it has ended, the error is a [HoldEndedError].
func (c *Client) ExtendHold(ctx context.Context, id string, expiresIn time.Duration) (HoldState, error) {
	body := map[string]string{"expires_in": durationText(expiresIn)}
	return c.holdState(ctx, id, &call{method: http.MethodPatch, operation: "extend", body: toJSON(body), isWrite: true})
}

// GetHold returns the hold with this id, open or with its end.
func (c *Client) GetHold(ctx context.Context, id string) (HoldState, error) {
	return c.holdState(ctx, id, &call{method: http.MethodGet, operation: "get-hold"})
}

func (c *Client) holdState(ctx context.Context, id string, call *call) (HoldState, error) {
	var found HoldState
	if _, _, err := parseHold(id); err != nil {
		return found, err
	}
	call.path = c.path + "/holds/" + id
	call.read = func(text []byte) error {
		o := objectOf(text)
		found = o.hold(c.namespace)
		o.must(found.ID == id, "it is about another hold")
		return o.err
	}
	err := c.do(ctx, call)
	return found, err
}

// Holds returns the open holds of a counter, those that expire first. It takes [Limit].
func (c *Client) Holds(counter string, opts ...Option) *Pages[HoldState] {
	if err := checkName(counter); err != nil {
		return &Pages[HoldState]{err: err}
	}
	query := url.Values{"counter": {counter}}
	return pagesOf(c, opts, "holds", c.path+"/holds", query, "holds", func(text []byte) (HoldState, error) {
		o := objectOf(text)
		found := o.hold(c.namespace)
		return found, o.err
	})
}

// holdID returns the id of the hold of a counter under a token, as the service makes it.
func holdID(token Token, counter string) string {
	data := binary.BigEndian.AppendUint64(nil, uint64(token.timeUS))
	data = append(append(data, token.nonce[:]...), counter...)
	return base64.RawURLEncoding.EncodeToString(data)
}

// parseHold returns what [holdID] made id of.
func parseHold(id string) (Token, string, error) {
	bad := invalid("%.80q is not the id of a hold; give the id that the hold has", id)
	data, err := base64.RawURLEncoding.DecodeString(id)
	if err != nil || len(data) <= tokenBytes {
		return Token{}, "", bad
	}
	us := binary.BigEndian.Uint64(data)
	token := Token{timeUS: int64(us)}
	copy(token.nonce[:], data[8:])
	counter := string(data[tokenBytes:])
	if us > 1<<62 || token.Time().Year() > 9999 || checkName(counter) != nil || holdID(token, counter) != id {
		return Token{}, "", bad
	}
	return token, counter, nil
}

// as returns what reads the answer to a call that leaves a hold in state; a settled one with the amount asked for.
func (h *HoldCount) as(state string) reader {
	return func(text []byte, asked asked) error {
		o := objectOf(text)
		*h = HoldCount{HoldState: o.hold(asked.namespace)}
		h.Count, h.Held, h.AsOf = o.integer("count"), o.integer("held"), o.time("as_of")
		item := asked.items[0]
		o.must(h.State == state && h.Counter == item.Counter, "it is about another hold")
		if token, isToken := asked.credential.(Token); isToken {
			o.must(h.ID == holdID(token, item.Counter), "it is about another hold")
		}
		o.must(state != stateOpen || h.Amount == item.Delta, "it is about another amount")
		o.must(state != stateSettled || h.Settled == item.Delta, "it is about another amount")
		return o.err
	}
}

// hold reads a hold of the namespace.
func (o *object) hold(namespace string) HoldState {
	found := HoldState{ID: o.text("hold"), Counter: o.text("counter"), State: o.text("state")}
	o.read("amount", &found.Amount)
	_, counter, err := parseHold(found.ID)
	isSo := err == nil && counter == found.Counter && o.text("namespace") == namespace
	o.must(isSo, "it is about another hold")
	switch found.State {
	case stateOpen:
		found.ExpiresAt = o.time("expires_at")
	case stateSettled:
		o.read("settled", &found.Settled)
		fallthrough
	case stateReleased, stateExpired:
		found.EndedAt = o.time("ended_at")
	default:
		o.must(false, "its state is unknown")
	}
	if o.has("over") {
		o.read("over", &found.Over)
	}
	return found
}

// detached returns a context with the values of ctx that does not end with it; but if ctx has ended, soon.
func (c *Client) detached(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Err() != nil {
		return context.WithTimeout(withoutEnd{ctx}, c.config.AttemptTimeout)
	}
	return context.WithCancel(withoutEnd{ctx})
}

// withoutEnd is a context that never ends.
type withoutEnd struct{ context.Context }

func (withoutEnd) Deadline() (time.Time, bool) { return time.Time{}, false }
func (withoutEnd) Done() <-chan struct{}       { return nil }
func (withoutEnd) Err() error                  { return nil }
