package replay

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/args"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
	"github.com/outflowhq/outflow/sink"
)

// tableSource reads a snapshot of the outbox table.
type tableSource struct {
	cfg    config.Config
	layout *wiring.Layout
	match  *matcher
	snap   *tablesnapshot.Snapshot
	enc    *sink.Encoder
	at     outbox.Header // of all messages: where in the WAL the table was read
	column string        // of the time; "": none
	read   []catalog.Column
	back   erasure.Back // selected rows that were erased before; nil: not looked for yet
}

// openTable takes a snapshot.
func openTable(ctx context.Context, cfg config.Config, log *slog.Logger, l *wiring.Layout, m *matcher,
	timeColumn string) (_ *tableSource, err error) {
	t := &tableSource{cfg: cfg, layout: l, match: m}
	if t.column, err = pickTime(l.Table, timeColumn); err != nil {
		return nil, err
	}
	sc, err := wiring.Sink(cfg, l, log)
	if err != nil {
		return nil, err
	}
	if t.enc, err = sink.NewEncoder(sc); err != nil {
		return nil, err
	}
	session, err := wiring.Inspect(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer session.Close()
	server, err := session.Server(ctx)
	if err != nil {
		return nil, err
	}
	t.at = outbox.Header{Due: server.WALEnd, Thru: server.WALEnd, Timeline: server.History.At(server.WALEnd)}
	defer wiring.WaitPostgres(ctx, cfg)()
	if t.snap, err = tablesnapshot.Open(ctx, wiring.Catalog(cfg), ""); err != nil {
		return nil, err
	}
	t.read = t.snap.StreamedColumns(l.Columns())
	return t, nil
}

func (t *tableSource) close() {
	if t != nil && t.snap != nil {
		t.snap.Close()
	}
}

// check refuses a selection that can't be read from the table.
func (t *tableSource) check() error {
	sel := t.match.sel
	switch {
	case !t.snap.Ordered(t.query()):
		return fatal("replay_no_key", fmt.Sprintf("table %s has neither a key nor an id that counts: the "+
			"order of its rows is not in it", t.layout.Mapping.Table), "Only the stream can be replayed")
	case sel.Seq.Given():
		return fatal("replay_table", "--seq: a row does not say at which sequence it was published",
			"Choose by --doc, --key, --id or --time to read from the table")
	case sel.Position.Given():
		return fatal("replay_table", "--position: a row does not say at which position it was committed",
			"Choose by --doc, --key, --id or --time to read from the table")
	case len(sel.IDs) > 0 && t.layout.ID == "":
		return fatal("replay_table", fmt.Sprintf("--id: table %s has no id column (columns.id)",
			t.layout.Mapping.Table), "Choose by --doc or --key")
	case sel.Time.Given() && t.column == "":
		return fatal("replay_time", fmt.Sprintf("--time: table %s has no column that says when a row was "+
			"written: there is none of %v", t.layout.Mapping.Table, args.TimeColumns),
			"Name one of type timestamptz with --time-column, or choose by --key or --doc")
	case len(sel.Actors) > 0 && t.layout.Mapping.Actor == "":
		return fatal("replay_table", fmt.Sprintf("--actor: table %s has no column of actors "+
			"(columns.actor_id)", t.layout.Mapping.Table), "Choose by --doc or --key")
	}
	return nil
}

// checkResumable refuses to continue behind a row that others are equal to in the order: which of them were
// published is unknown.
func (t *tableSource) checkResumable(ctx context.Context, id string, behind rowKey) error {
	n, err := t.snap.CountAt(ctx, t.query(), tablesnapshot.Cursor{Doc: behind.doc, Key: behind.key,
		ID: behind.id})
	if err == nil && n > 1 {
		err = fatal("replay_alike", fmt.Sprintf("--replay-id %s: %d rows of table %s have document, key "+
			"and id of the one that was "+
			"published last: which of them are there can't be told", id, n, t.layout.Mapping.Table),
			"Begin again with another id, into another subject or stream. Where an id column (columns.id) "+
				"tells rows apart, a replay can go on anywhere")
	}
	return err
}

const (
	typeTimestamp   = 1114
	typeTimestamptz = 1184
)

// pickTime finds the column of the time.
func pickTime(t catalog.Table, wanted string) (string, error) {
	isTime := func(name string) bool {
		c, ok := t.Column(name)
		return ok && (c.TypeOID == typeTimestamptz || c.TypeOID == typeTimestamp)
	}
	if wanted != "" {
		if !isTime(wanted) {
			return "", usage("time_column", fmt.Sprintf("--time-column %q: table %s.%s has no column of "+
				"that name with a timestamp", wanted, t.Schema, t.Name), "Name one that it has")
		}
		return wanted, nil
	}
	if i := slices.IndexFunc(args.TimeColumns, isTime); i >= 0 {
		return args.TimeColumns[i], nil
	}
	return "", nil
}

// left says how many partitions have left the table, as far as the table of states beside it says; "": none.
func (t *tableSource) left(ctx context.Context) (string, error) {
	n, of, q, name := 0, t.snap.Table(), t.snap.Querier(), "table "+t.layout.Mapping.Table
	kept, err := catalog.Beside(ctx, q, of, catalog.PartitionStates)
	for _, states := range kept {
		if err != nil || !states.Readable {
			continue
		}
		var gone int
		err = q.QueryRow(ctx, "SELECT count(*) FROM "+states.Table+" l WHERE "+catalog.OfRoot+
			" AND l.state IN ('dropped', 'kept')", of.OID, of.Quoted()).Scan(&gone)
		n += gone
	}
	switch {
	case err != nil || n == 0:
		return "", err
	case !of.Partitioned:
		return "rows have left " + name, nil
	}
	return fmt.Sprintf("%s %s left %s", units.Of(n, "partition"), units.Agree(n, "has", "have"), name), nil
}

// note says how reading the table differs from reading the stream.
func (t *tableSource) note() string {
	text := ""
	if t.cfg.Source.Messages() {
		text = "; it has only what was written to it: events that were messages are in the stream alone"
	}
	if t.layout.Mapping.Keyed() {
		return text
	}
	return text + fmt.Sprintf("; without a key it goes by %s: transactions that wrote at the same time may "+
		"have committed in another order", t.layout.ID)
}

func (t *tableSource) query() tablesnapshot.Query {
	sel, m := t.match.sel, t.layout.Mapping
	q := tablesnapshot.Query{Mapping: m, ID: t.layout.ID, Sorted: true}
	bound := func(by, op string, values ...string) {
		q.Bounds = append(q.Bounds, tablesnapshot.Bound{By: by, Op: op, Values: values})
	}
	if len(sel.Docs) > 0 {
		bound(tablesnapshot.SortDoc, "=", sel.Docs...)
	}
	if len(sel.Actors) > 0 {
		bound(m.Actor, "=", sel.Actors...)
	}
	if len(sel.IDs) > 0 {
		bound(t.layout.ID, "=", sel.IDs...)
	}
	if sel.Key.From != nil {
		bound(tablesnapshot.SortKey, ">=", *sel.Key.From)
	}
	if sel.Key.To != nil {
		bound(tablesnapshot.SortKey, "<=", *sel.Key.To)
	}
	if sel.Time.From != nil {
		bound(t.column, ">=", sel.Time.From.UTC().Format(time.RFC3339Nano))
	}
	if sel.Time.To != nil {
		bound(t.column, "<=", sel.Time.To.UTC().Format(time.RFC3339Nano))
	}
	return q
}

// each calls f with the message of each selected row behind after, in the canonical order. n and of number
// them.
func (t *tableSource) each(ctx context.Context, after *rowKey, n, of uint64, f func(*Message) error) error {
	rows, err := backfill.NewRows(t.cfg, t.layout, t.read)
	if err != nil {
		return err
	}
	if err := t.findErased(ctx); err != nil {
		return err
	}
	q := t.query()
	if after != nil {
		q.After = &tablesnapshot.Cursor{Doc: after.doc, Key: after.key, ID: after.id}
	}
	for _, c := range t.read {
		q.Columns = append(q.Columns, c.Name)
	}
	own := len(q.Columns)
	q.Columns = append(q.Columns, tablesnapshot.SortDoc, tablesnapshot.SortKey, tablesnapshot.SortID)
	if t.column != "" {
		q.Columns = append(q.Columns, t.column)
	}
	sel := t.match.sel
	task := progress.Count(ctx, "reading table "+t.layout.Mapping.Table, "rows", 0)
	defer task.End()
	return t.snap.Rows(ctx, q, func(v [][]byte) error {
		task.Add(1)
		e, err := rows.Event(v[:own])
		if err != nil || t.back.Has(e.ID) {
			return err
		}
		h := t.at
		h.Pos = outbox.Position{LSN: h.Due, Index: outbox.RepairedIndex + uint32(n)}
		h.N, h.Of, h.ID, h.Key = int(n), int(of), e.ID, e.Key
		e.Pos = h.Pos
		made, err := t.enc.Message(e, &h)
		if err != nil {
			return err
		}
		if sel.Filter != "" && !covers(sel.Filter, made.Subject) || !inBounds(t.match.bounds, made.Subject) {
			return nil
		}
		m := &Message{Subject: made.Subject, Header: nats.Header{}, Data: made.Data, Outflow: h, Doc: e.Doc,
			DocOK: e.Null&relay.NullDoc == 0}
		for name, value := range made.Header {
			m.Header[name] = []string{value}
		}
		m.resume = resumePoint{from: FromTable, row: rowKey{string(v[own]), string(v[own+1]),
			string(v[own+2])}}
		if t.column != "" {
			m.Time = parseTimestamp(string(v[own+3]))
		}
		n++
		return f(m)
	})
}

// findErased finds the selected rows that an erasure deleted before, once: they are left out.
func (t *tableSource) findErased(ctx context.Context) error {
	if t.back != nil || t.layout.ID == "" {
		return nil
	}
	defer wiring.WaitPostgres(ctx, t.cfg)()
	all, err := erasure.Read(ctx, t.snap.Querier(), t.snap.Table())
	if err == nil {
		t.back, err = erasure.FindBack(ctx, t.snap, t.query(), all)
	}
	if text := t.back.String(); text != "" {
		progress.Step(ctx, "%s", text)
	}
	return err
}

// parseTimestamp reads what PostgreSQL prints with DateStyle ISO and TimeZone UTC; zero if it is no moment,
// such as infinity.
func parseTimestamp(text string) time.Time {
	for _, layout := range []string{"2006-01-02 15:04:05.999999Z07", "2006-01-02 15:04:05.999999"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UTC()
		}
	}
	return time.Time{}
}

// summarize summarizes the selected rows behind after.
func (t *tableSource) summarize(ctx context.Context, after *rowKey, sum *Summary) error {
	err := t.each(ctx, after, 0, 0, func(m *Message) error { sum.add(m); return nil })
	sum.close()
	return err
}

// has counts how many of the ids rows of the table have.
func (t *tableSource) has(ctx context.Context, ids []string) (n int, err error) {
	found := map[string]bool{}
	defer wiring.WaitPostgres(ctx, t.cfg)()
	err = t.snap.Rows(ctx, tablesnapshot.Query{
		Mapping: t.layout.Mapping, ID: t.layout.ID, Columns: []string{tablesnapshot.SortID},
		Bounds: []tablesnapshot.Bound{{By: t.layout.ID, Op: "=", Values: ids}},
	}, func(v [][]byte) error { found[string(v[0])] = true; return nil })
	return len(found), err
}

// exists says what the table has, for errors.
func (t *tableSource) exists(ctx context.Context) (string, error) {
	var n uint64
	var first, last time.Time
	q := tablesnapshot.Query{Mapping: t.layout.Mapping, ID: t.layout.ID,
		Columns: []string{tablesnapshot.SortID}}
	if t.column != "" {
		q.Columns = append(q.Columns, t.column)
	}
	err := t.snap.Rows(ctx, q, func(v [][]byte) error {
		n++
		if t.column == "" {
			return nil
		}
		if at := parseTimestamp(string(v[1])); !at.IsZero() {
			if first.IsZero() || at.Before(first) {
				first = at
			}
			if at.After(last) {
				last = at
			}
		}
		return nil
	})
	text := fmt.Sprintf("table %s has %s", t.layout.Mapping.Table, units.Of(n, "row"))
	if !first.IsZero() {
		text += fmt.Sprintf(" (%s %s to %s)", t.column, first.Format(time.RFC3339), last.Format(time.RFC3339))
	}
	return text, err
}
