package repair

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// erasures returns the fault of a plan that may publish what is erased: rows would be published while an
// erasure has not finished, which could not tell them from what was written before its cut; or the stream has
// erased messages that the database knows nothing of, so their rows may be in it again. It is nil if the plan
// publishes no rows.
func (r *repair) erasures(ctx context.Context, f *finding, p *plan) (*outbox.Fault, error) {
	if p.scan == nil || p.scan.counts[missing] == 0 {
		return nil, nil
	}
	if open := erasure.Unfinished(p.scan.requests, r.cfg.Slot); len(open) > 0 {
		return &outbox.Fault{Class: outbox.Gap, Code: "erase_unfinished",
			Message: fmt.Sprintf("%s would be published, and an erasure has not finished (request %s)",
				units.Of(p.scan.counts[missing], "row"), strings.Join(open, ", "))}, nil
	}
	unknown, err := r.unknown(ctx, f, p.scan.requests, f.Stream.Erased)
	if err != nil {
		return nil, err
	}
	if n := unknown.Count(); n > 0 {
		return &outbox.Fault{Class: outbox.Gap, Code: "erase_forgotten",
			Message: fmt.Sprintf("%d messages were erased from stream %s, from %d to %d, by requests that "+
				"the database does not know: it is from before them, and may have their rows again among "+
				"the %d that would be published", n, r.cfg.Stream, unknown[0].From,
				unknown[len(unknown)-1].To, p.scan.counts[missing])}, nil
	}
	return nil, nil
}

// unknown are those of the stream's erased messages that the database knows nothing of.
func (r *repair) unknown(ctx context.Context, f *finding, of []*erasure.Record, erased outbox.Sequences) (
	outbox.Sequences, error) {
	unknown := erasure.Unknown(of, r.cfg.Slot, r.cfg.Stream, erased)
	if len(unknown) == 0 || r.cfg.Archive.URL == "" {
		return unknown, nil
	}
	was, err := r.erasedFromArchive(ctx, of, sameSequences(&f.Stream))
	if err != nil {
		return nil, err
	}
	var rest outbox.Sequences
	for _, u := range unknown {
		rest = append(rest, was.Lacking(u.From, u.To)...)
	}
	return rest, nil
}

// end is where the stream ends.
func (r *repair) end(f *finding) *erasure.End {
	return &erasure.End{Stream: r.cfg.Stream, Created: f.Stream.Created, Last: f.Stream.LastSeq}
}

// erasedBehind reports whether what comes behind the end of the stream may be taken for erased.
func (r *repair) erasedBehind(f *finding, s *scan) bool {
	return len(f.Stream.ErasedBehind()) > 0 || r.end(f).MayBeBefore(s.requests)
}

// cuts does something with the requests whose cuts may lie behind the end of the stream.
func (r *repair) cuts(ctx context.Context, f *finding, s *scan,
	do func(*erasure.Ledger, context.Context, erasure.End) error) error {
	end := r.end(f)
	if s == nil || !end.MayBeBefore(s.requests) {
		return nil
	}
	return conns.Erasures(ctx, r.cfg, f.Server, do, *end)
}

// forgetErased takes what was erased behind the end that the stream has lost out of its metadata, and out of
// the cuts of requests, while the record says that a repair is under way: other messages come under those
// sequences. What the database knows nothing of stays, unless that was accepted: by that alone the next
// repair is warned. Killed between the two, the repair does the rest when it is run again: neither asks what
// the other has done.
func (r *repair) forgetErased(ctx context.Context, l *backfill.Conns, f *finding, s *scan) error {
	if err := r.cuts(ctx, f, s, (*erasure.Ledger).Lower); err != nil {
		return err
	}
	lost := f.Stream.ErasedBehind()
	if len(lost) > 0 && !r.o.DespiteErasure {
		unknown, err := r.unknown(ctx, f, s.requests, lost)
		if err != nil {
			return err
		}
		var known outbox.Sequences
		for _, e := range lost {
			known = append(known, unknown.Lacking(e.From, e.To)...)
		}
		lost = known
	}
	return l.NATS.ForgetErased(ctx, lost)
}

// sameSequences reports whether a folder of the archive may be of a stream whose messages this one has at
// their sequences: it is its own, or the one that it was restored from, or an older one, from which the
// stream of that may have been restored.
func sameSequences(st *relay.StreamState) func(folder string) bool {
	_, from, restored := archive.StreamOf(st.Restored)
	return func(folder string) bool {
		_, created, ok := archive.StreamOf(folder)
		return ok && (created.Equal(st.Created) || restored && !created.After(from))
	}
}

// erasedFromArchive returns the sequences whose messages requests that the database knows have erased from
// the archive, in those folders that are of the stream. Those that retention had taken from the stream
// before, a request has not noted itself, and a stream that was restored lists them.
func (r *repair) erasedFromArchive(ctx context.Context, of []*erasure.Record,
	is func(folder string) bool) (outbox.Sequences, error) {
	store, err := archive.Open(ctx, r.cfg.Archive.URL)
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close() }()
	folders, err := archive.Folders(ctx, store, r.cfg.Stream)
	if err != nil {
		return nil, err
	}
	unknown := func(request string) bool {
		return !slices.ContainsFunc(of, func(e *erasure.Record) bool {
			return e.Request == request && (e.Slot == r.cfg.Slot || e.Stream == r.cfg.Stream)
		})
	}
	var all outbox.Sequences
	for _, folder := range folders {
		if !is(folder) {
			continue
		}
		a, err := archive.Load(ctx, store, folder, nil)
		if err != nil {
			return nil, err
		}
		for _, m := range a.Segments {
			if slices.ContainsFunc(m.Erasure, unknown) {
				continue
			}
			for _, e := range m.Erased { // who erased what was never archived, it does not say
				all = append(all, outbox.Sequences(m.Missing).Lacking(e.From, e.To)...)
			}
		}
	}
	return outbox.Sequences(nil).With(all...), nil
}
