package catalog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// minVersion is the oldest server version that Outflow supports, as in server_version_num.
const minVersion = 140000

// slotPatience is how long the creation of a slot waits for transactions that write.
const slotPatience = 30 * time.Second

// SetupConfig says what `outflow init` makes.
type SetupConfig struct {
	Config
	Mapping   relay.Mapping // columns of the table, if it has to be made; Mapping.Table is not used
	ID        string        // id column, "" for none
	Further   []string      // columns of text that such a table gets as well; NULL is allowed in them
	Columns   []string      // every column that is read, for the check of the publication
	Patience  time.Duration // how long CreateSlot waits for transactions that write; 0: 30 s
	CreatedAt string        // name of the column with the time of the insert; "": created_at

	// A table that has to be made is partitioned by that column into ranges of this length; 0: it is not.
	PartitionEvery time.Duration

	AcceptOwners []string // further roles whose objects are used
}

// Setup makes the outbox's parts in PostgreSQL over an ordinary connection. One goroutine uses it.
type Setup struct {
	cfg     SetupConfig
	conn    *pgx.Conn
	version int
	dryRun  bool // see DryRun
}

// OpenSetup connects.
func OpenSetup(ctx context.Context, cfg SetupConfig) (*Setup, error) {
	conn, err := cfg.Target().Connect(ctx)
	if err != nil {
		return nil, err
	}
	s := &Setup{cfg: cfg, conn: conn}
	err = conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&s.version)
	if err != nil {
		postgres.Close(conn)
		return nil, fmt.Errorf("read the server's version: %w", err)
	}
	return s, nil
}

// Close closes the connection.
func (s *Setup) Close() { postgres.Close(s.conn) }

// DryRun lets EnsureTable and EnsurePublication work in a transaction that is never committed: whether the
// role may do it is tried, and nothing stays.
func (s *Setup) DryRun(ctx context.Context) error {
	_, err := s.conn.Exec(ctx, "BEGIN")
	s.dryRun = err == nil
	return err
}

// withSavepoint does what may be refused. In a dry run the transaction goes on after it.
func (s *Setup) withSavepoint(ctx context.Context, do func() error) error {
	if !s.dryRun {
		return do()
	}
	if _, err := s.conn.Exec(ctx, "SAVEPOINT attempt"); err != nil {
		return err
	}
	err := do()
	if err != nil {
		if _, back := s.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT attempt"); back != nil {
			return errors.Join(err, back)
		}
	}
	return err
}

// SetColumns sets the columns that the check of the publication is about.
func (s *Setup) SetColumns(columns []string) { s.cfg.Columns = columns }

// CountRows counts the table's rows, of a shard those alone, up to limit. ok is false where the role may not
// read them.
func (s *Setup) CountRows(ctx context.Context, t Table, limit int) (n int, ok bool, err error) {
	sql := "SELECT FROM " + t.Only()
	if condition := rowfilter.Condition(s.cfg.Shard, postgres.Quote(s.cfg.ShardBy)); condition != "" {
		sql += " WHERE " + condition
	}
	err = s.withSavepoint(ctx, func() error {
		return s.conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*) FROM (%s LIMIT %d) r", sql, limit)).Scan(&n)
	})
	if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("count the rows of table %s.%s: %w", t.Schema, t.Name, err)
	}
	return n, true, nil
}

// Slot reads the slot's row, with its state.
func (s *Setup) Slot(ctx context.Context) (relay.SlotState, error) {
	return ReadSlot(ctx, s.conn, s.cfg.Slot)
}

// Table reads the outbox's description, from the catalog.
func (s *Setup) Table(ctx context.Context) (Table, error) {
	return ReadTable(ctx, s.conn, s.cfg.Table)
}

// Publication reads and checks the publication, as [CheckPublication] does.
func (s *Setup) Publication(ctx context.Context) (relay.PublicationIdentity, error) {
	return CheckPublication(ctx, s.conn, s.version, s.cfg.Config, s.cfg.Columns)
}

// CheckServer makes sure that the server can hold the slot. Whether the role may replicate is seen when a
// replication connection is opened: managed platforms grant it in ways of their own.
func (s *Setup) CheckServer(ctx context.Context) error {
	if err := CheckVersion(s.version); err != nil {
		return err
	}
	var level string
	var recovery, exists bool
	var slots, maxSlots, maxSenders int
	err := s.conn.QueryRow(ctx, `SELECT current_setting('wal_level'), pg_is_in_recovery(),
			(SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
			current_setting('max_wal_senders')::int, EXISTS (SELECT FROM pg_replication_slots
			WHERE slot_name = $1)`,
		s.cfg.Slot).Scan(&level, &recovery, &slots, &maxSlots, &maxSenders, &exists)
	if err != nil {
		return fmt.Errorf("read the server's settings: %w", err)
	}
	switch {
	case recovery:
		return postgres.Fatal(nil, "in_recovery", "Point postgres.url at the primary",
			"the server is a standby, on which nothing can be made")
	case slots >= maxSlots && !exists:
		return postgres.Fatal(nil, "max_replication_slots",
			"Drop slots that nobody needs, or raise max_replication_slots and restart PostgreSQL",
			"max_replication_slots is %d and %d slots exist", maxSlots, slots)
	case maxSenders == 0:
		return postgres.Fatal(nil, "max_wal_senders",
			"Set max_wal_senders to 10, for example, and restart PostgreSQL",
			"max_wal_senders is 0: the server streams to nobody")
	}
	return CheckWALLevel(level)
}

// EnsureTable makes the table if it does not exist, and reports whether it did. An existing one must belong
// to a trusted role.
func (s *Setup) EnsureTable(ctx context.Context) (created bool, err error) {
	t, err := s.Table(ctx)
	if err == nil {
		return false, s.checkTableOwner(ctx, t)
	}
	if f := outbox.FaultOf(err); f == nil || f.Code != "table_missing" {
		return false, err
	}
	schema, name, err := SplitTable(s.cfg.Table)
	if err != nil {
		return false, err
	}
	statements := append([]string{createTable(s.cfg, pgx.Identifier{schema, name})},
		firstPartitions(s.cfg, schema, name, time.Now())...)
	if err = s.exec(ctx, strings.Join(statements, ";\n")); err != nil {
		return false, s.explain("make table "+schema+"."+name, "the right to create tables in its schema",
			err)
	}
	return true, nil
}

// EnsureControl makes the control table if there is to be one and it does not exist, and reports whether it
// did.
func (s *Setup) EnsureControl(ctx context.Context) (created bool, err error) {
	if s.cfg.Control == "" {
		return false, nil
	}
	schema, name, err := SplitTable(s.cfg.Control)
	if err != nil {
		return false, err
	}
	table := pgx.Identifier{schema, name}
	there, err := s.HasTable(ctx, table.Sanitize())
	if err != nil {
		return false, err
	}
	if there {
		t, err := readControl(ctx, s.conn, s.cfg.Config)
		if err != nil {
			return false, err
		}
		return false, s.checkTableOwner(ctx, t)
	}
	if err = s.exec(ctx, createControl(table)); err != nil {
		return false, s.explain("make table "+schema+"."+name, "the right to create tables in its schema",
			err)
	}
	return true, nil
}

// Cluster is [ReadCluster] with its configuration.
func (s *Setup) Cluster(ctx context.Context) (Cluster, error) {
	return ReadCluster(ctx, s.conn, s.version, s.cfg.Config)
}

// EnsurePublication makes the publication if it does not exist, reports whether it did, and checks it in any
// case. Rows that are hidden from it are a fault.
func (s *Setup) EnsurePublication(ctx context.Context) (created bool, id relay.PublicationIdentity,
	err error) {
	if err := s.checkShardColumn(ctx); err != nil {
		return false, id, err
	}
	if id, err = s.Publication(ctx); err == nil {
		return false, id, hiddenFault(id)
	}
	if f := outbox.FaultOf(err); f == nil || f.Code != "publication_missing" {
		return false, id, err
	}
	var table pgx.Identifier
	needs := "the right CREATE on the database"
	if s.cfg.Table != "" {
		schema, name, err := SplitTable(s.cfg.Table)
		if err != nil {
			return false, id, err
		}
		table, needs = pgx.Identifier{schema, name}, "to own the table and "+needs
		t, err := s.Table(ctx)
		if err == nil && t.Unlogged {
			err = t.unlogged()
		}
		if err != nil {
			return false, id, err
		}
	}
	if err = s.exec(ctx, createPublication(s.cfg, table)); err != nil {
		return false, id, s.explain("make publication "+s.cfg.Publication, needs, s.shardRefused(ctx, err))
	}
	if id, err = s.Publication(ctx); err == nil {
		err = hiddenFault(id)
	}
	return true, id, err
}

func hiddenFault(id relay.PublicationIdentity) error {
	if id.Hidden != nil { // a nil *Fault is no nil
		return id.Hidden
	}
	return nil
}

// exec runs one or several statements, all of them or none.
func (s *Setup) exec(ctx context.Context, sql string) error {
	return s.withSavepoint(ctx, func() error {
		_, err := s.conn.PgConn().Exec(ctx, sql).ReadAll()
		return err
	})
}

// Run runs statements in one transaction that make objects beside the outbox where they don't exist. After
// each, none of them may belong to a role that is not trusted. needs says which right they need, for the
// error of a role that lacks it.
func (s *Setup) Run(ctx context.Context, doing, needs string, beside Auxiliary, statements []string) error {
	err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
		for _, statement := range statements {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return err
			}
			if err := checkAuxiliary(ctx, tx, s.cfg, beside); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return s.explain(doing, needs, err)
	}
	return nil
}

// HasTable reports whether there is a table of that quoted name.
func (s *Setup) HasTable(ctx context.Context, quoted string) (there bool, err error) {
	err = s.conn.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", quoted).Scan(&there)
	return there, err
}

// explain explains a statement that failed: without the right to it is fatal.
func (s *Setup) explain(doing, needs string, err error) error {
	switch postgres.SQLState(err) {
	case postgres.StateInsufficientPrivilege:
	case postgres.StateInvalidSchemaName:
		return postgres.Fatal(nil, "schema_missing", "Make the schema, or correct table",
			"there is no schema for the table %s", s.cfg.Table)
	default:
		return fmt.Errorf("%s: %w", doing, err)
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "no_right", Message: "the role may not " + doing, Err: err,
		Hint: "It needs " + needs +
			"; or let `outflow init --print` show the statements and run them as another role",
	}
}

// CreateSlot makes the slot and returns its confirmed LSN: what commits after it is decoded. The server waits
// for every transaction that writes at that moment, in any database; when that takes longer than Patience the
// fault names them. A slot of that name that exists is an error with code slot_exists.
func (s *Setup) CreateSlot(ctx context.Context) (outbox.LSN, error) {
	patience := s.cfg.Patience
	if patience == 0 {
		patience = slotPatience
	}
	var text string
	err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
		limit := fmt.Sprintf("SET LOCAL statement_timeout = %d", max(1, patience.Milliseconds()))
		if _, err := tx.Exec(ctx, limit); err != nil {
			return err
		}
		arguments := "$1, 'pgoutput'"
		if s.version >= 170000 {
			arguments += ", failover => true" // standbys that synchronise slots have it after a promotion
		}
		return tx.QueryRow(ctx, "SELECT lsn::text FROM pg_create_logical_replication_slot("+arguments+")",
			s.cfg.Slot).Scan(&text)
	})
	if err != nil {
		return 0, s.slotFault(ctx, patience, err)
	}
	return outbox.ParseLSN(text)
}

func (s *Setup) slotFault(ctx context.Context, patience time.Duration, err error) error {
	switch postgres.SQLState(err) {
	case postgres.StateQueryCanceled:
		blockers, listErr := s.blockers(ctx)
		if listErr != nil {
			return errors.Join(fmt.Errorf("make slot %s: %w", s.cfg.Slot, err), listErr)
		}
		return postgres.Fatal(err, "slot_blocked",
			"Let them end, or end them with pg_terminate_backend(pid), then run `outflow init` again: "+
				blockers,
			"slot %q could not be made within %v, because transactions that write are open", s.cfg.Slot,
			patience)
	case postgres.StateDuplicateObject:
		return postgres.Fatal(err, "slot_exists", "Set slot to another name, or drop it if nobody needs it",
			"slot %q exists already", s.cfg.Slot)
	case postgres.StateConfigurationLimitExceeded:
		return postgres.Fatal(err, "max_replication_slots",
			"Drop slots that nobody needs, or raise max_replication_slots and restart PostgreSQL",
			"every replication slot of the server is in use")
	case postgres.StateNotInPrerequisiteState:
		return postgres.Fatal(err, "wal_level", "Set wal_level = logical and restart PostgreSQL",
			"the server can't make a logical replication slot")
	case postgres.StateInsufficientPrivilege:
		return postgres.Fatal(err, "no_replication_right",
			"ALTER ROLE ... REPLICATION (on managed platforms grant their replication role)",
			"the role may not make a replication slot")
	}
	return fmt.Errorf("make slot %s: %w", s.cfg.Slot, err)
}

// blockers lists the transactions that a new slot waits for. Of other roles' sessions a role sees only the
// pid, unless it has pg_read_all_stats.
func (s *Setup) blockers(ctx context.Context) (string, error) {
	rows, err := s.conn.Query(ctx, `SELECT format('pid %s%s', pid, coalesce(format(
				' (%s, database %s, open for %s s, last statement began %s)', nullif(application_name, ''),
				datname,
				round(extract(epoch FROM clock_timestamp() - xact_start)), to_char(query_start,
				'YYYY-MM-DD HH24:MI:SS "UTC"')), ''))
			FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
		UNION ALL SELECT format('prepared transaction %L (database %s, prepared %s)', gid, database,
				to_char(prepared, 'YYYY-MM-DD HH24:MI:SS "UTC"'))
			FROM pg_prepared_xacts`)
	if err != nil {
		return "", fmt.Errorf("list open transactions: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", fmt.Errorf("list open transactions: %w", err)
	}
	if len(all) == 0 {
		return "none is open any more", nil
	}
	return strings.Join(all, ", "), nil
}

// CheckVersion refuses a server that is too old, by its server_version_num.
func CheckVersion(version int) error {
	if version >= minVersion {
		return nil
	}
	return postgres.Fatal(nil, "server_version", "Upgrade it to PostgreSQL 14 or later",
		"the server is PostgreSQL %d.%d, which is too old",
		version/10000, version%10000)
}

// CheckWALLevel refuses a server without logical decoding.
func CheckWALLevel(level string) error {
	if level == "logical" {
		return nil
	}
	return postgres.Fatal(nil, "wal_level", "Set wal_level = logical and restart PostgreSQL (managed "+
		"platforms have a parameter of their own for it)",
		"wal_level is %s, which has no logical decoding", level)
}
