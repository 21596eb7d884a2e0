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

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/socket"
)

// maxSenderTimeout is the wal_sender_timeout that the replication connection asks for where the server's is
// longer or off: so long may a slot stay held by an outflow that is gone.
const maxSenderTimeout = 10 * time.Second

// Session is one replication connection and an ordinary one to the same server, or, of [Inspect], one that is
// both. Its methods may be called from any goroutine.
type Session struct {
	cfg Config
	log *slog.Logger

	// connLock holds one token. Whoever has taken it owns conn and unwatch, and repl until that streams.
	connLock chan struct{}
	conn     *pgx.Conn // ordinary; what repl is part of, where that is both
	unwatch  func()    // ends the watch over conn

	repl   *pgconn.PgConn
	frames *frameReader // what repl reads through
	socket *socket.Conn // below it, and below TLS

	// the server was a standby when the session began: what it sends is of the timeline that is kept only if
	// it says so afterwards
	recovering bool

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
func Open(ctx context.Context, cfg Config) (*Session, error) {
	return open(ctx, cfg, func(s *Session) error { return s.connect(ctx) })
}

// Inspect is Open for a caller that only asks and never starts the stream. One connection answers everything:
// in replication mode it takes SQL too, by the simple protocol. A second one would cost the server a process.
func Inspect(ctx context.Context, cfg Config) (*Session, error) {
	return open(ctx, cfg, func(s *Session) (err error) {
		s.conn, err = cfg.Target().Connect(ctx, func(c *pgx.ConnConfig) {
			takeCommands(c)
			c.OnNotice = s.notice
		})
		if err == nil {
			s.repl = s.conn.PgConn()
		}
		return err
	})
}

func open(ctx context.Context, cfg Config, connect func(*Session) error) (_ *Session, err error) {
	s := &Session{cfg: cfg, log: cfg.logger(), connLock: make(chan struct{}, 1), unwatch: func() {}}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err = connect(s); err != nil {
		return nil, err
	}
	if err = s.handshake(ctx); err != nil {
		return nil, err
	}
	s.connLock <- struct{}{}
	return s, nil
}

func (s *Session) notice(_ *pgconn.PgConn, n *pgconn.Notice) {
	s.log.Warn("notice from the server", "code", n.Code, "notice", n.Message)
}

// opening marks the context in which the replication connection is dialled.
type opening struct{}

// connect opens both connections.
func (s *Session) connect(ctx context.Context) (err error) {
	server, pin := s.cfg.Target(), &hostPin{known: map[string][]string{}}
	s.repl, err = server.ConnectReplication(context.WithValue(ctx, opening{}, true), func(c *pgconn.Config) {
		dial := c.DialFunc
		pin.lead(c)
		own := socket.Wrap(c.DialFunc, func(conn *socket.Conn) { s.socket = conn })
		c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if ctx.Value(opening{}) == nil { // pgconn gives a connection up, in a goroutine of its own
				return dial(ctx, network, addr)
			}
			return own(ctx, network, addr)
		}
		c.BuildFrontend = func(src io.Reader, w io.Writer) *pgproto3.Frontend {
			s.frames = newFrameReader(src)
			return pgproto3.NewFrontend(s.frames, w)
		}
		c.OnNotice = s.notice
	})
	if err != nil {
		return err
	}
	if err = postgres.KeepBytes(ctx, s.repl); err != nil {
		return err
	}
	rows, err := postgres.SimpleQuery(ctx, s.repl, "SELECT pg_is_in_recovery()::text")
	if err != nil {
		return fmt.Errorf("ask whether the server is a standby: %w", err)
	}
	s.recovering = rows[0][0] == "true"
	s.conn, err = server.Connect(ctx, func(c *pgx.ConnConfig) {
		pin.follow(&c.Config)
		if s.recovering {
			takeCommands(c)
		}
	})
	return err
}

// takeCommands makes a connection one that takes replication commands too, and SQL by the simple protocol.
func takeCommands(c *pgx.ConnConfig) {
	c.RuntimeParams["replication"] = "database"
	c.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
}

// handshake makes sure that both connections ended at the same server, and that it is one that can be used.
func (s *Session) handshake(ctx context.Context) error {
	// A standby has the same system identifier as its primary; only the start time tells them apart.
	const who = "SELECT pg_postmaster_start_time()::text"
	// An interval is read as the setting is shown, such as 1min; pg_settings would make rows of all settings.
	rows, err := postgres.SimpleQuery(ctx, s.repl, who+`, current_setting('server_version_num'), current_setting('wal_level'),
		(extract(epoch FROM current_setting('wal_sender_timeout')::interval) * 1000)::int::text,
		pg_is_in_recovery()::text`)
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
	if err := catalog.CheckVersion(s.version); err != nil {
		return err
	}
	if err := catalog.CheckWALLevel(rows[0][2]); err != nil && rows[0][4] == "false" {
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

// lock waits for the ordinary connection; the function that it returns gives it back.
func (s *Session) lock(ctx context.Context) (func(), error) {
	select {
	case <-s.connLock:
		s.unwatch()
		return s.unlock, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the connection to PostgreSQL: %w", ctx.Err())
	}
}

// unlock ends what lock began. From Start on, whoever doesn't use the ordinary connection lets the watch have
// it.
func (s *Session) unlock() {
	if st := s.streaming(); st != nil {
		s.unwatch = watch(s.conn.PgConn(), st)
	}
	s.connLock <- struct{}{}
}

// watch ends the stream when the connection ends, on which nothing is expected. The server is stopping then,
// or gone, or somebody has ended this connection alone; in any case the session can't go on.
func watch(conn *pgconn.PgConn, st *stream) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer crash.Guard()
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

// Batches returns the channel of what the server sends, in order. It is closed when the stream ends; Err then
// says why. It may be used only after Start. Release each batch before waiting for the next one: only so many
// buffers exist.
func (s *Session) Batches() <-chan *relay.Batch { return s.streaming().batches }

// Confirm records that everything up to lsn may be forgotten by the server. It only records; the next status
// carries it, within 100 ms. A value below an earlier one changes nothing, one beyond [Session.Received] is
// sent as far as was received. It may be used only after Start.
func (s *Session) Confirm(lsn outbox.LSN) { s.streaming().confirm(lsn) }

// Received returns the highest LSN that the stream has reached: where it was started, or what a message or
// keepalive brought.
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

// Stop ends the session cleanly: it sends a last status, tells the server that this is the end and waits
// until the server has taken note, for as long as ctx allows. What the server still sends is thrown away. The
// session is closed in any case.
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
	if s.conn != nil {
		s.closeConn(s.conn.PgConn())
	}
	if s.repl != nil && st == nil {
		s.closeConn(s.repl)
	}
}

// closeConn closes a connection: with a goodbye if nobody is using it. Otherwise it aborts it, and a query
// that is under way ends.
func (s *Session) closeConn(c *pgconn.PgConn) {
	abort := func() { c.Conn().Close() } //nolint:errcheck // it is closed whatever this says
	select {
	case <-s.connLock:
		s.unwatch()
		defer func() { s.connLock <- struct{}{} }()
	default:
		abort()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if c.Close(ctx) != nil {
		abort()
	}
}

// hostPin takes the second connection to the server where the first one ended: a URL may hold several hosts,
// and a name may have several addresses. Names are looked up once, and the second connection dials no address
// but the one that the first dialled last.
type hostPin struct {
	known map[string][]string // addresses by host; connecting is sequential, so nothing guards it

	mu   sync.Mutex // pgconn cancels a query from a goroutine of its own, which dials again
	addr string     // network and address that was dialled last for the first connection
}

// lead makes c the configuration of the first connection.
func (p *hostPin) lead(c *pgconn.Config) {
	c.LookupFunc = p.lookup(c.LookupFunc)
	dial := c.DialFunc
	c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		p.mu.Lock()
		p.addr = network + " " + addr
		p.mu.Unlock()
		return dial(ctx, network, addr)
	}
}

// follow makes c the configuration of the second connection.
func (p *hostPin) follow(c *pgconn.Config) {
	c.LookupFunc = p.lookup(c.LookupFunc)
	dial := c.DialFunc
	c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		p.mu.Lock()
		same := network+" "+addr == p.addr
		p.mu.Unlock()
		if !same {
			return nil, errors.New("not the server of the replication connection")
		}
		return dial(ctx, network, addr)
	}
}

func (p *hostPin) lookup(lookup pgconn.LookupFunc) pgconn.LookupFunc {
	return func(ctx context.Context, host string) ([]string, error) {
		if a, ok := p.known[host]; ok {
			return a, nil
		}
		a, err := lookup(ctx, host)
		if err == nil {
			p.known[host] = a
		}
		return a, err
	}
}
