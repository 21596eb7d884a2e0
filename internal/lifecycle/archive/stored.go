package archive

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// SameAs compares an archived message's hash with the stream's message, if that still has it. The error is a
// fault with code archive_differs.
func SameAs(ctx context.Context, api *jsapi.Client, stream string, seq uint64, hash Hash) error {
	_, err := compare(ctx, api, stream, seq, hash)
	return err
}

// compare is SameAs, and reports whether the stream has the message.
func compare(ctx context.Context, api *jsapi.Client, stream string, seq uint64, hash Hash) (has bool,
	err error) {
	stored, err := api.Message(ctx, stream, jsapi.MessageRequest{Seq: seq})
	if err != nil || stored == nil {
		return false, err
	}
	m := Message{Seq: stored.Seq, Time: stored.Time, Subject: stored.Subject, Data: stored.Data}
	if len(stored.Header) > 0 {
		if m.Header, err = nats.DecodeHeadersMsg(stored.Header); err != nil {
			return true, fmt.Errorf("message %d: %w", stored.Seq, err)
		}
	}
	if m.Hash() != hash {
		return true, &outbox.Fault{Class: outbox.Gap, Code: CodeDiffers,
			Message: fmt.Sprintf("stream %s has another message at %d than the archive", stream, seq)}
	}
	return true, nil
}

// Holds reads the segments with the messages of a range back, and compares with the stream's the last message
// of the newest of them, or if the stream lacks that one, the last of the range: a stream that was put back
// from a backup and went on differently differs there. The objects' hashes are enough: they were read message
// by message before their manifests were made.
func (a *Archive) Holds(ctx context.Context, api *jsapi.Client, r Range) error {
	var chosen []*Manifest
	for _, m := range a.Segments {
		if m.Last >= r.From && m.First <= r.To {
			chosen = append(chosen, m)
		}
	}
	task := progress.Count(ctx, "reading the archive of stream "+a.stream, "segments", int64(len(chosen)))
	defer task.End()
	for _, m := range chosen {
		if err := a.read(ctx, m, nil); err != nil {
			return err
		}
		task.Add(1)
	}
	if n := len(chosen); n > 0 {
		if has, err := compare(ctx, api, a.stream, chosen[n-1].Last, chosen[n-1].End); has || err != nil {
			return err
		}
	}
	for _, m := range slices.Backward(chosen) {
		var last *Message
		if err := a.read(ctx, m, func(msg *Message, _ Hash) error {
			if msg.Seq <= r.To && msg.erased == "" {
				last = msg
			}
			return nil
		}); err != nil {
			return err
		}
		if last != nil {
			return SameAs(ctx, api, a.stream, last.Seq, last.Hash())
		}
	}
	return nil
}
