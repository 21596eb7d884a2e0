package operate

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// diagnosis is what outflow doctor --json prints, as far as tests look at it.
type diagnosis struct {
	Worst   string
	Results []struct{ Check, Status, Code, Message, Hint, Command string }
}

// doctor runs outflow doctor; where the output of tests is looked at, once more for people.
func doctor(t *testing.T, o *harness.Outflow, code int, args ...string) (d diagnosis) {
	t.Helper()
	args = append(args, "--timeout", "1m") // the machine may stand still for seconds
	out, stderr, got := o.Run(append([]string{"doctor", "--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("outflow doctor: exit code %d: %v: %s%s", got, err, out, stderr)
	}
	if got != code {
		t.Errorf("outflow doctor %v: exit code %d, want %d\n%s", args, got, code, out)
	}
	if testing.Verbose() {
		text, _, _ := o.Run(append([]string{"doctor"}, args...)...)
		t.Logf("outflow doctor %s: exit code %d\n%s", strings.Join(args, " "), got, text)
	}
	return d
}

// of returns the statuses of a code, or of a check.
func (d diagnosis) of(name string) (all []string) {
	for _, r := range d.Results {
		if r.Code == name || r.Check == name {
			all = append(all, r.Status)
		}
	}
	return all
}

// role gives a database a role that may do what outflow run and doctor need, and returns its URL.
func role(t *testing.T, f *harness.Installation, rights ...string) string {
	t.Helper()
	name := f.Slot + "_role"
	harness.Exec(t, f.Conn, "CREATE ROLE "+name+" LOGIN "+strings.Join(rights, " "))
	t.Cleanup(func() {
		_, err := f.Conn.Exec(context.Background(), "DROP ROLE "+name)
		harness.Must(t, err)
	})
	return outboxdb.WithUser(t, f.URL, name)
}

func TestDoctorFindsNothingWrongWithAHealthyChain(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		f := harness.NewInstallation(t, pg, ns.URL(), "healthy")
		before := doctor(t, f.Outflow, 0, "--before-init")
		if len(before.of("slot.start")) > 0 || len(before.of("nats.reachable")) != 1 {
			t.Errorf("before init: %+v", before.Results)
		}
		f.Init()
		url := role(t, f, "REPLICATION IN ROLE pg_monitor")
		f.Set("POSTGRES_URL=" + url)
		f.Start()
		f.AwaitReady()
		for i := range 3 {
			harness.Insert(t, f.Conn, "doc", i+1, `{}`)
		}
		harness.AwaitMessages(t, f.JS, f.Stream, 3)
		f.AwaitHealth("ok")
		d := doctor(t, f.Outflow, 0)
		for _, r := range d.Results {
			if !slices.Contains([]string{"ok", "note", "skipped"}, r.Status) {
				t.Errorf("%+v", r)
			}
		}
		for _, check := range []string{"slot.start", "slot.headroom", "slot.active", "table.usable",
			"publication.complete", "stream.usable", "record.readable", "process.listen", "process.state",
			"postgres.transactions"} {
			if got := d.of(check); !slices.Equal(got, []string{"ok"}) {
				t.Errorf("%s: %v", check, got)
			}
		}
		if d := doctor(t, f.Outflow, 0, "--only", "slot", "--skip",
			"slot.start,slot.orphans"); slices.ContainsFunc(
			d.Results, func(r struct{ Check, Status, Code, Message, Hint, Command string }) bool {
				return !strings.HasPrefix(r.Check, "slot.") || r.Check == "slot.start"
			}) {
			t.Errorf("--only slot: %+v", d.Results)
		}
	})
}

func TestDoctorFindsWhatIsBroken(t *testing.T) {
	t.Parallel()
	ns, pg := natstest.Server(t), pgtest.Server(t)
	stopped, err := freeport.Port()
	harness.Must(t, err)
	nobody := "127.0.0.1:" + strconv.Itoa(stopped)
	type installation = harness.Installation
	initialised := func(t *testing.T, f *installation) { f.Init() }
	running := func(t *testing.T, f *installation) {
		f.Init()
		f.Start()
		f.AwaitReady()
	}
	cases := []struct {
		name    string
		code    string // the finding
		status  string // its severity
		exit    int
		healthy func(*testing.T, *installation)
		harm    func(*testing.T, *installation)
		also    map[string]string // statuses of other checks
	}{
		{name: "slot missing", code: "slot_missing", status: "critical", exit: 4, healthy: initialised,
			harm: func(t *testing.T, f *installation) { f.DropSlot(t) },
			also: map[string]string{"stream.usable": "ok", "record.readable": "ok"}},
		{name: "publication made again", code: "publication_changed", status: "critical", exit: 4,
			healthy: running, harm: func(t *testing.T, f *installation) {
				f.MustStop(t)
				harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Publication())
				harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Publication()+
					" FOR TABLE outbox WITH (publish = 'insert', "+
					"publish_via_partition_root = true)")
			}},
		{name: "publication dropped", code: "publication_missing", status: "critical", exit: 4,
			healthy: initialised, harm: func(t *testing.T, f *installation) {
				harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Publication())
			}},
		{name: "NATS down", code: "nats_connect", status: "critical", exit: 4, healthy: initialised,
			harm: func(_ *testing.T, f *installation) { f.Set("NATS_URL=nats://" + nobody) },
			also: map[string]string{"postgres.reachable": "ok", "slot.usable": "ok", "slot.start": "unknown",
				"stream.usable": "unknown"}},
		{name: "PostgreSQL down", code: "postgres_connect", status: "critical", exit: 4, healthy: initialised,
			harm: func(_ *testing.T, f *installation) { f.Set("POSTGRES_URL=postgres://u@" + nobody + "/d") },
			also: map[string]string{"nats.reachable": "ok", "stream.usable": "ok", "record.readable": "ok",
				"slot.usable": "unknown"}},
		{name: "stream full", code: "stream_filling", status: "error", exit: 3, healthy: running,
			harm: func(t *testing.T, f *installation) {
				for i := range 3 {
					harness.Insert(t, f.Conn, "doc", i+1, `{}`)
				}
				harness.AwaitMessages(t, f.JS, f.Stream, 3)
				edit(t, f, func(c *jetstream.StreamConfig) { c.Discard, c.MaxMsgs = jetstream.DiscardNew, 3 })
			}},
		{name: "role without rights", code: "no_replication_right", status: "critical", exit: 4,
			healthy: initialised, harm: func(t *testing.T, f *installation) {
				f.Set("POSTGRES_URL=" + role(t, f))
			}, also: map[string]string{"postgres.transactions": "unknown", "postgres.wal_level": "ok"}},
		{name: "consumer that nobody reads", code: "consumer_idle", status: "warning", healthy: running,
			harm: func(t *testing.T, f *installation) {
				_, err := f.JS.CreateConsumer(t.Context(), f.Stream,
					jetstream.ConsumerConfig{Durable: "search",
						AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 3})
				harness.Must(t, err)
				harness.Insert(t, f.Conn, "doc", 1, `{}`)
				harness.AwaitMessages(t, f.JS, f.Stream, 1)
				f.AwaitHealth("ok")
				d := doctor(t, f.Outflow, 3, "--strict", "--deep")
				if len(d.of("consumer_max_deliver")) != 1 {
					t.Errorf("%+v", d.Results)
				}
			}},
		{name: "nobody runs", code: "slot_unused", status: "error", exit: 3, healthy: initialised},
		{name: "nothing is there", code: "not_initialised", status: "error", exit: 3},
		{name: "stream deleted", code: "stream_missing", status: "critical", exit: 4, healthy: initialised,
			harm: func(t *testing.T, f *installation) {
				harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
			}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := harness.NewInstallation(t, pg, ns.URL(), "broken")
			if c.healthy != nil {
				c.healthy(t, f)
			}
			if c.harm != nil {
				c.harm(t, f)
			}
			d := doctor(t, f.Outflow, c.exit)
			if !slices.Contains(d.of(c.code), c.status) {
				t.Errorf("%s is not found: %+v", c.code, d.Results)
			}
			for check, want := range c.also {
				if got := d.of(check); !slices.Equal(got, []string{want}) {
					t.Errorf("%s: %v, want %s", check, got, want)
				}
			}
		})
	}
}

func edit(t *testing.T, f *harness.Installation, change func(*jetstream.StreamConfig)) {
	t.Helper()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	c := s.CachedInfo().Config
	change(&c)
	_, err = f.JS.UpdateStream(t.Context(), c)
	harness.Must(t, err)
}

// A server of its own: what is wrong is the server.
func TestDoctorFindsALostSlotAndTheWrongWALLevel(t *testing.T) {
	t.Parallel()
	pg := pgtest.Own(t, 0, "max_slot_wal_keep_size=16MB", "min_wal_size=32MB", "max_wal_size=32MB")
	f := harness.NewInstallation(t, pg, natstest.Server(t).URL(), "lost")
	f.Init()
	harness.Eventually(t, "the slot is lost", func() error {
		for range 4 {
			harness.Exec(t, f.Conn, "SELECT pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")
		}
		harness.Exec(t, f.Conn, "CHECKPOINT")
		if s := harness.Value[string](t, f.Conn, "SELECT wal_status FROM pg_replication_slots"); s != "lost" {
			return fmt.Errorf("%s", s)
		}
		return nil
	})
	if d := doctor(t, f.Outflow, 4); !slices.Contains(d.of("slot_invalidated"), "critical") {
		t.Errorf("%+v", d.Results)
	}
	f.DropSlot(t)
	harness.Exec(t, f.Conn, "ALTER SYSTEM SET wal_level = replica")
	harness.Must(t, pg.Stop("fast"))
	harness.Must(t, pg.Start(t.Context()))
	if d := doctor(t, f.Outflow, 3, "--before-init"); !slices.Equal(d.of("wal_level"), []string{"error"}) {
		t.Errorf("%+v", d.Results)
	}
}

// What doctor prints has no secret, wherever that stands.
func TestDoctorTellsNoSecret(t *testing.T) {
	t.Parallel()
	const secret = "hunter2secret"
	port, err := freeport.Port()
	harness.Must(t, err)
	u := url.URL{Scheme: "postgres", User: url.UserPassword("u", secret), Host: "127.0.0.1:" +
		strconv.Itoa(port),
		Path: "/d"}
	o := harness.New(t, u.String(), "nats://u:"+secret+"@127.0.0.1:"+strconv.Itoa(port), "secret")
	for _, args := range [][]string{{"doctor"}, {"doctor", "--json"}, {"doctor", "--standby", u.String()}} {
		out, stderr, code := o.Run(args...)
		if strings.Contains(out+stderr, secret) || code != 4 {
			t.Errorf("%v: exit code %d\n%s%s", args, code, out, stderr)
		}
	}
}
