package operate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// logLine is a line of the log in JSON, as far as tests look at it.
type logLine struct {
	Level, Msg, Code, Class, Hint, Settings, Slot, Stream string
	Exit                                                  int
}

// awaitLine waits for a line of the log behind from.
func awaitLine(o *harness.Outflow, from int, what string, is func(logLine) bool) {
	o.T.Helper()
	harness.Eventually(o.T, what, func() error {
		for line := range strings.Lines(o.Said()[from:]) {
			var l logLine
			if json.Unmarshal([]byte(line), &l) == nil && is(l) {
				return nil
			}
		}
		return fmt.Errorf("it says %s", o.Said()[from:])
	})
}

// TestAHeldFaultIsRepairedWithoutARestart: the pages stay at a fault, the slot is free, nothing ends the
// process but SIGTERM; a repair, or a setting that SIGHUP reloads, and it goes on.
func TestAHeldFaultIsRepairedWithoutARestart(t *testing.T) {
	t.Parallel()
	file := harness.WriteFile(t, "outflow.yaml", "log: {level: info}\n")
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "held", "ON_FAULT=hold", "REORDER_HORIZON=0s",
		"LOG_FORMAT=json", "CONFIG="+file)
	sighup := func(content string) (from int) {
		t.Helper()
		harness.Must(t, os.WriteFile(file, []byte(content), 0o600))
		from = len(f.Said())
		harness.Must(t, f.Process.Signal(syscall.SIGHUP))
		return from
	}
	held := func(code string) {
		t.Helper()
		harness.Eventually(t, "held: "+code, func() error {
			var now struct {
				Pipeline struct {
					State string
					Fault struct{ Code, Message, Hint, Since string }
				}
			}
			_, body := f.Get("/status.json")
			if err := json.Unmarshal([]byte(body), &now); err != nil { // it does not listen yet
				return err
			}
			if p := now.Pipeline; p.State != "fault" || p.Fault.Code != code || p.Fault.Message == "" ||
				p.Fault.Hint == "" || p.Fault.Since == "" {
				return fmt.Errorf("/status.json: %s", body)
			}
			return nil
		})
		if status, body := f.Get("/readyz"); status != http.StatusServiceUnavailable ||
			!strings.Contains(body, code+":") {
			t.Errorf("/readyz: %d %s", status, body)
		}
		for _, path := range []string{"/healthz", "/metrics", "/"} {
			if status, body := f.Get(path); status != http.StatusOK {
				t.Errorf("%s: %d %s", path, status, body)
			}
		}
		harness.Eventually(t, "nobody holds the slot", func() error {
			if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM pg_replication_slots WHERE "+
				"slot_name = $1 AND active", f.Slot); n != 0 {
				return errors.New("it is active")
			}
			return nil
		})
	}
	store := checkpoint.NewStore(jsapi.New(f.JS.Conn(), ""),
		checkpoint.StoreConfig{Stream: f.Stream, Slot: f.Slot})
	lastEnd := func() *checkpoint.End {
		t.Helper()
		end, err := store.LastEnd(t.Context())
		harness.Must(t, err)
		return end
	}

	f.Init()
	f.Start()
	f.AwaitReady()
	harness.Insert(t, f.Conn, "before", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.MustStop(t)
	f.DropSlot(t)
	f.Start()
	held("slot_missing")
	harness.Eventually(t, "it is known why it stopped", func() error {
		if end := lastEnd(); end == nil || end.Code != "slot_missing" || end.Exit != 4 || !end.Held ||
			end.PID != f.Process.PID() {
			return fmt.Errorf("%+v", end)
		}
		return nil
	})
	out, _, _ := f.Run("status")
	f.MustContain("outflow status", out, fmt.Sprintf("slot_missing, by pid %d", f.Process.PID()),
		"it runs, and tries again every 30s")
	if code := f.Stop(); code != 4 {
		t.Errorf("stopped while it holds a fault: exit code %d", code)
	}
	if end := lastEnd(); end == nil || end.Code != "slot_missing" || end.Held {
		t.Errorf("it has ended: %+v", end)
	}
	f.Start()
	held("slot_missing")
	if _, stderr, code := f.Repair("--accept", "slot_missing"); code != 0 {
		t.Fatalf("repair: %d %s", code, stderr)
	}
	from := sighup("log: {level: debug}\nstop_timeout: 9s\n")
	awaitLine(f.Outflow, from, "the level is reloaded", func(l logLine) bool { return l.Level == "DEBUG" })
	awaitLine(f.Outflow, from, "what is not is named", func(l logLine) bool {
		return l.Level == "WARN" && l.Settings == "stop_timeout"
	})
	f.AwaitReady()
	harness.Must(t, store.SaveEnd(t.Context(), checkpoint.End{Code: "stream_max_msg_size"}))
	if out, _, _ := f.Run("status"); strings.Contains(out, "last end") {
		t.Errorf("one publishes, and nothing is written that the record would follow: outflow status says %s",
			out)
	}
	harness.Insert(t, f.Conn, "repaired", 2, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 2)

	from = sighup("log: {level: [\n")
	awaitLine(f.Outflow, from, "a broken file is refused", func(l logLine) bool {
		return l.Level == "ERROR" && l.Code == "config" && l.Slot == f.Slot && l.Stream == f.Stream
	})
	harness.Insert(t, f.Conn, "large", 3, fmt.Sprintf(`"%s"`, strings.Repeat("x", 2<<20)))
	harness.Insert(t, f.Conn, "after", 4, "{}")
	held("too_large")
	harness.Must(t, os.WriteFile(file, []byte("log: {level: debug}\n"), 0o600))
	harness.Eventually(t, "status says what a start would not see", func() error {
		out, _, _ := f.Run("status")
		if health, _, _ := strings.Cut(out, "\n"); !strings.HasSuffix(health, " too_large") ||
			!strings.Contains(out, fmt.Sprintf("too_large, by pid %d", f.Process.PID())) {
			return errors.New(out)
		}
		return nil
	})
	from = sighup("sink: {on_poison: dead_letter}\n")
	awaitLine(f.Outflow, from, "it goes on", func(l logLine) bool {
		return l.Msg == "the fault is gone" && l.Code == "too_large"
	})
	harness.AwaitMessages(t, f.JS, f.Stream, 4)
	f.AwaitReady()
	f.MustStop(t)
	if end := lastEnd(); end != nil {
		t.Errorf("a fault that is over: %+v", end)
	}

	f.DropSlot(t)
	f.Set("ON_FAULT=exit")
	f.Start()
	harness.Eventually(t, "it takes signals", func() error {
		if f.Said() == "" {
			return errors.New("it has said nothing")
		}
		return nil
	})
	for f.Process.Running() { // a hangup changes nothing about its end
		_ = f.Process.Signal(syscall.SIGHUP) // it may just have ended
		time.Sleep(100 * time.Microsecond)
	}
	if code := f.Wait(); code != 4 {
		t.Errorf("exit code %d", code)
	}
	var last logLine
	for line := range strings.Lines(f.Said()) {
		last = logLine{}
		harness.Must(t, json.Unmarshal([]byte(line), &last))
		if last.Level == "ERROR" && last.Code != "slot_missing" {
			t.Errorf("an end is no error of what was being tried: %s", line)
		}
	}
	if last.Level != "ERROR" || last.Code != "slot_missing" || last.Class != "gap" || last.Exit != 4 ||
		last.Msg == "" || last.Hint == "" || last.Slot != f.Slot || last.Stream != f.Stream {
		t.Errorf("the last line: %+v", last)
	}
}
