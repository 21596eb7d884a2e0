package repair

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// gapCase is a set-up that lost something: what outflow run says, and what a repair finds.
type gapCase struct {
	name    string
	code    string // that outflow run ends with
	atLeast int    // PostgreSQL's major, 0: any
	damage  func(t *testing.T, f *harness.Installation)
	mode    string
	missing int // of the rows before and meanwhile; -1: not compared
}

const (
	before    = 40 // rows that are published before the loss
	meanwhile = 3  // rows that are written after it
)

var gaps = []gapCase{
	{"slot dropped", "slot_missing", 0, func(t *testing.T, f *harness.Installation) { f.DropSlot(t) },
		"new-slot", meanwhile},
	{"slot made anew", "slot_ahead", 0, func(t *testing.T, f *harness.Installation) {
		f.DropSlot(t)
		loseRows(f, t)
		harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
	}, "keep", meanwhile},
	{"slot moved", "slot_ahead", 0, func(t *testing.T, f *harness.Installation) {
		loseRows(f, t)
		harness.Exec(t, f.Conn, "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", f.Slot)
	}, "keep", meanwhile},
	{"publication made anew", "publication_changed", 0, func(t *testing.T, f *harness.Installation) {
		harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
		loseRows(f, t)
		harness.Exec(t, f.Conn, "CREATE PUBLICATION "+f.Slot+
			" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	}, "new-slot", 2 * meanwhile},
	{"table out of the publication", "publication_changed", 0, func(t *testing.T, f *harness.Installation) {
		harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" DROP TABLE outbox")
		loseRows(f, t)
		harness.Exec(t, f.Conn, "ALTER PUBLICATION "+f.Slot+" ADD TABLE outbox")
	}, "keep", meanwhile},
	{"stream missing", "stream_missing", 0, func(t *testing.T, f *harness.Installation) {
		harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	},
		"keep", before},
	{"stream made anew", "stream_recreated", 0, func(t *testing.T, f *harness.Installation) {
		remakeStream(f, t, 0)
	}, "keep", before},
	{"stream put back from a copy", "stream_recreated", 0, func(t *testing.T, f *harness.Installation) {
		remakeStream(f, t, before)
	}, "record", -1},
	{"stream put back from an older copy", "stream_recreated", 0,
		func(t *testing.T, f *harness.Installation) { remakeStream(f, t, before-7) }, "keep", 7},
	{"record deleted", "record_missing", 0, func(t *testing.T, f *harness.Installation) { f.DeleteRecord(t) },
		"record", -1},
	{"record deleted with its bucket", "record_missing", 0, func(t *testing.T, f *harness.Installation) {
		harness.Must(t, f.JS.DeleteKeyValue(t.Context(), "outflow-"+f.Stream))
	}, "record", -1},
	{"record deleted, stream put back from an older copy", "record_missing", 0,
		func(t *testing.T, f *harness.Installation) {
			f.DeleteRecord(t)
			remakeStream(f, t, before-7)
		}, "keep", 7},
	{"record corrupt", "record_corrupt", 0, func(t *testing.T, f *harness.Installation) {
		kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
		harness.Must(t, err)
		_, err = kv.PutString(t.Context(), f.Slot, `{"v":1,"slot":"`)
		harness.Must(t, err)
	}, "record", -1},
	{"record and stream deleted", "record_missing", 0, func(t *testing.T, f *harness.Installation) {
		f.DeleteRecord(t)
		harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	}, "keep", before},
	{"a cut at the end", "cut_ahead", 0, func(t *testing.T, f *harness.Installation) {
		publishCut(t, f, 1<<60)
	}, "keep", 0},
	{"record and slot deleted", "record_missing", 0, func(t *testing.T, f *harness.Installation) {
		f.DeleteRecord(t)
		f.DropSlot(t)
	}, "new-slot", meanwhile},
	{"stranger at the end", "foreign_message", 0, func(t *testing.T, f *harness.Installation) {
		_, err := f.JS.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
		harness.Must(t, err)
	}, "keep", 0},
	{"record deleted, and a cut that is closed", "record_missing", 0,
		func(t *testing.T, f *harness.Installation) {
			publishCut(t, f, 1)
			f.DeleteRecord(t)
		}, "record", -1},
	{"another cluster", "system_changed", 0, func(t *testing.T, f *harness.Installation) {
		harness.EditRecord(t, f, func(rec map[string]any) { rec["system_id"] = "7000000000000000000" })
	}, "new-slot", meanwhile},
	{"server behind", "server_behind", 0, func(t *testing.T, f *harness.Installation) {
		harness.EditRecord(t, f, func(rec map[string]any) {
			for _, p := range rec["places"].([]any) {
				p.(map[string]any)["due"] = "FFFF/" + strings.Split(p.(map[string]any)["due"].(string),
					"/")[1]
			}
		})
	}, "new-slot", meanwhile},
	{"a branch that is gone", "timeline_unknown", 0, func(t *testing.T, f *harness.Installation) {
		harness.EditRecord(t, f, func(rec map[string]any) {
			for _, p := range rec["places"].([]any) {
				p.(map[string]any)["timeline"] = 9
			}
		})
	}, "new-slot", meanwhile},
}

// loseRows writes rows that no slot will bring.
func loseRows(f *harness.Installation, t *testing.T) {
	t.Helper()
	for i := range meanwhile {
		harness.Insert(t, f.Conn, "lost", 1000+i, `{"n": 1.10}`)
	}
}

// publishCut has another cluster go on with the stream.
func publishCut(t *testing.T, f *harness.Installation, lsn outbox.LSN) {
	t.Helper()
	c := outbox.Cut{Timeline: 1, LSN: lsn, Epoch: 1, Owner: 2}
	harness.Must(t, f.Conn.QueryRow(t.Context(),
		"SELECT system_identifier::text::numeric FROM pg_control_system()").Scan(&c.SystemID))
	m := nats.NewMsg(ingress(t, f) + outbox.CutSubject)
	m.Header = nats.Header{outbox.HeaderCut: {c.String()}, nats.ExpectedLastSeqHdr: {fmt.Sprint(before)}}
	_, err := f.JS.PublishMsg(t.Context(), m)
	harness.Must(t, err)
}

// remakeStream makes the stream anew with the first n of its messages, as a backup that was put back would.
func remakeStream(f *harness.Installation, t *testing.T, n int) {
	t.Helper()
	putStream(f, t, harness.Messages(t, f.JS, f.Stream)[:n])
}

// putStream makes the stream anew, with these messages.
func putStream(f *harness.Installation, t *testing.T, all []*oracle.Message) {
	t.Helper()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	cfg := s.CachedInfo().Config
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	_, err = f.JS.CreateStream(t.Context(), cfg)
	harness.Must(t, err)
	for _, m := range all {
		m.Header.Del(nats.ExpectedLastSeqHdr)
		_, err := f.JS.PublishMsg(t.Context(), &nats.Msg{Subject: strings.TrimSuffix(cfg.Subjects[0], ">") +
			m.Subject, Header: m.Header, Data: m.Data})
		harness.Must(t, err)
	}
}

// state is all that a look must not change.
func state(f *harness.Installation, t *testing.T) string {
	t.Helper()
	sum, rev := "no stream", uint64(0)
	if s, err := f.JS.Stream(t.Context(), f.Stream); err == nil {
		sum = fmt.Sprint(s.CachedInfo().State.LastSeq, s.CachedInfo().Created)
	}
	bucket := "outflow-" + f.Stream // why run ended is there as well
	if s, err := f.JS.Stream(t.Context(), "KV_"+bucket); err == nil {
		if m, err := s.GetLastMsgForSubject(t.Context(), "$KV."+bucket+"."+f.Slot); err == nil {
			rev = m.Sequence
		}
	}
	slot := harness.Value[string](t, f.Conn, `SELECT coalesce(string_agg(slot_name || plugin ||
		confirmed_flush_lsn, ' '), 'none')
		FROM pg_replication_slots WHERE slot_name = $1`, f.Slot)
	return fmt.Sprint(sum, " record at ", rev, " slot ", slot)
}

// publishing is an installation that runs and publishes its first rows.
func publishing(t *testing.T, natsURL, slot string, settings ...string) *harness.Installation {
	t.Helper()
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, slot, settings...)
	f.Init()
	f.Start()
	harness.Exec(t, f.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc' || i % 3, 'anna', i, '{"n": 9007199254740993}' FROM generate_series(1, $1) i`, before)
	return f
}

// stopWhenPublished waits until all of it is published and confirmed, and stops it.
func stopWhenPublished(f *harness.Installation, t *testing.T) *harness.Installation {
	t.Helper()
	harness.AwaitMessages(t, f.JS, f.Stream, before)
	harness.Eventually(t, "everything is confirmed", func() error {
		kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
		if err != nil {
			return err
		}
		e, err := kv.Get(t.Context(), f.Slot)
		if err != nil {
			return err
		}
		var rec struct {
			Places []struct {
				Due string
				Seq int
			}
		}
		if err := json.Unmarshal(e.Value(), &rec); err != nil {
			return err
		}
		for _, p := range rec.Places {
			var confirmed bool
			err := f.Conn.QueryRow(t.Context(), "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM "+
				"pg_replication_slots WHERE slot_name = $2",
				p.Due, f.Slot).Scan(&confirmed)
			if err != nil {
				return err
			}
			if confirmed && p.Seq >= before {
				return nil
			}
		}
		return fmt.Errorf("%s", e.Value())
	})
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	return f
}

// TestARepairClosesEachGap loses something in one way after the other: outflow run stops, a look changes
// nothing, the repair closes the gap, and outflow run goes on with every row in the stream once. A loss
// counts only when a recheck, 5 s later, agrees: so all of them do each step at the same time.
func TestARepairClosesEachGap(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns, gaps := natstest.Server(t), harness.Part(3, gaps)
	broken := make([]*harness.Installation, len(gaps))
	for i := range gaps {
		broken[i] = publishing(t, ns.URL(), "gap")
	}
	for i, g := range gaps {
		f := stopWhenPublished(broken[i], t)
		g.damage(t, f)
		for i := range meanwhile {
			harness.Insert(t, f.Conn, "meanwhile", 500+i, "{}")
		}
		f.Start()
	}
	was, looks, repairs := make([]string, len(gaps)), make([]*harness.RunningRepair,
		len(gaps)), make([]*harness.RunningRepair, len(gaps))
	for i, g := range gaps {
		f := broken[i]
		f.MustEndInGap(g.code)
		was[i], looks[i] = state(f, t), f.StartRepair()
	}
	other := broken[0].StartRepair("--accept", "something")
	for i, g := range gaps {
		f := broken[i]
		r, stderr, code := looks[i].Wait()
		if code != 4 || r.Fault != g.code || r.Mode != g.mode || g.missing >= 0 && r.Missing != g.missing ||
			r.Command != "outflow repair --accept "+g.code {
			t.Fatalf("%s: look: exit code %d, %+v\n%s", g.name, code, r, stderr)
		}
		if now := state(f, t); now != was[i] {
			t.Errorf("%s: a look changed %s to %s", g.name, was[i], now)
		}
		if i == 0 {
			if _, stderr, code := other.Wait(); code != 2 || !strings.Contains(stderr, g.code) {
				t.Errorf("something else accepted: exit code %d, %s", code, stderr)
			}
		}
		repairs[i] = f.StartRepair("--accept", g.code)
	}
	for i, g := range gaps {
		r, stderr, code := repairs[i].Wait()
		if code != 0 || !r.Repaired || g.missing >= 0 && r.Published != g.missing {
			t.Errorf("%s: repair: exit code %d, %+v\n%s", g.name, code, r, stderr)
		}
		broken[i].Start()
	}
	for i, g := range gaps {
		t.Run(g.name, func(t *testing.T) {
			broken[i].T = t
			var stranger uint64
			if g.code == "foreign_message" {
				stranger = before + 1
			}
			if strings.Contains(g.name, "a cut") { // no row, and no stranger's message
				harness.AwaitMessages(t, broken[i].JS, broken[i].Stream, before+1+meanwhile)
				broken[i].MustBeComplete(broken[i].Conn, ns.URL())
				broken[i].MustStop(t)
				broken[i].MustRun("repair")
				return
			}
			mustGoOn(broken[i], t, ns.URL(), stranger)
		})
	}
}

// mustGoOn makes sure that outflow run, started after a repair, goes on: every row is in the stream once.
func mustGoOn(f *harness.Installation, t *testing.T, natsURL string, stranger uint64) {
	t.Helper()
	f.AwaitReady()
	harness.Insert(t, f.Conn, "after", 2000, "{}")
	f.AwaitComplete(t, natsURL, stranger)
	f.MustStop(t)
}
