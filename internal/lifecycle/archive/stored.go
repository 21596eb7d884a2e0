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
		return &outbox.Fault{Class: outbox.Gap, Code: CodeDiffers,
			Message: fmt.Sprintf("stream %s has another message at %d than the archive", stream, seq)}
	}
	return nil
}

// Holds reads the segments with the messages of a range back, whole, and compares the last of those messages
// with the stream's: a stream that was put back from a backup and went on differently differs there. Of the
// segments before it the objects' hashes are enough: they were read message by message before their manifests
// were made.
func (a *Archive) Holds(ctx context.Context, api *jsapi.Client, r Range) error {
	var chosen []*Manifest
	for _, m := range a.Segments {
		if m.Last >= r.From && m.First <= r.To {
			chosen = append(chosen, m)
		}
	}
	task := progress.Count(ctx, "reading the archive of stream "+a.stream, "segments", int64(len(chosen)))
	defer task.End()
	var last *Message
	for _, m := range slices.Backward(chosen) {
		f := func(msg *Message, _ Hash) error {
			if msg.Seq <= r.To && msg.erased == "" {
				last = msg
			}
			return nil
		}
		if last != nil {
			f = nil
		}
		if err := a.read(ctx, m, f); err != nil {
			return err
		}
		task.Add(1)
	}
	if last == nil {
		return nil
	}
	return SameAs(ctx, api, a.stream, last.Seq, last.Hash())
}
