package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// maxSteps is more than a partition takes from one end to the other.
const maxSteps = 12

// advance takes a partition as far as it goes now; unless far, up to where every slot has confirmed it. What
// it does not do any more is the rest: nil where the partition is gone.
func (m *Manager) advance(ctx context.Context, s *situation, p *Partition, far bool) (done []Step, rest *Step,
	err error) {
	for range maxSteps {
		step := m.next(s, p)
		late := step.Action == Archive || step.Action == Verify || step.Action == Drop
		if !step.Action.does() || late && !far {
			return done, &step, nil
		}
		again := m.again(p, 1)
		if late && s.Archive.Err == nil && s.Now.Before(again) && !m.published.has(p) {
			return done, nil, m.refuse("partition "+p.Name, missing{count: p.Refused, again: again})
		}
		did, err := m.do(ctx, s, p, step)
		if err != nil {
			return done, nil, err
		}
		if !did.Action.does() {
			return done, &did, nil
		}
		if done = append(done, did); did.Action == Drop || did.Action == Forget {
			return done, nil, nil
		}
	}
	return done, nil, fmt.Errorf("partition %s does not come to rest: %v", p.Name, done)
}

// clauseLocks stands for what a lock is waited for with.
const clauseLocks = "locks"

// do takes one step. It returns the step that came of it: another one where it has to wait.
func (m *Manager) do(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	var err error
	switch step.Action {
	case Detach:
		return m.detach(ctx, s, p, step)
	case Finalize:
		return m.finalize(ctx, p, step)
	case Seal:
		return m.seal(ctx, s, p, step)
	case Confirm:
		p.State = Durable
		for slot := range p.Streams {
			if !s.has(slot) { // it has not
				p.Streams[slot] = verifying{Fence: p.Fence}
			}
		}
		err = m.note(ctx, m.conn, p)
		m.o.Hit("partition.durable")
	case Archive:
		if s.Archive.Err != nil {
			return step, s.Archive.Err
		}
		if p.came == Verified { // and was not dropped: what it was read for is no use before that is possible
			if instead, err := m.droppable(ctx, p); err != nil || instead.Action != "" {
				return instead, err
			}
		}
		p.State, step.again = Archived, p.came != ""
		err = m.note(ctx, m.conn, p)
		m.o.Hit("partition.archived")
	case Verify:
		return m.verify(ctx, s, p, step)
	case Drop:
		return m.drop(ctx, p, step)
	case Forget:
		// another one may have got its name, and be noted by that
		_, err = m.conn.Exec(ctx, "DELETE FROM "+m.ledger()+" WHERE root = $1 AND name = $2 AND oid = $3",
			m.root.Quoted(), p.Name, p.OID)
	}
	return step, err
}

// detach detaches a partition. The state is written first: what was detached is Outflow's then.
//
// It does not begin while somebody has written to the partition and not ended yet: their next insert would
// fail. Who comes later, or has a snapshot of before, may still write while it waits; see late. Nor does it
// begin while a transaction is open that is older than the partition's last rows: those would look so.
func (m *Manager) detach(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	err := m.conn.QueryRow(ctx, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint").
		Scan(&p.DetachXmin)
	if err != nil {
		return step, fmt.Errorf("read the oldest open transaction: %w", err)
	}
	writers, err := m.writers(ctx, p)
	if err != nil {
		return step, err
	}
	if len(writers) > 0 {
		return Step{Partition: p.Name, Action: Wait, Clause: clauseLocks, Why: "open transactions write to " +
			"it: " + strings.Join(writers[:min(len(writers), 10)], ", ")}, nil
	}
	if m.telling(p) {
		late, err := m.written(ctx, m.conn, p)
		if err != nil {
			return step, err
		}
		if late {
			who, err := m.transaction(ctx, p.DetachXmin)
			return Step{Partition: p.Name, Action: Wait, Clause: clauseLocks,
				Why: "a transaction is open that is older than the partition's last rows: " + who}, err
		}
	}
	p.State = Detaching
	if err := m.note(ctx, m.conn, p); err != nil {
		return step, m.explain("write table "+m.ledger(), err)
	}
	m.o.Hit("partition.detaching")
	sql := fmt.Sprintf("ALTER TABLE %s DETACH PARTITION %s", m.root.Quoted(), p.Name)
	if s.byDefault() == nil {
		sql += " CONCURRENTLY"
	}
	err = m.retry(ctx, func() error {
		_, err := m.conn.Exec(ctx, sql)
		if postgres.SQLState(err) == postgres.StateLockNotAvailable && s.byDefault() == nil {
			// the first half may be done: the second one is FINALIZE then
			if pending, lookErr := m.pending(ctx, p); lookErr != nil || pending {
				p.Pending, p.Attached = true, false
				return lookErr
			}
		}
		return err
	})
	// the second half found it detached: of this DETACH, which somebody has ended by FINALIZE
	if pg := (*pgconn.PgError)(nil); s.byDefault() == nil && errors.As(err, &pg) && pg.Code == stateNoTable &&
		pg.Routine == "RemoveInheritance" {
		err = nil
	}
	if err != nil && !lost(err) && !m.conn.IsClosed() { // which it is after a FATAL error
		pending, lookErr := m.pending(ctx, p)
		if lookErr == nil && !pending { // who detaches it by the next run is somebody else
			p.State = Attached
			lookErr = m.note(ctx, m.conn, p)
		}
		if lookErr != nil {
			return step, m.explain("write table "+m.ledger(), lookErr)
		}
	}
	switch {
	case postgres.SQLState(err) == postgres.StateLockNotAvailable:
		return m.held(ctx, p)
	case err != nil:
		return step, m.explain("detach partition "+p.Name, err)
	case p.Pending:
		return step, nil
	}
	p.Attached = false
	m.o.Hit("partition.detached")
	return step, nil
}

func (m *Manager) pending(ctx context.Context, p *Partition) (yes bool, err error) {
	err = m.conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = $1 AND "+
		"inhdetachpending)", p.OID).Scan(&yes)
	if err != nil {
		return false, fmt.Errorf("read whether partition %s is detached: %w", p.Name, err)
	}
	return yes, nil
}

// finalize ends a DETACH that was interrupted.
func (m *Manager) finalize(ctx context.Context, p *Partition, step Step) (Step, error) {
	if p.State != Detaching { // of pg_partman, which is not at it any more
		p.State = Detaching
		if err := m.note(ctx, m.conn, p); err != nil {
			return step, m.explain("write table "+m.ledger(), err)
		}
	}
	err := m.retry(ctx, func() error {
		_, err := m.conn.Exec(ctx, fmt.Sprintf("ALTER TABLE %s DETACH PARTITION %s FINALIZE", m.root.Quoted(),
			p.Name))
		return err
	})
	if postgres.SQLState(err) == postgres.StateLockNotAvailable {
		return m.held(ctx, p)
	}
	if err != nil {
		return step, m.explain("detach partition "+p.Name, err)
	}
	p.Pending, p.Attached = false, false
	m.o.Hit("partition.detached")
	return step, nil
}

// held says what a partition waits for.
func (m *Manager) held(ctx context.Context, p *Partition) (Step, error) {
	all, err := m.holders(ctx, `l.relation = ANY ($1::oid[])
		UNION SELECT format('server process %s (open since %s)', pid, to_char(xact_start,
				'YYYY-MM-DD HH24:MI:SS "UTC"'))
			FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND datname = current_database()
				AND pid <> pg_backend_pid() AND backend_type = 'client backend'
				AND xact_start < clock_timestamp() - interval '1 s'
		LIMIT 10`, array([]uint32{m.root.OID, p.OID}))
	if err != nil {
		return Step{}, err
	}
	return Step{Partition: p.Name, Action: Wait, Clause: clauseLocks, Why: "open transactions hold it: " +
		cmp.Or(strings.Join(all, ", "), "those that hold a table that refers to it")}, nil
}

// writers names those that have written to a partition and don't end while a lock would be waited for. Others
// may come meanwhile without a pause: an UPDATE of the root by id locks all partitions for a moment.
func (m *Manager) writers(ctx context.Context, p *Partition) (long []string, err error) {
	defer progress.Wait(ctx, "waiting for transactions that write to partition "+p.Name)()
	for n := range lockAttempts {
		if n > 0 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(cmp.Or(m.cfg.LockTimeout, lockTimeout) / lockAttempts):
			}
		}
		now, err := m.holders(ctx, "l.relation = $1::oid AND l.mode = 'RowExclusiveLock'", p.OID)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			long = now
		}
		long = slices.DeleteFunc(long, func(who string) bool { return !slices.Contains(now, who) })
		if len(long) == 0 {
			break
		}
	}
	return long, nil
}

// holders names the transactions of others that hold locks.
func (m *Manager) holders(ctx context.Context, which string, arg any) ([]string, error) {
	rows, err := m.conn.Query(ctx, `SELECT DISTINCT CASE WHEN x.gid IS NOT NULL THEN format('prepared transaction %L',
			x.gid) ELSE format('server process %s (transaction %s)', l.pid, l.virtualtransaction) END
		FROM pg_locks l
			LEFT JOIN pg_locks o ON l.pid IS NULL AND o.pid IS NULL AND o.locktype = 'transactionid'
				AND o.virtualtransaction = l.virtualtransaction
			LEFT JOIN pg_prepared_xacts x ON x.transaction = o.transactionid
		WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid() AND
			l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND `+which, arg)
	if err != nil {
		return nil, fmt.Errorf("look who holds the locks: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look who holds the locks: %w", err)
	}
	return all, nil
}

// seal sets the fence: the end of WAL, while nobody writes to the detached table.
func (m *Manager) seal(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	sealed := *p
	err := m.retry(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) (err error) {
			sealed.reset()
			sealed.Made = p.Made
			if sealed.Streams = maps.Clone(p.Streams); p.Sealed.IsZero() {
				sealed.Streams = m.streams(s.Facts, s.Stream)
			}
			switch {
			case p.Sealed.IsZero():
				sealed.Stream = s.Stream // the one that its rows went to
			case p.System == s.System:
				sealed.Stream = p.Stream
			} // else nobody knows, and without ids nothing shows it
			if err := m.lock(ctx, tx, p, "SHARE"); err != nil {
				return err
			}
			var fence string
			err = tx.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text, clock_timestamp()").
				Scan(&fence, &sealed.Sealed)
			if err != nil {
				return err
			}
			if sealed.Fence, err = outbox.ParseLSN(fence); err != nil {
				return err
			}
			sealed.fenced()
			if sealed.SealedSum, err = m.sum(ctx, tx, p); err != nil {
				return err
			}
			late, err := m.late(ctx, tx, p)
			if err != nil {
				return err
			}
			if !p.Sealed.IsZero() {
				sealed.DetachXmin = p.DetachXmin
			}
			var brought []string // by subscriptions: rows of other servers, which Outflow leaves out
			if m.cfg.OwnOnly {
				if brought, err = catalog.BroughtBy(ctx, tx, m.root.OID); err != nil {
					return err
				}
			}
			if late || len(brought) > 0 {
				sealed.Made, sealed.Stream = false, Stream{}
			}
			if late {
				sealed.DetachXmin = max(p.DetachXmin, 1) // 1: nobody knows, so that any row may be late
			}
			sealed.State, sealed.System = Sealed, s.System
			if err := m.note(ctx, tx, &sealed); err != nil {
				return err
			}
			m.o.Hit("partition.sealing")
			return nil
		})
	})
	if postgres.SQLState(err) == postgres.StateLockNotAvailable {
		return m.held(ctx, p)
	}
	if err != nil {
		return step, m.explain("seal partition "+p.Name, err)
	}
	*p = sealed
	step.Rows, step.Why = p.SealedSum.Rows, fmt.Sprintf("%s; the fence is %v", step.Why, p.Fence)
	m.o.Hit("partition.sealed")
	return step, nil
}

// late reports whether rows may have been written while a DETACH waited for others, which PostgreSQL 16 and
// later never sends: the fence shows nothing of them.
func (m *Manager) late(ctx context.Context, tx pgx.Tx, p *Partition) (yes bool, err error) {
	if !m.telling(p) || p.State != Detaching || !p.Sealed.IsZero() {
		return false, nil
	}
	if p.DetachXmin == 0 {
		return true, nil
	}
	return m.written(ctx, tx, p)
}

// telling reports whether a fence tells something of a partition's rows that ids don't.
func (m *Manager) telling(p *Partition) bool { return p.Made || m.cfg.ID == "" || m.cfg.Own != "" }

// transaction names the one with that ID.
func (m *Manager) transaction(ctx context.Context, id int64) (who string, err error) {
	err = m.conn.QueryRow(ctx, `SELECT coalesce(
			(SELECT format('server process %s in database %I', pid, datname) FROM pg_stat_activity
				WHERE backend_xid::text::bigint = $1::bigint & 4294967295 LIMIT 1),
			(SELECT format('prepared transaction %L', gid) FROM pg_prepared_xacts
				WHERE transaction::text::bigint = $1::bigint & 4294967295),
			format('number %s', $1::bigint))`, id).Scan(&who)
	if err != nil {
		return "", fmt.Errorf("look for the oldest open transaction: %w", err)
	}
	return who, nil
}

// written reports whether a partition has rows that were written after its DETACH had begun. Of nearly all of
// them age tells that they were not, in a quarter of the time, where that is less than 2^31 transactions ago.
func (m *Manager) written(ctx context.Context, q catalog.Querier, p *Partition) (yes bool, err error) {
	err = q.QueryRow(ctx, "SELECT EXISTS (SELECT FROM ONLY "+p.Name+" t WHERE ("+
		"(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) - $1 >= 2147483648 OR "+
		"age($2::text::xid) < 0 OR age(t.xmin) <= age($2::text::xid)) AND "+written+" >= $1)", p.DetachXmin,
		fmt.Sprint(uint32(p.DetachXmin))).Scan(&yes)
	if err != nil {
		return false, fmt.Errorf("look for the newest rows of partition %s: %w", p.Name, err)
	}
	return yes, nil
}

// lock locks a partition that is detached, and makes sure that it is the one that is meant.
func (m *Manager) lock(ctx context.Context, tx pgx.Tx, p *Partition, mode string) error {
	if _, err := tx.Exec(ctx, "LOCK TABLE "+p.Name+" IN "+mode+" MODE"); err != nil {
		return err
	}
	m.locked()
	var same, attached bool
	err := tx.QueryRow(ctx, `SELECT $1::regclass::oid = $2, EXISTS (SELECT FROM pg_inherits
		WHERE inhrelid = $2)`, p.Name, p.OID).Scan(&same, &attached)
	if err == nil && !same {
		err = postgres.Fatal(nil, codeTaken, "Look who made it; Outflow leaves it alone",
			"table %s is another one than the partition of that name", p.Name)
	}
	if err == nil && attached {
		err = &outbox.Fault{Class: outbox.Transient, Code: codeBusy,
			Message: fmt.Sprintf("partition %s was attached meanwhile", p.Name), Hint: "Run the command " +
				"again"}
	}
	return err
}

// sum counts the rows of a partition, and adds up the hashes of their ids.
func (m *Manager) sum(ctx context.Context, tx pgx.Tx, p *Partition) (s Sum, err error) {
	defer progress.Wait(ctx, "counting the rows of partition "+p.Name)()
	what := "t.*"
	if m.cfg.ID != "" {
		t, err := catalog.ReadTable(ctx, tx, p.Name)
		if err == nil {
			what, err = m.root.ColumnOf(t, m.cfg.ID)
		}
		if err != nil {
			return s, err
		}
	}
	err = tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*), coalesce(sum(hashtextextended(concat(%s) COLLATE "C",
		0)), 0)::text FROM ONLY %s t`, what, p.Name)).Scan(&s.Rows, &s.Hash)
	if err != nil {
		return s, fmt.Errorf("count the rows of partition %s: %w", p.Name, err)
	}
	return s, nil
}

// droppable drops a partition for trial. Where it is held, that is the step instead.
func (m *Manager) droppable(ctx context.Context, p *Partition) (instead Step, err error) {
	possible := errors.New("it is possible")
	err = m.retry(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if err := m.lock(ctx, tx, p, "ACCESS EXCLUSIVE"); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "DROP TABLE "+p.Name); err != nil {
				return err
			}
			return possible
		})
	})
	switch {
	case errors.Is(err, possible):
		return instead, nil
	case postgres.SQLState(err) == postgres.StateLockNotAvailable:
		return m.held(ctx, p)
	}
	return instead, m.explain("drop partition "+p.Name, err)
}

// drop drops a partition, if every clause still holds while nobody can change it.
func (m *Manager) drop(ctx context.Context, p *Partition, step Step) (Step, error) {
	m.o.Hit("partition.verified")
	instead := Step{}
	err := m.retry(ctx, func() error {
		instead = Step{}
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if err := m.lock(ctx, tx, p, "ACCESS EXCLUSIVE"); err != nil {
				return err
			}
			f, err := m.facts(ctx, tx)
			if err != nil {
				return err
			}
			found, err := m.sum(ctx, tx, p)
			if err != nil {
				return err
			}
			p.Found = &found
			if f.Archive.Err != nil {
				return f.Archive.Err
			}
			name, why := mayGo(&m.cfg, f, p)
			switch {
			case name == "verified": // somebody wrote to it: it is sealed and verified again
				p.written()
				instead = Step{Partition: p.Name, Action: Wait, Clause: name, Why: why}
				return m.note(ctx, tx, p)
			case name == "stream": // it is compared with the new one
				p.State, p.Verified = Durable, nil
				instead = Step{Partition: p.Name, Action: Wait, Clause: name, Why: why}
				return m.note(ctx, tx, p)
			case why != "":
				instead = Step{Partition: p.Name, Action: Wait, Clause: name, Why: why}
				return nil
			}
			if _, err := tx.Exec(ctx, "DROP TABLE "+p.Name); err != nil {
				return err
			}
			gone := *p
			gone.State = Dropped
			if err := m.note(ctx, tx, &gone); err != nil {
				return err
			}
			m.o.Hit("partition.dropping")
			_, err = tx.Exec(ctx, "DELETE FROM "+m.ledger()+" WHERE root = $1 AND state = 'dropped' AND "+
				"name NOT IN (SELECT name FROM "+m.ledger()+" WHERE root = $1 AND state = 'dropped' "+
				"ORDER BY changed_at DESC LIMIT $2)", m.root.Quoted(), maxHistory)
			return err
		})
	})
	if postgres.SQLState(err) == postgres.StateLockNotAvailable {
		return m.held(ctx, p)
	}
	if err != nil {
		return step, m.explain("drop partition "+p.Name, err)
	}
	if instead.Action != "" {
		return instead, nil
	}
	m.o.Hit("partition.dropped")
	return step, nil
}
