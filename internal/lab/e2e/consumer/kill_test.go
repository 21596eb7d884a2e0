package consumer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/recording"
)

// effects are the programs of testdata/effects, built once.
var effectsBinary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(filepath.Dir(harness.Binary), "effects")
	out, err := exec.Command("go", "build", "-o", path, "./testdata/effects").CombinedOutput()
	if err != nil {
		err = fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, err
})

// instance is one process of a consumer.
type instance struct {
	t    *testing.T
	args []string
	env  []string
	log  *harness.Log
	p    *process.Process
}

// newInstance starts the program of testdata/effects.
func newInstance(t *testing.T, args ...string) *instance {
	t.Helper()
	path, err := effectsBinary()
	harness.Must(t, err)
	return startInstance(t, nil, append([]string{path}, args...)...)
}

// startInstance starts a program of any kind, with more environment.
func startInstance(t *testing.T, env []string, args ...string) *instance {
	t.Helper()
	i := &instance{t: t, args: args, env: env, log: &harness.Log{}}
	t.Cleanup(func() {
		_ = i.p.Kill()
		if t.Failed() {
			t.Logf("end of the log of %v:\n%s", args, i.log.Tail(3000))
		}
	})
	i.start()
	return i
}

func (i *instance) start() {
	i.t.Helper()
	cmd := exec.Command(i.args[0], i.args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Env = i.log, i.log, append(os.Environ(), i.env...)
	var err error
	if i.p, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		i.t.Fatal(err)
	}
}

// TestKilledConsumersHaveTheEffectsOfUndisturbedOnes kills the instances of a consumer again and again, or
// freezes them, some for longer than their lease, so that they wake up beside those that took over, while
// operations flow through 16 partitions that they share. Its effects, three tables that depend on the order
// and the number of events, are those of a consumer that nobody disturbed.
func TestKilledConsumersHaveTheEffectsOfUndisturbedOnes(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	instances := harness.EnvInt(t, "OUTFLOW_TEST_CONSUMER_INSTANCES", 3)
	kills := harness.EnvInt(t, "OUTFLOW_TEST_CONSUMER_KILLS", 9)
	freezes := harness.EnvInt(t, "OUTFLOW_TEST_CONSUMER_FREEZES", 3)
	ops := harness.EnvInt(t, "OUTFLOW_TEST_CONSUMER_OPS", 3_000)
	lease := time.Duration(harness.EnvInt(t, "OUTFLOW_TEST_CONSUMER_LEASE_MS", 500)) * time.Millisecond
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 7))

	url, nats := pgtest.Database(t, pgtest.Own(t, 0, "max_connections=400")), natstest.Server(t)
	o := harness.New(t, url, nats.URL(), "consumer_kills", "REORDER_SORT=commit")
	o.Init()
	o.Start()

	all := dealt(t, ops, 8)
	const pause = 400 * time.Millisecond // between two strikes
	rate := max(100, int(float64(ops)/(float64(kills+freezes)*pause.Seconds())))
	began := time.Now()
	l := harness.StartLoad(t, url, all, 4, rate, seed)

	args := []string{"-database", url, "-nats", nats.URL(), "-lease", lease.String(), "-partitions", "16"}
	calm := newInstance(t, append(args, "-name", "calm")...)
	victims := make([]*instance, instances)
	for i := range victims {
		victims[i] = newInstance(t, append(args, "-name", "victim")...)
	}
	slept, killed := 0, 0 // beyond the lease; while they slept, or not
	var asleep sync.WaitGroup
	for kills+freezes > 0 {
		time.Sleep(time.Duration(rnd.Int64N(int64(2 * pause)))) // when it is struck is random
		v := victims[rnd.IntN(len(victims))]
		if rnd.IntN(kills+freezes) < kills {
			kills--
			killed++
			harness.Must(t, v.p.Kill())
			v.start()
			continue
		}
		freezes--
		sleep := time.Duration(rnd.Int64N(int64(4 * lease)))
		if sleep > lease {
			slept++
		}
		p := v.p // it may be killed meanwhile, and another one be there
		harness.Must(t, p.Pause())
		asleep.Go(func() {
			time.Sleep(sleep)
			_ = p.Resume()
		})
	}
	asleep.Wait()
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, len(all))
	conn := harness.Connect(t, url)
	var processes []*process.Process
	for _, v := range victims {
		processes = append(processes, v.p)
	}
	awaitEffects(t, conn, "calm", len(all), calm.p)
	awaitEffects(t, conn, "victim", len(all), processes...)
	for table, order := range map[string]string{"state": "document", "log": "document, n",
		"turns": "document"} {
		want, got := dump(t, conn, "calm."+table, order), dump(t, conn, "victim."+table, order)
		if want != got {
			t.Errorf("table %s differs from that of the consumer that nobody disturbed: %s, %s", table, got,
				want)
		}
	}
	var n, documents, partitions, epoch int
	err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM victim.log), (SELECT count(*)
		FROM victim.state), (SELECT count(*) FROM victim.outflow_mark WHERE due > '0/0'),
		(SELECT epoch FROM victim.outflow_consumer)`).Scan(&n, &documents, &partitions, &epoch)
	if err != nil || n != len(all) {
		t.Errorf("%d events had their effect, want %d (%v)", n, len(all), err)
	}
	t.Logf(
		"%d instances, %d kills, %d frozen beyond their lease, %d claims, %d operations of %d documents "+
			"through %d partitions in %v: three tables equal",
		instances,
		killed,
		slept,
		epoch,
		len(all),
		documents,
		partitions,
		time.Since(began).Round(time.Second),
	)
	for _, i := range append(victims, calm) {
		harness.Must(t, i.p.Signal(syscall.SIGTERM))
		if err := i.p.Wait(); err != nil {
			t.Errorf("the stop was not clean: %v", err)
		}
	}
}

// dealt returns so many recorded operations; each document's are dealt to several, so there are more
// documents than partitions.
func dealt(t *testing.T, ops, documents int) (all []recording.Op) {
	t.Helper()
	for round := 0; len(all) < ops; round++ {
		for i, op := range harness.RecordedOps(t, ops-len(all)) {
			op.Doc = fmt.Sprintf("%s-%d-%d", op.Doc, round, i%documents)
			all = append(all, op)
		}
	}
	return all
}

func awaitEffects(t *testing.T, conn *pgx.Conn, name string, want int, by ...*process.Process) {
	t.Helper()
	harness.Eventually(t, "the effects of "+name, func() error {
		var n int
		if err := conn.QueryRow(t.Context(), `SELECT coalesce(sum(events), 0) FROM `+name+
			`.state`).Scan(&n); err != nil {
			return err
		}
		if n < want {
			return fmt.Errorf("%d of %d events", n, want)
		}
		return nil
	}, by...)
}

// dump is a hash over a table.
func dump(t *testing.T, conn *pgx.Conn, table, order string) string {
	t.Helper()
	var n int
	var hash string
	err := conn.QueryRow(context.WithoutCancel(t.Context()),
		`SELECT count(*), md5(coalesce(string_agg(r::text, E'\n' ORDER BY `+order+`), '')) FROM `+table+
			` r`).Scan(&n, &hash)
	harness.Must(t, err)
	return strconv.Itoa(n) + " rows " + hash
}
