package consumer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/outflowhq/outflow/outbox"
)

// Postgres keeps the offsets in the database that the handler writes to, in the handler's transactions: each
// event takes effect exactly once.
//
// Instances share the partitions: each has the same number of them, or one more. One that comes, leaves or
// dies makes the others give or take.
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
	epoch int64      // of the session's claims
	share share      // what the session has claimed
}

func (p postgresOffsets) open(ctx context.Context, _ jetstream.JetStream, cfg *Config) (store, error) {
	most := p.pool.most()
	if most == 0 {
		most = maxPartitions + 2
	}
	s := &postgres{pool: p.pool, cfg: cfg, me: instanceName(), idle: cfg.Timeout + 5*time.Second}
	s.slots = make(chan struct{}, max(1, min(maxPartitions, most-2)))
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

// insert makes the offsets of all partitions in a source. Nobody has claimed them.
func (s *postgres) insert(ctx context.Context, tx pgx.Tx, source string, partitions int, at offset) error {
	_, err := tx.Exec(ctx, `INSERT INTO `+s.table("outflow_mark")+` (name, source, partition, epoch, seq, due, n,
		lsn, i) SELECT $1, $2, p, $3, $4, $5::text::pg_lsn, $6, $7::text::pg_lsn, $8
		FROM pg_catalog.generate_series(0, $9::int - 1) p`, s.cfg.Name, source, s.epoch, int64(at.Seq),
		at.Due.String(), int64(at.N), at.Pos.LSN.String(), int64(at.Pos.Index), partitions)
	return err
}

func scanOffsets(rows pgx.Rows, st *state) error {
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
			if st.Offsets[source] == nil {
				st.Offsets[source] = offsets{}
			}
			st.Offsets[source][partition] = m
			return errors.Join(err, also)
		})
	return err
}

// beginBounded is the SQL that begins a transaction in which the consumer's row is locked: an instance that
// freezes in it, or waits, must not keep the others from claiming.
func (s *postgres) beginBounded() string {
	most := min(max(s.cfg.Lease/4, 100*time.Millisecond), 5*time.Second)
	return fmt.Sprintf("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = %[1]d; "+
		"SET LOCAL idle_in_transaction_session_timeout = %[1]d; SELECT pg_catalog.set_config("+
		"'statement_timeout', '%[2]d', true) WHERE pg_catalog.current_setting('statement_timeout') = '0'",
		most.Milliseconds(), s.idle.Milliseconds())
}

// locked runs do in a transaction that holds the consumer's row.
func (s *postgres) locked(ctx context.Context, do func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, s.lease, pgx.TxOptions{BeginQuery: s.beginBounded()}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT FROM `+s.table("outflow_consumer")+` WHERE name = $1 FOR UPDATE`,
			s.cfg.Name); err != nil {
			return err
		}
		return do(tx)
	})
}

func (s *postgres) begin(ctx context.Context, l layout, filters []string, at offset,
	created time.Time) error {
	return s.locked(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `UPDATE `+s.table("outflow_consumer")+` SET keying = $2, partitions = $3,
			filters = $4, stream_created = $5, epoch = epoch + 1 WHERE name = $1 AND partitions = 0 RETURNING epoch`,
			s.cfg.Name, l.Keying, l.Partitions, filters, created).Scan(&s.epoch)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		return s.insert(ctx, tx, live, l.Partitions, at)
	})
}

func (s *postgres) beginReplay(ctx context.Context, created, was time.Time) error {
	marks := s.table("outflow_mark")
	return s.locked(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET replay_created = $2 WHERE name = $1
			AND replay_created IS DISTINCT FROM $2 AND coalesce(replay_created, $3) = $3`, s.cfg.Name, created, was)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM `+marks+` WHERE name = $1 AND source = 'replay'`,
			s.cfg.Name); err != nil {
			return err
		}
		// No claim has them yet: one may still be at an earlier replay, which counted from the beginning too.
		_, err = tx.Exec(ctx, `INSERT INTO `+marks+` (name, source, partition, owner, epoch, seq, due, n, lsn, i)
			SELECT name, 'replay', partition, owner, 0, 0, '0/0', 0, '0/0', 0 FROM `+marks+`
			WHERE name = $1 AND source = 'live'`, s.cfg.Name)
		return err
	})
}

func (s *postgres) endReplay(ctx context.Context, is func(context.Context) (bool, error)) error {
	return s.locked(ctx, func(tx pgx.Tx) error {
		marks := s.table("outflow_mark")
		rows, err := tx.Query(ctx, `SELECT partition FROM `+marks+` WHERE name = $1 AND source = 'replay'
			FOR UPDATE SKIP LOCKED`, s.cfg.Name)
		if err != nil {
			return err
		}
		locked, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil {
			return err
		}
		if all, err := s.all(ctx, tx, len(locked), replay); err != nil || !all {
			return err // one that is moving now would go on, and be made anew behind that
		}
		if ended, err := is(ctx); err != nil || !ended {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM `+marks+` WHERE name = $1 AND source = 'replay'`,
			s.cfg.Name); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET replay_created = NULL WHERE name = $1`,
			s.cfg.Name)
		return err
	})
}

// all reports whether the consumer has so many offsets in those sources: no transaction has locked another.
func (s *postgres) all(ctx context.Context, tx pgx.Tx, locked int, sources ...string) (is bool, err error) {
	err = tx.QueryRow(ctx, `SELECT pg_catalog.count(*) = $2::bigint FROM `+s.table("outflow_mark")+`
		WHERE name = $1 AND source = ANY ($3)`, s.cfg.Name, locked, sources).Scan(&is)
	return is, err
}

func (s *postgres) want(ctx context.Context, l layout, barrier uint64) error {
	_, err := s.lease.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET wanted_keying = $2,
		wanted_partitions = $3, barrier = greatest(barrier, $4) WHERE name = $1`, s.cfg.Name, l.Keying,
		l.Partitions, int64(barrier))
	return err
}

func (s *postgres) save(ctx context.Context, st *state) error {
	return s.locked(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET stream_created = $2, filters = $3
			WHERE name = $1`, s.cfg.Name, st.Created[live], st.Filters); err != nil {
			return err
		}
		for p, m := range st.Offsets[live] {
			if !m.Lost {
				continue
			}
			tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_mark")+` SET holed = true WHERE name = $1
				AND source = 'live' AND partition = $2 AND epoch = $3`, s.cfg.Name, p, s.epoch)
			if err == nil && tag.RowsAffected() != 1 {
				err = errMoved
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *postgres) due(ctx context.Context) (bool, error) {
	g, err := s.readGroup(ctx, s.lease)
	if err != nil {
		return false, err
	}
	if g.layout != s.share.layout || g.barrier != s.share.barrier {
		return true, nil
	}
	if slices.ContainsFunc(s.share.claimed, func(p int) bool { return g.owners[p] != s.me }) {
		return true, nil // `outflow consumer rewind` has taken it, to set it back
	}
	locked := func(p int) bool { return s.share.locked[p] && time.Now().Before(s.share.until) }
	avoid := s.share.avoid(g.layout)
	giveUp := slices.DeleteFunc(g.toGiveUp(s.me, avoid), locked)
	wanted, surplus := g.share(s.me, avoid, slices.DeleteFunc(g.toTake(avoid), locked))
	more := slices.ContainsFunc(wanted, func(p int) bool {
		return !slices.Contains(s.share.claimed, p) && !locked(p)
	})
	return more || len(giveUp)+len(surplus) > 0 || g.leaves(avoid, wanted), nil
}

func (s *postgres) dueEvery() time.Duration { return min(250*time.Millisecond, s.cfg.Lease/4) }

func (s *postgres) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Lease)
	defer cancel()
	tag, err := s.lease.Exec(ctx, `UPDATE `+s.table("outflow_member")+
		` SET expires = clock_timestamp() + $3::interval WHERE name = $1 AND instance = $2`,
		s.cfg.Name, s.me, s.cfg.Lease)
	if err == nil && tag.RowsAffected() != 1 {
		err = errMoved
	}
	return err
}

// release leaves the group: what somebody has claimed who is no member is free.
func (s *postgres) release(ctx context.Context) error {
	defer s.abandon()
	leave := `DELETE FROM ` + s.table("outflow_member") + ` WHERE name = $1 AND instance = $2`
	if s.lease != nil {
		if _, err := s.lease.Exec(ctx, leave, s.cfg.Name, s.me); err == nil {
			return nil
		}
		s.abandon() // a session that was dropped in the middle of a query has closed its connection
	}
	_, err := s.pool.Exec(ctx, leave, s.cfg.Name, s.me)
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

func (s *postgres) load(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return do(ctx, tx) })
}
