package outage

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// figures are what an instance says of itself.
type figures struct {
	*harness.Outflow
	t *testing.T
}

// is reports how a metric, without its prefix, differs from what it should be; -1: there is no such series.
func (f figures) is(name string, from, to float64) error {
	f.t.Helper()
	got, ok := f.Series("outflow_" + name)
	if !ok {
		got = -1
	}
	if got < from || got > to {
		return fmt.Errorf("%s is %v, want %v to %v", name, got, from, to)
	}
	return nil
}

const (
	none = -1.
	most = 1e18
)

// TestFiguresAreTrueThroughAnOutage: NATS is killed and rows are written. Metrics and /status.json of the
// active and the standby instance say so, with figures that were read since; PostgreSQL is restarted
// meanwhile, which they say as well. When NATS is back, all figures fall.
func TestFiguresAreTrueThroughAnOutage(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, ns := pgtest.Own(t, 0), natstest.Process(t)
	url, err := pg.CreateDatabase(t.Context(), "figures")
	harness.Must(t, err)
	first := harness.New(t, url, ns.URL(), "figures")
	second := harness.New(t, url, ns.URL(), "figures")
	first.Init()
	first.Start()
	second.Start()
	one, other := harness.AwaitRoles(first, second)
	active, standby := figures{one, t}, figures{other, t}
	conn := harness.Connect(t, url)
	for i := range 5 {
		harness.Insert(t, conn, "doc", i, "{}")
	}
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), one.Stream, 5)
	const wal = 4 << 20
	calm := func(f figures) error {
		return errors.Join(f.is("unpublished_wal_bytes", 0, 0), f.is("unpublished_events", 0, 0),
			f.is("oldest_unpublished_timestamp_seconds", none, none), f.is("slot_held", 1, 1),
			f.is(`state{state="running"}`, 1, 1), f.is("slot_retained_bytes", 1, wal-1),
			f.is("postgres_up", 1, 1), f.is("nats_up", 1, 1), f.is("stream_messages", 5, most))
	}
	harness.Eventually(t, "figures of a calm pair", func() error {
		return errors.Join(calm(active),
			standby.is("slot_held", 0, 0), standby.is(`state{state="standby"}`, 1, 1),
			standby.is("slot_active", 1, 1), standby.is("slot_retained_bytes", 1, wal-1),
			standby.is("confirmed_lsn", 1, most), standby.is("unpublished_wal_bytes", none, none),
			standby.is("caught_up_timestamp_seconds", none, none), standby.is("published_lsn", none, none))
	})
	active.log("before")

	harness.Must(t, ns.Kill())
	killed := time.Now()
	harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc', 'anna', 100 + i, to_jsonb((SELECT string_agg(md5(random()::text), '')
			FROM generate_series(1, 700 + i % 2))) FROM generate_series(1, 400) i`)
	written := time.Now()
	unix := func(at time.Time) float64 { return float64(at.UnixMilli()) / 1000 }
	harness.Eventually(t, "figures of an outage", func() error {
		return errors.Join(
			active.is("nats_up", 0, 0), active.is("postgres_up", 1, 1),
			active.is(`state{state="running"}`, 0, 0),
			active.is("slot_retained_bytes", wal, most), active.is("unpublished_wal_bytes", wal, most),
			active.is("unpublished_events", none, none),
			active.is("slot_read_timestamp_seconds", unix(written), most),
			// not more than the figures' interval older than the rows
			active.is("oldest_unpublished_timestamp_seconds", unix(killed)-30, unix(written)),
			active.is("caught_up_timestamp_seconds", unix(killed)-30, unix(written)),
			standby.is("slot_retained_bytes", wal, most), standby.is("nats_up", 0, 0))
	})
	active.log("in the outage")
	var status struct {
		Pipeline struct {
			State    string
			CaughtUp time.Time `json:"caught_up"`
		}
		Postgres struct{ Error string }
		Slot     struct {
			Retained float64   `json:"retained_bytes"`
			Read     time.Time `json:"read_at"`
		}
		NATS struct{ Error string }
	}
	_, body := active.Get("/status.json")
	harness.Must(t, json.Unmarshal([]byte(body), &status))
	if status.Pipeline.State == "running" || status.Pipeline.CaughtUp.After(written) ||
		status.Slot.Retained < wal || status.Slot.Read.Before(written) || status.Postgres.Error != "" ||
		status.NATS.Error == "" {
		t.Errorf("/status.json: %s", body)
	}

	harness.Must(t, pg.Stop("fast"))
	harness.Eventually(t, "both sides are away", func() error {
		return errors.Join(active.is("postgres_up", 0, 0), active.is("nats_up", 0, 0),
			active.is("slot_retained_bytes", wal, most))
	})
	harness.Must(t, pg.Start(t.Context()))
	back := time.Now()
	for _, f := range []figures{active, standby} {
		harness.Eventually(t, "PostgreSQL is back", func() error {
			return errors.Join(f.is("postgres_up", 1, 1), f.is("slot_retained_bytes", wal, most),
				f.is("slot_read_timestamp_seconds", unix(back), most))
		})
	}

	harness.Must(t, ns.Start())
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), one.Stream, 405)
	conn = harness.Connect(t, url)
	harness.Eventually(t, "all figures fall", func() error {
		// what is kept falls with a look at the transactions that run, which a checkpoint takes
		harness.Exec(t, conn, "CHECKPOINT")
		if held, _ := active.Series("outflow_slot_held"); held == 0 {
			active, standby = standby, active // whoever was first
		}
		return errors.Join(calm(active), active.is("stream_messages", 405, most),
			active.is("caught_up_timestamp_seconds", unix(back), most), standby.is("slot_held", 0, 0))
	})
	active.log("after")
}

// log puts figures into the test's log.
func (f figures) log(when string) {
	f.t.Helper()
	line := when + ":"
	for _, name := range []string{"slot_retained_bytes", "unpublished_wal_bytes", "unconfirmed_wal_bytes",
		"unpublished_events", "nats_up", "stream_messages"} {
		v, ok := f.Series("outflow_" + name)
		if !ok {
			v = none
		}
		line += fmt.Sprintf(" %s %.0f", name, v)
	}
	for _, name := range []string{"oldest_unpublished", "caught_up", "slot_read"} {
		if v, ok := f.Series("outflow_" + name + "_timestamp_seconds"); ok {
			line += fmt.Sprintf(" %s %.1f s ago", name, float64(time.Now().UnixMilli())/1000-v)
		}
	}
	f.t.Log(line)
}
