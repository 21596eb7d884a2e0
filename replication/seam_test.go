package replication

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

func begin(final outbox.LSN) Message {
	return Message{Data: append(binary.BigEndian.AppendUint64([]byte{'B'}, uint64(final)), make([]byte, 12)...)}
}

func of(kind byte) Message { return Message{Data: []byte{kind, 1}} }

func alive(at outbox.LSN) Message { return Message{Keepalive: true, WALEnd: at} }

// What the backlog had comes as a transaction without changes, relations are kept, and nothing behind is touched.
func TestSeamEmptiesWhatTheBacklogHad(t *testing.T) {
	in := [][]Message{
		{alive(50), begin(80), of('R'), of('I')}, // had
		{of('I'), of('M'), of('C'), of('M'), alive(100), begin(99), of('C')},
		{begin(100), of('I'), of('C'), begin(120), of('R'), of('I')},
		{of('I'), of('C'), alive(130), begin(140), of('I'), of('C')},
	}
	want := [][]Message{
		{alive(100), begin(80), of('R')},
		{of('C'), of('M'), alive(100), begin(99), of('C')}, in[2], in[3],
	}
	s := seam{given: 100}
	for i := range in {
		b := &batch{Batch: outbox.Batch{Messages: slices.Clone(in[i])}}
		s.trim(b)
		same := slices.EqualFunc(b.Messages, want[i], func(a, b Message) bool {
			return a.Keepalive == b.Keepalive && a.WALEnd == b.WALEnd && string(a.Data) == string(b.Data)
		})
		if !same {
			t.Errorf("batch %d: %v, want %v", i, b.Messages, want[i])
		}
	}
}

// A chunk is as large as its limits let it be, whatever messages are like, and not smaller than what is read again for it.
func TestChunkSizeSettles(t *testing.T) {
	const perRow, walPerRow = 150, 160 // bytes of a message, and of the WAL that it comes from
	for _, c := range []struct {
		name    string
		cost    time.Duration // of a message
		restart outbox.LSN    // the copy's, as far behind
		rows    int           // of a chunk, in the end
		fails   bool
	}{
		{"fast", 2 * time.Microsecond, 0, (64 << 20) / perRow, false},
		{"slow", 50 * time.Microsecond, 0, 20_000, false},
		{"slow, and much is read again", 50 * time.Microsecond, 30 << 20, 30 << 20 / walPerRow, false},
		{"a transaction was open for long", 2 * time.Microsecond, 1 << 40, 0, true},
	} {
		pos := outbox.LSN(1 << 50)
		s := newChunkSize(defaultLimits, perRow, pos, pos-c.restart)
		if s.rows < 1000 || s.rows*perRow > firstChunk {
			t.Errorf("%s: begins with %d", c.name, s.rows)
		}
		var err error
		for n := 0; n < 40 && err == nil; n++ {
			rows := s.rows
			pos += outbox.LSN(rows * walPerRow)
			err = s.next(&chunk{rows: rows, bytes: rows * perRow, took: time.Duration(rows) * c.cost}, pos, pos-c.restart)
			if s.rows*perRow > defaultLimits.bytes+perRow || s.window < defaultLimits.minWindow || s.window > defaultLimits.maxWindow {
				t.Fatalf("%s: %d rows, a window of %d", c.name, s.rows, s.window)
			}
		}
		if c.fails != (err != nil) || !c.fails && (s.rows < c.rows/3 || s.rows > c.rows*3) {
			t.Errorf("%s: %d rows, want about %d; %v", c.name, s.rows, c.rows, err)
		}
	}
}

// A keepalive of the stream would be waited with until the backlog has passed, and nothing behind it would be heard: so it is left out.
func TestKeepalivesDoNotWaitForTheBacklog(t *testing.T) {
	t.Parallel()
	s := newStream(nil, nil, nil, 50, 0)
	s.backlog = &backlog{passed: make(chan struct{})}
	body := append([]byte{'k'}, make([]byte, keepaliveSize-1)...)
	body[8], body[17] = 100, 1
	var b batch
	if err := s.copyData(&b, body); err != nil || len(b.Messages) != 0 || len(s.asked) != 1 {
		t.Errorf("before: %d kept, %d to be answered, %v", len(b.Messages), len(s.asked), err)
	}
	close(s.backlog.passed)
	body[8] = 90
	if err := s.copyData(&b, body); err != nil || len(b.Messages) != 1 || b.Messages[0].WALEnd != 100 {
		t.Errorf("behind it: %v, %v", b.Messages, err)
	}
}
