package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
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
		r.session, err = wiring.Inspect(ctx, r.f.Config, r.log)
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
	s.Link = linkOf(conn.PgConn().Conn(), c.TLSConfig)
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

func linkOf(conn net.Conn, settings *tls.Config) Link {
	l := Link{Local: isLocal(conn.RemoteAddr())}
	t, ok := conn.(*tls.Conn)
	if !ok {
		return l
	}
	l.TLS = true
	l.Verified = settings != nil && !settings.InsecureSkipVerify
	l.Certificates = certificates("PostgreSQL", t.ConnectionState().PeerCertificates, settings, nil)
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

// readStats counts an instance that waits by its address: its name has the code in the host's place.
func (r *pgReader) readStats(ctx context.Context) error {
	return query(ctx, r.conn, &r.f.Stats, one(`SELECT
		(SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database) AS connections,
		(SELECT count(*) FROM pg_stat_replication) AS senders,
		(SELECT count(*) FROM pg_stat_replication r WHERE coalesce(r.state, 'streaming') = 'streaming'
			AND r.pid NOT IN (SELECT s.active_pid FROM pg_replication_slots s
				WHERE s.slot_type = 'logical' AND s.active_pid IS NOT NULL)) AS standbys,
		(SELECT count(DISTINCT application_name) FILTER (WHERE NOT waits)
				+ count(DISTINCT host) FILTER (WHERE waits AND alone) FROM (
			SELECT application_name, waits, host, bool_and(waits) OVER (PARTITION BY host) AS alone FROM (
				SELECT application_name, starts_with(application_name, $3) AS waits,
					coalesce(host(client_addr), '') AS host FROM pg_stat_activity
				WHERE starts_with(application_name, $2) OR starts_with(application_name, $3)
			) a) b) AS instances,
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
		r.f.Config.Slot, postgres.NamePrefix(r.f.Config.Slot), postgres.WaitsPrefix(r.f.Config.Slot))
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
		Command: cfg.Command, Pooled: true}
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
