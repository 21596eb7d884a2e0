package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// unconfirmed is an installation with messages that are published, and not confirmed to PostgreSQL.
func unconfirmed(t *testing.T, natsURL, slot string, settings ...string) *faulty {
	t.Helper()
	f := publishing(t, natsURL, slot, append(settings, "SINK_DURABLE_AFTER=1h")...)
	awaitMessages(t, f.js, f.stream, before)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	left(t, f.conn, f.slot)
	f.set("SINK_DURABLE_AFTER=0s") // a repair waits for it
	return f
}

// replaceStream makes the stream of other messages under the creation time that the record knows.
func (f *faulty) replaceStream(t *testing.T, change func([]*oracle.Message) []*oracle.Message) {
	t.Helper()
	f.putStream(t, change(messages(t, f.js, f.stream)))
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	created, err := json.Marshal(s.CachedInfo().Created)
	must(t, err)
	f.editRecord(t, func(rec map[string]any) { rec["stream_created"] = json.RawMessage(created) })
}

func strangerAt21(all []*oracle.Message) []*oracle.Message {
	all[20] = &oracle.Message{Subject: "outbox.stranger", Data: []byte("{}")}
	return all
}

// TestRepairOfStreams are losses that show in the stream alone.
func TestRepairOfStreams(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	together(t, []tampered{
		{"another last message", "divergence", false, false, func(all []*oracle.Message) []*oracle.Message {
			last := all[len(all)-1]
			last.Outflow.Thru++
			last.Header.Set("Outflow", last.Outflow.String())
			return all
		}, "new-slot", meanwhile, 0, false},
		{"a message is gone from the middle", "divergence", false, false, func(all []*oracle.Message) []*oracle.Message {
			return append(all[:20:20], all[21:]...)
		}, "new-slot", meanwhile + 1, 0, false},
		{"a stranger in the place of a message", "foreign_message", true, true, strangerAt21, "keep", 1, 21, false},
		{"a stranger, and the WAL is there", "foreign_message", true, false, strangerAt21, "keep", 0, 21, false},
		{"a stranger, and a kill before the next place", "foreign_message", false, false, strangerAt21, "keep", 0, 21, true},
		{"a stranger behind a cut window", "foreign_message", false, false, func(all []*oracle.Message) []*oracle.Message {
			return append(all[:30:30], &oracle.Message{Subject: "outbox.stranger", Data: []byte("{}")})
		}, "keep", 0, 31, false}, // what was cut off is in the WAL
	}, func(c tampered) string { return c.name }, func(t *testing.T, _ int, c tampered) {
		var f *faulty
		if c.confirmed {
			f = publishing(t, ns.URL(), "odd").stopped(t)
		} else {
			f = unconfirmed(t, ns.URL(), "odd")
		}
		f.replaceStream(t, c.change)
		if c.killed {
			f.editRecord(t, func(rec map[string]any) { rec["places"] = rec["places"].([]any)[:1] })
		}
		for i := range meanwhile {
			row(t, f.conn, "meanwhile", 500+i, "{}")
		}
		if !c.runs {
			f.log.Reset()
			f.start()
			f.ends(4, "outflow repair --accept "+c.code)
		}
		was := f.state(t)
		r, stderr, code := f.repair()
		if code != 4 || r.Fault != c.code || r.Mode != c.mode || r.Missing != c.missing || f.state(t) != was {
			t.Fatalf("look: exit code %d, %+v\n%s", code, r, stderr)
		}
		if r, stderr, code := f.repair("--accept", c.code); code != 0 || r.Published != c.missing {
			t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
		}
		f.log.Reset()
		f.start()
		f.ready()
		row(t, f.conn, "after", 2000, "{}")
		f.complete(t, ns.URL(), c.stranger)
		if code := f.term(); code != 0 {
			t.Errorf("stop: exit code %d", code)
		}
		if r, stderr, code := f.repair(); code != 0 || r.Fault != "" {
			t.Errorf("afterwards: exit code %d, %+v\n%s", code, r, stderr)
		}
	})
}

// tampered is a stream that somebody changed.
type tampered struct {
	name, code string
	runs       bool // outflow run does not see it
	confirmed  bool // what is in the stream, to PostgreSQL
	change     func([]*oracle.Message) []*oracle.Message
	mode       string
	missing    int
	stranger   uint64 // its sequence, for the comparison
	killed     bool   // the record knows only the first place
}

// repairOtherSettings: a record can be rebuilt only with the settings that were in force; else the table has to help.
func repairOtherSettings(t *testing.T, natsURL string) {
	f := &faulty{js: js(t, natsURL)}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), natsURL, "other", "SINK_DURABLE_AFTER=1h", "REORDER_HORIZON=300ms")
	f.init()
	f.start()
	f.ready()
	for i := range 30 {
		row(t, f.conn, "doc", 30-i, "{}")
	}
	awaitMessages(t, f.js, f.stream, 30)
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	left(t, f.conn, f.slot)
	f.deleteRecord(t)
	f.set("REORDER_HORIZON=0s", "SINK_DURABLE_AFTER=0s")
	was := f.state(t)
	if r, stderr, code := f.repair("--accept", "record_missing"); code != 4 || !strings.Contains(stderr, "OUTFLOW_REORDER_HORIZON") || r.Repaired || f.state(t) != was {
		t.Fatalf("with other settings: exit code %d, %+v\n%s", code, r, stderr)
	}
	if r, stderr, code := f.repair("--new-slot"); code != 4 || r.Mode != "new-slot" || r.Missing != 0 || !strings.HasSuffix(r.Command, "--new-slot") {
		t.Fatalf("with a new slot: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.set("REORDER_HORIZON=300ms")
	if r, stderr, code := f.repair("--accept", "record_missing"); code != 0 || r.Mode != "record" {
		t.Fatalf("with those in force: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.log.Reset()
	f.start()
	f.goesOn(t, natsURL, 0)
}

// repairOtherCluster: the rows went to another cluster, of another version; the stream goes on from there.
func repairOtherCluster(t *testing.T, natsURL string) {
	const name = "shop"
	old, oldURL := own(t, pgtest.Server(t).Installation.Major, name)
	now, url := own(t, otherMajor(t), name)
	t.Logf("%v to %v", old.Installation, now.Installation)
	f := &faulty{js: js(t, natsURL), url: oldURL, conn: db(t, oldURL)}
	f.outflow = newOutflow(t, oldURL, natsURL, slotName("moved"))
	f.named(strings.ToUpper(f.slot))
	f.init()
	f.start()
	mustExec(t, f.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', 'anna', n, '{}' FROM generate_series(1, $1::int) n", before)
	f.stopped(t)
	copyOutbox(t, f, url)
	f.url, f.conn = url, db(t, url)
	f.set("POSTGRES_URL=" + url)
	mustExec(t, f.conn, "CREATE PUBLICATION "+f.slot+" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	f.loseRows(t)
	f.start()
	f.ends(4, "system identifier", "outflow repair --accept system_changed")
	r, stderr, code := f.repair("--accept", "system_changed")
	if code != 0 || r.Published != meanwhile {
		t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.log.Reset()
	f.start()
	f.goesOn(t, natsURL, 0)
}

// own is a server of its own with a database.
func own(t *testing.T, major int, database string) (*pgserver.Server, string) {
	t.Helper()
	s := pgtest.Own(t, major)
	url, err := s.CreateDatabase(t.Context(), database)
	must(t, err)
	return s, url
}

// otherMajor is a version that is installed beside that of the shared server.
func otherMajor(t *testing.T) int {
	t.Helper()
	shared := pgtest.Server(t).Installation.Major
	for major := 18; major > shared; major-- {
		if _, err := pgserver.Find(major); err == nil {
			return major
		}
	}
	return shared
}

// copyOutbox makes the outbox in another database, with its rows.
func copyOutbox(t *testing.T, f *faulty, url string) {
	t.Helper()
	to := db(t, url)
	mustExec(t, to, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL)`)
	rows, err := f.conn.Query(t.Context(), "SELECT id::text, doc_id, actor_id, counter, payload::text FROM outbox")
	must(t, err)
	defer rows.Close()
	for rows.Next() {
		v, err := rows.Values()
		must(t, err)
		mustExec(t, to, "INSERT INTO outbox (id, doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4, $5::jsonb)", v...)
	}
	must(t, rows.Err())
}
