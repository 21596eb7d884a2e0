package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Server is a PostgreSQL server, as it was connected to.
type Server struct {
	Where     string // host:port/database
	RoundTrip time.Duration
	Clock     time.Duration // its clock is ahead of ours by so much; off by RoundTrip/2 at most
	Link      Link

	Number     int    `json:"number"`  // server_version_num
	Version    string `json:"version"` // such as 17.10
	Role       string `json:"role"`
	Name       string `json:"name"` // application_name of our connection
	Superuser  bool   `json:"superuser"`
	InRecovery bool   `json:"in_recovery"`
	Stats      bool   `json:"stats"` // the role may see what other roles' sessions do
}

// Writer is where heartbeats and changes of settings are written, if that is not postgres.url.
type Writer struct {
	Where      string
	InRecovery bool
}

// Link says how a connection is protected.
type Link struct {
	Local        bool // it does not leave this host
	TLS          bool
	Verified     bool // the peer's certificate and name were checked
	Certificates []Certificate
}

// Certificate is one that a connection depends on.
type Certificate struct {
	What  string
	Until time.Time
}

// Slot is a row of pg_replication_slots. What a version does not have is zero.
type Slot struct {
	Name         string      `json:"slot_name"`
	Plugin       string      `json:"plugin"`
	Type         string      `json:"slot_type"`
	Database     string      `json:"database"`
	Temporary    bool        `json:"temporary"`
	Active       bool        `json:"active"`
	PID          int         `json:"active_pid"`
	Holder       string      `json:"holder"` // application_name of the process
	Confirmed    *outbox.LSN `json:"confirmed_flush_lsn"`
	Restart      *outbox.LSN `json:"restart_lsn"`
	WALStatus    string      `json:"wal_status"`
	Safe         *int64      `json:"safe_wal_size"`
	XminAge      int64       `json:"xmin_age"`
	Retained     int64       `json:"retained"`
	Behind       int64       `json:"behind"` // from restart to confirmed
	Failover     bool        `json:"failover"`
	Synced       bool        `json:"synced"`
	Invalidation string      `json:"invalidation_reason"`
	Conflicting  bool        `json:"conflicting"`
}

// Activity is what runs on the server.
type Activity struct {
	Transactions []Transaction // those that write, the oldest first
}

// Transaction is an open transaction that has written something.
type Transaction struct {
	PID         int     `json:"pid"` // 0: prepared
	Prepared    string  `json:"gid"`
	Application string  `json:"application"`
	Database    string  `json:"database"`
	Seconds     float64 `json:"seconds"`
}

// Stats are the server's counters.
type Stats struct {
	Connections int     `json:"connections"`
	Senders     int     `json:"senders"`
	Standbys    int     `json:"standbys"`    // that stream physically
	Instances   int     `json:"instances"`   // of outflow, by host; 0: the role may not see them
	WALBytes    float64 `json:"wal_bytes"`   // since the counter was reset
	WALSeconds  float64 `json:"wal_seconds"` // so long ago
	SpillBytes  int64   `json:"spill_bytes"`
	TotalBytes  int64   `json:"total_bytes"`

	ArchiveFailing bool   `json:"archive_failing"` // the newest attempt failed
	ArchiveWAL     string `json:"archive_wal"`
	ArchiveSince   string `json:"archive_since"`

	PublicEmits bool `json:"public_emits"` // every role may write logical messages
}

// TableStats are the table's counters, those of its partitions added up.
type TableStats struct {
	Rows int64 `json:"rows"`
	Dead int64 `json:"dead"`
}

// Parked are a consumer's parked events, in the database that postgres.url names.
type Parked struct {
	Table    string  `json:"-"`
	Consumer string  `json:"name"`
	Events   int64   `json:"events"`
	Seconds  float64 `json:"seconds"` // since the oldest was parked
}

// Shared is a consumer of the stream whose instances share its partitions, in the database that postgres.url
// names.
type Shared struct {
	Table      string   `json:"-"`
	Consumer   string   `json:"name"`
	Filters    []string `json:"filters"`
	Partitions int      `json:"partitions"`
	Wanted     int      `json:"wanted"`  // partitions that it is to have; 0: no change is under way
	Barrier    uint64   `json:"barrier"` // where it happens
	Running    int      `json:"running"` // instances
	Silent     []string `json:"silent"`  // instances that neither run nor ended
	Unowned    int      `json:"unowned"` // partitions that nobody works on
	Holed      int      `json:"holed"`   // partitions whose newest done message the broker has lost
	Least      uint64   `json:"least"`   // the slowest partition is done up to here
}

// pgReader reads from PostgreSQL.
type pgReader struct {
	*reader
	conn    *pgx.Conn
	session *replication.Session
}

func (r *pgReader) close() {
	if r.session != nil {
		r.session.Close()
	}
	if r.conn != nil {
		postgres.Close(r.conn)
	}
}

// lateFrom leaves the server time to say itself that a statement takes too long, so that the connection
// survives it.
const lateFrom = 0.8

// query runs a query whose one row is a JSON document, in a transaction that may only read.
func query(ctx context.Context, conn *pgx.Conn, into any, sql string, args ...any) error {
	err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if err := limit(ctx, tx); err != nil {
			return err
		}
		var doc []byte
		if err := tx.QueryRow(ctx, sql, args...).Scan(&doc); err != nil {
			return err
		}
		return json.Unmarshal(doc, into)
	})
	return err
}

func limit(ctx context.Context, tx pgx.Tx) error {
	end, ok := ctx.Deadline()
	if !ok {
		return nil
	}
	ms := max(1, int64(lateFrom*float64(time.Until(end).Milliseconds())))
	_, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL statement_timeout = %d; SET LOCAL lock_timeout = %d", ms,
		ms))
	return err
}

// one and many make a query's rows such a document.
func one(sql string) string { return "SELECT to_jsonb(x)::text FROM (" + sql + ") x" }

func many(sql string) string {
	return "SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]')::text FROM (" + sql + ") x"
}

// most bounds each list that is read: a server may have many thousands of anything.
const most = 1000

func (r *pgReader) connect(ctx context.Context) {
	r.from(ctx, srcPostgres, func(ctx context.Context) error {
		defer wiring.WaitPostgres(ctx, r.f.Config)()
		conn, err := postgres.Connect(ctx, r.f.Config.Postgres.URL)
		if err != nil {
			return err
		}
		r.conn = conn
		r.f.Postgres, err = readServer(ctx, conn)
		if err == nil {
			err = catalog.CheckVersion(r.f.Postgres.Number)
		}
		return err
	})
	// before the replication connection is there, which counts
	r.from(ctx, srcServer, r.readStats)
	r.from(ctx, srcReplication, func(ctx context.Context) (err error) {
		r.session, err = wiring.OpenReplication(ctx, r.f.Config, r.log)
		return err
	})
}

// readServer reads what a connection says of its server.
func readServer(ctx context.Context, conn *pgx.Conn) (*Server, error) {
	c := conn.Config()
	s := &Server{Where: hostOf(conn) + "/" + c.Database}
	var clock struct {
		Now time.Time `json:"now"`
	}
	if err := query(ctx, conn, s, one(`SELECT current_setting('server_version_num')::int AS number,
		split_part(current_setting('server_version'), ' ', 1) AS version, current_user AS role, current_setting('application_name') AS name,
		(SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser,
		pg_is_in_recovery() AS in_recovery, pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS stats`),
	); err != nil {
		return nil, fmt.Errorf("read the server's version: %w", err)
	}
	// a round trip without transaction is what its time says
	asked := time.Now()
	var doc []byte
	if err := conn.QueryRow(ctx, one("SELECT clock_timestamp() AS now")).Scan(&doc); err != nil {
		return nil, fmt.Errorf("read the server's clock: %w", err)
	}
	s.RoundTrip = time.Since(asked)
	if err := json.Unmarshal(doc, &clock); err != nil {
		return nil, fmt.Errorf("read the server's clock: %w", err)
	}
	s.Clock = clock.Now.Sub(asked.Add(s.RoundTrip / 2))
	s.Link = linkOf(conn.PgConn().Conn(), c.TLSConfig, "PostgreSQL")
	return s, nil
}

// hostOf is the one of the URL's hosts that answered.
func hostOf(conn *pgx.Conn) string {
	c, at := conn.Config(), conn.PgConn().Conn().RemoteAddr()
	for _, other := range c.Fallbacks {
		if other.Host != c.Host || other.Port != c.Port {
			return at.String()
		}
	}
	return net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port)))
}

func linkOf(conn net.Conn, settings *tls.Config, of string) Link {
	l := Link{Local: isLocal(conn.RemoteAddr())}
	t, ok := conn.(*tls.Conn)
	if !ok {
		return l
	}
	l.TLS = true
	l.Verified = settings != nil && !settings.InsecureSkipVerify
	l.Certificates = certificates(of, t.ConnectionState().PeerCertificates, settings, nil)
	return l
}

// certificates are the server's own, and ours.
func certificates(of string, peer []*x509.Certificate, settings *tls.Config,
	client func() (tls.Certificate, error)) (all []Certificate) {
	for _, c := range watch.Certificates(peer, settings, client) {
		what := of + "'s certificate"
		if c.Side == "client" {
			what = "the client certificate for " + of
		}
		all = append(all, Certificate{what, c.Until})
	}
	return all
}

func isLocal(addr net.Addr) bool {
	if t, ok := addr.(*net.TCPAddr); ok {
		return t.IP.IsLoopback()
	}
	return true
}

func (r *pgReader) readStats(ctx context.Context) error {
	return query(ctx, r.conn, &r.f.Stats, one(`SELECT
		(SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database) AS connections,
		(SELECT count(*) FROM pg_stat_replication) AS senders,
		(SELECT count(*) FROM pg_stat_replication r WHERE coalesce(r.state, 'streaming') = 'streaming'
			AND r.pid NOT IN (SELECT s.active_pid FROM pg_replication_slots s
				WHERE s.slot_type = 'logical' AND s.active_pid IS NOT NULL)) AS standbys,
		(SELECT count(DISTINCT application_name) FROM pg_stat_activity
			WHERE starts_with(application_name, $2)) AS instances,
		w.wal_bytes, coalesce(extract(epoch FROM clock_timestamp() - w.stats_reset), 0) AS wal_seconds,
		coalesce(d.spill_bytes, 0) AS spill_bytes, coalesce(d.total_bytes, 0) AS total_bytes,
		coalesce(a.last_failed_time > coalesce(a.last_archived_time, '-infinity')
			AND current_setting('archive_mode') <> 'off', false) AS archive_failing,
		coalesce(a.last_failed_wal, '') AS archive_wal,
		coalesce(to_char(a.last_failed_time, 'YYYY-MM-DD HH24:MI:SS "UTC"'), '') AS archive_since,
		EXISTS (SELECT FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x
			WHERE p.proname = 'pg_logical_emit_message' AND p.pronamespace = 'pg_catalog'::regnamespace
			AND x.grantee = 0 AND x.privilege_type = 'EXECUTE') AS public_emits
		FROM pg_stat_wal w LEFT JOIN pg_stat_replication_slots d ON d.slot_name = $1, pg_stat_archiver a`),
		r.f.Config.Slot, postgres.NamePrefix(r.f.Config.Slot))
}

func (r *pgReader) readSlots(ctx context.Context) {
	r.from(ctx, srcSlots, func(ctx context.Context) (err error) {
		if r.f.Slots, err = readSlots(ctx, r.conn, r.f.Config.Slot); err != nil {
			return err
		}
		return pgx.BeginTxFunc(ctx, r.conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			if err := limit(ctx, tx); err != nil {
				return err
			}
			r.f.Readings.Slot, err = catalog.ReadSlot(ctx, tx, r.f.Config.Slot)
			return err
		})
	})
}

// readSlots reads all slots: ours first, then those that nobody reads.
func readSlots(ctx context.Context, conn *pgx.Conn, ours string) (all []Slot, err error) {
	const end = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
	return all, query(ctx, conn, &all, fmt.Sprintf(`SELECT coalesce(jsonb_agg(x.slot), '[]')::text FROM (
		SELECT to_jsonb(s) || jsonb_build_object('xmin_age', coalesce(age(s.catalog_xmin), 0),
			'retained', coalesce(greatest(%s - s.restart_lsn, 0), 0),
			'behind', coalesce(greatest(s.confirmed_flush_lsn - s.restart_lsn, 0), 0),
			'holder', coalesce(a.application_name, '')) AS slot
		FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
		ORDER BY s.slot_name <> $1, s.active, s.slot_name LIMIT %d) x`, end, most), ours)
}

func (r *pgReader) readIdentity(ctx context.Context) {
	r.from(ctx, srcReplication, func(ctx context.Context) (err error) {
		r.f.Identity, err = r.session.Server(ctx)
		r.f.Readings.Server = r.f.Identity
		return err
	})
}

func (r *pgReader) readRest(ctx context.Context) {
	r.from(ctx, srcWriter, r.readWriter)
	r.from(ctx, srcSettings, func(ctx context.Context) (err error) {
		r.f.Settings, err = readSettings(ctx, r.conn)
		return err
	})
	r.from(ctx, srcActivity, r.readActivity)
	r.from(ctx, srcTable, r.readTable)
	r.from(ctx, srcTableStats, r.readTableStats)
	r.from(ctx, srcPartitions, r.readPartitions)
	r.from(ctx, srcPublication, r.readPublication)
	r.from(ctx, srcSubscriptions, r.readSubscriptions)
	r.from(ctx, srcParked, r.readParked)
	r.from(ctx, srcMarks, r.readShared)
	r.from(ctx, srcRows, r.readRows)
}

// readWriter asks the server that heartbeats and changes of settings are written to. Behind a pooler no
// session setting may stay, and none is made.
func (r *pgReader) readWriter(ctx context.Context) error {
	cfg := r.f.Config
	target := postgres.Target{Setting: "postgres.write_url", URL: cfg.Postgres.WriteURL, Slot: cfg.Slot,
		Pooled: true}
	defer progress.Wait(ctx, "waiting for "+target.String())()
	w := replication.NewWriter(wiring.Replication(cfg, r.log))
	defer w.Close()
	if err := w.Check(ctx, r.f.Identity); err != nil {
		return err
	}
	conn, err := target.Connect(ctx)
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	r.f.Writer.Where = hostOf(conn) + "/" + conn.Config().Database
	return conn.QueryRow(ctx, "SELECT pg_catalog.pg_is_in_recovery()").Scan(&r.f.Writer.InRecovery)
}

func (r *pgReader) readTable(ctx context.Context) error {
	return r.reading(ctx, func(q catalog.Querier) error {
		l, err := wiring.Apply(ctx, r.f.Config, tableReader{r, q})
		if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" &&
			(r.o.BeforeInit || r.nothing()) {
			return nil // init makes it
		}
		if err == nil {
			l.Follow(r.f.Config, r.f.Readings.Record)
			r.f.Layout = l
		}
		return err
	})
}

func (r *pgReader) readPartitions(ctx context.Context) error {
	if !r.f.hasTable() {
		return nil
	}
	return r.reading(ctx, func(q catalog.Querier) (err error) {
		r.f.Partitions, err = partition.Look(ctx, q, r.f.Layout.Table, r.f.Config.Retain.OtherSlots)
		return err
	})
}

// nothing reports whether there is neither slot nor record: that outflow init was not run is what has to be
// said then.
func (r *pgReader) nothing() bool {
	return r.f.known(srcSlots, srcRecord) && !r.f.Readings.Slot.Exists && r.f.Readings.Record == nil
}

// reading lends out a transaction that may only read.
func (r *pgReader) reading(ctx context.Context, do func(catalog.Querier) error) error {
	return pgx.BeginTxFunc(ctx, r.conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if err := limit(ctx, tx); err != nil {
			return err
		}
		return do(tx)
	})
}

type tableReader struct {
	r *pgReader
	q catalog.Querier
}

func (t tableReader) Table(ctx context.Context) (catalog.Table, error) {
	return catalog.ReadTable(ctx, t.q, t.r.f.Config.Table)
}

func (t tableReader) Cluster(ctx context.Context) (catalog.Cluster, error) {
	c, err := catalog.ReadCluster(ctx, t.q, t.r.f.Postgres.Number, wiring.Catalog(t.r.f.Config))
	if f := outbox.FaultOf(err); f != nil && f.Code == "control_table" &&
		(t.r.o.BeforeInit || t.r.nothing()) {
		return c, nil // init makes it
	}
	return c, err
}

// settingNames are the settings that checks look at.
var settingNames = []string{
	"wal_level", "max_replication_slots", "max_wal_senders", "max_connections",
	"superuser_reserved_connections", "reserved_connections", "max_slot_wal_keep_size", "wal_segment_size",
	"idle_replication_slot_timeout", "synchronized_standby_slots", "hot_standby_feedback",
	"sync_replication_slots", "primary_slot_name", "logical_decoding_work_mem", "archive_mode",
}

func readSettings(ctx context.Context, conn *pgx.Conn) (map[string]string, error) {
	var rows []struct{ Name, Setting string }
	err := query(ctx, conn, &rows, many(`SELECT name, setting FROM pg_settings WHERE name = ANY($1)`),
		settingNames)
	all := map[string]string{}
	for _, row := range rows {
		all[row.Name] = row.Setting
	}
	return all, err
}

func (r *pgReader) readActivity(ctx context.Context) error {
	if !r.f.Postgres.Stats {
		return noRight("GRANT pg_read_all_stats TO " + postgres.Quote(r.f.Postgres.Role) +
			" (pg_monitor includes it)")
	}
	return query(ctx, r.conn, &r.f.Activity.Transactions, many(`SELECT * FROM (
		SELECT pid, '' AS gid, application_name AS application, coalesce(datname, '') AS database,
			extract(epoch FROM clock_timestamp() - xact_start) AS seconds
		FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
		UNION ALL SELECT 0, gid, '', database, extract(epoch FROM clock_timestamp() - prepared)
		FROM pg_prepared_xacts) t ORDER BY seconds DESC LIMIT 5`))
}

func (r *pgReader) readTableStats(ctx context.Context) error {
	if !r.f.hasTable() {
		return nil
	}
	// The tree is read from pg_inherits: pg_partition_tree waits for whoever has locked a partition.
	return query(ctx, r.conn, &r.f.Table, one(`WITH RECURSIVE tree AS (
			SELECT $1::oid AS relid UNION SELECT i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.relid
			JOIN pg_class p ON p.oid = t.relid AND p.relkind = 'p')
		SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint AS rows,
			coalesce(sum(pg_stat_get_dead_tuples(c.oid)), 0)::bigint AS dead
		FROM tree t JOIN pg_class c ON c.oid = t.relid WHERE c.relkind = 'r'`), r.f.Layout.Table.OID)
}

func (r *pgReader) readPublication(ctx context.Context) error {
	if r.f.Layout == nil || r.nothing() {
		return nil
	}
	return r.reading(ctx, func(q catalog.Querier) error {
		id, err := catalog.CheckPublication(ctx, q, r.f.Postgres.Number,
			wiring.Catalog(r.f.Config), r.f.Layout.Needed())
		if err != nil {
			return err
		}
		r.f.Publication.Identity, r.f.Readings.Publication = id, id
		return q.QueryRow(ctx, "SELECT puballtables FROM pg_publication WHERE pubname = $1",
			r.f.Config.Publication).Scan(&r.f.Publication.AllTables)
	})
}

// tables lists the schemas in which consumers have a table, and fails without the right to read one.
func (r *pgReader) tables(ctx context.Context, name string) (schemas []string, err error) {
	var tables []struct {
		Schema  string `json:"nspname"`
		Allowed bool   `json:"allowed"`
	}
	err = query(ctx, r.conn, &tables, many(fmt.Sprintf(`SELECT n.nspname,
			has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AS allowed
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relname = '%s' AND c.relkind = 'r' ORDER BY 1 LIMIT 16`, name)))
	for _, t := range tables {
		if !t.Allowed {
			return nil, noRight(fmt.Sprintf("GRANT SELECT ON %s TO %s",
				pgx.Identifier{t.Schema, name}.Sanitize(), postgres.Quote(r.f.Postgres.Role)))
		}
		schemas = append(schemas, t.Schema)
	}
	return schemas, err
}

// readShared reads the consumers of the stream that share their partitions, in whichever schema they have
// their tables. Those of an earlier version, without a table of instances, are left out.
func (r *pgReader) readShared(ctx context.Context) error {
	var schemas []string
	for _, table := range []string{"outflow_consumer", "outflow_mark", "outflow_member"} {
		var err error
		if schemas, err = r.tables(ctx, table); err != nil {
			return err
		}
	}
	for _, schema := range schemas {
		table := func(name string) string { return pgx.Identifier{schema, name}.Sanitize() }
		var found []Shared
		err := query(ctx, r.conn, &found, many(fmt.Sprintf(`SELECT c.name, c.filters, c.partitions,
				coalesce(c.wanted_partitions, 0) AS wanted, coalesce(c.barrier, 0) AS barrier, m.*, k.*
			FROM %s c, LATERAL (
				SELECT count(*) FILTER (WHERE expires > clock_timestamp()) AS running,
					coalesce(jsonb_agg(instance) FILTER (WHERE expires <= clock_timestamp()), '[]') AS silent
				FROM %[2]s WHERE name = c.name) m, LATERAL (
				SELECT count(*) FILTER (WHERE holed) AS holed, coalesce(min(seq), 0) AS least,
					count(*) FILTER (WHERE NOT EXISTS (SELECT FROM %[2]s o WHERE o.name = c.name
						AND o.instance = owner AND o.expires > clock_timestamp())) AS unowned
				FROM %s WHERE name = c.name AND source = 'live') k
			WHERE c.stream = %s AND c.partitions > 0 ORDER BY c.name LIMIT %d`, table("outflow_consumer"),
			table("outflow_member"), table("outflow_mark"), postgres.Literal(r.f.Config.Stream), most)))
		if err != nil {
			return err
		}
		for _, s := range found {
			s.Table = table("outflow_consumer")
			r.f.Shared = append(r.f.Shared, s)
		}
	}
	return nil
}

// readParked reads the tables of parked events of this database, in whichever schema consumers have them.
func (r *pgReader) readParked(ctx context.Context) error {
	schemas, err := r.tables(ctx, "outflow_parked")
	if err != nil {
		return err
	}
	for _, schema := range schemas {
		quoted := pgx.Identifier{schema, "outflow_parked"}.Sanitize()
		var found []Parked
		if err := query(ctx, r.conn, &found, many(fmt.Sprintf(`SELECT name, count(*) AS events,
				extract(epoch FROM clock_timestamp() - min(parked_at)) AS seconds
			FROM %s GROUP BY name ORDER BY name LIMIT %d`, quoted, most))); err != nil {
			return err
		}
		for _, p := range found {
			p.Table = quoted
			r.f.Parked = append(r.f.Parked, p)
		}
	}
	return nil
}

// Standby is a server that is to become the primary.
type Standby struct {
	*Server
	Settings map[string]string
	Slots    []Slot
	SystemID string
	Behind   int64 // bytes of WAL that it has received and not replayed, -1: not known
}

func (r *reader) readStandby(ctx context.Context) error {
	target := postgres.Target{Setting: "--standby", URL: r.o.Standby}
	defer progress.Wait(ctx, "waiting for the standby: "+target.String())()
	conn, err := target.Connect(ctx)
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	s := &Standby{Settings: map[string]string{}}
	if s.Server, err = readServer(ctx, conn); err != nil {
		return err
	}
	settings, err := readSettings(ctx, conn)
	if err != nil {
		return err
	}
	maps.Copy(s.Settings, settings)
	if s.Slots, err = readSlots(ctx, conn, r.f.Config.Slot); err != nil {
		return err
	}
	var more struct {
		System string `json:"system"`
		Behind int64  `json:"behind"`
	}
	if err := query(ctx, conn, &more, one(`SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system,
		coalesce(greatest(pg_last_wal_receive_lsn() - pg_last_wal_replay_lsn(), 0), -1) AS behind`)); err != nil {
		return err
	}
	s.SystemID, s.Behind = more.System, more.Behind
	r.f.Standby = s
	return nil
}
