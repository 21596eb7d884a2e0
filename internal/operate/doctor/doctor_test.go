package doctor

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

func TestExitCodeIsByTheWorst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		statuses     string
		code, strict int
	}{
		{"ok skipped note", 0, 0}, {"warning ok", 0, 3}, {"unknown note", 1, 1}, {"unknown warning", 1, 3},
		{"error unknown", 3, 3}, {"critical error unknown", 4, 4},
	} {
		r := &Report{}
		for s := range strings.FieldsSeq(c.statuses) {
			r.Results = append(r.Results, Result{Status: Status(s)})
		}
		if code, strict := r.ExitCode(false), r.ExitCode(true); code != c.code || strict != c.strict {
			t.Errorf("%s: %d, strict %d; want %d, %d", c.statuses, code, strict, c.code, c.strict)
		}
	}
}

func TestAPanicIsTheFailureOfOneCheck(t *testing.T) {
	t.Parallel()
	all := []check{
		{name: "slot.broken", run: func(f *Facts, _ *reporter) { _ = f.Slots[100] }},
		{name: "slot.good", run: func(_ *Facts, r *reporter) { r.ok("fine") }},
	}
	r := report(healthy(t), all)
	if len(r.Results) != 2 || r.Results[0].Status != Unknown || r.Results[1].Status != OK ||
		r.Worst != Unknown {
		t.Errorf("%+v", r.Results)
	}
}

func TestOneFindingIsSaidOnce(t *testing.T) {
	t.Parallel()
	f := healthy(t)
	f.Slots, f.Readings.Slot.Exists = f.Slots[1:], false
	n := 0
	for _, r := range report(f, checks).Results {
		if r.Code == "slot_missing" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("slot_missing is said %d times", n)
	}
}

// Names come from whoever may connect: they must neither break the lines of the report nor, in a command that
// is suggested, do something else.
func TestNamesOfOthersAreHarmless(t *testing.T) {
	t.Parallel()
	f := healthy(t)
	f.Consumers[0].Name, f.Consumers[0].Waiting, f.Consumers[0].Pending = "x;rm -rf ~'\x1b[31m\nok", 0, 1
	f.Activity.Transactions = []Transaction{{Prepared: "a'; DROP TABLE outbox; --", Seconds: 400},
		{PID: 7, Application: "\x1b]0;owned\x07\n", Database: `d"x`, Seconds: 400}}
	f.Config.Repeat = []string{"--config '/etc/my outflow.yaml'"}
	r := report(f, checks)
	var b strings.Builder
	must.Succeed(t, r.Write(&b))
	if strings.ContainsAny(b.String(), "\x1b\x07") || strings.Contains(b.String(), "\nok") {
		t.Errorf("%q", b.String())
	}
	for _, want := range []string{`'x;rm -rf ~'\''?[31m ok'`,
		"ROLLBACK PREPARED 'a''; DROP TABLE outbox; --'"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in %s", want, b.String())
		}
	}
}

// A command stays in one line, however long it is: it is to be copied.
func TestSuggestedCommandsAreNotFolded(t *testing.T) {
	t.Parallel()
	f := healthy(t)
	f.Config.Repeat = []string{"--config '/etc/my outflow " + strings.Repeat("x", 80) + ".yaml'"}
	f.Slots, f.Readings.Slot.Exists = f.Slots[1:], false
	var b strings.Builder
	must.Succeed(t, report(f, checks).Write(&b))
	if want := "`outflow repair " + f.Config.Repeat[0] + "`"; !strings.Contains(b.String(), want) {
		t.Errorf("no %s in\n%s", want, b.String())
	}
}

func TestAWrongNameOfACheckIsRefused(t *testing.T) {
	t.Parallel()
	_, err := Run(t.Context(), config.Config{}, Options{Skip: []string{"slots"}, Timeout: time.Second})
	outboxdb.WantFault(t, err, outbox.Usage, "flags")
}

// A server that takes connections and says nothing: all that is on it is not known, and the command ends.
func TestServersThatDoNotAnswerAreNotKnown(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer l.Close()
	at := l.Addr().String()
	cfg, err := config.Load(config.Args{"postgres.url": "postgres://u@" + at + "/d", "nats.url": "nats://" +
		at,
		"listen": at}, nil)
	must.Succeed(t, err)
	r, err := Run(t.Context(), cfg, Options{Timeout: 200 * time.Millisecond})
	must.Succeed(t, err)
	for _, one := range r.Results {
		subject, _, _ := strings.Cut(one.Check, ".")
		switch {
		case one.Check == "postgres.reachable" && one.Code == "postgres_connect",
			one.Check == "nats.reachable" && one.Code == "nats_connect":
		case one.Check == "postgres.writes" && one.Status == Skipped: // postgres.url is where they go
		case one.Check == "postgres.reachable", one.Check == "nats.reachable",
			one.Status != Unknown && subject != "host" && subject != "config":
			t.Errorf("%+v", one)
		}
	}
	if r.ExitCode(false) != exitCritical {
		t.Errorf("exit code %d", r.ExitCode(false))
	}
}

// on reads what a database has for some checks.
func on(t *testing.T, url string, only ...string) *Report {
	t.Helper()
	cfg, err := config.Load(config.Args{"postgres.url": url, "nats.url": "nats://127.0.0.1:1"}, nil)
	must.Succeed(t, err)
	r, err := Run(t.Context(), cfg, Options{Only: only, Deep: true, Timeout: time.Minute})
	must.Succeed(t, err)
	return r
}

func (r *Report) code(check string) string {
	for _, one := range r.Results {
		if one.Check == check {
			return string(one.Status) + " " + one.Code
		}
	}
	return ""
}

func TestRowsShowMissingCountersAndUnsortedKeys(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := outboxdb.New(t, srv)
		d.Exec(outboxdb.PlainTable)
		insert := func(actor string, counters ...int) {
			for _, n := range counters {
				d.Exec("INSERT INTO outbox (doc_id, actor_id, counter, seq_key, payload) VALUES ('d', $1, "+
					"$2, $3, '{}')",
					actor, n, fmt.Sprintf("%s:%04d", actor, n))
			}
		}
		rows := []string{"table.counters", "table.key_order", "table.payloads"}
		insert("a", 1, 2, 3)
		insert("b", 5, 6)
		r := on(t, d.URL, rows...)
		for _, name := range rows {
			if got := r.code(name); got != "ok " {
				t.Errorf("%s: %s", name, got)
			}
		}
		insert("b", 9)
		d.Exec(
			"INSERT INTO outbox (doc_id, actor_id, counter, seq_key, payload) VALUES ('d', 'c', 9, 'c:9', " +
				"to_jsonb(repeat('x', 1048577))), ('d', 'c', 10, 'c:10', '{}')")
		r = on(t, d.URL, rows...)
		for name, want := range map[string]string{"table.counters": "note counter_gaps",
			"table.key_order": "error key_order", "table.payloads": "error payload_large"} {
			if got := r.code(name); got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
	})
}

// A publication of an Outflow has inserts alone, as init makes it; one for other clusters needs deletes too.
func TestAPublicationWithoutDeletesIsFound(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := outboxdb.New(t, srv)
		d.Exec("CREATE TABLE control (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)")
		for name, what := range map[string]string{
			"outflow":    "TABLE control WITH (publish = 'insert')",
			"shard":      "TABLE control WITH (publish = 'insert', publish_via_partition_root)",
			"replicated": "TABLE control, other",
			"bad":        "TABLE other, control WITH (publish = 'insert')",
			"everything": "ALL TABLES WITH (publish = 'insert, update', publish_via_partition_root)",
			"changes":    "TABLE control WITH (publish = 'update')",
			"else":       "TABLE other WITH (publish = 'insert')",
		} {
			d.Exec("CREATE PUBLICATION " + postgres.Quote(name) + " FOR " + what)
		}
		conn, err := pgx.Connect(outboxdb.Within(t), d.URL)
		must.Succeed(t, err)
		defer postgres.Close(conn)
		cfg := config.Config{Publication: "outflow", Cluster: config.Cluster{Control: "control"}}
		names, err := withoutDeletes(outboxdb.Within(t), conn, cfg)
		if err != nil || !slices.Equal(names, []string{"bad", "everything"}) {
			t.Errorf("%q, %v", names, err)
		}
	})
}

func TestWhatTheRoleMayNotReadNamesTheGrant(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	d.Exec(outboxdb.PlainTable)
	d.Exec("CREATE SCHEMA app; CREATE TABLE app.outflow_parked (name text, parked_at timestamptz)")
	name := d.Slot + "_role"
	d.Exec("CREATE ROLE " + name + " LOGIN")
	t.Cleanup(func() {
		_, err := d.Conn.Exec(context.Background(), "DROP ROLE "+name)
		must.Succeed(t, err)
	})
	r := on(t, outboxdb.WithUser(t, d.URL, name), "postgres.transactions", "consumers.parked", "table")
	grants := 0
	for _, one := range r.Results {
		if one.Status == Unknown && strings.Contains(one.Message, "GRANT ") &&
			strings.Contains(one.Message, name) {
			grants++
		}
	}
	if grants != 5 { // three of them read the table's rows
		t.Errorf("%+v", r.Results)
	}
	d.Exec("INSERT INTO app.outflow_parked VALUES ('search', now() - interval '2 hours'), ('search', now())")
	if got := on(t, d.URL, "consumers.parked").code("consumers.parked"); got != "error events_parked" {
		t.Errorf("parked: %s", got)
	}
}

// One that waits has the code in place of its host's name. It is one all the same, and once.
func TestAnInstanceThatWaitsIsCounted(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	connect := func(name string) {
		c, err := pgx.ParseConfig(d.URL)
		must.Succeed(t, err)
		c.RuntimeParams["application_name"] = name
		conn, err := pgx.ConnectConfig(t.Context(), c)
		must.Succeed(t, err)
		t.Cleanup(func() { postgres.Close(conn) })
	}
	cfg, err := config.Load(config.Args{"postgres.url": d.URL, "nats.url": "nats://127.0.0.1:1",
		"slot": d.Slot}, nil)
	must.Succeed(t, err)
	for _, c := range []struct{ name, want string }{
		{postgres.WaitsPrefix(d.Slot) + "no_storage", "note single_instance"},
		{postgres.NamePrefix(d.Slot) + "a", "note single_instance"},
		{postgres.NamePrefix(d.Slot) + "b", "ok "},
	} {
		connect(c.name)
		r, err := Run(t.Context(), cfg, Options{Only: []string{"process.instances"}, Timeout: time.Minute})
		must.Succeed(t, err)
		if got := r.code("process.instances"); got != c.want {
			t.Errorf("with %s: %s, want %s", c.name, got, c.want)
		}
	}
}

// Whatever a query is: it is one that may only read.
func TestNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	conn, err := pgx.Connect(t.Context(), d.URL)
	must.Succeed(t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	var n int
	d.Exec("CREATE SEQUENCE numbers")
	err = query(t.Context(), conn, &n, "SELECT nextval('numbers')::text")
	if postgres.SQLState(err) != "25006" { // read_only_sql_transaction
		t.Errorf("a query wrote: %v", err)
	}
}

func TestASlowQueryDoesNotEndTheConnection(t *testing.T) {
	t.Parallel()
	d := outboxdb.New(t, pgtest.Server(t))
	// The server has a fifth of this to say it itself.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var n int
	if err := query(ctx, d.Conn, &n, "SELECT '1' FROM pg_sleep(3600)"); err == nil || d.Conn.IsClosed() {
		t.Errorf("%v, closed: %v", err, d.Conn.IsClosed())
	}
}

// The catalogue and the checks go together: each finding that no fault has is found by some check.
func TestEachFindingOfDoctorIsMade(t *testing.T) {
	t.Parallel()
	made := map[string]bool{}
	for _, h := range harm {
		made[h.code] = true
	}
	for _, f := range finding.All() {
		if len(f.Classes) == 0 && !made[f.Code] {
			t.Errorf("nothing finds %s", f.Code)
		}
	}
}

// A server whose WAL senders are all in use can be reached: what only a sender tells is not known, and nobody
// is woken up for it.
func TestNoSenderLeftForDoctorIsNoOutage(t *testing.T) {
	t.Parallel()
	f := healthy(t)
	f.missing[srcReplication] = missing{err: fault(outbox.Transient, postgres.CodeConnect)}
	f.Stats.Senders = 10
	r := report(f, checks)
	if r.Worst != Unknown || r.code("postgres.replication") != "unknown " ||
		r.code("postgres.free_senders") != "warning no_free_senders" {
		t.Errorf("%s: %+v", r.Worst, r.Results)
	}
}
