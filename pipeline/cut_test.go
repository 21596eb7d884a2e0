package pipeline

import (
	"context"
	"errors"
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// settling is a broker with a cut as its newest message, and with one record.
type settling struct {
	JetStream
	Store
	stream relay.StreamState
	record *checkpoint.Record
	saved  uint64
}

func (s *settling) Tail(context.Context) (relay.StreamState, error) { return s.stream, nil }

func (s *settling) Load(context.Context) (*checkpoint.Record, uint64, error) {
	return s.record, s.saved, nil
}

func (s *settling) Save(_ context.Context, r *checkpoint.Record, _ uint64) (uint64, error) {
	s.record = r
	s.saved++
	return s.saved, nil
}

// TestACutInThePlaceOfASettledOneIsRecorded: a stream that was put back may have another one there.
func TestACutInThePlaceOfASettledOneIsRecorded(t *testing.T) {
	t.Parallel()
	cut := outbox.Cut{SystemID: 7361530121234511111, LSN: 0x3000, Epoch: 1, Owner: 1}
	newest := checkpoint.StoredCheckpoint{Checkpoint: relay.Checkpoint{Due: 0x2000, Seq: 12}}
	b := &settling{stream: relay.StreamState{LastSeq: 13, NewestSeq: 13, Cut: &cut},
		record: &checkpoint.Record{SystemID: systemID, Epoch: 1, Owner: 1,
			Checkpoints: []checkpoint.StoredCheckpoint{newest}}}
	p, conns := New(Config{Scratch: memory{}}), &Conns{JetStream: b, Store: b}
	settle := func(start checkpoint.Start) error {
		start.Shared = true
		return p.settleCut(t.Context(), conns, checkpoint.Readings{Record: b.record, Revision: b.saved,
			Stream: b.stream}, start)
	}
	lacks := checkpoint.Start{NewCut: &relay.Stored{Seq: 13, Cut: &cut}}
	if err := settle(lacks); !errors.Is(err, errCutRecorded) || b.saved != 1 {
		t.Fatalf("%d saved: %v", b.saved, err)
	}
	if err := settle(checkpoint.Start{Cuts: b.record.Cuts}); err != nil {
		t.Errorf("settled: %v", err)
	}
	other := cut
	other.LSN++
	lacks.NewCut.Cut, b.stream.Cut, b.record.Cuts = &other, &other, nil
	err := settle(lacks)
	if !errors.Is(err, errCutRecorded) || b.saved != 2 || b.record.Cuts[0].LSN != other.LSN {
		t.Errorf("another one: %d saved: %v", b.saved, err)
	}
}

// TestAnInputElsewhereStartsBehindWhatWasRead: a home's checkpoint may lie at an LSN of which nothing is
// replicated. What comes behind it starts no lower, or a checkpoint would go back.
func TestAnInputElsewhereStartsBehindWhatWasRead(t *testing.T) {
	t.Parallel()
	cp := relay.Checkpoint{Due: 0x500, From: 0x100, Holds: []relay.Hold{{}}, Read: 0x9000}
	in := input{from: cp.Published(), due: cp.Due, away: newAway(cp), everRead: new(newestInput),
		check:  checkpoint.NewTailCheck(checkpoint.Config{}, checkpoint.Start{}),
		buffer: reorder.New(reorder.Config{Start: cp.Published(), Due: cp.Due})}
	before, read := outbox.LSN(0), cp.Read
	for _, want := range []struct{ lsn, start outbox.LSN }{
		{0x80, 0x100}, {0x300, 0x100}, {0x400, 0x300}, {0x600, 0x500}, {0x700, 0x600},
	} {
		read += 0x10
		c := relay.Commit{Kind: relay.Heartbeat, LSN: want.lsn, Start: before, Read: read}
		if err := in.commit(&c); err != nil || c.Start != want.start {
			t.Errorf("%v starts at %v, want %v: %v", want.lsn, c.Start, want.start, err)
		}
		if _, err := in.buffer.Close(); err != nil {
			t.Fatal(err)
		}
		before = c.LSN
	}
}
