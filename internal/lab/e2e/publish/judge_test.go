package publish

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// judge is the second opinion on an installation: a slot of its own, made after init.
type judge struct {
	o      *harness.Outflow
	conn   *pgx.Conn
	reader *oracle.Reader
	cfg    oracle.Config
}

func judgeTable(o *harness.Outflow, url string, set oracle.Settings) *judge {
	o.T.Helper()
	return judgeEvents(o, oracle.OfTable, url, set)
}

// judgeEvents is judge where the events are not rows alone.
func judgeEvents(o *harness.Outflow, events oracle.Origin, url string, set oracle.Settings) *judge {
	o.T.Helper()
	conn := harness.Connect(o.T, url)
	slot := o.Slot + "_judge"
	harness.Must(o.T, oracle.CreateSlot(o.T.Context(), conn, slot))
	return &judge{o, conn, oracle.NewReader(oracle.Source{Slot: slot, Events: events}),
		oracle.Config{Slot: o.Slot, Settings: set}}
}

// read reads what there is of the truth.
func (j *judge) read() *oracle.Truth {
	j.o.T.Helper()
	if err := j.reader.Read(j.o.T.Context(), j.conn); err != nil {
		j.o.T.Fatal(err)
	}
	return j.reader.Truth()
}

// mustAgree waits for all that was committed and then compares everything.
func (j *judge) mustAgree(natsURL string) oracle.Judgement {
	j.o.T.Helper()
	js := harness.JetStream(j.o.T, natsURL)
	harness.AwaitMessages(j.o.T, js, j.o.Stream, j.read().Events)
	truth := j.read() // what closed the last windows
	v, err := oracle.Judge(j.o.T.Context(), js, j.o.Stream, truth, j.cfg)
	if err != nil {
		j.o.T.Fatal(err)
	}
	j.o.T.Log(v.String())
	if !v.OK() || v.Published != v.Events {
		j.o.T.Errorf("stream and WAL differ: %s", v.String())
	}
	if truth.Events == truth.Messages && truth.Events > 0 {
		return v // there may be no table
	}
	table, err := truth.CheckTable(j.o.T.Context(), j.conn, "outbox", oracle.DefaultColumns)
	if err != nil {
		j.o.T.Fatal(err)
	}
	if !table.OK(true) || table.Rows+table.Gone != truth.Events-truth.Messages {
		j.o.T.Errorf("table and WAL differ: %+v", table)
	}
	return v
}

// mixedLoad writes events in every shape that a transaction can have, until it is told to stop.
type mixedLoad struct {
	group   sync.WaitGroup
	stop    context.CancelFunc
	failure error
	rounds  int
}

func startMixedLoad(t *testing.T, url string, seed uint64) *mixedLoad {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	s := &mixedLoad{stop: stop}
	t.Cleanup(func() { stop(); s.group.Wait() })
	s.group.Go(func() {
		rnd := rand.New(rand.NewPCG(seed, 7))
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			s.failure = err
			return
		}
		defer conn.Close(context.Background()) //nolint:errcheck // every commit was answered
		for ; ctx.Err() == nil && s.failure == nil; s.rounds++ {
			s.failure = s.round(t.Context(), conn, rnd)
		}
	})
	return s
}

func (s *mixedLoad) wait(t *testing.T) {
	t.Helper()
	s.stop()
	s.group.Wait()
	if s.failure != nil {
		t.Fatalf("write: %v", s.failure)
	}
}

const insertRow = "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)"

// round writes one of each: COPY, rows that one statement makes, savepoints, rollbacks, strange and large
// values, statements that are no input.
func (s *mixedLoad) round(ctx context.Context, conn *pgx.Conn, rnd *rand.Rand) error {
	n := s.rounds * 1000
	var rows [][]any
	for i := range 1 + rnd.IntN(40) {
		rows = append(rows, []any{fmt.Sprint("copy ", rnd.IntN(3)), "kopi'st", int64(n + i), `{"n": 1.10}`})
	}
	rnd.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	if _, err := conn.CopyFrom(ctx, pgx.Identifier{"outbox"},
		[]string{"doc_id", "actor_id", "counter", "payload"}, pgx.CopyFromRows(rows)); err != nil {
		return err
	}
	long := strings.Repeat("wörd ", 60) // cut in subject and header
	odd := []string{"", "a.b*>", "line\nfeed 'quoted' \"twice\" [x]:y", "\\x00", long, "null", "ünï\tcode"}
	for _, statements := range [][]any{
		{insertRow, odd[rnd.IntN(len(odd))], odd[rnd.IntN(len(odd))], n,
			`"it''s \u00e9 \\ 9007199254740993"`},
		{insertRow, "large", "x", n, `"` + strings.Repeat("0123456789", rnd.IntN(110_000)) + `"`},
		{"INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'many', 'x', $1::bigint - g, '[]' " +
			"FROM generate_series(1, 25) g", n},
		{"DELETE FROM outbox WHERE doc_id = 'many' AND counter % 5 = 0"},
		{"UPDATE outbox SET payload = '{}' WHERE doc_id = 'none'"},
		{"SELECT pg_logical_emit_message(true, 'other, sz: 3 content:', $1::text)", "x"},
		{"SELECT pg_logical_emit_message(false, 'outflow.tick', '')"},
		{"SELECT pg_logical_emit_message(true, 'outflow.settings', 'v=1 slot=somebody horizon=1s " +
			"sort=commit max_events=1 max_bytes=1')"},
	} {
		if _, err := conn.Exec(ctx, statements[0].(string), statements[1:]...); err != nil {
			return err
		}
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	for i := range 6 {
		point, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := point.Exec(ctx, insertRow, "points", "x", n+10-i, fmt.Sprint(i)); err != nil {
			return err
		}
		end := point.Commit
		if i%2 == 1 {
			end = point.Rollback
		}
		if err := end(ctx); err != nil {
			return err
		}
	}
	end := tx.Commit
	if rnd.IntN(2) == 0 {
		end = tx.Rollback
	}
	return errors.Join(end(ctx), ctx.Err())
}

// TestTheStreamIsWhatTheOracleMakesOfTheWAL is claims C1 to C5 at once: whatever is written and whoever is
// killed, the stream is message by message and byte by byte what a second implementation of the rules makes
// of the WAL, as test_decoding prints it.
func TestTheStreamIsWhatTheOracleMakesOfTheWAL(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ops, kills := harness.EnvInt(t, "OUTFLOW_TEST_OPS", 4000), harness.EnvInt(t, "OUTFLOW_TEST_KILLS", 2)
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	for _, horizon := range []time.Duration{0, 20 * time.Millisecond} {
		for _, sort := range []oracle.Sort{oracle.BySeqKey, oracle.ByCommit} {
			t.Run(fmt.Sprintf("horizon=%v,sort=%v", horizon, sort), func(t *testing.T) {
				t.Parallel()
				t.Logf("seed %d", seed)
				testJudge(t, pgtest.Server(t), ops, kills, seed, oracle.Settings{Horizon: horizon, Sort: sort,
					MaxEvents: 65536, MaxBytes: 64 << 20})
			})
		}
	}
}

// TestTheStreamIsWhatTheOracleMakesOnEveryMajor is the same on every major, shorter.
func TestTheStreamIsWhatTheOracleMakesOnEveryMajor(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		testJudge(t, pg, 1000, 1, 1, oracle.DefaultSettings)
	})
}

func testJudge(t *testing.T, pg *pgserver.Server, ops, kills int, seed uint64, set oracle.Settings) {
	rnd := rand.New(rand.NewPCG(seed, 99))
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pg, ns.URL(), "judged",
		append(orderSettings(set), "SINK_ON_POISON=dead_letter")...)
	o.Init()
	j := judgeTable(o, url, set)
	j.cfg.DeadLetters = true
	o.Start()
	all := harness.RecordedOps(t, ops)
	half := len(all) / 2
	write := func(ops int, from int, disturb func()) {
		l := harness.StartLoad(t, url, all[from:from+ops], 6, 2000, seed)
		s := startMixedLoad(t, url, seed+uint64(from))
		disturb()
		l.Wait(t)
		s.wait(t)
	}
	killed := func() {
		for range kills {
			// when it is killed is random
			time.Sleep(time.Duration(rnd.Int64N(int64(300 * time.Millisecond))))
			o.Kill()
			j.read() // in pieces, as it comes
			o.Start()
		}
	}
	write(half, 0, killed)
	// Other settings in the middle: small limits, so that rule 3 and windows that take everything come about
	// as well. They are written here, for the place to be known: outflow itself would wait for a quiet
	// moment, and be killed before.
	other := oracle.Settings{Horizon: 50 * time.Millisecond, Sort: 1 - set.Sort, MaxEvents: 60,
		MaxBytes: 100_000}
	write(half, half, func() {
		o.Kill()
		harness.Exec(t, conn, "SELECT pg_logical_emit_message(true, 'outflow.settings', $1)",
			fmt.Sprintf("v=1 slot=%s horizon=%v sort=%v max_events=%d max_bytes=%d",
				o.Slot, other.Horizon, other.Sort, other.MaxEvents, other.MaxBytes))
		o.Set(orderSettings(other)...)
		o.Start()
		killed()
	})
	v := j.mustAgree(ns.URL())
	if v.Events < ops {
		t.Errorf("%d events in the WAL, %d of the traces alone were written", v.Events, ops)
	}
	sorts := map[oracle.Sort]int{}
	pulled := 0
	for _, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream) {
		sorts[m.Outflow.Sort]++
		pulled += m.Outflow.Pull
	}
	t.Logf("messages by sort: %v, sum of pull %d", sorts, pulled)
	if len(sorts) != 2 || pulled == 0 {
		t.Errorf("messages by sort rule %v, sum of pull %d: want both rules, and pulled events", sorts,
			pulled)
	}
	if o.Stop() != 0 {
		t.Error("the stop was not clean")
	}
}

func orderSettings(s oracle.Settings) []string {
	limits := []string{
		fmt.Sprint("REORDER_MAX_EVENTS=", s.MaxEvents), fmt.Sprint("REORDER_MAX_BYTES=", s.MaxBytes),
	}
	if s.Sort != oracle.ByGap {
		return append(limits, "REORDER_HORIZON="+s.Horizon.String(), "REORDER_SORT="+s.Sort.String())
	}
	if limits = append(limits, "REORDER_MODE=gap", "REORDER_BOUND="+s.Gap.Bound.String(),
		"REORDER_COLD="+s.Gap.Cold.String(), fmt.Sprint("REORDER_MEMORY=", s.Gap.Memory)); s.Gap.Document {
		limits = append(limits, "REORDER_GAP_SCOPE=document")
	}
	return limits
}
