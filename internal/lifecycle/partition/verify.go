package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// margin is how much earlier than a row was written its message may have been stored: clocks differ.
const margin = time.Hour

// periods are the times from which messages of rows are read that were written in one, one after the other
// while rows are missing: what lies near to it, what has come since, and all. Usually the first is enough,
// and the others may be months.
func periods(of Period) []Period {
	all := []Period{{}}
	if of.Since.IsZero() {
		if !of.Until.IsZero() {
			all = slices.Insert(all, 0, Period{Until: of.Until.Add(margin)})
		}
		return all
	}
	all = slices.Insert(all, 0, Period{Since: of.Since.Add(-margin)})
	if of.Until.IsZero() {
		return all
	}
	near := min(max(of.Until.Sub(of.Since)/8, 10*time.Second), margin)
	return slices.Insert(all, 0, Period{of.Since.Add(-near), of.Until.Add(near)})
}

// maxNamed is how many rows a refusal names.
const maxNamed = 10

// accepts reports whether a person has accepted that these rows are missing. They are only when everything
// was read.
func (m *Manager) accepts(gone missing, everything bool) bool {
	return gone.count > 0 && gone.count == m.o.AcceptUnpublished && everything
}

// verify compares a partition's rows with what is published, while nobody writes to it.
func (m *Manager) verify(ctx context.Context, s *situation, p *Partition, step Step) (Step, error) {
	switch {
	case m.published != nil && (m.cfg.ID == "" || m.published.has(p)):
	case m.cfg.ID == "" && !m.cfg.Archive:
		m.published = &published{seen: Seen{Stream: s.Stream}}
	case m.cfg.ID == "": // no object of it may be lost
		if err := m.load(ctx, periods(Period{}), inMemory); err != nil {
			return step, err
		}
	default:
		if err := m.loadNear(ctx, m.together(s, p)); err != nil {
			return step, err
		}
	}
	for {
		everything := len(m.published.left) == 0
		s.Stream = m.published.seen.Stream // the newest that is known of it
		instead, missing, err := m.compare(ctx, s.Facts, p, everything)
		switch {
		case postgres.SQLState(err) == postgres.StateLockNotAvailable:
			return m.held(ctx, p)
		case err != nil:
			return step, m.explain("verify partition "+p.Name, err)
		case instead.Action != "":
			return instead, nil
		case missing.count == 0 || m.accepts(missing, everything):
			m.o.Hit("partition.compared")
			step.again = p.came == Verified
			step.Rows, step.Unpublished = p.SealedSum.Rows, missing.ids
			step.Why = m.allIn(p)
			switch {
			case m.cfg.ID == "":
				step.Why = "there is no id column: only the fence shows it"
			case missing.count > 0:
				step.Why = fmt.Sprintf("%d of its %s %s never published, which is accepted",
					missing.count, units.Of(p.SealedSum.Rows, "row"),
					units.Agree(missing.count, "was", "were"))
			case missing.aged > 0:
				step.Why = fmt.Sprintf("%d of its %d rows are published; the others are older than the "+
					"stream's oldest message, and the fence shows that they "+
					"were", p.SealedSum.Rows-missing.aged,
					p.SealedSum.Rows)
			}
			return step, nil
		case !everything:
			if err := m.readMore(ctx, p); err != nil {
				if errors.Is(ctx.Err(), context.DeadlineExceeded) {
					m.tooLong(ctx, s, p, missing.count)
				}
				return step, err
			}
			continue
		}
		m.o.Pass.remember(p)
		return step, m.refuse("partition "+p.Name, missing)
	}
}

// tooLong notes that not all could be read within the time of a run for rows of a partition, so that the next
// runs have time for others. Where that fails, the next one tries it again.
func (m *Manager) tooLong(ctx context.Context, s *situation, p *Partition, rows int64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lockTimeout)
	defer cancel()
	p.refuse(rows, m.cfg.Slot)
	p.RefusedAt = s.Now.Add(time.Since(m.began))
	_ = m.note(ctx, m.conn, p)
	m.o.Pass.remember(p)
}

// together is how many rows partitions have at most whose ids are read together: with those of about their
// time they are kept in memory.
const together = maxInMemory / 4 * 3

// together are a partition, and those behind it that are compared next and lie right behind it: the messages
// are read once for all of them. Those that were refused need not, because everything is read for each.
func (m *Manager) together(s *situation, p *Partition) []*Partition {
	all, rows, until := []*Partition{p}, p.SealedSum.Rows, p.Upper
	for _, q := range s.all[slices.Index(s.all, p)+1:] {
		switch next := m.next(s, q).Action; {
		case next != Archive && next != Verify || (q.Refused > 0) != (p.Refused > 0):
			continue
		case q.Refused > 0 && s.Now.Before(m.again(q, 2)): // else it has rested for half of its time
			continue
		}
		rows += q.SealedSum.Rows
		apart := p.Refused == 0 && !until.IsZero() && q.Lower.After(until)
		if apart || rows > cmp.Or(m.cfg.together, together) {
			return all
		}
		all, until = append(all, q), q.Upper
	}
	return all
}

// loadNear reads the ids of the events of about the time of the rows of some partitions.
func (m *Manager) loadNear(ctx context.Context, of []*Partition) error {
	var all []Period
	for _, p := range of {
		n := len(all) - 1
		if n >= 0 && (all[n].Until.IsZero() || !p.Lower.After(all[n].Until)) {
			all[n] = all[n].with(p)
		} else {
			all = append(all, Period{p.Lower, p.Upper})
		}
	}
	for i, in := range all {
		if !in.Since.IsZero() {
			in.Since = in.Since.Add(-aheadOfUTC(m.root.KeyType))
		}
		if !in.Until.IsZero() {
			in.Until = in.Until.Add(behindUTC(m.root.KeyType))
		}
		read := func() error { return m.readIDs(ctx, periods(in)[0], m.whole) }
		if i == 0 {
			read = func() error { return m.load(ctx, periods(in), inMemory) }
		}
		if err := read(); err != nil {
			return err
		}
	}
	m.published.of = of
	return nil
}

// readMore reads the next period for the rows that p lacks, and those that the others lack beside it.
func (m *Manager) readMore(ctx context.Context, p *Partition) error {
	known := m.published
	if known.lacking == nil {
		of, lacking := known.of, newIDs()
		known.of = nil
		for _, q := range of {
			if q != p && q.State == Verified {
				continue
			}
			err := m.inTx(ctx, func(tx pgx.Tx) error {
				return m.unknownRows(ctx, tx, q, "false", func(r unknownRow) { lacking.add(r.id) })
			})
			switch {
			case err == nil:
				known.of = append(known.of, q)
			case q == p || lost(err): // of another one it is said when that is compared
				return err
			}
		}
		known.lacking = lacking
	}
	in := known.left[0]
	known.left = known.left[1:]
	return m.readIDs(ctx, in, known.lacking.mayHave)
}

// maxRest is how long a partition that was refused is not compared again at most.
const maxRest = 24 * time.Hour

// again is when a partition that was refused is compared again, or has rested for a part of the time until
// then; zero: with each run. Everything is read for it, the whole archive, so it is as long after as it was
// since it was sealed. Who publishes or accepts the rows does not wait: each run of a person compares it.
func (m *Manager) again(p *Partition, part time.Duration) (at time.Time) {
	if m.o.Turn > 0 && p.Refused > 0 {
		at = p.RefusedAt.Add(min(p.RefusedAt.Sub(p.Sealed).Abs(), maxRest) / part)
	}
	return at
}

// with is the period with a partition's range.
func (in Period) with(p *Partition) Period {
	if p.Lower.Before(in.Since) {
		in.Since = p.Lower
	}
	if p.Upper.IsZero() || !in.Until.IsZero() && p.Upper.After(in.Until) {
		in.Until = p.Upper
	}
	return in
}

// missing are rows whose ids no message has.
type missing struct {
	count  int64
	ids    []string
	hashes []string // of a plain table, of at most maxMissing ids
	aged   int64    // how many more are older than the oldest message, and seen to be published by the fence

	again   time.Time // when they are looked for again; zero: they were just now
	crowded time.Time // when the newest fence was set that has too many for them to be noted; zero: none has
}

// compare looks for rows that are not published, and if there are none, or as many as are accepted, notes
// that.
func (m *Manager) compare(ctx context.Context, f *Facts, p *Partition, everything bool) (instead Step,
	gone missing, err error) {
	err = m.retry(ctx, func() error {
		instead, gone = Step{}, missing{}
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if err := m.lock(ctx, tx, p, "SHARE"); err != nil {
				return err
			}
			found, err := m.sum(ctx, tx, p)
			if err != nil {
				return err
			}
			if found != p.SealedSum { // below which LSN the new rows were committed nobody knows
				p.written()
				instead = Step{Partition: p.Name, Action: Wait, Clause: "verified",
					Why: "it was written to after it was sealed, and is sealed again"}
				return m.note(ctx, tx, p)
			}
			if m.cfg.ID == "" && !shown(&m.cfg, f, p) {
				gone.count = found.Rows // the fence shows nothing of this stream, or its archive
			} else if m.cfg.ID != "" {
				if gone, err = m.unpublished(ctx, tx, f, p); err != nil {
					return err
				}
			}
			switch {
			case gone.count == 0 || m.accepts(gone, everything):
				p.State, p.Verified, p.Stream = Verified, &found, m.published.seen.Stream
				p.Accepted, p.Refused = gone.count, 0
				if m.cfg.ID != "" { // where nobody else reads the table, too: somebody may later
					if p.VerifiedBy == nil {
						p.VerifiedBy = map[string]verifying{}
					}
					p.VerifiedBy[m.cfg.Slot] = verifying{p.Stream, p.Fence}
				}
			case !everything: // more of the stream is read first
				return nil
			default:
				p.refuse(gone.count, m.cfg.Slot)
				if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&p.RefusedAt); err != nil {
					return err
				}
			}
			return m.note(ctx, tx, p)
		})
	})
	return instead, gone, err
}

// refuse takes it that rows were never published, whatever an earlier run has found.
func (p *Partition) refuse(rows int64, slot string) {
	p.Refused, p.RefusedBy, p.Verified = rows, slot, nil
	if p.State == Verified {
		p.State = Durable
	}
	delete(p.VerifiedBy, slot)
}

// unpublished looks for rows whose ids are in no message. Where retention has removed the oldest messages,
// rows that are older than what is left are not missed in a partition that Outflow made: all of its rows came
// by way of the WAL, and the fence shows that they were published, unless that is of a former stream.
func (m *Manager) unpublished(ctx context.Context, tx pgx.Tx, f *Facts, p *Partition) (gone missing,
	err error) {
	aged := "false"
	if seen := m.published.seen; p.Made && seen.Removed && !f.former(p, m.cfg.Slot, f.Stream.Created) {
		t, err := catalog.ReadTable(ctx, tx, p.Name)
		if err != nil {
			return gone, err
		}
		key, err := m.root.ColumnOf(t, m.root.Key)
		if err != nil {
			return gone, err
		}
		aged = key + " < " + catalog.PartitionBound(seen.Oldest.Add(aheadOfUTC(m.root.KeyType)))
		if seen.Oldest.IsZero() {
			aged = "true"
		}
	}
	var named []pgtype.TID
	err = m.unknownRows(ctx, tx, p, aged, func(r unknownRow) {
		switch {
		case r.aged:
			gone.aged++
			return
		case gone.count < maxNamed:
			named = append(named, r.at)
		}
		gone.count++
	})
	if err == nil && len(named) > 0 {
		err = tx.QueryRow(ctx, fmt.Sprintf("SELECT ARRAY(SELECT coalesce(%s::text, 'NULL') FROM ONLY %s "+
			"WHERE ctid = ANY ($1))", postgres.Quote(m.cfg.ID), p.Name), named).Scan(&gone.ids)
	}
	if err != nil {
		return gone, fmt.Errorf("look for rows of partition %s that are not published: %w", p.Name, err)
	}
	return gone, nil
}

// compared says which rows of a partition are compared, and by which column.
func (m *Manager) compared(ctx context.Context, q catalog.Querier, p *Partition) (id catalog.Column,
	which string, err error) {
	t, err := catalog.ReadTable(ctx, q, p.Name)
	if err != nil {
		return id, "", err
	}
	id, ok := t.Column(m.cfg.ID)
	if !ok {
		return id, "", postgres.Fatal(nil, "column_missing", "Set columns.id",
			"partition %s has no column %q", p.Name, m.cfg.ID)
	}
	if m.cfg.ShardBy != "" && m.cfg.Own != "" {
		if _, err := m.root.ColumnOf(t, m.cfg.ShardBy); err != nil {
			return id, "", err
		}
	}
	which = m.own()
	if p.DetachXmin != 0 && m.cfg.Own != "" { // rows that came late are in no stream, of whatever shard
		which = fmt.Sprintf("(%s OR %s >= %d)", which, written, p.DetachXmin)
	}
	return id, which, nil
}
