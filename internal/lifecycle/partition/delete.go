package partition

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// How rows of a plain table are deleted. Each batch is a transaction of its own, so that it holds few locks
// for a short time, and reads the table's pages in their order: rows are about as old as the page that they
// are on, no index is needed, and each page is visited once. A pause after each batch keeps it at twice the
// rate of the inserts, so that vacuum and the standbys can follow.
const (
	batchRows  = 1000
	batchPages = 256
	least      = 2000             // rows a second that are deleted whatever the rate of the inserts
	recheck    = 10 * time.Second // so often it is looked whether rows may still go
	fences     = 64               // so many fences are kept for the time that rows are kept
	oldestXID  = 1 << 30          // a fence that is so many transactions old can't be compared safely
)

// baseline is the name of the first fence in the table of states. What was written by transactions that began
// after it came by way of a WAL that the slot has read: the fence is all that is asked of it. What is older
// may be older than init, and is compared with the stream.
const baseline = "baseline"

// eligible are the clauses that hold for rows of a plain table. Whether they are published is asked of each
// row that is older than the baseline. Of a shard it is the shard's own rows that go.
var eligible = []string{"server", "own slot", "slots", "archive", "keep", "repairing"}

// plain is what is known of a plain table.
type plain struct {
	*Facts
	all     []*Partition // fences, oldest first
	base    *Partition   // nil: none yet
	cleared bool         // no row is older than the baseline any more
	next    int64        // the transaction ID that comes next
	inserts int64        // rows inserted since the statistics were reset
	live    int64        // rows, about
}

// lookPlain reads what is known of a plain table.
func (m *Manager) lookPlain(ctx context.Context) (*plain, error) {
	if m.root.Strategy != "" {
		return nil, postgres.Fatal(nil, codeKey, "Set retain.table.method to partition",
			"table %s is partitioned: its rows go with their partitions", m.root.Quoted())
	}
	f, err := m.facts(ctx, m.conn)
	if err != nil {
		return nil, err
	}
	t := &plain{Facts: f}
	known, err := m.readLedger(ctx)
	if err != nil {
		return nil, err
	}
	err = m.conn.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
			pg_stat_get_tuples_inserted($1), pg_stat_get_live_tuples($1)`, m.root.OID).
		Scan(&t.next, &t.inserts, &t.live)
	if err != nil {
		return nil, fmt.Errorf("read the statistics of %s: %w", m.root.Quoted(), err)
	}
	for _, p := range known {
		switch {
		case p.Horizon == 0:
		case p.Fence > f.WALEnd:
			return nil, m.behind(f, p)
		case p.System != f.System || t.next-p.Horizon > oldestXID && p.Name != baseline:
		case p.Name == baseline:
			if t.base, t.cleared = p, p.State == Verified; t.next-p.Horizon > oldestXID {
				p.Horizon = t.next // of every row it is asked whether it is published
			}
		default:
			t.all = append(t.all, p)
		}
	}
	slices.SortFunc(t.all, func(a, b *Partition) int { return a.Sealed.Compare(b.Sealed) })
	return t, nil
}

// fence returns the newest fence that rows may be deleted behind, or why there is none.
func (m *Manager) fence(t *plain) (found *Partition, why, name string) {
	why = "there is no fence yet"
	for _, p := range t.all {
		if t.Now.Before(p.Sealed.Add(m.cfg.Age)) {
			if found == nil {
				why, name = "no row is older than retain.table.age", "age"
			}
			break
		}
		reason := ""
		for _, clause := range clauses {
			if slices.Contains(eligible, clause.name) && reason == "" {
				if reason = clause.fails(&m.cfg, t.Facts, p); reason != "" && found == nil {
					why, name = reason, clause.name
				}
			}
		}
		if reason != "" {
			break // a later one is no better
		}
		found = p
	}
	return found, why, name
}

// PlanDelete says what Delete would do, and changes nothing.
func (m *Manager) PlanDelete(ctx context.Context) ([]Step, error) {
	t, err := m.lookPlain(ctx)
	if err != nil {
		return nil, err
	}
	step := Step{Partition: m.root.Quoted(), Action: Delete}
	p, why, name := m.fence(t)
	switch {
	case p == nil:
		step.Action, step.Why, step.Clause = Wait, why, name
	case m.cfg.Rows > 0 && t.live <= m.cfg.Rows:
		step.Action, step.Why = Leave, "the table is within retain.table.rows"
	default:
		step.Why = fmt.Sprintf("rows of transactions before %d, which had ended by %s", p.Horizon,
			stamp(p.Sealed))
	}
	return []Step{step}, nil
}

// Delete deletes the rows of a plain table that may go.
func (m *Manager) Delete(ctx context.Context) (steps []Step, err error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.end(ctx)
	t, err := m.lookPlain(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.setFence(ctx, t); err != nil {
		return nil, m.explain("set a fence", err)
	}
	if t.Archive.Err != nil {
		return nil, t.Archive.Err
	}
	p, why, name := m.fence(t)
	step := Step{Partition: m.root.Quoted(), Action: Wait, Why: why, Clause: name}
	if p == nil {
		return []Step{step}, nil
	}
	look := m.older
	if m.cfg.Archive {
		look = m.unarchived
	}
	gone, err := look(ctx, t, p)
	if err != nil {
		return nil, err
	}
	m.o.Hit("partition.verified")
	if gone.count > 0 && m.cfg.ID == "" && gone.count != m.o.AcceptUnpublished { // nobody knows which
		step.Why = "nothing shows that its rows are archived"
		m.o.Step(step)
		return []Step{step}, m.refuse(m.root.Quoted(), gone)
	}
	step = Step{Partition: m.root.Quoted(), Action: Delete}
	step.Rows, step.Why, err = m.deleteRows(ctx, t, p, gone)
	if err == nil && step.Why == "" && gone.count > 0 && m.cfg.ID == "" && p.Horizon >= t.base.Horizon {
		// they were accepted, and what is left was written when there was the fence's stream
		t.base.Stream = p.Stream
		err = m.note(ctx, m.conn, t.base)
	}
	if step.Why == "" {
		step.Why = fmt.Sprintf("%d rows of transactions before %d", step.Rows, p.Horizon)
	}
	m.o.Step(step)
	if err == nil && gone.count > 0 && gone.count != m.o.AcceptUnpublished {
		err = m.refuse(m.root.Quoted(), gone)
	}
	return []Step{step}, err
}

// setFence notes the oldest transaction that is open, and then the end of WAL: all before that transaction
// have ended below it. There are as many fences as tell the time that rows are kept well enough.
func (m *Manager) setFence(ctx context.Context, t *plain) error {
	wait := max(m.cfg.Keep, m.cfg.Age) / fences
	if n := len(t.all); n > 0 && t.base != nil && t.Now.Before(t.all[n-1].Sealed.Add(wait)) {
		return nil
	}
	p := &Partition{OID: m.root.OID, State: Sealed, System: t.System, Inserts: &t.inserts, Stream: t.Stream}
	err := m.conn.QueryRow(ctx, "SELECT "+
		"pg_snapshot_xmin(pg_current_snapshot())::text::bigint").Scan(&p.Horizon)
	if err != nil {
		return err
	}
	var fence string
	err = m.conn.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text, clock_timestamp()").
		Scan(&fence, &p.Sealed)
	if err != nil {
		return err
	}
	if p.Fence, err = outbox.ParseLSN(fence); err != nil {
		return err
	}
	p.Name = fmt.Sprintf("fence %s", p.Sealed.UTC().Format(time.RFC3339Nano))
	if t.base == nil { // whatever begins from now on is read by the slot
		t.base, t.cleared = &Partition{OID: m.root.OID, Name: baseline, State: Sealed, System: t.System,
			Horizon: t.next, Fence: p.Fence, Sealed: p.Sealed, Stream: t.Stream}, false
		if err := m.note(ctx, m.conn, t.base); err != nil {
			return err
		}
	}
	if err := m.note(ctx, m.conn, p); err != nil {
		return err
	}
	t.all = append(t.all, p)
	t.Now = p.Sealed
	m.o.Hit("partition.sealed")
	return nil
}

// xid is a transaction ID as a row has it.
func xid(full int64) string { return fmt.Sprintf("'%d'::xid", uint32(full)) }

// behindFence is the condition of the rows that were written before a fence. An updated row counts as written
// by the update.
func behindFence(p *Partition) string { return "age(t.xmin) > age(" + xid(p.Horizon) + ")" }

// older looks for rows that are older than the baseline and in no message, and loads the ids of the messages
// where there are rows so old.
func (m *Manager) older(ctx context.Context, t *plain, p *Partition) (gone missing, err error) {
	if t.cleared {
		return gone, nil
	}
	defer progress.Wait(ctx, "looking for rows of "+m.root.Quoted()+" that are older than the first run")()
	old := fmt.Sprintf("age(t.xmin) > age(%s)", xid(t.base.Horizon))
	var some bool
	err = m.conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM ONLY "+m.root.Quoted()+" t "+
		"WHERE "+old+")").Scan(&some)
	if err != nil {
		return gone, m.explain("read table "+m.root.Quoted(), err)
	}
	if !some {
		t.cleared, t.base.State = true, Verified
		return gone, m.note(ctx, m.conn, t.base)
	}
	c, ok := m.root.Column(m.cfg.ID)
	if !ok { // only the fence shows it, if anything does
		gone, err = m.unshown(ctx, t, p, old)
		t.cleared = gone.count == 0
		return gone, err
	}
	if err := m.load(ctx, periods(Period{})); err != nil {
		return gone, err
	}
	return m.unknown(ctx, old+" AND "+behindFence(p), c)
}

// unknown counts the rows that a condition holds for, and whose ids are not loaded.
func (m *Manager) unknown(ctx context.Context, condition string, id catalog.Column) (gone missing,
	err error) {
	err = m.conn.QueryRow(ctx, fmt.Sprintf(`WITH gone AS MATERIALIZED (SELECT t.%[1]s AS id FROM ONLY %[2]s t
			WHERE %[3]s AND NOT %[4]s AND %[6]s)
		SELECT count(*), ARRAY(SELECT concat(id) FROM gone LIMIT %[5]d) FROM gone`,
		postgres.Quote(id.Name), m.root.Quoted(), condition, known(tablesnapshot.HashOf("t", id)), maxNamed,
		m.own())).
		Scan(&gone.count, &gone.ids)
	if err != nil {
		return gone, fmt.Errorf("look for rows of %s that are not published: %w", m.root.Quoted(), err)
	}
	return gone, nil
}

// unarchived looks for rows behind the fence whose ids are in no message of the archive. That is asked of
// each row: its message may be lost by a gap that was accepted. Rows that older fences have let go are gone,
// so the segments of that time are read first, and others only if rows are missing then.
func (m *Manager) unarchived(ctx context.Context, t *plain, p *Partition) (gone missing, err error) {
	defer progress.Wait(ctx, "comparing the rows of "+m.root.Quoted()+" with the archive")()
	var n int64
	err = m.conn.QueryRow(ctx, "SELECT count(*) FROM ONLY "+m.root.Quoted()+" t WHERE "+
		behindFence(p)+" AND "+m.own()).Scan(&n)
	if err != nil {
		return gone, m.explain("read table "+m.root.Quoted(), err)
	}
	if n == 0 {
		return gone, nil
	}
	c, ok := m.root.Column(m.cfg.ID)
	if !ok { // the rows went to the stream that there was at the first run, if the fence shows anything
		if !shown(&m.cfg, t.Facts, &Partition{Fence: p.Fence, Stream: t.base.Stream}) {
			gone.count = n
		}
		return gone, m.load(ctx, periods(Period{})) // no object of it may be lost
	}
	for in := periods(Period{t.all[0].Sealed, p.Sealed}); len(in) > 0; in = in[1:] {
		if err := m.load(ctx, in); err != nil {
			return gone, err
		}
		if gone, err = m.unknown(ctx, behindFence(p), c); err != nil || gone.count == 0 {
			return gone, err
		}
	}
	return gone, nil
}

// own is the condition of the rows that go to this stream.
func (m *Manager) own() string { return cmp.Or(m.cfg.Own, "true") }

// known is the condition of rows whose ids are in messages.
func known(hash string) string {
	return "EXISTS (SELECT FROM " + tablesnapshot.KnownTable + " k WHERE k.sum = " + hash + ")"
}

// deleteRows deletes what lies behind a fence, page by page.
func (m *Manager) deleteRows(ctx context.Context, t *plain, p *Partition, gone missing) (n int64, why string,
	err error) {
	condition := behindFence(p) + " AND " + m.own() // those of other shards wait for their own runs
	accepted := gone.count > 0 && gone.count == m.o.AcceptUnpublished
	switch c, ok := m.root.Column(m.cfg.ID); {
	case !ok || accepted:
	case m.cfg.Archive && m.published != nil: // nil: there are no rows
		condition += " AND " + known(tablesnapshot.HashOf("t", c))
	case !m.cfg.Archive && !t.cleared && gone.count > 0:
		condition += fmt.Sprintf(" AND (age(t.xmin) <= age(%s) OR %s)", xid(t.base.Horizon),
			known(tablesnapshot.HashOf("t", c)))
	}
	var pages int64
	err = m.conn.QueryRow(ctx, "SELECT pg_relation_size($1) / "+
		"current_setting('block_size')::int", m.root.OID).
		Scan(&pages)
	if err != nil {
		return 0, "", fmt.Errorf("read the size of %s: %w", m.root.Quoted(), err)
	}
	sql := fmt.Sprintf(`WITH batch AS MATERIALIZED (SELECT t.ctid AS at FROM ONLY %[1]s t
			WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid AND %[2]s LIMIT %[3]d FOR UPDATE SKIP LOCKED)
		DELETE FROM ONLY %[1]s WHERE ctid = ANY (ARRAY(SELECT at FROM batch))`, m.root.Quoted(), condition, batchRows)
	rate := m.rate(t)
	task := progress.Count(ctx, "deleting rows of "+m.root.Quoted(), "rows", 0)
	defer task.End()
	looked, begun := time.Now(), time.Now()
	for page := int64(0); page < pages; {
		if m.cfg.Rows > 0 && t.live-n <= m.cfg.Rows {
			return n, fmt.Sprintf("%d rows; the rest is within retain.table.rows", n), nil
		}
		if time.Since(looked) > recheck {
			f, err := m.facts(ctx, m.conn)
			if err != nil {
				return n, "", err
			}
			if t.Facts = f; f.Repairing != "" {
				return n, fmt.Sprintf("%d rows; then %s began", n, f.Repairing), nil
			}
			looked = time.Now()
		}
		deleted, err := m.batch(ctx, sql, page)
		if err != nil {
			return n, "", m.explain("delete rows of "+m.root.Quoted(), err)
		}
		n += deleted
		task.Add(deleted)
		m.o.Hit("partition.deleted")
		if deleted < batchRows {
			page += batchPages
		}
		due := begun.Add(time.Duration(float64(n) / rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			select {
			case <-ctx.Done():
				return n, "", ctx.Err()
			case <-time.After(wait):
			}
		}
	}
	_, err = m.conn.Exec(ctx, "DELETE FROM "+m.ledger()+" WHERE root = $1 AND horizon < $2 AND name <> $3",
		m.root.Quoted(), p.Horizon, baseline)
	if err != nil {
		return n, "", m.explain("write table "+m.ledger(), err)
	}
	return n, "", nil
}

// batch deletes at most batchRows rows of some pages. That they are gone again after a crash would be no
// loss.
func (m *Manager) batch(ctx context.Context, sql string, page int64) (n int64, err error) {
	err = m.inTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL synchronous_commit = off"); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, sql, fmt.Sprintf("(%d,0)", page), fmt.Sprintf("(%d,0)", page+batchPages))
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// rate is how many rows are deleted a second: twice as many as were inserted since the oldest fence.
func (m *Manager) rate(t *plain) float64 {
	rate := float64(least)
	if len(t.all) > 0 && t.all[0].Inserts != nil {
		if passed := t.Now.Sub(t.all[0].Sealed).Seconds(); passed > 1 {
			rate = max(rate, 2*float64(t.inserts-*t.all[0].Inserts)/passed)
		}
	}
	return rate
}

// refuse is the fault of rows that were never published.
func (m *Manager) refuse(where string, gone missing) error {
	message := fmt.Sprintf("%d rows of %s were never published: no message", gone.count, where)
	switch {
	case m.cfg.ID == "":
		message = fmt.Sprintf("nothing shows that the %d rows of %s are published: there is no id column, "+
			"and the slot or the stream was made anew, its archive has a gap, or somebody wrote to it when "+
			"it was detached", gone.count, where)
	case m.cfg.Archive:
		message += " of the archive"
		fallthrough
	default:
		message += fmt.Sprintf(" has their %s; %s", m.cfg.ID, strings.Join(gone.ids, ", "))
	}
	return &outbox.Fault{Class: outbox.Gap, Code: codeUnpublished, Message: message,
		Hint: fmt.Sprintf("They are older than init, were attached with a partition, written to it when it "+
			"was detached, or in an accepted gap of the archive. Publish them (`outflow repair --check`), "+
			"or let them go with `outflow partition apply --accept-unpublished %d`", gone.count)}
}

// Autovacuum says how the table's autovacuum is to be set where rows are deleted from it all the time; ""
// where it is set already.
func (m *Manager) Autovacuum(ctx context.Context) (string, error) {
	var set bool
	err := m.conn.QueryRow(ctx, `SELECT coalesce(reloptions::text, '') LIKE '%autovacuum_vacuum_scale_factor=%'
		FROM pg_class WHERE oid = $1`, m.root.OID).Scan(&set)
	if err != nil || set {
		return "", err
	}
	return "ALTER TABLE " + m.root.Quoted() + " SET (autovacuum_vacuum_scale_factor = 0, " +
		"autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0, " +
		"autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000)", nil
}
