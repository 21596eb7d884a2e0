package archive

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAnArchiveOfAnotherStreamDoesNotHoldThisOne: also where the stream lacks the newest message that was
// archived, which may have been erased.
func TestAnArchiveOfAnotherStreamDoesNotHoldThisOne(t *testing.T) {
	t.Parallel()
	nc, err := nats.Connect(natstest.Server(t).URL())
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	must.Succeed(t, err)
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
	// archived are all messages, in two segments, but for one that is another one there
	archived := func(other uint64) *Archive {
		store, _ := folderOf(t)
		a := load(t, store, nil)
		for _, part := range [][]*Message{all[:5], all[5:]} {
			s, err := a.NewSegment()
			must.Succeed(t, err)
			for _, m := range part {
				if m.Seq == other {
					m = message(other)
				}
				must.Succeed(t, s.Add(m))
			}
			_, err = a.Append(t.Context(), s, outbox.LSN(s.Next()))
			must.Succeed(t, err)
		}
		return a
	}
	api := jsapi.New(nc, "")
	same, last, middle := archived(0), archived(10), archived(8)
	holds := func(a *Archive, to uint64) error { return a.Holds(t.Context(), api, Range{From: 1, To: to}) }
	must.Succeed(t, holds(same, 8))
	must.Succeed(t, holds(last, 5))
	wantFault(t, holds(last, 8), CodeDiffers, "at 10")
	must.Succeed(t, stream.DeleteMsg(t.Context(), 10))
	must.Succeed(t, holds(same, 8))
	must.Succeed(t, holds(last, 8))
	must.Succeed(t, holds(middle, 7))
	wantFault(t, holds(middle, 8), CodeDiffers, "at 8")
	must.Succeed(t, stream.Purge(t.Context()))
	must.Succeed(t, holds(middle, 8))
}
