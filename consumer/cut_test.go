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
	all = slices.Concat(all, more)
	w.readAll(w.config(src), all)
	src.lose(12, false) // all of it comes again, and then a cut
	src.publish(more...)
	src.publish(s.cut())
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

// window makes one window of events that were in others: what a cut before it closes.
func window(cut *stream.Message, events ...*stream.Message) []*stream.Message {
	c := outbox.CutOf(cut.Subject, cut.Header)
	all := []*stream.Message{cut}
	for i, m := range events {
		h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
		if err != nil {
			panic(err)
		}
		h.N, h.Of, h.Due, h.Thru = i, len(events), c.LSN, c.LSN
		again := *m
		again.Header = nats.Header{outbox.HeaderName: {h.String()}}
		all = append(all, &again)
	}
	return all
}

// Where the stream goes back, and a cut comes before what was read comes again, that is in another window. A
// consumer finds out whichever of its marks shows it, and repeats nothing.
func TestACutWhereTheStreamWentBackEndsRun(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		from  uint64 // what is lost
		again []int  // the events that come behind the cut, in their order
		more  int    // events behind those
		late  bool   // while the session reads
		ahead bool   // other partitions have been done further since
		words string
	}{
		"below the marks":        {3, []int{2, 3}, 1, true, false, "was the event at position"},
		"at the marks":           {4, []int{3}, 1, false, false, "now sequence 4 is a cut"},
		"before a sorted window": {3, []int{3, 2}, 1, false, false, "now sequence 3 is a cut"},
		"below one mark":         {3, []int{2, 3}, 3, false, true, "was the event at position"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, &opening{memoryStream: newMemoryStream()}
			all := s.events(4, 1)
			src.publish(all...)
			cfg := w.config(src)
			w.readAll(cfg, all)
			var events []*stream.Message
			for _, i := range test.again {
				events = append(events, all[i])
			}
			again := slices.Concat(window(s.cut(), events...), s.events(test.more, 1))
			publish := func() { src.publish(again...) }
			if src.lose(test.from, true); test.late {
				src.before = publish
			} else {
				publish()
			}
			if test.ahead {
				m := again[len(again)-1]
				p, err := w.consumer(cfg).partition(m)
				if err != nil {
					t.Fatal(err)
				}
				w.exec(`UPDATE outflow_mark SET seq = $1, due = $2::text::pg_lsn, lsn = $2::text::pg_lsn
					WHERE partition <> $3`, src.last, s.lsn.String(), p)
			}
			w.fails(cfg, ErrStream, test.words)
			w.exactly(all)
		})
	}
}

// TestAMarkAtACutBehindAnErasedEvent: the event that the mark names was erased from the archive, when the
// stream did not have it any more.
func TestAMarkAtACutBehindAnErasedEvent(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(4, 1)
	src.publish(all...)
	src.publish(s.cut())
	past := newMemoryArchive(src)
	cfg := w.config(src)
	cfg.Archive = past
	w.readAll(cfg, all)
	w.awaitOffsets(5)
	own, err := w.consumer(cfg).partition(all[0])
	if err != nil {
		t.Fatal(err)
	}
	w.exec(`UPDATE outflow_mark SET seq = 2, due = '0/0', n = 0, lsn = '0/0', i = 0 WHERE partition <> $1`, own)
	past.to(5)
	src.removeTo(5)
	past.erase(4)
	more := s.events(2, 1)
	src.publish(more...)
	w.readAll(cfg, slices.Concat(all, more))
}
