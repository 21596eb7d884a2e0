package docs

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// upkeep is the world of a section of docs/maintenance.md: an installation as the packages make it, whose
// service, and those of its servers, the reader starts and stops with systemctl, and an app that writes
// recorded editing sessions all the time. What it writes before, during and after has to be in the stream
// once each.
type upkeep struct {
	*harness.Outflow
	t     *testing.T
	p     *pageRun
	conn  *pgx.Conn // as the superuser
	table string    // what it is called in the end, for conn
	js    jetstream.JetStream
	ops   []recording.Op
	load  *harness.Load // nil: the app is stopped
	// operations of earlier lives of the app
	written int
	// what systemctl does with a service: its verbs
	services map[string]map[string]func()
	before   func() // behind the first events; nil: nothing
	after    func() // behind the section; nil: nothing
	lost     bool   // PostgreSQL loses commits that are published
	consumed int    // by the durable consumer
	backups  map[string]*harness.Backup
}

// newUpkeep makes the configuration and what the reader has. The addresses are those of the reader and the
// app, and outflow's unless it is configured otherwise.
func newUpkeep(t *testing.T, pgURL, natsURL string) *upkeep {
	t.Helper()
	w := &upkeep{t: t, p: newPageRun(t, "maintenance", pgURL, natsURL), table: "outbox",
		backups: map[string]*harness.Backup{}}
	w.Outflow = harness.New(t, pgURL, natsURL, "outflow")
	own := []string{"POSTGRES_URL", "NATS_URL", "SLOT", "PUBLICATION"}
	w.Env = slices.DeleteFunc(w.Env, func(e string) bool {
		name, _, _ := strings.Cut(strings.TrimPrefix(e, "OUTFLOW_"), "=")
		return slices.Contains(own, name)
	})
	w.configure("postgres: {url: '"+pgURL+"'}", "nats: {url: '"+natsURL+"'}")
	file := filepath.Join(w.p.dir, "outflow.yaml")
	w.Set("CONFIG=" + file)
	w.p.listen = w.Listen
	w.p.env = append(w.p.env, "OUTFLOW_CONFIG="+file, "OUTFLOW_LISTEN="+w.Listen)
	w.conn, w.js = harness.Connect(t, pgURL), harness.JetStream(t, natsURL)
	w.ops = harness.RecordedOps(t, 100_000)
	w.services = map[string]map[string]func(){
		"outflow": {"start": w.begin, "stop": w.stop, "reload": w.reload},
		"app":     {"start": w.write, "stop": w.quiet},
	}
	w.stage()
	return w
}

// configure writes the configuration.
func (w *upkeep) configure(lines ...string) {
	w.p.write(filepath.Join(w.p.dir, "outflow.yaml"), strings.Join(lines, "\n")+"\n", 0o600)
}

func plainUpkeep(t *testing.T, pg *pgserver.Server) *upkeep {
	return newUpkeep(t, pgtest.Database(t, pg), natstest.Server(t).URL())
}

// withView is an outflow whose table gets another name, and the old one is a view's.
func withView(t *testing.T, pg *pgserver.Server) *upkeep {
	w := plainUpkeep(t, pg)
	harness.Exec(t, w.conn, "SET search_path = public, notes")
	w.table = "note_events"
	return w
}

// withPassword is an outflow that PostgreSQL asks for a password, which is in a file.
func withPassword(t *testing.T, pg *pgserver.Server) *upkeep {
	t.Helper()
	admin := pgtest.Database(t, pg)
	w := newUpkeep(t, admin, natstest.Server(t).URL())
	hba := filepath.Join(pg.Dir, "data", "pg_hba.conf")
	rules, err := os.ReadFile(hba)
	harness.Must(t, err)
	w.p.write(hba, "host all outflow 127.0.0.1/32 scram-sha-256\n"+string(rules), 0o600)
	harness.Exec(t, w.conn, "SELECT pg_reload_conf()")
	harness.Exec(t, w.conn, "CREATE ROLE outflow LOGIN SUPERUSER PASSWORD 'old'")
	passfile := filepath.Join(w.p.dir, "pgpass")
	w.p.write(passfile, "*:*:*:outflow:old\n", 0o600)
	u, err := url.Parse(admin)
	harness.Must(t, err)
	u.User = url.User("outflow")
	u.RawQuery += "&passfile=" + url.QueryEscape(passfile)
	w.configure("postgres: {url: '"+u.String()+"'}", "nats: {url: '"+w.p.natsURL+"'}")
	return w
}

// withNKeys is an outflow that NATS knows by a key. OLD and NEW are the public ones, the server's users are
// in nats.conf.
func withNKeys(t *testing.T, pg *pgserver.Server) *upkeep {
	t.Helper()
	var seeds, keys [2]string
	for i := range seeds {
		pair, err := nkeys.CreateUser()
		harness.Must(t, err)
		seed, err := pair.Seed()
		harness.Must(t, err)
		keys[i], err = pair.PublicKey()
		harness.Must(t, err)
		seeds[i] = string(seed)
	}
	conf := harness.WriteFile(t, "nats.conf", fmt.Sprintf(
		"authorization: {users: [{user: reader, password: reader}, {nkey: %s}]}", keys[0]))
	var options *server.Options
	users := func(o *server.Options) {
		c, err := server.ProcessConfigFile(conf)
		harness.Must(t, err)
		o.Username, o.Password, o.Users, o.Nkeys = "", "", c.Users, c.Nkeys
		options = o.Clone()
	}
	ns := natstest.Server(t, natsserver.Options{Tune: users})
	address := fmt.Sprintf("127.0.0.1:%d", ns.Port)
	w := newUpkeep(t, pgtest.Database(t, pg), "nats://reader:reader@"+address)
	content, err := os.ReadFile(conf)
	harness.Must(t, err)
	conf = filepath.Join(w.p.dir, "nats.conf")
	w.p.write(conf, string(content), 0o600)
	w.p.env = append(w.p.env, "OLD="+keys[0], "NEW="+keys[1])
	w.services["nats-server"] = map[string]func(){"reload": func() {
		next := options.Clone()
		users(next)
		harness.Must(t, ns.Embedded().ReloadOptions(next))
	}}
	for i, name := range []string{"nats.nk", "nats.nk.new"} {
		w.p.write(filepath.Join(w.p.dir, name), seeds[i], 0o600)
	}
	w.configure("postgres: {url: '"+w.p.pgURL+"'}", "nats: {url: 'nats://"+address+"', nkey: '"+
		filepath.Join(w.p.dir, "nats.nk")+"'}")
	return w
}

// withTwoNATS is an outflow that is to go from one NATS server to another, and a durable consumer of its
// stream.
func withTwoNATS(t *testing.T, pg *pgserver.Server) *upkeep {
	t.Helper()
	old, next := natstest.Server(t).URL(), natstest.Server(t).URL()
	w := newUpkeep(t, pgtest.Database(t, pg), old)
	w.p.env = append(w.p.env, "OLD_NATS="+old, "NEW_NATS="+next)
	w.before = func() { w.consume(50) }
	w.services["outflow"]["start"] = func() {
		w.js = harness.JetStream(t, next)
		w.begin()
		w.consume(0)
	}
	return w
}

// withBackup is an outflow that confirms at once: what came behind a backup is in the table only.
func withBackup(t *testing.T, pg *pgserver.Server) *upkeep {
	w := plainUpkeep(t, pg)
	w.Set("SINK_DURABLE_AFTER=0s")
	w.p.env = append(w.p.env, "OUTFLOW_SINK_DURABLE_AFTER=0s")
	return w
}

// withNextPostgreSQL is an outflow whose database is replicated to another server, of a later major if there
// is one here.
func withNextPostgreSQL(t *testing.T, pg *pgserver.Server) *upkeep {
	t.Helper()
	all := pgserver.Installations()
	next := pgtest.Own(t, all[len(all)-1].Major)
	w := plainUpkeep(t, pg)
	w.Init() // which makes the table
	database := harness.Value[string](t, w.conn, "SELECT current_database()")
	nextURL, err := next.CreateDatabase(t.Context(), database)
	harness.Must(t, err)
	w.p.env = append(w.p.env, "OLD_DATABASE_URL="+w.p.pgURL, "NEW_DATABASE_URL="+nextURL)
	conn := harness.Connect(t, nextURL)
	harness.Exec(t, conn, harness.GeneratedKey)
	harness.Exec(t, conn, "ALTER TABLE outbox ADD created_at timestamptz NOT NULL DEFAULT now()")
	harness.Exec(t, w.conn, "CREATE PUBLICATION move FOR TABLE outbox")
	harness.Exec(t, conn, "CREATE SUBSCRIPTION move CONNECTION '"+w.p.pgURL+"' PUBLICATION move")
	w.services["app"]["start"] = func() {
		w.p.pgURL, w.conn = nextURL, conn
		w.write()
	}
	return w
}

// withStandby is an outflow with a standby that synchronises the slot, and that commits wait for.
func withStandby(t *testing.T, _ *pgserver.Server) *upkeep {
	t.Helper()
	all := pgserver.Installations()
	major := all[len(all)-1].Major
	if major < 17 {
		tier.Missing(t, "pg17", "slots are synchronised from PostgreSQL 17 on")
	}
	pg := pgtest.Own(t, major)
	database, err := pg.CreateDatabase(t.Context(), "app")
	harness.Must(t, err)
	ns := natstest.Server(t).URL()
	w := newUpkeep(t, database, ns)
	w.Init() // before the standby is made: it must know the slot's database
	standby, err := pg.Standby(t.Context(), "standby", nil)
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, standby.Remove()) })
	for _, sql := range []string{
		"ALTER SYSTEM SET synchronous_standby_names = 'standby'",
		"ALTER SYSTEM SET synchronized_standby_slots = 'standby'", "SELECT pg_reload_conf()",
	} {
		harness.Exec(t, w.conn, sql)
	}
	w.p.pgURL = fmt.Sprintf(
		"postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/app?sslmode=disable&target_session_attrs=read-write",
		pg.Port, standby.Port)
	w.configure("postgres: {url: '"+w.p.pgURL+"'}", "nats: {url: '"+ns+"'}")
	w.p.env = append(w.p.env, "DATABASE_URL="+w.p.pgURL, "STANDBY_URL="+standby.URL("app"))
	w.services["postgresql"] = map[string]func(){"stop": func() {
		w.publishing()
		harness.Must(t, pg.Stop("fast"))
	}}
	w.after = func() { w.conn = harness.Connect(t, w.p.pgURL) }
	return w
}

// withPostgreSQLBackup is an outflow whose database is restored as it was some time before.
func withPostgreSQLBackup(t *testing.T, _ *pgserver.Server) *upkeep {
	t.Helper()
	pg := pgtest.Own(t, 0)
	database, err := pg.CreateDatabase(t.Context(), "app")
	harness.Must(t, err)
	w := newUpkeep(t, database, natstest.Server(t).URL())
	var past *pgserver.Server
	w.before = func() {
		var err error
		past, err = pg.Standby(t.Context(), "past", nil)
		harness.Must(t, err)
		t.Cleanup(func() { harness.Must(t, past.Remove()) })
		w.publishing()
		harness.Must(t, past.Detach(t.Context()))
		harness.Eventually(t, "the backup is cut off", func() error {
			if n := harness.Value[int](t, w.conn, "SELECT count(*) FROM pg_stat_replication WHERE "+
				"application_name = 'past'"); n > 0 {
				return fmt.Errorf("%d walsenders", n)
			}
			return nil
		})
		w.publishing()
	}
	w.services["postgresql"] = map[string]func(){
		"stop": func() { harness.Must(t, pg.Stop("fast")) },
		"start": func() {
			copied := filepath.Join(t.TempDir(), "copy")
			harness.Must(t, past.Promote(t.Context()))
			harness.Must(t, past.Stop("fast"))
			harness.Must(t, past.Backup(copied))
			harness.Must(t, pg.Restore(copied))
			harness.Must(t, pg.Start(t.Context()))
		},
	}
	w.lost = true
	w.after = func() { w.conn = harness.Connect(t, w.p.pgURL) }
	return w
}

// consume lets a durable consumer read n messages, and makes sure that it goes on where it was.
func (w *upkeep) consume(n int) {
	w.t.Helper()
	c, err := w.js.CreateOrUpdateConsumer(w.t.Context(), w.Stream, jetstream.ConsumerConfig{Durable: "worker",
		AckPolicy: jetstream.AckExplicitPolicy})
	harness.Must(w.t, err)
	if got := int(c.CachedInfo().AckFloor.Stream); got != w.consumed {
		w.t.Errorf("the consumer is at %d, want %d", got, w.consumed)
	}
	if n == 0 {
		return
	}
	batch, err := c.Fetch(n)
	harness.Must(w.t, err)
	for m := range batch.Messages() {
		harness.Must(w.t, m.DoubleAck(w.t.Context()))
		w.consumed++
	}
	harness.Must(w.t, batch.Error())
}

// nats does what the tool of that name does with streams. Where there is such a tool, it does it itself.
func (w *upkeep) nats(args []string) {
	w.t.Helper()
	if len(args) < 5 || args[0] != "--server" || args[2] != "stream" {
		w.t.Fatalf("nobody plays nats %v", args)
	}
	nc := harness.JetStream(w.t, args[1]).Conn()
	switch args[3] {
	case "backup":
		w.backups[args[5]] = harness.TakeBackup(w.t, nc, args[4])
	case "restore":
		b := w.backups[args[4]]
		b.Restore(w.t, nc, b.Stream(w.t))
	case "rm":
		js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(harness.AskTimeout))
		harness.Must(w.t, err)
		harness.Must(w.t, js.DeleteStream(w.t.Context(), args[4]))
	default:
		w.t.Fatalf("nobody plays nats %v", args)
	}
}

// run plays the section: with events before it, and behind it.
func (w *upkeep) run(section string) {
	w.t.Helper()
	w.Init()
	w.begin()
	w.write()
	w.publishing()
	if w.before != nil {
		w.before()
	}
	w.p.play(section)
	if w.load == nil {
		w.t.Fatal("the page leaves the app stopped")
	}
	if w.after != nil {
		w.after()
	}
	w.quietly()
	w.MustStop(w.t)
	w.p.stop()
}

// quietly ends the app behind more events, and compares stream and table.
func (w *upkeep) quietly() {
	w.t.Helper()
	w.writes(100)
	w.quiet()
	var v oracle.Verdict
	harness.Eventually(w.t, "everything is published", func() (err error) {
		v, err = oracle.Compare(w.t.Context(), w.conn, w.table, w.js, w.Stream, 0)
		if err == nil && v.Missing > 0 {
			err = errors.New(v.String())
		}
		return err
	})
	w.t.Log(v.String())
	if v.Repeated+v.Changed > 0 || (v.Foreign > 0) != w.lost {
		w.t.Errorf("stream and table differ: %s", v.String())
	}
}

func (w *upkeep) begin() {
	w.t.Helper()
	w.Start()
	w.AwaitReady()
}

// stop has much published before, and comes back when much was written that is not.
func (w *upkeep) stop() {
	w.t.Helper()
	if w.load != nil {
		w.publishing()
	}
	w.MustStop(w.t)
	if w.load != nil {
		w.writes(100)
	}
}

func (w *upkeep) reload() {
	w.t.Helper()
	harness.Must(w.t, w.Process.Signal(syscall.SIGHUP))
}

// write lets the app write, each life other parts of the recordings.
func (w *upkeep) write() {
	w.t.Helper()
	w.load = harness.StartEndlessLoad(w.t, w.p.pgURL, w.ops[w.written:], 4, 300, 11)
}

// quiet stops the app.
func (w *upkeep) quiet() {
	w.t.Helper()
	w.load.Ending.Store(true)
	w.load.Wait(w.t)
	w.written += int(w.load.Written.Load())
	w.load = nil
}

// writes waits until n more operations are committed.
func (w *upkeep) writes(n int64) {
	w.t.Helper()
	goal := w.load.Written.Load() + n
	harness.Eventually(w.t, fmt.Sprintf("%d operations written", goal), func() error {
		if err, _ := w.load.Failure.Load().(error); err != nil {
			w.t.Fatalf("write: %v", err)
		}
		if got := w.load.Written.Load(); got < goal {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

// publishing waits until what is written from now on is published.
func (w *upkeep) publishing() {
	w.t.Helper()
	n := w.written + int(w.load.Written.Load()) + 100
	w.writes(100)
	harness.AwaitMessages(w.t, w.js, w.Stream, n)
}

// stage gives the reader systemctl and journalctl, which ask this process.
func (w *upkeep) stage() {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(w.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil { // the test is over
				return
			}
			w.answer(c)
		}
	}()
	w.t.Cleanup(func() {
		l.Close() //nolint:errcheck // nothing was written to it
		<-done
	})
	script := fmt.Sprintf("#!/usr/bin/env bash\nset -eu\nexec 3<>/dev/tcp/127.0.0.1/%d\n"+
		"echo \"${0##*/} $*\" >&3\nread -r code <&3\ncat <&3\nexit \"$code\"\n", l.Addr().(*net.TCPAddr).Port)
	names := []string{"systemctl", "journalctl"}
	if _, err := exec.LookPath("nats"); err != nil {
		names = append(names, "nats")
	}
	for _, name := range names {
		w.p.write(filepath.Join(w.p.base, "bin", name), script, 0o700)
	}
}

// answer does what a command asks for. One that fails the test ends its goroutine, and the command with it.
func (w *upkeep) answer(c net.Conn) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		defer c.Close() //nolint:errcheck // the command shows what it got
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return
		}
		words := strings.Fields(line)
		switch {
		case words[0] == "journalctl" && slices.Equal(words[1:3], []string{"-u", "outflow"}):
			fmt.Fprintf(c, "0\n%s", w.Said())
		case words[0] == "nats":
			w.nats(words[1:])
			fmt.Fprintln(c, "0")
		case words[0] == "systemctl" && len(words) == 3 && w.services[words[2]][words[1]] != nil:
			w.services[words[2]][words[1]]()
			fmt.Fprintln(c, "0")
		default:
			fmt.Fprintf(c, "1\nnobody plays: %s", line)
		}
	}()
	<-answered
}
