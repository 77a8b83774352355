package counter

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// What is read of an answer with one item, and of one with many.
	oneBytesMax  = 64 << 10
	manyBytesMax = 8 << 20
	// The service rejects a write that queues longer than this share of its attempt, while there is
	// still time to receive the rejection.
	queueShare = 2
	// waitMax is longer than any deadline.
	waitMax = 366 * 24 * time.Hour
	// ttlMax means the same as anything longer.
	ttlMax       = 100 * 366 * 24 * time.Hour
	textBytesMax = 200
	idleMax      = 100
)

func newHTTP(transport http.RoundTripper) *http.Client {
	if transport == nil {
		own := http.DefaultTransport.(*http.Transport).Clone()
		own.MaxIdleConnsPerHost = idleMax
		own.MaxResponseHeaderBytes = oneBytesMax
		transport = own
	}
	return &http.Client{
		Transport: transport,
		// The target may be another service, and a POST may become a GET.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// attempt sends call once. It returns nil after a success.
func (c *Client) attempt(ctx context.Context, call *call, timeout time.Duration) *failure {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var asked, connected atomic.Bool
	trace := &httptrace.ClientTrace{
		GetConn: func(string) { asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	}
	request, turn, err := c.request(httptrace.WithClientTrace(ctx, trace), call, timeout)
	if err != nil {
		return &failure{err: err, next: never}
	}
	call.ttl = -1
	response, err := c.http.Do(request)
	if err != nil || isFault(response.StatusCode) {
		c.takeTurn(turn)
	}
	if err != nil {
		// A transport without traces may have sent it.
		return unreachable(err, connected.Load() || !asked.Load())
	}
	defer response.Body.Close()
	call.ttl = ttlOf(response.Header)
	isSuccess := response.StatusCode >= 200 && response.StatusCode < 300
	most := oneBytesMax
	if call.hasMany && isSuccess {
		most = manyBytesMax
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, int64(most)+1))
	switch {
	case !isSuccess:
		// The start of an error is enough: a proxy may send a long page.
		return refusal(response, body, c.clock.Now())
	case err != nil:
		return unreachable(err, true)
	case len(body) > most:
		return foreign(response, fmt.Sprintf("more than %d bytes", most), 0)
	}
	if call.isEmpty {
		if response.StatusCode != http.StatusNoContent {
			return foreign(response, "content", 0)
		}
		return nil
	}
	if err := call.read(body); err != nil {
		if problem := (*failure)(nil); errors.As(err, &problem) {
			return problem
		}
		return foreign(response, fmt.Sprintf("%.*q (%v)", textBytesMax, start(body), err), 0)
	}
	return nil
}

// request returns the request of an attempt, and whose turn among the base URLs it is.
func (c *Client) request(ctx context.Context, call *call, timeout time.Duration) (*http.Request, uint32, error) {
	turn := c.turn.Load()
	url := c.bases[int(turn)%len(c.bases)] + call.path
	request, err := http.NewRequestWithContext(ctx, call.method, url, bytes.NewReader(call.body))
	if err == nil {
		c.setHeaders(request, call, timeout)
		// net/http itself retries what has an Idempotency-Key, if it can read the body again: the answer would be of
		// a second attempt that this client does not know of.
		request.GetBody = nil
	}
	return request, turn, err
}

// takeTurn goes on to the base URL after turn, unless another call has done so.
func (c *Client) takeTurn(turn uint32) { c.turn.CompareAndSwap(turn, turn+1) }

func (c *Client) setHeaders(request *http.Request, call *call, timeout time.Duration) {
	request.Header.Set("Accept", "application/json")
	if call.body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if key := c.apiKey(); key != "" {
		request.Header.Set("Authorization", "Bearer "+key)
	}
	if call.precondition != "" {
		request.Header.Set(call.precondition, "*")
	}
	if call.key != "" {
		request.Header.Set("Idempotency-Key", call.key)
	}
	if call.isWrite {
		limit := (timeout / queueShare).Milliseconds()
		if limit < 1 {
			limit = 1
		}
		request.Header.Set("Request-Timeout", strconv.FormatInt(limit, 10)+"ms")
	}
}

// unreachable returns the failure of an attempt without an answer.
func unreachable(err error, arrived bool) *failure {
	found := &failure{err: fmt.Errorf("the service does not answer: %w", err), next: sameToken, arrived: arrived}
	if !arrived && isDistrusted(err) {
		found.next = never
	}
	return found
}

// refusal returns the failure of an answer that is not 2xx.
func refusal(response *http.Response, body []byte, now time.Time) *failure {
	header := response.Header.Get("Retry-After")
	if found := problemOf(body, header, now); found != nil {
		found.problem.Status = response.StatusCode
		return found
	}
	return foreign(response, fmt.Sprintf("%.*q", textBytesMax, start(body)), waitOf(header, now))
}

// problemOf returns the failure that a problem describes, or nil if body is none. The header counts
// if the problem does not say how long to wait.
func problemOf(body []byte, header string, now time.Time) *failure {
	// A map, because the names must match exactly.
	var found map[string]any
	if json.Unmarshal(body, &found) != nil {
		return nil
	}
	code, hasCode := found["code"].(string)
	retry, hasRetry := found["retry"].(string)
	isKnown := next(retry) == sameToken || next(retry) == newToken || next(retry) == never
	if !hasCode || !hasRetry || !isKnown {
		return nil
	}
	refused := &RefusedError{Code: code, Detail: "the service gives no detail"}
	for _, text := range []any{found["detail"], found["title"]} {
		if detail, ok := text.(string); ok && detail != "" {
			refused.Detail = detail
			break
		}
	}
	if status, ok := found["status"].(float64); ok {
		refused.Status = int(status)
	}
	if applied, ok := found["applied"].(bool); ok {
		refused.Applied = &applied
	}
	refused.Field, _ = found["field"].(string)
	switch code {
	case codeBound:
		if reached := reachedOf(body); reached != nil {
			refused.why = reached
		}
	case codeSettled, codeReleased, codeExpired:
		refused.why = endedOf(code, body)
	}
	f := &failure{err: refused, next: next(retry), arrived: true, problem: refused}
	switch wait := found["retry_after"].(type) {
	case float64:
		f.wait = waitOfSeconds(wait)
	case string:
		f.wait = waitOf(wait, now)
	case nil:
		f.wait = waitOf(header, now)
	}
	return f
}

// foreign returns the failure of an answer that is not from a counter service.
func foreign(response *http.Response, what string, wait time.Duration) *failure {
	status := response.StatusCode
	if location := response.Header.Get("Location"); location != "" && status >= 300 && status < 400 {
		what = fmt.Sprintf("a redirect to %.*q", textBytesMax, location)
	}
	found := &failure{
		err:  fmt.Errorf("status %d with %s is not from a counter service; check the base URL", status, what),
		next: sameToken, arrived: true, wait: wait,
	}
	isLater := status == http.StatusRequestTimeout || status == http.StatusTooEarly || status == http.StatusTooManyRequests
	if status >= 300 && !isFault(status) && !isLater {
		found.next = never
	}
	return found
}

// isFault is whether status means that a server failed; 501 is what it does not support.
func isFault(status int) bool {
	return status >= http.StatusInternalServerError && status != http.StatusNotImplemented
}

// ttlOf returns how long the service honours a token; negative if the header says nothing or is a
// proxy's.
func ttlOf(header http.Header) time.Duration {
	text := header.Get("Idempotency-TTL")
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return -1
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seconds > int64(ttlMax/time.Second) {
		return ttlMax
	}
	return time.Duration(seconds) * time.Second
}

// waitOf returns a Retry-After, seconds or the date of a proxy; 0 for any other text.
func waitOf(text string, now time.Time) time.Duration {
	if text != "" && strings.Trim(text, "0123456789") == "" {
		seconds, _ := strconv.ParseFloat(text, 64)
		return waitOfSeconds(seconds)
	}
	date, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	return waitOfSeconds(date.Sub(now).Seconds())
}

// waitOfSeconds bounds a wait to 0 and waitMax.
func waitOfSeconds(seconds float64) time.Duration {
	switch {
	case math.IsNaN(seconds) || seconds <= 0:
		return 0
	case seconds >= waitMax.Seconds():
		return waitMax
	}
	return time.Duration(seconds * float64(time.Second))
}

func start(body []byte) []byte {
	if len(body) > textBytesMax {
		return body[:textBytesMax]
	}
	return body
}

// isDistrusted is whether the server's certificate is not trusted, so that a retry would fail too.
func isDistrusted(err error) bool {
	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var certificate x509.CertificateInvalidError
	return errors.As(err, &authority) || errors.As(err, &hostname) || errors.As(err, &certificate)
}
