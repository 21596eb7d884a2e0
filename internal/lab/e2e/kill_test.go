package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// number reads a size of a test from the environment, for longer runs.
func number(t *testing.T, name string, def int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return def
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%s: %v", name, text, err)
	}
	return n
}

// TestKills is claims C1, C2 and C3: two outflows on two slots of one database, one of them killed again and again; a separate reader
// finds everything exactly once in both streams, and the streams are equal byte by byte.
func TestKills(t *testing.T) {
	kills, ops := number(t, "OUTFLOW_TEST_KILLS", 6), number(t, "OUTFLOW_TEST_OPS", 12_000)
	seed := uint64(number(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	for _, horizon := range []string{"0s", "20ms"} {
		for _, sort := range []string{"seq_key", "commit"} {
			t.Run(fmt.Sprintf("horizon=%s,sort=%s", horizon, sort), func(t *testing.T) {
				t.Logf("seed %d", seed)
				testKills(t, kills, ops, seed, horizon, sort)
			})
		}
	}
}

func testKills(t *testing.T, kills, ops int, seed uint64, horizon, sort string) {
	pg := pgtest.Own(t, 0, "track_commit_timestamp=on")
	url, err := pg.CreateDatabase(t.Context(), "traces")
	if err != nil {
		t.Fatal(err)
	}
	nats, twinNATS := natstest.Process(t), natstest.Process(t)
	victim := newOutflow(t, url, nats.URL(), "victim", "REORDER_HORIZON="+horizon, "REORDER_SORT="+sort)
	twin := newOutflow(t, url, twinNATS.URL(), "twin", "REORDER_HORIZON="+horizon, "REORDER_SORT="+sort)
	victim.init()
	twin.init()
	victim.start()
	twin.start()

	const rate = 3000
	l := startLoad(t, url, traces(t, ops), 8, rate, seed)
	rnd := rand.New(rand.NewPCG(seed, 99))
	pause := time.Duration(ops) * time.Second / rate / time.Duration(kills)
	for range kills {
		time.Sleep(time.Duration(rnd.Int64N(int64(2 * pause)))) // when it is killed is random
		victim.kill()
		victim.start()
	}
	l.wait(t)
	awaitMessages(t, js(t, nats.URL()), victim.stream, ops)
	awaitMessages(t, js(t, twinNATS.URL()), twin.stream, ops)
	within, err := time.ParseDuration(horizon)
	if err != nil {
		t.Fatal(err)
	}
	compareTwins(t, url, nats.URL(), twinNATS.URL(), victim.stream, within)
	if victim.term() != 0 || twin.term() != 0 {
		t.Error("the stop was not clean")
	}
}

// compareTwins compares each stream with the table, and the two with each other. With a horizon above 0 it also holds claim C4: what is
// out of order came to the WAL when the window of a higher one had closed (the server must track commit timestamps).
func compareTwins(t *testing.T, pgURL, natsURL, twinURL, stream string, horizon time.Duration) {
	t.Helper()
	conn := db(t, pgURL)
	var verdicts []oracle.Verdict
	for _, u := range []string{natsURL, twinURL} {
		v, err := oracle.Compare(t.Context(), conn, "outbox", js(t, u), stream, horizon)
		if err != nil {
			t.Fatal(err)
		}
		t.Log(v.String())
		if !v.OK() {
			t.Errorf("stream and table differ: %s", v.String())
		}
		if horizon > 0 && v.OutOfOrder != v.Late {
			t.Errorf("%d events are out of order though the window of no higher one had closed", v.OutOfOrder-v.Late)
		}
		verdicts = append(verdicts, v)
	}
	if verdicts[0].Digest != verdicts[1].Digest {
		t.Errorf("the streams differ: digests %s and %s", verdicts[0].Digest, verdicts[1].Digest)
	}
}
