package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/outbox"
)

// CatchUp says when a backlog is read by SQL, and remembers what speaks against it. One serves all sessions of a process.
type CatchUp struct {
	above int64 // bytes of WAL

	patience  time.Duration // for all that comes before the first chunk
	rowsPerTx float64       // with more a backlog is streamed
	limits    chunkLimits

	// Of tests: called when the copy is ready to be read, and when a chunk was asked for.
	copied  func(*backlog)
	reading func()

	mu    sync.Mutex
	until outbox.LSN // what lies before it is streamed: reading it by SQL has failed once
	said  string     // why a backlog was streamed last
}

const (
	// preparing is how long the decision may take: the sample comes from a decoder that has to go through what the slot retains.
	preparing = 4 * time.Second
	// largeTx is how many rows a transaction may have on average for SQL to be the faster way. See docs/decisions/0017.
	largeTx = 10
	// sampled is the number of pgoutput's messages that the sample is of, or more: the server ends it with a transaction.
	sampled = 2000
)

// NewCatchUp makes backlogs of more than so many bytes of WAL be read by SQL; 0: none.
func NewCatchUp(above int64) *CatchUp {
	return &CatchUp{above: above, patience: preparing, rowsPerTx: largeTx, limits: defaultLimits}
}

// streamed is why a backlog is streamed: a choice, and no failure.
type streamed string

func (s streamed) Error() string { return string(s) }

var errSmall = streamed("it is small")

// failed takes note of an attempt that failed after the slot was held.
func (c *CatchUp) failed(upTo outbox.LSN) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = max(c.until, upTo)
}

// speaksAgainst says what keeps a backlog behind from from being read by SQL.
func (c *CatchUp) speaksAgainst(from outbox.LSN) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if from < c.until {
		return errSmall // it was said when it failed
	}
	return nil
}

// say logs why a backlog is streamed, each reason once in a row.
func (c *CatchUp) say(log *slog.Logger, why error) {
	if why == errSmall {
		return
	}
	c.mu.Lock()
	again := c.said == reason(why)
	c.said = reason(why)
	c.mu.Unlock()
	if again {
		return
	}
	var choice streamed
	if errors.As(why, &choice) {
		log.Info("the backlog is streamed rather than read by SQL", "why", why)
		return
	}
	log.Warn("the backlog can't be read by SQL; it is streamed", "err", why)
}

// reason is what two errors of one cause have in common.
func reason(err error) string {
	if code := sqlState(err); code != "" {
		return code
	}
	return err.Error()
}

// prepareBacklog decides how what lies behind from is read. It returns nil if that is to be streamed, else a connection with a copy of
// the slot that stands at from, and is ready to be read up to its upTo, where the stream is to start.
func (s *Session) prepareBacklog(ctx context.Context, from outbox.LSN, binary bool) *backlog {
	c := s.cfg.CatchUp
	if c == nil || c.above <= 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	b, err := s.openBacklog(ctx, from, binary)
	if err != nil {
		c.say(s.log, err)
		return nil
	}
	c.mu.Lock()
	c.said = ""
	c.mu.Unlock()
	return b
}

func (s *Session) openBacklog(ctx context.Context, from outbox.LSN, binary bool) (*backlog, error) {
	if err := s.cfg.CatchUp.speaksAgainst(from); err != nil {
		return nil, err
	}
	upTo, err := s.worthIt(ctx, from)
	if err != nil {
		return nil, err
	}
	b := &backlog{upTo: upTo, pos: from, why: s.cfg.CatchUp, log: s.log, passed: make(chan struct{}), over: make(chan struct{})}
	if err = b.connect(ctx, s); err == nil {
		err = b.copySlot(ctx, s, from)
	}
	if err == nil {
		err = b.sample(ctx, s.cfg, binary)
	}
	if err == nil {
		err = b.takeOver()
	}
	if err != nil {
		if b.pg != nil {
			b.hangUp()
		}
		return nil, err
	}
	if copied := s.cfg.CatchUp.copied; copied != nil {
		copied(b)
	}
	s.log.Info("reading the backlog by SQL", "from", from, "up_to", upTo, "bytes", outbox.Distance(from, upTo),
		"rows_per_transaction", b.rowsPerTx, "copy", b.slot)
	return b, nil
}

// worthIt says up to where there is a backlog that is large enough, of a slot that a copy can stand for.
func (s *Session) worthIt(ctx context.Context, from outbox.LSN) (upTo outbox.LSN, err error) {
	var end, status string
	var active, waits bool
	// A slot with failover waits for the standbys that the setting names; a copy has no failover, so it would not.
	err = s.conn.QueryRow(ctx, `SELECT CASE WHEN pg_is_in_recovery() THEN '0/0' ELSE pg_current_wal_flush_lsn() END::text,
			active, coalesce(wal_status, ''), coalesce((to_jsonb(s)->>'failover')::boolean, false)
				AND coalesce(current_setting('synchronized_standby_slots', true), '') <> ''
		FROM pg_replication_slots s WHERE slot_name = $1`, s.cfg.Slot).Scan(&end, &active, &status, &waits)
	if err != nil {
		return 0, fmt.Errorf("read slot %s: %w", s.cfg.Slot, err)
	}
	if upTo, err = outbox.ParseLSN(end); err != nil {
		return 0, fmt.Errorf("read the end of WAL: %w", err)
	}
	switch {
	case active:
		return 0, errSmall // Start says so
	case upTo == 0:
		return 0, streamed("the server is a standby")
	case outbox.Distance(from, upTo) <= uint64(s.cfg.CatchUp.above):
		return 0, errSmall
	case status != "reserved" && status != "extended":
		return 0, streamed("the slot's WAL is about to be removed")
	case waits:
		return 0, streamed("the slot waits for standbys (synchronized_standby_slots), and a copy of it would not")
	}
	return upTo, nil
}

// connect opens a further connection to the session's server.
func (b *backlog) connect(ctx context.Context, s *Session) error {
	c := s.again.Copy()
	var last atomic.Pointer[wire] // each address may be tried more than once, with TLS and without; a request to cancel dials as well
	c.DialFunc = dialWire(c.DialFunc, func(w *wire) { last.Store(w) })
	c.BuildFrontend = func(src io.Reader, w io.Writer) *pgproto3.Frontend {
		b.from = newHandover(src)
		return pgproto3.NewFrontend(b.from, w)
	}
	c.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		b.log.Warn("notice from the server", "code", n.Code, "notice", n.Message)
		b.noticed = true
	}
	var err error
	if b.pg, err = pgconn.ConnectConfig(ctx, c); err != nil {
		return connectFault(err)
	}
	b.wire = last.Load()
	if err := asStored(ctx, b.pg); err != nil {
		return err
	}
	rows, err := simpleQuery(ctx, b.pg, startedWhen+backlogSettings)
	if err == nil && rows[0][0] != s.started {
		err = errors.New("it is another server than that of the stream")
	}
	if err != nil {
		return fmt.Errorf("a connection to read by SQL: %w", err)
	}
	// Where it can't look, the server does not notice an outflow that is gone before it sends.
	_, err = b.pg.Exec(ctx, "SET client_connection_check_interval = '500ms'").ReadAll()
	if err != nil && sqlState(err) == "" {
		return fmt.Errorf("a connection to read by SQL: %w", err)
	}
	return nil
}

// backlogSettings are columns of a query that pin what could end a chunk, and keep one in memory. Not every version has each setting.
const backlogSettings = `, (SELECT count(set_config(name, value, false)) FROM pg_settings JOIN (VALUES
		('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'), ('idle_session_timeout', '0'),
		('idle_in_transaction_session_timeout', '0'), ('work_mem', '65536')) v(setting_name, value) ON name = setting_name)::text`

// copySlot makes the copy and lets it stand where the stream would have started.
func (b *backlog) copySlot(ctx context.Context, s *Session, from outbox.LSN) error {
	suffix := fmt.Sprintf("_catch_up_%d", b.pg.PID())
	b.slot = s.cfg.Slot[:min(len(s.cfg.Slot), 63-len(suffix))] + suffix
	name := literal(b.slot)
	_, err := simpleQuery(ctx, b.pg, fmt.Sprintf("SELECT pg_copy_logical_replication_slot(%s, %s, true)", literal(s.cfg.Slot), name))
	if err != nil {
		return fmt.Errorf("copy slot %s: %w", s.cfg.Slot, err)
	}
	stands := func() (at outbox.LSN, err error) {
		rows, err := simpleQuery(ctx, b.pg, `SELECT coalesce(confirmed_flush_lsn, '0/0'), coalesce(restart_lsn, '0/0')
			FROM pg_replication_slots WHERE slot_name = `+name)
		if err == nil {
			at, err = outbox.ParseLSN(rows[0][0])
		}
		if err == nil {
			b.restart, err = outbox.ParseLSN(rows[0][1])
		}
		if err != nil {
			return 0, fmt.Errorf("read the copy of slot %s: %w", s.cfg.Slot, err)
		}
		return at, nil
	}
	at, err := stands()
	if err == nil && 0 < at && at < from {
		if _, err = simpleQuery(ctx, b.pg, fmt.Sprintf("SELECT pg_replication_slot_advance(%s, '%v')", name, from)); err != nil {
			return fmt.Errorf("move the copy of slot %s: %w", s.cfg.Slot, err)
		}
		at, err = stands()
	}
	if err == nil && (at == 0 || at > from) {
		err = fmt.Errorf("a copy of slot %s stands beyond where the stream would start", s.cfg.Slot)
	}
	return err
}

// sample looks at how the backlog begins. Many small transactions are read faster by SQL: a walsender sends each message by itself.
// Large ones are not, and each is a chunk that the server makes whole before it sends any of it.
func (b *backlog) sample(ctx context.Context, cfg Config, binary bool) error {
	for _, o := range pluginOptions(cfg, binary) {
		b.options += ", " + text(o[0]) + ", " + text(o[1])
	}
	rows, err := simpleQuery(ctx, b.pg, `SELECT count(*) FILTER (WHERE get_byte(data, 0) = ascii('C')), count(*) FILTER (WHERE get_byte(data, 0) IN (ascii('I'), ascii('M'))),
			count(*), coalesce(sum(length(data)), 0)
		FROM pg_logical_slot_peek_binary_changes`+b.arguments(b.upTo, sampled))
	if ctx.Err() != nil {
		return streamed("a sample of it takes long")
	}
	if err != nil {
		return fmt.Errorf("look at the backlog: %w", err)
	}
	if b.noticed {
		return streamed("the server had something to say about a sample of it")
	}
	var commits, changes, messages, size int
	if _, err := fmt.Sscan(strings.Join(rows[0], " "), &commits, &changes, &messages, &size); err != nil {
		return fmt.Errorf("look at the backlog: %w", err)
	}
	if commits == 0 {
		return streamed("there is nothing of the outbox in it")
	}
	if b.rowsPerTx = float64(changes) / float64(commits); b.rowsPerTx > cfg.CatchUp.rowsPerTx {
		return streamed("its transactions are large")
	}
	b.size = newChunkSize(cfg.CatchUp.limits, size/messages, b.pos, b.restart)
	return nil
}
