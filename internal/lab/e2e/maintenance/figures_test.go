package maintenance

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

const (
	perTransaction = 24 // rows
	writers        = 4
	partitions     = 30 // that the run lasts for: a month of days
	keptPartitions = 3  // of rows; the stream keeps about as much
)

// samples are times that were measured, for each kind of turn: without maintain, and with it.
type samples map[string][]time.Duration

// kinds of turns; of all but off, how maintain is run.
var kinds = map[string]struct{ by, settings []string }{
	"off":  {},
	"on":   {},
	"nice": {by: []string{"nice", "-n", "10"}},
	// as the systemd unit does with CPUWeight=10: a tenth of the weight of what is beside it
	"service": {by: []string{"sh", "-c", `echo 10 > /proc/$$/autogroup; exec nice -n 10 "$@"`, "sh"}},
	// as it does with CPUWeight=idle: what is beside it comes first. It needs root.
	"idle": {by: []string{"sh", "-ec", `g=/sys/fs/cgroup; test ! -d $g/cpu || g=$g/cpu; g=$g/outflow-idle
		mkdir -p $g; echo 1 > $g/cpu.idle; echo $$ > $g/cgroup.procs; exec nice -n 10 "$@"`, "sh"}},
}

func quantile(all []time.Duration, q float64) time.Duration {
	slices.Sort(all)
	if len(all) == 0 {
		return 0
	}
	return all[min(int(q*float64(len(all))), len(all)-1)]
}

// busy is a table that is written to at a fixed rate, with everything beside it.
type busy struct {
	*harness.Installation
	t       *testing.T
	ops     []recording.Op
	turn    atomic.Pointer[string] // the kind of the turn
	next    atomic.Int64           // row
	mu      sync.Mutex
	commits samples // from BEGIN to the answer to COMMIT
	locks   samples // to get a writer's lock on the table
	idle    samples // the same on a table that nobody uses: how late this machine is by itself
}

// write commits transactions at a rate until ctx ends; what is late is made up for.
func (b *busy) write(ctx context.Context, every time.Duration) error {
	conn, err := pgx.Connect(ctx, b.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // every commit was answered
	for due := time.Now(); ; due = due.Add(every) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(due)):
		}
		var docs, actors, payloads []string
		var counters []int64
		from := b.next.Add(perTransaction) - perTransaction
		for i := from; i < from+perTransaction; i++ {
			op, round := b.ops[int(i)%len(b.ops)], int(i)/len(b.ops)
			docs = append(docs, fmt.Sprintf("%s %d", op.Doc, round))
			actors, counters = append(actors, op.Actor), append(counters, op.Counter)
			payloads = append(payloads, string(op.Payload))
		}
		began, turn := time.Now(), *b.turn.Load()
		if _, err := conn.Exec(context.WithoutCancel(ctx), `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::jsonb[])`, docs, actors, counters,
			payloads); err != nil {
			return err
		}
		took := time.Since(began)
		b.mu.Lock()
		b.commits[turn] = append(b.commits[turn], took)
		b.mu.Unlock()
	}
}

// probe asks for the lock of a writer.
func (b *busy) probe(ctx context.Context, table string, into samples) error {
	conn, err := pgx.Connect(ctx, b.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing is open
	ticks := time.NewTicker(10 * time.Millisecond)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
		began, turn := time.Now(), *b.turn.Load()
		if _, err := conn.Exec(context.WithoutCancel(ctx), "BEGIN; LOCK TABLE "+table+
			" IN ROW EXCLUSIVE MODE; COMMIT"); err != nil {
			return err
		}
		took := time.Since(began)
		b.mu.Lock()
		into[turn] = append(into[turn], took)
		b.mu.Unlock()
	}
}

// TestTheFiguresOfMaintainAreMeasured logs what writers notice of outflow maintain at OUTFLOW_TEST_RATE
// (12000) events a second, for how long it locks the table at most, and how large table, WAL, stream and
// archive are; as a CSV file as well, of which scripts/plot-sizes makes a picture, if OUTFLOW_TEST_CSV names
// one. OUTFLOW_TEST_SECONDS (3600) is for how long: 30 partitions. OUTFLOW_TEST_TURNS (off,on) says how
// maintain is run in each partition's time by turns, which must be long enough for a segment: one that is not
// complete when maintain is stopped is given up. In a turn with maintain it does the work of those without as
// well, so let there be few of these: off,service,service,service,service. What it checks is only that the
// archive is whole.
func TestTheFiguresOfMaintainAreMeasured(t *testing.T) {
	tier.OnlyLong(t, "it measures, and takes an hour of an idle machine")
	lasts := time.Duration(harness.EnvInt(t, "OUTFLOW_TEST_SECONDS", 3600)) * time.Second
	rate := harness.EnvInt(t, "OUTFLOW_TEST_RATE", 12_000)
	turns := strings.Split(cmp.Or(os.Getenv("OUTFLOW_TEST_TURNS"), "off,on"), ",")
	for _, kind := range turns {
		if _, ok := kinds[kind]; !ok {
			t.Fatalf("OUTFLOW_TEST_TURNS: no turn is called %q", kind)
		}
	}
	span := (lasts / partitions).Round(time.Second)
	folder := t.TempDir()
	pg := pgtest.Own(t, 0, "shared_buffers=256MB", fmt.Sprintf("max_wal_size=%dMB", max(96, rate/6)))
	b := &busy{t: t, ops: harness.RecordedOps(t, 100_000), commits: samples{}, locks: samples{},
		idle: samples{}, Installation: harness.NewInstallation(t, pg, natstest.Process(t).URL(), "figures",
			"INIT_PARTITION_BY=written_at", "INIT_PARTITION_EVERY="+span.String(),
			"RETAIN_TABLE_EVERY="+span.String(),
			fmt.Sprintf("RETAIN_TABLE_AHEAD=%d", partitions+8), "RETAIN_TABLE_SLACK="+(span/2).String(),
			"RETAIN_TABLE_AGE="+(keptPartitions*span).String(),
			"RETAIN_STREAM_AGE="+(keptPartitions*span).String(),
			"ARCHIVE_URL=file://"+folder, "ARCHIVE_SEGMENT_AGE="+(span/2).String(),
			"MAINTAIN_EVERY="+max(span/6, time.Second).String())}
	b.Init()
	harness.Exec(t, b.Conn, "CREATE TABLE idle ()")
	b.MustRun("maintain", "--once")
	b.Start()
	csv := &strings.Builder{}
	fmt.Fprintln(csv, "seconds,rows,table,wal,stream,stream_messages,archive,partitions")

	r := &retained{t: t, Installation: b.Installation}
	b.turn.Store(&turns[0])
	during, stop := context.WithTimeout(t.Context(), lasts)
	defer stop()
	g, ctx := errgroup.WithContext(during)
	for range writers {
		g.Go(func() error { return b.write(ctx, time.Second*writers*perTransaction/time.Duration(rate)) })
	}
	g.Go(func() error { return b.probe(ctx, "outbox", b.locks) })
	g.Go(func() error { return b.probe(ctx, "idle", b.idle) })
	began, last := time.Now(), time.Now()
	var mostTable, mostWAL int64
	var mostStream uint64
	var m *maintainer
	for tick := time.NewTicker(time.Second); ctx.Err() == nil; <-tick.C {
		turn := &turns[int(time.Since(began)/span)%len(turns)]
		if m != nil && *turn != *b.turn.Load() {
			harness.Must(t, m.child.Signal(syscall.SIGTERM))
			harness.Must(t, m.child.Wait())
			m = nil
		}
		if m == nil && *turn != "off" {
			m = r.maintainBy(kinds[*turn].by, kinds[*turn].settings...)
			m.says("outflow maintain started") // before that a signal kills it
		}
		b.turn.Store(turn)
		table := harness.Value[int64](t, b.Conn, "SELECT sum(pg_total_relation_size(oid))::bigint "+
			"FROM pg_class WHERE relname LIKE 'outbox%' AND relkind = 'r'")
		wal := harness.Value[int64](t, b.Conn, "SELECT sum(size)::bigint FROM pg_ls_waldir()")
		n := harness.Value[int](t, b.Conn, "SELECT count(*) FROM pg_inherits WHERE inhparent = "+
			"'outbox'::regclass")
		s, err := b.JS.Stream(t.Context(), b.Stream)
		harness.Must(t, err)
		state := s.CachedInfo().State
		mostTable, mostWAL = max(mostTable, table), max(mostWAL, wal)
		mostStream = max(mostStream, state.Bytes)
		fmt.Fprintf(csv, "%.0f,%d,%d,%d,%d,%d,%d,%d\n", time.Since(began).Seconds(), b.next.Load(), table,
			wal, state.Bytes, state.Msgs, size(t, folder), n)
		if time.Since(last) > span {
			last = time.Now()
			t.Logf("%v: %d rows, table %d MiB in %d partitions, WAL %d MiB, stream %d MiB, archive %d MiB",
				time.Since(began).Round(time.Second), b.next.Load(), table>>20, n, wal>>20, state.Bytes>>20,
				size(t, folder)>>20)
		}
	}
	harness.Must(t, g.Wait())
	took, rows := time.Since(began), b.next.Load()
	if m != nil {
		harness.Must(t, m.child.Signal(syscall.SIGTERM))
		harness.Must(t, m.child.Wait())
	}
	harness.AwaitMessages(t, b.JS, b.Stream, int(rows))
	t.Logf("%.0f events/s for %v; at most: table %d MiB, WAL %d MiB, stream %d MiB", float64(rows)/
		took.Seconds(), took.Round(time.Second), mostTable>>20, mostWAL>>20, mostStream>>20)
	for _, c := range []struct {
		what string
		all  samples
	}{{"an insert's commit", b.commits}, {"a lock on the table", b.locks}, {"a lock elsewhere", b.idle}} {
		for _, turn := range slices.Sorted(maps.Keys(c.all)) {
			all := c.all[turn]
			t.Logf("%s, maintain %s: p50 %v, p99 %v, p99.9 %v, longest %v of %d", c.what, turn,
				quantile(all, 0.5), quantile(all, 0.99), quantile(all, 0.999), quantile(all, 1), len(all))
		}
	}
	if path := os.Getenv("OUTFLOW_TEST_CSV"); path != "" {
		harness.Must(t, os.WriteFile(path, []byte(csv.String()), 0o600))
	}
	verifying := time.Now()
	t.Log(b.MustRun("archive", "verify", "--sample", "20"))
	t.Logf("verified in %v", time.Since(verifying))
	b.MustStop(t)
}

// size is that of all files in a folder.
func size(t *testing.T, folder string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(folder, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return nil // what is gone meanwhile counts nothing
	})
	harness.Must(t, err)
	return n
}
