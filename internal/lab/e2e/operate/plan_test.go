package operate

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// planned runs outflow plan and returns its figures by name.
func planned(f *harness.Installation, t *testing.T, args ...string) map[string]float64 {
	t.Helper()
	var figures []struct {
		Name, Unit, From, How string
		Value                 float64
	}
	harness.Must(t, json.Unmarshal([]byte(f.MustRun(append([]string{"plan", "--json", "--measure", "1s"},
		args...)...)), &figures))
	all := map[string]float64{}
	for _, g := range figures {
		if g.Unit == "" || g.From == "" || g.How == "" {
			t.Errorf("%+v does not say how it was derived", g)
		}
		all[g.Name] = g.Value
	}
	return all
}

// TestPlanMeasuresAndChangesNothing: before init, without NATS and while events come; the figures are of what
// is there, and nothing is.
func TestPlanMeasuresAndChangesNothing(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "plan")
	before := footprint(t, f)
	if all := planned(f, t, "--outage", "2h"); all["an event in the stream"] == 0 ||
		all["memory of outflow run"] == 0 {
		t.Errorf("before init: %v", all)
	}
	if now := left(t, f, before); len(now) > 0 {
		t.Errorf("plan made %v", now)
	}
	f.MustFail(2, []string{"plan", "--measure", "1ms"}, "--measure")
	f.MustFail(2, []string{"plan", "--days", "0"}, "--days", "Give another value")

	f.Init()
	payload := `{"text": "` + strings.Repeat("x", 4000) + `"}`
	for n := range 5 {
		harness.Insert(t, f.Conn, "doc", n+1, payload)
	}
	f.Set("NATS_URL=nats://127.0.0.1:1")
	if size := planned(f, t)["an event in the stream"]; size < 4000 || size > 5000 {
		t.Errorf("by the rows of the table an event has %.0f bytes", size)
	}
	f.Set("NATS_URL=" + ns.URL())
	f.Start()
	harness.AwaitMessages(t, f.JS, f.Stream, 5)
	stop := make(chan error)
	go func() {
		conn, n := harness.Connect(t, f.URL), 5
		for {
			n++
			if _, err := conn.Exec(t.Context(), "INSERT INTO outbox (doc_id, actor_id, counter, payload) "+
				"VALUES ('doc', 'alice', $1, $2)", n, payload); err != nil {
				stop <- err
				return
			}
			select {
			case stop <- nil:
				return
			default:
			}
		}
	}()
	harness.Eventually(t, "rates are measured", func() error {
		all := planned(f, t, "--outage", "1h", "--days", "1")
		wal, keep := all["WAL of the whole server"], all["max_slot_wal_keep_size for 1 h"]
		switch {
		case wal < 4000 || all["events"] <= 0:
			return fmt.Errorf("%v", all)
		case keep < 1.25*3600*wal:
			t.Errorf("an hour of %.0f bytes/s is %.0f bytes", wal, keep)
		case all["network of NATS"] == 0 || all["max_bytes of the stream for 1 day"] == 0:
			t.Errorf("%v", all)
		}
		return nil
	})
	f.MustContain("outflow plan", f.MustRun("plan", "--measure", "1s"), "max_slot_wal_keep_size for 4 h",
		"max_slot_wal_keep_size for 1 d", "measured: ", "configured: ", "now no limit")
	harness.Must(t, <-stop)
}
