package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/outflowhq/outflow/outbox"
)

// Postgres keeps the offsets in the database that the handler writes to, in the handler's transactions: each
// event takes effect exactly once.
//
// The pool needs at least two connections; with Partitions + 2, all partitions can work concurrently. Each of
// several consumers that share a pool needs that many: one is held for as long as the lease.
func Postgres(pool *pgxpool.Pool) Offsets {
	if pool == nil {
		return postgresOffsets{}
	}
	return postgresOffsets{pgxDatabase{pool}}
}

type postgresOffsets struct{ pool database } // nil if the user's is

// postgres is the store of one consumer in a database.
//
// Its SQL runs in the application's sessions, with their search_path, and must not call functions or
// operators that somebody has planted in one of those schemas. So each one either names its schema, or is one
// that pg_catalog has for exactly these types, which PostgreSQL finds first.
type postgres struct {
	pool  database
	cfg   *Config
	me    string        // this instance
	idle  time.Duration // how long a transaction may wait for the handler before the server ends it
	slots chan struct{} // one for each connection that workers may use

	checks string // SQL by which the server notices during a statement that this process is gone

	lease connection // reserved by the session, so that busy workers can't delay renewing the lease
	epoch int64      // of the session
}

func (p postgresOffsets) open(ctx context.Context, _ jetstream.JetStream, cfg *Config) (store, error) {
	most := p.pool.most()
	if most == 0 {
		most = maxPartitions + 2
	}
	s := &postgres{pool: p.pool, cfg: cfg, me: instanceName(), idle: cfg.Timeout + 5*time.Second}
	s.slots = make(chan struct{}, max(1, min(cfg.Partitions, most-2)))
	const checks = "SET LOCAL client_connection_check_interval = 1000"
	// Outside a transaction it only says whether the server's platform can do that.
	if _, err := p.pool.Exec(ctx, checks); err == nil {
		s.checks = checks + "; "
	} else if class(err) != "22" && class(err) != "42" { // it can't be asked now
		return nil, err
	}
	if cfg.NoCreate {
		return s, nil
	}
	return s, s.create(ctx)
}

// users are the consumers of this process that run, by pool.
var users = struct {
	sync.Mutex
	of map[any]int
}{of: map[any]int{}}

// use counts another consumer that uses the pool, until the function that it returns is called. Each keeps a
// connection for its lease: a pool that has nothing beside that would silently stop them all.
func (p postgresOffsets) use() (end func(), err error) {
	if p.pool == nil {
		return nil, errors.New("consumer: Postgres or PostgresSQL of nil: want a pool")
	}
	users.Lock()
	defer users.Unlock()
	key := p.pool.key()
	n, most := users.of[key]+1, p.pool.most()
	if most > 0 && most <= n {
		return nil, fault(ErrSetup, nil, "Give it Partitions + 2 for each consumer that shares it, and one "+
			"more than there are consumers at least: pool_max_conns",
			"the pool has %d connections for %d consumers", most, n)
	}
	users.of[key] = n
	return func() {
		users.Lock()
		defer users.Unlock()
		if users.of[key]--; users.of[key] == 0 {
			delete(users.of, key)
		}
	}, nil
}

// instanceName names this instance, so that operators can see which one has the lease.
func instanceName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + "-" + strconv.Itoa(os.Getpid()) + "-" + nuid.Next()
}

func (s *postgres) transactional() bool { return true }

func (s *postgres) renewEvery() time.Duration { return s.cfg.Lease / 3 }

// table is the name of a table of ours in SQL.
func (s *postgres) table(name string) string { return inSchema(s.cfg.DatabaseSchema, name) }

// acquire asks for the lease. If it gets it, it writes a new epoch to the consumer and all its offsets. That
// waits for open transactions of earlier sessions, and none of theirs can begin afterwards, so the offsets
// that it returns are final.
func (s *postgres) acquire(ctx context.Context) (*state, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	st := &state{Created: map[string]time.Time{}, Offsets: map[string][]offset{}}
	// An instance that freezes meanwhile must not keep the active one from renewing its lease.
	frozen := fmt.Sprintf("BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d",
		max(s.cfg.Lease/4, 100*time.Millisecond).Milliseconds())
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{BeginQuery: frozen}, func(tx pgx.Tx) error {
		return s.acquireIn(ctx, tx, st)
	})
	if err != nil {
		conn.Release()
		return nil, err
	}
	s.lease = conn
	return st, nil
}

func (s *postgres) acquireIn(ctx context.Context, tx pgx.Tx, st *state) error {
	consumers, offsets := s.table("outflow_consumer"), s.table("outflow_mark")
	// A stand-by locks nothing.
	held := new(heldError)
	err := tx.QueryRow(ctx, `SELECT owner, partitions FROM `+consumers+
		` WHERE name = $1 AND stream = $3 AND expires > clock_timestamp() AND owner <> $2`, s.cfg.Name, s.me,
		s.cfg.Stream).Scan(&held.owner, &held.partitions)
	if err == nil {
		return held
	}
	if !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO `+consumers+
		` (name, stream, filter, partitions) VALUES ($1, $2, $3, 0) ON CONFLICT (name) DO NOTHING`,
		s.cfg.Name, s.cfg.Stream, strings.Join(s.cfg.Filters, " ")); err != nil {
		return err
	}
	var stream, filters, before string
	var created, replayed *time.Time
	var owner *string
	var replayedTo int64
	err = tx.QueryRow(ctx, `SELECT stream, stream_created, replay_created, filter, partitions, before::text,
		replayed_to,
		CASE WHEN expires > clock_timestamp() AND owner <> $2 THEN owner END FROM `+consumers+` WHERE name = $1 FOR UPDATE`, s.cfg.Name, s.me).
		Scan(&stream, &created, &replayed, &filters, &st.Partitions, &before, &replayedTo, &owner)
	if err != nil {
		return err
	}
	if stream != s.cfg.Stream {
		return fault(ErrStream, nil, "Give the new consumer another name: marks belong to a stream",
			"consumer %s reads stream %s, not %s", s.cfg.Name, stream, s.cfg.Stream)
	}
	if owner != nil {
		return &heldError{owner: *owner, partitions: st.Partitions}
	}
	if err := json.Unmarshal([]byte(before), &st.OldLayouts); err != nil {
		return fmt.Errorf("%s.before of %s: %w", consumers, s.cfg.Name, err)
	}
	st.ReplayedTo, st.Filters = uint64(replayedTo), strings.Fields(filters)
	for source, at := range map[string]*time.Time{live: created, replay: replayed} {
		if at != nil {
			st.Created[source] = at.UTC()
		}
	}
	err = tx.QueryRow(ctx, `UPDATE `+consumers+` SET owner = $2, expires = clock_timestamp() + $3::interval,
		epoch = epoch + 1 WHERE name = $1
		RETURNING epoch`, s.cfg.Name, s.me, s.cfg.Lease).Scan(&s.epoch)
	if err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `UPDATE `+offsets+
		` SET epoch = $2 WHERE name = $1 RETURNING source, partition, seq, due::text, n, lsn::text, i, holed`,
		s.cfg.Name, s.epoch)
	if err != nil {
		return err
	}
	return scanOffsets(rows, st)
}

func scanOffsets(rows pgx.Rows, st *state) error {
	found := map[string]map[int]offset{}
	var source, due, lsn string
	var partition int
	var seq, n, index int64
	var holed bool
	_, err := pgx.ForEachRow(rows, []any{&source, &partition, &seq, &due, &n, &lsn, &index, &holed},
		func() error {
			m := offset{Seq: uint64(seq), N: uint32(n), Pos: outbox.Position{Index: uint32(index)},
				Lost: holed}
			var err, also error
			m.Due, err = outbox.ParseLSN(due)
			m.Pos.LSN, also = outbox.ParseLSN(lsn)
			if found[source] == nil {
				found[source] = map[int]offset{}
			}
			found[source][partition] = m
			return errors.Join(err, also)
		})
	if err != nil {
		return err
	}
	for source, offsets := range found {
		all := make([]offset, len(offsets))
		for p := range all {
			m, ok := offsets[p]
			if !ok || len(offsets) != st.Partitions {
				return fault(ErrStream, nil, "Somebody changed the table: put it back, or delete the "+
					"consumer's rows in outflow_consumer and outflow_mark to begin anew",
					"outflow_mark has %d marks (%s), not those of %d partitions", len(offsets), source,
					st.Partitions)
			}
			all[p] = m
		}
		st.Offsets[source] = all
	}
	return nil
}

func (s *postgres) save(ctx context.Context, st *state) error {
	before, err := json.Marshal(append([]oldLayout{}, st.OldLayouts...))
	if err != nil {
		return err
	}
	at := func(source string) *time.Time {
		if t, ok := st.Created[source]; ok {
			return &t
		}
		return nil
	}
	return pgx.BeginFunc(ctx, s.lease, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET stream_created = $3, replay_created = $4, filter = $5, partitions = $6,
			before = $7::jsonb WHERE name = $1 AND epoch = $2`, s.cfg.Name, s.epoch, at(live), at(replay), strings.Join(st.Filters, " "), st.Partitions, string(before))
		if err == nil && tag.RowsAffected() != 1 {
			err = errMoved
		}
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM `+s.table("outflow_mark")+` WHERE name = $1`,
			s.cfg.Name); err != nil {
			return err
		}
		for source, offsets := range st.Offsets {
			for p, m := range offsets {
				if _, err := tx.Exec(ctx, `INSERT INTO `+s.table("outflow_mark")+` (name, source, partition, epoch, seq, due, n, lsn, i, holed)
					VALUES ($1, $2, $3, $4, $5, $6::text::pg_lsn, $7, $8::text::pg_lsn, $9, $10)`, s.cfg.Name, source, p, s.epoch,
					int64(m.Seq), m.Due.String(), int64(m.N), m.Pos.LSN.String(), int64(m.Pos.Index),
					m.Lost); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (s *postgres) dropOldLayouts(ctx context.Context, source string) error {
	_, err := s.pool.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET before =
		(SELECT coalesce(pg_catalog.jsonb_agg(g), '[]') FROM pg_catalog.jsonb_array_elements(before) g
			WHERE pg_catalog.jsonb_extract_path_text(g, 'source') <> $3) WHERE name = $1 AND epoch = $2`,
		s.cfg.Name, s.epoch, source)
	return err
}

func (s *postgres) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Lease)
	defer cancel()
	tag, err := s.lease.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+
		` SET expires = clock_timestamp() + $3::interval WHERE name = $1 AND epoch = $2`,
		s.cfg.Name, s.epoch, s.cfg.Lease)
	if err == nil && tag.RowsAffected() != 1 {
		err = errMoved
	}
	return err
}

func (s *postgres) release(ctx context.Context) error {
	defer s.abandon()
	_, err := s.lease.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+
		` SET owner = NULL, expires = NULL WHERE name = $1 AND epoch = $2`, s.cfg.Name, s.epoch)
	return err
}

func (s *postgres) abandon() {
	if s.lease != nil {
		s.lease.Release()
		s.lease = nil
	}
}

func (s *postgres) read(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, s.lease, func(tx pgx.Tx) error { return do(ctx, tx) })
}

func (s *postgres) move(ctx context.Context, source string, partition int, from, to offset,
	do func(ctx context.Context, tx pgx.Tx) error) error {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.slots }()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	left := false
	defer func() {
		if !left {
			conn.Release()
		}
	}()
	mark := rand.Int64()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: s.begin(mark, source, partition, from, to),
		CommitQuery: commitQuery(mark)})
	if err != nil {
		return refusedMove(err)
	}
	if err := do(ctx, tx); err != nil {
		if h := hanging(err); h != nil {
			conn.leave(h)
			left = true
		} else {
			s.rollback(ctx, tx)
			if s.committed(ctx, conn, mark) {
				return fmt.Errorf("%w: %w", errEnded, err)
			}
		}
		return err
	}
	return s.commit(ctx, tx, partition, from, to)
}

func (s *postgres) shorten(ctx context.Context, tx pgx.Tx, source string, partition int,
	planned, to offset) error {
	tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_mark")+` SET seq = $4, due = $5::text::pg_lsn, n = $6,
		lsn = $7::text::pg_lsn, i = $8, holed = $9 WHERE name = $1 AND source = $2 AND partition = $3
		AND epoch = $10 AND seq = $11`,
		s.cfg.Name, source, partition, int64(to.Seq), to.Due.String(), int64(to.N), to.Pos.LSN.String(),
		int64(to.Pos.Index), to.Lost, s.epoch, int64(planned.Seq))
	if err == nil && tag.RowsAffected() != 1 { // such as with the search path or the role of the handler
		err = errors.New("the transaction does not see its own mark any more")
	}
	return err
}

// begin is the SQL that begins a transaction and moves the offset, in one round trip. If the stored offset is
// not the expected one, it divides by zero. The row stays locked until the transaction ends, so nobody else
// works on this partition. If this process is gone, the server notices that also during a statement. All
// values are numbers, or names that Config has checked.
func (s *postgres) begin(mark int64, source string, partition int, from, to offset) string {
	var b strings.Builder
	b.WriteString("BEGIN")
	if s.cfg.Isolation != "" {
		b.WriteString(" ISOLATION LEVEL " + string(s.cfg.Isolation))
	}
	fmt.Fprintf(&b, "; SET LOCAL idle_in_transaction_session_timeout = %d; SELECT pg_catalog.set_config("+
		"'statement_timeout', '%d', true) WHERE pg_catalog.current_setting('statement_timeout') = '0'; "+
		"%sSET LOCAL outflow.transaction = '%[4]d'; SET outflow.committed = '%[4]d'; "+
		"WITH moved AS (UPDATE %s SET "+
		"seq = %d, due = '%v', n = %d, lsn = '%v', i = %d, holed = %t, updated_at = now()"+
		" WHERE name = '%s' AND source = '%s' AND partition = %d AND epoch = %d AND seq = %d RETURNING 1) "+
		"SELECT 1 / pg_catalog.count(*) FROM moved",
		s.idle.Milliseconds(), s.idle.Milliseconds(), s.checks, mark,
		s.table("outflow_mark"), to.Seq, to.Due, to.N, to.Pos.LSN, to.Pos.Index,
		to.Lost, s.cfg.Name, source, partition, s.epoch, from.Seq)
	return b.String()
}

// commitQuery is the SQL that commits a transaction, in one round trip, if it is still the one that begin
// began: the setting ends with it. Otherwise it divides by zero.
func commitQuery(mark int64) string {
	return fmt.Sprintf("SELECT 1 / (coalesce(pg_catalog.current_setting('outflow.transaction', true), '') "+
		"= '%d')::pg_catalog.int4; COMMIT", mark)
}

// refusedMove returns what an error of begin means.
func refusedMove(err error) error {
	if sqlState(err) == "22012" {
		return errMoved
	}
	return err
}

// sqlState is the SQLSTATE of an error of any driver, if it has one.
func sqlState(err error) (code string) {
	defer func() { _ = recover() }() // a handler's error may wrap a nil pointer
	var e interface{ SQLState() string }
	if errors.As(err, &e) {
		code = e.SQLState()
	}
	return code
}

// commit commits even if the consumer is stopping: the transaction is complete. After any error but a refusal
// it may have been committed.
func (s *postgres) commit(ctx context.Context, tx pgx.Tx, partition int, from, to offset) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
	defer cancel()
	err := tx.Commit(ctx)
	var e *pgconn.PgError
	if errors.As(err, &e) && e.Code == "22012" && e.Where == "" { // not one of a deferred trigger
		return fault(ErrHandler, errEnded, hintEnded, "partition %d, sequences %d to %d: if it was "+
			"committed, all of them count as done, and those after the event in question are not",
			partition, from.Seq+1, to.Seq)
	}
	if err == nil || refused(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errUnknown, err)
}

// refused reports whether the server rolled back instead of committing, such as for a deferred constraint.
func refused(err error) bool {
	var e *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return true
	case errors.As(err, &e) && e != nil:
		return e.SeverityUnlocalized == "ERROR"
	}
	switch class(err) { // of another driver
	case "", "08", "53", "57", "58", "XX": // those may have cost the connection
		return false
	}
	return true
}

func (s *postgres) rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx) // a connection that can't is closed, which rolls back as well
}

// committed reports whether a transaction of ours that was to be rolled back was committed, which only its
// handler can have done: begin's second setting outlives a commit only. Without an answer it says no.
func (s *postgres) committed(ctx context.Context, conn connection, mark int64) (is bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := conn.QueryRow(ctx,
		"SELECT coalesce(pg_catalog.current_setting('outflow.committed', true), '') = $1",
		strconv.FormatInt(mark, 10)).Scan(&is)
	return err == nil && is
}
