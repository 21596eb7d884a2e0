package crash

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestKillsLeaveTwoExactAndEqualStreams is claims C1, C2 and C3: two outflows on two slots of one database,
// one of them killed again and again; a separate reader finds everything exactly once in both streams, and
// the streams are equal byte by byte.
func TestKillsLeaveTwoExactAndEqualStreams(t *testing.T) {
	kills := harness.EnvInt(t, "OUTFLOW_TEST_KILLS", harness.Sized(6, 3))
	ops := harness.EnvInt(t, "OUTFLOW_TEST_OPS", harness.Sized(12_000, 6_000))
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	for _, c := range []struct {
		horizon, sort string
		long          bool // the others show each value of both settings
	}{{"0s", "commit", false}, {"20ms", "seq_key", false}, {"0s", "seq_key", true},
		{"20ms", "commit", true}} {
		if c.long && !tier.Long() {
			continue
		}
		t.Run(fmt.Sprintf("horizon=%s,sort=%s", c.horizon, c.sort), func(t *testing.T) {
			t.Logf("seed %d", seed)
			testKills(t, kills, ops, seed, c.horizon, c.sort)
		})
	}
}

func testKills(t *testing.T, kills, ops int, seed uint64, horizon, sort string) {
	pg := pgtest.Own(t, 0, "track_commit_timestamp=on")
	url, err := pg.CreateDatabase(t.Context(), "traces")
	harness.Must(t, err)
	nats, twinNATS := natstest.Process(t), natstest.Process(t)
	victim := harness.New(t, url, nats.URL(), "victim", "REORDER_HORIZON="+horizon, "REORDER_SORT="+sort)
	twin := harness.New(t, url, twinNATS.URL(), "twin", "REORDER_HORIZON="+horizon, "REORDER_SORT="+sort)
	victim.Init()
	twin.Init()
	victim.Start()
	twin.Start()

	const rate = 3000
	l := harness.StartLoad(t, url, harness.RecordedOps(t, ops), 8, rate, seed)
	rnd := rand.New(rand.NewPCG(seed, 99))
	pause := time.Duration(ops) * time.Second / rate / time.Duration(kills)
	for range kills {
		time.Sleep(time.Duration(rnd.Int64N(int64(2 * pause)))) // when it is killed is random
		victim.Kill()
		victim.Start()
	}
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), victim.Stream, ops)
	harness.AwaitMessages(t, harness.JetStream(t, twinNATS.URL()), twin.Stream, ops)
	within, err := time.ParseDuration(horizon)
	harness.Must(t, err)
	harness.CompareStreams(t, url, nats.URL(), twinNATS.URL(), victim.Stream, within)
	if victim.Stop() != 0 || twin.Stop() != 0 {
		t.Error("the stop was not clean")
	}
}
