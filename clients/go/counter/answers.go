package counter

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// asked is what the answer to an add or a clear must repeat.
type asked struct {
	namespace  string
	items      []Item
	credential Credential
}

// one returns what the result of one item must repeat.
func (a asked) one(i int) asked { return asked{a.namespace, a.items[i : i+1], a.credential} }

// A reader reads the answer to what was asked. It returns an error for any other answer: a proxy, or
// another service, may answer with any JSON.
type reader func(text []byte, asked asked) error

// readerOf returns what reads the answer to an operation, to learn only whether it succeeded.
func readerOf(operation string) reader {
	switch operation {
	case opAddAndGet:
		return new(AddedCount).read
	case opClear, opDelete:
		return new(Cleared).read
	case opAtomic:
		return new(addeds).read
	case opHold:
		return new(HoldCount).as(stateOpen)
	case opSettle:
		return new(HoldCount).as(stateSettled)
	case opRelease:
		return new(HoldCount).as(stateReleased)
	default:
		return new(Added).read
	}
}

func (a *Added) read(text []byte, asked asked) error {
	o := objectOf(text)
	*a = Added{Counter: asked.items[0].Counter}
	a.EventTime, a.Replayed, a.RetrySafe = o.told(asked)
	o.read("delta", &a.Delta)
	o.must(a.Delta == asked.items[0].Delta, "it is about another delta")
	return o.err
}

func (a *AddedCount) read(text []byte, asked asked) error {
	if err := a.Added.read(text, asked); err != nil {
		return err
	}
	o := objectOf(text)
	a.Count, a.AsOf = o.integer("count"), o.time("as_of")
	return o.err
}

func (c *Cleared) read(text []byte, asked asked) error {
	o := objectOf(text)
	*c = Cleared{Counter: asked.items[0].Counter}
	c.EventTime, c.Replayed, _ = o.told(asked)
	return o.err
}

func (c *Cancelled) read(text []byte, asked asked) error {
	o := objectOf(text)
	isCancelled := false
	*c = Cancelled{EventTime: o.eventTime(asked, true)}
	o.read("was_counted", &c.WasCounted)
	o.read("cancelled", &isCancelled)
	o.must(isCancelled, "it is about something else")
	return o.err
}

func (c *Count) read(text []byte, namespace, counter string) error {
	o := objectOf(text)
	o.about(namespace, counter)
	*c = Count{Counter: counter, Count: o.integer("count"), AsOf: o.time("as_of")}
	c.Accuracy = o.accuracy()
	c.Held, c.HeldDown = o.held("held"), o.held("held_down")
	return o.err
}

// addeds are the results of an atomic add.
type addeds []Added

func (a *addeds) read(text []byte, asked asked) error {
	results, err := resultsOf(text, len(asked.items))
	*a = make(addeds, len(results))
	for i := 0; err == nil && i < len(results); i++ {
		err = (*a)[i].read(results[i], asked.one(i))
	}
	return err
}

// resultsOf returns the results of so many items.
func resultsOf(text []byte, count int) ([]json.RawMessage, error) {
	var results []json.RawMessage
	o := objectOf(text)
	o.read("results", &results)
	o.must(len(results) == count, fmt.Sprintf("%d results for %d items", len(results), count))
	return results, o.err
}

// An object is a JSON object that is read member by member. Names match exactly, as encoding/json
// does only for a map. err is the first fault.
type object struct {
	members map[string]json.RawMessage
	err     error
}

func objectOf(text []byte) *object {
	o := &object{}
	o.err = json.Unmarshal(text, &o.members)
	o.must(o.members != nil, "it is no object")
	return o
}

func (o *object) must(isSo bool, otherwise string) {
	if o.err == nil && !isSo {
		o.err = errors.New(otherwise)
	}
}

// has is whether a member exists; null is one.
func (o *object) has(name string) bool { return o.members[name] != nil }

// isNull is whether a member is null.
func (o *object) isNull(name string) bool { return string(o.members[name]) == "null" }

// read reads a member, which must exist and not be null.
func (o *object) read(name string, found any) {
	o.must(o.has(name) && !o.isNull(name), name+" is missing")
	if o.err == nil {
		o.err = json.Unmarshal(o.members[name], found)
	}
}

func (o *object) text(name string) string {
	var found string
	o.read(name, &found)
	return found
}

func (o *object) time(name string) time.Time {
	text := o.text(name)
	if o.err != nil {
		return time.Time{}
	}
	found, err := parseTime(text)
	o.err = err
	return found.UTC()
}

func (o *object) integer(name string) *big.Int {
	found := new(big.Int)
	o.read(name, found)
	return found
}

// optional reads an integer, nil if the object does not have it.
func (o *object) optional(name string) *big.Int {
	if !o.has(name) {
		return nil
	}
	return o.integer(name)
}

// held reads what is held, 0 if the object does not say it.
func (o *object) held(name string) *big.Int {
	if !o.has(name) {
		return new(big.Int)
	}
	return o.integer(name)
}

// bound reads a bound, nil if the object does not have it.
func (o *object) bound(name string) *int64 {
	if !o.has(name) {
		return nil
	}
	found := new(int64)
	o.read(name, found)
	return found
}

// reached reads the bound that was reached; the other one is nil.
func (o *object) reached() (atLeast, atMost *int64) {
	atLeast, atMost = o.bound("at_least"), o.bound("at_most")
	o.must(atLeast != nil || atMost != nil, "it has no bound")
	return atLeast, atMost
}

func (o *object) accuracy() string {
	found := o.text("accuracy")
	o.must(found == "accurate" || found == "eventual" || found == "best_effort",
		"its accuracy is unknown")
	return found
}

// page returns the key of the next page, or nil if there is none.
func (o *object) page() *string {
	o.must(o.has("next_page"), "next_page is missing")
	if o.isNull("next_page") {
		return nil
	}
	found := o.text("next_page")
	return &found
}

// within returns the object of a member of o, whose fault it has if there is one.
func (o *object) within(text []byte) *object {
	if o.err != nil {
		return o
	}
	return objectOf(text)
}

func (o *object) about(namespace, counter string) {
	isAbout := o.text("namespace") == namespace && o.text("counter") == counter
	o.must(isAbout, "it is about another counter")
}

// told reads what the answers to adds and clears have in common.
func (o *object) told(asked asked) (eventTime time.Time, replayed *bool, retrySafe bool) {
	o.about(asked.namespace, asked.items[0].Counter)
	retrySafe = true
	o.must(o.has("replayed"), "replayed is missing")
	if !o.isNull("replayed") {
		replayed = new(bool)
		o.read("replayed", replayed)
	}
	if o.has("retry_safe") {
		o.read("retry_safe", &retrySafe)
	}
	return o.eventTime(asked, retrySafe), replayed, retrySafe
}

// eventTime reads the token's time: BEST_EFFORT ignores tokens, and the service chooses the time of a key.
func (o *object) eventTime(asked asked, retrySafe bool) time.Time {
	eventTime := o.time("event_time")
	if token, isToken := asked.credential.(Token); isToken && retrySafe {
		o.must(eventTime.Equal(token.Time()), "it is about another token")
	}
	return eventTime
}
