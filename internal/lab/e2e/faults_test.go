package e2e

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// fault is a set-up that somebody broke: what outflow run says then, and whether it can be mended so that nothing is missing.
type fault struct {
	name      string
	atLeast   int // PostgreSQL's major, 0: any
	uninit    bool
	smash     func(t *testing.T, f *faulty)
	code      int
	says      []string
	mend      func(t *testing.T, f *faulty)
	mendFails int // after mending, run ends with this code and a range; 0: it goes on
}

// faulty is an installation that has published a row, was stopped, broken, and started again.
type faulty struct {
	*outflow
	conn *pgx.Conn
	js   jetstream.JetStream
	url  string
}

var faults = []fault{
	{name: "before init", uninit: true, smash: func(*testing.T, *faulty) {}, code: 3, says: []string{"public.outbox", "outflow init"},
		mend: func(_ *testing.T, f *faulty) { f.init() }},
	{name: "table made, before init", uninit: true, code: 3, says: []string{"outflow init"},
		smash: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "CREATE TABLE outbox (id int, doc_id text, actor_id text, seq_key text, payload jsonb)")
		}},
	{name: "mapped column missing", code: 3, says: []string{`"body"`, "columns.payload"},
		smash: func(_ *testing.T, f *faulty) { f.set("COLUMNS_PAYLOAD=body") },
		mend:  func(_ *testing.T, f *faulty) { f.set("COLUMNS_PAYLOAD=payload") }},
	{name: "column of a header missing", code: 3, says: []string{`"event_type"`, "headers"},
		smash: func(_ *testing.T, f *faulty) { f.set("HEADERS=Type=event_type") },
		mend:  func(_ *testing.T, f *faulty) { f.set("HEADERS=") }},
	{name: "publication missing", code: 3, says: []string{"publication", "does not exist"},
		smash: func(t *testing.T, f *faulty) { mustExec(t, f.conn, "DROP PUBLICATION "+f.slot) },
		mend: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "CREATE PUBLICATION "+f.slot+" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
		}, mendFails: 4},
	{name: "publication without the table", code: 3, says: []string{"publication", "public.outbox", "ALTER PUBLICATION"},
		smash: func(t *testing.T, f *faulty) { mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" DROP TABLE outbox") }},
	{name: "publication with a row filter", atLeast: 15, code: 3, says: []string{"publication", "filter"},
		smash: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" SET TABLE outbox WHERE (counter > 5)")
		}},
	{name: "publication of updates", code: 3, says: []string{"publication", "publish = 'insert'"},
		smash: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" SET (publish = 'update')")
		}},
	{name: "slot missing", code: 4, says: []string{"slot", "does not exist", "LSN range", "outflow init"},
		smash: func(t *testing.T, f *faulty) { mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot) }},
	{name: "slot made anew", code: 4, says: []string{"slot", "LSN range", "outflow init"},
		smash: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
			mustExec(t, f.conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.slot)
		}},
	{name: "slot of another plugin", code: 4, says: []string{"slot", "plugin", "test_decoding"},
		smash: func(t *testing.T, f *faulty) {
			mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
			mustExec(t, f.conn, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", f.slot)
		}},
	{name: "stream missing", code: 4, says: []string{"stream", "does not exist", "LSN range", "nats stream restore"},
		smash: func(t *testing.T, f *faulty) { must(t, f.js.DeleteStream(t.Context(), f.stream)) }},
	{name: "stream made anew", code: 4, says: []string{"stream", "was made at", "LSN range"},
		smash: func(t *testing.T, f *faulty) {
			s, err := f.js.Stream(t.Context(), f.stream)
			must(t, err)
			cfg := s.CachedInfo().Config
			must(t, f.js.DeleteStream(t.Context(), f.stream))
			_, err = f.js.CreateStream(t.Context(), cfg)
			must(t, err)
		}},
	{name: "record deleted", code: 4, says: []string{"checkpoint record", "missing", "LSN range", "nats kv"},
		smash: func(t *testing.T, f *faulty) {
			kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
			must(t, err)
			must(t, kv.Delete(t.Context(), f.slot))
		}},
	{name: "subject added to the stream", code: 3, says: []string{"stream", "orders.>", "subject"},
		smash: func(t *testing.T, f *faulty) { editSubjects(t, f, "orders.>") },
		mend:  func(t *testing.T, f *faulty) { editSubjects(t, f) }},
	{name: "foreign message", code: 4, says: []string{"newest message", "Outflow header", "LSN range"},
		smash: func(t *testing.T, f *faulty) {
			_, err := f.js.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
			must(t, err)
		}},
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ingress is the prefix of the stream's private subject.
func ingress(t *testing.T, f *faulty) string {
	t.Helper()
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	return strings.TrimSuffix(s.CachedInfo().Config.Subjects[0], ">")
}

// editSubjects gives the stream its ingress and more subjects.
func editSubjects(t *testing.T, f *faulty, more ...string) {
	t.Helper()
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = append(cfg.Subjects[:1], more...)
	_, err = f.js.UpdateStream(t.Context(), cfg)
	must(t, err)
}

// TestFaults breaks a set-up in one way after the other. A loss counts only when a second reading, 5 s later, agrees: so all of them
// run at the same time.
func TestFaults(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	broken := make([]*faulty, len(faults))
	for i, c := range faults {
		if pg.Installation.Major < c.atLeast {
			continue
		}
		f := &faulty{js: js(t, ns.URL())}
		f.outflow, f.conn, f.url = installation(t, pg, ns.URL(), "fault")
		if !c.uninit {
			f.init()
			f.start()
			row(t, f.conn, "before", 1, "{}")
			awaitMessages(t, f.js, f.stream, 1)
			if code := f.term(); code != 0 {
				t.Fatalf("%s: stop: exit code %d", c.name, code)
			}
			row(t, f.conn, "meanwhile", 2, "{}")
		}
		c.smash(t, f)
		f.log.Reset()
		f.start()
		broken[i] = f
	}
	for i, c := range faults {
		t.Run(c.name, func(t *testing.T) {
			f := broken[i]
			if f == nil {
				t.Skipf("needs PostgreSQL %d", c.atLeast)
			}
			f.t = t
			f.ends(c.code, c.says...)
			if t.Failed() {
				t.Logf("log:\n%s", f.log.tail(3000))
				return
			}
			if c.mend == nil {
				return
			}
			c.mend(t, f)
			f.log.Reset()
			f.start()
			if c.mendFails != 0 {
				f.ends(c.mendFails, "LSN range")
				return
			}
			f.ready()
			row(t, f.conn, "after", 3, "{}")
			var n int
			must(t, f.conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n))
			awaitMessages(t, f.js, f.stream, n)
			f.mustBeComplete(f.conn, ns.URL())
		})
	}
}

// TestForeignPublisher: somebody publishes into the ingress while outflow runs. Outflow stops rather than write beside the stranger,
// and goes on being stopped.
func TestForeignPublisher(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "stranger")
	f.init()
	f.start()
	row(t, f.conn, "doc", 1, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	_, err := f.js.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
	must(t, err)
	row(t, f.conn, "doc", 2, "{}")
	f.ends(4, f.stream, "Outflow header")
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	if last := s.CachedInfo().State.LastSeq; last != 2 {
		t.Errorf("the stream ends at %d, want 2: nothing after the stranger's message", last)
	}
	// What was seen once is not forgotten by starting again, nor by removing the message.
	for _, what := range []string{"newest message", "somebody else published"} {
		f.log.Reset()
		f.start()
		f.ends(4, what, "LSN range", "outflow repair --accept foreign_message")
		_ = s.DeleteMsg(t.Context(), 2) // the second time it is gone
	}
	// The cure: the event whose place it took comes behind it.
	if out, errOut, code := f.exec("repair", "--accept", "foreign_message"); code != 0 {
		t.Fatalf("repair: exit code %d\n%s%s", code, out, errOut)
	}
	f.start()
	awaitMessages(t, f.js, f.stream, 3)
	if code := f.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if all := messages(t, f.js, f.stream); len(all) != 2 || all[1].Seq != 3 || all[1].Outflow.N != 0 {
		t.Errorf("%d messages in the stream, want the rows' two", len(all))
	}
}

// TestForeignPublisherAtTheStart: somebody publishes into the ingress when a session has read where the stream ends, and has published
// nothing yet. His message takes the sequence of the first one; those behind it would be stored, and the stream's end would look right.
func TestForeignPublisherAtTheStart(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "early")
	f.init()
	f.start()
	row(t, f.conn, "doc", 1, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	const rows = 12
	for i := range rows - 1 {
		row(t, f.conn, "doc", 2+i, "{}")
	}
	f.set("FAILPOINT=stop.publisher.before:1")
	f.start()
	eventually(t, "it stands still", func() error { return stopped(f.child.PID()) })
	_, err := f.js.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
	must(t, err)
	must(t, f.child.Resume())
	f.ends(4, f.stream, "Outflow header", "LSN range")
	f.set("FAILPOINT=")
	f.log.Reset()
	f.start()
	f.ends(4, "foreign_message")
	if out, errOut, code := f.exec("repair", "--accept", "foreign_message"); code != 0 {
		t.Fatalf("repair: exit code %d\n%s%s", code, out, errOut)
	}
	f.start()
	f.complete(t, ns.URL(), 2)
	if code := f.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestPublicationDropped: the publication goes away while outflow runs. Rows of that time are in no stream of changes, and nobody
// would miss them: it stops, also after the publication has come back.
func TestPublicationDropped(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	f := &faulty{js: js(t, ns.URL())}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), ns.URL(), "dropped")
	f.init()
	f.start()
	row(t, f.conn, "doc", 1, "{}")
	awaitMessages(t, f.js, f.stream, 1)
	mustExec(t, f.conn, "DROP PUBLICATION "+f.slot)
	row(t, f.conn, "doc", 2, "{}")
	f.ends(3, "publication", f.slot, "does not exist")
	mustExec(t, f.conn, "CREATE PUBLICATION "+f.slot+" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	row(t, f.conn, "doc", 3, "{}")
	f.log.Reset()
	f.start()
	f.ends(4, "publication", "LSN range", "outflow repair --accept publication_changed")
	if n := len(messages(t, f.js, f.stream)); n != 1 {
		t.Errorf("%d messages, want 1: nothing is published beyond the gap", n)
	}
}
