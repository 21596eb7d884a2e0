package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// past is the archived part of the stream. It is read in place of the stream as far as it reaches: what
// retention takes away from the stream meanwhile is not missed.
type past struct {
	archive *archive.Archive
	hot     uint64 // sequence of the first message that the stream still has
}

// openPast lets the source begin where the archive does, if what that has touches what the stream has, or
// what is between them was erased. With url "" there is no archive.
func (s *streamSource) openPast(ctx context.Context, api *jsapi.Client, url string) error {
	if url == "" || s.info == nil || s.first == 1 {
		return nil
	}
	store, err := archive.Open(ctx, url)
	if err != nil {
		return err
	}
	s.closePast = store.Close
	a, err := archive.Load(ctx, store, archive.FolderOf(s.name, s.info.Created), nil)
	if err != nil || len(s.erased().Lacking(a.Next(), s.first-1)) > 0 {
		return err
	}
	if err := a.Agrees(ctx, api); err != nil {
		return err
	}
	s.past = &past{a, s.first}
	err = a.Read(ctx, 1, func(m *archive.Message) error {
		s.first, s.firstAt = m.Seq, m.Time
		s.setHeader(m.Subject, m.Header)
		return jsapi.ErrStop
	})
	if errors.Is(err, jsapi.ErrStop) {
		return nil
	}
	return err
}

// missing returns the sequences that neither the archive nor the stream has behind the first message, but for
// those that were erased.
func (p *past) missing() (all []archive.Range) {
	if p == nil {
		return nil
	}
	for _, m := range p.archive.Segments {
		for _, r := range m.Missing {
			if r.From > 1 {
				all = append(all, m.Erased.Lacking(r.From, r.To)...)
			}
		}
	}
	return all
}

// erased returns the sequences that are known to have been erased.
func (s *streamSource) erased() outbox.Sequences {
	if s.info == nil {
		return nil
	}
	// what can't be read explains nothing
	all, _ := outbox.ParseSequences(s.info.Config.Metadata[outbox.MetadataErased])
	if s.past != nil {
		all = all.With(s.past.archive.WasErased()...)
	}
	return all
}

// complete reports whether it has every message from the first one on, but for those that were erased.
func (s *streamSource) complete() bool { return len(s.erased().Lacking(1, s.first-1)) == 0 }

// readPast calls f with the archived messages from one sequence to another, and returns the sequence behind
// them.
func (s *streamSource) readPast(ctx context.Context, from, to uint64, f func(*Message) error) (uint64,
	error) {
	p := s.past
	if p == nil || from >= p.hot {
		return from, nil
	}
	next := p.archive.Next()
	task := progress.Count(ctx, "reading the archive of stream "+s.name, "messages",
		int64(min(to+1, next)-from))
	defer task.End()
	for _, segment := range p.archive.Segments {
		if t := s.match.sel.Time.From; segment.Last < from || t != nil &&
			segment.To.Before(t.Add(-clockSlack)) {
			continue
		}
		err := p.archive.Verify(ctx, segment, func(m *archive.Message) error {
			switch {
			case m.Seq < from:
				return nil
			case m.Seq > to, s.tooLate(m.Time):
				return jsapi.ErrStop
			case !s.match.bounded(m.Subject):
				return nil // it may be somebody else's
			}
			task.Set(int64(m.Seq - from + 1))
			msg := &Message{Seq: m.Seq, Subject: m.Subject, Header: m.Header, Data: m.Data,
				Time: m.Time}
			return s.event(msg, f)
		})
		if errors.Is(err, jsapi.ErrStop) {
			return to + 1, nil
		}
		if err != nil {
			return from, err
		}
	}
	return max(from, next), nil
}

// next is the first archived message from a sequence on; nil: there is none.
func (p *past) next(ctx context.Context, seq uint64) (next *Message, err error) {
	err = p.archive.Read(ctx, seq, func(m *archive.Message) error {
		next = &Message{Seq: m.Seq, Header: m.Header}
		return jsapi.ErrStop
	})
	if errors.Is(err, jsapi.ErrStop) {
		err = nil
	}
	return next, err
}

// stillAll makes sure that the stream has all that it had from a sequence on, where the archive ends, if that
// was read from another one on: retention may have gone beyond that meanwhile.
func (s *streamSource) stillAll(ctx context.Context, begin, from uint64) error {
	if from == begin {
		return nil
	}
	info, err := s.stream.Info(ctx)
	if err != nil {
		return fmt.Errorf("stream %s: %w", s.name, err)
	}
	s.info.Config.Metadata = info.Config.Metadata
	if gone := s.erased().Lacking(from, info.State.FirstSeq-1); len(gone) > 0 {
		return s.vanished(fmt.Sprintf("messages %d to %d were removed from stream %s while its archive was "+
			"read", gone[0].From, gone[len(gone)-1].To, s.name))
	}
	return nil
}

// tooLate reports whether everything from a message of that time on lies behind the selection.
func (s *streamSource) tooLate(stored time.Time) bool {
	t := s.match.sel.Time.To
	return t != nil && stored.After(t.Add(clockSlack))
}
