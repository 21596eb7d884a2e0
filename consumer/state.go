package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// Status is what an instance of a consumer does.
type Status string

// What an instance may do.
const (
	Stopped    Status = "stopped"    // Run was not called, or has returned
	Connecting Status = "connecting" // Run was called, and has not reached its servers yet
	Standby    Status = "standby"    // other instances have all partitions
	Active     Status = "active"     // it handles the events of its partitions
	Retrying   Status = "retrying"   // something failed, and it tries again
)

// State is what an instance of a consumer does at a moment.
type State struct {
	Status     Status
	Since      time.Time // when Status began, or the consumer was made
	Partitions []int     // that this instance has, ascending; none unless it is active
	// Err is why the instance does not do its work, why a partition of it is held, or that a handler hangs;
	// nil if all is well. So it is the answer to a question for its health. An event that is tried again, and
	// will be parked or succeed, is no error here.
	Err     error
	Failing []FailingEvent // at most one in each partition, ascending
}

// FailingEvent is an event that failed and is tried again.
type FailingEvent struct {
	Partition int
	Document  string
	Sequence  uint64    // of the message in the stream that it was read from
	Attempt   int       // that is due next
	Since     time.Time // when it first failed
	// Held says that it is not parked however often it fails: for [Halt], or because of Config.ParkLimit.
	Held bool
	Err  error // of the newest attempt
}

// State returns what the instance does now. It may be called at any time, from any goroutine, and does not
// wait.
func (c *Consumer) State() State { return c.state.state() }

// tracker keeps an instance's state.
type tracker struct {
	mu      sync.Mutex
	now     State
	failing map[int]FailingEvent
	hung    []*hangError // calls of the handler that have not returned, also of an earlier Run
}

func newTracker() *tracker {
	return &tracker{now: State{Status: Stopped, Since: time.Now(), Err: errNotCalled},
		failing: map[int]FailingEvent{}}
}

var (
	errNotCalled    = errors.New("consumer: Run was not called")
	errReturned     = errors.New("consumer: Run has returned")
	errNotConnected = errors.New("consumer: not connected yet")
)

func (t *tracker) state() State {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.now
	s.Partitions = slices.Clone(s.Partitions)
	s.Failing = slices.SortedFunc(maps.Values(t.failing), func(a, b FailingEvent) int {
		return cmp.Compare(a.Partition, b.Partition)
	})
	for _, f := range s.Failing {
		if f.Held && s.Err == nil {
			s.Err = fmt.Errorf("consumer: partition %d is held since %v at document %q, sequence %d: %w",
				f.Partition, f.Since.UTC().Format(time.RFC3339), f.Document, f.Sequence, f.Err)
		}
	}
	if len(t.hung) > 0 && s.Err == nil {
		s.Err = fmt.Errorf("consumer: %d handlers hang: %w", len(t.hung), t.hung[0])
	}
	return s
}

// set sets what the instance does. err is why it does not work.
func (t *tracker) set(status Status, partitions []int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now.Status != status {
		t.now.Since = time.Now()
	}
	t.now.Status, t.now.Partitions, t.now.Err = status, slices.Sorted(slices.Values(partitions)), err
	maps.DeleteFunc(t.failing, func(p int, _ FailingEvent) bool {
		return !slices.Contains(t.now.Partitions, p)
	})
}

// failed sets the event that fails in a partition. It returns how many are held.
func (t *tracker) failed(f FailingEvent) (held int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.Contains(t.now.Partitions, f.Partition) {
		t.failing[f.Partition] = f
	}
	return t.heldLocked()
}

// passed: nothing fails in a partition any more. It returns how many are held.
func (t *tracker) passed(partition int) (held int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.failing, partition)
	return t.heldLocked()
}

func (t *tracker) heldLocked() (n int) {
	for _, f := range t.failing {
		if f.Held {
			n++
		}
	}
	return n
}

// hangs adds a call that hangs.
func (t *tracker) hangs(h *hangError) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hung = append(t.hung, h)
}

// returned removes a call that hung.
func (t *tracker) returned(h *hangError) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hung = slices.DeleteFunc(t.hung, func(o *hangError) bool { return o == h })
}

// hanging returns the calls that hang, the oldest first.
func (t *tracker) hanging() []*hangError {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.hung)
}
