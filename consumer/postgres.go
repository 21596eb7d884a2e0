package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
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

// share is what an instance has, and what it had to know to decide that.
type share struct {
	layout  layout
	barrier uint64
	avoid   avoids
	claimed []int
	locked  map[int]bool // partitions whose rows a transaction of an earlier claim has locked
	until   time.Time    // for how long those are left alone
}

// group is the consumer's members and partitions, as one query sees them.
type group struct {
	layout  layout
	wanted  *layout
	barrier uint64
	members []string       // this one and those that have not expired, as they joined
	owners  map[int]string // by partition; "" if nobody has it, or its owner is no member
	givenUp map[int]bool   // of those that nobody has, the ones that are marked as given up
}

// givenUpBy begins the owner of a partition that an instance, whose name follows, must not claim because a
// call of its handler hangs there. Nobody has it. An instance that may claim it takes it also if its share is
// full, and gives another one back in exchange.
const givenUpBy = "hung:"

// quota is how many partitions an instance is to have: those that joined first have what is left over. What
// nobody has and it avoids is not counted: if another one may claim that, it will, and then it counts again.
func (g *group) quota(me string, avoid map[int]bool) int {
	at, n, all := slices.Index(g.members, me), len(g.members), 0
	if at < 0 {
		return 0
	}
	for p, owner := range g.owners {
		if owner != "" || !avoid[p] {
			all++
		}
	}
	quota := all / n
	if at < all%n {
		quota++
	}
	return quota
}

// leaves reports whether an instance has to leave the group because calls of its handler hang: if it avoids
// several partitions, as what others give back in exchange may be one of them; or if it has none, while
// others wait for a share.
func (g *group) leaves(avoid map[int]bool, wanted []int) bool {
	return len(avoid) > 1 && len(g.members) > 1 ||
		len(avoid) > 0 && len(wanted) == 0 && len(g.members) > len(g.owners)
}

// toGiveUp returns the partitions that an instance has to mark as given up.
func (g *group) toGiveUp(me string, avoid map[int]bool) (all []int) {
	for p := range avoid {
		if owner := g.owners[p]; owner == me || owner == "" && !g.givenUp[p] {
			all = append(all, p)
		}
	}
	return all
}

// toTake returns the partitions that were given up and that an instance may claim.
func (g *group) toTake(avoid map[int]bool) (all []int) {
	for p, givenUp := range g.givenUp {
		if givenUp && !avoid[p] {
			all = append(all, p)
		}
	}
	slices.Sort(all)
	return all
}

// share returns what an instance wants to have: partitions that were given up, then its own, then free ones.
// The surplus is what it has beyond that.
func (g *group) share(me string, avoid map[int]bool, take []int) (wanted, surplus []int) {
	quota := g.quota(me, avoid)
	wanted = slices.Clone(take[:min(len(take), quota)])
	var free []int
	for _, p := range slices.Sorted(maps.Keys(g.owners)) {
		switch owner := g.owners[p]; {
		case avoid[p] || g.givenUp[p]:
		case owner == me && len(wanted) < quota:
			wanted = append(wanted, p)
		case owner == me:
			surplus = append(surplus, p)
		case owner == "":
			free = append(free, p)
		}
	}
	return append(wanted, free[:min(len(free), quota-len(wanted))]...), surplus
}

func (s *postgres) readGroup(ctx context.Context, db DB) (*group, error) {
	g := &group{owners: map[int]string{}, givenUp: map[int]bool{}}
	var keying *string
	var partitions *int
	var barrier *int64
	err := db.QueryRow(ctx, `SELECT keying, partitions, wanted_keying, wanted_partitions, barrier FROM `+
		s.table("outflow_consumer")+` WHERE name = $1`, s.cfg.Name).Scan(&g.layout.Keying, &g.layout.Partitions,
		&keying, &partitions, &barrier)
	if err != nil {
		return nil, err
	}
	if barrier != nil && keying != nil && partitions != nil {
		g.wanted, g.barrier = &layout{Keying: *keying, Partitions: *partitions}, uint64(*barrier)
	}
	rows, err := db.Query(ctx, `SELECT instance FROM `+s.table("outflow_member")+` WHERE name = $1
		AND (expires > clock_timestamp() OR instance = $2) ORDER BY joined, instance`, s.cfg.Name, s.me)
	if err != nil {
		return nil, err
	}
	if g.members, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, err
	}
	rows, err = db.Query(ctx, `SELECT partition, coalesce(owner, '') FROM `+s.table("outflow_mark")+
		` WHERE name = $1 AND source = 'live'`, s.cfg.Name)
	if err != nil {
		return nil, err
	}
	var partition int
	var owner string
	_, err = pgx.ForEachRow(rows, []any{&partition, &owner}, func() error {
		g.set(partition, owner)
		return nil
	})
	return g, err
}

// set sets who has a partition, from its row.
func (g *group) set(partition int, owner string) {
	if g.givenUp[partition] = strings.HasPrefix(owner, givenUpBy); !slices.Contains(g.members, owner) {
		owner = ""
	}
	g.owners[partition] = owner
}

// acquire claims partitions: it writes this instance and a new epoch into their rows. A row that an open
// transaction of an earlier claim has locked is left alone until that has ended, and after the claim none can
// begin. So the offsets that it returns are final.
func (s *postgres) acquire(ctx context.Context, avoid avoids) (*state, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	st := &state{Created: map[string]time.Time{}, Offsets: map[string]offsets{}}
	var held *heldError
	// An instance that freezes meanwhile, or waits, must not keep the others from claiming.
	most := min(max(s.cfg.Lease/4, 100*time.Millisecond), 5*time.Second)
	frozen := fmt.Sprintf("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = %[1]d; "+
		"SET LOCAL idle_in_transaction_session_timeout = %[1]d", most.Milliseconds())
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{BeginQuery: frozen}, func(tx pgx.Tx) (err error) {
		held, err = s.acquireIn(ctx, tx, st, avoid)
		return err
	})
	if err == nil && held != nil {
		err = held
	}
	if err != nil {
		conn.Release()
		return nil, err
	}
	s.lease = conn
	return st, nil
}

func (s *postgres) acquireIn(ctx context.Context, tx pgx.Tx, st *state, avoids avoids) (*heldError,
	error) {
	consumers, marks := s.table("outflow_consumer"), s.table("outflow_mark")
	members := s.table("outflow_member")
	if s.share.layout.Partitions == 0 {
		if _, err := tx.Exec(ctx, `INSERT INTO `+consumers+` (name, stream, filters, keying, partitions)
			VALUES ($1, $2, $3, '', 0) ON CONFLICT (name) DO NOTHING`,
			s.cfg.Name, s.cfg.Stream, s.cfg.Filters); err != nil {
			return nil, err
		}
	}
	var stream string
	var created, replayed *time.Time
	var replayedTo int64
	err := tx.QueryRow(ctx, `SELECT stream, stream_created, replay_created, filters, replayed_to FROM `+
		consumers+` WHERE name = $1 FOR UPDATE`, s.cfg.Name).
		Scan(&stream, &created, &replayed, &st.Filters, &replayedTo)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, deleted(s.cfg)
	}
	if err != nil {
		return nil, err
	}
	if stream != s.cfg.Stream {
		return nil, fault(ErrStream, nil, "Give the new consumer another name: marks belong to a stream",
			"consumer %s reads stream %s, not %s", s.cfg.Name, stream, s.cfg.Stream)
	}
	if _, err := tx.Exec(ctx, `DELETE FROM `+members+` WHERE name = $1 AND instance <> $2
		AND expires < clock_timestamp()`, s.cfg.Name, s.me); err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO `+members+` VALUES ($1, $2, clock_timestamp(),
		clock_timestamp() + $3::interval) ON CONFLICT (name, instance) DO UPDATE SET expires = excluded.expires`,
		s.cfg.Name, s.me, s.cfg.Lease); err != nil {
		return nil, err
	}
	g, err := s.readGroup(ctx, tx)
	if err != nil {
		return nil, err
	}
	if len(g.owners) != g.layout.Partitions {
		return nil, fault(ErrStream, nil, "Somebody changed the table: put it back, or delete the consumer "+
			"to begin anew (`outflow consumer delete`)", "outflow_mark has the marks of %d partitions of "+
			"consumer %s, not of %d", len(g.owners), s.cfg.Name, g.layout.Partitions)
	}
	if g.wanted != nil {
		switched, err := s.switchLayout(ctx, tx, g)
		if err != nil {
			return nil, err
		}
		if switched {
			if g, err = s.readGroup(ctx, tx); err != nil {
				return nil, err
			}
		}
	}
	if g.layout.Partitions == 0 && s.share.layout.Partitions > 0 { // another instance is making it anew
		return nil, deleted(s.cfg)
	}
	st.Layout, st.Wanted, st.Barrier, st.ReplayedTo = g.layout, g.wanted, g.barrier, uint64(replayedTo)
	for source, at := range map[string]*time.Time{live: created, replay: replayed} {
		if at != nil {
			st.Created[source] = at.UTC()
		}
	}
	s.share = share{layout: g.layout, barrier: g.barrier, avoid: avoids, locked: map[int]bool{},
		until: time.Now().Add(time.Second)}
	if g.layout.Partitions == 0 {
		return nil, nil
	}
	leave := func() error {
		_, err := tx.Exec(ctx, `DELETE FROM `+members+` WHERE name = $1 AND instance = $2`, s.cfg.Name, s.me)
		return err
	}
	if !s.cfg.worksWith(g.layout.Keying) {
		return nil, leave()
	}
	avoid := avoids(g.layout)
	if err := s.giveUp(ctx, tx, g, avoid); err != nil {
		return nil, err
	}
	take, err := s.lock(ctx, tx, g.toTake(avoid))
	if err != nil {
		return nil, err
	}
	wanted, surplus := g.share(s.me, avoid, take)
	if g.leaves(avoid, wanted) {
		return &heldError{why: "handlers hang, and other instances have all partitions"}, leave()
	}
	if len(surplus) > 0 {
		if _, err := tx.Exec(ctx, `UPDATE `+marks+` SET owner = NULL WHERE name = $1 AND source = 'live'
			AND partition = ANY ($2)`, s.cfg.Name, surplus); err != nil {
			return nil, err
		}
	}
	claimed, err := s.lock(ctx, tx, wanted)
	if err != nil {
		return nil, err
	}
	s.share.claimed = claimed
	switch {
	case len(claimed) > 0:
	case len(wanted) > 0:
		return &heldError{why: "transactions of instances that are gone are still open"}, nil
	case len(avoid) > 0:
		return &heldError{why: "a handler hangs, and there is no other partition for this instance"}, nil
	default:
		return &heldError{why: fmt.Sprintf("%d other instances have all %d partitions", len(g.members)-1,
			g.layout.Partitions)}, nil
	}
	err = tx.QueryRow(ctx, `UPDATE `+consumers+` SET epoch = epoch + 1 WHERE name = $1 RETURNING epoch`,
		s.cfg.Name).Scan(&s.epoch)
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `UPDATE `+marks+` SET epoch = $2, owner = $4 WHERE name = $1
		AND partition = ANY ($3) RETURNING source, partition, seq, due::text, n, lsn::text, i, holed`,
		s.cfg.Name, s.epoch, claimed, s.me)
	if err != nil {
		return nil, err
	}
	return nil, scanOffsets(rows, st)
}

// giveUp marks the partitions that this instance must not claim, so that others take them. A row that the
// transaction of its handler still has locked is left alone for now.
func (s *postgres) giveUp(ctx context.Context, tx pgx.Tx, g *group, avoid map[int]bool) error {
	open, err := s.lock(ctx, tx, g.toGiveUp(s.me, avoid))
	if err != nil || len(open) == 0 {
		return err
	}
	_, err = tx.Exec(ctx, `UPDATE `+s.table("outflow_mark")+` SET owner = $2 WHERE name = $1 AND source = 'live'
		AND partition = ANY ($3)`, s.cfg.Name, givenUpBy+s.me, open)
	for _, p := range open {
		g.set(p, givenUpBy+s.me)
	}
	return err
}

// lock locks the rows of partitions, also those of a replay, and returns which, ascending: without those of
// which another transaction has locked one.
func (s *postgres) lock(ctx context.Context, tx pgx.Tx, partitions []int) ([]int, error) {
	if len(partitions) == 0 {
		return nil, nil
	}
	marks := s.table("outflow_mark")
	rows, err := tx.Query(ctx, `SELECT m.partition, (SELECT pg_catalog.count(*)::int FROM `+marks+` a
			WHERE a.name = m.name AND a.partition = m.partition) FROM `+marks+` m WHERE m.name = $1
		AND m.partition = ANY ($2) ORDER BY m.partition FOR UPDATE OF m SKIP LOCKED`, s.cfg.Name, partitions)
	if err != nil {
		return nil, err
	}
	var locked []int
	var partition, all int
	open := map[int]int{}
	_, err = pgx.ForEachRow(rows, []any{&partition, &all}, func() error {
		if open[partition]++; open[partition] == all {
			locked = append(locked, partition)
		}
		return nil
	})
	for _, p := range partitions {
		s.share.locked[p] = !slices.Contains(locked, p)
	}
	return locked, err
}

// switchLayout makes the wanted layout the layout, if all offsets are at the barrier. A transaction that had
// begun before somebody wanted it may have moved an offset beyond the barrier: that becomes the barrier.
func (s *postgres) switchLayout(ctx context.Context, tx pgx.Tx, g *group) (bool, error) {
	marks, consumers := s.table("outflow_mark"), s.table("outflow_consumer")
	rows, err := tx.Query(ctx, `SELECT source, partition, seq, due::text, n, lsn::text, i, holed FROM `+marks+
		` WHERE name = $1 FOR UPDATE SKIP LOCKED`, s.cfg.Name)
	if err != nil {
		return false, err
	}
	all := &state{Offsets: map[string]offsets{}}
	if err := scanOffsets(rows, all); err != nil {
		return false, err
	}
	at := newest(all.Offsets[live].list())
	if at.Seq > g.barrier {
		_, err := tx.Exec(ctx, `UPDATE `+consumers+` SET barrier = $2 WHERE name = $1`, s.cfg.Name, int64(at.Seq))
		g.barrier = at.Seq
		return false, err
	}
	if !switchable(all, g.layout, g.barrier) {
		return false, nil
	}
	if err := tx.QueryRow(ctx, `UPDATE `+consumers+` SET epoch = epoch + 1, keying = wanted_keying,
		partitions = wanted_partitions, wanted_keying = NULL, wanted_partitions = NULL, barrier = NULL
		WHERE name = $1 RETURNING epoch`, s.cfg.Name).Scan(&s.epoch); err != nil {
		return false, err
	}
	if _, err := tx.Exec(ctx, `DELETE FROM `+marks+` WHERE name = $1`, s.cfg.Name); err != nil {
		return false, err
	}
	for source, old := range all.Offsets {
		if err := s.insert(ctx, tx, source, g.wanted.Partitions, newest(old.list())); err != nil {
			return false, err
		}
	}
	s.cfg.Log.Info("another layout", "partitions", g.wanted.Partitions, "before", g.layout.Partitions,
		"keying", g.wanted.Keying, "at", g.barrier)
	return true, nil
}

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

// locked runs do in a transaction that holds the consumer's row.
func (s *postgres) locked(ctx context.Context, do func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, s.lease, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
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

func (s *postgres) beginReplay(ctx context.Context, created time.Time) error {
	marks := s.table("outflow_mark")
	return s.locked(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET replay_created = $2 WHERE name = $1
			AND replay_created IS DISTINCT FROM $2`, s.cfg.Name, created)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM `+marks+` WHERE name = $1 AND source = 'replay'`,
			s.cfg.Name); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO `+marks+` (name, source, partition, owner, epoch, seq, due, n, lsn, i)
			SELECT name, 'replay', partition, owner, epoch, 0, '0/0', 0, '0/0', 0 FROM `+marks+`
			WHERE name = $1 AND source = 'live'`, s.cfg.Name)
		return err
	})
}

func (s *postgres) endReplay(ctx context.Context) error {
	return s.locked(ctx, func(tx pgx.Tx) error {
		marks := s.table("outflow_mark")
		if _, err := tx.Exec(ctx, `DELETE FROM `+marks+` WHERE name = $1 AND source = 'replay' AND partition IN (
			SELECT partition FROM `+marks+` WHERE name = $1 AND source = 'replay' FOR UPDATE SKIP LOCKED)`,
			s.cfg.Name); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE `+s.table("outflow_consumer")+` SET replay_created = NULL WHERE name = $1`,
			s.cfg.Name)
		return err
	})
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
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: s.beginQuery(mark, source, partition, from, to),
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

// beginQuery is the SQL that begins a transaction and moves the offset, in one round trip. If the stored
// offset is not the expected one, it divides by zero. The row stays locked until the transaction ends, so
// nobody else works on this partition. If this process is gone, the server notices that also during a
// statement. All values are numbers, or names that Config has checked.
func (s *postgres) beginQuery(mark int64, source string, partition int, from, to offset) string {
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
