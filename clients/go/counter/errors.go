package counter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"
)

// A RefusedError is a definite refusal: this call counted nothing, and no retry of it will. The
// service refused it, or this package did because an argument is out of its bounds.
type RefusedError struct {
	// Code is the problem's code, such as namespace_unknown; see the page /problems of the service.
	Code string
	// Detail names the value, the bound and the fix.
	Detail string
	// Status is the status of the answer, and 0 if nothing was sent.
	Status int
	// Applied is false if the token counts never, and nil if this answer does not know whether
	// another call counted it.
	Applied *bool
	// Field is the part of the request that is wrong, and empty if the service names none.
	Field string
	// why is nil, or what a bound_reached or the end of a hold says.
	why error
}

// ErrTokenCancelled is what [errors.Is] finds in the [RefusedError] of an add whose token was cancelled. The
// add does not count and never will.
var ErrTokenCancelled = errors.New("the token was cancelled")

// Is is whether target is [ErrTokenCancelled], and this the refusal of such an add.
func (e *RefusedError) Is(target error) bool {
	return target == ErrTokenCancelled && e.Code == codeCancelled
}

// Error returns code and detail.
func (e *RefusedError) Error() string { return "counter: " + e.Code + ": " + e.Detail }

// Unwrap returns the [BoundReachedError] of a refusal because of a bound, the [HoldEndedError] of one because a hold
// has ended, and nil of any other.
func (e *RefusedError) Unwrap() error { return e.why }

// A BoundReachedError is why an add was refused because of a bound: it does not count and never will, though there
// may be room later. [errors.As] finds it in a [RefusedError] with the code bound_reached.
type BoundReachedError struct {
	Counter string
	// Count is the count that decided, without the add; Room is the largest amount that could have been added, or
	// taken away, instead.
	Count, Room *big.Int
	// Held is what open holds that go the same way reserved, and nil if they reserved nothing.
	Held *big.Int
	// AtLeast or AtMost is the bound that was reached; the other one is nil.
	AtLeast, AtMost *int64
}

// Error says how much room there was.
func (e *BoundReachedError) Error() string {
	name, bound := "at least", e.AtLeast
	if e.AtMost != nil {
		name, bound = "at most", e.AtMost
	}
	return fmt.Sprintf("counter: %q was %d, and %s %d is allowed: there was room for %d", e.Counter, e.Count, name, *bound, e.Room)
}

// reachedOf reads a bound_reached. It returns nil if that does not say all.
func reachedOf(body []byte) *BoundReachedError {
	o := objectOf(body)
	found := &BoundReachedError{Counter: o.text("counter"), Count: o.integer("count"), Room: o.integer("room")}
	found.Held = o.optional("held")
	found.AtLeast, found.AtMost = o.reached()
	if o.err != nil {
		return nil
	}
	return found
}

// A HoldEndedError is why a call about a hold was refused: it has ended otherwise, or the hold of a credential has
// ended before. [errors.As] finds it in a [RefusedError] with the code hold_settled, hold_released or hold_expired.
type HoldEndedError struct {
	// State is settled, released or expired. What was done under a hold that was not settled is counted by an add
	// without a hold.
	State string
	// Settled is what counts, of a hold that was settled; nil otherwise, and if the service does not say.
	Settled *int64
}

// Error says how the hold has ended.
func (e *HoldEndedError) Error() string {
	if e.Settled != nil {
		return fmt.Sprintf("counter: the hold was settled with %d", *e.Settled)
	}
	return "counter: the end of the hold: " + e.State
}

// endedOf reads the problem of a hold that has ended.
func endedOf(code string, body []byte) *HoldEndedError {
	found := &HoldEndedError{State: strings.TrimPrefix(code, "hold_")}
	if o := objectOf(body); code == codeSettled {
		if found.Settled = o.bound("settled"); o.err != nil {
			found.Settled = nil
		}
	}
	return found
}

// An UnknownOutcomeError says that it is not known whether the add is counted: at most once. Pass
// Unfinished to [Client.Resolve], now or later, in any process; or make the same call again with
// [WithCredential] and its Credential. Of a [Client.Cancel] it says that it is not known whether the add
// is cancelled: pass Unfinished to it again.
type UnknownOutcomeError struct {
	Unfinished Unfinished
	// Err is the error of the last attempt. It is never a [RefusedError], which would be definite.
	Err error
	// isOfCancel is whether it is the end of a cancel.
	isOfCancel bool
}

// Error says why the outcome is not known.
func (e *UnknownOutcomeError) Error() string {
	if errors.Is(e.Err, errTooLate) {
		return fmt.Sprintf("counter: it is not known whether the %s is counted, and it is too late to"+
			" send it again: the service surely honours %v until %s; then a key counts again, and a token"+
			" gets no answer; compare the count with your own records",
			e.Unfinished.Operation, e.Unfinished.Credential, e.Unfinished.Until.Format(timeLayout))
	}
	if e.isOfCancel {
		return fmt.Sprintf("counter: it is not known whether the %s is cancelled; cancel it again: %v",
			e.Unfinished.Operation, e.Err)
	}
	done := "counted"
	switch e.Unfinished.Operation {
	case opHold:
		done = "open"
	case opSettle, opRelease:
		done = "done"
	}
	return fmt.Sprintf("counter: it is not known whether the %s is %s; send it again with the"+
		" same token, or resolve it: %v", e.Unfinished.Operation, done, e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *UnknownOutcomeError) Unwrap() error { return e.Err }

// An UnsentError says that no attempt had a connection, or that those that had one were refused, so
// that this call counted nothing.
type UnsentError struct {
	// Unfinished is what was not counted.
	Unfinished Unfinished
	// Err is the error of the last attempt.
	Err error
	// isOfCancel is whether it is the end of a cancel.
	isOfCancel bool
}

// Error says why nothing was sent.
func (e *UnsentError) Error() string {
	what := e.Unfinished.Operation
	if e.isOfCancel {
		what = "cancel of the " + what
	}
	return fmt.Sprintf("counter: the %s was not sent: %v", what, e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *UnsentError) Unwrap() error { return e.Err }

// An UnavailableError says that a read got no answer in time.
type UnavailableError struct {
	// Err is the error of the last attempt.
	Err error
}

// Error says why there is no answer.
func (e *UnavailableError) Error() string { return "counter: no answer: " + e.Err.Error() }

// Unwrap returns the error of the last attempt.
func (e *UnavailableError) Unwrap() error { return e.Err }

// errTooLate ends a call whose token or key is not honoured until the end of another attempt.
var errTooLate = errors.New("it is too late to send the token or key again")

func invalid(format string, values ...any) *RefusedError {
	return &RefusedError{Code: "invalid_parameter", Detail: fmt.Sprintf(format, values...)}
}

// An Unfinished is an add, a clear, a hold or its end whose outcome is not known: all that [Client.Resolve] and
// [Client.Cancel] need, in any process and any language.
type Unfinished struct {
	// Operation is add, add-and-get, clear, delete, atomic/add, hold, settle or release.
	Operation string
	Namespace string
	// Items has one item, or several for atomic/add. The delta of a clear or a release is 0, that of a hold or a
	// settle its amount.
	Items      []Item
	Credential Credential
	// Until is when the service surely honours the credential; zero if no answer said so. Later a
	// token's outcome is unknown for ever, and a key is a new one.
	Until time.Time
	// ExpiresIn is that of a hold, such as 15m.
	ExpiresIn string
}

// told returns u with Until by how long the service honours a token from its own time, or a key from
// its first attempt, if that is earlier.
func (u Unfinished) told(ttl time.Duration, first time.Time) Unfinished {
	if ttl < 0 {
		return u
	}
	if token, isToken := u.Credential.(Token); isToken {
		first = token.Time()
	}
	if until := first.Add(ttl).UTC(); u.Until.IsZero() || until.Before(u.Until) {
		u.Until = until
	}
	return u
}

// isOver is whether an attempt that may last until end could come too late.
func (u Unfinished) isOver(end time.Time) bool {
	return !u.Until.IsZero() && u.Until.Before(end)
}

// String returns JSON to store, for [ParseUnfinished].
func (u Unfinished) String() string {
	written := wireUnfinished{Operation: u.Operation, Namespace: u.Namespace, ExpiresIn: u.ExpiresIn}
	for _, item := range u.Items {
		written.Items = append(written.Items, wirePair(item))
	}
	if u.Credential != nil {
		written.TokenText = u.Credential.String()
	}
	if !u.Until.IsZero() {
		written.Until = u.Until.UTC().Format(timeLayout)
	}
	return string(toJSON(written))
}

// ParseUnfinished parses the String of an Unfinished. It returns a [RefusedError] for another text.
func ParseUnfinished(text string) (Unfinished, error) {
	var read wireUnfinished
	bad := invalid("%.80q is not an Unfinished in the form that String writes", text)
	if json.Unmarshal([]byte(text), &read) != nil {
		return Unfinished{}, bad
	}
	credential, err := ParseCredential(read.TokenText)
	if err != nil {
		return Unfinished{}, bad
	}
	_, isToken := credential.(Token)
	isKnown, isHold := false, false
	switch read.Operation {
	case opAtomic:
		isKnown = true
	case opAdd, opAddAndGet, opClear, opDelete:
		isKnown = len(read.Items) == 1
	case opHold:
		isKnown, isHold = len(read.Items) == 1, true
	case opSettle, opRelease:
		isKnown = len(read.Items) == 1 && isToken
	}
	if !isKnown || isHold != (read.ExpiresIn != "") {
		return Unfinished{}, bad
	}
	found := Unfinished{Operation: read.Operation, Namespace: read.Namespace, Credential: credential, ExpiresIn: read.ExpiresIn}
	if read.Until != "" {
		if found.Until, err = time.Parse(time.RFC3339, read.Until); err != nil {
			return Unfinished{}, bad
		}
	}
	for _, pair := range read.Items {
		found.Items = append(found.Items, Item(pair))
	}
	return found, nil
}

type wireUnfinished struct {
	Operation string     `json:"operation"`
	Namespace string     `json:"namespace"`
	Items     []wirePair `json:"items"`
	TokenText string     `json:"token_text"`
	Until     string     `json:"until,omitempty"`
	ExpiresIn string     `json:"expires_in,omitempty"`
}

// wirePair is an Item as a list of name and delta, and of its bounds if it has any.
type wirePair Item

func (p wirePair) MarshalJSON() ([]byte, error) {
	written := []any{p.Counter, p.Delta}
	if bounds := boundsOf(Item(p)); bounds != (wireBounds{}) {
		written = append(written, bounds)
	}
	return json.Marshal(written)
}

func (p *wirePair) UnmarshalJSON(text []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(text, &pair); err != nil {
		return err
	}
	if len(pair) != 2 && len(pair) != 3 {
		return errors.New("an item is a list of two or three")
	}
	if len(pair) == 3 {
		var bounds wireBounds
		// One that this client does not know would not be sent.
		known := json.NewDecoder(bytes.NewReader(pair[2]))
		known.DisallowUnknownFields()
		if err := known.Decode(&bounds); err != nil {
			return err
		}
		p.AtLeast, p.AtMost = bounds.AtLeast, bounds.AtMost
	}
	if err := json.Unmarshal(pair[0], &p.Counter); err != nil {
		return err
	}
	return json.Unmarshal(pair[1], &p.Delta)
}
