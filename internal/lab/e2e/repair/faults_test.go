package repair

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// faultCase is a set-up that somebody broke: what outflow run says then, and whether it can be mended so that
// nothing is missing.
type faultCase struct {
	name      string
	atLeast   int // PostgreSQL's major, 0: any
	uninit    bool
	damage    func(t *testing.T, f *harness.Installation)
	code      int
	report    []string
	repair    func(t *testing.T, f *harness.Installation)
	mendFails int // after mending, run ends with this code and a range; 0: it goes on
}

var faults = []faultCase{
	{name: "before init", uninit: true, damage: func(*testing.T, *harness.Installation) {}, code: 3,
		report: []string{"public.outbox", "outflow init"},
		repair: func(_ *testing.T, f *harness.Installation) { f.Init() }},
	{name: "table made, before init", uninit: true, code: 3, report: []string{"outflow init"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "CREATE TABLE outbox (id int, doc_id text, actor_id text, seq_key "+
				"text, payload jsonb)")
		}},
	{name: "mapped column missing", code: 3, report: []string{`"body"`, "columns.payload"},
		damage: func(_ *testing.T, f *harness.Installation) { f.Set("COLUMNS_PAYLOAD=body") },
		repair: func(_ *testing.T, f *harness.Installation) { f.Set("COLUMNS_PAYLOAD=payload") }},
	{name: "column of a header missing", code: 3, report: []string{`"event_type"`, "headers"},
		damage: func(_ *testing.T, f *harness.Installation) { f.Set("HEADERS=Type=event_type") },
		repair: func(_ *testing.T, f *harness.Installation) { f.Set("HEADERS=") }},
	{name: "publication missing", code: 3, report: []string{"publication", "does not exist"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
		},
		repair: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
				" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
		}, mendFails: 4},
	{name: "publication without the table", code: 3, report: []string{"publication", "public.outbox",
		"ALTER PUBLICATION"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" DROP TABLE outbox")
		}},
	{name: "publication with a row filter", atLeast: 15, code: 3, report: []string{"publication", "filter"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET TABLE outbox WHERE (counter > 5)")
		}},
	{name: "publication of updates", code: 3, report: []string{"publication", "publish = 'insert'"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'update')")
		}},
	{name: "slot missing", code: 4, report: []string{"slot", "does not exist", "LSN range", "outflow init"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
		}},
	{name: "slot made anew", code: 4, report: []string{"slot", "LSN range", "outflow init"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
			harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
		}},
	{name: "slot of another plugin", code: 4, report: []string{"slot", "plugin", "test_decoding"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
			harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", f.Slot)
		}},
	{name: "stream missing", code: 4, report: []string{"stream", "does not exist", "LSN range",
		"nats stream restore"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
		}},
	{name: "stream made anew", code: 4, report: []string{"stream", "was made at", "LSN range"},
		damage: func(t *testing.T, f *harness.Installation) {
			s, err := f.JS.Stream(t.Context(), f.Stream)
			harness.Must(t, err)
			cfg := s.CachedInfo().Config
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
			_, err = f.JS.CreateStream(t.Context(), cfg)
			harness.Must(t, err)
		}},
	{name: "record deleted", code: 4, report: []string{"checkpoint record", "missing", "LSN range",
		"nats kv"},
		damage: func(t *testing.T, f *harness.Installation) {
			kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
			harness.Must(t, err)
			harness.Must(t, kv.Delete(t.Context(), f.Slot))
		}},
	{name: "subject added to the stream", code: 3, report: []string{"stream", "orders.>", "subject"},
		damage: func(t *testing.T, f *harness.Installation) { editSubjects(t, f, "orders.>") },
		repair: func(t *testing.T, f *harness.Installation) { editSubjects(t, f) }},
	{name: "foreign message", code: 4, report: []string{"newest message", "Outflow header", "LSN range"},
		damage: func(t *testing.T, f *harness.Installation) {
			_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
			harness.Must(t, err)
		}},
}

// ingress is the prefix of the stream's private subject.
func ingress(t *testing.T, f *harness.Installation) string {
	t.Helper()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	return strings.TrimSuffix(s.CachedInfo().Config.Subjects[0], ">")
}

// editSubjects gives the stream its ingress and more subjects.
func editSubjects(t *testing.T, f *harness.Installation, more ...string) {
	t.Helper()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = append(cfg.Subjects[:1], more...)
	_, err = f.JS.UpdateStream(t.Context(), cfg)
	harness.Must(t, err)
}

// TestABrokenSetupStopsOutflowUntilItIsMended breaks a set-up in one way after the other. A loss counts only
// when a second reading, 5 s later, agrees: so all of them run at the same time.
func TestABrokenSetupStopsOutflowUntilItIsMended(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	broken := make([]*harness.Installation, len(faults))
	for i, c := range faults {
		if pg.Installation.Major < c.atLeast {
			continue
		}
		f := &harness.Installation{JS: harness.JetStream(t, ns.URL())}
		f.Outflow, f.Conn, f.URL = harness.Install(t, pg, ns.URL(), "fault")
		if !c.uninit {
			f.Init()
			f.Start()
			harness.Insert(t, f.Conn, "before", 1, "{}")
			harness.AwaitMessages(t, f.JS, f.Stream, 1)
			if code := f.Stop(); code != 0 {
				t.Fatalf("%s: stop: exit code %d", c.name, code)
			}
			harness.Insert(t, f.Conn, "meanwhile", 2, "{}")
		}
		c.damage(t, f)
		f.Log.Reset()
		f.Start()
		broken[i] = f
	}
	for i, c := range faults {
		t.Run(c.name, func(t *testing.T) {
			f := broken[i]
			if f == nil {
				t.Skipf("needs PostgreSQL %d", c.atLeast)
			}
			f.T = t
			f.MustEnd(c.code, c.report...)
			if t.Failed() {
				t.Logf("log:\n%s", f.Log.Tail(3000))
				return
			}
			if c.repair == nil {
				return
			}
			c.repair(t, f)
			f.Log.Reset()
			f.Start()
			if c.mendFails != 0 {
				f.MustEnd(c.mendFails, "LSN range")
				return
			}
			f.AwaitReady()
			harness.Insert(t, f.Conn, "after", 3, "{}")
			var n int
			harness.Must(t, f.Conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n))
			harness.AwaitMessages(t, f.JS, f.Stream, n)
			f.MustBeComplete(f.Conn, ns.URL())
		})
	}
}

// TestAForeignMessageStopsOutflow: somebody publishes into the ingress while outflow runs. Outflow stops
// rather than write beside the stranger, and goes on being stopped.
func TestAForeignMessageStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &harness.Installation{JS: harness.JetStream(t, ns.URL())}
	f.Outflow, f.Conn, f.URL = harness.Install(t, pgtest.Server(t), ns.URL(), "stranger")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
	harness.Must(t, err)
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.MustEnd(4, f.Stream, "Outflow header")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	if last := s.CachedInfo().State.LastSeq; last != 2 {
		t.Errorf("the stream ends at %d, want 2: nothing after the stranger's message", last)
	}
	// What was seen once is not forgotten by starting again, nor by removing the message.
	for _, what := range []string{"newest message", "somebody else published"} {
		f.Log.Reset()
		f.Start()
		f.MustEnd(4, what, "LSN range", "outflow repair --accept foreign_message")
		_ = s.DeleteMsg(t.Context(), 2) // the second time it is gone
	}
	// The cure: the event whose place it took comes behind it.
	if out, errOut, code := f.Run("repair", "--accept", "foreign_message"); code != 0 {
		t.Fatalf("repair: exit code %d\n%s%s", code, out, errOut)
	}
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	f.MustStop(t)
	if all := harness.Messages(t, f.JS, f.Stream); len(all) != 2 || all[1].Seq != 3 || all[1].Outflow.N != 0 {
		t.Errorf("%d messages in the stream, want the rows' two", len(all))
	}
}

// TestAForeignMessageBeforeTheFirstOwnStopsOutflow: somebody publishes into the ingress when a session has
// read where the stream ends, and has published nothing yet. His message takes the sequence of the first one;
// those behind it would be stored, and the stream's end would look right.
func TestAForeignMessageBeforeTheFirstOwnStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &harness.Installation{JS: harness.JetStream(t, ns.URL())}
	f.Outflow, f.Conn, f.URL = harness.Install(t, pgtest.Server(t), ns.URL(), "early")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.MustStop(t)
	const rows = 12
	for i := range rows - 1 {
		harness.Insert(t, f.Conn, "doc", 2+i, "{}")
	}
	f.Set("FAILPOINT=stop.publisher.before:1")
	f.Start()
	harness.Eventually(t, "it stands still", func() error { return harness.CheckFrozen(f.Process.PID()) })
	_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
	harness.Must(t, err)
	harness.Must(t, f.Process.Resume())
	f.MustEnd(4, f.Stream, "Outflow header", "LSN range")
	f.Set("FAILPOINT=")
	f.Log.Reset()
	f.Start()
	f.MustEnd(4, "foreign_message")
	if out, errOut, code := f.Run("repair", "--accept", "foreign_message"); code != 0 {
		t.Fatalf("repair: exit code %d\n%s%s", code, out, errOut)
	}
	f.Start()
	f.AwaitComplete(t, ns.URL(), 2)
	f.MustStop(t)
}

// TestADroppedPublicationStopsOutflow: the publication goes away while outflow runs. Rows of that time are in
// no stream of changes, and nobody would miss them: it stops, also after the publication has come back.
func TestADroppedPublicationStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &harness.Installation{JS: harness.JetStream(t, ns.URL())}
	f.Outflow, f.Conn, f.URL = harness.Install(t, pgtest.Server(t), ns.URL(), "dropped")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.MustEnd(3, "publication", f.Slot, "does not exist")
	harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
		" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	harness.Insert(t, f.Conn, "doc", 3, "{}")
	f.Log.Reset()
	f.Start()
	f.MustEndInGap("publication_changed")
	if n := len(harness.Messages(t, f.JS, f.Stream)); n != 1 {
		t.Errorf("%d messages, want 1: nothing is published beyond the gap", n)
	}
}
