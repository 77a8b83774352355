// Package counter is the client of the distributed counter service. Each add counts exactly once if
// it returns no error, retries included.
//
//	client, err := counter.New(counter.Config{URL: "http://127.0.0.1:8080"})
//	...
//	_, err = client.Add(ctx, "views", 1)
//
// A call makes its idempotency token once and sends it with every attempt. It retries with
// exponential backoff and full jitter until its deadline, within a retry budget that all calls
// share. [Client.Buffer] merges the adds of programs that add often.
//
// The errors of a call differ by what they promise: [RefusedError] and [UnsentError] are definite, this
// call counted nothing; [UnknownOutcomeError] has all that [Client.Resolve] needs; reads return
// [UnavailableError]. Use errors.As to distinguish them.
package counter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	nameCharsMax   = 256
	atomicItemsMax = 100
	batchItemsMax  = 1_000

	opAdd       = "add"
	opAddAndGet = "add-and-get"
	opClear     = "clear"
	opDelete    = "delete"
	opAtomic    = "atomic/add"
	opCancel    = "cancel"
)

var namespaceForm = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,62}$`)

// Config says where the service is, and how patient a client is. Only URL is required: a zero means
// the default, and a negative number none.
type Config struct {
	// URL is the base URL of the service, such as http://127.0.0.1:8080. Several, for processes of
	// the same service, are separated by commas: after an attempt without an answer, or with a
	// status of 500 or more, the client goes on with the next one.
	URL string
	// Namespace is "default" by default.
	Namespace string
	// APIKey is sent with every request, and appears in no error.
	APIKey string
	// Timeout limits a whole call, retries and pauses included: 30 s by default. The deadline of a
	// call's context counts too.
	Timeout time.Duration
	// AttemptTimeout limits one attempt: 5 s by default.
	AttemptTimeout time.Duration
	// The pause before a retry is drawn from 0 to BackoffFirst * 2^n after n attempts, or to
	// BackoffMax if that is less: 50 ms and 5 s by default.
	BackoffFirst, BackoffMax time.Duration
	// Retries is the size of the retry budget that all calls share, RetriesPerSecond what it
	// regains a second, and RetriesPerCall with each call: 20, 1 and 0.2 by default. The budget
	// limits the load during an outage.
	Retries, RetriesPerSecond, RetriesPerCall float64
	// Transport sends the requests; by default one like http.DefaultTransport, with bounded
	// response headers.
	Transport http.RoundTripper
}

// A Client counts in one namespace. It is safe for concurrent use; make one, and share it.
type Client struct {
	namespace string
	// bases are the base URLs; turn modulo their number says which one is next.
	bases []string
	turn  *atomic.Uint32
	// path is that of the namespace.
	path string
	http *http.Client
	// apiKey is a function, so that no format prints the key.
	apiKey func() string
	config Config
	budget *budget
	clock  clock
}

// New returns a client. It sends nothing. It returns a [RefusedError] for a value out of its bounds.
func New(config Config) (*Client, error) {
	if config.Namespace == "" {
		config.Namespace = "default"
	}
	if !namespaceForm.MatchString(config.Namespace) {
		return nil, invalid("the namespace is %.80q; its name begins with a lower-case letter, and"+
			" has up to 63 lower-case letters, digits, - and _", config.Namespace)
	}
	var bases []string
	for _, each := range strings.Split(config.URL, ",") {
		base, err := checkURL(strings.TrimSpace(each))
		if err != nil {
			return nil, err
		}
		bases = append(bases, base)
	}
	key := strings.TrimSpace(config.APIKey)
	for i := 0; i < len(key); i++ {
		if key[i] <= ' ' || key[i] > '~' {
			return nil, invalid("the API key of %d characters has invalid characters: give it as"+
				" counter key create printed it", len(key))
		}
	}
	config.APIKey = ""
	for _, each := range []struct {
		value *time.Duration
		usual time.Duration
	}{
		{&config.Timeout, 30 * time.Second},
		{&config.AttemptTimeout, 5 * time.Second},
		{&config.BackoffFirst, 50 * time.Millisecond},
		{&config.BackoffMax, 5 * time.Second},
	} {
		if *each.value < 0 {
			return nil, invalid("a duration of the configuration is %v; it must be over 0, or 0 for"+
				" %v", *each.value, each.usual)
		}
		if *each.value == 0 {
			*each.value = each.usual
		}
	}
	now := realClock{}
	return &Client{
		namespace: config.Namespace,
		bases:     bases,
		turn:      new(atomic.Uint32),
		path:      "/v1/namespaces/" + escape(config.Namespace),
		http:      newHTTP(config.Transport),
		apiKey:    func() string { return key },
		config:    config,
		budget: newBudget(usual(config.Retries, 20), usual(config.RetriesPerSecond, 1),
			usual(config.RetriesPerCall, 0.2), now.Now()),
		clock: now,
	}, nil
}

// Close closes the idle connections. A call in flight goes on.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// An Option changes one call.
type Option func(*options)

type options struct {
	credential   Credential
	maxStaleness time.Duration
	isBounded    bool
	limit        int
	isLimited    bool
	largestFirst bool
	until        time.Time
	cancels      bool
	bounds       wireBounds
	expiresIn    string
}

func chosenOf(opts []Option) options {
	var chosen options
	for _, each := range opts {
		each(&chosen)
	}
	return chosen
}

// bound adds the bound of the age of counts to a query. It returns an error if an option of a read is
// out of its bounds.
func (o options) bound(query url.Values) error {
	if o.isLimited && o.limit < 1 {
		return invalid("the limit is %d; it must be at least 1", o.limit)
	}
	if o.isBounded {
		if o.maxStaleness < 0 {
			return invalid("the staleness is %v; it must be at least 0", o.maxStaleness)
		}
		query.Set("max_staleness", durationText(o.maxStaleness))
	}
	return nil
}

// until ends a call that resolves.
func until(moment time.Time) Option { return func(o *options) { o.until = moment } }

// cancels makes the call the cancel of itself.
func cancels(o *options) { o.cancels = true }

// lasts says how long a hold lasts.
func lasts(expiresIn string) Option { return func(o *options) { o.expiresIn = expiresIn } }

// WithCredential makes the call under a token or key of the program, for example to finish an add of
// another process. Without it, an add makes a new token.
func WithCredential(credential Credential) Option {
	return func(o *options) { o.credential = credential }
}

// AtLeast makes [Client.Add], [Client.AddAndGet] and [Client.Hold] refuse what would take the count below bound,
// with open holds that go the same way, now and for every retry. It is a part of what the token was used for.
func AtLeast(bound int64) Option { return func(o *options) { o.bounds.AtLeast = &bound } }

// AtMost does so if the count would be above bound.
func AtMost(bound int64) Option { return func(o *options) { o.bounds.AtMost = &bound } }

// MaxStaleness bounds the age of the instant that counts are exact as of: 0 is accurate. Without it
// the namespace's setting counts.
func MaxStaleness(age time.Duration) Option {
	return func(o *options) { o.maxStaleness, o.isBounded = age, true }
}

// Limit bounds the number of items of [Pages].
func Limit(items int) Option {
	return func(o *options) { o.limit, o.isLimited = items, true }
}

// LargestFirst makes [Client.Counts] begin with the largest counts. At most 10,000 counters may have
// the prefix then.
func LargestFirst() Option {
	return func(o *options) { o.largestFirst = true }
}

// An Item is a counter and what to add to it.
type Item struct {
	Counter string
	Delta   int64
	// AtLeast and AtMost are the bounds that the add keeps, such as Bound(9); nil is none.
	AtLeast, AtMost *int64
}

// Bound returns a bound of an [Item].
func Bound(value int64) *int64 { return &value }

// Added is an add that is counted once.
type Added struct {
	Counter   string
	Delta     int64
	EventTime time.Time
	// Replayed is whether the add was counted before, and nil if the store cannot know.
	Replayed *bool
	// RetrySafe is false in a BEST_EFFORT namespace, where a retry may count twice.
	RetrySafe bool
}

// AddedCount is an add, and the count that includes it.
type AddedCount struct {
	Added
	// Count has no bound. It is exact as of AsOf.
	Count *big.Int
	AsOf  time.Time
}

// Cleared is a counter that is 0 as of EventTime.
type Cleared struct {
	Counter   string
	EventTime time.Time
	// Replayed is whether it was cleared before, and nil if the store cannot know.
	Replayed *bool
}

// Count is a count, exact as of AsOf. It has no bound.
type Count struct {
	Counter string
	Count   *big.Int
	AsOf    time.Time
	// Accuracy is accurate, eventual or best_effort.
	Accuracy string
	// Held is what open holds of positive amounts reserve, and HeldDown what those of negative ones do: of an accurate
	// count; others have 0.
	Held, HeldDown *big.Int
}

// Resolved is the outcome of an add: it is counted, or never will be.
type Resolved struct {
	Applied bool
	// Detail says why it was not applied; an add with a new token is safe then.
	Detail string
}

// Cancelled is an add or a clear that counts nothing and never will; the same for every retry.
type Cancelled struct {
	// WasCounted is whether it was counted before.
	WasCounted bool
	EventTime  time.Time
}

// Add adds delta to the counter, once per credential. With [AtLeast] or [AtMost], and in a namespace with bounds,
// it may return a [RefusedError] that is a [BoundReachedError].
func (c *Client) Add(ctx context.Context, counter string, delta int64, opts ...Option) (Added, error) {
	var found Added
	err := c.tokened(ctx, opAdd, []Item{{Counter: counter, Delta: delta}}, opts, found.read)
	return found, err
}

// AddAndGet adds as [Client.Add] does, and returns the count that includes the add.
func (c *Client) AddAndGet(ctx context.Context, counter string, delta int64, opts ...Option) (AddedCount, error) {
	var found AddedCount
	err := c.tokened(ctx, opAddAndGet, []Item{{Counter: counter, Delta: delta}}, opts, found.read)
	return found, err
}

// Clear sets the counter to 0 as of the token's time. Adds with a time up to then are erased even if
// they arrive later.
func (c *Client) Clear(ctx context.Context, counter string, opts ...Option) (Cleared, error) {
	var found Cleared
	err := c.tokened(ctx, opClear, []Item{{Counter: counter}}, opts, found.read)
	return found, err
}

// Delete clears the counter, and takes its name off the list until a later add. Tokens keep their
// answers, and later adds count from 0.
func (c *Client) Delete(ctx context.Context, counter string, opts ...Option) (Cleared, error) {
	var found Cleared
	err := c.tokened(ctx, opDelete, []Item{{Counter: counter}}, opts, found.read)
	return found, err
}

// Atomic makes 1 to 100 adds under one credential: either all are counted or none, also if a bound of one of them
// is reached.
func (c *Client) Atomic(ctx context.Context, items []Item, opts ...Option) ([]Added, error) {
	var found addeds
	if err := c.tokened(ctx, opAtomic, items, opts, found.read); err != nil {
		return nil, err
	}
	return found, nil
}

// Resolve finds out whether an unfinished add is counted, or a hold is open, settled or released. It sends the same request again. If the
// token is young, this counts the add if it was not counted yet; otherwise the service looks it up.
// A key is known only for the namespace's key_ttl: resolved later, it counts again.
func (c *Client) Resolve(ctx context.Context, unfinished Unfinished) (Resolved, error) {
	err := c.again(ctx, unfinished, readerOf(unfinished.Operation))
	var refused *RefusedError
	if errors.As(err, &refused) && refused.Code == codeTooOld && isFalse(refused.Applied) {
		return Resolved{Detail: refused.Detail}, nil
	}
	return Resolved{Applied: err == nil}, err
}

// Cancel cancels an add, a clear or a hold: it counts nothing from now on, whether it was counted, is in flight
// or never arrives. A retry returns the same. Of an add that is not in an error, give Items and Credential;
// Operation is add, and Namespace the client's, if they are empty. A key is known only for the namespace's
// key_ttl: a later cancel leaves the add counted.
//
// A [RefusedError] with the code token_conflict says that the credential was used with other items, and an
// [UnknownOutcomeError] that it is not known whether the add is cancelled: cancel it again.
func (c *Client) Cancel(ctx context.Context, unfinished Unfinished) (Cancelled, error) {
	if unfinished.Operation == "" {
		unfinished.Operation = opAdd
	}
	if unfinished.Namespace == "" {
		unfinished.Namespace = c.namespace
	}
	var found Cancelled
	err := c.again(ctx, unfinished, found.read, cancels)
	return found, err
}

// again sends an unfinished call again, or cancels it.
func (c *Client) again(ctx context.Context, unfinished Unfinished, read reader, opts ...Option) error {
	if unfinished.Namespace != c.namespace {
		return invalid("it was sent to namespace %.80q, and this client is for %q",
			unfinished.Namespace, c.namespace)
	}
	if unfinished.Credential == nil {
		return invalid("the Unfinished has no credential: take it from an error")
	}
	opts = append(opts, WithCredential(unfinished.Credential), until(unfinished.Until), lasts(unfinished.ExpiresIn))
	return c.tokened(ctx, unfinished.Operation, unfinished.Items, opts, read)
}

// tokened makes an add or a clear, and reads its answer.
func (c *Client) tokened(ctx context.Context, operation string, items []Item, opts []Option, read reader) error {
	chosen := chosenOf(opts)
	if key, isKey := chosen.credential.(Key); isKey {
		if _, err := NewKey(key.text); err != nil {
			return err
		}
	}
	if chosen.bounds != (wireBounds{}) {
		if operation != opAdd && operation != opAddAndGet && operation != opHold {
			return invalid("AtLeast and AtMost are options of Add, AddAndGet and Hold; an Item has bounds of its own")
		}
		items[0].AtLeast, items[0].AtMost = chosen.bounds.AtLeast, chosen.bounds.AtMost
	}
	if operation == opSettle || operation == opRelease {
		if chosen.cancels {
			return invalid("a %s cannot be cancelled: correct what was settled with an add", operation)
		}
		if _, isToken := chosen.credential.(Token); !isToken {
			return invalid("the credential of a %s is the token of its hold", operation)
		}
	}
	most := 1
	if operation == opAtomic {
		most = atomicItemsMax
	}
	if err := checkItems(items, most); err != nil {
		return err
	}
	made := chosen.credential
	if made == nil {
		made = NewToken()
	}
	call := c.tokenedCall(operation, items, made, read, chosen)
	call.unfinished.Until = chosen.until
	if chosen.credential == nil {
		call.renew = func(token Token) {
			again := c.tokenedCall(operation, items, token, read, chosen)
			call.body, call.unfinished, call.read = again.body, again.unfinished, again.read
		}
	}
	return c.do(ctx, call)
}

func (c *Client) tokenedCall(operation string, items []Item, credential Credential, read reader, chosen options) *call {
	verb, cancels := operation, chosen.cancels
	if cancels {
		verb = opCancel
	}
	made := &call{
		method:     http.MethodPost,
		path:       c.path + "/counters/" + escape(items[0].Counter) + "/" + verb,
		operation:  verb,
		isWrite:    true,
		read:       func(text []byte) error { return read(text, asked{c.namespace, items, credential}) },
		unfinished: &Unfinished{Operation: operation, Namespace: c.namespace, Items: items, Credential: credential, ExpiresIn: chosen.expiresIn},
	}
	var body struct {
		Operation string     `json:"operation,omitempty"`
		Items     []wireItem `json:"items,omitempty"`
		Delta     *int64     `json:"delta,omitempty"`
		Amount    *int64     `json:"amount,omitempty"`
		ExpiresIn string     `json:"expires_in,omitempty"`
		wireBounds
		Token *Token `json:"idempotency_token,omitempty"`
	}
	switch operation {
	case opAtomic:
		made.path, made.hasMany = c.path+"/"+opAtomic, !cancels
		if cancels {
			made.path = c.path + "/atomic/cancel"
		}
		for _, each := range items {
			body.Items = append(body.Items, wireItem{each.Counter, each.Delta, boundsOf(each), nil})
		}
	case opClear, opDelete:
		if cancels {
			body.Operation = operation
		} else if operation == opDelete {
			made.method, made.path = http.MethodDelete, c.path+"/counters/"+escape(items[0].Counter)
		}
	case opAdd, opAddAndGet:
		body.Delta, body.wireBounds = &items[0].Delta, boundsOf(items[0])
	case opHold:
		body.Amount, body.ExpiresIn, body.wireBounds = &items[0].Delta, chosen.expiresIn, boundsOf(items[0])
		if cancels {
			body.Operation = operation
		} else {
			made.path = c.path + "/counters/" + escape(items[0].Counter) + "/holds"
		}
	case opSettle, opRelease:
		if operation == opSettle {
			body.Amount = &items[0].Delta
		}
		made.path = c.path + "/holds/" + holdID(credential.(Token), items[0].Counter) + "/" + operation
		made.body = toJSON(body)
		return made
	}
	switch credential := credential.(type) {
	case Token:
		body.Token = &credential
	case Key:
		made.key = credential.text
	}
	made.body = toJSON(body)
	return made
}

// wireItem is an item of a body.
type wireItem struct {
	Counter string `json:"counter"`
	Delta   int64  `json:"delta"`
	wireBounds
	Token *Token `json:"idempotency_token,omitempty"`
}

// wireBounds are the bounds of an add in a body.
type wireBounds struct {
	AtLeast *int64 `json:"at_least,omitempty"`
	AtMost  *int64 `json:"at_most,omitempty"`
}

func boundsOf(item Item) wireBounds { return wireBounds{item.AtLeast, item.AtMost} }

func checkItems(items []Item, most int) error {
	if len(items) < 1 || len(items) > most {
		return invalid("there are %d items; 1 to %d are allowed", len(items), most)
	}
	for _, each := range items {
		if err := checkName(each.Counter); err != nil {
			return err
		}
		if each.AtLeast != nil && each.AtMost != nil && *each.AtLeast > *each.AtMost {
			return invalid("AtLeast is %d, and AtMost is %d: no count is both", *each.AtLeast, *each.AtMost)
		}
	}
	return nil
}

func checkName(name string) error {
	chars := utf8.RuneCountInString(name)
	if chars < 1 || chars > nameCharsMax {
		return invalid("a counter's name has 1 to %d characters, this one has %d", nameCharsMax, chars)
	}
	if !utf8.ValidString(name) {
		return invalid("the counter's name %.80q is not valid UTF-8", name)
	}
	for _, char := range name {
		if unicode.Is(refused, char) {
			return invalid("a counter's name has no controls, invisible marks, characters for private"+
				" use, or spaces but U+0020; this one holds %U", char)
		}
	}
	return nil
}

// refused are the code points that no counter's name holds, as the service says; unlike the tables of
// the package unicode it is the same with every version of Go.
var refused = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x0000, 0x001f, 1}, {0x007f, 0x00a0, 1}, {0x00ad, 0x00ad, 1}, {0x061c, 0x061c, 1},
		{0x1680, 0x1680, 1}, {0x180e, 0x180e, 1}, {0x2000, 0x200b, 1}, {0x200e, 0x200f, 1},
		{0x2028, 0x202f, 1}, {0x205f, 0x206f, 1}, {0x3000, 0x3000, 1}, {0xd800, 0xf8ff, 1},
		{0xfeff, 0xfeff, 1}, {0xfff9, 0xfffb, 1},
	},
	R32:         []unicode.Range32{{0xe0001, 0xe0001, 1}, {0xf0000, 0x10ffff, 1}},
	LatinOffset: 3,
}

func checkURL(text string) (string, error) {
	read, err := url.Parse(text)
	switch {
	case err != nil:
		// Its text has the whole URL, a password too.
		return "", invalid("the base URL cannot be read; give one such as http://127.0.0.1:8080")
	case read.User != nil:
		return "", invalid("the base URL contains a user or a password, which would appear in errors" +
			" and logs: leave it out")
	case read.Scheme != "http" && read.Scheme != "https":
		return "", invalid("the base URL %.80q must begin with http:// or https://", text)
	case read.Hostname() == "":
		return "", invalid("the base URL %.80q names no host", text)
	case read.RawQuery != "" || read.Fragment != "" || read.ForceQuery:
		return "", invalid("the base URL %.80q has a query or a fragment; give only the part before"+
			" /v1", text)
	}
	if port := read.Port(); port != "" {
		if number, err := strconv.Atoi(port); err != nil || number < 1 || number > 65_535 {
			return "", invalid("the base URL %.80q has the port %s; 1 to 65535 are ports", text, port)
		}
	}
	return strings.TrimRight(text, "/"), nil
}

// escape returns text for one segment of a path. Clients and proxies remove "." and ".." from paths
// if they are not escaped.
func escape(text string) string {
	var escaped strings.Builder
	isDots := text == "." || text == ".."
	for i := 0; i < len(text); i++ {
		char := text[i]
		isAlphanumeric := 'a' <= char && char <= 'z' || 'A' <= char && char <= 'Z' || '0' <= char && char <= '9'
		if isAlphanumeric || strings.IndexByte("-_~", char) >= 0 || char == '.' && !isDots {
			escaped.WriteByte(char)
		} else {
			fmt.Fprintf(&escaped, "%%%02X", char)
		}
	}
	return escaped.String()
}

// durationText returns a duration as the service reads it, rounded up to microseconds.
func durationText(d time.Duration) string {
	us := int64((d + time.Microsecond - 1) / time.Microsecond)
	switch {
	case us%1_000_000 == 0:
		return fmt.Sprintf("%ds", us/1_000_000)
	case us%1_000 == 0:
		return fmt.Sprintf("%dms", us/1_000)
	default:
		return fmt.Sprintf("%dus", us)
	}
}

func toJSON(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic("counter: a value of this package cannot be written as JSON: " + err.Error())
	}
	return text
}

func isFalse(value *bool) bool { return value != nil && !*value }

// usual returns value, the default for 0, and 0 for a negative number.
func usual(value, other float64) float64 {
	switch {
	case value == 0:
		return other
	case value > 0:
		return value
	default:
		return 0
	}
}
