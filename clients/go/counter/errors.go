package counter

import (
	"encoding/json"
	"errors"
	"fmt"
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
	return fmt.Sprintf("counter: it is not known whether the %s is counted; send it again with the"+
		" same token, or resolve it: %v", e.Unfinished.Operation, e.Err)
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

// An Unfinished is an add or a clear whose outcome is not known: all that [Client.Resolve] and
// [Client.Cancel] need, in any process and any language.
type Unfinished struct {
	// Operation is add, add-and-get, clear, delete or atomic/add.
	Operation string
	Namespace string
	// Items has one item, or several for atomic/add. The delta of a clear is 0.
	Items      []Item
	Credential Credential
	// Until is when the service surely honours the credential; zero if no answer said so. Later a
	// token's outcome is unknown for ever, and a key is a new one.
	Until time.Time
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
	written := wireUnfinished{Operation: u.Operation, Namespace: u.Namespace}
	for _, item := range u.Items {
		written.Items = append(written.Items, wirePair{item.Counter, item.Delta})
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
	several := read.Operation == opAtomic
	one := read.Operation == opAdd || read.Operation == opAddAndGet || read.Operation == opClear ||
		read.Operation == opDelete
	if err != nil || !(several || one) || one && len(read.Items) != 1 {
		return Unfinished{}, bad
	}
	found := Unfinished{Operation: read.Operation, Namespace: read.Namespace, Credential: credential}
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
}

// wirePair is an Item as a list of name and delta.
type wirePair Item

func (p wirePair) MarshalJSON() ([]byte, error) {
	return json.Marshal([2]any{p.Counter, p.Delta})
}

func (p *wirePair) UnmarshalJSON(text []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(text, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return errors.New("an item is a list of two")
	}
	if err := json.Unmarshal(pair[0], &p.Counter); err != nil {
		return err
	}
	return json.Unmarshal(pair[1], &p.Delta)
}
