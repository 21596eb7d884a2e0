package archive

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// SameAs compares an archived message's hash with the stream's message, if that still has it. The error is a
// fault with code archive_differs.
func SameAs(ctx context.Context, api *jsapi.Client, stream string, seq uint64, hash Hash) error {
	stored, err := api.Message(ctx, stream, jsapi.MessageRequest{Seq: seq})
	if err != nil || stored == nil {
		return err
	}
	m := Message{Seq: stored.Seq, Time: stored.Time, Subject: stored.Subject, Data: stored.Data}
	if len(stored.Header) > 0 {
		if m.Header, err = nats.DecodeHeadersMsg(stored.Header); err != nil {
			return fmt.Errorf("message %d: %w", stored.Seq, err)
		}
	}
	if m.Hash() != hash {
		return differs(stream, seq)
	}
	return nil
}

func differs(stream string, seq uint64) error {
	return &outbox.Fault{Class: outbox.Gap, Code: CodeDiffers,
		Message: fmt.Sprintf("stream %s has another message at %d than the archive", stream, seq)}
}

// Holds reads the segments with the messages of a range back, and compares the newest message that the stream
// has of those segments, by atOrBelow: a stream that was put back from a backup and went on differently
// differs there. The objects' hashes are enough: they were read message by message before their manifests
// were made.
//
// It returns up to where that holds, which is below the range's end if it has read for longer than turn; 0:
// it reads all. For the rest of a segment of which a part has gone (see Went) a process that runs on reads it
// when all of that may go, or after an hour, unless it is urgent: each round lets a few more messages go.
func (a *Archive) Holds(ctx context.Context, api *jsapi.Client, r Range, turn time.Duration, urgent bool,
	atOrBelow func(context.Context, uint64) (uint64, error)) (upTo uint64, err error) {
	var chosen []*Manifest
	for _, m := range a.Segments {
		if m.Last >= r.From && m.First <= r.To {
			chosen = append(chosen, m)
		}
	}
	upTo, begun := r.To, time.Now()
	if n := len(chosen); n > 0 && !urgent && a.known.waits(chosen[n-1], r.To) {
		chosen, upTo = chosen[:n-1], chosen[n-1].First-1
	}
	task := progress.Count(ctx, "reading the archive of stream "+a.stream, "segments", int64(len(chosen)))
	defer task.End()
	for i, m := range chosen {
		if err := a.read(ctx, m, nil); err != nil {
			return 0, err
		}
		task.Add(1)
		if turn > 0 && i+1 < len(chosen) && time.Since(begun) > turn {
			chosen, upTo = chosen[:i+1], m.Last
			break
		}
	}
	if len(chosen) == 0 {
		return upTo, nil
	}
	return upTo, a.sameEnd(ctx, api, chosen, atOrBelow)
}

// Went notes that the messages up to a sequence have gone from the stream: the rest of its segment waits.
func (a *Archive) Went(upTo uint64) {
	for _, m := range a.Segments {
		if a.known != nil && m.First <= upTo && upTo < m.Last {
			a.known.part, a.known.parted = m, time.Now()
		}
	}
}

// sameEnd compares the newest message that the stream has of some segments.
func (a *Archive) sameEnd(ctx context.Context, api *jsapi.Client, chosen []*Manifest,
	atOrBelow func(context.Context, uint64) (uint64, error)) error {
	seq, err := atOrBelow(ctx, chosen[len(chosen)-1].Last)
	if err != nil || seq < chosen[0].First {
		return err
	}
	m := chosen[slices.IndexFunc(chosen, func(m *Manifest) bool { return seq <= m.Last })]
	if seq == m.Last {
		return SameAs(ctx, api, a.stream, seq, m.End)
	}
	hash, found := Hash{}, false
	if err := a.read(ctx, m, func(msg *Message, h Hash) error {
		if msg.Seq == seq {
			hash, found = h, true
		}
		return nil
	}); err != nil {
		return err
	}
	if !found {
		return differs(a.stream, seq)
	}
	return SameAs(ctx, api, a.stream, seq, hash)
}
