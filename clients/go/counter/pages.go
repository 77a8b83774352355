package counter

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
)

// pageItemsMax is how many items the service puts on a page at most.
const pageItemsMax = 1_000

// Pages are items that are read page by page:
//
//	names := client.Names("views/")
//	for names.Next(ctx) {
//		fmt.Println(names.Item())
//	}
//	if err := names.Err(); err != nil {
//
// Only one goroutine at a time can use them.
type Pages[T any] struct {
	// read returns a page of at most so many items, and the key of the next one, nil if there is none.
	read func(ctx context.Context, page *string, limit int) ([]T, *string, error)
	// left is how many items may follow; negative without a bound.
	left   int
	page   *string
	isLast bool
	items  []T
	item   T
	err    error
}

// Next moves to the next item, and reads a page if it must. It returns false after the last one, and
// after an error; see [Pages.Err].
func (p *Pages[T]) Next(ctx context.Context) bool {
	for len(p.items) == 0 {
		if p.err != nil || p.isLast || p.left == 0 {
			return false
		}
		limit := pageItemsMax
		if p.left >= 0 && p.left < limit {
			limit = p.left
		}
		p.items, p.page, p.err = p.read(ctx, p.page, limit)
		p.isLast = p.page == nil
	}
	if p.left == 0 {
		return false
	}
	p.left--
	p.item, p.items = p.items[0], p.items[1:]
	return true
}

// Item returns the item that [Pages.Next] moved to.
func (p *Pages[T]) Item() T { return p.item }

// Err returns the error that ended the items before the last one: as of [Client.Get], or nil.
func (p *Pages[T]) Err() error { return p.err }

// Names returns the names of all counters that begin with prefix, in code point order. It takes
// [Limit].
func (c *Client) Names(prefix string, opts ...Option) *Pages[string] {
	return pagesOf(c, opts, "counters", c.path+"/counters", prefixed(prefix), "counters", nameOf)
}

// Counts returns the counters that begin with prefix with their counts, in code point order or with
// [LargestFirst]. Without [MaxStaleness] they are read as the namespace reads; AsOf says what each is
// exact as of. It takes [Limit] too.
func (c *Client) Counts(prefix string, opts ...Option) *Pages[Count] {
	query := prefixed(prefix)
	query.Set("counts", "true")
	if chosenOf(opts).largestFirst {
		query.Set("order", "-count")
	}
	return pagesOf(c, opts, "counters", c.path+"/counters", query, "counts", c.listedCount)
}

// Events returns the events of a counter in a span of time, latest first, as far back as the service
// keeps them. It takes [Limit].
func (c *Client) Events(counter string, span Span, opts ...Option) *Pages[Event] {
	path, err := c.counterPath(counter)
	if err != nil {
		return &Pages[Event]{err: err}
	}
	return pagesOf(c, opts, "events", path+"/events", span.query(), "events", eventOf)
}

func prefixed(prefix string) url.Values {
	query := url.Values{}
	if prefix != "" {
		query.Set("prefix", prefix)
	}
	return query
}

// pagesOf returns the items of the list called name of each page, each read by one.
func pagesOf[T any](c *Client, opts []Option, operation, path string, query url.Values, name string,
	one func([]byte) (T, error)) *Pages[T] {
	chosen := chosenOf(opts)
	made := &Pages[T]{left: -1, err: chosen.bound(query)}
	if chosen.isLimited {
		made.left = chosen.limit
	}
	made.read = func(ctx context.Context, page *string, limit int) (items []T, next *string, err error) {
		query.Set("limit", strconv.Itoa(limit))
		if page != nil {
			query.Set("page", *page)
		}
		err = c.do(ctx, &call{
			method:    http.MethodGet,
			path:      path + queryText(query),
			operation: operation,
			hasMany:   true,
			read: func(text []byte) (err error) {
				o := objectOf(text)
				if items, err = listOf(o, name, one); err == nil {
					next = o.page()
				}
				return o.err
			},
		})
		return items, next, err
	}
	return made
}
