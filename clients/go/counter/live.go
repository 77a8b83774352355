package counter

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// silenceMax is after how long without a line a stream's connection is dead: the service sends
// something every 15 s.
const silenceMax = 40 * time.Second

// Live calls each with the count of a counter, again whenever it changes, and every few seconds with a
// new AsOf, until ctx ends. It connects again if a connection ends. If the service reports a temporary
// failure, it calls each with that error, and goes on. It returns a permanent error, or the last one if
// the stream is silent for Config.Timeout; an [UnavailableError] with the context's error if ctx ends.
func (c *Client) Live(ctx context.Context, counter string, each func(Count, error)) error {
	path, err := c.counterPath(counter)
	if err != nil {
		return err
	}
	stream := &stream{client: c, counter: counter, each: each, heard: c.clock.Now(),
		call: &call{method: http.MethodGet, path: path + "/live", operation: "live"}}
	for {
		f := stream.connect(ctx)
		pause := jitter(c.config.BackoffFirst)
		if f != nil && ctx.Err() == nil {
			// The wait that the service asks for counts as silence.
			silent := c.clock.Now().Sub(stream.heard) + f.wait
			switch {
			case f.next != sameToken && f.problem != nil:
				return f.problem
			case f.next != sameToken || silent >= c.config.Timeout:
				return stream.call.givenUp(f.err, true)
			}
			stream.failures++
			pause = f.wait + jitter(backoffMax(c.config, stream.failures))
		}
		if err := c.clock.Sleep(ctx, pause); err != nil {
			return &UnavailableError{err}
		}
	}
}

// A stream is the state of a live count across connections.
type stream struct {
	client  *Client
	call    *call
	counter string
	each    func(Count, error)
	// heard is when the last sign of a counter service came, a count, a problem or a comment, and
	// failures how many connections failed since then. isEmpty is whether this one had none.
	heard    time.Time
	failures int
	isEmpty  bool
}

func (s *stream) hear() { s.heard, s.failures, s.isEmpty = s.client.clock.Now(), 0, false }

// connect reads events until the connection ends. It returns nil if it ended as the service ends it.
func (s *stream) connect(caller context.Context) *failure {
	ctx, cancel := context.WithCancel(caller)
	defer cancel()
	patience := time.AfterFunc(s.client.config.AttemptTimeout, cancel)
	defer patience.Stop()
	request, turn, err := s.client.request(ctx, s.call, s.client.config.AttemptTimeout)
	if err != nil {
		return &failure{err: err, next: never}
	}
	request.Header.Set("Accept", "text/event-stream")
	response, err := s.client.http.Do(request)
	if err != nil || isFault(response.StatusCode) {
		s.client.takeTurn(turn)
	}
	if err != nil {
		return unreachable(silence(caller, ctx, err), true)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(response.Body, oneBytesMax))
		return refusal(response, body, s.client.clock.Now())
	}
	lines := bufio.NewScanner(response.Body)
	// With the end of the line.
	lines.Buffer(nil, oneBytesMax+2)
	var event, data string
	s.isEmpty = true
	for {
		patience.Reset(silenceMax)
		if !lines.Scan() || caller.Err() != nil {
			break
		}
		// The program may take its time with a count.
		patience.Stop()
		name, value, isField := strings.Cut(lines.Text(), ":")
		switch name {
		case "":
			if isField {
				s.hear()
			}
		case "event":
			event = strings.TrimSpace(value)
		case "data":
			data += strings.TrimSpace(value)
			if len(data) > oneBytesMax {
				return foreign(response, fmt.Sprintf("an event of more than %d bytes", oneBytesMax), 0)
			}
		}
		if lines.Text() == "" {
			if f := s.dispatch(response, event, data); f != nil {
				return f
			}
			event, data = "", ""
		}
	}
	switch err := lines.Err(); {
	case err == bufio.ErrTooLong:
		return foreign(response, fmt.Sprintf("a line of more than %d bytes", oneBytesMax), 0)
	case err != nil:
		s.client.takeTurn(turn)
		return unreachable(silence(caller, ctx, err), true)
	case s.isEmpty:
		// A page of something else would be read again and again.
		return foreign(response, "a stream without a count", 0)
	}
	return nil
}

// silence returns err, or the reason if only the client ended ctx.
func silence(caller, ctx context.Context, err error) error {
	if caller.Err() == nil && ctx.Err() != nil {
		return fmt.Errorf("the stream is silent: %w", err)
	}
	return err
}

// dispatch hands on an event. It returns a failure that ends the connection.
func (s *stream) dispatch(response *http.Response, event, data string) *failure {
	switch event {
	case "count":
		var count Count
		if err := count.read([]byte(data), s.client.namespace, s.counter); err != nil {
			return foreign(response, fmt.Sprintf("the event %.*q (%v)", textBytesMax, data, err), 0)
		}
		s.hear()
		s.each(count, nil)
	case "problem":
		f := problemOf([]byte(data), "", s.client.clock.Now())
		switch {
		case f == nil:
			return foreign(response, fmt.Sprintf("the problem %.*q", textBytesMax, data), 0)
		case f.next == never:
			return f
		}
		s.hear()
		s.each(Count{}, s.call.givenUp(f.err, true))
	}
	return nil
}
