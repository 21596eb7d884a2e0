package partition

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
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

// again is how often the partitions that have to lie ahead are made in a run that takes its time: it may have
// to read the whole archive, and writers need them.
const again = time.Minute

// advisory is the class of the lock that keeps two runs apart. The object is the outbox.
const advisory = 0x6f757466

// Apply does what can be done now. The steps are those that were done, and at the end where each partition
// stands. A refusal is an error as well, and so is a step that was not possible; the others go on.
func (m *Manager) Apply(ctx context.Context) (steps []Step, err error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.end(ctx)
	did := func(step Step) {
		steps = append(steps, step)
		m.o.Step(step)
	}
	s, err := m.look(ctx)
	if err == nil && !m.hasLedger {
		if err = m.takeUp(ctx); err != nil {
			return nil, err
		}
		s, err = m.look(ctx) // to make it was to write WAL
	}
	if err != nil { // that nothing may go is no reason why rows of now should find no partition
		err = errors.Join(err, m.ahead(ctx, did))
		return steps, err
	}
	if err := m.register(ctx, s); err != nil {
		return nil, err
	}
	var failed []error // what PostgreSQL refused: everything else goes on
	switch err := m.createAll(ctx, s, did); {
	case lost(err):
		return steps, err
	case err != nil:
		failed = append(failed, err)
	}
	made := time.Now()
	m.between = func() error {
		if time.Since(made) < cmp.Or(m.cfg.again, again) {
			return nil
		}
		err := m.ahead(ctx, did)
		if made = time.Now(); lost(err) {
			return err
		}
		return nil // the next run begins with it, and says what is wrong
	}
	// first all up to where every slot has confirmed it, so that the stream is read once for all of them
	tried := len(steps)+len(failed) > 0 // since the situation was read: otherwise it is still that one
	held := map[uint32]bool{}           // partitions that something was tried with that was not to be had
	for _, far := range []bool{false, true} {
		var until time.Time // when the turn of this run is over; zero: not yet known, or never
		if tried {
			if s, err = m.look(ctx); err != nil {
				return steps, err
			}
			tried = false
		}
		refusedLast := slices.Clone(s.all) // for these all is read, which may take longer than a run may
		slices.SortStableFunc(refusedLast, func(p, q *Partition) int {
			return cmp.Compare(min(p.Refused, 1), min(q.Refused, 1))
		})
		for _, p := range refusedLast {
			if held[p.OID] {
				continue
			}
			if err := m.between(); err != nil {
				return steps, err
			}
			done, rest, err := m.advance(ctx, s, p, far)
			for _, step := range done {
				did(step)
			}
			held[p.OID] = err != nil || rest != nil && rest.Clause == clauseLocks
			tried = tried || len(done) > 0 || held[p.OID]
			if rest != nil && (far || held[p.OID]) {
				did(*rest)
			}
			if ctx.Err() != nil {
				return steps, ctx.Err()
			}
			if err != nil {
				failed = append(failed, err)
				if lost(err) || m.conn.IsClosed() { // the latter by a FATAL error
					return steps, errors.Join(failed...)
				}
			}
			switch took := func(s Step) bool { return s.Action == Seal || s.Action == Drop }; {
			case !slices.ContainsFunc(done, took): // it took no time, or the next run has to do it again
			case until.IsZero():
				until = m.turn()
			case time.Now().After(until):
				return steps, worst(failed)
			}
		}
	}
	return steps, worst(failed)
}

// turn is when the turn of this run is over, of which rows begin to go now; zero: never. It may go on for as
// long as it took up to now: half of its time at most is for what the next run has to do again.
func (m *Manager) turn() time.Time {
	if m.o.Turn == 0 {
		return time.Time{}
	}
	return time.Now().Add(max(m.o.Turn, time.Since(m.began)))
}

// ahead makes the partitions that have to lie ahead, whatever is known of record, stream and slots.
func (m *Manager) ahead(ctx context.Context, did func(Step)) (err error) {
	if ctx.Err() != nil || m.conn.IsClosed() || m.root.Key == "" {
		return nil
	}
	s := &situation{Facts: &Facts{}}
	if err = m.server(ctx, m.conn, s.Facts); err == nil {
		s.all, err = m.read(ctx, s.System)
	}
	if err == nil {
		s.partman, err = m.readPartman(ctx)
	}
	if err == nil && m.hasLedger { // a new one may get the name that another one had
		err = m.register(ctx, s)
	}
	if err == nil {
		err = m.createAll(ctx, s, did)
	}
	return err
}

// createAll makes the partitions that are missing. One whose range or name is taken keeps no other one away:
// as long as ranges are missing, the default partition gets rows of more and more of them.
func (m *Manager) createAll(ctx context.Context, s *situation, did func(Step)) error {
	missing, err := m.missing(s)
	if err == nil && len(missing) > 0 {
		err = m.takeUp(ctx)
	}
	if err != nil {
		return err
	}
	var taken error
	for _, p := range missing {
		err := m.retry(ctx, func() error { return m.create(ctx, s, p) })
		if inTheWay(err) {
			taken = cmp.Or(taken, err)
			continue
		}
		if err != nil {
			return err
		}
		did(p.create())
	}
	return taken
}

// inTheWay reports whether something has the name, the range, or maybe rows of a partition that is to be
// made.
func inTheWay(err error) bool {
	f := outbox.FaultOf(err)
	return f != nil && slices.Contains([]string{codeTaken, codeRest, codeRestLarge}, f.Code)
}

// lost reports whether nothing else works after this error: PostgreSQL has not answered.
func lost(err error) bool {
	return err != nil && outbox.FaultOf(err) == nil && postgres.SQLState(err) == ""
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

// begin takes the advisory lock and makes the table of states what it has to be, if there is one. It is made
// with what is first noted: a run that is refused leaves none behind, which would be its role's.
func (m *Manager) begin(ctx context.Context) error {
	m.began = time.Now()
	if err := m.alone(ctx); err != nil {
		return err
	}
	if _, err := m.readLedger(ctx); err != nil || !m.hasLedger && len(m.stale) == 0 {
		return err
	}
	return m.takeUp(ctx)
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
	_, err := m.conn.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d; SET idle_session_timeout = %d; "+
		"SET max_parallel_workers_per_gather = 0", // its scans leave the other processors to writers
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
	m.locked = progress.Wait(ctx, "waiting for a lock on table "+m.root.Quoted())
	defer m.locked()
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

// register notes the partitions that are attached, when rows were last written to them, and new names.
func (m *Manager) register(ctx context.Context, s *situation) error {
	err := m.inTx(ctx, func(tx pgx.Tx) error { return m.registerAll(ctx, tx, s) })
	if err != nil {
		return m.explain("write table "+m.ledger(), err)
	}
	return nil
}

func (m *Manager) registerAll(ctx context.Context, tx pgx.Tx, s *situation) error {
	for _, p := range s.all {
		before := *p
		if p.older { // now, and not when it takes its next step: by then they may be others
			streams, err := json.Marshal(p.Streams)
			if err == nil {
				_, err = tx.Exec(ctx, "UPDATE "+m.ledger()+" SET streams = $3::text::jsonb WHERE root = $1 "+
					"AND name = $2", m.root.Quoted(), p.noted, string(streams))
			}
			if err != nil {
				return err
			}
		}
		switch {
		case !p.Exists || p.Default || p.Odd != "":
			continue
		case p.Attached: // where its DETACH has failed, too: who detaches it now may be somebody else
			if p.State != Ahead && p.State != Attached && p.State != Detaching || p.reattached() {
				p.reset()
			}
			p.State, p.AttachXID = Attached, p.Attach
			if p.Lower.After(s.Now) {
				p.State = Ahead
			}
		case !p.Attached && !p.Pending && !s.partman.manages && (p.State == Ahead || p.State == Attached):
			p.State = Kept
		}
		if p.Attached && (p.Inserts == nil || *p.Inserts != p.Written || p.QuietSince.After(s.Now)) {
			p.Inserts, p.QuietSince = &p.Written, s.Now
		}
		if p.Known && before.State == p.State && before.Inserts == p.Inserts &&
			before.AttachXID == p.AttachXID && before.System == p.System && p.System == s.System &&
			p.noted == p.Name {
			continue
		}
		if p.Attached || p.State == Kept {
			p.System = s.System
		}
		if err := m.note(ctx, tx, p); err != nil {
			return err
		}
		p.Known = true
	}
	return nil
}

// reattached reports whether somebody has detached it and attached it again since it was noted. Rows may
// have been written to it meanwhile.
func (p *Partition) reattached() bool {
	return p.Attached && p.AttachXID != 0 && p.AttachXID != p.Attach
}

// reset forgets everything about rows: some may come that nothing is known of. That it was sealed before
// stays, or its next fence would count for the rows of a former stream or cluster as well.
func (p *Partition) reset() {
	p.Made, p.Fence, p.SealedSum, p.Verified, p.Accepted, p.Refused = false, 0, Sum{}, nil, 0, 0
	p.DetachXmin, p.VerifiedBy, p.Streams = 0, nil, nil
	p.Stream, p.Inserts = Stream{}, nil
}

// written notes that somebody wrote to a partition that was sealed: nothing but ids shows any more that its
// rows went through the outbox, also those of other shards.
func (p *Partition) written() {
	p.State, p.Made, p.Verified, p.Stream, p.Refused = Detaching, false, nil, Stream{}, 0
	p.DetachXmin, p.VerifiedBy = max(p.DetachXmin, 1), nil
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
	verifiedBy, err := json.Marshal(p.VerifiedBy)
	if err != nil {
		return err
	}
	streams, err := json.Marshal(p.Streams)
	if err != nil {
		return err
	}
	_, err = q.Exec(ctx, `WITH renamed AS (DELETE FROM `+m.ledger()+` WHERE root = $1 AND name = $21
			AND name <> $2 AND oid = $3)
		INSERT INTO `+m.ledger()+` AS l (root, root_oid, name, oid, state, made, lower, upper, fence,
			horizon, system_id, rows, hash, verified_rows, verified_hash, accepted, stream_created,
			stream_seq, inserts, quiet_since, sealed_at, attach_xid, detach_xmin,
			missing, refused, refused_at, refused_by, verified_by, streams)
		VALUES ($1, $22, $2, $3, $4, $5, $6, $7, $8::pg_lsn, nullif($9::bigint, 0), $10, $11, $12, $13,
			nullif($14, ''), $15, $16, $17, $18, $19, $20, nullif($23::bigint, 0), nullif($24::bigint, 0),
			$25::text[]::uuid[], $26, $27, nullif($28, ''), nullif($29::jsonb, 'null'),
			nullif($30::jsonb, 'null'))
		ON CONFLICT (root, name) DO UPDATE SET (root_oid, oid, state, made, lower, upper, fence, horizon,
			system_id, rows, hash, verified_rows, verified_hash, accepted, stream_created, stream_seq, inserts,
			quiet_since, sealed_at, attach_xid, detach_xmin, missing, refused, refused_at, refused_by,
			verified_by, streams, changed_at) =
			(excluded.root_oid, excluded.oid,
			excluded.state, excluded.made, excluded.lower, excluded.upper, excluded.fence, excluded.horizon,
			excluded.system_id, excluded.rows, excluded.hash, excluded.verified_rows, excluded.verified_hash,
			excluded.accepted, excluded.stream_created, excluded.stream_seq, excluded.inserts,
			excluded.quiet_since, excluded.sealed_at, excluded.attach_xid, excluded.detach_xmin, excluded.missing,
			excluded.refused, excluded.refused_at, excluded.refused_by, excluded.verified_by,
			excluded.streams,
			CASE WHEN l.state = excluded.state THEN l.changed_at ELSE now() END)`,
		m.root.Quoted(), p.Name, p.OID, string(p.State), p.Made, null(p.Lower), null(p.Upper), fence,
		p.Horizon, p.System, p.SealedSum.Rows, p.SealedSum.Hash, verifiedRows, verifiedHash, p.Accepted,
		null(p.Stream.Created), int64(p.Stream.LastSeq), p.Inserts, null(p.QuietSince), null(p.Sealed),
		p.noted, m.root.OID, p.AttachXID, p.DetachXmin, p.Missing, p.Refused, null(p.RefusedAt),
		p.RefusedBy, string(verifiedBy), string(streams))
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
