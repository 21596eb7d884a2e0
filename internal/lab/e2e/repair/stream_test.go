package repair

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// unconfirmed is an installation with messages that are published, and not confirmed to PostgreSQL.
func unconfirmed(t *testing.T, natsURL, slot string, settings ...string) *harness.Installation {
	t.Helper()
	f := publishing(t, natsURL, slot, append(settings, "SINK_DURABLE_AFTER=1h")...)
	harness.AwaitMessages(t, f.JS, f.Stream, before)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Set("SINK_DURABLE_AFTER=0s") // a repair waits for it
	return f
}

// replaceStream makes the stream of other messages under the creation time that the record knows.
func replaceStream(f *harness.Installation, t *testing.T, change func([]*oracle.Message) []*oracle.Message) {
	t.Helper()
	putStream(f, t, change(harness.Messages(t, f.JS, f.Stream)))
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	created, err := json.Marshal(s.CachedInfo().Created)
	harness.Must(t, err)
	harness.EditRecord(t, f, func(rec map[string]any) { rec["stream_created"] = json.RawMessage(created) })
}

func strangerAt21(all []*oracle.Message) []*oracle.Message {
	all[20] = &oracle.Message{Subject: "outbox.stranger", Data: []byte("{}")}
	return all
}

// TestARepairClosesGapsThatTheStreamAloneShows are losses that show in the stream alone.
func TestARepairClosesGapsThatTheStreamAloneShows(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	harness.RunAtOnce(t, harness.Part(3, []tampered{
		{"another last message", "divergence", false, false, func(all []*oracle.Message) []*oracle.Message {
			last := all[len(all)-1]
			last.Outflow.Thru++
			last.Header.Set("Outflow", last.Outflow.String())
			return all
		}, "new-slot", meanwhile, 0, false},
		{"a message is gone from the middle", "divergence", false, false,
			func(all []*oracle.Message) []*oracle.Message {
				return append(all[:20:20], all[21:]...)
			}, "new-slot", meanwhile + 1, 0, false},
		{"a stranger in the place of a message", "foreign_message", true, true, strangerAt21, "keep", 1, 21,
			false},
		{"a stranger, and the WAL is there", "foreign_message", true, false, strangerAt21, "keep", 0, 21,
			false},
		{"a stranger, and a kill before the next checkpoint", "foreign_message", false, false, strangerAt21,
			"keep", 0, 21, true},
		{"a stranger behind a cut window", "foreign_message", false, false,
			func(all []*oracle.Message) []*oracle.Message {
				return append(all[:30:30], &oracle.Message{Subject: "outbox.stranger", Data: []byte("{}")})
			}, "keep", 0, 31, false}, // what was cut off is in the WAL
	}), func(c tampered) string { return c.name }, func(t *testing.T, _ int, c tampered) {
		var f *harness.Installation
		if c.confirmed {
			f = stopWhenPublished(publishing(t, ns.URL(), "odd"), t)
		} else {
			f = unconfirmed(t, ns.URL(), "odd")
		}
		replaceStream(f, t, c.change)
		if c.killed {
			harness.EditRecord(t, f, func(rec map[string]any) { rec["places"] = rec["places"].([]any)[:1] })
		}
		for i := range meanwhile {
			harness.Insert(t, f.Conn, "meanwhile", 500+i, "{}")
		}
		if !c.runs {
			f.Start()
			f.MustEndInGap(c.code)
		}
		was := state(f, t)
		r, stderr, code := f.Repair()
		if code != 4 || r.Fault != c.code || r.Mode != c.mode || r.Missing != c.missing ||
			state(f, t) != was {
			t.Fatalf("look: exit code %d, %+v\n%s", code, r, stderr)
		}
		if r, stderr, code := f.Repair("--accept", c.code); code != 0 || r.Published != c.missing {
			t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
		}
		f.Start()
		f.AwaitReady()
		harness.Insert(t, f.Conn, "after", 2000, "{}")
		f.AwaitComplete(t, ns.URL(), c.stranger)
		f.MustStop(t)
		if r, stderr, code := f.Repair(); code != 0 || r.Fault != "" {
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
	killed     bool   // the record knows only the first checkpoint
}

// repairOtherSettings: a record can be rebuilt only with the settings that were in force; else the table has
// to help.
func repairOtherSettings(t *testing.T, natsURL string) {
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, "other", "SINK_DURABLE_AFTER=1h",
		"REORDER_HORIZON=300ms")
	f.Init()
	f.Start()
	f.AwaitReady()
	for i := range 30 {
		harness.Insert(t, f.Conn, "doc", 30-i, "{}")
	}
	harness.AwaitMessages(t, f.JS, f.Stream, 30)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.DeleteRecord(t)
	f.Set("REORDER_HORIZON=0s", "SINK_DURABLE_AFTER=0s")
	was := state(f, t)
	if r, stderr, code := f.Repair("--accept", "record_missing"); code != 4 ||
		!strings.Contains(stderr, "OUTFLOW_REORDER_HORIZON") || r.Repaired || state(f, t) != was {
		t.Fatalf("with other settings: exit code %d, %+v\n%s", code, r, stderr)
	}
	if r, stderr, code := f.Repair("--new-slot"); code != 4 || r.Mode != "new-slot" || r.Missing != 0 ||
		!strings.HasSuffix(r.Command, "--new-slot") {
		t.Fatalf("with a new slot: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.Set("REORDER_HORIZON=300ms")
	if r, stderr, code := f.Repair("--accept", "record_missing"); code != 0 || r.Mode != "record" {
		t.Fatalf("with those in force: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.Start()
	mustGoOn(f, t, natsURL, 0)
}

// repairOtherCluster: the rows went to another cluster, of another version; the stream goes on from there.
func repairOtherCluster(t *testing.T, natsURL string) {
	const name = "shop"
	old, oldURL := own(t, olderMajor(t), name)
	now, url := own(t, pgtest.Server(t).Installation.Major, name)
	t.Logf("%v to %v", old.Installation, now.Installation)
	f := &harness.Installation{JS: harness.JetStream(t, natsURL), URL: oldURL,
		Conn: harness.Connect(t, oldURL)}
	f.Outflow = harness.New(t, oldURL, natsURL, harness.SlotName("moved"))
	f.UseStream(strings.ToUpper(f.Slot))
	f.Init()
	f.Start()
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', 'anna', "+
		"n, '{}' FROM generate_series(1, $1::int) n", before)
	stopWhenPublished(f, t)
	copyOutbox(t, f, url)
	f.URL, f.Conn = url, harness.Connect(t, url)
	f.Set("POSTGRES_URL=" + url)
	harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
		" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	loseRows(f, t)
	f.Start()
	f.MustEndInGap("system_changed")
	r, stderr, code := f.Repair("--accept", "system_changed")
	if code != 0 || r.Published != meanwhile {
		t.Fatalf("repair: exit code %d, %+v\n%s", code, r, stderr)
	}
	f.Start()
	mustGoOn(f, t, natsURL, 0)
}

// own is a server of its own with a database.
func own(t *testing.T, major int, database string) (*pgserver.Server, string) {
	t.Helper()
	s := pgtest.Own(t, major)
	url, err := s.CreateDatabase(t.Context(), database)
	harness.Must(t, err)
	return s, url
}

// olderMajor is the oldest version that is installed beside that of the shared server.
func olderMajor(t *testing.T) int {
	t.Helper()
	shared := pgtest.Server(t).Installation.Major
	for major := pgserver.Oldest; major < shared; major++ {
		if installed(major) {
			return major
		}
	}
	return shared
}

// copyOutbox makes the outbox in another database, with its rows.
func copyOutbox(t *testing.T, f *harness.Installation, url string) {
	t.Helper()
	to := harness.Connect(t, url)
	harness.Exec(t, to, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
		doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
		'0')) STORED, payload jsonb NOT NULL)`)
	rows, err := f.Conn.Query(t.Context(),
		"SELECT id::text, doc_id, actor_id, counter, payload::text FROM outbox")
	harness.Must(t, err)
	defer rows.Close()
	for rows.Next() {
		v, err := rows.Values()
		harness.Must(t, err)
		harness.Exec(t, to, "INSERT INTO outbox (id, doc_id, actor_id, counter, payload) VALUES ($1, $2, "+
			"$3, $4, $5::jsonb)", v...)
	}
	harness.Must(t, rows.Err())
}

// TestARecordIsRebuiltBehindALostEnd: the broker lost the end of the stream, its events came again, and then
// the record is lost. The message behind the hole says what is missing, so the WAL makes what is there.
func TestARecordIsRebuiltBehindALostEnd(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const lost = 5
	ns := natstest.Server(t)
	f := unconfirmed(t, ns.URL(), "lost_end_record")
	f.Set("SINK_DURABLE_AFTER=1h")
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	for seq := before; seq > before-lost; seq-- {
		harness.Must(t, s.DeleteMsg(t.Context(), uint64(seq)))
	}
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, before+lost)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.DeleteRecord(t)
	f.MustRun("repair", "--accept", "record_missing")
	f.Start()
	harness.Insert(t, f.Conn, "after", 1, "{}")
	f.AwaitComplete(t, ns.URL(), 0)
	f.MustStop(t)
}
