package consumer

import (
	"context"
	"sync"
	"time"
)

// flow tracks and limits the messages that were read but are not done, and knows up to where all are done.
type flow struct {
	maxMessages int
	maxBytes    int64

	mu       sync.Mutex
	entries  []entry // in the order in which they were read; the first is not done
	first    uint64  // number of entries[0]
	messages int     // not done
	bytes    int64   // of those
	room     chan struct{}
	done     uint64 // sequence up to which all are done
}

// aheadOf: at most this many times MaxInFlight messages are read beyond the oldest that is not done.
const aheadOf = 16

type entry struct {
	seq  uint64
	size int
	at   time.Time // when the stream stored it
	done bool
}

func newFlow(maxMessages, maxBytes int, done uint64) *flow {
	return &flow{maxMessages: maxMessages, maxBytes: int64(maxBytes), done: done,
		room: make(chan struct{}, 1)}
}

// add waits for room, adds a message and returns its number. A message larger than maxBytes waits until it is
// the only one.
func (f *flow) add(ctx context.Context, seq uint64, size int, at time.Time) (uint64, error) {
	for {
		f.mu.Lock()
		if f.messages == 0 || f.messages < f.maxMessages && f.bytes+int64(size) <= f.maxBytes &&
			len(f.entries) < aheadOf*f.maxMessages {
			f.entries = append(f.entries, entry{seq: seq, size: size, at: at})
			f.messages++
			f.bytes += int64(size)
			n := f.first + uint64(len(f.entries)) - 1
			f.mu.Unlock()
			return n, nil
		}
		f.mu.Unlock()
		select {
		case <-f.room:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// finish records that a message is done.
func (f *flow) finish(n uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := &f.entries[n-f.first]
	e.done = true
	f.messages--
	f.bytes -= int64(e.size)
	k := 0
	for k < len(f.entries) && f.entries[k].done {
		f.done = f.entries[k].seq
		k++
	}
	f.entries = f.entries[k:]
	f.first += uint64(k)
	select {
	case f.room <- struct{}{}:
	default:
	}
}

type flowState struct {
	done     uint64
	messages int
	bytes    int64
	oldest   time.Time // when the oldest message that is not done was stored; zero if there is none
}

func (f *flow) state() flowState {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := flowState{done: f.done, messages: f.messages, bytes: f.bytes}
	if len(f.entries) > 0 {
		l.oldest = f.entries[0].at
	}
	return l
}
