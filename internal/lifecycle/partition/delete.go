package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
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
)

// eligible are the clauses that hold for rows of a plain table. Whether they are published is asked fence by
// fence. Of a shard it is the shard's own rows that go.
var eligible = []string{"server", "own slot", "shards", "slots", "archive", "keep", "repairing"}

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
	case m.within(t):
		step.Action, step.Why = Leave, within
	default:
		step.Why = fmt.Sprintf("rows of transactions before %d, which had ended by %s", p.Horizon,
			stamp(p.Sealed))
		if len(t.brought) > 0 && !m.cfg.Archive {
			step.Why += fmt.Sprintf("; only the fence shows that they are published, because subscriptions "+
				"bring rows of other servers (%s)", strings.Join(t.brought, ", "))
		}
	}
	return []Step{step}, nil
}

const within = "the table is within retain.table.rows"

// within reports whether no rows are to go.
func (m *Manager) within(t *plain) bool { return m.cfg.Rows > 0 && t.live <= m.cfg.Rows }

// Delete deletes the rows of a plain table that may go.
func (m *Manager) Delete(ctx context.Context) (steps []Step, err error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.end(ctx)
	t, err := m.lookPlain(ctx)
	if err == nil && !m.hasLedger {
		if err = m.takeUp(ctx); err == nil { // which writes WAL
			t, err = m.lookPlain(ctx)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := m.setFence(ctx, t); err != nil {
		return nil, m.explain("set a fence", err)
	}
	if t.Archive.Err != nil {
		return nil, t.Archive.Err
	}
	id, ok := m.root.Column(m.cfg.ID)
	var gone missing
	if ok && !m.cfg.Archive { // before they are old enough: the stream does not keep its messages for ever
		if gone, err = m.compareFences(ctx, t, id); err != nil {
			return nil, err
		}
	}
	refusal := func() error {
		if gone.count == 0 || gone.count == m.o.AcceptUnpublished {
			return nil
		}
		return m.refuse(m.root.Quoted(), gone)
	}
	p, why, name := m.fence(t)
	step := Step{Partition: m.root.Quoted(), Action: Wait, Why: why, Clause: name}
	if p == nil {
		return []Step{step}, refusal()
	}
	if m.within(t) {
		return []Step{{Partition: m.root.Quoted(), Action: Leave, Why: within}}, refusal()
	}
	switch {
	case m.cfg.Archive:
		gone, err = m.unarchived(ctx, t, p)
	case !ok:
		gone, err = m.older(ctx, t, p)
	}
	if err != nil {
		return nil, err
	}
	m.o.Hit("partition.verified")
	if err := refusal(); err != nil && !ok { // nobody knows which
		step.Why = "nothing shows that its rows are published"
		m.o.Step(step)
		return []Step{step}, err
	}
	step = Step{Partition: m.root.Quoted(), Action: Delete}
	step.Rows, step.Why, err = m.deleteRows(ctx, t, p, gone)
	if err == nil && step.Why == "" && gone.count > 0 && !ok && p.Horizon >= t.base.Horizon {
		// they were accepted, and what is left was written when there was the fence's stream
		t.base.Stream = p.Stream
		err = m.note(ctx, m.conn, t.base)
	}
	if step.Why == "" {
		step.Why = fmt.Sprintf("%s of transactions before %d", units.Of(step.Rows, "row"), p.Horizon)
	}
	m.o.Step(step)
	if refused := refusal(); refused != nil && (err == nil || outbox.FaultOf(err) != nil) {
		err = refused
	}
	return []Step{step}, err
}

// older counts the rows that are older than the baseline, and of which nothing shows that they are published,
// where there is no id column.
func (m *Manager) older(ctx context.Context, t *plain, p *Partition) (gone missing, err error) {
	if t.cleared {
		return gone, nil
	}
	defer progress.Wait(ctx, "looking for rows of "+m.root.Quoted()+" that are older than the first run")()
	var some bool
	err = m.conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM ONLY "+m.root.Quoted()+" t "+
		"WHERE "+before(t.base)+" AND "+m.own()+")").Scan(&some)
	if err != nil {
		return gone, m.explain("read table "+m.root.Quoted(), err)
	}
	if !some {
		if err := m.named(ctx); err != nil {
			return gone, err
		}
		t.cleared, t.base.State = true, Verified
		return gone, m.note(ctx, m.conn, t.base)
	}
	gone, err = m.unshown(ctx, t, p)
	return gone, err
}

// unknown counts the rows that a condition holds for, and whose ids are not loaded: all of them, and those of
// each fence that has some.
func (m *Manager) unknown(ctx context.Context, t *plain, condition string, id catalog.Column) (all missing,
	of map[int]missing, err error) {
	rows, err := m.conn.Query(ctx, fmt.Sprintf(`WITH gone AS MATERIALIZED (SELECT t.%[1]s AS id,
			%[7]s AS hash, width_bucket(%[9]s, $1::bigint[]) AS fence
			FROM ONLY %[2]s t WHERE %[3]s AND NOT %[4]s AND %[6]s),
		numbered AS (SELECT *, row_number() OVER (PARTITION BY fence) AS n FROM gone)
		SELECT fence, count(*), array_agg(coalesce(id::text, 'NULL')) FILTER (WHERE n <= %[5]d),
			array_agg(hash::text) FILTER (WHERE n <= %[8]d) FROM numbered GROUP BY fence ORDER BY fence`,
		postgres.Quote(id.Name), m.root.Quoted(), condition, tablesnapshot.Known("t", id), maxNamed, m.own(),
		tablesnapshot.HashOf("t", id), maxMissing, written), t.horizons())
	var fence int
	var gone missing
	of = map[int]missing{}
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&fence, &gone.count, &gone.ids, &gone.hashes}, func() error {
			of[fence], all.count = gone, all.count+gone.count
			all.ids = append(all.ids, gone.ids[:min(len(gone.ids), maxNamed-len(all.ids))]...)
			gone = missing{}
			return nil
		})
	}
	if err != nil {
		return all, nil, fmt.Errorf("look for rows of %s that are not published: %w", m.root.Quoted(), err)
	}
	return all, of, nil
}

// missed is what unknown finds when all was read, near to the time of the rows first, or with the first part
// by which it finds so many at most. While rows rest that were refused, no more is read for others than what
// has come since: each round may have some.
func (m *Manager) missed(ctx context.Context, t *plain, near Period, most int64, rows, of string,
	id catalog.Column) (gone missing, by map[int]missing, err error) {
	in := periods(near)
	if rest, _ := m.o.Pass.resting(); !rest.IsZero() && len(in) > 1 {
		in = in[:len(in)-1]
	}
	var lacking ids
	for err = m.load(ctx, in, inTable); err == nil; in = in[1:] {
		gone, by, err = m.unknown(ctx, t, rows+of, id)
		if err != nil || gone.count <= most || len(in) == 1 {
			break
		}
		if lacking == nil {
			lacking = newIDs()
			err = m.lack(ctx, lacking, rows+" AND "+m.own(), id)
		}
		if err == nil {
			err = m.readIDs(ctx, in[1], lacking.mayHave)
		}
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) { // the next runs have time for others
		m.o.Pass.refusing(max(gone.count, 1), m.began)
	}
	return gone, by, err
}

// unarchived looks for rows behind the fence whose ids are in no message of the archive. That is asked of
// each row: its message may be lost by a gap that was accepted. Rows that older fences have let go are gone,
// so the segments of that time are read first, and others only if rows are missing then.
func (m *Manager) unarchived(ctx context.Context, t *plain, p *Partition) (gone missing, err error) {
	defer progress.Wait(ctx, "comparing the rows of "+m.root.Quoted()+" with the archive")()
	// what is missing stays, and is looked for again later
	rest, known := m.o.Pass.resting()
	var n, rows int64
	var fence, first int // of the oldest rows but for those
	all, err := m.conn.Query(ctx, "SELECT width_bucket("+written+", $1::bigint[]), count(*) FROM ONLY "+
		m.root.Quoted()+" t WHERE "+before(p)+" AND "+m.own()+" GROUP BY 1 ORDER BY 1", t.horizons())
	if err == nil {
		_, err = pgx.ForEachRow(all, []any{&fence, &rows}, func() error {
			if n += rows; n-rows <= known {
				first = fence
			}
			return nil
		})
	}
	if err == nil && first > 1 { // behind these no run has come to its end (retain.table.rows)
		err = m.joinBehind(ctx, t, t.all[first-1])
	}
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
		return gone, m.load(ctx, periods(Period{}), inTable) // no object of it may be lost
	}
	gone, _, err = m.missed(ctx, t, Period{t.all[0].Sealed, p.Sealed}, known, before(p), "", c)
	if gone.count > 0 && !rest.IsZero() {
		gone.again, m.o.Pass.rows = rest, max(known, gone.count)
	} else if err == nil {
		m.o.Pass.refusing(gone.count, m.began)
	}
	return gone, err
}

// own is the condition of the rows that go to this stream.
func (m *Manager) own() string { return cmp.Or(m.cfg.Own, "true") }

// stays has the hash of each id of rows behind a fence that may not be deleted. It is temporary.
const stays = "pg_temp.outflow_stays"

// mayDelete is the condition of the rows behind a fence that may be deleted. Which ones may not is looked for
// once: each batch looks its rows up by an index. The form of that leaves PostgreSQL no choice: of NOT EXISTS
// it may make a join, which reads all of them for each batch.
func (m *Manager) mayDelete(ctx context.Context, t *plain, p *Partition, gone missing) (string, error) {
	condition := before(p) + " AND " + m.own() // those of other shards wait for their own runs
	id, ok := m.root.Column(m.cfg.ID)
	open := "" // the rows of which only their ids show it
	switch {
	case !ok || gone.count > 0 && gone.count == m.o.AcceptUnpublished:
	case !m.cfg.Archive:
		open = m.unverified(t, p, id)
	case gone.count > 0:
		open = "true"
	}
	if open == "" {
		return condition, nil
	}
	defer progress.Wait(ctx, "noting which rows of "+m.root.Quoted()+" stay")()
	hash := tablesnapshot.HashOf("t", id)
	err := m.inTx(ctx, func(tx pgx.Tx) error { // which keeps the name that is read until it is asked for
		for _, sql := range []string{
			"DROP TABLE IF EXISTS " + stays,
			fmt.Sprintf("CREATE TEMPORARY TABLE outflow_stays AS SELECT DISTINCT %s AS hash "+
				"FROM ONLY %s t WHERE %s AND %s AND NOT %s", hash, m.root.Quoted(), condition, open,
				tablesnapshot.Known("t", id)),
			"CREATE INDEX ON " + stays + " (hash)",
			"ANALYZE " + stays,
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return m.named(ctx)
	})
	if err != nil {
		return "", m.explain("note which rows of "+m.root.Quoted()+" stay", err)
	}
	return condition + " AND (SELECT true FROM " + stays + " s WHERE s.hash = " + hash +
		" LIMIT 1) IS NULL", nil
}

// Pass is how far the runs of a process have come through the pages of a plain table: those of before are not
// read again for each turn. Nor is all of archive or stream for rows that were never published, until as much
// time has passed as since the first of them were found. Its zero value is at the first page. One goroutine
// uses it.
type Pass struct {
	place
	refused time.Time // when the run began that found such rows first; zero: there are none
	again   time.Time // when everything is read for them again
	rows    int64     // how many there are

	partitions map[uint32]Partition // those that were refused, by OID: another Outflow may note its refusal
}

// remember keeps the refusal of a partition.
func (p *Pass) remember(q *Partition) {
	if p == nil {
		return
	}
	if p.partitions == nil {
		p.partitions = map[uint32]Partition{}
	}
	p.partitions[q.OID] = *q
}

// recall puts the refusal of this Outflow, if there is one of these rows, in place of another one's.
func (p *Pass) recall(q *Partition) {
	q.Refused = 0
	if p == nil || q.Verified != nil { // what was refused has been accepted since
		return
	}
	if own := p.partitions[q.OID]; own.Fence == q.Fence {
		q.Refused, q.RefusedAt, q.RefusedBy = own.Refused, own.RefusedAt, own.RefusedBy
	}
}

type place struct {
	page       int64
	horizon    int64 // of the fence that it began with: what lies behind that has gone from the pages before
	referenced error
}

// resting is for how many rows that were refused no more is read than for others, and until when; 0:
// everything is.
func (p *Pass) resting() (until time.Time, rows int64) {
	if p == nil || !time.Now().Before(p.again) {
		return time.Time{}, 0
	}
	return p.again, p.rows
}

// refusal is how many rows there were in no message when they were looked for last.
func (p *Pass) refusal() int64 {
	if p == nil {
		return 0
	}
	return p.rows
}

// refusing notes how many rows a run that began then has found in no message, when it had read everything.
func (p *Pass) refusing(rows int64, began time.Time) {
	if p == nil {
		return
	}
	switch p.rows = rows; {
	case rows == 0:
		p.refused, p.again = time.Time{}, time.Time{}
		return
	case p.refused.IsZero():
		p.refused = began
	}
	p.again = time.Now().Add(min(time.Since(p.refused), maxRest))
}

// deleteRows deletes what lies behind a fence, page by page. Pages with rows that others refer to stay as
// they are, and are an error at the end.
func (m *Manager) deleteRows(ctx context.Context, t *plain, p *Partition, gone missing) (n int64, why string,
	err error) {
	var pages int64
	err = m.conn.QueryRow(ctx, "SELECT pg_relation_size($1) / "+
		"current_setting('block_size')::int", m.root.OID).
		Scan(&pages)
	if err != nil {
		return 0, "", fmt.Errorf("read the size of %s: %w", m.root.Quoted(), err)
	}
	which, err := m.mayDelete(ctx, t, p, gone)
	if err != nil {
		return 0, "", err
	}
	sql := fmt.Sprintf(`WITH batch AS MATERIALIZED (SELECT t.ctid AS at FROM ONLY %[1]s t
			WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid AND %[2]s LIMIT %[3]d FOR UPDATE SKIP LOCKED)
		DELETE FROM ONLY %[1]s WHERE ctid = ANY (ARRAY(SELECT at FROM batch))`, m.root.Quoted(),
		which, batchRows)
	rate := m.rate(t)
	task := progress.Count(ctx, "deleting rows of "+m.root.Quoted(), "rows", 0)
	defer task.End()
	looked, begun := time.Time{}, time.Now() // what was read since it was looked last may have taken hours
	pass, until := place{horizon: p.Horizon}, m.turn()
	if left := m.o.Pass; left != nil {
		if left.page > 0 && left.page < pages {
			pass = left.place
		}
		left.place = place{} // but for the end of its turn, the next run begins at the first page
	}
	single := int64(0) // up to this page each is a batch of its own
	for pass.page < pages {
		if m.cfg.Rows > 0 && t.live-n <= m.cfg.Rows {
			return n, units.Of(n, "row") + "; the rest is within retain.table.rows", pass.referenced
		}
		if time.Since(looked) > recheck {
			if t.Facts, err = m.facts(ctx, m.conn); err != nil {
				return n, "", err
			}
			if _, reason := m.fails(t.Facts, p, eligible...); reason != "" {
				return n, units.Of(n, "row") + "; then " + reason, pass.referenced
			}
			looked = time.Now()
		}
		end := pass.page + batchPages
		if pass.page < single {
			end = pass.page + 1
		}
		deleted, err := m.batch(ctx, sql, pass.page, end)
		switch refers := m.referenced(err); {
		case refers != nil && end > pass.page+1:
			single = end
			continue
		case refers != nil:
			pass.referenced = cmp.Or(pass.referenced, refers)
		case err != nil:
			return n, "", m.explain("delete rows of "+m.root.Quoted(), err)
		}
		n += deleted
		task.Add(deleted)
		m.o.Hit("partition.deleted")
		if deleted < batchRows {
			pass.page = end
		}
		due := begun.Add(time.Duration(float64(n) / rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			select {
			case <-ctx.Done():
				return n, "", ctx.Err()
			case <-time.After(wait):
			}
		}
		if !until.IsZero() && m.o.Pass != nil && pass.page < pages && time.Now().After(until) {
			m.o.Pass.place = pass
			return n, units.Of(n, "row") + "; the rest goes in the next round", pass.referenced
		}
	}
	for at := slices.Index(t.all, p); at >= 0; at-- {
		if t.all[at].Horizon <= pass.horizon { // behind a later one, rows may be left on the first pages
			err = m.joinBehind(ctx, t, t.all[at])
			break
		}
	}
	return n, "", cmp.Or(err, pass.referenced)
}

// How PostgreSQL says that a row is referred to. From 18 on RESTRICT has a state of its own.
const (
	stateReferenced = "23503"
	stateRestricted = "23001"
)

// referenced is the fault of rows that other rows refer to; nil: err is another one, or none.
func (m *Manager) referenced(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != stateReferenced && pg.Code != stateRestricted {
		return nil
	}
	return postgres.Fatal(err, codeNeeded, "Drop the constraint, give it ON DELETE CASCADE or SET NULL, "+
		"or delete the rows that refer to them: rows of an outbox go when they are published",
		"rows of %s can't be deleted, because others refer to them, and all others have gone: %s",
		m.root.Quoted(), pg.Message)
}

// batch deletes at most batchRows rows of some pages. That they are gone again after a crash would be no
// loss.
func (m *Manager) batch(ctx context.Context, sql string, page, end int64) (n int64, err error) {
	err = m.inTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL synchronous_commit = off"); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, sql, fmt.Sprintf("(%d,0)", page), fmt.Sprintf("(%d,0)", end))
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// rate is how many rows are deleted a second: twice as many as were written since the oldest fence.
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
	message := fmt.Sprintf("%s of %s %s never published: no message", units.Of(gone.count, "row"), where,
		units.Agree(gone.count, "was", "were"))
	switch {
	case m.cfg.ID == "":
		message = fmt.Sprintf("nothing shows that the %s of %s %s published: there is no id "+
			"column, and the slot or the stream was made anew, its archive has a gap, or somebody wrote to "+
			"it when it was detached", units.Of(gone.count, "row"), where,
			units.Agree(gone.count, "is", "are"))
	case m.cfg.Archive:
		message += " of the archive"
		fallthrough
	default:
		message += fmt.Sprintf(" has their %s", m.cfg.ID)
		if len(gone.ids) > 0 {
			message += "; " + strings.Join(gone.ids, ", ")
		}
	}
	if !gone.again.IsZero() {
		message += fmt.Sprintf(" (compared again at %s, or by `outflow partition apply`)", stamp(gone.again))
	}
	hint := fmt.Sprintf("They are older than init, were attached with a partition, written to it when it "+
		"was detached, or in an accepted gap of the archive; or the stream's limits took their messages "+
		"before they were compared. Publish them (`outflow repair --check`), "+
		"or let them go with `outflow partition apply --accept-unpublished %d`", gone.count)
	if !gone.crowded.IsZero() {
		hint += fmt.Sprintf(". More than %d of them were written between two fences, up to %s: of so many "+
			"it is not noted which they are. So do it before the stream's limits take the messages of other "+
			"rows of that time, which would count as never published, too", maxMissing, stamp(gone.crowded))
	}
	return &outbox.Fault{Class: outbox.Gap, Code: codeUnpublished, Message: message, Hint: hint}
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
