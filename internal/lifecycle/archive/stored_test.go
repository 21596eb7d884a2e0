package archive

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// TestAnArchiveOfAnotherStreamDoesNotHoldThisOne: also where the stream lacks the newest messages that were
// archived, which may have been erased.
func TestAnArchiveOfAnotherStreamDoesNotHoldThisOne(t *testing.T) {
	t.Parallel()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	must.Succeed(t, err)
	var all []*Message
	for seq := uint64(1); seq <= 10; seq++ {
		_, err := js.Publish(t.Context(), "s", fmt.Append(nil, seq))
		must.Succeed(t, err)
		m, err := stream.GetMsg(t.Context(), seq)
		must.Succeed(t, err)
		all = append(all, &Message{Seq: m.Sequence, Time: m.Time, Subject: m.Subject, Data: m.Data})
	}
	// archived are all messages, in two segments, but for one that is another one there, and one that is not
	archived := func(other, lost uint64) *Archive {
		store, _ := folderOf(t)
		a := load(t, store, nil)
		for _, part := range [][]*Message{all[:5], all[5:]} {
			s, err := a.NewSegment()
			must.Succeed(t, err)
			for _, m := range part {
				if m.Seq == other {
					m = message(other)
				}
				if m.Seq != lost {
					must.Succeed(t, s.Add(m))
				}
			}
			_, err = a.Append(t.Context(), s, outbox.LSN(s.Next()))
			must.Succeed(t, err)
		}
		return a
	}
	api := jsapi.New(nc, "")
	same, last, middle := archived(0, 0), archived(10, 0), archived(8, 0)
	lacking := archived(0, 8)
	atOrBelow := streams.New(api, "S", slog.New(slog.DiscardHandler)).AtOrBelow
	holds := func(a *Archive, to uint64) error {
		upTo, err := a.Holds(t.Context(), api, Range{From: 1, To: to}, 0, false, atOrBelow)
		if err == nil && upTo != to {
			t.Errorf("it was asked up to %d, and holds up to %d", to, upTo)
		}
		return err
	}
	must.Succeed(t, holds(same, 8))
	must.Succeed(t, holds(last, 5))
	wantFault(t, holds(last, 8), CodeDiffers, "at 10")
	must.Succeed(t, holds(middle, 8))
	must.Succeed(t, stream.DeleteMsg(t.Context(), 10))
	must.Succeed(t, stream.DeleteMsg(t.Context(), 9))
	must.Succeed(t, holds(same, 8))
	must.Succeed(t, holds(last, 8))
	for _, to := range []uint64{6, 7, 8} {
		wantFault(t, holds(middle, to), CodeDiffers, "at 8")
	}
	wantFault(t, holds(lacking, 8), CodeDiffers, "at 8")
	must.Succeed(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(6)))
	for seq := uint64(6); seq <= 8; seq++ {
		must.Succeed(t, stream.DeleteMsg(t.Context(), seq))
	}
	must.Succeed(t, holds(middle, 8)) // there is none
}
