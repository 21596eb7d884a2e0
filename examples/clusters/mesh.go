package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

const (
	clusters = 3
	// how clusters go on for one another: the values of cluster.mode
	shared, islands = "shared", "islands"
	// patience is how long a condition may take that should hold in a moment.
	patience = 3 * time.Minute
)

// mesh is all clusters, and what connects them.
type mesh struct {
	options
	story *story

	dir   string
	all   []*cluster
	links map[[2]int]*faultproxy.Proxy // from where to where rows go, clusters by their numbers

	beside sync.WaitGroup // writers and relays
	typing atomic.Int64   // writers
	enough chan struct{}  // closed: writers end
	failed chan error     // of whatever runs beside the acts; has room for one
}

// cluster is a PostgreSQL and a NATS server, with an Outflow for each home. Its number is from 1.
type cluster struct {
	number int
	nats   *natsserver.Process
	pg     *pgserver.Server
	url    string
	homes  []*outflow // for the stream of each home
	conn   *nats.Conn
	js     jetstream.JetStream

	written atomic.Int64 // events that its writers have committed
	streams []*tally     // what is read here of the stream of each home
	relayed *tally       // and of what the naive relays publish
}

// raise starts servers and replication, makes the streams, and starts an Outflow for each home on each
// cluster.
func (m *mesh) raise(ctx context.Context) (err error) {
	found, err := newEnough(pgserver.Installations())
	if err != nil {
		return err
	}
	if m.dir, err = os.MkdirTemp("", "outflow-clusters-"); err != nil {
		return err
	}
	// PostgreSQL refuses root, so it may run as another user, who must be able to enter.
	if err = os.Chmod(m.dir, 0o755); err != nil { //nolint:gosec // what is secret in it has its own mode
		return err
	}
	m.story.say("three PostgreSQL %s and three NATS, for the moment", found.Version)
	if err = m.startNATS(); err != nil {
		return err
	}
	if err = m.each(func(c *cluster) error { return c.start(ctx, found, m.dir, m.natsAt(c)) }); err != nil {
		return err
	}
	for _, c := range m.all {
		for home := range clusters {
			o, err := newOutflow(m, c, home+1)
			if err != nil {
				return err
			}
			c.homes = append(c.homes, o)
		}
	}
	m.story.say("tables and publications: outflow init at each home")
	var first []string
	if m.mode == islands { // which wants the subscriptions, and they want the tables
		first = []string{"OUTFLOW_CLUSTER_MODE=none"}
	}
	if err = m.each(func(c *cluster) error { return c.home().init(ctx, first...) }); err != nil {
		return err
	}
	m.story.say("six subscriptions, origin = none, each through a link that can be cut")
	if err = m.subscribe(ctx); err != nil {
		return err
	}
	m.story.say("outflow init on each cluster for its own stream, and then for those of the others")
	for _, own := range []bool{true, false} {
		if err = m.each(func(c *cluster) error {
			for _, o := range c.homes {
				if (o.home == c.number) == own {
					if err := o.init(ctx); err != nil {
						return err
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	for _, c := range m.all {
		if err = c.startOutflows(); err != nil {
			return err
		}
	}
	for home := 1; m.mode == shared && home <= clusters; home++ {
		if _, _, err = m.owner(ctx, home, 0, home); err != nil {
			return err
		}
	}
	m.story.say("nine outflow run: each home publishes its own events, two others stand by for it")
	return nil
}

// newEnough is a server that knows origin = none.
func newEnough(all []pgserver.Installation) (pgserver.Installation, error) {
	all = slices.DeleteFunc(all, func(i pgserver.Installation) bool { return i.Major < 16 })
	if len(all) == 0 {
		return pgserver.Installation{}, errors.New("no PostgreSQL 16 or newer is here, which origin = none " +
			"needs: ./scripts/postgres fetches it, OUTFLOW_PG_BIN names the folder of one")
	}
	return pgserver.FindIn(all, 0)
}

// startNATS starts a server for each cluster. In the mode shared they are one NATS, which goes on when a
// server is gone, and has each write on disk before it acknowledges it.
func (m *mesh) startNATS() error {
	var one *natsserver.Cluster
	var err error
	if m.mode == shared {
		one, err = natsserver.StartCluster(filepath.Join(m.dir, "nats"), clusters,
			natsserver.Options{SyncAlways: true})
	}
	for i := range clusters {
		c := &cluster{number: i + 1}
		switch {
		case err != nil:
			return fmt.Errorf("start nats: %w", err)
		case one != nil:
			c.nats = one.Node(i)
		default:
			c.nats, err = natsserver.StartProcess(natsserver.Options{
				Dir: filepath.Join(m.dir, fmt.Sprint("nats-", c.number))})
		}
		m.all = append(m.all, c)
	}
	return err
}

// natsAt is the address of the NATS that a cluster reaches, its own server first.
func (m *mesh) natsAt(c *cluster) string {
	urls := []string{c.nats.URL()}
	for _, other := range m.all {
		if m.mode == shared && other != c {
			urls = append(urls, other.nats.URL())
		}
	}
	return strings.Join(urls, ",")
}

func (c *cluster) start(ctx context.Context, found pgserver.Installation, dir, natsURL string) (err error) {
	c.conn, err = nats.Connect(natsURL, nats.Timeout(patience), nats.DontRandomize(), nats.MaxReconnects(-1),
		nats.ReconnectWait(200*time.Millisecond))
	if err != nil {
		return err
	}
	c.js, err = jetstream.New(c.conn, jetstream.WithDefaultTimeout(30*time.Second))
	if err != nil {
		return err
	}
	c.pg, err = pgserver.Start(ctx, pgserver.Options{
		Installation: found, Dir: filepath.Join(dir, fmt.Sprint("postgres-", c.number)),
		Settings: map[string]string{
			"fsync":                       "off", // what is thrown away needs none
			"wal_retrieve_retry_interval": "500ms",
		},
	})
	if err != nil {
		return err
	}
	c.url, err = c.pg.CreateDatabase(ctx, "app")
	return err
}

// home is the Outflow of the cluster's own rows.
func (c *cluster) home() *outflow { return c.homes[c.number-1] }

func (c *cluster) startOutflows() error {
	for _, o := range c.homes {
		if err := o.start(); err != nil {
			return err
		}
	}
	return nil
}

// exec runs statements, each by itself.
func (c *cluster) exec(ctx context.Context, statements ...string) error {
	conn, err := pgx.Connect(ctx, c.url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) //nolint:errcheck // what it was for is done
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

// subscribe lets rows go from each cluster to each other one.
func (m *mesh) subscribe(ctx context.Context) error {
	if err := m.each(func(c *cluster) error {
		return c.exec(ctx, "CREATE PUBLICATION replicated FOR TABLE outbox, outflow_control")
	}); err != nil {
		return err
	}
	m.links = map[[2]int]*faultproxy.Proxy{}
	for _, to := range m.all {
		for _, from := range m.all {
			if to == from {
				continue
			}
			link, through, err := faultproxy.To(from.url)
			if err != nil {
				return err
			}
			m.links[[2]int{from.number, to.number}] = link
			if err := to.exec(ctx, fmt.Sprintf("CREATE SUBSCRIPTION from_%d CONNECTION '%s' PUBLICATION "+
				"replicated WITH (origin = none, copy_data = false, slot_name = 'to_%d')", from.number,
				through, to.number)); err != nil {
				return err
			}
		}
	}
	return nil
}

// each does something for all clusters at once.
func (m *mesh) each(do func(*cluster) error) error {
	var all errgroup.Group
	for _, c := range m.all {
		all.Go(func() error { return do(c) })
	}
	return all.Wait()
}

// until waits until check returns nil, or something that runs beside it has failed.
func (m *mesh) until(ctx context.Context, what string, check func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		last := check(limited)
		if last == nil {
			return nil
		}
		for _, c := range m.all {
			for _, o := range c.homes {
				if err := o.alive(); err != nil {
					return err
				}
			}
		}
		select {
		case err := <-m.failed:
			return err
		case <-limited.Done():
			return fmt.Errorf("%s: %w: %w", what, limited.Err(), last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// fail remembers the first failure of something that runs beside the acts.
func (m *mesh) fail(err error) {
	select {
	case m.failed <- err:
	default:
	}
}

// close ends everything and removes it.
func (m *mesh) close() error {
	m.story.quiet()
	m.beside.Wait() // their context is done
	var errs []error
	for _, c := range m.all {
		for _, o := range c.homes {
			o.kill()
		}
	}
	for _, link := range m.links {
		link.Close()
	}
	for _, c := range m.all {
		if c.conn != nil {
			c.conn.Close()
		}
	}
	for _, c := range m.all {
		if c.nats != nil && c.nats.Running() {
			errs = append(errs, c.nats.Kill())
		}
		if c.pg != nil {
			errs = append(errs, c.pg.Remove())
		}
	}
	if m.dir != "" {
		errs = append(errs, os.RemoveAll(m.dir))
	}
	return errors.Join(errs...)
}

// logs is the end of what each Outflow has said.
func (m *mesh) logs() string {
	var b strings.Builder
	for _, c := range m.all {
		for _, o := range c.homes {
			fmt.Fprintf(&b, "--- cluster %d, home %d\n%s\n", c.number, o.home, o.tail())
		}
	}
	return b.String()
}
