package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxSenderTimeout is the wal_sender_timeout that the replication connection asks for where the server's is longer or off: so
// long may a slot stay held by an outflow that is gone.
const maxSenderTimeout = 10 * time.Second

// minVersion is the oldest server version, as in server_version_num.
const minVersion = 140000

// Session is one replication connection and an ordinary one to the same server. Its methods may be called from any goroutine.
type Session struct {
	cfg Config
	log *slog.Logger

	turn chan struct{} // holds one token: who has it uses conn, and the replication connection until that streams
	conn *pgx.Conn     // ordinary

	unwatch func() // ends the watch over conn; of who has the token
	repl    *pgconn.PgConn
	from    *handover // what repl reads through
	wire    *wire     // below it, and below TLS

	version       int
	serverTimeout time.Duration // wal_sender_timeout as the server has it
	timeout       time.Duration // as it is on the replication connection; 0: off
	identity      identity      // as last read over the replication connection

	walEnd atomic.Uint64 // the server's, as last read

	mu     sync.Mutex
	stream *stream // nil before Start
	closed bool
}

// identity is what only the replication connection tells.
type identity struct {
	systemID, database string
	history            relay.History
}

// farBehind is how far behind the server's end of WAL, in bytes, latency does not count.
const farBehind = 1 << 20

// Open connects to the server. It takes as long as connecting does: give it a context with a deadline.
func Open(ctx context.Context, cfg Config) (_ *Session, err error) {
	s := &Session{cfg: cfg, log: cfg.logger(), turn: make(chan struct{}, 1), unwatch: func() {}}
	c, err := parseConfig("postgres.url", cfg.URL)
	if err != nil {
		return nil, err
	}
	pin(&c.Config)
	// A URL with several hosts, or a name with several addresses, must take both connections to one server: names are looked up
	// once, and the second connection dials no other address than the first ended at.
	route := &route{dial: c.DialFunc, lookup: c.LookupFunc, known: map[string][]string{}}
	c.DialFunc, c.LookupFunc = route.first, route.resolve

	r := c.Config.Copy()
	r.DialFunc = dialWire(r.DialFunc, func(w *wire) { s.wire = w })
	r.RuntimeParams["replication"] = "database"
	r.BuildFrontend = func(src io.Reader, w io.Writer) *pgproto3.Frontend {
		s.from = newHandover(src)
		return pgproto3.NewFrontend(s.from, w)
	}
	r.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		s.log.Warn("notice from the server", "code", n.Code, "notice", n.Message)
	}
	if s.repl, err = pgconn.ConnectConfig(ctx, r); err != nil {
		return nil, connectFault(nameOf("postgres.url", cfg.URL), err)
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err = asStored(ctx, s.repl); err != nil {
		return nil, err
	}
	c.DialFunc = route.again
	if s.conn, err = pgx.ConnectConfig(ctx, c); err != nil {
		return nil, connectFault(nameOf("postgres.url", cfg.URL), err)
	}
	if err = s.meet(ctx); err != nil {
		return nil, err
	}
	s.turn <- struct{}{}
	return s, nil
}

// meet makes sure that both connections ended at the same server, and that it is one that can be used.
func (s *Session) meet(ctx context.Context) error {
	// A standby has the same system identifier as its primary; only the start time tells them apart.
	const who = "SELECT pg_postmaster_start_time()::text"
	rows, err := simpleQuery(ctx, s.repl, who+`, current_setting('server_version_num'), current_setting('wal_level'),
		(SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'), pg_is_in_recovery()::text`)
	if err != nil {
		return fmt.Errorf("read the server's settings: %w", err)
	}
	var started string
	if err := s.conn.QueryRow(ctx, who).Scan(&started); err != nil {
		return fmt.Errorf("read the server's start time: %w", err)
	}
	if rows[0][0] != started {
		return errors.New("the two connections of postgres.url ended at different servers")
	}
	if s.version, err = strconv.Atoi(rows[0][1]); err != nil {
		return fmt.Errorf("read the server's version: %w", err)
	}
	if err := checkVersion(s.version); err != nil {
		return err
	}
	if err := checkWALLevel(rows[0][2]); err != nil && rows[0][4] == "false" {
		return err
	}
	ms, err := strconv.Atoi(rows[0][3])
	if err != nil {
		return fmt.Errorf("read wal_sender_timeout: %w", err)
	}
	s.serverTimeout = time.Duration(ms) * time.Millisecond
	if s.timeout = s.serverTimeout; s.timeout == 0 || s.timeout > maxSenderTimeout {
		s.timeout = maxSenderTimeout
		set := fmt.Sprintf("SET wal_sender_timeout = %d", maxSenderTimeout.Milliseconds())
		if _, err := s.repl.Exec(ctx, set).ReadAll(); err != nil {
			return fmt.Errorf("set wal_sender_timeout: %w", err)
		}
	}
	return s.identify(ctx)
}

// simpleQuery runs a query over the replication connection, which takes the simple protocol only, and wants one row at least.
func simpleQuery(ctx context.Context, c *pgconn.PgConn, sql string) ([][]string, error) {
	results, err := c.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) == 0 {
		return nil, fmt.Errorf("%q gave no row", sql)
	}
	rows := make([][]string, len(results[0].Rows))
	for i, r := range results[0].Rows {
		for _, v := range r {
			rows[i] = append(rows[i], string(v))
		}
	}
	return rows, nil
}

// take waits for the ordinary connection; the function that it returns gives it back.
func (s *Session) take(ctx context.Context) (func(), error) {
	select {
	case <-s.turn:
		s.unwatch()
		return s.giveBack, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the connection to PostgreSQL: %w", ctx.Err())
	}
}

// giveBack ends what take began. From Start on somebody always looks at the ordinary connection: who uses it, or else the watch.
func (s *Session) giveBack() {
	if st := s.streaming(); st != nil {
		s.unwatch = watch(s.conn.PgConn(), st)
	}
	s.turn <- struct{}{}
}

// watch ends the stream when the connection ends, on which nothing is expected. The server is stopping then, or gone, or somebody has
// ended this connection alone; in any case the session can't go on.
func watch(conn *pgconn.PgConn, st *stream) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		for ctx.Err() == nil {
			if err := conn.WaitForNotification(ctx); err != nil && ctx.Err() == nil {
				st.fail(fmt.Errorf("the ordinary connection ended: %w", err))
				return
			}
		}
	}()
	return func() {
		cancel()
		<-over
	}
}

// streaming returns the stream, or nil before Start.
func (s *Session) streaming() *stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream
}

// Batches returns the channel of what the server sends, in order. It is closed when the stream ends; Err then says why. It may be
// used only after Start. Release each batch before waiting for the next one: only so many buffers exist.
func (s *Session) Batches() <-chan *relay.Batch { return s.streaming().batches }

// Confirm records that everything up to lsn may be forgotten by the server. It only records; the next status carries it, within
// 100 ms. A value below an earlier one changes nothing, one beyond [Session.Received] is sent as far as was received. It may be
// used only after Start.
func (s *Session) Confirm(lsn outbox.LSN) { s.streaming().confirm(lsn) }

// Received returns the highest LSN that the stream has reached: where it was started, or what a message or keepalive brought.
func (s *Session) Received() outbox.LSN {
	if st := s.streaming(); st != nil {
		return outbox.LSN(st.received.Load())
	}
	return 0
}

// Err returns why the stream ended, nil while it runs or before Start.
func (s *Session) Err() error {
	if st := s.streaming(); st != nil {
		return st.failure()
	}
	return nil
}

// Stop ends the session cleanly: it sends a last status, tells the server that this is the end and waits until the server has
// taken note, for as long as ctx allows. What the server still sends is thrown away. The session is closed in any case.
func (s *Session) Stop(ctx context.Context) error {
	var err error
	if st := s.streaming(); st != nil {
		err = st.stop(ctx)
	}
	s.Close()
	return err
}

// Close ends the session at once. It may be called more than once, and during any other call.
func (s *Session) Close() {
	s.mu.Lock()
	st, first := s.stream, !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		return
	}
	if st != nil {
		st.close()
	}
	// A query that is under way ends when its connection is closed under it.
	hangUp := func(c net.Conn) { c.Close() } //nolint:errcheck // it is closed whatever this says
	if s.conn != nil {
		s.quit(s.conn.PgConn(), hangUp)
	}
	if s.repl != nil && st == nil {
		s.quit(s.repl, hangUp)
	}
}

// quit closes a connection: with a goodbye if nobody is using it, else by force.
func (s *Session) quit(c *pgconn.PgConn, hangUp func(net.Conn)) {
	select {
	case <-s.turn:
		s.unwatch()
		defer func() { s.turn <- struct{}{} }()
	default:
		hangUp(c.Conn())
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if c.Close(ctx) != nil {
		hangUp(c.Conn())
	}
}

// route takes the second connection to where the first one ended.
type route struct {
	dial   pgconn.DialFunc
	lookup pgconn.LookupFunc
	known  map[string][]string

	mu   sync.Mutex // pgconn cancels a query from a goroutine of its own, which dials again
	addr string     // network and address that was dialled last for the first connection
}

func (r *route) resolve(ctx context.Context, host string) ([]string, error) {
	if a, ok := r.known[host]; ok {
		return a, nil
	}
	a, err := r.lookup(ctx, host)
	if err == nil {
		r.known[host] = a
	}
	return a, err
}

func (r *route) first(ctx context.Context, network, addr string) (net.Conn, error) {
	r.mu.Lock()
	r.addr = network + " " + addr
	r.mu.Unlock()
	return r.dial(ctx, network, addr)
}

func (r *route) again(ctx context.Context, network, addr string) (net.Conn, error) {
	r.mu.Lock()
	same := network+" "+addr == r.addr
	r.mu.Unlock()
	if !same {
		return nil, errors.New("not the server of the replication connection")
	}
	return r.dial(ctx, network, addr)
}
