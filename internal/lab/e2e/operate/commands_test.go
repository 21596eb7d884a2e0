package operate

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// What can be read of NATS is well while it refuses what is written to it: the process that is refused says
// so to PostgreSQL, and status and doctor read it there.
func TestStatusSaysWhatNATSRefuses(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "refused", "REORDER_HORIZON=0s")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.AwaitHealth("ok")
	limitStorage(t, ns, 1)
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	f.AwaitHealth("account_full")
	f.MustContain("outflow status", f.MustRun("status"), "The NATS account is at its JetStream limit",
		"outflow explain account_full")
	if out, _, code := f.Run("doctor", "--only", "slot.active"); code != 4 ||
		!strings.Contains(out, "[account_full]") {
		t.Errorf("outflow doctor: exit code %d\n%s", code, out)
	}
	limitStorage(t, ns, -1)
	harness.AwaitMessages(t, f.JS, f.Stream, 2)
	f.AwaitHealth("ok")
}

func TestStatusAndInspectShowWhatIsThere(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "status", "REORDER_HORIZON=0s")
	o.MustFail(3, []string{"status"}, "public.outbox", "outflow init")
	harness.Exec(t, conn, "CREATE TABLE outbox (id int, doc_id text, actor_id text, counter int, seq_key "+
		"text, payload jsonb)")
	if h, p := o.Health(); h != "not_initialised" || !strings.Contains(p, "outflow init") {
		t.Errorf("before init: %s, %s", h, p)
	}
	o.Init()
	if h, _ := o.Health(); h != "not running" {
		t.Errorf("after init: %s", h)
	}
	harness.Exec(t, conn,
		`INSERT INTO outbox VALUES (1, 'a b', 'x', 2, 'x:2', '{"n": 9007199254740993}'), (2, 'a b', 'x', 1,
			'x:1', '[]')`)
	harness.Exec(t, conn, `INSERT INTO outbox VALUES (3, 'c', 'x', 1, 'x:1', '[]')`)
	out := o.MustRun("inspect", "--payload")
	o.MustContain("outflow inspect", out, "slot "+o.Slot, "newest recorded checkpoint, sequence 0",
		"2 commits with events, 2 windows, 0 events (0 bytes) held",
		`doc="a b" actor="x" key="x:1" id="2" 2 bytes []`, `{"n": 9007199254740993}`,
		"of=2 pull=0 sort=seq_key")
	if first, second := strings.LastIndex(out, `id="2"`), strings.LastIndex(out, `id="1"`); first > second {
		t.Errorf("the window is not in order:\n%s", out)
	}
	if again, _, _ := o.Run("inspect", "--payload"); again != out {
		t.Errorf("a second look shows something else:\n%s\n%s", again, out)
	}
	if out, _, _ := o.Run("inspect", "--limit", "1"); !strings.Contains(out, "1 commit with events") {
		t.Errorf("--limit 1:\n%s", out)
	}

	o.Start()
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 3)
	o.AwaitHealth("ok")
	// which may have no session at one moment
	harness.Eventually(t, "inspect beside an outflow", func() error {
		if _, errOut, code := o.Run("inspect"); code != 3 || !strings.Contains(errOut, o.Slot) ||
			!strings.Contains(errOut, "in use") || !strings.Contains(errOut, "pid") {
			return fmt.Errorf("exit code %d: %s", code, errOut)
		}
		return nil
	})
	harness.Eventually(t, "everything is recorded and confirmed", func() error {
		out, _, _ := o.Run("status", "--json")
		var r struct {
			Table string
			Slot  struct {
				Name           string
				Exists, Active bool
				PID            int
				Confirmed      string
				WALStatus      string `json:"wal_status"`
			}
			Stream struct {
				Exists       bool
				Messages     int
				LastSequence int `json:"last_sequence"`
			}
			Checkpoint struct{ Seq int } `json:"place"`
			Postgres   struct {
				WALEnd string `json:"wal_end"`
			}
			Lag *int `json:"lag_bytes"`
		}
		harness.Must(t, json.Unmarshal([]byte(out), &r))
		if r.Table != "public.outbox" || r.Slot.Name != o.Slot || !r.Slot.Exists || !r.Slot.Active ||
			r.Slot.PID == 0 || r.Slot.WALStatus != "reserved" ||
			!r.Stream.Exists || r.Stream.Messages != 3 || r.Stream.LastSequence != 3 ||
			r.Postgres.WALEnd == "" ||
			r.Lag == nil {
			return fmt.Errorf("status: %s", out)
		}
		if r.Checkpoint.Seq != 3 {
			return fmt.Errorf("recorded up to %d", r.Checkpoint.Seq)
		}
		return nil
	})
	text, _, _ := o.Run("status")
	for _, name := range []string{"health", "table", "slot", "stream", "end of WAL", "recorded", "settings",
		"lag", "confirmed"} {
		if !regexp.MustCompile(`(?m)^` + name + ` +\S`).MatchString(text) {
			t.Errorf("status has no line %q:\n%s", name, text)
		}
	}
	o.MustStop(t)
	harness.AwaitSlotFree(t, conn, o.Slot)
	if out, _, _ := o.Run("inspect"); !strings.Contains(out, "0 commits with events") &&
		!strings.Contains(out, "sequence 3") {
		t.Errorf("inspect after everything is published:\n%s", out)
	}
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" SET (publish = 'update')")
	if h, p := o.Health(); h != "publication_insert" || !strings.Contains(p, "ALTER PUBLICATION") {
		t.Errorf("publication of updates: %s, %s", h, p)
	}
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" SET (publish = 'insert')")
	harness.Exec(t, conn, "SELECT pg_drop_replication_slot($1)", o.Slot)
	if h, p := o.Health(); h != "slot_missing" || !strings.Contains(p, "LSN range") {
		t.Errorf("without the slot: %s, %s", h, p)
	}
}

func TestThePagesAreServedFromTheStart(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "pages", "LOG_FORMAT=json")
	o.MustFail(1, []string{"healthcheck"}, "no outflow answers", "setting listen")
	o.Init()
	o.Start()
	o.AwaitReady()
	for i := range 5 {
		harness.Insert(t, conn, "doc", i, `{"n": 1}`)
	}
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 5)
	harness.Eventually(t, "metrics", func() error {
		for name, want := range map[string]float64{"events_published_total": 5, "sent_bytes_total": 40,
			"unpublished_events": 0, "held_events": 0, "unpublished_wal_bytes": 0, "slot_held": 1,
			`state{state="running"}`: 1, "postgres_up": 1, "nats_up": 1, "stream_messages": 5} {
			if got, ok := o.Series("outflow_" + name); !ok || got != want {
				return fmt.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		return nil
	})
	for path, want := range map[string]string{"/healthz": "running", "/readyz": "running",
		"/": "<!doctype html>", "/status.json": `"name":"` + o.Stream + `"`} {
		harness.Eventually(t, path, func() error {
			if code, body := o.Get(path); code != http.StatusOK ||
				!strings.Contains(strings.ToLower(body), strings.ToLower(want)) {
				return fmt.Errorf("%d, want %q in it:\n%s", code, want, body)
			}
			return nil
		})
	}
	harness.Eventually(t, "/nothing", func() error {
		if code, body := o.Get("/nothing"); code != http.StatusNotFound {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	var s struct {
		Pipeline struct {
			State    string
			Sequence int
		}
	}
	harness.Eventually(t, "/status.json", func() error {
		_, body := o.Get("/status.json")
		if err := json.Unmarshal([]byte(body), &s); err != nil {
			return fmt.Errorf("%w: %s", err, body)
		}
		if s.Pipeline.State != "running" || s.Pipeline.Sequence != 5 {
			return fmt.Errorf("%s", body)
		}
		return nil
	})
	o.MustRun("healthcheck")
	o.MustStop(t)
	for line := range strings.Lines(o.Log.String()) {
		var entry struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Time == "" || entry.Level == "" ||
			entry.Msg == "" {
			t.Errorf("log.format json: %v: %s", err, line)
		}
	}
}

func TestConfigVersionCompletionAndHelpNeedNoServer(t *testing.T) {
	t.Parallel()
	o := harness.New(t, "postgres://me:hunter2@db/app", "nats://joe:hunter2@nats:4222", "outflow",
		"NATS_TOKEN_FILE=", "REORDER_HORIZON=50ms")
	out, errOut, code := o.Run("config", "--reorder.sort", "commit")
	if code != 0 || strings.Contains(out+errOut, "hunter2") {
		t.Fatalf("outflow config: exit code %d\n%s%s", code, out, errOut)
	}
	o.MustContain("outflow config", out, "horizon: 50ms", "OUTFLOW_REORDER_HORIZON", "sort: commit",
		"--reorder.sort", "max_payload: 1MiB", "default")
	if out, _, code := o.Run("version"); code != 0 || !strings.Contains(out, "outflow") {
		t.Errorf("outflow version: exit code %d: %s", code, out)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out, errOut, code := o.Run("completion", shell); code != 0 || !strings.Contains(out, "outflow") {
			t.Errorf("outflow completion %s: exit code %d: %s", shell, code, errOut)
		}
	}
	out = o.MustRun("--help")
	o.MustContain("outflow --help", out, "init", "run", "status", "inspect", "config")
}

// TestSIGTERMUnderLoadLosesNothing: SIGTERM ends with exit code 0 in the middle of a load, and nothing is
// lost or comes twice afterwards.
func TestSIGTERMUnderLoadLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const ops = 6000
	ns := natstest.Process(t)
	url := pgtest.Database(t, pgtest.Server(t))
	o := harness.New(t, url, ns.URL(), harness.SlotName("stop"))
	o.Init()
	o.Start()
	l := harness.StartLoad(t, url, harness.RecordedOps(t, ops), 8, 2000, 3)
	for n := 1; n <= 4; n++ {
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n*ops/6)
		begun := time.Now()
		if code := o.Stop(); code != 0 {
			t.Fatalf("stop %d: exit code %d", n, code)
		}
		t.Logf("stop %d took %v", n, time.Since(begun))
		if !strings.Contains(o.Log.Tail(300), "outflow stopped") {
			t.Errorf("stop %d: log ends with %s", n, o.Log.Tail(300))
		}
		o.Start()
	}
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, ops)
	o.MustBeComplete(harness.Connect(t, url), ns.URL())
}

// TestASecondSignalEndsAStopThatWaits: with NATS silent a clean stop waits for acknowledgements, for as long
// as the session waits for them; a second signal doesn't. On a machine that stands still the session may have
// ended before the signals have come: then it is tried again.
func TestASecondSignalEndsAStopThatWaits(t *testing.T) {
	t.Parallel()
	ns := natstest.Process(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "second", "REORDER_HORIZON=0s",
		"STOP_TIMEOUT=5m")
	o.Init()
	for try := 1; ; try++ {
		o.Start()
		o.AwaitReady()
		harness.Must(t, ns.Pause())
		harness.Insert(t, conn, "doc", try, "{}")
		// Until it has it in flight, or has given up waiting for the acknowledgement.
		harness.Eventually(t, "in flight", func() error {
			if _, body := o.Get("/status.json"); !strings.Contains(body, `"in_flight":1`) &&
				!strings.Contains(o.Said(), "session ended") {
				return fmt.Errorf("%s", body)
			}
			return nil
		})
		harness.Must(t, o.Process.Signal(syscall.SIGINT))
		harness.Eventually(t, "stopping", func() error {
			if _, body := o.Get("/status.json"); !strings.Contains(body, `"state":"stopping"`) &&
				o.Process.Running() {
				return fmt.Errorf("%s", body)
			}
			return nil
		})
		if o.Process.Running() {
			_ = o.Process.Signal(syscall.SIGTERM) // it may just have ended
		}
		code := o.Wait()
		harness.Must(t, ns.Resume())
		if code == 0 && try < harness.Tries {
			t.Logf("again: it had stopped before the second signal")
			continue
		}
		if code != 1 {
			t.Errorf("outflow run: exit code %d, want 1", code)
		}
		o.MustContain("outflow run", o.Log.Tail(300), "second signal")
		o.Start()
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, try)
		o.AwaitReady()
		o.MustBeComplete(conn, ns.URL())
		return
	}
}
