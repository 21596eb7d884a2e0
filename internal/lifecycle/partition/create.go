package partition

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// defaultEvery is what a partition spans where there is none to go by.
const defaultEvery = 24 * time.Hour

// missing returns the partitions that have to be made, so that the number that is asked for lies ahead.
func (m *Manager) missing(s *situation) ([]*Partition, error) {
	if s.partman.manages {
		return nil, nil
	}
	there := s.ranges()
	var newest *Partition
	for _, p := range there {
		if !p.Upper.IsZero() && (newest == nil || p.Upper.After(newest.Upper)) {
			newest = p
		}
	}
	now := s.Now.UTC()
	at, endless, ahead := reach(there, m.root.KeyType, now)
	every := m.cfg.Every
	if every == 0 {
		every = span(there, at)
	}
	if m.root.KeyType == pgtype.DateOID && every%(24*time.Hour) != 0 {
		return nil, postgres.Fatal(nil, codeKey, "Set retain.table.every to whole days",
			"partitions of %v can't be made of column %s, which holds days", every, m.root.Key)
	}
	switch {
	case newest != nil && s.byDefault() != nil: // it takes the rows of ranges that are missing before that
		if at = newest.Upper; at.Before(now) {
			at = at.Add(now.Sub(at).Truncate(every))
		}
		at, endless = covered(there, at)
	case at.Equal(now) && !endless: // none takes the rows of now
		from := now.Add(-behindUTC(m.root.KeyType))
		at = from.Truncate(every)
		for _, p := range there { // oldest first
			if !p.Upper.IsZero() && !p.Upper.After(now) {
				at = p.Upper.Add(max(from.Sub(p.Upper), 0).Truncate(every))
			}
		}
	}
	var all []*Partition
	until := ahead.Add(time.Duration(m.cfg.Ahead) * every)
	for !endless && at.Before(until) {
		upper := at.Add(every)
		for _, p := range there {
			if p.Lower.After(at) && p.Lower.Before(upper) {
				upper = p.Lower
			}
		}
		all = append(all, &Partition{Name: quoted(m.root.Schema, catalog.PartitionName(m.root.Name, at,
			every)), Lower: at, Upper: upper, Made: true, State: Ahead, System: s.System})
		at, endless = covered(there, upper)
	}
	return all, nil
}

// span is how long the newest range is that ends by a time, else the newest of all: one that lies far ahead
// may have another length, as one that is to take all that the others don't.
func span(there []*Partition, at time.Time) time.Duration {
	every, found := defaultEvery, false
	for _, p := range there { // oldest first
		if ends := !p.Upper.After(at); (ends || !found) && !p.Lower.IsZero() && !p.Upper.IsZero() {
			every, found = p.Upper.Sub(p.Lower), ends
		}
	}
	return every
}

// reach is where ranges end that follow one another from now on, and from when on ranges lie ahead: nobody
// writes rows of that time yet, in whatever time zone.
func reach(there []*Partition, key uint32, now time.Time) (end time.Time, endless bool, ahead time.Time) {
	end, endless = covered(there, now)
	return end, endless, now.Add(aheadOfUTC(key))
}

// covered is where ranges end that follow one another without a gap from a time on; that time, if none takes
// its rows. endless: they have no end.
func covered(there []*Partition, at time.Time) (end time.Time, endless bool) {
	for found := true; found; {
		found = false
		for _, p := range there {
			switch {
			case p.Lower.After(at):
			case p.Upper.IsZero():
				return at, true
			case p.Upper.After(at):
				at, found = p.Upper, true
			}
		}
	}
	return at, false
}

func (p *Partition) create() Step {
	return Step{Partition: p.Name, Action: Create, Why: fmt.Sprintf("for %s to %s", stamp(p.Lower),
		stamp(p.Upper))}
}

// looked is how long ATTACH may look through the default partition under a lock for which all wait whose rows
// go to it. They wait as long for the lock at most.
const looked = time.Second

// inRest reports whether rows of now may go to the default partition.
func (m *Manager) inRest(s *situation) bool {
	end, endless := covered(s.ranges(), s.Now.Add(-behindUTC(m.root.KeyType)))
	return s.byDefault() != nil && !endless && !end.After(s.Now.Add(aheadOfUTC(m.root.KeyType)))
}

// vacant fails where the default partition has rows of a range. ATTACH would fail as well, but under its
// lock. Where writers would wait for that, the default partition is read as ATTACH will read it, and in that
// time: what takes longer is not tried. Policies may bind the owner as well; those of the outbox do not count
// where the partition is read by its own name, for which the owner needs rights of its own.
func (m *Manager) vacant(ctx context.Context, s *situation, p *Partition) error {
	rest := s.byDefault()
	if rest == nil {
		return nil
	}
	limits := fmt.Sprintf("SET LOCAL constraint_exclusion = on; SET LOCAL lock_timeout = %d",
		cmp.Or(m.cfg.LockTimeout, lockTimeout).Milliseconds())
	if m.inRest(s) {
		limits += fmt.Sprintf("; SET LOCAL statement_timeout = %d; SET LOCAL enable_indexscan = off; "+
			"SET LOCAL enable_indexonlyscan = off; SET LOCAL enable_bitmapscan = off",
			cmp.Or(m.cfg.looked, looked).Milliseconds())
	}
	key, found, err := postgres.Quote(m.root.Key), false, error(nil)
	for _, by := range []string{m.root.Quoted(), rest.Name} {
		err = m.inTx(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, limits); err != nil {
				return err
			}
			return tx.QueryRow(ctx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s WHERE %s >= %s AND %s < %s)",
				by, key, catalog.PartitionBound(p.Lower), key, catalog.PartitionBound(p.Upper))).Scan(&found)
		})
		if postgres.SQLState(err) != postgres.StateInsufficientPrivilege {
			break
		}
	}
	switch {
	case postgres.SQLState(err) == postgres.StateQueryCanceled:
		return postgres.Fatal(err, codeRestLarge, "", "rows of now may go to the default partition %s, and "+
			"to look through it takes longer than %v, for which their writers would wait: no partition from "+
			"%s to %s is made", rest.Name, cmp.Or(m.cfg.looked, looked), stamp(p.Lower), stamp(p.Upper))
	case postgres.SQLState(err) == postgres.StateInsufficientPrivilege:
		return nil // ATTACH needs no such right, and asks for no policy
	case err != nil:
		return m.explain("read the default partition", err)
	case found:
		return inDefault(nil, rest, p)
	}
	return nil
}

func inDefault(err error, rest, p *Partition) error {
	return postgres.Fatal(err, codeRest, "", "the default partition %s has rows from %s to %s, so that no "+
		"other partition can take that range: they go there, and stay", rest.Name, stamp(p.Lower),
		stamp(p.Upper))
}

// create makes a partition and attaches it, in one transaction: LIKE and then ATTACH, because PARTITION OF
// would lock out the writers. It is empty, so there is nothing to check but the default partition.
func (m *Manager) create(ctx context.Context, s *situation, p *Partition) error {
	if err := m.vacant(ctx, s, p); err != nil {
		return err
	}
	err := m.inTx(ctx, func(tx pgx.Tx) error {
		readers, err := m.readers(ctx, tx)
		if err != nil {
			return err
		}
		statements := []string{
			"CREATE TABLE " + p.Name + " (LIKE " + m.root.Quoted() + " INCLUDING ALL EXCLUDING IDENTITY)",
			"ALTER TABLE " + p.Name + " OWNER TO " + postgres.Quote(m.root.Owner),
		}
		for _, role := range readers { // who reads the outbox reads it when it is detached, too
			statements = append(statements, "GRANT SELECT ON "+p.Name+" TO "+role)
		}
		if m.inRest(s) {
			look := cmp.Or(m.cfg.looked, looked)
			statements = append(statements, fmt.Sprintf("SET LOCAL lock_timeout = %d; SET LOCAL "+
				"statement_timeout = %d", min(cmp.Or(m.cfg.LockTimeout, lockTimeout), look).Milliseconds(),
				2*look.Milliseconds()))
		}
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, "SELECT $1::regclass::oid", p.Name).Scan(&p.OID); err != nil {
			return err
		}
		m.o.Hit("partition.made")
		_, err = tx.Exec(ctx, fmt.Sprintf("ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)",
			m.root.Quoted(), p.Name, catalog.PartitionBound(p.Lower), catalog.PartitionBound(p.Upper)))
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, "SELECT xmin::text::bigint FROM pg_inherits WHERE inhrelid = $1", p.OID).
			Scan(&p.AttachXID)
		if err != nil {
			return err
		}
		return m.note(ctx, tx, p)
	})
	switch rest, state := s.byDefault(), postgres.SQLState(err); {
	case state == stateDuplicateTable:
		return postgres.Fatal(err, codeTaken, "Give it another name, by which nobody loses it: ALTER TABLE "+
			p.Name+" RENAME TO …. If it is a partition of an outbox that was renamed, detached or not, "+
			"Outflow finds it under any name", "a table %s exists, and is no partition of %s", p.Name,
			m.root.Quoted())
	case state == stateOverlap:
		return postgres.Fatal(err, codeTaken, "Detach it, or wait until its range is over",
			"another partition has a part of the range from %s to %s", stamp(p.Lower), stamp(p.Upper))
	case state == stateCheckViolation && rest != nil: // by rows that came since
		return inDefault(err, rest, p)
	case err != nil:
		return m.explain("make partition "+p.Name, err)
	}
	m.o.Hit("partition.attached")
	return nil
}

const (
	stateDuplicateTable = "42P07"
	stateOverlap        = "42P17"
	stateCheckViolation = "23514"
	stateDeadlock       = "40P01"
	stateNoTable        = "42P01"
	stateUnique         = "23505"
)

// readers are the roles that may read all of the outbox, quoted. A partition that is read by its own name
// does not go by the outbox's policies, so where there may be some, only roles that they don't bind count.
func (m *Manager) readers(ctx context.Context, tx pgx.Tx) ([]string, error) {
	rows, err := tx.Query(ctx, `SELECT CASE WHEN a.grantee = 0 THEN 'PUBLIC'
			ELSE quote_ident(pg_get_userbyid(a.grantee)) END
		FROM pg_class c, aclexplode(c.relacl) a LEFT JOIN pg_roles r ON r.oid = a.grantee
		WHERE c.oid = $1 AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
			AND (NOT c.relrowsecurity OR r.rolbypassrls)`, m.root.OID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
