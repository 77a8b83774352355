package counter

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestPagesEndWithTheirError(t *testing.T) {
	first := status(200, `{"counters":["a","b"],"next_page":"b"}`)
	client, sent, _ := newClient(t, Config{}, first, gone)
	names := client.Names("")
	var got []string
	for names.Next(context.Background()) {
		got = append(got, names.Item())
	}
	var refused *RefusedError
	if strings.Join(got, " ") != "a b" || !errors.As(names.Err(), &refused) {
		t.Error(got, names.Err())
	}
	if names.Next(context.Background()) || len(sent.bodies) != 2 {
		t.Error(len(sent.bodies), "requests")
	}
}

func TestAPageIsReadOnlyWhenItIsNeeded(t *testing.T) {
	page := status(200, `{"counters":["a","b"],"next_page":"b"}`)
	client, sent, _ := newClient(t, Config{}, page)
	names := client.Names("", Limit(5))
	if len(sent.bodies) != 0 || !names.Next(context.Background()) || !names.Next(context.Background()) || len(sent.bodies) != 1 {
		t.Error(len(sent.bodies), "requests", names.Err())
	}
	count := 2
	for names.Next(context.Background()) {
		count++
	}
	if count != 5 || len(sent.bodies) != 3 || names.Err() != nil {
		t.Error(count, "names in", len(sent.bodies), "requests", names.Err())
	}
}

func TestOptionsOutOfBoundsAreRefused(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, lost)
	var refused *RefusedError
	for _, each := range []*Pages[Count]{client.Counts("", Limit(0)), client.Counts("", MaxStaleness(-1))} {
		if each.Next(context.Background()) || !errors.As(each.Err(), &refused) {
			t.Error(each.Err())
		}
	}
	if _, err := client.Sum(context.Background(), "", MaxStaleness(-1)); !errors.As(err, &refused) {
		t.Error(err)
	}
	if _, err := client.CreateNamespace(context.Background(), Settings{"counter_type": func() {}}); !errors.As(err, &refused) {
		t.Error(err)
	}
	if len(sent.bodies) != 0 {
		t.Error("a request was sent")
	}
}

const (
	oneCount = "event: count\ndata: {\"namespace\":\"default\",\"counter\":\"c\",\"count\":7," +
		"\"as_of\":\"2026-01-31T08:15:30Z\",\"accuracy\":\"accurate\"}\n\n"
	busyEvent = "event: problem\ndata: {\"code\":\"overloaded\",\"retry\":\"same_token\",\"detail\":\"busy\"}\n\n"
	goneEvent = "event: problem\ndata: {\"code\":\"namespace_unknown\",\"retry\":\"never\",\"detail\":\"gone\"}\n\n"
)

func TestALiveCountGoesOnUntilItsContextEnds(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, lost, busy, status(200, oneCount), status(200, busyEvent+oneCount+oneCount))
	ctx, cancel := context.WithCancel(context.Background())
	counts, failures := 0, 0
	err := client.Live(ctx, "c", func(found Count, err error) {
		var refused *RefusedError
		switch {
		case errors.As(err, &refused):
			t.Error("a temporary failure is no refusal", err)
		case err != nil:
			failures++
		case found.Count.Int64() != 7:
			t.Error(found)
		default:
			counts++
		}
		if counts == 2 {
			cancel()
		}
	})
	var unavailable *UnavailableError
	if !errors.As(err, &unavailable) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if counts != 2 || failures != 1 || len(sent.bodies) != 4 {
		t.Error(counts, "counts,", failures, "failures,", len(sent.bodies), "connections")
	}
	if got := sent.headers[0].Get("Accept"); got != "text/event-stream" {
		t.Error(got)
	}
}

func TestALiveCountEndsWithAPermanentErrorOrAfterSilence(t *testing.T) {
	var refused *RefusedError
	each := func(Count, error) {}
	client, _, _ := newClient(t, Config{}, status(200, oneCount+goneEvent))
	if err := client.Live(context.Background(), "c", each); !errors.As(err, &refused) || refused.Code != "namespace_unknown" {
		t.Error(err)
	}
	client, _, clock := newClient(t, Config{Timeout: 10 * time.Second}, status(200, oneCount), lost)
	begin := clock.now
	err := client.Live(context.Background(), "c", each)
	if !errors.Is(err, io.ErrUnexpectedEOF) || clock.now.Sub(begin) < 10*time.Second {
		t.Error(err, clock.now.Sub(begin))
	}
	client, sent, _ := newClient(t, Config{}, lost)
	if err := client.Live(context.Background(), "", each); !errors.As(err, &refused) || len(sent.bodies) != 0 {
		t.Error(err)
	}
}

func TestAStreamOfSomethingElseIsPacedAndEnds(t *testing.T) {
	client, sent, clock := newClient(t, Config{Timeout: 20 * time.Second, BackoffFirst: time.Second, BackoffMax: time.Hour},
		status(200, oneCount), status(200, "<html>\n\n<p>data: 1\n"))
	begin := clock.now
	err := client.Live(context.Background(), "c", func(Count, error) {})
	var unavailable *UnavailableError
	if !errors.As(err, &unavailable) || clock.now.Sub(begin) < 20*time.Second || len(sent.bodies) > 100 {
		t.Error(err, len(sent.bodies), "connections in", clock.now.Sub(begin))
	}
}

func TestEachCountEndsTheSilence(t *testing.T) {
	late := status(503, `{"code":"overloaded","retry":"same_token","retry_after":8,"detail":"busy"}`)
	client, _, _ := newClient(t, Config{Timeout: 10 * time.Second}, late, status(200, oneCount), late, gone)
	var refused *RefusedError
	if err := client.Live(context.Background(), "c", func(Count, error) {}); !errors.As(err, &refused) {
		t.Error(err)
	}
	client, sent, _ := newClient(t, Config{Timeout: 10 * time.Second}, late, status(200, ":\n"), late, gone)
	if err := client.Live(context.Background(), "c", func(Count, error) {}); !errors.As(err, &refused) {
		t.Error(err, len(sent.bodies))
	}
}

func TestALiveCountLeavesAServerThatIsSilent(t *testing.T) {
	silent := func(request *http.Request) (*http.Response, error) {
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	client, sent, _ := newClient(t, Config{URL: "http://one,http://two", AttemptTimeout: time.Millisecond},
		silent, status(200, oneCount+goneEvent))
	var refused *RefusedError
	if err := client.Live(context.Background(), "c", func(Count, error) {}); !errors.As(err, &refused) {
		t.Error(err)
	}
	if got := strings.Join(sent.hosts, " "); got != "one two" {
		t.Error(got)
	}
}
