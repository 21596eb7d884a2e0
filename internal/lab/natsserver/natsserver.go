// Package natsserver runs NATS servers with JetStream, for the tests, and for outflow-lab demo, torture and
// bench: inside this process (Start), as a child process that can be killed and frozen (StartProcess), or
// several of those as a cluster (StartCluster).
package natsserver

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/freeport"
)

const (
	startTimeout   = 3 * time.Minute // recovery of streams on a busy machine
	connectTimeout = time.Minute
	pollInterval   = 50 * time.Millisecond
	portTries      = 10
)

// Options say which server to start.
type Options struct {
	Dir        string // where JetStream keeps its files; must be set
	Port       int    // on 127.0.0.1; 0: a free one
	Name       string // of the server; "": one that the server makes up
	MaxPayload int    // bytes; 0: the server's default of 1 MiB
	SyncAlways bool   // fsync before each acknowledgement
	Password   string // of clients and of the cluster's nodes; URL holds it. "": a random one
	Open       bool   // no password is asked for. For tests

	// SyncInterval is how often what was written is synced to disk. 0: the server's default of 2 minutes.
	SyncInterval time.Duration
	Monitor      int     // port on 127.0.0.1 of the server's monitoring pages; 0: none
	Cluster      *Routes // nil: the server stands alone

	// changes whatever else, last; nil: nothing. Not for a process of its own
	Tune func(*server.Options) `json:"-"`
}

// Routes make a server a node of a cluster. Its Name must be unique there.
type Routes struct {
	Cluster string   // its name, the same for all nodes
	Port    int      // on 127.0.0.1, where other nodes connect
	Nodes   []string // host:port of all nodes' routes; the node's own may be among them
}

// Server is a running NATS server. Its methods may be called from any goroutine.
type Server struct {
	Port int // on 127.0.0.1
	s    *server.Server
	user *url.Userinfo // nil: none is asked for
}

// user is as whom clients and nodes log in.
func (o *Options) user() *url.Userinfo {
	if o.Open {
		return nil
	}
	if o.Password == "" {
		o.Password = rand.Text()
	}
	return url.UserPassword("outflow", o.Password)
}

// Start starts a server and returns when it accepts connections.
func Start(o Options) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("a NATS server needs a folder for JetStream")
	}
	user := o.user()
	port := o.Port
	for try := 1; ; try++ {
		if o.Port == 0 {
			var err error
			if port, err = freeport.Port(); err != nil {
				return nil, err
			}
		}
		s, err := startAt(o, port, user)
		if err == nil || o.Port != 0 || try == portTries {
			return s, err
		}
	}
}

func startAt(o Options, port int, user *url.Userinfo) (*Server, error) {
	options := &server.Options{
		Host: "127.0.0.1", Port: port, ServerName: o.Name,
		JetStream: true, StoreDir: o.Dir, SyncAlways: o.SyncAlways, SyncInterval: o.SyncInterval,
		NoLog: true, NoSigs: true,
		// A client may stand still for seconds while it connects.
		AuthTimeout: connectTimeout.Seconds(), TLSTimeout: connectTimeout.Seconds(),
		DisableShortFirstPing: true,
	}
	if o.Monitor != 0 {
		options.HTTPHost, options.HTTPPort = "127.0.0.1", o.Monitor
	}
	if r := o.Cluster; r != nil {
		options.Cluster = server.ClusterOpts{Name: r.Cluster, Host: "127.0.0.1", Port: r.Port}
		for _, address := range r.Nodes {
			options.Routes = append(options.Routes, &url.URL{Scheme: "nats", User: user, Host: address})
		}
	}
	if user != nil {
		options.Username, options.Password = user.Username(), o.Password
		options.Cluster.Username, options.Cluster.Password = user.Username(), o.Password
	}
	if o.MaxPayload > 0 {
		options.MaxPayload = int32(o.MaxPayload)
	}
	if o.Tune != nil {
		o.Tune(options)
	}
	s, err := server.NewServer(options)
	if err != nil {
		return nil, fmt.Errorf("NATS server: %w", err)
	}
	fatal := make(fatalLog, 1)
	s.SetLoggerV2(fatal, false, false, false)
	s.Start() // returns, with what went wrong in the log
	if err := ready(s, fatal); err != nil {
		s.Shutdown()
		s.WaitForShutdown()
		return nil, fmt.Errorf("the NATS server at 127.0.0.1:%d with files in %s did not start: %w", port,
			o.Dir, err)
	}
	return &Server{port, s, user}, nil
}

func ready(s *server.Server, fatal <-chan error) error {
	for waited := time.Duration(0); waited < startTimeout; waited += pollInterval {
		select {
		case err := <-fatal:
			return err
		default:
			if s.ReadyForConnections(pollInterval) {
				return nil
			}
		}
	}
	return fmt.Errorf("not ready within %v", startTimeout)
}

// fatalLog keeps the first of the server's fatal messages and drops all others.
type fatalLog chan error

func (l fatalLog) Fatalf(format string, args ...any) {
	select {
	case l <- fmt.Errorf(format, args...):
	default:
	}
}

func (fatalLog) Errorf(string, ...any)  {}
func (fatalLog) Warnf(string, ...any)   {}
func (fatalLog) Noticef(string, ...any) {}
func (fatalLog) Debugf(string, ...any)  {}
func (fatalLog) Tracef(string, ...any)  {}

// URL returns the address for clients, with the password.
func (s *Server) URL() string {
	scheme, host, _ := strings.Cut(s.s.ClientURL(), "://")
	return (&url.URL{Scheme: scheme, User: s.user, Host: host}).String()
}

// Embedded returns the server itself.
func (s *Server) Embedded() *server.Server { return s.s }

// Shutdown stops the server as SIGTERM would and returns when it has ended and its port is free.
func (s *Server) Shutdown() {
	s.s.Shutdown()
	s.s.WaitForShutdown()
	freeport.Closed(s.Port)
}
