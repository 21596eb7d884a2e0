package repair

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// faultCase is a set-up that somebody broke: how outflow run ends then, and whether it can be mended so that
// nothing is missing.
type faultCase struct {
	name      string
	atLeast   int // PostgreSQL's major, 0: any
	uninit    bool
	damage    func(t *testing.T, f *harness.Installation)
	gap       string   // it ends with a gap of this code; "": with exit code 3, and
	names     []string // the message names what has to be changed
	repair    func(t *testing.T, f *harness.Installation)
	mendedGap string // the gap that is left after mending; "": it goes on
}

var faults = []faultCase{
	{name: "before init", uninit: true, damage: func(*testing.T, *harness.Installation) {},
		names:  []string{"public.outbox", "outflow init"},
		repair: func(_ *testing.T, f *harness.Installation) { f.Init() }},
	{name: "table made, before init", uninit: true, names: []string{"outflow init"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "CREATE TABLE outbox (id int, doc_id text, actor_id text, seq_key "+
				"text, payload jsonb)")
		}},
	{name: "mapped column missing", names: []string{`"body"`, "columns.payload"},
		damage: func(_ *testing.T, f *harness.Installation) { f.Set("COLUMNS_PAYLOAD=body") },
		repair: func(_ *testing.T, f *harness.Installation) { f.Set("COLUMNS_PAYLOAD=payload") }},
	{name: "column of a header missing", names: []string{`"event_type"`, "headers"},
		damage: func(_ *testing.T, f *harness.Installation) { f.Set("HEADERS=Type=event_type") },
		repair: func(_ *testing.T, f *harness.Installation) { f.Set("HEADERS=") }},
	{name: "publication missing", names: []string{"publication", "does not exist"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
		},
		repair: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
				" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
		}, mendedGap: "publication_changed"},
	{name: "publication without the table", names: []string{"publication", "public.outbox",
		"ALTER PUBLICATION"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" DROP TABLE outbox")
		}},
	{name: "publication with a row filter", atLeast: 15, names: []string{"publication", "filter"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET TABLE outbox WHERE (counter > 5)")
		}},
	{name: "publication of updates", names: []string{"publication", "publish = 'insert'"},
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" SET (publish = 'update')")
		}},
	{name: "slot missing", gap: "slot_missing",
		damage: func(t *testing.T, f *harness.Installation) { f.DropSlot(t) }},
	{name: "slot made anew", gap: "slot_ahead",
		damage: func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
		}},
	{name: "slot of another plugin", gap: "slot_plugin",
		damage: func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", f.Slot)
		}},
	{name: "stream missing", gap: "stream_missing",
		damage: func(t *testing.T, f *harness.Installation) {
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
		}},
	{name: "stream made anew", gap: "stream_recreated",
		damage: func(t *testing.T, f *harness.Installation) {
			s, err := f.JS.Stream(t.Context(), f.Stream)
			harness.Must(t, err)
			cfg := s.CachedInfo().Config
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
			_, err = f.JS.CreateStream(t.Context(), cfg)
			harness.Must(t, err)
		}},
	{name: "record deleted", gap: "record_missing",
		damage: func(t *testing.T, f *harness.Installation) { f.DeleteRecord(t) }},
	{name: "subject added to the stream", names: []string{"stream", "orders.>", "subject"},
		damage: func(t *testing.T, f *harness.Installation) { editSubjects(t, f, "orders.>") },
		repair: func(t *testing.T, f *harness.Installation) { editSubjects(t, f) }},
	{name: "foreign message", gap: "foreign_message",
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
// when a recheck, 5 s later, agrees: so all of them run at the same time.
func TestABrokenSetupStopsOutflowUntilItIsMended(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns, faults := natstest.Server(t), harness.Part(2, faults)
	pg := pgtest.Server(t)
	broken := make([]*harness.Installation, len(faults))
	for i, c := range faults {
		if pg.Installation.Major < c.atLeast {
			continue
		}
		f := harness.NewInstallation(t, pg, ns.URL(), "fault")
		if !c.uninit {
			f.Init()
			f.Start()
			harness.Insert(t, f.Conn, "before", 1, "{}")
			harness.AwaitMessages(t, f.JS, f.Stream, 1)
			f.MustStop(t)
			harness.Insert(t, f.Conn, "meanwhile", 2, "{}")
		}
		c.damage(t, f)
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
			if c.gap != "" {
				f.MustEndInGap(c.gap)
			} else {
				f.MustEnd(3, c.names...)
			}
			if t.Failed() {
				t.Logf("log:\n%s", f.Log.Tail(3000))
				return
			}
			if c.repair == nil {
				return
			}
			c.repair(t, f)
			f.Start()
			if c.mendedGap != "" {
				f.MustEndInGap(c.mendedGap)
				return
			}
			f.AwaitReady()
			harness.Insert(t, f.Conn, "after", 3, "{}")
			f.AwaitComplete(t, ns.URL(), 0)
		})
	}
}

// started is an outflow that runs and has published an event.
func started(t *testing.T, name string) (f *harness.Installation, natsURL string) {
	t.Helper()
	natsURL = natstest.Server(t).URL()
	f = harness.NewInstallation(t, pgtest.Server(t), natsURL, name)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	return f, natsURL
}

// TestAForeignMessageStopsOutflow: somebody publishes into the ingress while outflow runs. Outflow stops
// rather than write beside the stranger, and goes on being stopped.
func TestAForeignMessageStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	f, _ := started(t, "stranger")
	_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
	harness.Must(t, err)
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.MustEndInGap("foreign_message")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	if last := s.CachedInfo().State.LastSeq; last != 2 {
		t.Errorf("the stream ends at %d, want 2: nothing after the stranger's message", last)
	}
	// What was seen once is not forgotten by starting again, nor by removing the message.
	for range 2 {
		f.Start()
		f.MustEndInGap("foreign_message")
		_ = s.DeleteMsg(t.Context(), 2) // the second time it is gone
	}
	// The cure: the event whose place it took comes behind it.
	f.MustRun("repair", "--accept", "foreign_message")
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	f.MustStop(t)
	if all := harness.Messages(t, f.JS, f.Stream); len(all) != 2 || all[1].Seq != 3 || all[1].Outflow.N != 0 {
		t.Errorf("%d messages in the stream, want the rows' two", len(all))
	}
}

// TestAStreamThatIsOpenedStopsOutflow: while outflow runs somebody gives the stream a subject of its own,
// where nobody watches who publishes. Outflow stops, also once that is undone, until a repair has looked.
func TestAStreamThatIsOpenedStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	f, _ := started(t, "opened")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	closed := s.CachedInfo().Config
	opened := closed
	opened.Subjects = append(slices.Clone(closed.Subjects), "public.>")
	_, err = f.JS.UpdateStream(t.Context(), opened)
	harness.Must(t, err)
	f.MustEndInGap("foreign_message")
	_, err = f.JS.UpdateStream(t.Context(), closed)
	harness.Must(t, err)
	f.Start()
	f.MustEndInGap("foreign_message")
	f.MustRun("repair", "--accept", "foreign_message")
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 2)
	f.MustStop(t)
}

// TestAForeignMessageBeforeTheFirstOwnStopsOutflow: somebody publishes into the ingress when a session has
// read where the stream ends, and has published nothing yet. His message takes the sequence of the first one;
// those behind it would be stored, and the stream's end would look right.
func TestAForeignMessageBeforeTheFirstOwnStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	f, natsURL := started(t, "early")
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
	f.MustEndInGap("foreign_message")
	f.Set("FAILPOINT=")
	f.Start()
	f.MustEndInGap("foreign_message")
	f.MustRun("repair", "--accept", "foreign_message")
	f.Start()
	f.AwaitComplete(t, natsURL, 2)
	f.MustStop(t)
}

// TestADroppedPublicationStopsOutflow: the publication goes away while outflow runs. Rows of that time are in
// no stream of changes, and nobody would miss them: it stops, also after the publication has come back.
func TestADroppedPublicationStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	f, _ := started(t, "dropped")
	harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.MustEnd(3, "publication", f.Slot, "does not exist")
	harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
		" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	harness.Insert(t, f.Conn, "doc", 3, "{}")
	f.Start()
	f.MustEndInGap("publication_changed")
	if n := len(harness.Messages(t, f.JS, f.Stream)); n != 1 {
		t.Errorf("%d messages, want 1: nothing is published beyond the gap", n)
	}
}
