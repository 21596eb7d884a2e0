package consumeradmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// past is the archived part of the stream, as far as the stream does not have it any more. Its methods may be
// called on nil, which has nothing.
type past struct {
	archive *archive.Archive
	hot     uint64 // sequence of the first message that the stream still has
}

// openPast opens the archive, if it has all that the stream lacks. What it returns lets it go.
func (a *Admin) openPast(ctx context.Context, stream jetstream.Stream) (closed func(), err error) {
	closed = func() {}
	info := stream.CachedInfo()
	first := info.State.FirstSeq
	if a.Archive == "" || first <= 1 {
		return closed, nil
	}
	store, err := archive.Open(ctx, a.Archive)
	if err != nil {
		return closed, err
	}
	closed = func() { _ = store.Close() }
	of, err := archive.Load(ctx, store, archive.FolderOf(a.Stream, info.Created), nil)
	var erased outbox.Sequences // between archive and stream there may be nothing else
	if err == nil {
		erased, err = outbox.ParseSequences(info.Config.Metadata[outbox.MetadataErased])
	}
	if err == nil && len(erased.Lacking(of.Next(), first-1)) == 0 {
		if err = of.Agrees(ctx, a.API); err == nil {
			a.past = &past{of, first}
		}
	}
	if err != nil {
		closed()
	}
	return closed, err
}

var errFound = errors.New("found")

// read calls f with the archived messages of the chosen segments, from a sequence on, that the stream does
// not have, until it returns false.
func (p *past) read(ctx context.Context, from uint64, chosen func(*archive.Manifest) bool,
	f func(*archive.Message) (more bool, err error)) error {
	if p == nil {
		return nil
	}
	task := progress.Count(ctx, "reading the archive", "segments", int64(len(p.archive.Segments)))
	defer task.End()
	for i, s := range p.archive.Segments {
		if s.Last < from || s.First >= p.hot || !chosen(s) {
			continue
		}
		task.Set(int64(i))
		err := p.archive.Verify(ctx, s, func(m *archive.Message) error {
			if m.Seq < from {
				return nil
			}
			if m.Seq >= p.hot {
				return errFound
			}
			more, err := f(m)
			if err == nil && !more {
				err = errFound
			}
			return err
		})
		if errors.Is(err, errFound) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// resolve finds the last sequence that stays done, if that or what follows it lies in the archive.
func (p *past) resolve(ctx context.Context, t target) (to uint64, found bool, err error) {
	if p == nil || t.kind == "start" || t.kind == "seq" {
		return t.seq - 1, p != nil && t.seq < p.hot, nil
	}
	err = p.read(ctx, 1, func(s *archive.Manifest) bool {
		if t.kind == "time" {
			return !s.To.Before(t.time)
		}
		return s.Greatest != nil && s.Greatest.Compare(t.position) >= 0
	}, func(m *archive.Message) (bool, error) {
		if t.kind == "time" {
			found = !m.Time.Before(t.time)
		} else {
			s, err := p.stored(m)
			if s == nil || err != nil {
				return s == nil, err
			}
			found = s.outflow.Pos.Compare(t.position) >= 0
		}
		to = m.Seq - 1
		return !found, nil
	})
	return to, found, err
}

// stored is the message of an event; nil: it is a cut.
func (p *past) stored(m *archive.Message) (*stored, error) {
	if outbox.CutOf(m.Subject, m.Header) != nil {
		return nil, nil
	}
	h, err := outbox.ParseHeader(m.Header.Get(outbox.HeaderName))
	if err != nil {
		return nil, fatal("foreign_message", fmt.Sprintf("the archived message at sequence %d is not "+
			"outflow's: %v", m.Seq, err), "")
	}
	return &stored{m.Seq, m.Time, h}, nil
}

// all chooses all segments.
func all(*archive.Manifest) bool { return true }

// first is the first message at or behind a sequence that one of the filters lets through; nil: none.
func (p *past) first(ctx context.Context, seq uint64, filters []string) (first *stored, err error) {
	err = p.read(ctx, seq, all, func(m *archive.Message) (more bool, err error) {
		if everything(filters) != nil && !slices.ContainsFunc(filters, func(f string) bool {
			return lets(f, m.Subject)
		}) {
			return true, nil
		}
		first, err = p.stored(m)
		return first == nil, err
	})
	return first, err
}

// message is the event's message at a sequence; nil: the stream has it, or nobody, or it is a cut.
func (p *past) message(ctx context.Context, seq uint64) (at *stored, err error) {
	if !p.has(seq) {
		return nil, nil
	}
	err = p.read(ctx, seq, all, func(m *archive.Message) (more bool, err error) {
		if m.Seq == seq {
			at, err = p.stored(m)
		}
		return false, err
	})
	return at, err
}

// positions are those of the events that the stream does not have any more where parked ones, which ascend,
// have their sequences: other events, if those are of another stream.
func (p *past) positions(ctx context.Context, parked []parkedEvent) (map[int64]string, error) {
	at := map[int64]string{}
	within := func(first, last uint64) bool {
		i, _ := slices.BinarySearchFunc(parked, int64(first), func(e parkedEvent, seq int64) int {
			return cmp.Compare(e.seq, seq)
		})
		return i < len(parked) && parked[i].seq <= int64(last)
	}
	return at, p.read(ctx, 1, func(s *archive.Manifest) bool {
		return within(s.First, s.Last)
	}, func(m *archive.Message) (bool, error) {
		if !within(m.Seq, m.Seq) {
			return true, nil
		}
		s, err := p.stored(m)
		if s != nil {
			at[int64(m.Seq)] = s.outflow.Pos.String()
		}
		return true, err
	})
}

// has reports whether there is a message at a sequence that the stream does not have any more.
func (p *past) has(seq uint64) bool { return p.count(seq, seq) > 0 }

// count is how many messages there are from one sequence to another, by the manifests.
func (p *past) count(from, to uint64) (n uint64) {
	if p == nil {
		return 0
	}
	within := func(first, last uint64) uint64 {
		first, last = max(first, from, 1), min(last, to, p.hot-1)
		return max(last+1, first) - first
	}
	for _, s := range p.archive.Segments {
		n += within(s.First, s.Last)
		for _, r := range s.Holes() {
			n -= within(r.From, r.To)
		}
	}
	return n
}

// lets reports whether a filter lets a subject through.
func lets(filter, subject string) bool {
	f, s := strings.Split(filter, "."), strings.Split(subject, ".")
	for i, token := range f {
		switch {
		case token == ">":
			return len(s) > i
		case len(s) <= i || token != "*" && token != s[i]:
			return false
		}
	}
	return len(f) == len(s)
}
