package counter

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
)

const reachedText = `{"code":"bound_reached","retry":"never","applied":false,"counter":"c","count":-18446744073709551616,` +
	`"at_least":-9,"room":0,"detail":"no room"}`

var reached = status(409, reachedText)

func TestARefusalBecauseOfABoundIsDefiniteWhateverCameBefore(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, lost, busy, reached)
	_, err := client.AddAndGet(context.Background(), "c", -1, AtLeast(-9), AtMost(9))
	var refused *RefusedError
	var found *BoundReachedError
	if !errors.As(err, &refused) || !isFalse(refused.Applied) || !errors.As(err, &found) {
		t.Fatal(err)
	}
	if found.Counter != "c" || found.Count.String() != "-18446744073709551616" || found.Room.Sign() != 0 ||
		*found.AtLeast != -9 || found.AtMost != nil {
		t.Error(found)
	}
	if !strings.Contains(found.Error(), `"c" was -18446744073709551616, and at least -9 is allowed`) {
		t.Error(found)
	}
	if len(sent.bodies) != 3 || sent.bodies[0] != sent.bodies[2] || !strings.Contains(sent.bodies[2], `"delta":-1,"at_least":-9,"at_most":9,`) {
		t.Error(sent.bodies)
	}
	client, _, _ = newClient(t, Config{}, gone)
	if _, err := client.Add(context.Background(), "c", 1); errors.As(err, &found) {
		t.Error(err)
	}
	client, _, _ = newClient(t, Config{}, status(409, strings.Replace(reachedText, "-9", `"-9"`, 1)))
	if _, err := client.Add(context.Background(), "c", 1); errors.As(err, &found) || !errors.As(err, &refused) {
		t.Error(err)
	}
}

func TestTheItemsOfABatchHaveBoundsAndARefusedOneLeavesTheOthers(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, lost, func(request *http.Request) (*http.Response, error) {
		answer, err := added(request)
		if err != nil {
			return nil, err
		}
		var body struct{ Results []json.RawMessage }
		if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
			return nil, err
		}
		return status(200, `{"results":[`+reachedText+`,`+string(body.Results[1])+`]}`)(request)
	})
	items := []Item{{Counter: "c", Delta: -1, AtLeast: Bound(0)}, {Counter: "d", Delta: 1}}
	results, err := client.Batch(context.Background(), items)
	var found *BoundReachedError
	if err != nil || !errors.As(results[0].Err, &found) || results[1].Err != nil {
		t.Fatal(results, err)
	}
	if sent.bodies[0] != sent.bodies[1] || strings.Count(sent.bodies[0], "at_") != 1 || !strings.Contains(sent.bodies[0], `"at_least":0,`) {
		t.Error(sent.bodies)
	}
}

func TestAnUnfinishedAddKeepsItsBounds(t *testing.T) {
	client, sent, _ := newClient(t, Config{Retries: -1, RetriesPerSecond: -1}, lost)
	items := []Item{{Counter: "c", Delta: 3, AtMost: Bound(9)}, {Counter: "d", Delta: 1}}
	_, err := client.Atomic(context.Background(), items)
	var unknown *UnknownOutcomeError
	if !errors.As(err, &unknown) {
		t.Fatal(err)
	}
	text := unknown.Unfinished.String()
	if !strings.Contains(text, `"items":[["c",3,{"at_most":9}],["d",1]]`) {
		t.Error(text)
	}
	again, err := ParseUnfinished(text)
	if err != nil || again.String() != text {
		t.Error(again, err)
	}
	_, _ = client.Resolve(context.Background(), again)
	_, _ = client.Cancel(context.Background(), again)
	if sent.bodies[0] != sent.bodies[1] || sent.bodies[0] != sent.bodies[2] {
		t.Error(sent.bodies)
	}
	for _, item := range []string{`["c",3,9]`, `["c",3,{"most":9}]`, `["c",3,{"at_most":1.5}]`, `["c",3,{},1]`} {
		if _, err := ParseUnfinished(strings.Replace(text, `["c",3,{"at_most":9}]`, item, 1)); err == nil {
			t.Error(item)
		}
	}
}

func TestBoundsThatNoCallHasAreRefused(t *testing.T) {
	client, sent, _ := newClient(t, Config{}, added)
	ctx := context.Background()
	_, none := client.Add(ctx, "c", 1, AtLeast(2), AtMost(1))
	_, batch := client.Batch(ctx, []Item{{Counter: "c", Delta: 1, AtLeast: Bound(2), AtMost: Bound(1)}})
	_, clear := client.Clear(ctx, "c", AtLeast(0))
	_, atomic := client.Atomic(ctx, []Item{{Counter: "c", Delta: 1}}, AtMost(9))
	for _, err := range []error{none, batch, clear, atomic} {
		if refused := (*RefusedError)(nil); !errors.As(err, &refused) || refused.Code != "invalid_parameter" {
			t.Error(err)
		}
	}
	if len(sent.bodies) != 0 {
		t.Error(sent.bodies)
	}
}
