package counter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

var (
	settled  = status(409, `{"code":"hold_settled","retry":"never","applied":true,"settled":7,"detail":"settled"}`)
	released = status(410, `{"code":"hold_released","retry":"never","applied":false,"detail":"released"}`)
	unknown  = status(404, `{"code":"hold_unknown","retry":"never","applied":null,"detail":"unknown"}`)
)

// asHeld answers what leaves a hold of 50 of counter c in the state that the request asks for.
func asHeld(request *http.Request) (*http.Response, error) {
	text, _ := io.ReadAll(request.Body)
	var body struct {
		Amount int64
		Token  *Token `json:"idempotency_token"`
	}
	if err := json.Unmarshal(text, &body); err != nil {
		return nil, err
	}
	id, parts := "", strings.Split(request.URL.Path, "/")
	state, more := stateOpen, `"expires_at":"2026-01-31T08:30:30.000250Z"`
	switch parts[len(parts)-1] {
	case "holds":
		id = holdID(*body.Token, "c")
	case "settle":
		state, more = stateSettled, fmt.Sprintf(`"ended_at":"2026-01-31T08:30:30.000250Z","settled":%d`, body.Amount)
	case "release":
		state, more = stateReleased, `"ended_at":"2026-01-31T08:30:30.000250Z"`
	}
	if id == "" {
		id = parts[5]
	}
	return status(200, fmt.Sprintf(`{"namespace":"default","counter":"c","hold":%q,"amount":50,"state":%q,%s,`+
		`"count":18446744073709551616,"held":0,"as_of":"2026-01-31T08:15:30.000250Z"}`, id, state, more))(request)
}

func paths(sent *transport) []string {
	var last []string
	for _, each := range sent.paths {
		last = append(last, each[strings.LastIndex(each, "/")+1:])
	}
	return last
}

func TestAHoldIsSettledAndItsDeferredReleaseDoesNothing(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, lost, asHeld, lost, busy, asHeld)
	ctx, cancel := context.WithCancel(context.Background())
	hold, err := client.Hold(ctx, "c", 50, 15*time.Minute, AtMost(1000))
	if err != nil || hold.Began.Count.String() != "18446744073709551616" || hold.Began.ExpiresAt.IsZero() {
		t.Fatal(hold, err)
	}
	if sent.bodies[0] != sent.bodies[1] || !strings.HasPrefix(sent.bodies[0], `{"amount":50,"expires_in":"900s","at_most":1000,"idem`) {
		t.Error(sent.bodies)
	}
	// The work is done: its cost counts, whoever waits.
	cancel()
	found, err := hold.Settle(ctx, 37)
	if err != nil || found.Settled != 37 || found.State != "settled" {
		t.Fatal(found, err)
	}
	if err := hold.Release(ctx); err != nil {
		t.Error(err)
	}
	if got := fmt.Sprint(paths(sent)); got != "[holds holds settle settle settle]" {
		t.Error(got)
	}
}

func TestWithHoldReleasesWhateverTheErrorIs(t *testing.T) {
	failed := errors.New("the model failed")
	for _, end := range []func(*http.Request) (*http.Response, error){asHeld, released, settled, gone} {
		client, sent, _ := newClient(t, Config{}, asHeld, end)
		ctx, cancel := context.WithCancel(context.Background())
		err := client.WithHold(ctx, "c", 50, time.Minute, func(context.Context, *Hold) error {
			cancel()
			return failed
		})
		if err != failed || fmt.Sprint(paths(sent)) != "[holds release]" {
			t.Error(err, paths(sent))
		}
	}
	client, sent, _ := newClient(t, Config{}, asHeld, gone)
	err := client.WithHold(context.Background(), "c", 50, time.Minute, func(context.Context, *Hold) error { return nil })
	if refused := (*RefusedError)(nil); !errors.As(err, &refused) || len(sent.paths) != 2 {
		t.Error(err, paths(sent))
	}
	func() {
		defer func() { _ = recover() }()
		client, sent, _ = newClient(t, Config{}, asHeld)
		_ = client.WithHold(context.Background(), "c", 50, time.Minute, func(context.Context, *Hold) error { panic("no") })
	}()
	if fmt.Sprint(paths(sent)) != "[holds release]" {
		t.Error(paths(sent))
	}
	client, sent, _ = newClient(t, Config{}, reached)
	err = client.WithHold(context.Background(), "c", 50, time.Minute, func(context.Context, *Hold) error { panic("no") })
	if found := (*BoundReachedError)(nil); !errors.As(err, &found) || len(sent.paths) != 1 {
		t.Error(err)
	}
}

func TestASettleThatMayCountIsNotReleased(t *testing.T) {
	client, sent, _ := newClient(t, Config{Retries: -1, RetriesPerSecond: -1}, asHeld, lost)
	ctx := context.Background()
	hold, err := client.Hold(ctx, "c", 50, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_, err = hold.Settle(ctx, 37)
	var found *UnknownOutcomeError
	if !errors.As(err, &found) || !strings.Contains(err.Error(), "whether the settle is done") {
		t.Fatal(err)
	}
	if err := hold.Release(ctx); err != nil || fmt.Sprint(paths(sent)) != "[holds settle]" {
		t.Error(err, paths(sent))
	}
	again, err := ParseUnfinished(found.Unfinished.String())
	if err != nil || again.String() != found.Unfinished.String() {
		t.Fatal(again, err)
	}
	sent.answers = append(sent.answers, asHeld)
	sent.answers = sent.answers[1:]
	if resolved, err := client.Resolve(ctx, again); err != nil || !resolved.Applied {
		t.Error(resolved, err)
	}
	if sent.paths[1] != sent.paths[2] || sent.bodies[1] != sent.bodies[2] {
		t.Error(sent.paths, sent.bodies)
	}
	if _, err := client.Cancel(ctx, again); err == nil || len(sent.paths) != 3 {
		t.Error(err)
	}
	// One that was refused for certain is released.
	client, sent, _ = newClient(t, Config{}, asHeld, unknown, asHeld)
	if hold, err = client.Hold(ctx, "c", 50, time.Minute); err != nil {
		t.Fatal(err)
	}
	if _, err := hold.Settle(ctx, -1); err == nil {
		t.Error("no error")
	}
	if err := hold.Release(ctx); err != nil || fmt.Sprint(paths(sent)) != "[holds settle release]" {
		t.Error(err, paths(sent))
	}
}

func TestTheEndOfAHoldIsDefiniteWhateverCameBefore(t *testing.T) {
	id := holdID(NewToken(), "c")
	for _, before := range [][]func(*http.Request) (*http.Response, error){{}, {lost}} {
		client, _, _ := newClient(t, Config{}, append(before, settled)...)
		_, err := client.ReleaseHold(context.Background(), id)
		var ended *HoldEndedError
		if !errors.As(err, &ended) || ended.State != "settled" || *ended.Settled != 7 {
			t.Error(err)
		}
		client, _, _ = newClient(t, Config{}, append(before, released)...)
		_, err = client.ExtendHold(context.Background(), id, time.Minute)
		if !errors.As(err, &ended) || ended.State != "released" || ended.Settled != nil {
			t.Error(err)
		}
	}
	client, sent, _ := newClient(t, Config{}, asHeld)
	for _, other := range []string{"", "AAAA", id + "=", "a/b"} {
		if _, err := client.GetHold(context.Background(), other); err == nil {
			t.Error(other)
		}
	}
	if len(sent.paths) != 0 {
		t.Error(sent.paths)
	}
}

func TestAnUnfinishedHoldIsResolvedAndCancelled(t *testing.T) {
	client, sent, _ := newClient(t, Config{Retries: -1, RetriesPerSecond: -1}, lost)
	ctx := context.Background()
	_, err := client.Hold(ctx, "c", 50, 15*time.Minute, AtLeast(-9))
	var unsure *UnknownOutcomeError
	if !errors.As(err, &unsure) || unsure.Unfinished.ExpiresIn != "900s" {
		t.Fatal(err)
	}
	again, err := ParseUnfinished(unsure.Unfinished.String())
	if err != nil || again.String() != unsure.Unfinished.String() {
		t.Fatal(again, err)
	}
	_, _ = client.Resolve(ctx, again)
	_, _ = client.Cancel(ctx, again)
	if sent.bodies[0] != sent.bodies[1] || strings.Replace(sent.bodies[2], `"operation":"hold",`, "", 1) != sent.bodies[0] {
		t.Error(sent.bodies)
	}
	if fmt.Sprint(paths(sent)) != "[holds holds cancel]" {
		t.Error(paths(sent))
	}
}

// The transport would answer with the end of a second attempt that this client does not know of.
func TestARequestWithAKeyIsRetriedByTheClientAlone(t *testing.T) {
	count := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		count++
		switch count {
		case 1:
			_, _ = io.WriteString(w, `{"namespaces":[]}`)
		case 2:
			connection, _, _ := w.(http.Hijacker).Hijack()
			connection.Close()
		default:
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code":"namespace_unknown","retry":"never","applied":null,"detail":"gone"}`)
		}
	}))
	defer server.Close()
	client, err := New(Config{URL: server.URL, BackoffFirst: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Namespaces(context.Background()); err != nil {
		t.Fatal(err)
	}
	key, _ := NewKey("order-123")
	_, err = client.Add(context.Background(), "c", 1, WithCredential(key))
	if unsure := (*UnknownOutcomeError)(nil); !errors.As(err, &unsure) || count != 3 {
		t.Error(err, count)
	}
}
