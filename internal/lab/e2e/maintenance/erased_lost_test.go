package maintenance

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatComesBehindALostEndIsNotTakenForErased: the broker loses messages that were confirmed, an erased
// one among them, and others come under their sequences, by a repair or behind an uninstall. The stream does
// not say of those that they were erased, so the archive goes on; and the erased one does not come again.
// What was written to the document later stays when the erasure is run again, under whatever sequence it has.
func TestWhatComesBehindALostEndIsNotTakenForErased(t *testing.T) {
	t.Parallel()
	const each, doc = 10, "abandoned" // a repair publishes it before the others
	for name, again := range map[string]func(t *testing.T, f *harness.Installation, lose func()){
		"repair": func(t *testing.T, f *harness.Installation, lose func()) {
			harness.Insert(t, f.Conn, doc, 2, "{}")
			settle(t, f)
			f.MustStop(t)
			harness.AwaitSlotFree(t, f.Conn, f.Slot)
			harness.Exec(t, f.Conn, "SELECT pg_replication_origin_create('"+f.Slot+"')")
			putBack(t, f, "INSERT INTO outbox (id, doc_id, actor_id, counter, payload) SELECT * FROM backup")
			lose()
			// a database from before the erasure: what warns of it stays until that repair is accepted
			harness.Exec(t, f.Conn, "CREATE TABLE requests AS SELECT * FROM outflow_erasures; "+
				"DELETE FROM outflow_erasures")
			f.MustFail(4, []string{"repair", "--accept", "stream_shortened"}, "code erase_forgotten")
			if r, said, code := f.Repair("--accept", "stream_shortened", "--where", "false"); code != 0 {
				t.Fatalf("exit code %d: %+v\n%s", code, r, said)
			}
			f.MustFail(4, []string{"repair", "--accept", "rows_missing"}, "code erase_forgotten")
			harness.Exec(t, f.Conn, "INSERT INTO outflow_erasures SELECT * FROM requests")
			report, said, code := f.Repair("--accept", "rows_missing")
			if code != 0 || report.Published == 0 || report.Erased != 1 {
				t.Fatalf("exit code %d: %+v\n%s", code, report, said)
			}
		},
		// of what was lost no row is there
		"record": func(t *testing.T, f *harness.Installation, lose func()) {
			settle(t, f)
			f.MustStop(t)
			harness.AwaitSlotFree(t, f.Conn, f.Slot)
			harness.Exec(t, f.Conn, "DELETE FROM outbox")
			lose()
			kv, err := f.JS.KeyValue(t.Context(), checkpoint.Bucket(f.Stream))
			harness.Must(t, err)
			harness.Must(t, kv.Delete(t.Context(), f.Slot))
			report, said, code := f.Repair("--accept", "record_missing")
			if code != 0 || report.Published != 0 {
				t.Fatalf("exit code %d: %+v\n%s", code, report, said)
			}
			harness.Insert(t, f.Conn, doc, 2, "{}")
		},
		"init": func(t *testing.T, f *harness.Installation, lose func()) {
			f.Drain()
			f.MustStop(t)
			harness.AwaitSlotFree(t, f.Conn, f.Slot)
			f.MustRun("uninstall", "--yes")
			lose()
			f.MustContain("outflow init", f.MustRun("init"), "behind sequence")
			harness.Insert(t, f.Conn, doc, 2, "{}")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := natstest.Process(t)
			f := newPublishing(t, pgtest.Server(t), ns.URL(), "erasedlost_"+name)
			write := func() {
				t.Helper()
				before := ends(f)
				for range each {
					harness.Insert(t, f.Conn, "another", int(time.Now().UnixNano()), "{}")
				}
				harness.AwaitMessages(t, f.JS, f.Stream, before+each)
			}
			write()
			harness.Insert(t, f.Conn, doc, 1, "{}")
			harness.Exec(t, f.Conn, "CREATE TABLE backup AS SELECT id, doc_id, actor_id, counter, payload "+
				"FROM outbox WHERE doc_id = '"+doc+"'")
			harness.AwaitMessages(t, f.JS, f.Stream, each+1)
			harness.Eventually(t, "it is erased", func() error {
				settle(t, f)
				if c, said, code := erase(t, f, "--doc", doc, "--request", "r", "--yes"); code != 0 {
					return fmt.Errorf("exit code %d: %+v\n%s", code, c, said)
				}
				return nil
			})
			noted := func() string {
				t.Helper()
				s, err := f.JS.Stream(t.Context(), f.Stream)
				harness.Must(t, err)
				return s.CachedInfo().Config.Metadata[outbox.MetadataErased]
			}
			was, err := outbox.ParseSequences(noted())
			if err != nil || was.Count() != 1 {
				t.Fatalf("%v were erased, %v", was, err)
			}
			seq := was[0].From
			cut := uint64(harness.Value[int64](t, f.Conn, "SELECT cut_sequence FROM outflow_erasures"))
			again(t, f, func() {
				harness.Must(t, ns.Kill())
				_, err := natsserver.Tear(ns.Dir(), f.Stream, natsserver.Back,
					func(at uint64, _ time.Time) bool { return at+2 < seq })
				harness.Must(t, err)
				harness.Must(t, ns.Start())
				f.JS = harness.JetStream(t, ns.URL())
				if end := ends(f); uint64(end) >= seq {
					t.Fatalf("the stream ends at %d, %d is not lost", end, seq)
				}
			})
			if got := noted(); got != "" {
				t.Errorf("noted as erased are %s", got)
			}
			f.Set("ARCHIVE_URL=file://" + t.TempDir())
			f.Start()
			write()
			archived(t, f, int(seq))
			there := func() (of []uint64) {
				t.Helper()
				another := false
				for _, m := range harness.Messages(t, f.JS, f.Stream) {
					if strings.Contains(m.Subject, doc) {
						of = append(of, m.Seq)
					}
					another = another || m.Seq == seq
				}
				if !another {
					t.Errorf("there is no other message at %d", seq)
				}
				return of
			}
			before := there()
			if len(before) != 1 || before[0] > cut {
				t.Fatalf("messages %v are of the document, want one up to %d", before, cut)
			}
			erased(t, f, "--doc", doc, "--request", "r")
			if after := there(); !slices.Equal(after, before) {
				t.Errorf("of the document messages %v are left, want %v", after, before)
			}
		})
	}
}
