package repair

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// atOnce is how many messages behind a hole wait for the answer whether retention has made it: with
// max_msgs_per_subject there may be a hole before each of them.
const atOnce = 1000

// readAll calls f with all messages up to the newest one that was there at first, archive and stream as one.
// Retention goes on meanwhile: what it takes before it is read from the stream is read from the archive, in
// its place. Otherwise the rows of such messages would look like missing ones.
func (s *scan) readAll(ctx context.Context, rd backfill.Readings, f func(backfill.Message) error) error {
	// With a condition and no archive nothing is made of what goes, and limits may take something each time.
	matters := s.r.o.Where == "" || s.r.cfg.Archive.URL != ""
	for next := uint64(1); ; {
		first, err := s.readPast(ctx, rd, next, f)
		if err != nil {
			return err
		}
		if s.r.o.past != nil {
			s.r.o.past()
		}
		next = first
		taken := false
		var held []backfill.Message // from a hole on, which begins at next
		err = s.l.Messages(ctx, first, rd.Stream.NewestSeq, func(m backfill.Message) error {
			if len(held) == 0 && (!matters || m.Seq <= next ||
				len(rd.Stream.Erased.Lacking(next, m.Seq-1)) == 0) {
				next = m.Seq + 1
				return f(m)
			}
			if held = append(held, m); len(held) < atOnce && m.Seq < rd.Stream.NewestSeq {
				return nil
			}
			front, err := s.front(ctx)
			if err != nil {
				return err
			}
			if taken = front.Seq > next; taken {
				return jsapi.ErrStop
			}
			for _, m := range held {
				if err := f(m); err != nil {
					return err
				}
			}
			next, held = m.Seq+1, held[:0]
			return nil
		})
		if err != nil || !taken {
			return err
		}
	}
}

// readPast reads the messages from sequence next on that retention took from the front of the stream from the
// archive, and returns the stream's first sequence. What the archive has from there on does not count: where
// the stream lacks that, the broker lost it. Nor does it count where no message tells what was removed from
// what was lost: one of an unfinished repair may be the first that came again.
func (s *scan) readPast(ctx context.Context, rd backfill.Readings, next uint64,
	f func(backfill.Message) error) (uint64, error) {
	if rd.Stream.NewestSeq == 0 {
		return next, nil
	}
	first, err := s.front(ctx)
	if err != nil || first.Seq <= next {
		return next, err
	}
	if s.r.cfg.Archive.URL == "" {
		s.went = first.Seq - min(first.Seq, rd.Stream.FirstSeq)
		return first.Seq, nil
	}
	// What was gone before all this began counts as removed; else everything is to be looked at again, as it
	// will be archived. A condition says that it holds for no row of either.
	var lacking error
	if first.Seq > rd.Stream.FirstSeq && s.r.o.Where == "" {
		lacking = fmt.Errorf("stream %s: messages up to %d, which are not archived, went away while it was "+
			"read", s.r.cfg.Stream, first.Seq-1)
	}
	store, err := archive.Open(ctx, s.r.cfg.Archive.URL)
	if err != nil {
		return 0, err
	}
	defer func() { _ = store.Close() }()
	a, err := archive.Load(ctx, store, archive.FolderOf(s.r.cfg.Stream, rd.Stream.Created), nil)
	if err != nil {
		return 0, err
	}
	// A stream that was put back from a backup and went on differently shows that where both have a message.
	err = a.ReadRange(ctx, first.Seq, first.Seq+1, func(m *archive.Message) error {
		return archive.SameAs(ctx, s.l.NATS.API(), s.r.cfg.Stream, m.Seq, m.Hash())
	})
	if err != nil {
		return 0, err
	}
	if h := stream.HeaderOf(first.Header); h != nil && h.Pos.Repaired() && a.Next() <= first.Seq &&
		(s.unfinished || s.attemptAt(first.Seq) >= 0) {
		return first.Seq, lacking
	}
	task := progress.Count(ctx, "reading the archive of stream "+s.r.cfg.Stream, "messages",
		int64(first.Seq-next))
	defer task.End()
	err = a.ReadRange(ctx, next, first.Seq, func(m *archive.Message) error {
		task.Add(1)
		if m.Seq < rd.Stream.FirstSeq { // what goes meanwhile does not count as removed
			s.archived++
		}
		return f(backfill.MessageOf(m.Seq, m.Subject, m.Header, m.Time))
	})
	if err != nil {
		return 0, err
	}
	if before := min(first.Seq, rd.Stream.FirstSeq); next < before {
		for _, m := range a.Segments { // what was erased is not gone either
			for _, erased := range m.Erased.Within(next, before-1) {
				s.archived += rd.Stream.Erased.Lacking(erased.From, erased.To).Count()
			}
		}
	}
	if a.Next() < first.Seq {
		return first.Seq, lacking
	}
	return first.Seq, nil
}

// front is the stream's first message.
func (s *scan) front(ctx context.Context) (*jsapi.Message, error) {
	m, err := s.l.NATS.API().Message(ctx, s.r.cfg.Stream, jsapi.MessageRequest{Seq: 1, Next: ">"})
	if err == nil && m == nil {
		err = fmt.Errorf("stream %s: all messages went away while it was read", s.r.cfg.Stream)
	}
	return m, err
}

// codeRemoved is the code of what was published and is in no message any more.
const codeRemoved = "repair_removed"

// removedFault is the fault of n messages that nobody has any more.
func (r *repair) removedFault(n uint64) *outbox.Fault {
	return refuse(codeRemoved, fmt.Sprintf("%s of stream %s %s not there any more (retention, or somebody "+
		"removed what is missing): rows that the table still has of that look like missing ones",
		units.Of(n, "message"), r.cfg.Stream, units.Agree(n, "is", "are")),
		"Give a condition that only rows hold to that may be missing, for example --where \"created_at "+
			"> '...'\"")
}
