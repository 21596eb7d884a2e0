package sink

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/natscontext"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

const (
	connectTimeout = 2 * time.Second // to each server of the list
	writeTimeout   = ackTimeout      // a write that takes as long as an acknowledgement may take has failed
	maxIncoming    = 16384           // not handled yet; with more the connection is given up
)

// Conn is one connection to NATS. It never reconnects: when it is lost, the session that owns it opens
// another one. Its methods may be called from any goroutine.
type Conn struct {
	cfg    Config
	enc    *encoder
	nc     *nats.Conn
	dialer *dialer
	api    *jsapi.Client // set once, by Connect
	level  int           // of JetStream's API
	inbox  string        // acknowledgements come back on inbox + sequence

	*stream.Stream // reads and creates Config.Stream over this connection

	// Acknowledgements, and what others publish to the ingress, in the order in which the server sent them.
	incoming chan *nats.Msg

	publisher atomic.Pointer[Publisher]

	lost     chan struct{}
	lostOnce sync.Once
	err      error // why it was lost; written before lost is closed

	mu     sync.Mutex
	config *stream.Config // as last read by CheckStream or EnsureStream; nil: there is no stream
}

// Connect opens the connection and checks the server: its version, and that it has JetStream. Errors hold no
// secrets.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	enc, err := newEncoder(cfg)
	if err != nil {
		return nil, err
	}
	c := &Conn{
		cfg: cfg, enc: enc, incoming: make(chan *nats.Msg, maxIncoming), lost: make(chan struct{}),
		dialer: &dialer{ctx: ctx},
	}
	if err := c.dial(ctx); err != nil {
		if cause := c.dialer.tlsErr(); cause != nil {
			err = fmt.Errorf("TLS handshake: %w", cause)
		}
		return nil, c.connectFault(ctx, err)
	}
	if err := c.handshake(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Encode lets publishers that are made from now on make their messages as cfg says, of which more is known
// once the table was read than when the connection was opened. No publisher may be being made meanwhile.
func (c *Conn) Encode(cfg Config) (err error) {
	c.enc, err = newEncoder(cfg.withDefaults())
	return err
}

func (c *Conn) dial(ctx context.Context) error {
	opts, err := c.options(ctx)
	if err != nil {
		return err
	}
	// nats.go knows no context: what is dialled is closed when it ends, which ends the handshake.
	stop := context.AfterFunc(ctx, c.dialer.close)
	defer stop()
	if c.cfg.Context == "" {
		server := c.cfg.URL
		if server == "" {
			server = nats.DefaultURL
		}
		if c.nc, err = nats.Connect(server, opts...); err == nil {
			c.use("")
		}
		return err
	}
	var settings natscontext.Settings
	c.nc, settings, err = natscontext.Connect(c.cfg.Context, opts...)
	if err != nil {
		return err
	}
	prefix := settings.JSAPIPrefix
	if prefix == "" && settings.JSDomain != "" {
		prefix = "$JS." + settings.JSDomain + ".API"
	}
	c.use(prefix)
	return nil
}

// use sets the client of JetStream's API.
func (c *Conn) use(prefix string) {
	api := jsapi.New(c.nc, prefix)
	api.Lost = c.Err
	c.mu.Lock()
	defer c.mu.Unlock()
	c.api, c.Stream = api, stream.New(api, c.cfg.Stream, c.cfg.Logger)
}

// maxFile is the greatest size of a file with a login or certificates, in bytes.
const maxFile = 1 << 20

// checkFiles refuses files that nats.go could wait for without an end, such as a pipe that nobody writes to:
// it opens them without a limit of time or size, and again at each connection. What can't be found it says
// itself.
func (c *Conn) checkFiles() error {
	for _, f := range []struct{ setting, name string }{
		{"nats.creds", c.cfg.Creds}, {"nats.nkey", c.cfg.NKey}, {"nats.context", c.cfg.Context},
		{"nats.tls.ca", c.cfg.TLS.CA}, {"nats.tls.cert", c.cfg.TLS.Cert}, {"nats.tls.key", c.cfg.TLS.Key},
	} {
		info, err := os.Stat(f.name) //nolint:gosec // the operator names it
		switch {
		case f.name == "" || err != nil:
		case !info.Mode().IsRegular() && !(f.setting == "nats.context" && info.IsDir()):
			return fatal("nats_credentials", fmt.Sprintf("%s: %s is no regular file", f.setting, f.name),
				"Name a file: it is read again at each connection.", nil)
		case info.Size() > maxFile:
			return fatal("nats_credentials", fmt.Sprintf("%s: %s has %d bytes, %d are allowed", f.setting,
				f.name, info.Size(), maxFile), "Name the file that was meant.", nil)
		}
	}
	return nil
}

// options builds the options of nats.go. They come behind a context's own, so those that are only defaults
// look at what is there.
func (c *Conn) options(ctx context.Context) ([]nats.Option, error) {
	if err := c.checkFiles(); err != nil {
		return nil, err
	}
	timeout := connectTimeout
	if end, ok := ctx.Deadline(); ok {
		timeout = max(min(timeout, time.Until(end)), time.Millisecond)
	}
	opts := []nats.Option{
		nats.Name(c.cfg.Name),
		nats.NoReconnect(),
		nats.NoEcho(), // see Watch
		nats.Timeout(timeout),
		nats.SkipHostLookup(), // the dialer must know the name that a certificate is for
		nats.ClosedHandler(func(nc *nats.Conn) { c.fail(c.lostFault(nc.LastError())) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { c.asyncError(err) }),
		func(o *nats.Options) error {
			if c.cfg.URL != "" {
				o.Servers = strings.Split(c.cfg.URL, ",")
				for i := range o.Servers {
					o.Servers[i] = strings.TrimSpace(o.Servers[i])
				}
			}
			if c.cfg.InboxPrefix != "" {
				o.InboxPrefix = c.cfg.InboxPrefix
			} else if o.InboxPrefix == "" {
				o.InboxPrefix = defaultInbox
			}
			c.dialer.next, c.dialer.timeout, c.dialer.opts = o.CustomDialer, timeout, o
			o.CustomDialer = c.dialer
			// they are for reconnecting, and their addresses are in no certificate
			o.IgnoreDiscoveredServers = true
			return nil
		},
	}
	if c.cfg.Creds != "" {
		opts = append(opts, nats.UserCredentials(c.cfg.Creds))
	}
	if c.cfg.NKey != "" {
		o, err := nats.NkeyOptionFromSeed(c.cfg.NKey)
		if err != nil {
			return nil, fatal("nats_credentials", fmt.Sprintf("nats.nkey: file %s can't be used", c.cfg.NKey),
				"Name a file that holds a user's seed.", scrub(err, c.cfg))
		}
		opts = append(opts, o)
	}
	if c.cfg.User != "" {
		opts = append(opts, nats.UserInfo(c.cfg.User, c.cfg.Password))
	}
	if c.cfg.Token != "" {
		opts = append(opts, nats.Token(c.cfg.Token))
	}
	if c.cfg.TLS.CA != "" {
		opts = append(opts, nats.RootCAs(c.cfg.TLS.CA))
	}
	if c.cfg.TLS.Cert != "" || c.cfg.TLS.Key != "" {
		opts = append(opts, nats.ClientCert(c.cfg.TLS.Cert, c.cfg.TLS.Key))
	}
	return opts, nil
}

// handshake checks the server and subscribes to the acknowledgements. The answer to its request also says
// that the server knows the subscription: they go over the wire in this order.
func (c *Conn) handshake(ctx context.Context) error {
	if strings.HasPrefix(c.nc.ConnectedUrl(), "ws") {
		return fatal("nats_url", "the connection to NATS goes through WebSocket, which Outflow cannot use",
			"Name a server with nats:// or tls:// in nats.url or in the context.", nil)
	}
	if v := c.nc.ConnectedServerVersion(); !atLeast(v, 2, 10, 23) {
		return fatal("nats_version", fmt.Sprintf("nats-server %s at %s is too old", v,
			c.nc.ConnectedUrlRedacted()),
			"Install 2.10.23 or later: earlier ones can lose whole streams.", nil)
	}
	c.inbox = c.nc.NewInbox() + "."
	if _, err := c.nc.ChanSubscribe(c.inbox+"*", c.incoming); err != nil {
		return c.lostFault(err)
	}
	go c.handleIncoming()
	var info struct {
		jsapi.Answer
		API struct {
			Level int `json:"level"`
		} `json:"api"`
	}
	err := c.api.Ask(ctx, "INFO", nil, &info)
	c.level = info.API.Level
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeJetStreamNotEnabled,
		jetstream.JSErrCodeJetStreamNotEnabledForAccount),
		// In a cluster, and behind a leaf node, it may be that those with JetStream are away for the moment.
		errors.Is(err, nats.ErrNoResponders) && c.nc.ConnectedClusterName() == "":
		return fatal("nats_jetstream", fmt.Sprintf("the server at %s has no JetStream for this account",
			c.nc.ConnectedUrlRedacted()),
			"Enable JetStream in the server and for the account, or name the right domain in the context.",
			err)
	}
	return err
}

// atLeast compares a server's version; suffixes such as -beta.1 are passed over.
func atLeast(version string, want ...int) bool {
	version, _, _ = strings.Cut(version, "-")
	for i, s := range strings.SplitN(version, ".", 3) {
		n, err := strconv.Atoi(s)
		if err != nil || n < want[i] {
			return false
		}
		if n > want[i] {
			return true
		}
	}
	return strings.Count(version, ".") == 2
}

// NATS returns the connection, for others who speak over it in the same session.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// API returns the client of JetStream's API, in the domain of the context.
func (c *Conn) API() *jsapi.Client { return c.api }

// Lost is closed when the connection is gone or can't be used any more; Err says why.
func (c *Conn) Lost() <-chan struct{} { return c.lost }

// Err is nil until Lost is closed.
func (c *Conn) Err() error {
	select {
	case <-c.lost:
		return c.err
	default:
		return nil
	}
}

// Close ends the connection at once. It waits for nothing: what was published and not written is dropped.
func (c *Conn) Close() {
	c.fail(transient("closed", "the connection to NATS was closed", nil))
	c.dialer.close() // first, so that nobody who is stuck in a write keeps nats.go from closing
	c.nc.Close()
}

// handleIncoming handles what comes in, in order, until the connection is lost: an acknowledgement counts
// only once the foreign messages before it have been seen.
func (c *Conn) handleIncoming() {
	defer crash.Guard()
	for {
		select {
		case <-c.lost:
			return
		case m := <-c.incoming:
			if c.Err() != nil { // a foreign message before it may have ended the connection
				return
			}
			if strings.HasPrefix(m.Subject, c.inbox) {
				c.handleAck(m)
			} else {
				c.handleForeign(m)
			}
		}
	}
}

func (c *Conn) fail(err error) {
	c.lostOnce.Do(func() {
		c.err = err
		close(c.lost)
	})
	if p := c.publisher.Load(); p != nil {
		p.signal()
	}
}

// asyncError takes what the server reports outside of any answer. Everything ends the session, except that
// where a request of ours is forbidden only the request ends.
func (c *Conn) asyncError(err error) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		c.fail(transient("nats_error", "NATS reports an error", scrub(err, c.cfg)))
		return
	}
	denied := fatal("nats_permission", "NATS forbids what Outflow needs",
		"Give its user the permissions that docs/nats.md lists.", err)
	if c.mayNotWatch(err) {
		return
	}
	c.mu.Lock()
	api := c.api // nil while Connect is under way
	c.mu.Unlock()
	if api != nil && api.Forbidden(err, denied) {
		return
	}
	c.fail(denied)
}

func (c *Conn) lostFault(err error) *outbox.Fault {
	if err == nil {
		err = nats.ErrConnectionClosed
	}
	return transient("nats_lost", "the connection to NATS is lost", scrub(err, c.cfg))
}

// CodeConnect is the code of the transient fault of a NATS server that can't be reached.
const CodeConnect = "nats_connect"

// connectFault says what a failure to connect means.
func (c *Conn) connectFault(ctx context.Context, err error) error {
	if f := outbox.FaultOf(err); f != nil {
		return f
	}
	clean := scrub(err, c.cfg)
	var (
		unknownCA x509.UnknownAuthorityError
		wrongHost x509.HostnameError
		badCert   *tls.CertificateVerificationError
		op        *net.OpError
	)
	switch {
	case ctx.Err() != nil:
		return transient(CodeConnect, "connect to NATS", context.Cause(ctx))
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired),
		errors.Is(err, nats.ErrAuthRevoked),
		errors.Is(err, nats.ErrAccountAuthExpired), errors.Is(err, nats.ErrNkeyButNoSigCB),
		errors.Is(err, nats.ErrNoUserCB):
		return fatal("nats_auth", "NATS refuses the credentials", "Check nats.creds, nats.nkey, nats.user "+
			"with its password, nats.token or the context, and the server's accounts.", clean)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fatal("nats_tls", "the server offers no TLS", "Give it a certificate, or, where nobody can "+
			"listen, say nats:// in nats.url and set nothing of nats.tls.", clean)
	case errors.As(err, &unknownCA), errors.As(err, &wrongHost), errors.As(err, &badCert),
		errors.Is(err, nats.ErrSecureConnRequired):
		return fatal("nats_tls", "no TLS connection to NATS can be made",
			"Check nats.tls: ca must hold the certificate that signed the server's.", clean)
	case errors.Is(err, nats.ErrNoServers), errors.As(err, &op), errors.Is(err, nats.ErrTimeout):
		if cause := c.dialer.dialErr(); cause != nil && !c.dialer.dialled() {
			clean = scrub(cause, c.cfg)
		}
		f := transient(CodeConnect, "NATS can't be reached", clean)
		f.Hint = "See that it runs, and that host and port are right"
		return f
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission), c.cfg.Context != "" &&
		!c.dialer.dialled():
		return fatal("nats_credentials", "the settings for the connection to NATS can't be used",
			"Check the context, and the files that the settings under nats name.", clean)
	}
	return transient(CodeConnect, "connect to NATS", clean)
}
