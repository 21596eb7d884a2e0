package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// How long a statement waits for a lock, and how often it is tried. Writers may queue behind a lock that is
// waited for, so it waits for a short time only, and comes again after a pause of another length each time.
const (
	lockTimeout  = 2 * time.Second // unless the configuration says something else
	lockAttempts = 4
	lockPause    = time.Second
)

// advisory is the class of the lock that keeps two runs apart. The object is the outbox.
const advisory = 0x6f757466

// Apply does what can be done now. The steps are those that were done, and at the end where each partition
// stands. A refusal is an error as well, and so is a step that was not possible; the others go on.
func (m *Manager) Apply(ctx context.Context) (steps []Step, err error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.end(ctx)
	s, err := m.look(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.register(ctx, s); err != nil {
		return nil, err
	}
	did := func(step Step) {
		steps = append(steps, step)
		m.o.Step(step)
	}
	missing, err := m.missing(s)
	if err != nil {
		return nil, err
	}
	for _, p := range missing {
		if err := m.retry(ctx, func() error { return m.create(ctx, p) }); err != nil {
			return steps, err
		}
		did(p.create())
	}
	// first all up to where every slot has confirmed it, so that the stream is read once for all of them
	var failed []error
	held := map[uint32]bool{} // partitions that something was tried with that was not to be had
	for _, far := range []bool{false, true} {
		if s, err = m.look(ctx); err != nil {
			return steps, err
		}
		for _, p := range s.all {
			if held[p.OID] {
				continue
			}
			done, rest, err := m.advance(ctx, s, p, far)
			for _, step := range done {
				did(step)
			}
			held[p.OID] = err != nil || rest != nil && rest.Clause == clauseLocks
			if rest != nil && (far || held[p.OID]) {
				did(*rest)
			}
			if ctx.Err() != nil {
				return steps, ctx.Err()
			}
			if err != nil {
				failed = append(failed, err)
				if outbox.FaultOf(err) == nil { // a connection that is lost: nothing else works
					return steps, errors.Join(failed...)
				}
			}
		}
	}
	return steps, worst(failed)
}

// worst is the error that decides the exit code: that of a decision that somebody has to make, else the
// first.
func worst(all []error) error {
	for _, err := range all {
		if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Gap {
			return err
		}
	}
	if len(all) > 0 {
		return all[0]
	}
	return nil
}

// begin takes the advisory lock and makes the table of states.
func (m *Manager) begin(ctx context.Context) error {
	if err := m.alone(ctx); err != nil {
		return err
	}
	if _, err := m.readLedger(ctx); err != nil {
		return err
	}
	if m.hasLedger {
		return nil
	}
	if err := m.inTx(ctx, func(tx pgx.Tx) error { return m.makeLedger(ctx, tx) }); err != nil {
		return m.explain("make table "+m.ledger(), err)
	}
	_, err := m.readLedger(ctx) // whose is it?
	return err
}

// A process that has the advisory lock, or locks of a transaction, tells PostgreSQL so often that it is
// there. PostgreSQL ends the session of one that was silent for longer than that: it was stopped, or is cut
// off, and its locks would keep everybody from the partition.
const (
	beat   = 15 * time.Second
	silent = time.Minute
)

// away runs do, which takes its time and does not use the connection, and says meanwhile that this process is
// there.
func (m *Manager) away(ctx context.Context, do func() error) error {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(ended)
		tick := time.NewTicker(cmp.Or(m.cfg.beat, beat))
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_ = m.conn.Ping(ctx) // if this fails, the next statement finds the connection broken
			}
		}
	}()
	defer func() {
		close(stop)
		<-ended
	}()
	return do()
}

// alone takes the advisory lock.
func (m *Manager) alone(ctx context.Context) error {
	_, err := m.conn.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d; SET idle_session_timeout = %d",
		cmp.Or(m.cfg.LockTimeout, lockTimeout).Milliseconds(), silent.Milliseconds()))
	if err != nil {
		return fmt.Errorf("limit how long the outbox may be locked: %w", err)
	}
	// a process that was killed a moment ago may still hold it
	_, err = m.conn.Exec(ctx, "SELECT pg_advisory_lock($1::int, $2::oid::int8::bit(32)::int)",
		int32(advisory), m.root.OID)
	if postgres.SQLState(err) == postgres.StateLockNotAvailable {
		var holder string
		err := m.conn.QueryRow(ctx, `SELECT coalesce(string_agg(pid::text, ', '), 'gone by now') FROM pg_locks
			WHERE locktype = 'advisory' AND granted AND classid = $1 AND objid = $2
				AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`,
			int64(advisory), m.root.OID).Scan(&holder)
		if err != nil {
			return fmt.Errorf("look who holds the advisory lock: %w", err)
		}
		return &outbox.Fault{Class: outbox.Transient, Code: codeBusy,
			Message: fmt.Sprintf("another run works on table %s (server process "+
				"%s)", m.root.Quoted(), holder),
			Hint: "Let it finish. Is its process gone, or does it stand still? " +
				"pg_terminate_backend(pid) ends it"}
	}
	if err != nil {
		return fmt.Errorf("take the advisory lock: %w", err)
	}
	return nil
}

// end lets the next run begin at once. Where this fails, the end of the connection does it.
func (m *Manager) end(ctx context.Context) {
	_, _ = m.conn.Exec(ctx, "SELECT pg_advisory_unlock_all(); RESET idle_session_timeout")
}

// inTx runs do in a transaction.
func (m *Manager) inTx(ctx context.Context, do func(tx pgx.Tx) error) error {
	begin := fmt.Sprintf("BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d", silent.Milliseconds())
	return pgx.BeginTxFunc(ctx, m.conn, pgx.TxOptions{BeginQuery: begin}, do)
}

// retry runs do until it gets its locks.
func (m *Manager) retry(ctx context.Context, do func() error) error {
	defer progress.Wait(ctx, "waiting for a lock on table "+m.root.Quoted())()
	for n := 1; ; n++ {
		err := do()
		state := postgres.SQLState(err)
		if n == lockAttempts || state != postgres.StateLockNotAvailable && state != stateDeadlock {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lockPause/10 + rand.N(lockPause)):
		}
	}
}

// register notes the partitions that are attached, and when rows were last written to them.
func (m *Manager) register(ctx context.Context, s *situation) error {
	for _, p := range s.all {
		before := *p
		switch {
		case !p.Exists || p.Default || p.Odd != "":
			continue
		case p.Attached && p.State != Detaching:
			if p.State != Ahead && p.State != Attached { // it was attached again
				p.reset()
			}
			p.State = Attached
			if p.Lower.After(s.Now) {
				p.State = Ahead
			}
		case !p.Attached && !p.Pending && !s.partman.manages && (p.State == Ahead || p.State == Attached):
			p.State = Kept
		}
		if p.Attached && (p.Inserts == nil || *p.Inserts != p.Written) {
			p.Inserts, p.QuietSince = &p.Written, s.Now
		}
		if p.Known && before.State == p.State && before.Inserts == p.Inserts && before.System == p.System &&
			p.System == s.System {
			continue
		}
		if p.Attached || p.State == Kept {
			p.System = s.System
		}
		if err := m.note(ctx, m.conn, p); err != nil {
			return m.explain("write table "+m.ledger(), err)
		}
		p.Known = true
	}
	return nil
}

// reset forgets everything about rows: some may come that nothing is known of.
func (p *Partition) reset() {
	p.Made, p.Fence, p.SealedSum, p.Verified, p.Accepted = false, 0, Sum{}, nil, 0
	p.Sealed, p.Stream, p.Inserts = time.Time{}, Stream{}, nil
}

// written notes that somebody wrote to a partition that was sealed: nothing but ids shows any more that its
// rows went through the outbox.
func (p *Partition) written() {
	p.State, p.Made, p.Verified, p.Stream = Detaching, false, nil, Stream{}
}

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// note writes what is known of a partition into the table of states.
func (m *Manager) note(ctx context.Context, q execer, p *Partition) error {
	var verifiedRows *int64
	verifiedHash := ""
	if p.Verified != nil {
		verifiedRows, verifiedHash = &p.Verified.Rows, p.Verified.Hash
	}
	var fence *string
	if p.Fence != 0 {
		text := p.Fence.String()
		fence = &text
	}
	_, err := q.Exec(ctx, `WITH renamed AS (DELETE FROM `+m.ledger()+` WHERE root = $1 AND name = $21
			AND name <> $2)
		INSERT INTO `+m.ledger()+` AS l (root, name, oid, state, made, lower, upper, fence,
			horizon, system_id, rows, hash, verified_rows, verified_hash, accepted, stream_created,
			stream_seq, inserts, quiet_since, sealed_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8::pg_lsn, nullif($9, 0), $10, $11, $12, $13, nullif($14, ''),
			$15, $16, $17, $18, $19, $20)
		ON CONFLICT (root, name) DO UPDATE SET (oid, state, made, lower, upper, fence, horizon, system_id,
			rows, hash, verified_rows, verified_hash, accepted, stream_created, stream_seq, inserts,
			quiet_since, sealed_at, changed_at) = (excluded.oid, excluded.state, excluded.made, excluded.lower,
			excluded.upper, excluded.fence, excluded.horizon, excluded.system_id, excluded.rows, excluded.hash,
			excluded.verified_rows, excluded.verified_hash, excluded.accepted,
			excluded.stream_created, excluded.stream_seq, excluded.inserts, excluded.quiet_since,
			excluded.sealed_at, CASE WHEN l.state = excluded.state THEN l.changed_at ELSE now() END)`,
		m.root.Quoted(), p.Name, p.OID, string(p.State), p.Made, null(p.Lower), null(p.Upper), fence,
		p.Horizon, p.System, p.SealedSum.Rows, p.SealedSum.Hash, verifiedRows, verifiedHash, p.Accepted,
		null(p.Stream.Created), int64(p.Stream.LastSeq), p.Inserts, null(p.QuietSince), null(p.Sealed),
		p.noted)
	if err == nil {
		p.noted = p.Name
	}
	return err
}

// null is a time in the table of states.
func null(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

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
		err = m.note(ctx, m.conn, p)
		m.o.Hit("partition.durable")
	case Archive:
		if s.Archive.Err != nil {
			return step, s.Archive.Err
		}
		p.State = Archived
		err = m.note(ctx, m.conn, p)
		m.o.Hit("partition.archived")
	case Verify:
		return m.verify(ctx, s, p, step)
	case Drop:
		return m.drop(ctx, p, step)
	case Forget:
		_, err = m.conn.Exec(ctx, "DELETE FROM "+m.ledger()+" WHERE root = $1 AND name = $2", m.root.Quoted(),
			p.Name)
	}
	return step, err
}

// detach detaches a partition. The state is written first: what was detached is Outflow's then.
func (m *Manager) detach(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	p.State = Detaching
	if err := m.note(ctx, m.conn, p); err != nil {
		return step, m.explain("write table "+m.ledger(), err)
	}
	m.o.Hit("partition.detaching")
	sql := fmt.Sprintf("ALTER TABLE %s DETACH PARTITION %s", m.root.Quoted(), p.Name)
	if s.byDefault() == nil {
		sql += " CONCURRENTLY"
	}
	err := m.retry(ctx, func() error {
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
	if p.State != Detaching { // of somebody else, who is not at it any more
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
	rows, err := m.conn.Query(ctx, `SELECT DISTINCT CASE WHEN x.gid IS NOT NULL THEN format('prepared transaction %L',
			x.gid) ELSE format('server process %s', l.pid) END
		FROM pg_locks l
			LEFT JOIN pg_locks o ON l.pid IS NULL AND o.pid IS NULL AND o.locktype = 'transactionid'
				AND o.virtualtransaction = l.virtualtransaction
			LEFT JOIN pg_prepared_xacts x ON x.transaction = o.transactionid
		WHERE l.locktype = 'relation' AND l.relation = ANY ($1::oid[]) AND l.granted AND l.pid IS DISTINCT FROM
			pg_backend_pid() AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		UNION SELECT format('server process %s (open since %s)', pid, to_char(xact_start,
				'YYYY-MM-DD HH24:MI:SS "UTC"'))
			FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND datname = current_database()
				AND pid <> pg_backend_pid() AND backend_type = 'client backend'
				AND xact_start < clock_timestamp() - interval '1 s'
		LIMIT 10`, array([]uint32{m.root.OID, p.OID}))
	if err != nil {
		return Step{}, fmt.Errorf("look who holds the locks: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return Step{}, fmt.Errorf("look who holds the locks: %w", err)
	}
	return Step{Partition: p.Name, Action: Wait, Clause: clauseLocks, Why: "open transactions hold it: " +
		strings.Join(all, ", ")}, nil
}

// seal sets the fence: the end of WAL, while nobody writes to the detached table.
func (m *Manager) seal(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	sealed := *p
	err := m.retry(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) (err error) {
			sealed.reset()
			sealed.Made = p.Made
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
			if sealed.SealedSum, err = m.sum(ctx, tx, p); err != nil {
				return err
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

// lock locks a partition that is detached, and makes sure that it is the one that is meant.
func (m *Manager) lock(ctx context.Context, tx pgx.Tx, p *Partition, mode string) error {
	if _, err := tx.Exec(ctx, "LOCK TABLE "+p.Name+" IN "+mode+" MODE"); err != nil {
		return err
	}
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
	what := "t.*"
	if m.cfg.ID != "" {
		what = "t." + postgres.Quote(m.cfg.ID)
	}
	err = tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*), coalesce(sum(hashtextextended(concat(%s) COLLATE "C",
		0)::numeric), 0)::text FROM ONLY %s t`, what, p.Name)).Scan(&s.Rows, &s.Hash)
	if err != nil {
		return s, fmt.Errorf("count the rows of partition %s: %w", p.Name, err)
	}
	return s, nil
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
