package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// Document says whose rows are erased.
type Document struct {
	Column string // of the document
	Name   string
	ID     string // the id column; "": there is none
	Keep   string // the id of the one row of it that stays; "": none

	// Noted is the table that gets the hashes of the ids of deleted rows, with the slot and the request, as
	// SQL; "": none.
	Noted, Slot, Request string
}

// Cut is where an erasure ends: no row of the document is left of those that were committed below LSN.
type Cut struct {
	LSN  outbox.LSN
	Seq  uint64 // the stream's last sequence, read before LSN: what it had by then was committed below
	Rows int64  // that were deleted

	Theirs []string      // see [Manager.Theirs]: none of these was looked at
	Waited time.Duration // for transactions
}

// CodeWaits is the code of the fault of an erasure that has to wait for longer than it was to.
const CodeWaits = "erase_waits"

// eraseTries is how often rows of the document may come while they are deleted.
const eraseTries = 20

// CountDocument counts the rows of a document, in the outbox and in detached partitions.
func (m *Manager) CountDocument(ctx context.Context, d Document) (n int64, err error) {
	attached, detached, err := m.leaves(ctx)
	if err != nil {
		return 0, err
	}
	defer progress.Wait(ctx, "counting the rows of the document in "+m.root.Quoted())()
	for _, t := range append(attached, detached...) {
		condition, values, err := m.rowsOf(ctx, d, t)
		if err != nil {
			return n, err
		}
		var some int64
		if err := m.conn.QueryRow(ctx, "SELECT count(*) FROM "+t.Only()+" WHERE "+condition, values...).
			Scan(&some); err != nil {
			return n, m.explain("read table "+t.Quoted(), err)
		}
		n += some
	}
	return n, nil
}

// EraseDocument deletes all rows of a document, in batches that lock nothing but those rows, until a
// transaction that may have written one when the end of WAL was read has ended and none is left: that end is
// the cut. It changes nothing of what is known of detached partitions but how many rows they have.
//
// No lock keeps writers out. Whoever goes on to write the document makes it begin again, some times. wait is
// how long transactions are waited for altogether, but not less than leastWait: some are open at any moment.
func (m *Manager) EraseDocument(ctx context.Context, d Document, wait time.Duration,
	lastSeq func(ctx context.Context) (uint64, error)) (cut Cut, err error) {
	wait = max(wait, leastWait)
	if err := m.alone(ctx); err != nil {
		return cut, err
	}
	defer m.end(ctx)
	if _, err := m.readLedger(ctx); err != nil {
		return cut, err
	}
	if len(m.ledgers) > 0 {
		if err := m.takeUp(ctx); err != nil {
			return cut, err
		}
	}
	task := progress.Count(ctx, "deleting the rows of the document from "+m.root.Quoted(), "rows", 0)
	defer task.End()
	for range eraseTries {
		n, err := m.erasePass(ctx, d)
		cut.Rows += n
		task.Add(n)
		if err != nil {
			return cut, err
		}
		if n == 0 && cut.LSN != 0 {
			cut.Theirs, err = m.Theirs(ctx)
			return cut, err
		}
		if err := m.away(ctx, func() (err error) {
			cut.Seq, err = lastSeq(ctx)
			return err
		}); err != nil {
			return cut, err
		}
		var end string
		if err := m.conn.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text").Scan(&end); err != nil {
			return cut, fmt.Errorf("read the end of WAL: %w", err)
		}
		if cut.LSN, err = outbox.ParseLSN(end); err != nil {
			return cut, err
		}
		began := m.now()
		if err := m.awaitWriters(ctx, began.Add(wait)); err != nil {
			return cut, err
		}
		waited := m.now().Sub(began)
		wait, cut.Waited = wait-waited, cut.Waited+waited
	}
	return cut, &outbox.Fault{Class: outbox.Transient, Code: "erase_written",
		Message: fmt.Sprintf("rows of the document come to %s while they are deleted", m.root.Quoted())}
}

// CheckDocument refuses a document that is not written as PostgreSQL prints values of its column: no message
// has it in that form that was written since the column has its type.
func (m *Manager) CheckDocument(ctx context.Context, d Document) error {
	c, err := m.docColumn(d)
	if err != nil {
		return err
	}
	refuse := func(format string, args ...any) error {
		return &outbox.Fault{Class: outbox.Usage, Code: "flags",
			Message: fmt.Sprintf("--doc %q: ", d.Name) + fmt.Sprintf(format, args...),
			Hint:    "Give the document as messages have it"}
	}
	written, err := m.printed(ctx, d, c)
	switch {
	case isNoValue(err):
		return refuse("no value of column %s, of type %s", c.Name, c.TypeName)
	case err != nil:
		return m.explain("read table "+m.root.Quoted(), err)
	case written == d.Name:
		return nil
	}
	return refuse("column %s, of type %s, has it as %q", c.Name, c.TypeName, written)
}

// isNoValue reports whether the server says that a value can't be one of a type, or of a domain.
func isNoValue(err error) bool {
	state := postgres.SQLState(err)
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23")
}

// printed is the document as messages have it, from a column.
func (m *Manager) printed(ctx context.Context, d Document, c catalog.Column) (string, error) {
	value, as := valueOf(c, d, 1)
	var text []byte
	err := m.conn.QueryRow(ctx, "SELECT "+tablesnapshot.BytesOf(value, c), as).Scan(&text)
	return string(text), err
}

// docColumn is the column of the document.
func (m *Manager) docColumn(d Document) (catalog.Column, error) {
	c, ok := m.root.Column(d.Column)
	if !ok {
		return c, postgres.Fatal(nil, "column_missing", "Set columns.doc_id",
			"table %s has no column %q", m.root.Quoted(), d.Column)
	}
	return c, nil
}

// valueOf is the document as a value of its column, as SQL with a parameter, and the parameter's value.
func valueOf(c catalog.Column, d Document, parameter int) (string, any) {
	if c.TypeOID == pgtype.ByteaOID {
		return fmt.Sprintf("$%d::bytea", parameter), []byte(d.Name)
	}
	return fmt.Sprintf("$%d::text::%s", parameter, c.TypeName), d.Name
}

// rowsOf is the condition of the document's rows in a table, and its parameters. The bytes decide that
// messages have; the value finds them by an index, where the table has the column's type, and that prints it
// so: else there may be no such value.
func (m *Manager) rowsOf(ctx context.Context, d Document, in catalog.Table) (string, []any, error) {
	c, err := m.docColumn(d)
	if err != nil {
		return "", nil, err
	}
	column, err := m.root.ColumnOf(in, d.Column)
	if err != nil {
		return "", nil, err
	}
	condition, values := tablesnapshot.BytesOf(column, c)+" = $1::bytea", []any{[]byte(d.Name)}
	if has, _ := in.Column(d.Column); has.TypeName == c.TypeName {
		written, err := m.printed(ctx, d, c)
		switch {
		case err == nil && written == d.Name:
			value, as := valueOf(c, d, 2)
			condition, values = fmt.Sprintf("%s = %s AND %s", column, value, condition), append(values, as)
		case err != nil && !isNoValue(err):
			return "", nil, m.explain("read table "+in.Quoted(), err)
		}
	}
	if d.Keep != "" {
		id, err := m.root.ColumnOf(in, d.ID)
		if err != nil {
			return "", nil, err
		}
		values = append(values, d.Keep)
		condition += fmt.Sprintf(" AND concat(%s) <> $%d::text", id, len(values))
	}
	return condition, values, nil
}

// erasing is what deletes rows of a document from a table, and its parameters: at most so many at a time; 0:
// all. It notes the ids of the rows that go, and returns how many did, and whether there was one before.
func (m *Manager) erasing(ctx context.Context, d Document, in catalog.Table, limit int) (string, []any,
	error) {
	condition, values, err := m.rowsOf(ctx, d, in)
	if err != nil {
		return "", nil, err
	}
	deletion := "DELETE FROM " + in.Only() + " WHERE " + condition
	if limit > 0 {
		deletion = fmt.Sprintf("DELETE FROM %[1]s WHERE ctid = ANY (ARRAY(SELECT ctid FROM %[1]s WHERE "+
			"%[2]s LIMIT %[3]d)) AND %[2]s", in.Only(), condition, limit)
	}
	counts := fmt.Sprintf("count(*), EXISTS (SELECT FROM %s WHERE %s) FROM gone", in.Only(), condition)
	id, ok := m.root.Column(d.ID)
	if d.Noted == "" || !ok {
		return "WITH gone AS (" + deletion + " RETURNING 1) SELECT " + counts, values, nil
	}
	value, err := m.root.ColumnOf(in, d.ID)
	n := len(values)
	return fmt.Sprintf(`WITH gone AS (%[1]s RETURNING %[7]s AS %[2]s), noted AS (INSERT INTO %[3]s (sum, slot, request)
		SELECT DISTINCT %[4]s, $%[5]d::text, $%[6]d::text FROM gone WHERE gone.%[2]s IS NOT NULL
		ON CONFLICT DO NOTHING) SELECT %[8]s`, deletion, postgres.Quote(d.ID), d.Noted,
		tablesnapshot.HashOf("gone", id), n+1, n+2, value, counts), append(values, d.Slot, d.Request), err
}

// leaves returns the tables that have rows: those of the outbox, which have its columns, and detached
// partitions. One whose DETACH has not ended is among the first, because transactions may still write to it,
// and has columns of its own: ALTER TABLE does not reach it any more.
func (m *Manager) leaves(ctx context.Context) (attached, detached []catalog.Table, err error) {
	rows, err := m.conn.Query(ctx, `WITH RECURSIVE tree (oid, pending) AS (SELECT $1::oid, false
			UNION SELECT i.inhrelid, t.pending OR i.inhdetachpending
				FROM pg_inherits i JOIN tree t ON i.inhparent = t.oid)
		SELECT c.oid, n.nspname, c.relname, t.pending FROM tree t
			JOIN pg_class c ON c.oid = t.oid AND c.relkind = 'r' AND (c.relispartition OR c.oid = $1)
			JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY 4 DESC, 2, 3`, m.root.OID)
	pending := map[uint32]bool{}
	if err == nil {
		attached, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (catalog.Table, error) {
			t, half := m.root.Table, false
			t.Partitioned = false
			err := row.Scan(&t.OID, &t.Schema, &t.Name, &half)
			pending[t.OID] = half
			return t, err
		})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read the partitions of %s: %w", m.root.Quoted(), err)
	}
	for i, t := range attached {
		if pending[t.OID] {
			if attached[i], err = catalog.ReadTable(ctx, m.conn, t.Quoted()); err != nil {
				return nil, nil, err
			}
		}
	}
	if detached, err = catalog.DetachedPartitions(ctx, m.conn, m.root.Table); err != nil {
		return nil, nil, err
	}
	detached = slices.DeleteFunc(detached, func(t catalog.Table) bool { return pending[t.OID] })
	return attached, detached, m.sameServer(ctx)
}

// sameServer makes sure that detached partitions are found by their OIDs. After a dump and restore those are
// of the former server, until a run finds the partitions by their names: until then some would be passed
// over.
func (m *Manager) sameServer(ctx context.Context) error {
	if _, err := m.readLedger(ctx); err != nil {
		return err
	}
	for _, ledger := range m.ledgers {
		var name string
		err := m.conn.QueryRow(ctx, `SELECT name FROM `+ledger+` l WHERE `+catalog.OfRoot+`
			AND CASE WHEN horizon IS NULL AND state NOT IN ('ahead', 'attached', 'dropped', 'kept')
				THEN to_regclass(name) IS NOT NULL END
			AND NOT `+catalog.Here+` ORDER BY lower, name LIMIT 1`, m.root.OID, m.root.Quoted()).Scan(&name)
		switch {
		case err == nil:
			return unfound(name, "is known by the OID that it had in another database")
		case !errors.Is(err, pgx.ErrNoRows):
			return m.explain("read table "+ledger, err)
		}
	}
	return nil
}

// Theirs names the partitions that somebody else detached: no row of theirs is looked at.
func (m *Manager) Theirs(ctx context.Context) (names []string, err error) {
	known, err := m.readLedger(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range known {
		if p.State != Kept || p.Horizon != 0 {
			continue
		}
		var name string
		err := m.conn.QueryRow(ctx, `SELECT format('%I.%I', n.nspname, c.relname)
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r'
				AND c.oid = CASE WHEN $2 THEN $3::oid ELSE to_regclass($4)::oid END
				AND c.oid NOT IN (SELECT relid FROM pg_partition_tree($1::oid::regclass))`,
			m.root.OID, p.System != "", p.OID, p.Name).Scan(&name)
		switch {
		case err == nil:
			names = append(names, name)
		case !errors.Is(err, pgx.ErrNoRows):
			return nil, fmt.Errorf("look for partition %s: %w", p.Name, err)
		}
	}
	slices.Sort(names)
	return names, nil
}

// unfound is the fault of a detached partition of which it is not certain which table it is.
func unfound(name, why string) error {
	return postgres.Fatal(nil, codeTaken, "Run `outflow partition apply`, which finds it by its name; then "+
		"run the command again", "detached partition %s %s: its rows would be passed over", name, why)
}

// erasePass deletes all rows that can be seen.
func (m *Manager) erasePass(ctx context.Context, d Document) (n int64, err error) {
	attached, detached, err := m.leaves(ctx)
	if err != nil {
		return 0, err
	}
	if _, err := m.readLedger(ctx); err != nil {
		return 0, err
	}
	for _, t := range detached { // before anything is deleted
		if _, _, err := m.erasing(ctx, d, t, 0); err != nil {
			return 0, err
		}
	}
	for _, t := range attached {
		sql, values, err := m.erasing(ctx, d, t, batchRows)
		if err != nil {
			return n, err
		}
		for tries := 0; ; {
			var deleted int64
			var there bool
			if err := m.retry(ctx, func() error {
				return m.conn.QueryRow(ctx, sql, values...).Scan(&deleted, &there)
			}); err != nil {
				return n, m.explain("delete rows of "+t.Quoted(), err)
			}
			n += deleted
			switch {
			case deleted > 0:
				m.o.Hit("erase.rows")
				continue
			case !there:
			case tries < eraseTries: // somebody else may have deleted them in that moment
				tries++
				continue
			default:
				return n, kept(t.Quoted())
			}
			break
		}
	}
	for _, t := range detached {
		sql, values, err := m.erasing(ctx, d, t, 0)
		if err != nil {
			return n, err
		}
		deleted, err := m.eraseDetached(ctx, t.Quoted(), sql, values)
		if err != nil {
			return n, m.explain("delete rows of partition "+t.Quoted(), err)
		}
		if n += deleted; deleted > 0 {
			m.o.Hit("erase.detached")
		}
	}
	return n, nil
}

// kept is the fault of rows that are not deleted although nothing fails.
func kept(table string) error {
	return postgres.Fatal(nil, "erase_kept", "", "rows of the document stay in %s when they are deleted: a "+
		"trigger keeps them", table)
}

// eraseDetached deletes the rows of a partition that is detached. Where it was sealed or verified it stays
// so, with fewer rows, unless somebody has written to it since. It is found by its OID, because it may have
// another name by now than in the table of states.
func (m *Manager) eraseDetached(ctx context.Context, name, deletion string, values []any) (n int64,
	err error) {
	err = m.retry(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) error {
			p, err := m.byOID(ctx, tx, name)
			if err != nil {
				return err
			}
			here := *p
			here.Name = name
			if err := m.lock(ctx, tx, &here, "SHARE ROW EXCLUSIVE"); err != nil {
				return err
			}
			was, err := m.sum(ctx, tx, &here)
			if err != nil {
				return err
			}
			var there bool
			if err := tx.QueryRow(ctx, deletion, values...).Scan(&n, &there); err != nil || n == 0 {
				if err == nil && there {
					err = kept(name)
				}
				return err
			}
			is, err := m.sum(ctx, tx, &here)
			if err != nil {
				return err
			}
			if p.Verified != nil && *p.Verified == was {
				p.Verified = &is
			}
			if p.SealedSum == was {
				p.SealedSum = is
			}
			return m.note(ctx, tx, p)
		})
	})
	return n, err
}

// byOID returns what the table of states has of a table, under whatever name.
func (m *Manager) byOID(ctx context.Context, tx pgx.Tx, name string) (*Partition, error) {
	known, err := m.readLedger(ctx)
	if err != nil {
		return nil, err
	}
	var oid uint32
	if err := tx.QueryRow(ctx, "SELECT $1::regclass::oid", name).Scan(&oid); err != nil {
		return nil, err
	}
	for _, p := range known {
		if p.OID == oid && p.Horizon == 0 {
			return p, nil
		}
	}
	return nil, unfound(name, "is not in table "+m.ledger()+" any more")
}

const (
	leastWait   = 2 * time.Second        // for transactions
	writersPoll = 100 * time.Millisecond // how often it is looked whether they have ended
	maxWriters  = 5                      // how many of them are named
)

// writer is a transaction that may have written.
type writer struct{ ID, Who string }

// awaitWriters waits for the transactions that may have written to the outbox by now, prepared ones as well:
// those that hold the lock that writing takes.
func (m *Manager) awaitWriters(ctx context.Context, until time.Time) error {
	attached, detached, err := m.leaves(ctx)
	if err != nil {
		return err
	}
	oids := []uint32{m.root.OID}
	for _, t := range append(attached, detached...) {
		oids = append(oids, t.OID)
	}
	open := func(of []string) (found []writer, err error) {
		// Who may not see what others do sees whose sessions they are, and of the rest nothing.
		rows, err := m.conn.Query(ctx, `SELECT l.virtualtransaction, coalesce(
				'prepared transaction ' || quote_literal(min(p.gid)) || ' of user ' || min(p.owner) ||
					', since ' || min(p.prepared AT TIME ZONE 'UTC')::timestamp(0) || ' UTC',
				'pid ' || min(l.pid) || ' of user ' || coalesce(min(a.usename), '?') ||
					coalesce(', application ' || quote_literal(nullif(min(a.application_name), '')), '') ||
					coalesce(', since ' || min(a.xact_start AT TIME ZONE 'UTC')::timestamp(0) || ' UTC', ''),
				'?')
			FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
				LEFT JOIN pg_locks x ON x.locktype = 'transactionid' AND x.pid IS NULL AND l.pid IS NULL
					AND x.virtualtransaction = l.virtualtransaction
				LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
			WHERE l.granted AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
				AND l.pid IS DISTINCT FROM pg_backend_pid()
				AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
				AND l.relation = ANY ($1::oid[])
				AND ($2::text[] IS NULL OR l.virtualtransaction = ANY ($2))
			GROUP BY l.virtualtransaction ORDER BY min(a.xact_start), 1`, array(oids), of)
		if err == nil {
			found, err = pgx.CollectRows(rows, pgx.RowToStructByPos[writer])
		}
		if err != nil {
			return nil, fmt.Errorf("look for open transactions: %w", err)
		}
		return found, nil
	}
	writers, err := open(nil)
	defer progress.Wait(ctx, "waiting for transactions that have written to "+m.root.Quoted())()
	for err == nil && len(writers) > 0 {
		ids, who := make([]string, len(writers)), make([]string, len(writers))
		for i, w := range writers {
			ids[i], who[i] = w.ID, w.Who
		}
		if !m.now().Before(until) {
			return m.unended(who)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(writersPoll):
		}
		writers, err = open(ids)
	}
	return err
}

// unended is the fault of transactions that have not ended in time.
func (m *Manager) unended(who []string) error {
	more := ""
	if n := len(who) - maxWriters; n > 0 {
		who, more = who[:maxWriters], fmt.Sprintf("; and %d others", n)
	}
	return &outbox.Fault{Class: outbox.Transient, Code: CodeWaits,
		Message: fmt.Sprintf("transactions are open that may have written rows of the document to %s: "+
			"%s%s", m.root.Quoted(), strings.Join(who, "; "), more),
		Hint: "Let them end, or end them: `SELECT pg_terminate_backend(PID)`, and `ROLLBACK PREPARED` for " +
			"a prepared one. Then run the same command again: it goes on"}
}
