package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

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
	anew    map[int]bool   // those that no other instance has claimed since the consumer began
}

// firstEpoch is that of the offsets of a consumer that begins: each claim has a later one.
const firstEpoch = 1

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
	g := &group{owners: map[int]string{}, givenUp: map[int]bool{}, anew: map[int]bool{}}
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
	rows, err = db.Query(ctx, `SELECT partition, coalesce(owner, ''), epoch FROM `+s.table("outflow_mark")+
		` WHERE name = $1 AND source = 'live'`, s.cfg.Name)
	if err != nil {
		return nil, err
	}
	var partition int
	var owner string
	var epoch int64
	_, err = pgx.ForEachRow(rows, []any{&partition, &owner, &epoch}, func() error {
		g.set(partition, owner)
		g.anew[partition] = epoch == firstEpoch || owner == s.me
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
	bounded := pgx.TxOptions{BeginQuery: s.beginBounded()}
	err = pgx.BeginTxFunc(ctx, conn, bounded, func(tx pgx.Tx) (err error) {
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
	st.Anew = !slices.ContainsFunc(claimed, func(p int) bool { return !g.anew[p] })
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
	var furthest int64
	if err := tx.QueryRow(ctx, `SELECT coalesce(pg_catalog.max(seq), 0) FROM `+marks+` WHERE name = $1
		AND source = 'replay'`, s.cfg.Name).Scan(&furthest); err != nil {
		return nil, err
	}
	st.Furthest = uint64(furthest)
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
	// With all offsets of a replay locked it looks as if there were none.
	free, err := s.all(ctx, tx, len(all.Offsets[live])+len(all.Offsets[replay]), live, replay)
	if err != nil || !free {
		return false, err
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
