package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Partition is a partition of the outbox, or one that was.
type Partition struct {
	Name string // schema and name, quoted as in SQL
	OID  uint32

	// by the catalogs
	Exists   bool
	Attached bool // rows that are written to the root can get here
	Pending  bool // a DETACH that was interrupted
	Default  bool // it takes what no other one does
	Odd      string
	Lower    time.Time // of the range, inclusive; zero: from the beginning
	Upper    time.Time // exclusive; zero: there is no end, or the bounds can't be read
	Size     int64     // bytes, with indexes
	Rows     int64     // about, by the statistics
	Written  int64     // rows inserted or updated since the statistics were reset
	Attach   int64     // the transaction that attached it; 0: it is not attached

	// by the table of states
	Known      bool   // it is in it
	noted      string // by that name
	State      State
	Made       bool  // by Outflow, empty
	AttachXID  int64 // Attach when it was noted; 0: it was not
	DetachXmin int64 // the oldest transaction that was open when its DETACH began, or 1; 0: nobody knows
	Fence      outbox.LSN
	Horizon    int64    // of a plain table's fence
	Missing    []string // hashes of the ids of its rows that are in no message, if it is verified
	System     string
	SealedSum  Sum
	Verified   *Sum
	Accepted   int64 // rows that were never published
	Refused    int64 // rows of that kind that were found when it was compared last, and not accepted
	RefusedAt  time.Time
	RefusedBy  string               // the slot of that run
	VerifiedBy map[string]verifying // by slots, what each has verified, where several read the table
	came       State                // how far an earlier run had come, of which this one does a part again
	Stream     Stream
	Streams    map[string]verifying // by slots, those there were when the fence was set, and confirmed
	older      bool                 // an older version has set the fence, and Streams are those of now
	Inserts    *int64               // Written, as it was last seen to change
	QuietSince time.Time
	Sealed     time.Time

	Found *Sum // what is in it now, read under a lock
}

// verifying is a fence, and the stream of one slot: by which its Outflow has verified the rows, or that there
// was when the fence was set. An older version, which sets another fence, leaves it as it is.
type verifying struct {
	Stream
	Fence outbox.LSN
}

// verifiedBy is the stream by which a slot's Outflow has verified it.
func (p *Partition) verifiedBy(slot string) (by Stream, ok bool) {
	v, ok := p.VerifiedBy[slot]
	return v.Stream, ok && v.Fence == p.Fence
}

// Root is the outbox.
type Root struct {
	catalog.Table
	Owner    string
	Key      string // the column of the partition key; "": none that Outflow knows how to use
	KeyType  uint32
	Strategy string // as in pg_partitioned_table: r, l or h; "": it is not partitioned
}

// Manager works on one outbox over a connection of its own. One goroutine uses it.
type Manager struct {
	cfg       Config
	conn      *pgx.Conn
	root      Root
	hasLedger bool         // in the outbox's schema
	oldLedger bool         // it lacks a column
	ledgers   []string     // with rows of the outbox, and that one
	stale     []string     // those with rows that have to be taken up
	published *published   // nil: the stream was not read yet
	began     time.Time    // when this run did
	between   func() error // what is done while something is read that takes its time
	locked    func()       // ends what is shown, if anything is: that a lock is waited for
	o         Options

	now func() time.Time // by which is counted how long transactions are waited for
}

// Options are what a manager needs of others.
type Options struct {
	// Outside reads the checkpoint record, the stream, and how far the archive is. It fails where outflow run
	// could not start: then nothing goes.
	Outside func(ctx context.Context) (Outside, error)
	// Published calls add with the hash of each event id that is in the stream, at least of messages that
	// were stored within that time. The end is that of the stream when it is called. Where there is an
	// archive, they are those of the archive, from segments that are whole: a row that a repair published
	// late lies behind its fence in the stream, and need not be in the archive when that has reached the
	// fence; and messages may have been lost before they were archived.
	Published func(ctx context.Context, in Period, add func(id [16]byte) error) (Seen, error)
	// Step is called after each step. Hit is called between them, for tests that end the process there.
	Step func(Step)
	Hit  func(point string)

	AcceptUnpublished int64 // partitions with exactly so many rows that were never published may go; 0: none

	// Turn is how long rows are let go at most, because others wait for it, and no shorter than it took to
	// find out which may; 0: until all have gone. The next run goes on. As it comes by itself, it does not
	// compare again what was refused a short time ago.
	Turn time.Duration
	Pass *Pass // how far the run before has come with a plain table; may be nil where there is no Turn
}

// Period is a time from Since to Until; zero: without that end.
type Period struct{ Since, Until time.Time }

// Seen is what was read of the stream.
type Seen struct {
	Stream  Stream
	Oldest  time.Time // when the oldest message was stored; zero: there is none
	Removed bool      // messages at its beginning were removed by retention
}

// Open connects, with the session settings pinned, and reads the outbox. The caller closes the manager.
func Open(ctx context.Context, target postgres.Target, cfg Config, o Options) (_ *Manager, err error) {
	conn, err := target.Connect(ctx)
	if err != nil {
		return nil, err
	}
	m := &Manager{cfg: cfg, conn: conn, o: o, now: time.Now, between: func() error { return nil },
		locked: func() {}}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	if m.o.Hit == nil {
		m.o.Hit = func(string) {}
	}
	if m.o.Step == nil {
		m.o.Step = func(Step) {}
	}
	if err := postgres.KeepBytes(ctx, conn.PgConn()); err != nil {
		return nil, err
	}
	if err := m.readRoot(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

// Partitioned reports whether the table has partitions, of whatever kind.
func (m *Manager) Partitioned() bool { return m.root.Strategy != "" }

// Close closes the connection. Where a statement was given up, as at a signal, it waits a moment for
// PostgreSQL to end it: until then nobody else gets its locks, that of the table among them, and a process
// that has ended asks for nothing any more.
func (m *Manager) Close() {
	postgres.Close(m.conn)
	select {
	case <-m.conn.PgConn().CleanupDone():
	case <-time.After(time.Second):
	}
}

func (m *Manager) readRoot(ctx context.Context) (err error) {
	if m.root.Table, err = catalog.ReadTable(ctx, m.conn, m.cfg.Table); err != nil {
		return err
	}
	var attributes int
	var recovery bool
	err = m.conn.QueryRow(ctx, `SELECT pg_get_userbyid(c.relowner), coalesce(p.partstrat::text, ''),
			coalesce(p.partnatts, 0), coalesce(a.attname, ''), coalesce(a.atttypid, 0), pg_is_in_recovery()
		FROM pg_class c LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
		LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND a.attnum = p.partattrs[0]
		WHERE c.oid = $1`, m.root.OID).
		Scan(&m.root.Owner, &m.root.Strategy, &attributes, &m.root.Key, &m.root.KeyType, &recovery)
	if err != nil {
		return fmt.Errorf("read how %s is partitioned: %w", m.root.Quoted(), err)
	}
	if recovery {
		return postgres.Fatal(nil, "in_recovery", "Point postgres.url at the primary",
			"the server is a standby, on which nothing can be changed")
	}
	if attributes != 1 || m.root.Strategy != "r" || !slices.Contains(keyTypes, m.root.KeyType) {
		m.root.Key = ""
	}
	return nil
}

// keyTypes are the types of a partition key that has ranges of time.
var keyTypes = []uint32{pgtype.TimestamptzOID, pgtype.TimestampOID, pgtype.DateOID}

// behindUTC is how much later than by UTC a range of a key of a type may end for who writes to it: a column
// without a time zone has the time of the writer's session.
func behindUTC(key uint32) time.Duration {
	if key == pgtype.TimestamptzOID {
		return 0
	}
	return 12 * time.Hour
}

// aheadOfUTC is how much earlier than by UTC a range may begin for them.
func aheadOfUTC(key uint32) time.Duration {
	if key == pgtype.TimestamptzOID {
		return 0
	}
	return 14 * time.Hour
}

// boundary is how PostgreSQL prints a range, with the pinned settings.
var boundary = lazyregexp.New(
	`^FOR VALUES FROM \((?:'([^']*)'|MINVALUE)\) TO \((?:'([^']*)'|MAXVALUE)\)$`)

// parseBound reads a bound; "" is the zero time.
func parseBound(text string) (time.Time, bool) {
	if text == "" {
		return time.Time{}, true
	}
	for _, layout := range []string{"2006-01-02 15:04:05.999999-07", "2006-01-02 15:04:05.999999",
		"2006-01-02"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UTC(), true
		}
	}
	return time.Time{}, false
}

// read reads all partitions, oldest first: those of the catalogs, and those that are detached by the table of
// states.
func (m *Manager) read(ctx context.Context, system string) ([]*Partition, error) {
	known, err := m.readLedger(ctx)
	if err != nil {
		return nil, err
	}
	var oids []uint32
	var names []string
	for _, p := range known {
		if p.System == system {
			oids = append(oids, p.OID)
		} else {
			names = append(names, p.Name) // oids are those of the server that it was on
		}
	}
	rows, err := m.conn.Query(ctx, `SELECT c.oid, n.nspname, c.relname, c.relkind::text,
			c.relpersistence::text, coalesce(i.inhparent = $1, false), coalesce(i.inhdetachpending, false),
			coalesce(i.inhparent <> $1, false), coalesce(i.xmin::text::bigint, 0),
			coalesce(pg_get_expr(c.relpartbound, c.oid), ''), coalesce(pg_total_relation_size(c.oid), 0),
			greatest(c.reltuples, 0)::bigint,
			pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
		WHERE i.inhparent = $1 OR c.oid = ANY ($2::oid[]) OR '"' || replace(n.nspname, '"', '""') ||
			'"."' || replace(c.relname, '"', '""') || '"' = ANY ($3)`, m.root.OID, array(oids), names)
	if err != nil {
		return nil, fmt.Errorf("read the partitions of %s: %w", m.root.Quoted(), err)
	}
	var all []*Partition
	var schema, name, kind, persistence, bound string
	var elsewhere bool
	p := Partition{}
	_, err = pgx.ForEachRow(rows, []any{&p.OID, &schema, &name, &kind, &persistence, &p.Attached, &p.Pending,
		&elsewhere, &p.Attach, &bound, &p.Size, &p.Rows, &p.Written}, func() error {
		found := &Partition{}
		for _, k := range known {
			if k.System == system && k.OID == p.OID ||
				k.System != system && k.Name == quoted(schema, name) {
				found = k
			}
		}
		lower, upper := found.Lower, found.Upper
		found.OID, found.Attached, found.Pending = p.OID, p.Attached && !p.Pending, p.Pending
		found.Size, found.Rows, found.Written, found.Exists = p.Size, p.Rows, p.Written, true
		if found.Attached {
			found.Attach = p.Attach
		}
		if !found.Known {
			found.Name, found.System, found.State = quoted(schema, name), system, Attached
		}
		found.Name = quoted(schema, name)
		found.readBound(bound)
		if bound == "" || elsewhere { // it is detached
			found.Lower, found.Upper = lower, upper
		}
		switch {
		case elsewhere:
			found.Pending, found.Odd = false, "it is a partition of another table"
		case kind != "r":
			found.Odd = "it is partitioned itself, or a foreign table"
		case persistence != "p":
			found.Odd = "it is unlogged: its rows are in no WAL"
		}
		all = append(all, found)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the partitions of %s: %w", m.root.Quoted(), err)
	}
	for _, p := range known {
		if !p.Exists && p.Horizon == 0 {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *Partition) int { return a.Upper.Compare(b.Upper) })
	return all, nil
}

func (p *Partition) readBound(bound string) {
	switch found := boundary().FindStringSubmatch(bound); {
	case bound == "":
	case bound == "DEFAULT":
		p.Default = true
	case found == nil:
		p.Odd = "its bounds are no range of time: " + bound
	default:
		var ok, also bool
		if found[1] == "-infinity" { // as MINVALUE and MAXVALUE, but for rows of infinity itself
			found[1] = ""
		}
		if found[2] == "infinity" {
			found[2] = ""
		}
		p.Lower, ok = parseBound(found[1])
		if p.Upper, also = parseBound(found[2]); !ok || !also {
			p.Odd = "its bounds are no range of time: " + bound
		}
	}
}

func quoted(schema, name string) string { return pgx.Identifier{schema, name}.Sanitize() }

// array is a list of oids that PostgreSQL reads as text.
func array(oids []uint32) string {
	text := "{"
	for i, oid := range oids {
		if i > 0 {
			text += ","
		}
		text += fmt.Sprint(oid)
	}
	return text + "}"
}

// facts reads what a decision is made from.
func (m *Manager) facts(ctx context.Context, q catalog.Querier) (*Facts, error) {
	f := &Facts{}
	var err error
	// before the record: a slot that is made anew meanwhile confirms nothing for the one that it is of
	if f.Slots, err = ReadSlots(ctx, q, nil); err != nil {
		return nil, err
	}
	err = m.away(ctx, func() (err error) {
		f.Outside, err = m.o.Outside(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	f.Slots = f.Counting(f.Slots, m.cfg.Slot, m.cfg.OtherSlots)
	f.Stream.Created = f.Stream.Created.Truncate(time.Microsecond) // as PostgreSQL keeps it
	for slot, created := range f.Streams {
		f.Streams[slot] = created.Truncate(time.Microsecond)
	}
	return f, m.server(ctx, q, f)
}

// server reads what PostgreSQL says of itself.
func (m *Manager) server(ctx context.Context, q catalog.Querier, f *Facts) error {
	var wal string
	err := q.QueryRow(ctx, `SELECT clock_timestamp(), pg_current_wal_insert_lsn()::text,
		(SELECT system_identifier::text FROM pg_control_system())`).Scan(&f.Now, &wal, &f.System)
	if err == nil {
		f.WALEnd, err = outbox.ParseLSN(wal)
	}
	if err != nil {
		return fmt.Errorf("read the server's state: %w", err)
	}
	return nil
}

// ReadSlots reads the slots that count: all of the plugin pgoutput in this database, less others. The
// catalogs do not say which publication a slot reads.
func ReadSlots(ctx context.Context, q catalog.Querier, others []string) ([]Slot, error) {
	rows, err := q.Query(ctx, `SELECT slot_name, coalesce(confirmed_flush_lsn, '0/0')::text, active,
			CASE WHEN wal_status = 'lost' THEN coalesce(to_jsonb(s)->>'invalidation_reason',
				'its WAL was removed') ELSE '' END
		FROM pg_replication_slots s WHERE plugin = 'pgoutput' AND database = current_database()
			AND slot_name <> ALL ($1) ORDER BY slot_name`, append([]string{}, others...))
	if err != nil {
		return nil, fmt.Errorf("read the replication slots: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Slot, err error) {
		var confirmed string
		if err = row.Scan(&s.Name, &confirmed, &s.Active, &s.Lost); err == nil {
			s.Confirmed, err = outbox.ParseLSN(confirmed)
		}
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the replication slots: %w", err)
	}
	return all, nil
}

// explain explains a statement that failed.
func (m *Manager) explain(doing string, err error) error {
	switch postgres.SQLState(err) {
	case postgres.StateInsufficientPrivilege:
		return m.noRight(err, doing)
	case postgres.StateLockNotAvailable, postgres.StateQueryCanceled:
		return &outbox.Fault{Class: outbox.Transient, Code: codeLock, Err: err,
			Message: "could not " + doing + " within the time that the outbox may be locked"}
	case postgres.StateDependentObjects, stateReferenced, stateRestricted:
		return postgres.Fatal(err, codeNeeded, "Drop what needs it, or let that read the outbox itself; the "+
			"other partitions go meanwhile", "could not %s, because something else needs it%s", doing,
			detail(err))
	}
	if outbox.FaultOf(err) != nil {
		return err
	}
	return fmt.Errorf("%s: %w", doing, err)
}

func (m *Manager) noRight(err error, doing string) error {
	return postgres.Fatal(err, "no_right", fmt.Sprintf("Set retain.postgres_url to a URL of role %s, which "+
		"owns the outbox, with the right CREATE on schema %s", m.root.Owner, postgres.Quote(m.root.Schema)),
		"the role may not %s", doing)
}

// CheckRights refuses what apply would be refused, of partitions or of rows. It is for after a plan.
func (m *Manager) CheckRights(ctx context.Context, byRows bool) error {
	sql := "SELECT pg_has_role($1::name, 'USAGE') AND has_schema_privilege($2::text, 'CREATE')"
	args, doing := []any{m.root.Owner, m.root.Schema}, "change table "+m.root.Quoted()
	if byRows && m.hasLedger {
		sql = "SELECT has_table_privilege($1::text, 'DELETE') AND has_table_privilege($2::text, 'INSERT') " +
			"AND has_table_privilege($2::text, 'UPDATE')"
		args = []any{m.root.Quoted(), m.ledger()}
	}
	var may bool
	if err := m.conn.QueryRow(ctx, sql, args...).Scan(&may); err != nil {
		return fmt.Errorf("read the rights on table %s: %w", m.root.Quoted(), err)
	}
	if !may {
		return m.noRight(nil, doing)
	}
	return nil
}

// detail is what PostgreSQL says beside its message: for one, who needs what is to be dropped.
func detail(err error) string {
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && pg.Detail != "" {
		return " (" + pg.Detail + ")"
	}
	return ""
}

// The codes of what can be wrong.
const (
	codeLock        = "partition_locked"
	codeBusy        = "partition_busy"
	codeUnpublished = "partition_unpublished"
	codeKey         = "partition_key"
	codePartman     = "partition_partman"
	codeNeeded      = "partition_needed"
	codeBehind      = "server_behind"
	codeTaken       = "partition_name"
	codeRest        = "partition_default"
	codeRestLarge   = "partition_default_large"
)

// partman is what pg_partman does with the outbox.
type partman struct {
	manages bool
	drops   bool // it drops partitions without asking anybody
}

// readPartman looks for the outbox in pg_partman's configuration. A table of that name counts where it
// belongs to the outbox's owner, the extension's or the database's.
func (m *Manager) readPartman(ctx context.Context) (found partman, err error) {
	var schema string
	err = m.conn.QueryRow(ctx, `SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		JOIN pg_roles o ON o.oid = c.relowner
		WHERE c.relname = 'part_config' AND c.relkind = 'r' AND has_table_privilege(c.oid, 'SELECT')
			AND has_schema_privilege(n.oid, 'USAGE') AND (o.rolsuper OR o.rolname = $1 OR c.relowner =
				(SELECT datdba FROM pg_database WHERE datname = current_database())
				OR EXISTS (SELECT FROM pg_extension e WHERE e.extname = 'pg_partman'
					AND e.extowner = c.relowner))
			AND 3 = (SELECT count(*) FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname IN
				('parent_table', 'retention', 'retention_keep_table'))
		ORDER BY n.nspname LIMIT 1`, m.root.Owner).Scan(&schema)
	if errors.Is(err, pgx.ErrNoRows) {
		return found, nil
	}
	if err == nil {
		err = m.conn.QueryRow(ctx, `SELECT retention IS NOT NULL AND NOT retention_keep_table
				AND to_jsonb(c)->>'retention_schema' IS NULL
			FROM `+quoted(schema, "part_config")+` c WHERE parent_table = $1`,
			m.root.Schema+"."+m.root.Name).Scan(&found.drops)
		if errors.Is(err, pgx.ErrNoRows) {
			return found, nil
		}
		found.manages = err == nil
	}
	if err != nil {
		return found, fmt.Errorf("read the configuration of pg_partman: %w", err)
	}
	return found, nil
}
