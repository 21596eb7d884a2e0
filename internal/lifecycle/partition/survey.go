package partition

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Survey is how a partitioned outbox is, as far as everybody may see it.
type Survey struct {
	Ranges  bool      // it is partitioned by ranges of time, each of which ends
	Ahead   int       // so many partitions lie ahead, up to the first range without one
	Until   time.Time // where the last of these ends; zero: there is none
	Default bool      // a default partition takes what no other one does
	Hole    time.Time // until then rows of now are among that; zero: they are not, or no range comes behind
	Managed bool      // outflow partition has been run
	Blocked []Blocked // partitions, or the rows of a plain table, that wait for a slot, oldest first

	makes bool // outflow partition has made some of them
}

// Blocked is a fence that a slot has not confirmed.
type Blocked struct {
	Name  string
	Slot  string
	Fence outbox.LSN
	Since time.Time // when the fence was set
}

// Look makes a survey. others are slots that do not count.
func Look(ctx context.Context, q catalog.Querier, t catalog.Table, others []string) (s Survey, err error) {
	kept, err := catalog.Beside(ctx, q, t, catalog.PartitionStates)
	if err != nil {
		return s, err
	}
	for _, states := range kept {
		if !states.Readable {
			continue
		}
		if err := s.states(ctx, q, t, states, others); err != nil {
			return s, fmt.Errorf("read table %s: %w", states.Table, err)
		}
	}
	slices.SortStableFunc(s.Blocked, func(a, b Blocked) int { return a.Since.Compare(b.Since) })
	if err := s.ranges(ctx, q, t); err != nil {
		return s, fmt.Errorf("read the partitions of %s: %w", t.Quoted(), err)
	}
	return s, nil
}

// states reads which fences of a table of states slots have not confirmed.
func (s *Survey) states(ctx context.Context, q catalog.Querier, t catalog.Table, states catalog.Kept,
	others []string) error {
	var some, made bool
	err := q.QueryRow(ctx, `SELECT $3::boolean OR count(*) > 0, coalesce(bool_or(made AND state <> 'dropped'), false)
		FROM `+states.Table+` l WHERE `+catalog.OfRoot, t.OID, t.Quoted(), states.Own).Scan(&some, &made)
	if err != nil || !some {
		return err
	}
	s.Managed, s.makes = true, s.makes || made
	slots, err := ReadSlots(ctx, q, others)
	if err != nil {
		return err
	}
	rows, err := q.Query(ctx, `SELECT name, fence::text, sealed_at FROM `+states.Table+` l WHERE `+
		catalog.OfRoot+` AND state IN ('sealed', 'durable', 'archived', 'verified') AND fence IS NOT NULL
			AND sealed_at IS NOT NULL AND NOT starts_with(name, $3) ORDER BY sealed_at LIMIT 1000`, t.OID, t.Quoted(),
		baseline)
	if err != nil {
		return err
	}
	var name, text string
	var since time.Time
	_, err = pgx.ForEachRow(rows, []any{&name, &text, &since}, func() error {
		fence, err := outbox.ParseLSN(text)
		for _, slot := range slots {
			if slot.Confirmed < fence {
				s.Blocked = append(s.Blocked, Blocked{name, slot.Name, fence, since})
			}
		}
		return err
	})
	return err
}

func (s *Survey) ranges(ctx context.Context, q catalog.Querier, t catalog.Table) error {
	if !t.Partitioned {
		return nil
	}
	var now time.Time
	var key uint32
	err := q.QueryRow(ctx, `SELECT clock_timestamp(), coalesce((SELECT a.atttypid FROM pg_partitioned_table p
		JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum > 0 AND a.attnum = p.partattrs[0]
		WHERE p.partrelid = $1 AND p.partstrat = 'r' AND p.partnatts = 1), 0)`, t.OID).Scan(&now, &key)
	if err != nil || !slices.Contains(keyTypes, key) {
		return err
	}
	rows, err := q.Query(ctx, `SELECT coalesce(pg_get_expr(c.relpartbound, c.oid), '') FROM pg_inherits i
		JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = $1 AND NOT i.inhdetachpending`, t.OID)
	if err != nil {
		return err
	}
	bounds, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	s.Ranges = true
	var there []*Partition
	for _, bound := range bounds {
		p := &Partition{}
		if p.readBound(bound); p.Default {
			s.Default = true
			continue
		}
		if p.Odd != "" || p.Upper.IsZero() {
			s.Ranges = false
		}
		there = append(there, p)
		if p.Upper.After(s.Until) {
			s.Until = p.Upper
		}
	}
	end, endless, ahead := reach(there, key, now)
	if !s.makes { // whoever makes them may know the time zone of those who write, and make no more than that
		ahead = now
	}
	if s.Ranges && !s.Default && s.Until.After(end) {
		s.Until = end
	}
	for _, p := range there {
		if p.Lower.After(ahead) && p.Lower.Before(s.Until) {
			s.Ahead++
		}
		if p.Lower.After(now) && s.Default && end.Equal(now) && !endless &&
			(s.Hole.IsZero() || p.Lower.Before(s.Hole)) {
			s.Hole = p.Lower
		}
	}
	return nil
}

// Watched returns what reads a survey of the outbox of these settings for the watcher; nil: there is no
// table.
func Watched(cfg config.Config) func(context.Context, catalog.Querier) (watch.Partitions, error) {
	if !cfg.Source.Rows() {
		return nil
	}
	return func(ctx context.Context, q catalog.Querier) (p watch.Partitions, err error) {
		t, err := catalog.ReadTable(ctx, q, cfg.Table)
		if err != nil {
			return p, err
		}
		s, err := Look(ctx, q, t, cfg.Retain.OtherSlots)
		if err != nil {
			return p, err
		}
		p = watch.Partitions{Managed: s.Managed, Ranges: s.Ranges, Ahead: s.Ahead, Until: s.Until}
		for _, b := range s.Blocked { // oldest first
			if len(p.Blocked) < watch.MaxBlocked && !slices.ContainsFunc(p.Blocked,
				func(o watch.Blocked) bool { return o.Slot == b.Slot }) {
				p.Blocked = append(p.Blocked, watch.Blocked{Slot: b.Slot, Name: b.Name, Since: b.Since})
			}
		}
		return p, nil
	}
}
