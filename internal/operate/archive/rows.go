package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// restoreOrigin is the replication origin of what is put back into the table: outflow run passes over
// transactions that have one. It stays, since the WAL names it by a number that PostgreSQL looks up.
const restoreOrigin = "outflow_restore"

// RowsOptions say what is put back.
type RowsOptions struct {
	Folder string // of the archive; "": the newest one with a segment
	DryRun bool   // only read the archive, and count

	From, To uint64 // the first and the last sequence; 0: the archive's

	Hit func(point string) // called at points where tests kill the process; may be nil
}

// Rows says what was put back. The JSON names are stable.
type Rows struct {
	Folder string `json:"folder"`
	Table  string `json:"table"`
	First  uint64 `json:"first"`
	Last   uint64 `json:"last"`

	Inserted    uint64 `json:"inserted"`     // with a dry run: would be, or are there
	There       uint64 `json:"there"`        // a row had the id already
	Erased      uint64 `json:"erased"`       // of documents that were erased, in an older copy
	DeadLetters uint64 `json:"dead_letters"` // messages that say of a row that it could not be published
	// Cut are the sequences of messages that have only the beginning of a long value, the first ones; CutN is
	// how many there are. Their rows can't be put back.
	Cut  []uint64 `json:"cut"`
	CutN uint64   `json:"cut_count"`

	Columns []string `json:"columns"` // that messages carry
	Left    []string `json:"left"`    // those that they don't: they have their defaults
	// Sequence moves that of the id column beyond the rows that are put back; "": it has none, as far as the
	// table says.
	Sequence string `json:"sequence,omitempty"`

	dry bool
}

func (r *Rows) String() string {
	text := fmt.Sprintf("table %s: %s put back, %d %s there, from messages %d to %d", r.Table,
		units.Of(r.Inserted, "row"), r.There, units.Agree(r.There, "was", "were"), r.First, r.Last)
	if r.dry {
		text = fmt.Sprintf("table %s: %s in messages %d to %d, counting those already there", r.Table,
			units.Of(r.Inserted, "row"), r.First, r.Last)
	}
	text += "\ncolumns  " + strings.Join(r.Columns, ", ")
	if len(r.Left) > 0 {
		text += fmt.Sprintf("\ndefaults %s: messages do not carry them", strings.Join(r.Left, ", "))
	}
	if r.Sequence != "" {
		text += "\nsequence it is where it was: before anybody writes, " + r.Sequence
	}
	if r.Erased > 0 {
		text += fmt.Sprintf("\nwithout  %d that were erased: this archive is an older copy, or the "+
			"erasure has not finished", r.Erased)
	}
	if r.DeadLetters > 0 {
		text += fmt.Sprintf("\nwithout  %d dead letters: they hold no payload", r.DeadLetters)
	}
	return text
}

// maxNamed is how many sequences are named.
const maxNamed = 10

// rowWriter puts rows back.
type rowWriter struct {
	conn   *pgx.Conn // nil: nothing is written
	layout *wiring.Layout
	carry  *carrier
	insert func(detached []catalog.Table) (string, error) // the statement
	rep    *Rows
	hit    func(string)

	erased  *erasure.Past
	doc     int // of the values, the one that is the document; -1: messages do not carry it
	created time.Time

	rows  [][]any // of each the values, and behind them the key as its message has it, if there is one
	bytes int
}

// Bounds on what one transaction writes.
const (
	maxRows     = 500
	maxRowBytes = 8 << 20
)

// PutBack inserts the rows of archived messages into the outbox table, as far as messages carry them: those
// whose id it does not have. They have a replication origin, so outflow run does not take them for events. A
// run that was killed is run again.
func PutBack(ctx context.Context, cfg config.Config, log *slog.Logger, o RowsOptions) (*Rows, error) {
	if err := wiring.NeedTable(cfg, "putting rows back"); err != nil {
		return nil, err
	}
	store, err := open(ctx, cfg, archive.OpenThere)
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close() }()
	a, folder, err := find(ctx, cfg, store, o.Folder)
	if err != nil {
		return nil, err
	}
	l, err := conns.Open(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	there, err := l.Session.Server(ctx)
	if err != nil {
		return nil, err
	}
	owner := conns.Owner(cfg, there)
	rec, _, err := l.Store.Load(ctx)
	if err != nil {
		return nil, err
	}
	if l.Layout.Follow(cfg, rec); !l.Layout.Mapping.OwnOnly {
		return nil, &outbox.Fault{Class: outbox.Fatal, Code: "rows_origin",
			Message: "replication.origin is any: outflow run would publish the rows that are put back again"}
	}
	w := &rowWriter{layout: l.Layout, hit: o.Hit, rep: &Rows{Folder: folder, Table: l.Layout.Mapping.Table,
		First: max(o.From, 1), Last: a.Next() - 1, Cut: []uint64{}, dry: o.DryRun}}
	if o.To > 0 {
		w.rep.Last = min(o.To, w.rep.Last)
	}
	if w.rep.First > w.rep.Last {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "flags",
			Message: fmt.Sprintf("--from %d --to %d: the archive has 1 to %d", o.From, o.To, a.Next()-1),
			Hint:    "`outflow archive list` shows what it has"}
	}
	if w.hit == nil {
		w.hit = func(string) {}
	}
	if err := w.prepare(cfg); err != nil {
		return nil, err
	}
	if !o.DryRun {
		if err := w.connect(ctx, owner); err != nil {
			return nil, err
		}
		defer postgres.Close(w.conn)
		if err := erasure.NoneAtWork(ctx, w.conn, l.Layout.Table); err != nil {
			return nil, err
		}
	}
	asked := w.conn
	if asked == nil {
		if asked, err = owner.Connect(ctx); err != nil {
			return nil, err
		}
		defer postgres.Close(asked)
	}
	st, err := l.NATS.State(ctx)
	if err != nil {
		return nil, err
	}
	if err := w.readErasures(ctx, asked, cfg.Stream, a.Created(), st.Created); err != nil {
		return nil, err
	}
	return w.rep, w.run(ctx, a)
}

// prepare decides which columns are written, and refuses a table that needs more.
func (w *rowWriter) prepare(cfg config.Config) (err error) {
	if w.carry, err = newCarrier(cfg, w.layout); err != nil {
		return err
	}
	t := w.layout.Table
	var names, values, needs []string
	var id string
	typed := func(c catalog.Column, n int) string {
		if c.TypeOID == byteaOID {
			return fmt.Sprintf("$%d::%s", n, c.Values)
		}
		return fmt.Sprintf("$%d::text::%s", n, c.Values)
	}
	for _, c := range t.Columns {
		n := slices.Index(w.carry.columns, c.Name)
		switch {
		case c.Generated:
		case n >= 0:
			names = append(names, postgres.Quote(c.Name))
			value := typed(c, n+1)
			values = append(values, value)
			if c.Name == w.layout.ID {
				id = value
			}
			w.rep.Columns = append(w.rep.Columns, c.Name)
		default:
			w.rep.Left = append(w.rep.Left, c.Name)
			if c.NotNull && !c.Default {
				needs = append(needs, c.Name)
			}
		}
	}
	if id == "" {
		return &outbox.Fault{Class: outbox.Fatal, Code: "rows_columns",
			Message: fmt.Sprintf("table %s has no id column (columns.id): nobody could tell which rows "+
				"it has",
				w.rep.Table)}
	}
	if len(needs) > 0 {
		return &outbox.Fault{Class: outbox.Fatal, Code: "rows_columns",
			Message: fmt.Sprintf("table %s needs values for %s, which messages do not carry", w.rep.Table,
				strings.Join(needs, ", "))}
	}
	table := postgres.Quote(t.Schema) + "." + postgres.Quote(t.Name)
	if c, _ := t.Column(w.layout.ID); c.Default && c.Category == "N" {
		// never back: the rows with the ids that it gave last may be gone, and are not all in the archive
		w.rep.Sequence = fmt.Sprintf("SELECT setval(%[1]s, greatest(max(%[2]s), nextval(%[1]s))) FROM %[3]s",
			"pg_get_serial_sequence("+postgres.Literal(table)+", "+postgres.Literal(c.Name)+")",
			postgres.Quote(c.Name), table)
	}
	same := postgres.Quote(w.layout.ID) + " = " + id
	if key, ok := t.Column(w.layout.Mapping.Key); ok {
		has, want := postgres.Quote(key.Name), typed(key, len(w.carry.columns)+1)
		if key.Category != "N" { // of a number a column that is wider now prints more digits
			has, want = has+"::text", "("+want+")::text" // json, point or hstore have no = that is found
		}
		same += " AND " + has + " = " + want
	}
	w.insert = func(detached []catalog.Table) (string, error) {
		var there strings.Builder
		for _, p := range detached {
			has, err := t.ColumnOf(p, w.layout.ID)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(&there, " AND NOT EXISTS (SELECT FROM ONLY %s WHERE %s = %s)", p.Quoted(), has, id)
		}
		return fmt.Sprintf("INSERT INTO %[1]s (%[2]s) OVERRIDING SYSTEM VALUE SELECT %[3]s "+
			"WHERE NOT EXISTS (SELECT FROM %[1]s WHERE %[4]s = %[5]s)%[7]s RETURNING %[6]s", table,
			strings.Join(names, ", "), strings.Join(values, ", "),
			postgres.Quote(w.layout.ID), id, same, there.String()), nil
	}
	return nil
}

const byteaOID = 17

// readErasures reads what must not come back. The connection is asked of each message of such a document. The
// archive is of a stream that was made at a time; now is that of the one that there is.
func (w *rowWriter) readErasures(ctx context.Context, conn *pgx.Conn, stream string, created,
	now time.Time) (err error) {
	if w.erased, err = erasure.OpenPast(ctx, conn, w.layout.Table); err != nil {
		return err
	}
	w.created = created.UTC().Truncate(time.Microsecond)
	w.erased.Stream, w.erased.Now = stream, now.UTC().Truncate(time.Microsecond)
	w.doc = slices.Index(w.carry.columns, w.layout.Mapping.Doc)
	return nil
}

// wasErased reports whether a message with these values is one of a document that was erased.
func (w *rowWriter) wasErased(ctx context.Context, m *archive.Message, values []any) (bool, error) {
	if w.doc < 0 {
		return false, nil
	}
	doc, _ := values[w.doc].(string)
	return w.erased.Has(ctx, doc, w.created, m.Header.Get(outbox.HeaderName), m.Seq)
}

// originPatience is how long another session that has the origin is waited for: one of a process that has
// just ended, or of an outflow archive rows at another database of the cluster.
const originPatience = time.Minute

// connect opens a connection whose transactions have the origin. Only one of a cluster can have it at a time.
func (w *rowWriter) connect(ctx context.Context, owner postgres.Target) (err error) {
	if w.conn, err = owner.Connect(ctx); err != nil {
		return err
	}
	defer progress.Wait(ctx, "waiting for another outflow archive rows at this PostgreSQL server")()
	for until := time.Now().Add(originPatience); ; {
		_, err = w.conn.Exec(ctx, `SELECT pg_replication_origin_create($1)
			WHERE pg_replication_origin_oid($1) IS NULL`, restoreOrigin)
		if err == nil || postgres.SQLState(err) == "23505" { // another one has just made it
			_, err = w.conn.Exec(ctx, `SELECT pg_replication_origin_session_setup($1)`, restoreOrigin)
		}
		if postgres.SQLState(err) != "55006" || time.Now().After(until) {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err != nil {
		postgres.Close(w.conn)
		switch postgres.SQLState(err) {
		case "42501":
			return &outbox.Fault{Class: outbox.Fatal, Code: "rows_origin", Err: err,
				Message: "the role may not write with a replication origin"}
		case "55006":
			return &outbox.Fault{Class: outbox.Fatal, Code: "rows_origin", Err: err,
				Message: "another outflow archive rows is at work at this PostgreSQL server",
				Hint:    "Wait until it has ended"}
		}
		return fmt.Errorf("set up replication origin %s: %w", restoreOrigin, err)
	}
	return nil
}

func (w *rowWriter) run(ctx context.Context, a *archive.Archive) error {
	task := progress.Count(ctx, "putting rows back", "messages", int64(w.rep.Last-w.rep.First+1))
	defer task.End()
	err := a.ReadRange(ctx, w.rep.First, w.rep.Last+1, func(m *archive.Message) error {
		task.Set(int64(m.Seq - w.rep.First + 1))
		if outbox.CutOf(m.Subject, m.Header) != nil {
			return nil
		}
		if m.Header.Get(sink.HeaderDeadLetter) != "" {
			w.rep.DeadLetters++
			return nil
		}
		values, key, err := w.carry.row(m)
		switch {
		case errors.Is(err, errCut):
			if w.rep.CutN++; len(w.rep.Cut) < maxNamed {
				w.rep.Cut = append(w.rep.Cut, m.Seq)
			}
			return nil
		case err != nil: // what is before it is put back, and the next run may begin here
			return cmp.Or(w.flush(ctx), err)
		}
		switch gone, err := w.wasErased(ctx, m, values); {
		case err != nil:
			return err
		case gone:
			w.rep.Erased++
			return nil
		}
		w.rows = append(w.rows, w.carry.stored(values, key))
		w.bytes += len(m.Data)
		if len(w.rows) < maxRows && w.bytes < maxRowBytes {
			return nil
		}
		return w.flush(ctx)
	})
	if err == nil {
		err = w.flush(ctx)
	}
	if err == nil && w.rep.CutN > 0 {
		err = &outbox.Fault{Class: outbox.Gap, Code: "rows_cut",
			Message: fmt.Sprintf("%s %s not put back: the message has only the beginning of a long "+
				"id, document or key; sequences %v", units.Of(w.rep.CutN, "row"),
				units.Agree(w.rep.CutN, "was", "were"), w.rep.Cut)}
	}
	return err
}

// flush writes the rows in one transaction.
func (w *rowWriter) flush(ctx context.Context) error {
	rows := w.rows
	w.rows, w.bytes = nil, 0
	if len(rows) == 0 {
		return nil
	}
	if w.conn == nil {
		w.rep.Inserted += uint64(len(rows))
		return nil
	}
	var inserted uint64
	err := errDetached
	for try := 0; errors.Is(err, errDetached) && try < detachTries; try++ {
		inserted, err = w.write(ctx, rows)
	}
	if err != nil {
		return err
	}
	w.rep.Inserted += inserted
	w.rep.There += uint64(len(rows)) - inserted
	w.hit("rows.written")
	return nil
}

// errDetached: a partition was detached, or dropped, meanwhile.
var errDetached = errors.New("partitions are detached again and again meanwhile: run it again")

// detachTries is how often rows are written again because of it.
const detachTries = 10

// write writes the rows that are neither in the table nor in a partition that is detached and waits for its
// end.
func (w *rowWriter) write(ctx context.Context, rows [][]any) (inserted uint64, err error) {
	err = pgx.BeginFunc(ctx, w.conn, func(tx pgx.Tx) error {
		detached, err := w.detached(ctx, tx)
		if err != nil {
			return err
		}
		sql, err := w.insert(detached)
		if err != nil {
			return err
		}
		b := &pgx.Batch{}
		for _, values := range rows {
			b.Queue(sql, values...).QueryRow(func(row pgx.Row) error {
				var same *bool
				switch err := row.Scan(&same); {
				case errors.Is(err, pgx.ErrNoRows):
					return nil
				case noPartition(err):
					return postgres.Fatal(err, "rows_partition", "", "table %s has no partition for the row "+
						"of the message with id %q", w.rep.Table,
						values[slices.Index(w.carry.columns, w.layout.ID)])
				case err != nil:
					return fmt.Errorf("table %s: %w", w.rep.Table, err)
				case same == nil || !*same:
					return &outbox.Fault{Class: outbox.Fatal, Code: "rows_columns",
						Message: fmt.Sprintf("the row of the message with id %q has another id or key when "+
							"it is put back: the key is made otherwise than it was, or a trigger of "+
							"table %s changes them",
							values[slices.Index(w.carry.columns, w.layout.ID)], w.rep.Table)}
				}
				inserted++
				return nil
			})
		}
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		// one that was detached before its rows were looked for is in neither
		now, err := w.detached(ctx, tx)
		same := func(a, b catalog.Table) bool { return a.OID == b.OID }
		if err == nil && !slices.EqualFunc(detached, now, same) {
			err = errDetached
		}
		return err
	})
	return inserted, err
}

// noPartition reports whether a row lies in no partition's range. It has the code of a CHECK that fails,
// which has a name.
func noPartition(err error) bool {
	pg := (*pgconn.PgError)(nil)
	return errors.As(err, &pg) && pg.Code == "23514" && pg.ConstraintName == ""
}

// detached returns the partitions that queries of the table do not read, and keeps them from being dropped.
func (w *rowWriter) detached(ctx context.Context, tx pgx.Tx) ([]catalog.Table, error) {
	if !w.layout.Table.Partitioned {
		return nil, nil
	}
	all, err := catalog.DetachedPartitions(ctx, tx, w.layout.Table)
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		_, err := tx.Exec(ctx, "LOCK TABLE "+p.Quoted()+" IN ACCESS SHARE MODE")
		switch postgres.SQLState(err) {
		case "":
		case "42P01":
			return nil, errDetached
		case postgres.StateInsufficientPrivilege:
			return nil, postgres.Fatal(err, "no_right", fmt.Sprintf("GRANT SELECT ON %s to it, for as long "+
				"as the command runs", p.Quoted()), "the role may not read the detached partition %s",
				p.Quoted())
		}
		if err != nil {
			return nil, fmt.Errorf("lock the detached partition %s: %w", p.Quoted(), err)
		}
	}
	return all, nil
}
