package counter

import (
	"context"
	"net/http"
	"time"
)

const (
	bodyBytesMax = 1 << 20
	// Bytes of a body that are left for its items.
	itemsBytesMax = bodyBytesMax - 64
)

// A Result is the outcome of one item of a batch. Err is nil, or an error as of [Client.Add].
type Result struct {
	Added Added
	Err   error
}

// Batch makes 1 to 1,000 adds, each under a token of its own, and returns their results in order.
// The items do not affect each other. The error is a [RefusedError] for items out of their bounds:
// then nothing was sent.
func (c *Client) Batch(ctx context.Context, items []Item) ([]Result, error) {
	if err := checkItems(items, batchItemsMax); err != nil {
		return nil, err
	}
	delivery := newDelivery(c, items)
	delivery.run(ctx, c.begin(ctx))
	results := make([]Result, len(items))
	for i, each := range delivery.pending {
		results[i] = delivery.result(each)
	}
	return results, nil
}

// pending is one add of a batch. Its token changes only after the service declared it void.
type pending struct {
	Item
	token Token
	// body is its part of a request.
	body []byte
	// isDone is whether there is a definite answer: failure, or added if that is nil.
	isDone  bool
	added   Added
	failure *failure
	// isUnknown is whether an attempt with this token may have been counted, and isVoid whether the
	// service declared the token void, and the item has no other one yet.
	isUnknown, isVoid bool
}

// end records the end of an attempt: a failure, or a success if f is nil.
func (p *pending) end(f *failure) {
	p.failure = f
	if f == nil {
		p.isDone = true
		return
	}
	p.isVoid = f.voids(p.isUnknown)
	p.isDone = f.next == never && !p.isVoid
	p.isUnknown = p.isUnknown || f.isOpen()
}

// A delivery sends adds until the outcome of each is known, or the deadline passes.
type delivery struct {
	client  *Client
	pending []*pending
	// most is how many items fit into one request.
	most int
	// ttl is the shortest time that the service said it honours a token; negative if it did not.
	ttl time.Duration
	// err ended the delivery before all outcomes were known.
	err error
	// failed is called before each pause of an endless delivery, with its reason.
	failed func(*failure)
}

// newDelivery returns a delivery of items under new tokens.
func newDelivery(client *Client, items []Item) *delivery {
	made := &delivery{client: client, most: batchItemsMax, ttl: -1, failed: func(*failure) {}}
	for _, each := range items {
		made.pending = append(made.pending, &pending{Item: each, token: NewToken()})
	}
	return made
}

func (d *delivery) result(each *pending) Result {
	err, f := d.err, each.failure
	switch {
	case each.isDone && f == nil:
		return Result{Added: each.added}
	case each.isVoid:
		return Result{Err: f.problem}
	case f != nil && (each.isDone || f.isFinal):
		if f.problem != nil && (!each.isUnknown || decides(f.problem)) {
			return Result{Err: f.problem}
		}
		err = f.err
	}
	unfinished := d.unfinished(each)
	return Result{Err: (&call{unfinished: &unfinished}).givenUp(err, each.isUnknown)}
}

func (d *delivery) unfinished(each *pending) Unfinished {
	made := Unfinished{Operation: opAdd, Namespace: d.client.namespace, Items: []Item{each.Item}, Credential: each.token}
	return made.told(d.ttl, time.Time{})
}

// isOver is whether the token of an item may not be honoured until end.
func (d *delivery) isOver(each *pending, end time.Time) bool {
	return d.ttl >= 0 && d.unfinished(each).isOver(end)
}

// giveUp ends the items that may be counted, and whose tokens may not be honoured until end.
func (d *delivery) giveUp(end time.Time) {
	for _, each := range d.pending {
		if !each.isDone && each.isUnknown && d.isOver(each, end) {
			each.isDone, each.failure = true, &failure{err: errTooLate, next: never}
		}
	}
}

func (d *delivery) run(ctx context.Context, schedule *schedule) {
	failures := 0
	for {
		// After the pause, which may be longer than the service accepts a token.
		d.renew(ctx, schedule)
		if d.err = ctx.Err(); d.err != nil {
			return
		}
		timeout := schedule.attemptTime()
		d.giveUp(d.client.clock.Now().Add(timeout))
		chunk := d.chunk()
		if len(chunk) == 0 {
			return
		}
		isTooMuch := d.send(ctx, chunk, timeout, schedule.isEndless)
		schedule.attempts++
		if isTooMuch {
			// The service has lower limits than the defaults.
			d.most = len(chunk) / 2
			continue
		}
		first := shortest(chunk)
		if first == nil {
			failures = 0
			continue
		}
		failures++
		d.failed(first)
		if d.err = schedule.pause(ctx, first, failures); d.err != nil {
			return
		}
	}
}

// chunk returns as many items without an outcome as fit into one request.
func (d *delivery) chunk() []*pending {
	var chunk []*pending
	bytes := 0
	for _, each := range d.pending {
		if each.isDone {
			continue
		}
		each.body = toJSON(wireItem{each.Counter, each.Delta, boundsOf(each.Item), &each.token})
		bytes += len(each.body) + 1
		if len(chunk) == d.most || len(chunk) > 0 && bytes > itemsBytesMax {
			break
		}
		chunk = append(chunk, each)
	}
	return chunk
}

// send sends a chunk and records each result; an endless delivery is never refused as a whole. It
// returns true if the chunk is too large.
func (d *delivery) send(ctx context.Context, chunk []*pending, timeout time.Duration, isEndless bool) bool {
	body := []byte(`{"items":[`)
	for i, each := range chunk {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, each.body...)
	}
	var ends []func()
	sent := &call{
		method:    http.MethodPost,
		path:      d.client.path + "/batch/add",
		operation: "batch/add",
		body:      append(body, "]}"...),
		isWrite:   true,
		hasMany:   true,
		read: func(text []byte) (err error) {
			ends, err = d.read(text, chunk)
			return err
		},
	}
	f := d.client.attempt(ctx, sent, timeout)
	if sent.ttl >= 0 && (d.ttl < 0 || sent.ttl < d.ttl) {
		d.ttl = sent.ttl
	}
	if f == nil {
		for _, end := range ends {
			end()
		}
		return false
	}
	if len(chunk) > 1 && isTooMuch(f.problem) {
		return true
	}
	if isEndless && f.next == never {
		// The refusal may end, such as that of a key that is revoked by mistake.
		f.next, f.isFinal = sameToken, true
	}
	for _, each := range chunk {
		each.end(f)
	}
	return false
}

// isTooMuch is whether the service refused a batch for its size.
func isTooMuch(problem *RefusedError) bool {
	return problem != nil &&
		(problem.Code == "body_too_large" || problem.Code == "invalid_body" && problem.Field == "items")
}

// read returns what records each result of a chunk.
func (d *delivery) read(text []byte, chunk []*pending) ([]func(), error) {
	results, err := resultsOf(text, len(chunk))
	if err != nil {
		return nil, err
	}
	var ends []func()
	for i, each := range chunk {
		each := each
		if f := problemOf(results[i], "", d.client.clock.Now()); f != nil {
			ends = append(ends, func() { each.end(f) })
			continue
		}
		var one Added
		if err := one.read(results[i], asked{d.client.namespace, []Item{each.Item}, each.token}); err != nil {
			return nil, err
		}
		ends = append(ends, func() {
			each.added = one
			each.end(nil)
		})
	}
	return ends, nil
}

// shortest returns the failure of a chunk after which the next attempt comes first, or nil if all
// outcomes are known.
func shortest(chunk []*pending) *failure {
	var first *failure
	for _, each := range chunk {
		if !each.isDone && (first == nil || each.failure.wait < first.wait) {
			first = each.failure
		}
	}
	return first
}

// renew renews the tokens of the next request that are void, and those that are not counted and may
// not be honoured until its end.
func (d *delivery) renew(ctx context.Context, schedule *schedule) {
	end := d.client.clock.Now().Add(schedule.attemptTime())
	var void []*pending
	open := 0
	for _, each := range d.pending {
		if each.isDone {
			continue
		}
		if open++; open > d.most {
			break
		}
		if each.isVoid || !each.isUnknown && d.isOver(each, end) {
			void = append(void, each)
		}
	}
	if len(void) == 0 || ctx.Err() != nil {
		return
	}
	tokens := d.client.freshTokens(ctx, len(void), schedule.attemptTime())
	for i, each := range void {
		each.token, each.isUnknown, each.isVoid, each.failure = tokens[i], false, false, nil
	}
}
