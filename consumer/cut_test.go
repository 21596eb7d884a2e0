package consumer

import (
	"slices"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// cut makes the message of a cut behind all that was made.
func (s *publisher) cut() *stream.Message {
	s.lsn += 16
	c := outbox.Cut{SystemID: 7, Timeline: 1, LSN: s.lsn, Epoch: 2, Owner: 2}
	return &stream.Message{Subject: outbox.CutSubject, Header: nats.Header{outbox.HeaderCut: {c.String()}}}
}

// A cut has no effect, and is neither a gap nor what the marks wait for: also where it is the first message,
// where it is the last one, and where it goes away when it was read.
func TestACutIsPassedOver(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	src.publish(s.cut())
	all := s.events(6, 3)
	src.publish(all...)
	src.publish(s.cut())
	w.readAll(w.config(src), all)
	w.awaitOffsets(8)
	w.readAll(w.config(src), all) // the marks are at the cut
	src.removeTo(8)
	more := s.events(2, 3)
	src.publish(more...)
	src.publish(s.cut())
	all = slices.Concat(all, more)
	w.readAll(w.config(src), all)
	w.awaitOffsets(11)
	src.lose(11, false) // the cut alone
	more = s.events(2, 3)
	src.publish(more...)
	w.readAll(w.config(src), slices.Concat(all, more))
}

func TestACutThatTellsNothingEndsRun(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		kind   error
		damage func(src *memoryStream, s *publisher, all []*stream.Message)
		words  []string
	}{
		"no header": {ErrForeign, func(src *memoryStream, _ *publisher, _ []*stream.Message) {
			src.publish(&stream.Message{Subject: outbox.CutSubject, Header: nats.Header{}})
		}, []string{"message 5", `"cut"`}},
		"it goes back": {ErrStream, func(src *memoryStream, s *publisher, _ []*stream.Message) {
			c := s.cut()
			src.publish(c, c)
		}, []string{"sequence 6 is a cut", "sequence 5 before it"}},
		"behind a hole of what was read": {ErrStream,
			func(src *memoryStream, s *publisher, all []*stream.Message) {
				src.lose(3, false)
				src.publish(s.cut())
				src.publish(all[2:]...)
			}, []string{"sequence 5 is a cut", "come again"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(4, 1)
			src.publish(all...)
			cfg := w.config(src)
			w.readAll(cfg, all)
			test.damage(src, s, all)
			w.fails(cfg, test.kind, test.words...)
			w.exactly(all)
		})
	}
}
