package counter

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// BufferConfig bounds a buffer. A zero means the default.
type BufferConfig struct {
	// MaxDelay is how long an add waits for others before it is sent: 100 ms by default.
	MaxDelay time.Duration
	// MaxItems is how many totals the buffer holds: those that wait, those in flight, and those that
	// failed and were not reported yet; 100,000 by default.
	MaxItems int
}

// A Buffer merges the adds of a counter into one total, and sends the totals in batches from a
// goroutine. Each total has one token for all its attempts, so that it counts once, except in a
// BEST_EFFORT namespace. While the service is unreachable adds are merged, and sent when it is back.
// It is safe for concurrent use.
//
// Whatever is not counted for sure is reported by [Buffer.Flush] or [Buffer.Close]: close every buffer.
type Buffer struct {
	client *Client
	config BufferConfig
	// work wakes the goroutine, which stop ends; ended is closed at its end.
	work  chan struct{}
	stop  context.CancelFunc
	ended chan struct{}

	lock sync.Mutex
	// queue has the totals that wait, the oldest first, and last the number of each counter's last
	// one. Totals are numbered in the order of their first adds; taken is that of queue[0].
	queue []Item
	last  map[string]int
	taken int
	// The totals below finished are counted or have failed, and those below target are not delayed.
	finished, target int
	failed           []FailedAdd
	// trouble is the failure of the last request, nil if it succeeded; refusals counts the requests
	// that were refused as a whole, the last one with the error refusal.
	trouble  *failure
	refusals int
	refusal  error
	isClosed bool
	// hurry ends the delay of the goroutine.
	hurry context.CancelFunc
	// changed is closed when totals are finished or a request is refused.
	changed chan struct{}
}

// A FailedAdd is a total of a buffer that is not counted for sure.
type FailedAdd struct {
	Item
	// Err is a [RefusedError], or an [UnknownOutcomeError] or [UnsentError] with its Unfinished.
	Err error
}

// A BufferError says that not every add of a buffer is counted.
type BufferError struct {
	// Failed are the totals that are not counted for sure; each is reported once.
	Failed []FailedAdd
	// Pending is how many totals the buffer holds, and goes on to send; 0 after [Buffer.Close].
	Pending int
	// Err is an [UnavailableError] with the reason if the adds were not sent in time; else nil.
	Err error
}

// Error says how many totals are not counted, and why.
func (e *BufferError) Error() string {
	text := fmt.Sprintf("counter: %d totals of the buffer are not counted for sure, and %d are pending",
		len(e.Failed), e.Pending)
	if e.Err != nil {
		return fmt.Sprintf("%s: %v", text, e.Err)
	}
	return fmt.Sprintf("%s; the first one, of %q: %v", text, e.Failed[0].Counter, e.Failed[0].Err)
}

// Unwrap returns why the adds were not sent in time.
func (e *BufferError) Unwrap() error { return e.Err }

// Buffer returns a buffer. It returns a [RefusedError] for a value out of its bounds.
func (c *Client) Buffer(config BufferConfig) (*Buffer, error) {
	if config.MaxDelay < 0 {
		return nil, invalid("MaxDelay is %v; it must be over 0, or 0 for 100 ms", config.MaxDelay)
	}
	if config.MaxItems < 0 {
		return nil, invalid("MaxItems is %d; it must be at least 1, or 0 for 100000", config.MaxItems)
	}
	if config.MaxDelay == 0 {
		config.MaxDelay = 100 * time.Millisecond
	}
	if config.MaxItems == 0 {
		config.MaxItems = 100_000
	}
	ctx, stop := context.WithCancel(context.Background())
	made := &Buffer{client: c, config: config, work: make(chan struct{}, 1), stop: stop,
		ended: make(chan struct{}), last: map[string]int{}, hurry: func() {}, changed: make(chan struct{})}
	go made.run(ctx)
	return made, nil
}

// Add adds delta to the total of the counter. It has no bounds, because adds are merged: use [Client.Add] or
// [Client.Batch]. In a namespace with bounds the total is accepted or refused. It never waits for the network. It returns a
// [RefusedError], and adds nothing, for a bad argument, after Close, and with the code buffer_full if
// the buffer holds MaxItems totals and none of them is this counter's.
func (b *Buffer) Add(counter string, delta int64) error {
	if err := checkName(counter); err != nil {
		return err
	}
	b.lock.Lock()
	defer b.lock.Unlock()
	if b.isClosed {
		return &RefusedError{Code: "buffer_closed", Detail: "the buffer is closed; make another one"}
	}
	if at, ok := b.last[counter]; ok {
		total := &b.queue[at-b.taken].Delta
		if sum := *total + delta; (sum > *total) == (delta > 0) {
			*total = sum
			return nil
		}
		// No int64 holds the sum: it is sent in parts.
	}
	if b.held() >= b.config.MaxItems {
		b.hurry()
		return &RefusedError{Code: "buffer_full", Detail: fmt.Sprintf("the buffer holds %d totals, the most"+
			" that MaxItems allows, %d of them failed: flush it, or add again later", b.held(), len(b.failed))}
	}
	b.last[counter] = b.taken + len(b.queue)
	b.queue = append(b.queue, Item{Counter: counter, Delta: delta})
	if b.isUrgent() {
		b.hurry()
	}
	b.wake()
	return nil
}

// Flush waits until each add so far is counted, or ctx ends. It returns a [BufferError] if some failed
// or are pending; early if the service refuses all adds, for example because the namespace was deleted.
func (b *Buffer) Flush(ctx context.Context) error {
	b.lock.Lock()
	defer b.lock.Unlock()
	err := b.wait(ctx)
	return b.report(err)
}

// Close sends the rest as [Buffer.Flush] does, for at most Config.Timeout, and ends the buffer. What it
// could not send is in the [BufferError], each with its Unfinished. A second Close does nothing.
func (b *Buffer) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.client.config.Timeout)
	defer cancel()
	b.lock.Lock()
	defer b.lock.Unlock()
	b.isClosed = true
	err := b.wait(ctx)
	b.stop()
	b.lock.Unlock()
	<-b.ended
	b.lock.Lock()
	return b.report(err)
}

// held is how many totals the buffer holds.
func (b *Buffer) held() int { return b.taken + len(b.queue) - b.finished + len(b.failed) }

// isUrgent is whether totals must be sent before MaxDelay, to make room.
func (b *Buffer) isUrgent() bool { return b.held()*2 >= b.config.MaxItems }

func (b *Buffer) wake() {
	select {
	case b.work <- struct{}{}:
	default:
	}
}

// notify wakes what waits for a change.
func (b *Buffer) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// wait waits until the totals so far are finished. It returns an [UnavailableError] if they are not.
func (b *Buffer) wait(ctx context.Context) error {
	target, refusals := b.taken+len(b.queue), b.refusals
	if target > b.target {
		b.target = target
	}
	b.hurry()
	b.wake()
	for b.finished < target {
		if b.refusals > refusals {
			return (&call{}).givenUp(b.refusal, true)
		}
		if err := ctx.Err(); err != nil {
			if b.trouble != nil {
				err = fmt.Errorf("%w; the last attempt: %v", err, b.trouble.err)
			}
			return &UnavailableError{err}
		}
		changed := b.changed
		b.lock.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		case <-b.ended:
		}
		b.lock.Lock()
	}
	return nil
}

// report returns the error with all that failed since the last one. err is why totals were pending:
// the last attempt of a buffer that is closed may still have succeeded.
func (b *Buffer) report(err error) error {
	failed := b.failed
	b.failed = nil
	if len(failed) == 0 && (err == nil || b.held() == 0) {
		return nil
	}
	return &BufferError{failed, b.held(), err}
}

// run sends the queue in pieces, one at a time, until ctx ends. Then the rest is unsent.
func (b *Buffer) run(ctx context.Context) {
	defer close(b.ended)
	for isOpen := true; isOpen; {
		isOpen = b.delay(ctx)
		b.lock.Lock()
		end := b.taken + len(b.queue)
		b.lock.Unlock()
		for piece := b.take(end); len(piece) > 0; piece = b.take(end) {
			b.finish(b.deliver(ctx, piece))
		}
	}
}

// delay waits for adds, and then for others to merge. It returns false if ctx ends.
func (b *Buffer) delay(ctx context.Context) bool {
	select {
	case <-b.work:
	case <-ctx.Done():
		return false
	}
	pause, cancel := context.WithCancel(ctx)
	defer cancel()
	b.lock.Lock()
	b.hurry = cancel
	isLate := b.taken < b.target || b.isUrgent()
	b.lock.Unlock()
	if !isLate {
		// Its only error is that of pause.
		_ = b.client.clock.Sleep(pause, b.config.MaxDelay)
	}
	return ctx.Err() == nil
}

// take takes the oldest of the totals below end off the queue, as many as one batch has.
func (b *Buffer) take(end int) []Item {
	b.lock.Lock()
	defer b.lock.Unlock()
	count := end - b.taken
	if count > batchItemsMax {
		count = batchItemsMax
	}
	piece := append([]Item{}, b.queue[:count]...)
	b.queue = b.queue[count:]
	b.taken += count
	for _, each := range piece {
		if b.last[each.Counter] < b.taken {
			delete(b.last, each.Counter)
		}
	}
	return piece
}

// deliver sends a piece until the outcome of each total is known, or ctx ends.
func (b *Buffer) deliver(ctx context.Context, piece []Item) *delivery {
	sent := newDelivery(b.client, piece)
	sent.failed = func(f *failure) {
		b.lock.Lock()
		defer b.lock.Unlock()
		b.trouble = f
		if f.isFinal {
			b.refusals++
			b.refusal = f.err
			b.notify()
		}
	}
	sent.run(ctx, &schedule{client: b.client, isEndless: true})
	return sent
}

// finish keeps what became of a piece.
func (b *Buffer) finish(sent *delivery) {
	b.lock.Lock()
	defer b.lock.Unlock()
	for _, each := range sent.pending {
		if result := sent.result(each); result.Err != nil {
			b.failed = append(b.failed, FailedAdd{each.Item, result.Err})
		}
	}
	b.finished += len(sent.pending)
	b.trouble = nil
	b.notify()
}
