// Command conformance runs commands of ../../../conformance/README.md with this client.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"

	"distributed-counter.example/clients/go/counter"
)

const atOnceMax = 32

type command struct {
	ID           json.RawMessage `json:"id"`
	Do           string          `json:"do"`
	Counter      string          `json:"counter"`
	Delta        string          `json:"delta"`
	Amount       string          `json:"amount"`
	ExpiresIn    string          `json:"expires_in"`
	Hold         string          `json:"hold"`
	AtLeast      *string         `json:"at_least"`
	AtMost       *string         `json:"at_most"`
	Items        []item          `json:"items"`
	Token        *counter.Token  `json:"token"`
	Key          *string         `json:"key"`
	MaxStaleness *string         `json:"max_staleness"`

	Counters []string         `json:"counters"`
	Prefix   string           `json:"prefix"`
	Order    string           `json:"order"`
	Limit    *int             `json:"limit"`
	From     string           `json:"from"`
	To       string           `json:"to"`
	TZ       string           `json:"tz"`
	Step     string           `json:"step"`
	Span     string           `json:"span"`
	Until    string           `json:"until"`
	Number   int              `json:"number"`
	Settings counter.Settings `json:"settings"`

	Unfinished string `json:"unfinished"`
	Text       string `json:"text"`
	Label      string `json:"label"`
}

type item struct {
	Counter string  `json:"counter"`
	Delta   string  `json:"delta"`
	AtLeast *string `json:"at_least"`
	AtMost  *string `json:"at_most"`
}

type outcome map[string]any

// bounds adds the bounds that are not nil.
func (o outcome) bounds(atLeast, atMost *int64) {
	if atLeast != nil {
		o["at_least"] = fmt.Sprint(*atLeast)
	}
	if atMost != nil {
		o["at_most"] = fmt.Sprint(*atMost)
	}
}

func main() {
	var config counter.Config
	flag.StringVar(&config.URL, "url", "", "base URL of the service")
	flag.StringVar(&config.Namespace, "namespace", "", "its namespace")
	keyFile := flag.String("api-key-file", "", "file with an API key")
	flag.DurationVar(&config.Timeout, "timeout", 0, "deadline of each call")
	flag.DurationVar(&config.AttemptTimeout, "attempt-timeout", 0, "limit on one attempt")
	flag.DurationVar(&config.BackoffFirst, "backoff-first", 0, "first bound of the pauses")
	flag.DurationVar(&config.BackoffMax, "backoff-max", 0, "last bound of the pauses")
	flag.Float64Var(&config.Retries, "retries", 0, "size of the retry budget")
	flag.Parse()
	if *keyFile != "" {
		key, err := os.ReadFile(*keyFile)
		must(err)
		config.APIKey = string(key)
	}
	client, err := counter.New(config)
	must(err)
	defer client.Close()

	var running sync.WaitGroup
	var writing sync.Mutex
	slots := make(chan struct{}, atOnceMax)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := append([]byte{}, lines.Bytes()...)
		slots <- struct{}{}
		running.Add(1)
		go func() {
			defer running.Done()
			text := answer(client, line)
			writing.Lock()
			defer writing.Unlock()
			_, err := os.Stdout.Write(append(text, '\n'))
			must(err)
			<-slots
		}()
	}
	must(lines.Err())
	running.Wait()
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}

func answer(client *counter.Client, line []byte) []byte {
	var c command
	must(json.Unmarshal(line, &c))
	found, err := c.run(client)
	if err != nil {
		found = outcomeOf(err)
	} else if found["outcome"] == nil {
		found["outcome"] = "done"
	}
	found["id"] = c.ID
	text, err := json.Marshal(found)
	must(err)
	return text
}

func (c command) run(client *counter.Client) (outcome, error) {
	ctx := context.Background()
	credential, err := c.credential()
	if err != nil {
		return nil, err
	}
	var opts []counter.Option
	if credential != nil {
		opts = append(opts, counter.WithCredential(credential))
	}
	switch c.Do {
	case "add", "add_and_get":
		return c.add(ctx, client, opts)
	case "delete":
		deleted, err := client.Delete(ctx, c.Counter, opts...)
		return outcome{"replayed": deleted.Replayed}, err
	case "clear":
		cleared, err := client.Clear(ctx, c.Counter, opts...)
		return outcome{"replayed": cleared.Replayed}, err
	case "hold", "settle", "release", "extend", "get_hold", "holds":
		return c.hold(ctx, client, opts)
	case "atomic", "batch":
		return c.several(ctx, client, opts)
	case "buffer":
		return c.buffer(ctx, client)
	case "resolve", "cancel":
		unfinished, err := counter.ParseUnfinished(c.Unfinished)
		if err != nil {
			return nil, err
		}
		if c.Do == "cancel" {
			cancelled, err := client.Cancel(ctx, unfinished)
			return outcome{"was_counted": cancelled.WasCounted}, err
		}
		resolved, err := client.Resolve(ctx, unfinished)
		return outcome{"applied": resolved.Applied}, err
	case "new":
		return shown(counter.NewToken()), nil
	case "parse":
		credential, err := counter.ParseCredential(c.Text)
		return shown(credential), err
	case "derive":
		return derived(credential, c.Label)
	}
	return c.read(ctx, client)
}

func (c command) credential() (counter.Credential, error) {
	switch {
	case c.Token != nil:
		return *c.Token, nil
	case c.Key != nil:
		return counter.NewKey(*c.Key)
	}
	return nil, nil
}

func (c command) add(ctx context.Context, client *counter.Client, opts []counter.Option) (outcome, error) {
	one, err := item{c.Counter, c.Delta, c.AtLeast, c.AtMost}.read()
	if err != nil {
		return nil, err
	}
	opts = append(opts, boundsOf(one)...)
	if c.Do == "add" {
		added, err := client.Add(ctx, one.Counter, one.Delta, opts...)
		return outcome{"replayed": added.Replayed}, err
	}
	added, err := client.AddAndGet(ctx, one.Counter, one.Delta, opts...)
	if err != nil {
		return nil, err
	}
	return outcome{"replayed": added.Replayed, "count": added.Count.String()}, nil
}

func boundsOf(one counter.Item) []counter.Option {
	var opts []counter.Option
	if one.AtLeast != nil {
		opts = append(opts, counter.AtLeast(*one.AtLeast))
	}
	if one.AtMost != nil {
		opts = append(opts, counter.AtMost(*one.AtMost))
	}
	return opts
}

func (c command) several(ctx context.Context, client *counter.Client, opts []counter.Option) (outcome, error) {
	items, err := c.items()
	if err != nil {
		return nil, err
	}
	if c.Do == "atomic" {
		added, err := client.Atomic(ctx, items, opts...)
		replayed := []any{}
		for _, each := range added {
			replayed = append(replayed, each.Replayed)
		}
		return outcome{"replayed": replayed}, err
	}
	results, err := client.Batch(ctx, items)
	shown := []outcome{}
	for _, each := range results {
		if each.Err != nil {
			shown = append(shown, outcomeOf(each.Err))
			continue
		}
		shown = append(shown, outcome{"outcome": "done", "replayed": each.Added.Replayed})
	}
	return outcome{"results": shown}, err
}

func (c command) items() ([]counter.Item, error) {
	items := make([]counter.Item, len(c.Items))
	for i, each := range c.Items {
		one, err := each.read()
		if err != nil {
			return nil, err
		}
		items[i] = one
	}
	return items, nil
}

func (i item) read() (counter.Item, error) {
	made := counter.Item{Counter: i.Counter}
	var err error
	if made.Delta, err = number(i.Delta); err != nil {
		return made, err
	}
	if made.AtLeast, err = bound(i.AtLeast); err != nil {
		return made, err
	}
	made.AtMost, err = bound(i.AtMost)
	return made, err
}

func bound(text *string) (*int64, error) {
	if text == nil {
		return nil, nil
	}
	value, err := number(*text)
	return counter.Bound(value), err
}

func derived(credential counter.Credential, label string) (outcome, error) {
	if token, isToken := credential.(counter.Token); isToken {
		found, err := token.Derive(label)
		return shown(found), err
	}
	found, err := credential.(counter.Key).Derive(label)
	return shown(found), err
}

func shown(credential counter.Credential) outcome {
	if key, isKey := credential.(counter.Key); isKey {
		return outcome{"key": key.Text()}
	}
	return outcome{"token": credential}
}

// number reads a delta or a bound. One that no int64 holds cannot be given to the client at all.
func number(text string) (int64, error) {
	delta, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, &counter.RefusedError{Code: "invalid_parameter", Detail: err.Error()}
	}
	return delta, nil
}

func outcomeOf(err error) outcome {
	var refused *counter.RefusedError
	var unknown *counter.UnknownOutcomeError
	var unsent *counter.UnsentError
	var unavailable *counter.UnavailableError
	fmt.Fprintln(os.Stderr, err)
	switch {
	case errors.As(err, &unknown):
		return outcome{"outcome": "unknown", "unfinished": unknown.Unfinished.String()}
	case errors.As(err, &unsent):
		return outcome{"outcome": "unsent", "unfinished": unsent.Unfinished.String()}
	case errors.As(err, &unavailable):
		return outcome{"outcome": "unknown"}
	case errors.As(err, &refused):
		found := outcome{"outcome": "refused", "code": refused.Code, "applied": refused.Applied}
		if reached := (*counter.BoundReachedError)(nil); errors.As(err, &reached) {
			found["counter"], found["count"], found["room"] = reached.Counter, reached.Count.String(), reached.Room.String()
			found.bounds(reached.AtLeast, reached.AtMost)
			if reached.Held != nil {
				found["held"] = reached.Held.String()
			}
		}
		if ended := (*counter.HoldEndedError)(nil); errors.As(err, &ended) && ended.Settled != nil {
			found["settled"] = fmt.Sprint(*ended.Settled)
		}
		return found
	}
	must(err)
	return nil
}
