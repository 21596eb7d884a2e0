package replication

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Writer writes ticks, changes of settings and watermarks into the WAL, over a connection of its own that it
// opens when needed, and again after an error. Its methods may be called from any goroutine; they wait for
// each other.
//
// Where it has an address of its own it may go through a pooler, which takes no startup parameters and gives
// the session to others. So nothing is pinned then: the SQL names the schema of all that it calls and has no
// operators, and means the same whatever search_path is.
type Writer struct {
	cfg Config

	mu     sync.Mutex
	conn   *pgx.Conn // nil: none is open
	closed bool
}

// NewWriter returns a writer for cfg.WriteURL, or cfg.URL if that is empty. It connects at the first call.
func NewWriter(cfg Config) *Writer { return &Writer{cfg: cfg} }

// Tick writes a tick. Give it a context with a deadline: the server may be gone without a word.
func (w *Writer) Heartbeat(ctx context.Context) error {
	if err := w.emit(ctx, relay.HeartbeatPrefix, ""); err != nil {
		return fmt.Errorf("write a tick: %w", err)
	}
	return nil
}

// Change writes a change of the ordering settings of this slot's outflow. After an error it is unknown
// whether it was written.
func (w *Writer) Change(ctx context.Context, s relay.Settings) error {
	if err := w.emit(ctx, relay.SettingsPrefix, s.Content(w.cfg.Slot)); err != nil {
		return fmt.Errorf("write a change of settings: %w", err)
	}
	return nil
}

// Watermark writes what this home says of itself into the control table, without which it may not be called.
func (w *Writer) Watermark(ctx context.Context, mark relay.Watermark) error {
	if err := w.emit(ctx, relay.WatermarkPrefix, mark.Content()); err != nil {
		return fmt.Errorf("write a watermark: %w", err)
	}
	return nil
}

// ClusterRow writes what this cluster says to the others into the control table, not later than until, by the
// server's clock: then the error is ErrLate. After any other error it is not known whether it was written, or
// still will be by then.
func (w *Writer) ClusterRow(ctx context.Context, row relay.ClusterRow, until time.Time) error {
	if err := w.control(ctx, relay.ClusterPrefix, row.Content(), until); err != nil {
		return fmt.Errorf("write a cluster row (%v): %w", row.Kind, err)
	}
	return nil
}

// Check makes sure that what is written arrives in the WAL of that server and database.
func (w *Writer) Check(ctx context.Context, server relay.ServerState) error {
	is := postgres.Database{System: server.SystemID, Name: server.Database}
	err := w.do(ctx, func(c *pgx.Conn) error { return is.Check(ctx, c, "write_url", "postgres.write_url") })
	if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
		return nil // a platform that hides it
	}
	return err
}

// Close closes the connection. It waits for a call that is under way.
func (w *Writer) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.disconnect()
}

// Disconnect closes the connection until the next call, and waits for one that is under way.
func (w *Writer) Disconnect() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.disconnect()
}

func (w *Writer) disconnect() {
	if w.conn != nil {
		postgres.Close(w.conn)
		w.conn = nil
	}
}

// control writes a row of the control table, in place of the one before it: each is of use only as an insert
// in the WAL. It says what emit would say, to those as well to whom the table is replicated. After until,
// unless that is zero, nothing is written: the server's clock is read before, and decides.
func (w *Writer) control(ctx context.Context, prefix, content string, until time.Time) error {
	schema, name, err := catalog.SplitTable(w.cfg.Control)
	if err != nil {
		return err
	}
	outboxSchema, outboxName, err := catalog.SplitTable(w.cfg.Table)
	if err != nil {
		return err
	}
	table, outbox := pgx.Identifier{schema, name}.Sanitize(), outboxSchema+"."+outboxName
	err = w.do(ctx, func(c *pgx.Conn) error {
		if w.cfg.Cluster != 0 {
			return w.replaceOwn(ctx, c, table, outbox, prefix, content, until)
		}
		_, err := c.Exec(ctx, `WITH gone AS (
				DELETE FROM `+table+` WHERE outbox OPERATOR(pg_catalog.=) $1::pg_catalog.text
			)
			INSERT INTO `+table+` (outbox, prefix, content)
			SELECT $1::pg_catalog.text, $2::pg_catalog.text, $3::pg_catalog.text
			FROM (SELECT pg_catalog.set_config('synchronous_commit', 'local', true) OFFSET 0) s`,
			outbox, prefix, content)
		return err
	})
	if postgres.SQLState(err) == stateReadOnly {
		return writeStandby(err)
	}
	return err
}

// replaceOwn writes a row in place of the one that this outflow of this cluster wrote before. Those of others
// stay: they replace them themselves, and a row that two clusters delete is a conflict on both. The delete
// comes first, as the row has the same key, and as it may wait for a lock; then the clock is read.
func (w *Writer) replaceOwn(ctx context.Context, c *pgx.Conn, table, outbox, prefix, content string,
	until time.Time) error {
	var by *time.Time
	if !until.IsZero() {
		var now time.Time
		if err := c.QueryRow(ctx, "SELECT pg_catalog.clock_timestamp()").Scan(&now); err != nil {
			return err
		}
		now = now.Add(time.Until(until)) // it was read before, so this is not later than until
		by = &now
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%d %q %q", w.cfg.Cluster, w.cfg.Slot, outbox))
	done, err := c.Exec(ctx, `WITH gone AS (
			DELETE FROM `+table+` WHERE id OPERATOR(pg_catalog.=) $4::pg_catalog.text::pg_catalog.uuid
			RETURNING id
		)
		INSERT INTO `+table+` (id, outbox, prefix, content)
		SELECT $4::pg_catalog.text::pg_catalog.uuid, $1::pg_catalog.text, $2::pg_catalog.text,
			$3::pg_catalog.text
		FROM (SELECT pg_catalog.count(*) AS n FROM gone) g,
			(SELECT pg_catalog.set_config('synchronous_commit', 'local', true) OFFSET 0) s
		WHERE g.n OPERATOR(pg_catalog.<=) 1 AND ($5::pg_catalog.timestamptz IS NULL
			OR pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<) $5::pg_catalog.timestamptz)`,
		outbox, prefix, content, hex.EncodeToString(key[:16]), by)
	if err == nil && done.RowsAffected() == 0 {
		return ErrLate
	}
	return err
}

// stateReadOnly is that of a write to a standby.
const stateReadOnly = "25006"

func writeStandby(err error) error {
	return &outbox.Fault{
		Class: outbox.Transient, Code: "write_standby",
		Message: "the server that ticks are written to is a standby and takes no writes",
		Hint:    "Point postgres.write_url at the primary", Err: err,
	}
}

// emit writes a transactional logical message. The setting is for its own transaction only: no replica needs
// to have a tick before it is decoded, and behind a pooler a setting of the session would stay with somebody
// else.
func (w *Writer) emit(ctx context.Context, prefix, content string) error {
	if w.cfg.Control != "" {
		return w.control(ctx, prefix, content, time.Time{})
	}
	var lsn *string
	err := w.do(ctx, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
				ELSE pg_catalog.pg_logical_emit_message(true, $1::pg_catalog.text,
				$2::pg_catalog.text)::pg_catalog.text END
			FROM (SELECT pg_catalog.set_config('synchronous_commit', 'local', true) OFFSET 0) s`, prefix, content).Scan(&lsn)
	})
	if err == nil && lsn == nil {
		return writeStandby(nil)
	}
	return err
}

func (w *Writer) target() postgres.Target {
	if w.cfg.WriteURL == "" || w.cfg.WriteURL == w.cfg.URL {
		return w.cfg.Target()
	}
	return postgres.Target{Setting: "postgres.write_url", URL: w.cfg.WriteURL, Slot: w.cfg.Slot,
		Command: w.cfg.Command, Pooled: true}
}

func (w *Writer) do(ctx context.Context, f func(*pgx.Conn) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return ErrClosed
	}
	if w.conn == nil {
		conn, err := w.target().Connect(ctx)
		if err != nil {
			return err
		}
		w.conn = conn
	}
	err := f(w.conn)
	if err != nil {
		w.disconnect()
	}
	return err
}
