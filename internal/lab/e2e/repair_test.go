package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// gap is a set-up that lost something: what outflow run says, and what a repair finds.
type gap struct {
	name    string
	code    string // that outflow run ends with
	atLeast int    // PostgreSQL's major, 0: any
	smash   func(t *testing.T, f *faulty)
	mode    string
	missing int // of the rows before and meanwhile; -1: not compared
}

const (
	before    = 40 // rows that are published before the loss
	meanwhile = 3  // rows that are written after it
)

var gaps = []gap{
	{"slot dropped", "slot_missing", 0, func(t *testing.T, f *faulty) { f.dropSlot(t) }, "new-slot", meanwhile},
	{"slot made anew", "slot_ahead", 0, func(t *testing.T, f *faulty) {
		f.dropSlot(t)
		f.loseRows(t)
		mustExec(t, f.conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.slot)
	}, "keep", meanwhile},
	{"slot moved", "slot_ahead", 0, func(t *testing.T, f *faulty) {
		f.loseRows(t)
		mustExec(t, f.conn, "SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())", f.slot)
	}, "keep", meanwhile},
	{"publication made anew", "publication_changed", 0, func(t *testing.T, f *faulty) {
		mustExec(t, f.conn, "DROP PUBLICATION "+f.slot)
		f.loseRows(t)
		mustExec(t, f.conn, "CREATE PUBLICATION "+f.slot+" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	}, "new-slot", 2 * meanwhile},
	{"table out of the publication", "publication_changed", 0, func(t *testing.T, f *faulty) {
		mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" DROP TABLE outbox")
		f.loseRows(t)
		mustExec(t, f.conn, "ALTER PUBLICATION "+f.slot+" ADD TABLE outbox")
	}, "keep", meanwhile},
	{"stream missing", "stream_missing", 0, func(t *testing.T, f *faulty) { must(t, f.js.DeleteStream(t.Context(), f.stream)) },
		"keep", before},
	{"stream made anew", "stream_recreated", 0, func(t *testing.T, f *faulty) { f.remakeStream(t, 0) }, "keep", before},
	{"stream put back from a copy", "stream_recreated", 0, func(t *testing.T, f *faulty) { f.remakeStream(t, before) }, "record", -1},
	{"stream put back from an older copy", "stream_recreated", 0, func(t *testing.T, f *faulty) { f.remakeStream(t, before-7) }, "keep", 7},
	{"record deleted", "record_missing", 0, func(t *testing.T, f *faulty) { f.deleteRecord(t) }, "record", -1},
	{"record deleted with its bucket", "record_missing", 0, func(t *testing.T, f *faulty) {
		must(t, f.js.DeleteKeyValue(t.Context(), "outflow-"+f.stream))
	}, "record", -1},
	{"record deleted, stream put back from an older copy", "record_missing", 0, func(t *testing.T, f *faulty) {
		f.deleteRecord(t)
		f.remakeStream(t, before-7)
	}, "keep", 7},
	{"record corrupt", "record_corrupt", 0, func(t *testing.T, f *faulty) {
		kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
		must(t, err)
		_, err = kv.PutString(t.Context(), f.slot, `{"v":1,"slot":"`)
		must(t, err)
	}, "record", -1},
	{"record and stream deleted", "record_missing", 0, func(t *testing.T, f *faulty) {
		f.deleteRecord(t)
		must(t, f.js.DeleteStream(t.Context(), f.stream))
	}, "keep", before},
	{"record and slot deleted", "record_missing", 0, func(t *testing.T, f *faulty) {
		f.deleteRecord(t)
		f.dropSlot(t)
	}, "new-slot", meanwhile},
	{"stranger at the end", "foreign_message", 0, func(t *testing.T, f *faulty) {
		_, err := f.js.Publish(t.Context(), ingress(t, f)+"outbox.stranger", []byte("{}"))
		must(t, err)
	}, "keep", 0},
	{"another cluster", "system_changed", 0, func(t *testing.T, f *faulty) {
		f.editRecord(t, func(rec map[string]any) { rec["system_id"] = "7000000000000000000" })
	}, "new-slot", meanwhile},
	{"server behind", "server_behind", 0, func(t *testing.T, f *faulty) {
		f.editRecord(t, func(rec map[string]any) {
			for _, p := range rec["places"].([]any) {
				p.(map[string]any)["due"] = "FFFF/" + strings.Split(p.(map[string]any)["due"].(string), "/")[1]
			}
		})
	}, "new-slot", meanwhile},
	{"a branch that is gone", "timeline_unknown", 0, func(t *testing.T, f *faulty) {
		f.editRecord(t, func(rec map[string]any) {
			for _, p := range rec["places"].([]any) {
				p.(map[string]any)["timeline"] = 9
			}
		})
	}, "new-slot", meanwhile},
}

func (f *faulty) dropSlot(t *testing.T) {
	t.Helper()
	mustExec(t, f.conn, "SELECT pg_drop_replication_slot($1)", f.slot)
}

func (f *faulty) deleteRecord(t *testing.T) {
	t.Helper()
	kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
	must(t, err)
	must(t, kv.Delete(t.Context(), f.slot))
}

func (f *faulty) editRecord(t *testing.T, edit func(map[string]any)) {
	t.Helper()
	kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
	must(t, err)
	e, err := kv.Get(t.Context(), f.slot)
	must(t, err)
	var rec map[string]any
	must(t, json.Unmarshal(e.Value(), &rec))
	edit(rec)
	doc, err := json.Marshal(rec)
	must(t, err)
	_, err = kv.Put(t.Context(), f.slot, doc)
	must(t, err)
}

// loseRows writes rows that no slot will bring.
func (f *faulty) loseRows(t *testing.T) {
	t.Helper()
	for i := range meanwhile {
		row(t, f.conn, "lost", 1000+i, `{"n": 1.10}`)
	}
}

// remakeStream makes the stream anew with the first n of its messages, as a backup that was put back would.
func (f *faulty) remakeStream(t *testing.T, n int) {
	t.Helper()
	f.putStream(t, messages(t, f.js, f.stream)[:n])
}

// putStream makes the stream anew, with these messages.
func (f *faulty) putStream(t *testing.T, all []*oracle.Message) {
	t.Helper()
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	cfg := s.CachedInfo().Config
	must(t, f.js.DeleteStream(t.Context(), f.stream))
	_, err = f.js.CreateStream(t.Context(), cfg)
	must(t, err)
	for _, m := range all {
		m.Header.Del(nats.ExpectedLastSeqHdr)
		_, err := f.js.PublishMsg(t.Context(), &nats.Msg{Subject: strings.TrimSuffix(cfg.Subjects[0], ">") + m.Subject, Header: m.Header, Data: m.Data})
		must(t, err)
	}
}

// state is all that a look must not change.
func (f *faulty) state(t *testing.T) string {
	t.Helper()
	sum, rev := "no stream", uint64(0)
	if s, err := f.js.Stream(t.Context(), f.stream); err == nil {
		sum = fmt.Sprint(s.CachedInfo().State.LastSeq, s.CachedInfo().Created)
	}
	if s, err := f.js.Stream(t.Context(), "KV_outflow-"+f.stream); err == nil {
		rev = s.CachedInfo().State.LastSeq
	}
	var slot string
	must(t, f.conn.QueryRow(t.Context(), `SELECT coalesce(string_agg(slot_name || plugin || confirmed_flush_lsn, ' '), 'none')
		FROM pg_replication_slots WHERE slot_name = $1`, f.slot).Scan(&slot))
	return fmt.Sprint(sum, " record at ", rev, " slot ", slot)
}

// repairReport is what outflow repair --json prints, as far as tests look at it.
type repairReport struct {
	Fault, Mode, Command     string
	Notes                    []string
	Rows, Missing, Published int
	Repaired                 bool
	First, Last              struct {
		Doc string `json:"doc_id"`
		Key string `json:"seq_key"`
	}
}

// repairing is an outflow repair --json that runs.
type repairing struct {
	o           *outflow
	args        []string
	cmd         *exec.Cmd
	out, stderr bytes.Buffer
}

func (o *outflow) repairing(args ...string) *repairing {
	o.t.Helper()
	r := &repairing{o: o, args: args, cmd: exec.CommandContext(o.t.Context(), program(o.env), append([]string{"repair", "--json"}, args...)...)}
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = o.env, &r.out, &r.stderr
	must(o.t, r.cmd.Start())
	return r
}

// wait waits for its end, and runs it again where it gave up because a server did not answer.
func (r *repairing) wait() (report repairReport, stderr string, code int) {
	r.o.t.Helper()
	for try := 1; ; try++ {
		var exit *exec.ExitError
		if err := r.cmd.Wait(); err != nil && !errors.As(err, &exit) {
			r.o.t.Fatal(err)
		}
		if r.cmd.ProcessState.ExitCode() != 1 || try == tries || !unanswered(r.o.t, r.args, r.stderr.String()) {
			break
		}
		r = r.o.repairing(r.args...)
	}
	if r.out.Len() > 0 {
		if err := json.Unmarshal(r.out.Bytes(), &report); err != nil {
			r.o.t.Fatalf("outflow repair: %v: %s", err, r.out.String())
		}
	}
	return report, r.stderr.String(), r.cmd.ProcessState.ExitCode()
}

// repair runs outflow repair with --json.
func (o *outflow) repair(args ...string) (r repairReport, stderr string, code int) {
	o.t.Helper()
	return o.repairing(args...).wait()
}

// publishing is an installation that runs and publishes its first rows.
func publishing(t *testing.T, natsURL, slot string, settings ...string) *faulty {
	t.Helper()
	f := &faulty{js: js(t, natsURL)}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), natsURL, slot, settings...)
	f.init()
	f.start()
	mustExec(t, f.conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc' || i % 3, 'anna', i, '{"n": 9007199254740993}' FROM generate_series(1, $1) i`, before)
	return f
}

// stopped waits until all of it is published and confirmed, and stops it.
func (f *faulty) stopped(t *testing.T) *faulty {
	t.Helper()
	awaitMessages(t, f.js, f.stream, before)
	eventually(t, "everything is confirmed", func() error {
		kv, err := f.js.KeyValue(t.Context(), "outflow-"+f.stream)
		if err != nil {
			return err
		}
		e, err := kv.Get(t.Context(), f.slot)
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
			err := f.conn.QueryRow(t.Context(), "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = $2",
				p.Due, f.slot).Scan(&confirmed)
			if err != nil {
				return err
			}
			if confirmed && p.Seq >= before {
				return nil
			}
		}
		return fmt.Errorf("%s", e.Value())
	})
	if code := f.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	left(t, f.conn, f.slot)
	return f
}

// TestRepair loses something in one way after the other: outflow run stops, a look changes nothing, the repair closes the gap, and
// outflow run goes on with every row in the stream once. A loss counts only when a second reading, 5 s later, agrees: so all of them
// do each step at the same time.
func TestRepair(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	broken := make([]*faulty, len(gaps))
	for i := range gaps {
		broken[i] = publishing(t, ns.URL(), "gap")
	}
	for i, g := range gaps {
		f := broken[i].stopped(t)
		g.smash(t, f)
		for i := range meanwhile {
			row(t, f.conn, "meanwhile", 500+i, "{}")
		}
		f.log.Reset()
		f.start()
	}
	was, looks, repairs := make([]string, len(gaps)), make([]*repairing, len(gaps)), make([]*repairing, len(gaps))
	for i, g := range gaps {
		f := broken[i]
		f.ends(4, "outflow repair", "--accept "+g.code)
		was[i], looks[i] = f.state(t), f.repairing()
	}
	other := broken[0].repairing("--accept", "something")
	for i, g := range gaps {
		f := broken[i]
		r, stderr, code := looks[i].wait()
		if code != 4 || r.Fault != g.code || r.Mode != g.mode || g.missing >= 0 && r.Missing != g.missing || r.Command != "outflow repair --accept "+g.code {
			t.Fatalf("%s: look: exit code %d, %+v\n%s", g.name, code, r, stderr)
		}
		if now := f.state(t); now != was[i] {
			t.Errorf("%s: a look changed %s to %s", g.name, was[i], now)
		}
		if i == 0 {
			if _, stderr, code := other.wait(); code != 2 || !strings.Contains(stderr, g.code) {
				t.Errorf("something else accepted: exit code %d, %s", code, stderr)
			}
		}
		repairs[i] = f.repairing("--accept", g.code)
	}
	for i, g := range gaps {
		r, stderr, code := repairs[i].wait()
		if code != 0 || !r.Repaired || g.missing >= 0 && r.Published != g.missing {
			t.Errorf("%s: repair: exit code %d, %+v\n%s", g.name, code, r, stderr)
		}
		broken[i].log.Reset()
		broken[i].start()
	}
	for i, g := range gaps {
		t.Run(g.name, func(t *testing.T) {
			broken[i].t = t
			var stranger uint64
			if g.code == "foreign_message" {
				stranger = before + 1
			}
			broken[i].goesOn(t, ns.URL(), stranger)
		})
	}
}

// goesOn makes sure that outflow run, started after a repair, goes on: every row is in the stream once.
func (f *faulty) goesOn(t *testing.T, natsURL string, stranger uint64) {
	t.Helper()
	f.ready()
	row(t, f.conn, "after", 2000, "{}")
	f.complete(t, natsURL, stranger)
	if code := f.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
}

// complete waits until as many messages as rows are there, and compares them.
func (f *faulty) complete(t *testing.T, natsURL string, stranger uint64) {
	t.Helper()
	var n int
	must(t, f.conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n))
	eventually(t, "all rows published", func() error {
		s, err := f.js.Stream(t.Context(), f.stream)
		if err != nil {
			return err
		}
		if stranger > 0 { // its message is in the way of the comparison only
			_ = s.DeleteMsg(t.Context(), stranger) // again and again
			if _, err := s.Info(t.Context()); err != nil {
				return err
			}
		}
		if got := s.CachedInfo().State.Msgs; got < uint64(n) {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
	f.mustBeComplete(f.conn, natsURL)
}
