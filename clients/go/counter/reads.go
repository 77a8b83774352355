package counter

import (
	"context"
	"encoding/json"
	"errors"
	"math/big"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// A Moment is an instant, or the beginning of the day; the zero Moment is none.
type Moment struct{ text string }

// At returns the instant t, in whole microseconds.
func At(t time.Time) Moment { return Moment{t.UTC().Format(timeLayout)} }

// Today returns the beginning of the day in the time zone of the [Span].
func Today() Moment { return Moment{"today"} }

// A Span is a span of time; To is exclusive. The methods say what a zero From or To means.
type Span struct {
	From, To Moment
	// TZ is a time zone such as Europe/Berlin; UTC if it is empty.
	TZ string
}

func (s Span) query() url.Values {
	query := url.Values{}
	for name, text := range map[string]string{"from": s.From.text, "to": s.To.text, "tz": s.TZ} {
		if text != "" {
			query.Set(name, text)
		}
	}
	return query
}

// Change is how much a count changed in a span of time.
type Change struct {
	Counter  string
	From, To time.Time
	// Count is the count just before To, and Delta its change since From.
	Count, Delta *big.Int
}

// Sum is the sum of several counters.
type Sum struct {
	Sum *big.Int
	// Counters is how many they are.
	Counters int
	// AsOf is up to when every add is in the sum.
	AsOf time.Time
	// Accuracy is accurate if that of each counter is; else eventual or best_effort.
	Accuracy string
}

// Point is the count at the end of a step of a history.
type Point struct {
	Time time.Time
	// Count is the count at Time, and Delta its change since the step began.
	Count, Delta *big.Int
}

// Event is one add or clear of the event log.
type Event struct {
	Time time.Time
	ID   string
	// ItemKey is the rank among the same counter's items of an atomic add; 0 for any other add.
	ItemKey int
	// Delta is 0 for a clear, and for an add that was refused.
	Delta int64
	Clear bool
	// AtLeast and AtMost are the bounds of the add; nil if it has no such bound.
	AtLeast, AtMost *int64
	// Refused says why the add was refused because of a bound; nil if it was not.
	Refused *RefusedAdd
}

// RefusedAdd is an add of the event log that was refused because of a bound.
type RefusedAdd struct {
	// Delta is what it was to add.
	Delta int64
	// Count is the count that decided, of the counter that had no room.
	Count *big.Int
	// AtLeast or AtMost is the bound that was reached; the other one is nil.
	AtLeast, AtMost *int64
}

// Busy is a counter that changes often.
type Busy struct {
	Counter string
	// AddsPerSecond counts clears too.
	AddsPerSecond float64
	Count         *big.Int
}

// Busiest are the busiest counters of [Since, AsOf).
type Busiest struct {
	Since, AsOf time.Time
	// Complete is whether all counters that changed in that time were considered.
	Complete bool
	// Counters has the busiest one first.
	Counters []Busy
}

// Get returns the count of a counter; an unknown one has 0.
func (c *Client) Get(ctx context.Context, counter string, opts ...Option) (Count, error) {
	path, err := c.counterPath(counter)
	query := url.Values{}
	if err == nil {
		err = chosenOf(opts).bound(query)
	}
	if err != nil {
		return Count{}, err
	}
	var found Count
	err = c.do(ctx, &call{
		method:    http.MethodGet,
		path:      path + queryText(query),
		operation: "get",
		read:      func(text []byte) error { return found.read(text, c.namespace, counter) },
	})
	return found, err
}

// GetMany returns the counts of 1 to 1,000 counters, in order. It takes [MaxStaleness].
func (c *Client) GetMany(ctx context.Context, counters []string, opts ...Option) ([]Count, error) {
	for _, each := range counters {
		if err := checkName(each); err != nil {
			return nil, err
		}
	}
	query := url.Values{}
	if err := chosenOf(opts).bound(query); err != nil {
		return nil, err
	}
	body := map[string]any{"counters": counters}
	if query.Has("max_staleness") {
		body["max_staleness"] = query.Get("max_staleness")
	}
	found := make([]Count, len(counters))
	err := c.do(ctx, &call{
		method:    http.MethodPost,
		path:      c.path + "/batch/get",
		operation: "batch/get",
		hasMany:   true,
		body:      toJSON(body),
		read: func(text []byte) error {
			results, err := resultsOf(text, len(counters))
			for i := 0; err == nil && i < len(results); i++ {
				if problem := problemOf(results[i], "", c.clock.Now()); problem != nil {
					return problem
				}
				err = found[i].read(results[i], c.namespace, counters[i])
			}
			return err
		},
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Sum returns the sum of all counters that begin with prefix, at most 10,000. It takes
// [MaxStaleness].
func (c *Client) Sum(ctx context.Context, prefix string, opts ...Option) (Sum, error) {
	query := prefixed(prefix)
	if err := chosenOf(opts).bound(query); err != nil {
		return Sum{}, err
	}
	query.Set("sum", "true")
	query.Set("limit", "1")
	var found Sum
	err := c.many(ctx, "counters", c.path+"/counters"+queryText(query), func(whole *object) {
		var text json.RawMessage
		whole.read("sum", &text)
		o := whole.within(text)
		found = Sum{Sum: o.integer("count"), AsOf: o.time("as_of"), Accuracy: o.accuracy()}
		o.read("counters", &found.Counters)
		whole.err = o.err
	})
	return found, err
}

// Between returns how much the count changed in a span of time, exactly. Both ends must be ends of
// windows of the namespace; without From the span begins with the counter, and without To it ends now.
func (c *Client) Between(ctx context.Context, counter string, span Span) (Change, error) {
	path, err := c.counterPath(counter)
	if err != nil {
		return Change{}, err
	}
	found := Change{Counter: counter}
	err = c.do(ctx, &call{
		method:    http.MethodGet,
		path:      path + queryText(span.query()),
		operation: "get",
		read: func(text []byte) error {
			var count Count
			if err := count.read(text, c.namespace, counter); err != nil {
				return err
			}
			o := objectOf(text)
			found.Count, found.To = count.Count, count.AsOf
			found.From, found.Delta = o.time("from"), o.integer("delta")
			return o.err
		},
	})
	return found, err
}

// History returns the count at the end of each step of a span of time: a duration such as 1m, or day,
// week or month in the span's time zone. Without ends and step it is the last hour in about 60 steps.
func (c *Client) History(ctx context.Context, counter string, span Span, step string) ([]Point, error) {
	path, err := c.counterPath(counter)
	if err != nil {
		return nil, err
	}
	query := span.query()
	if step != "" {
		query.Set("step", step)
	}
	var found []Point
	err = c.many(ctx, "history", path+"/history"+queryText(query), func(o *object) {
		found, _ = listOf(o, "points", pointOf)
	})
	return found, err
}

// Busiest returns the counters, 1 to 100, with the most adds in the last span, at most a minute;
// docs/http.md describes how exact that is.
func (c *Client) Busiest(ctx context.Context, limit int, span time.Duration) (Busiest, error) {
	query := url.Values{"limit": {strconv.Itoa(limit)}, "span": {durationText(span)}}
	var found Busiest
	err := c.many(ctx, "busiest", c.path+"/busiest"+queryText(query), func(o *object) {
		found = Busiest{Since: o.time("since"), AsOf: o.time("as_of")}
		o.read("complete", &found.Complete)
		found.Counters, _ = listOf(o, "counters", busyOf)
	})
	return found, err
}

// Recount makes the next rollup recount the counter's stored past from its events, and returns the
// number of windows.
func (c *Client) Recount(ctx context.Context, counter string) (int, error) {
	path, err := c.counterPath(counter)
	if err != nil {
		return 0, err
	}
	var windows int
	err = c.do(ctx, &call{
		method:    http.MethodPost,
		path:      path + "/recount",
		operation: "recount",
		body:      []byte("{}"),
		read: func(text []byte) error {
			o := objectOf(text)
			o.read("windows", &windows)
			return o.err
		},
	})
	return windows, err
}

// Tokens returns 1 to 1,000 tokens with the service's time, for a machine whose clock is wrong.
func (c *Client) Tokens(ctx context.Context, count int) ([]Token, error) {
	var found []Token
	err := c.do(ctx, tokensCall(count, &found))
	return found, err
}

// tokensCall asks for so many tokens.
func tokensCall(count int, found *[]Token) *call {
	return &call{
		method:    http.MethodPost,
		path:      "/v1/tokens",
		operation: "tokens",
		hasMany:   true,
		body:      toJSON(map[string]int{"count": count}),
		read: func(body []byte) error {
			o := objectOf(body)
			o.read("tokens", found)
			o.must(len(*found) == count, "it has another number of tokens")
			return o.err
		},
	}
}

// many makes a GET whose answer has many items.
func (c *Client) many(ctx context.Context, operation, path string, read func(*object)) error {
	return c.do(ctx, &call{
		method:    http.MethodGet,
		path:      path,
		operation: operation,
		hasMany:   true,
		read: func(text []byte) error {
			o := objectOf(text)
			read(o)
			return o.err
		},
	})
}

func (c *Client) counterPath(counter string) (string, error) {
	return c.path + "/counters/" + escape(counter), checkName(counter)
}

func queryText(query url.Values) string {
	if len(query) == 0 {
		return ""
	}
	return "?" + query.Encode()
}

// listOf returns the items of a list, each read by one. Its error is that of o.
func listOf[T any](o *object, name string, one func([]byte) (T, error)) ([]T, error) {
	var texts []json.RawMessage
	o.read(name, &texts)
	items := make([]T, len(texts))
	for i := 0; o.err == nil && i < len(texts); i++ {
		items[i], o.err = one(texts[i])
	}
	return items, o.err
}

func nameOf(text []byte) (string, error) {
	var name *string
	err := json.Unmarshal(text, &name)
	if err == nil && name == nil {
		err = errors.New("a name is null")
	}
	if err != nil {
		return "", err
	}
	return *name, nil
}

// listedCount reads a count of any counter of the namespace.
func (c *Client) listedCount(text []byte) (Count, error) {
	o := objectOf(text)
	counter := o.text("counter")
	if o.err != nil {
		return Count{}, o.err
	}
	var found Count
	return found, found.read(text, c.namespace, counter)
}

func eventOf(text []byte) (Event, error) {
	o := objectOf(text)
	found := Event{Time: o.time("event_time"), ID: o.text("event_id"),
		AtLeast: o.bound("at_least"), AtMost: o.bound("at_most")}
	o.read("event_item_key", &found.ItemKey)
	if o.has("delta") {
		o.read("delta", &found.Delta)
	}
	if o.has("clear") {
		o.read("clear", &found.Clear)
	}
	if o.has("refused") {
		why := o.within(o.members["refused"])
		found.Refused = &RefusedAdd{Count: why.integer("count")}
		why.read("delta", &found.Refused.Delta)
		found.Refused.AtLeast, found.Refused.AtMost = why.reached()
		o.err = why.err
	}
	return found, o.err
}

func pointOf(text []byte) (Point, error) {
	o := objectOf(text)
	return Point{o.time("time"), o.integer("count"), o.integer("delta")}, o.err
}

func busyOf(text []byte) (Busy, error) {
	o := objectOf(text)
	found := Busy{Counter: o.text("counter"), Count: o.integer("count")}
	o.read("adds_per_s", &found.AddsPerSecond)
	return found, o.err
}
