package replay

import (
	"context"
	"fmt"
	"strconv"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// choice is where the events are read from, and why.
type choice struct {
	source Source
	why    string
	sum    *Summary // of the selection in that source; nil if it was not read yet
	whole  bool     // the stream was known to have all that is left of it before it was read
}

// choose decides where to read from. The stream has the events in their original order; it is read as long as
// it is known to have the whole selection. Otherwise the table is read, if it has everything that the stream
// still has of the selection: then, as far as can be known, the table lacks nothing. If both lack something
// they are not mixed, because the order between them would be made up.
func (r *replay) choose(ctx context.Context) (choice, error) {
	if err := r.shortened(ctx); err != nil {
		return choice{}, err
	}
	switch {
	case r.resume != nil && r.o.From != "" && Source(r.o.From) != r.resume.from:
		return choice{}, usage("replay_from", fmt.Sprintf("--from %s: replay %s was begun from the %s",
			r.o.From, r.o.ID, r.resume.from), "Go on with it without --from")
	case r.resume != nil && r.resume.from == FromStream && r.stream.first > r.resume.seq+1:
		if holds, why := r.stream.holds(); !holds {
			return choice{}, r.rangeGone(ctx, "what comes behind the events that were read already: "+why)
		}
		return choice{source: FromStream, why: "where this replay was begun", whole: true}, nil
	case r.resume != nil:
		return choice{source: r.resume.from, why: "where this replay was begun",
			whole: r.resume.from == FromStream}, nil
	case r.o.From == string(FromTable):
		return choice{source: FromTable, why: "--from table"}, nil
	case r.o.From == string(FromStream):
		if r.streamErr != nil {
			return choice{}, r.streamErr
		}
		holds, why := r.stream.holds()
		if !holds && r.o.Selection.Seq.Given() {
			return choice{}, r.rangeGone(ctx, why)
		}
		if !holds {
			progress.Step(ctx, "what was removed from the stream is not in it any more: %s", why)
		}
		return choice{source: FromStream, why: "--from stream; " + why, whole: holds}, nil
	case r.streamErr != nil && r.cfg.Source.Messages():
		return choice{}, r.streamErr
	case r.streamErr != nil:
		return choice{source: FromTable, why: r.streamErr.Error()}, nil
	}
	holds, why := r.stream.holds()
	if holds {
		return choice{source: FromStream, why: why, whole: true}, nil
	}
	if err := r.needTable(ctx); err != nil {
		return choice{}, r.rangeGone(ctx, fmt.Sprintf("%s. Nor can the table be read instead: %s", why,
			messageOfError(err)))
	}
	if r.cfg.Source.Messages() {
		return choice{}, fatal("replay_unsure", fmt.Sprintf("%s; table %s has only what was written to it, "+
			"not the events that were messages (source: both)", why, r.layout.Mapping.Table),
			"Decide: --from stream reads what the stream still has, --from table what the table has")
	}
	return r.compare(ctx, why)
}

// shortened returns an error if the stream ends before what a replay that goes on has yet to read, or comes
// again behind that: it would be left out, and the replay count as done.
func (r *replay) shortened(ctx context.Context) error {
	if r.resume == nil || r.resume.from != FromStream {
		return nil
	}
	to := r.resume.end
	if end := r.o.Selection.Seq.To; end != nil {
		to = min(to, *end)
	}
	if r.resume.seq >= to {
		return nil
	}
	if r.stream.last >= to {
		return r.lostEnd(ctx, to)
	}
	return fatal("replay_removed", fmt.Sprintf("stream %s ends at sequence %d, and replay %s was to read up "+
		"to %d: the broker has lost the stream's end, or it was made anew", r.stream.name, r.stream.last,
		r.o.ID, to), "When Outflow has published again what was lost, run the same command again; otherwise "+
		"begin with another --replay-id")
}

// lostEnd returns an error if the broker has lost the message up to which is read, and kept the stream's last
// sequence: what it lost comes again under new ones.
func (r *replay) lostEnd(ctx context.Context, to uint64) error {
	s := r.stream
	archived := outbox.Sequences(s.past.missing()).Has(to)
	if to < s.info.State.FirstSeq && !archived || s.erased().Has(to) { // see holds
		return nil
	}
	var m *Message
	var err error
	if archived {
		m, err = s.past.next(ctx, to)
	}
	if m == nil && err == nil {
		m, err = s.get(ctx, jsapi.MessageRequest{Seq: to, Next: ">"})
	}
	if err != nil || m != nil && m.Seq == to {
		return err
	}
	where := "has yet to come again"
	if m != nil {
		if lost, err := strconv.ParseUint(m.Header.Get(outbox.HeaderLost), 10, 64); err != nil || lost > to {
			return nil // somebody deleted it
		}
		where = fmt.Sprintf("comes again from sequence %d on", m.Seq)
	}
	return fatal("replay_removed", fmt.Sprintf("sequence %d of stream %s is gone, and replay %s was to read "+
		"up to it: what the broker has lost %s", to, s.name, r.o.ID, where),
		"When Outflow has published again what was lost, begin with another --replay-id")
}

// compareBatch is how many ids the table is asked for at a time.
const compareBatch = 500

// compare finds out whether the table has every event of the selection that the stream still has.
func (r *replay) compare(ctx context.Context, why string) (choice, error) {
	left := &Summary{Source: FromStream}
	var batch []string
	var lacking uint64
	untold := "" // why some event can't be looked for
	ask := func() error {
		if len(batch) == 0 {
			return nil
		}
		n, err := r.table.has(ctx, batch)
		lacking += uint64(len(batch) - n)
		batch = batch[:0]
		return err
	}
	err := r.stream.summarize(ctx, 0, left, func(m *Message) error {
		text := outbox.HeaderID(m.Header.Get(outbox.HeaderName))
		id, whole := outbox.ParseHeaderValue(text)
		switch {
		case r.layout.ID == "" || text == "":
			untold = "events have no id"
		case !whole:
			untold = fmt.Sprintf("the id of the message at sequence %d is cut", m.Seq)
		default:
			if batch = append(batch, id); len(batch) == compareBatch {
				return ask()
			}
		}
		return nil
	})
	if err == nil {
		err = ask()
	}
	if err != nil {
		return choice{}, err
	}
	if n := len(r.o.Selection.IDs); n > 0 && left.Events == uint64(n) {
		return choice{source: FromStream, sum: left,
			why: fmt.Sprintf("stream %s has each of the %d ids", r.stream.name, n)}, nil
	}
	demand := func(reason string) error {
		return fatal("replay_unsure", fmt.Sprintf("%s; %s", why, reason),
			fmt.Sprintf("Decide: --from stream reads the %s that it still has, --from table what "+
				"the table has", units.Of(left.Events, "event")))
	}
	switch {
	case r.cfg.Archive.URL != "" && r.stream.info == nil: // it is read together with the stream
		return choice{}, demand("nor is its archive read without it, so nobody knows what has left the table")
	case r.cfg.Archive.URL != "" && r.stream.past == nil && r.stream.first != 1:
		// rows leave the table as soon as they are archived
		return choice{}, demand("nor does the archive have them (is archive.url the right one, and " +
			"mounted?), so nobody knows what has left the table")
	case left.Events > 0 && untold != "":
		return choice{}, demand(fmt.Sprintf("whether the table has those that are left can't be known: %s",
			untold))
	case lacking > 0:
		return choice{}, demand(fmt.Sprintf("table %s lacks %d of the %d events of the selection that the "+
			"stream still has", r.layout.Mapping.Table, lacking, left.Events))
	}
	rows := &Summary{Source: FromTable}
	if err := r.table.summarize(ctx, nil, rows); err != nil {
		return choice{}, err
	}
	if rows.Events == left.Events && left.Events > 0 {
		return choice{source: FromStream, sum: left, why: fmt.Sprintf("%s, but what it has of the "+
			"selection (%s) is all that the table has", why, units.Of(left.Events, "event"))}, nil
	}
	return choice{source: FromTable, sum: rows, why: fmt.Sprintf("%s; the table has all %s of the "+
		"selection that the stream still has, and %d more", why, units.Of(left.Events, "event"),
		rows.Events-min(rows.Events, left.Events))}, nil
}

// rangeGone is the error for what neither stream nor table has any more.
func (r *replay) rangeGone(ctx context.Context, why string) error {
	return r.nothingThere(ctx, "nobody has this range any more: "+why)
}

// nothingThere is an error that also says what is there.
func (r *replay) nothingThere(ctx context.Context, message string) error {
	exists := "the stream was not asked"
	if r.stream != nil {
		exists = r.stream.exists()
	}
	hint := "Choose what is there"
	if r.openTable(ctx) == nil {
		text, err := r.table.exists(ctx)
		if err != nil {
			return err
		}
		exists += "; " + text
		hint = "Choose what is there; rows of the table by --doc, --key, --id or --time"
	}
	return fatal("replay_gone", fmt.Sprintf("%s. There is: %s", message, exists), hint)
}

// messageOfError is an error without its hint.
func messageOfError(err error) string {
	if f := outbox.FaultOf(err); f != nil {
		return f.Message
	}
	return err.Error()
}
