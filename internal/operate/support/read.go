package support

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// openFile does not wait for the other end of a pipe.
func openFile(name string) (*os.File, error) {
	return os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

func readUpTo(r io.Reader, most int64) ([]byte, error) { return io.ReadAll(io.LimitReader(r, most)) }

// readLog reads the last whole lines of the log.
func (g *gathering) readLog() error {
	f, err := openFile(g.o.LogFile)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("it is not a regular file")
	}
	from := max(0, info.Size()-maxLog)
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return err
	}
	text, err := readUpTo(f, maxLog)
	if err != nil {
		return err
	}
	if from > 0 { // the line in which it begins may be the second half of a secret
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	// a log that was truncated while it was written begins so
	if text = bytes.TrimLeft(text, "\x00"); bytes.IndexByte(text, 0) >= 0 {
		return errors.New("it is not text, in which secrets could be recognised: unpack it first, " +
			"or write it as UTF-8")
	}
	g.add("log.txt", text, true, nil)
	return nil
}

// readPages asks the outflow that runs on this host for its pages. What answers may be another program.
func (g *gathering) readPages(ctx context.Context) {
	if g.o.Pages == "" {
		return
	}
	// no proxy of the environment: it is this host that is asked
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(path string) (text []byte, err error) {
		g.timed(ctx, func(ctx context.Context) {
			var request *http.Request
			request, err = http.NewRequestWithContext(ctx, http.MethodGet, g.o.Pages+path, nil)
			if err != nil {
				return
			}
			var answer *http.Response
			if answer, err = client.Do(request); err != nil {
				return
			}
			defer answer.Body.Close()
			text, err = readUpTo(answer.Body, 2*maxFile)
		})
		return text, err
	}
	text, err := get("/status.json")
	var status struct {
		Outflow json.RawMessage `json:"outflow"`
	}
	if err == nil && (json.Unmarshal(text, &status) != nil || status.Outflow == nil) {
		err = fmt.Errorf("what answers at %s is not outflow", g.o.Pages)
	}
	if err != nil {
		g.add("process", nil, false, err)
		return
	}
	var indented bytes.Buffer
	err = json.Indent(&indented, text, "", "  ")
	g.add("process/status.json", indented.Bytes(), true, err)
	text, err = get("/metrics")
	g.add("process/metrics.txt", text, false, err)
	text, err = get("/readyz")
	g.add("process/readyz.txt", text, true, err)
}

// settings are those of the server that matter to Outflow. None of them holds a secret.
var settings = []string{
	"server_version", "server_encoding", "wal_level", "max_wal_senders", "max_replication_slots",
	"max_slot_wal_keep_size", "wal_keep_size", "wal_segment_size", "max_wal_size", "min_wal_size",
	"checkpoint_timeout", "wal_sender_timeout", "wal_compression", "logical_decoding_work_mem",
	"idle_replication_slot_timeout", "synchronized_standby_slots", "sync_replication_slots",
	"hot_standby_feedback", "hot_standby", "synchronous_commit", "synchronous_standby_names",
	"max_connections",
	"superuser_reserved_connections", "reserved_connections", "track_commit_timestamp", "archive_mode",
	"max_prepared_transactions", "max_standby_streaming_delay", "data_checksums", "fsync", "full_page_writes",
	"ssl", "autovacuum", "max_worker_processes", "shared_buffers", "tcp_keepalives_idle",
}

// queries are what is read from PostgreSQL, each a JSON document. $1 is the slot, $2 the publication.
var queries = []struct{ name, sql string }{
	{"postgres/server.json", `SELECT jsonb_build_object('version', version(), 'role', current_user,
		'database', current_database(), 'in_recovery', pg_is_in_recovery(), 'started', pg_postmaster_start_time(),
		'clock', clock_timestamp(), 'role_attributes', (SELECT to_jsonb(r) FROM (SELECT rolsuper, rolreplication,
			rolbypassrls, rolconnlimit FROM pg_roles WHERE rolname = current_user) r),
		'wal_end', CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)`},
	{"postgres/slot.json", `SELECT jsonb_build_object(
		'pg_replication_slots', (SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = $1),
		'pg_stat_replication_slots',
			(SELECT to_jsonb(s) FROM pg_stat_replication_slots s WHERE slot_name = $1),
		'pg_stat_replication', (SELECT to_jsonb(r) FROM pg_stat_replication r JOIN pg_replication_slots s
			ON s.active_pid = r.pid WHERE s.slot_name = $1),
		'slots_of_the_server', (SELECT count(*) FROM pg_replication_slots))`},
	{"postgres/publication.json", `SELECT jsonb_build_object(
		'pg_publication', (SELECT to_jsonb(p) FROM pg_publication p WHERE pubname = $2),
		'pg_publication_tables', (SELECT coalesce(jsonb_agg(to_jsonb(t)), '[]') FROM (SELECT * FROM
			pg_publication_tables WHERE pubname = $2 ORDER BY schemaname, tablename LIMIT 1000) t))`},
}

// column is a column of the table as the archive has it: without the expressions of defaults.
type column struct {
	Name      string `json:"name"`
	Type      string `json:"type"`
	NotNull   bool   `json:"not_null"`
	Generated bool   `json:"generated"`
	Default   bool   `json:"default"`
	Identity  bool   `json:"identity"`
}

// readPostgres reads what PostgreSQL says of server, slot, publication and table. Of the table it reads the
// definition alone.
func (g *gathering) readPostgres(ctx context.Context) {
	var conn *pgx.Conn
	g.timed(ctx, func(ctx context.Context) {
		var err error
		if conn, err = postgres.Connect(ctx, g.cfg.Postgres.URL); err != nil {
			g.add("postgres", nil, true, late(ctx, err))
		}
	})
	if conn == nil {
		return
	}
	defer postgres.Close(conn)
	for _, q := range queries {
		g.query(ctx, conn, q.name, func(ctx context.Context, tx pgx.Tx) (any, error) {
			var doc json.RawMessage
			// both parameters have a type wherever they stand
			sql := "WITH arguments AS (SELECT $1::text, $2::text) " + q.sql
			err := tx.QueryRow(ctx, sql, g.cfg.Slot, g.cfg.Publication).Scan(&doc)
			return doc, err
		})
	}
	g.query(ctx, conn, "postgres/settings.json", func(ctx context.Context, tx pgx.Tx) (any, error) {
		var doc json.RawMessage
		err := tx.QueryRow(ctx, `SELECT coalesce(jsonb_object_agg(name, to_jsonb(s) - 'name'), '{}') FROM
			(SELECT name, reset_val AS value, unit, source, pending_restart FROM pg_settings
				WHERE name = ANY($1)) s`, settings).Scan(&doc)
		return doc, err
	})
	if !g.cfg.Source.Rows() {
		return
	}
	g.query(ctx, conn, "postgres/table.json", func(ctx context.Context, tx pgx.Tx) (any, error) {
		t, err := catalog.ReadTable(ctx, tx, g.cfg.Table)
		if err != nil {
			return nil, err
		}
		columns := []column{}
		for _, c := range t.Columns {
			columns = append(columns,
				column{c.Name, c.TypeName, c.NotNull, c.Generated, c.Default, c.Identity})
		}
		return map[string]any{"schema": t.Schema, "name": t.Name, "partitioned": t.Partitioned,
			"unlogged": t.Unlogged, "columns": columns}, nil
	})
}

// query reads a file in a transaction that may only read.
func (g *gathering) query(ctx context.Context, conn *pgx.Conn, name string,
	read func(ctx context.Context, tx pgx.Tx) (any, error)) {
	g.timed(ctx, func(ctx context.Context) {
		var value any
		reading := pgx.TxOptions{AccessMode: pgx.ReadOnly}
		err := pgx.BeginTxFunc(ctx, conn, reading, func(tx pgx.Tx) (err error) {
			// the server ends what takes too long a little before, so that the connection survives
			if _, err = tx.Exec(ctx, fmt.Sprintf("SET LOCAL statement_timeout = %d",
				max(1, g.o.Timeout.Milliseconds()*4/5))); err == nil {
				value, err = read(ctx, tx)
			}
			return err
		})
		if err != nil {
			value, err = nil, late(ctx, err)
		}
		g.json(name, value, err)
	})
}

// late is why something failed: that it took too long, if so.
func late(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// raw is an answer of JetStream's API as it came.
type raw struct {
	jsapi.Answer
	doc json.RawMessage
}

func (r *raw) UnmarshalJSON(doc []byte) error {
	r.doc = bytes.Clone(doc)
	return json.Unmarshal(doc, &r.Answer)
}

// readNATS reads what NATS says of server, account, stream, consumers and checkpoint record.
func (g *gathering) readNATS(ctx context.Context) {
	sc, err := wiring.Broker(g.cfg, g.o.Log)
	if err != nil {
		g.add("nats", nil, true, err)
		return
	}
	dial, cancel := context.WithTimeoutCause(ctx, g.o.Timeout, fmt.Errorf("no answer within %v", g.o.Timeout))
	defer cancel()
	conn, err := wiring.Connect(dial, g.cfg, sc)
	if err != nil {
		g.add("nats", nil, true, late(dial, err))
		return
	}
	defer conn.Close()
	nc := conn.NATS()
	asked := time.Now()
	err = nc.FlushWithContext(dial)
	g.json("nats/server.json", map[string]any{
		"version": nc.ConnectedServerVersion(), "server_name": nc.ConnectedServerName(),
		"host":    nc.ConnectedAddr(),
		"cluster": nc.ConnectedClusterName(), "max_payload": nc.MaxPayload(), "tls": nc.TLSRequired(),
		"round_trip_ms": float64(time.Since(asked).Microseconds()) / 1000,
	}, err)
	for _, r := range []struct{ name, method string }{
		{"nats/account.json", "INFO"},
		{"nats/stream.json", "STREAM.INFO." + g.cfg.Stream},
		{"nats/bucket.json", "STREAM.INFO.KV_outflow-" + g.cfg.Stream},
		{"nats/consumers.json", "CONSUMER.LIST." + g.cfg.Stream},
	} {
		g.timed(ctx, func(ctx context.Context) {
			var answer raw
			if err := conn.API().Ask(ctx, r.method, nil, &answer); err != nil {
				g.add(r.name, nil, true, late(ctx, err))
				return
			}
			var text bytes.Buffer
			err := json.Indent(&text, answer.doc, "", "  ")
			g.add(r.name, text.Bytes(), false, err)
		})
	}
	store := wiring.Store(g.cfg, conn)
	g.timed(ctx, func(ctx context.Context) {
		record, revision, err := wiring.SessionStore(g.cfg, conn).Load(ctx)
		switch {
		case err != nil:
			g.add("nats/record.json", nil, true, late(ctx, err))
		case record == nil:
			g.add("nats/record.json", nil, true, errors.New("there is no checkpoint record"))
		default:
			g.json("nats/record.json", map[string]any{"revision": revision,
				"record": withoutConditions(record)}, nil)
		}
	})
	g.timed(ctx, func(ctx context.Context) {
		switch end, err := store.LastEnd(ctx); {
		case err != nil:
			g.add("nats/ended.json", nil, true, late(ctx, err))
		case end != nil: // else it did not end at a fault, or another one has gone on
			g.json("nats/ended.json", end, nil)
		}
	})
}
