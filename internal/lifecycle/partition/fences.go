package partition

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// A fence of a plain table is a transaction ID X and an LSN F: every transaction before X had ended below F.
// The rows of a fence are those that transactions before its X wrote, and none before that of the fence
// before it. Once Outflow's slot has confirmed F they are compared with the stream, by their ids, and the
// fence is verified if each has a message: until keep has passed the stream may have removed them.
//
// Rows leave a fence and never come to one. An update, or a statement that rewrites the table, makes rows of
// a later fence of them, whose ids are compared again; so nothing has to be known of who wrote a row, or when
// it was written first. VACUUM FULL, CLUSTER and freezing leave the transaction ID of a row as it is.

const (
	// fences is how many are kept for the time that rows are kept.
	fences = 64
	// Of so many rows of a fence that are in no message it is noted which they are: all others are verified.
	maxMissing = 1000
	// A row has the lower 32 bits of its transaction ID, which recur. It is taken for the youngest one that
	// it can be, and a lock may have followed it to one that is younger than the snapshot.
	xidAhead = 1 << 28
	xidReach = 1<<32 - xidAhead // a row that is older than so many transactions looks new
)

// baseline is the name of the first fence in the table of states, or the beginning of it: what was written by
// transactions that began after it came by way of a WAL that the slot has read. Where nothing else shows that
// rows are published, that is what is asked: without an id column, and where subscriptions bring rows that
// nobody publishes here.
const baseline = "baseline"

// written is the SQL of the 64-bit ID of the transaction that wrote row t.
var written = writtenBy("t.xmin", fmt.Sprintf("(SELECT "+
	"pg_snapshot_xmax(pg_current_snapshot())::text::bigint + %d)", xidAhead))

// writtenBy is the youngest 64-bit transaction ID up to newest that has these lower 32 bits.
func writtenBy(xmin, newest string) string {
	return fmt.Sprintf("(%[2]s - ((%[2]s - %[1]s::text::bigint) & 4294967295))", xmin, newest)
}

// before is the condition of the rows that transactions before a fence wrote. Another table may get the name
// meanwhile: none of its rows are.
func before(p *Partition) string {
	return fmt.Sprintf("(t.tableoid = %d AND %s < %d)", p.OID, written, p.Horizon)
}

// named makes sure that the name is still that of the table: of another one, no row was missing.
func (m *Manager) named(ctx context.Context) error {
	var same bool
	err := m.conn.QueryRow(ctx, "SELECT coalesce(to_regclass($1)::oid = $2, false)", m.root.Quoted(),
		m.root.OID).Scan(&same)
	if err == nil && !same {
		err = &outbox.Fault{Class: outbox.Transient, Code: codeBusy,
			Message: fmt.Sprintf("table %s, with OID %d, was renamed meanwhile", m.root.Quoted(), m.root.OID),
			Hint:    "Run the command again, with the table that table names now"}
	}
	return err
}

// plain is what is known of a plain table.
type plain struct {
	*Facts
	all     []*Partition // fences, oldest first
	base    *Partition   // nil: none yet
	cleared bool         // no row is older than the baseline any more
	next    int64        // the transaction ID that comes next
	inserts int64        // rows inserted or updated since the statistics were reset
	live    int64        // rows, about
	brought []string     // subscriptions that bring rows that are not published here
	stale   []string     // names of fences that were given up, or are of a former table or cluster
}

// lookPlain reads what is known of a plain table.
func (m *Manager) lookPlain(ctx context.Context) (*plain, error) {
	if m.root.Strategy != "" {
		return nil, postgres.Fatal(nil, codeKey, "Set retain.table.method to partition",
			"table %s is partitioned: its rows go with their partitions", m.root.Quoted())
	}
	f, err := m.facts(ctx, m.conn)
	if err != nil {
		return nil, err
	}
	t := &plain{Facts: f}
	known, err := m.readLedger(ctx)
	if err != nil {
		return nil, err
	}
	err = m.conn.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
			pg_stat_get_tuples_inserted($1) + pg_stat_get_tuples_updated($1),
			pg_stat_get_live_tuples($1)`, m.root.OID).
		Scan(&t.next, &t.inserts, &t.live)
	if err != nil {
		return nil, fmt.Errorf("read the statistics of %s: %w", m.root.Quoted(), err)
	}
	if m.cfg.OwnOnly {
		if t.brought, err = catalog.BroughtBy(ctx, m.conn, m.root.OID); err != nil {
			return nil, err
		}
	}
	base := m.knownBaseline(known)
	for _, p := range known {
		switch {
		case p != base && !m.ownFence(p.Name):
		case p.System == f.System && p.Fence > f.WALEnd:
			return nil, m.behind(f, p)
		case p.Fence == 0 || p.System != f.System || p.OID != m.root.OID: // given up, or of another table
			if p != base {
				t.stale = append(t.stale, p.Name)
			}
		case p == base:
			p.Name, p.noted = m.baselineName(), ""
			if t.base, t.cleared = p, p.State == Verified; t.worn(p) {
				p.Horizon, t.cleared = t.next, false // any row may be older
			}
		default:
			t.all = append(t.all, p)
		}
	}
	slices.SortFunc(t.all, func(a, b *Partition) int {
		return cmp.Or(cmp.Compare(a.Horizon, b.Horizon), a.Sealed.Compare(b.Sealed))
	})
	return t, nil
}

// baselineName is the name of the baseline in the table of states. Each shard has its own, because it rests
// on the shard's slot and stream.
func (m *Manager) baselineName() string {
	if m.cfg.Own != "" {
		return baseline + " of " + m.cfg.Slot
	}
	return baseline
}

// knownBaseline returns the baseline; nil: there is none. An older version had one for all shards.
func (m *Manager) knownBaseline(known map[string]*Partition) *Partition {
	return cmp.Or(known[m.baselineName()], known[baseline])
}

// fenceName is the name of a fence in the table of states. Each shard has its own, because it is compared
// with its stream.
func (m *Manager) fenceName(time string) string {
	if m.cfg.Own != "" {
		return fmt.Sprintf("fence of %s %s", m.cfg.Slot, time)
	}
	return "fence " + time
}

func (m *Manager) ownFence(name string) bool {
	return strings.HasPrefix(name, m.fenceName("")) &&
		(m.cfg.Own != "" || !strings.HasPrefix(name, "fence of "))
}

// worn reports whether a fence is so old that no row can be seen to lie behind it.
func (t *plain) worn(p *Partition) bool { return t.next-p.Horizon >= xidReach }

// fails says by which of some clauses, and why, the rows of a fence may not go.
func (m *Manager) fails(f *Facts, p *Partition, names ...string) (name, why string) {
	for _, clause := range clauses {
		if slices.Contains(names, clause.name) {
			if why := clause.fails(&m.cfg, f, p); why != "" {
				return clause.name, why
			}
		}
	}
	return "", ""
}

// confirmed reports whether Outflow's slot has confirmed a fence. Others may be behind for longer than the
// stream keeps messages.
func (m *Manager) confirmed(t *plain, p *Partition) bool {
	_, why := m.fails(t.Facts, p, "server")
	return why == "" && slices.ContainsFunc(t.Slots, func(s Slot) bool {
		return s.Name == m.cfg.Slot && s.Confirmed >= p.Fence
	})
}

// verified reports whether all rows of a fence were in the stream that there is.
func (m *Manager) verified(t *plain, p *Partition) bool {
	_, why := m.fails(t.Facts, p, "stream")
	return why == "" && p.State == Verified
}

// fence returns the newest fence that rows may be deleted behind, or why there is none.
func (m *Manager) fence(t *plain) (found *Partition, why, name string) {
	why = "there is no fence yet"
	for i, p := range t.all {
		if p.Sealed.After(t.Now) && i+1 < len(t.all) { // the clock was ahead: those behind it were set later
			continue
		}
		if t.Now.Before(p.Sealed.Add(m.cfg.Age)) {
			if found == nil {
				why, name = "no row is older than retain.table.age", "age"
			}
			break
		}
		if clause, reason := m.fails(t.Facts, p, eligible...); reason != "" {
			if found == nil {
				why, name = reason, clause
			}
			break // a later one is no better
		}
		found = p
		if m.cfg.Rows > 0 && p.Inserts != nil && t.inserts >= *p.Inserts &&
			t.inserts-*p.Inserts <= m.cfg.Rows-m.o.Pass.refusal() {
			break // behind it are as many rows as are to go, and those behind a later one are younger
		}
	}
	if found != nil && t.worn(found) {
		return nil, fmt.Sprintf("%d transactions have begun since the newest fence that is old enough, and "+
			"after %d PostgreSQL can't tell old rows from new ones: let rows go sooner (retain.table.keep, "+
			"retain.table.age), or set archive.url", t.next-found.Horizon, xidReach), "keep"
	}
	return found, why, name
}

// horizons are the transaction IDs of the fences.
func (t *plain) horizons() (all []int64) {
	for _, p := range t.all {
		all = append(all, p.Horizon)
	}
	return all
}

// setFence notes the oldest transaction that is open, and then the end of WAL: all before that transaction
// have ended below it.
func (m *Manager) setFence(ctx context.Context, t *plain) error {
	if n := len(t.all); n > 0 && t.base != nil && !m.confirmed(t, t.all[n-1]) {
		return nil
	}
	p := &Partition{OID: m.root.OID, State: Sealed, System: t.System, Inserts: &t.inserts, Stream: t.Stream}
	err := m.conn.QueryRow(ctx, "SELECT "+
		"pg_snapshot_xmin(pg_current_snapshot())::text::bigint").Scan(&p.Horizon)
	if err != nil {
		return err
	}
	var fence string
	err = m.conn.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text, clock_timestamp()").
		Scan(&fence, &p.Sealed)
	if err != nil {
		return err
	}
	if p.Fence, err = outbox.ParseLSN(fence); err != nil {
		return err
	}
	p.Name = m.fenceName(p.Sealed.UTC().Format(time.RFC3339Nano))
	if t.base == nil { // whatever begins from now on is read by the slot
		t.base, t.cleared = &Partition{OID: m.root.OID, Name: m.baselineName(), State: Sealed,
			System: t.System, Horizon: t.next, Fence: p.Fence, Sealed: p.Sealed, Stream: t.Stream}, false
		if err := m.note(ctx, m.conn, t.base); err != nil {
			return err
		}
	}
	if err := m.note(ctx, m.conn, p); err != nil {
		return err
	}
	t.all = append(t.all, p)
	t.Now = p.Sealed
	m.o.Hit("partition.sealed")
	return m.thin(ctx, t)
}

// thin leaves as many fences as tell the time that rows are kept well enough: each time the one goes that is
// nearest to its neighbours, but not the newest two, nor the oldest, behind which rows go next.
func (m *Manager) thin(ctx context.Context, t *plain) error {
	for len(t.all) > fences {
		at, shortest := 0, time.Duration(0)
		for i := 1; i < len(t.all)-2; i++ {
			span := t.all[i+1].Sealed.Sub(t.all[i-1].Sealed).Abs() // the clock may have been put back
			if m.verified(t, t.all[i]) == m.verified(t, t.all[i+1]) && (shortest == 0 || span < shortest) {
				at, shortest = i, span
			}
		}
		if err := m.join(ctx, t, at, at+1); err != nil {
			return err
		}
	}
	return nil
}

// joinBehind joins the fences up to p, of which few have rows now. Rows that can't go stay verified beside
// others that are not.
func (m *Manager) joinBehind(ctx context.Context, t *plain, p *Partition) error {
	at := slices.Index(t.all, p)
	err := m.join(ctx, t, at, at)
	for ; at > 0 && err == nil; at-- {
		if m.verified(t, t.all[at-1]) == m.verified(t, t.all[at]) {
			err = m.join(ctx, t, at-1, at)
		}
	}
	return err
}

// join lets the rows of some fences be those of the one behind them. It is verified if all of them were, and
// few of their rows are in no message.
func (m *Manager) join(ctx context.Context, t *plain, from, to int) error {
	p := t.all[to]
	names := t.stale
	for _, q := range t.all[from:to] {
		names = append(names, q.Name)
		if !m.verified(t, q) {
			p.State = Sealed
		}
		p.Missing = append(p.Missing, q.Missing...)
	}
	if len(p.Missing) > maxMissing {
		p.State = Sealed
	}
	if p.State != Verified {
		p.Missing = nil
	}
	err := m.note(ctx, m.conn, p) // first: that it is not verified must not get lost
	if err == nil {
		_, err = m.conn.Exec(ctx, "DELETE FROM "+m.ledger()+" WHERE root = $1 AND name = ANY ($2)",
			m.root.Quoted(), names)
	}
	if err != nil {
		return m.explain("write table "+m.ledger(), err)
	}
	t.all, t.stale = slices.Delete(t.all, from, to), nil
	return nil
}

// between is the condition of the rows of some fences, which lie one behind the other.
func (t *plain) between(from, to int) string {
	condition := before(t.all[to])
	if from > 0 {
		condition += " AND NOT " + before(t.all[from-1])
	}
	return condition
}

// unverified are the rows of which nothing shows up to a fence that they were in the stream; "": there are
// none.
func (m *Manager) unverified(t *plain, p *Partition, id catalog.Column) string {
	var all []string
	end := slices.Index(t.all, p) + 1 // those behind it with the same transaction ID have no rows
	for i := 0; i < end; i++ {
		from := i
		for i < end && !m.verified(t, t.all[i]) {
			i++
		}
		if i > from {
			all = append(all, t.between(from, i-1))
		}
		if i < end && len(t.all[i].Missing) > 0 {
			all = append(all, m.open(t, i, id))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return "(" + strings.Join(all, " OR ") + ")"
}

// open are the rows of a fence of which nothing shows that they were in the stream: all of them, unless it is
// verified.
func (m *Manager) open(t *plain, i int, id catalog.Column) string {
	p, rows := t.all[i], t.between(i, i)
	if !m.verified(t, p) {
		return rows
	}
	return "(" + rows + " AND " + tablesnapshot.HashOf("t", id) + " = ANY ('{" +
		strings.Join(p.Missing, ",") + "}'::uuid[]))"
}

// compareFences compares the rows of each fence that Outflow's slot has confirmed with the stream, unless
// they were in it before. Those in no message are returned until they are accepted, and noted if they are
// few; a fence with more of them is not verified.
func (m *Manager) compareFences(ctx context.Context, t *plain, id catalog.Column) (gone missing, err error) {
	rest, _ := m.o.Pass.resting()
	var open, resting []int
	for i, p := range t.all {
		if !m.confirmed(t, p) {
			break
		}
		switch noted := m.verified(t, p); {
		case !noted || len(p.Missing) > 0 && rest.IsZero():
			open = append(open, i)
		case len(p.Missing) > 0:
			resting = append(resting, i)
		}
	}
	if t.Repairing != "" {
		return gone, nil
	}
	defer progress.Wait(ctx, "comparing the rows of "+m.root.Quoted()+" with the stream")()
	if len(open) > 0 {
		if gone, err = m.compareOpen(ctx, t, open, id); err != nil {
			return gone, err
		}
	}
	switch {
	case gone.count > 0 && !rest.IsZero(): // others than those that were refused, and not all was read
		gone.again = rest
	case len(resting) == 0:
		m.o.Pass.refusing(gone.count, m.began)
	}
	if len(resting) == 0 {
		return gone, nil
	}
	if m.published == nil { // nobody is known to have them
		none := func(func(...tablesnapshot.IDHash) error) error { return nil }
		err = tablesnapshot.LoadKnown(ctx, m.conn, m.between, none)
		if err != nil {
			return gone, err
		}
	}
	all, _, err := m.unknown(ctx, t, m.openOf(t, resting, id), id)
	all.count, all.ids = all.count+gone.count, append(gone.ids, all.ids...)
	all.ids = all.ids[:min(len(all.ids), maxNamed)]
	all.crowded, all.again = gone.crowded, rest
	return all, err
}

// openOf are the open rows of some fences.
func (m *Manager) openOf(t *plain, some []int, id catalog.Column) string {
	var all []string
	for _, i := range some {
		all = append(all, m.open(t, i, id))
	}
	return "(" + strings.Join(all, " OR ") + ")"
}

// compareOpen is compareFences for some of them.
func (m *Manager) compareOpen(ctx context.Context, t *plain, open []int, id catalog.Column) (gone missing,
	err error) {
	first, last := open[0], open[len(open)-1]
	rows := m.openOf(t, open, id)
	var some bool
	err = m.conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM ONLY "+m.root.Quoted()+" t WHERE "+rows+" AND "+
		m.own()+")").Scan(&some)
	if err != nil {
		return gone, m.explain("read table "+m.root.Quoted(), err)
	}
	old := ""
	if len(t.brought) > 0 { // of what came later the fence is all that is asked
		old = " AND " + before(t.base)
	}
	var of map[int]missing // by fence
	if some {
		in := Period{} // before the first fence they may be of any time
		if first > 0 {
			in = Period{t.all[first-1].Sealed, t.all[last].Sealed}
		}
		if gone, of, err = m.missed(ctx, t, in, 0, rows, old, id); err != nil {
			return gone, err
		}
		t.Stream = m.published.seen.Stream // the newest that is known of it
	}
	if err := m.named(ctx); err != nil {
		return gone, err
	}
	for _, i := range open {
		p, lacks := t.all[i], of[i]
		switch accepted := gone.count == m.o.AcceptUnpublished; {
		case lacks.count == 0:
			p.Accepted, p.Missing = 0, nil
		case accepted:
			p.Accepted, p.Missing = lacks.count, nil
		case lacks.count > maxMissing:
			gone.crowded = p.Sealed
			continue
		default:
			p.Accepted, p.Missing = 0, lacks.hashes
		}
		p.State, p.Stream = Verified, t.Stream
		if err := m.note(ctx, m.conn, p); err != nil {
			return gone, m.explain("write table "+m.ledger(), err)
		}
	}
	return gone, nil
}
