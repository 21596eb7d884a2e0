package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/outbox"
)

// writing inserts rows until the function that it returns is called.
func writing(t *testing.T, url string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stopping := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 2 {
		conn, err := pgx.Connect(ctx, url)
		must(t, err)
		wg.Go(func() {
			defer conn.Close(context.Background()) //nolint:errcheck // the test is over
			for i := 0; ; i++ {
				_, err := conn.Exec(ctx, fmt.Sprintf("BEGIN; SET LOCAL synchronous_commit = %s; INSERT INTO outbox (doc_id, actor_id, counter, payload) "+
					"SELECT 'w' || n %% 5, 'writer%d', %d + n, '{}' FROM generate_series(1, 3) n; COMMIT", []string{"on", "off"}[i%2], w, 100_000+10*i))
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				select {
				case <-stopping:
					return
				case <-time.After(3 * time.Millisecond):
				}
			}
		})
	}
	stop = sync.OnceFunc(func() { // the last ones are not cut off: the server might commit them later
		close(stopping)
		defer cancel()
		defer time.AfterFunc(patience, cancel).Stop()
		wg.Wait()
	})
	return stop
}

// killedAt runs outflow repair until it says something, and kills it then, or a random moment later. A step that an earlier one has
// done is not said again: then it is killed when it begins to publish. Without a word it runs to its end. It reports whether it was
// killed.
func (f *faulty) killedAt(t *testing.T, accept, word string, later time.Duration) bool {
	t.Helper()
	cmd := exec.Command(program(f.env), "repair", "--json", "--accept", accept)
	cmd.Env = f.env
	stderr, w := io.Pipe()
	cmd.Stderr = w
	child, err := process.Start(cmd, syscall.SIGKILL)
	must(t, err)
	lines := make(chan string, 64)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			lines <- s.Text()
		}
	}()
	killed := false
	var all []string
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				lines = nil
			}
			all = append(all, line)
			if word != "" && (strings.Contains(line, word) || strings.Contains(line, "publishing")) && !killed {
				time.Sleep(later)
				killed = child.Kill() == nil
			}
			continue
		case <-child.Done():
		}
		break
	}
	w.Close()
	err = child.Wait()
	if !killed && err != nil && unanswered(t, "repair --accept "+accept, strings.Join(all, "\n")) {
		return f.killedAt(t, accept, word, later)
	}
	if !killed && err != nil {
		t.Fatalf("outflow repair --accept %s: %v\n%s", accept, err, strings.Join(all, "\n"))
	}
	return killed
}

// TestRepairKilled kills repairs with kill -9 at every step, again and again, while writers write: the one that comes to its end has
// every event in the stream once.
func TestRepairKilled(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	publishingOften := []string{"publishing", "publishing", "publishing", "reading the headers", "publishing", "waiting"}
	cases := []killing{
		{gaps[0], append([]string{"making slot", "made, at"}, publishingOften...)},                     // the slot is made anew
		{diverged, append([]string{"dropping slot", "dropping slot", "made, at"}, publishingOften...)}, // the same, with a slot that is there
		{gaps[1], publishingOften},                                      // it is kept
		{gaps[5], append([]string{"begins again"}, publishingOften...)}, // the stream is made anew
	}
	together(t, cases, func(c killing) string { return c.name }, func(t *testing.T, i int, c killing) {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		for try := 1; c.kill(t, ns.URL(), rng) == 0; try++ { // this test stood still for as long as the repair took
			if try == tries {
				t.Fatal("the repair came to its end before it could be killed")
			}
		}
	})
}

// kill kills repairs of a gap, and returns how many.
func (c killing) kill(t *testing.T, natsURL string, rng *rand.Rand) (kills int) {
	t.Helper()
	f := begin(t, natsURL, c.gap)
	stop := writing(t, f.url)
	defer stop()
	mustExec(t, f.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'much', 'bob', n, '{}' FROM generate_series(1, 10000) n")
	c.smash(t, f)
	accept := c.code
	for _, word := range c.at {
		later := time.Duration(0)
		if word == "publishing" {
			later = time.Duration(rng.IntN(60)) * time.Millisecond
		}
		if !f.killedAt(t, accept, word, later) {
			break // it came to its end before
		}
		if kills++; kills == 2 {
			f.fails(4, []string{"init"}, "did not finish", "--accept repair_unfinished")
		}
		if kills > 1 { // before, it may have died before its first step
			accept = []string{c.code, "repair_unfinished"}[rng.IntN(2)]
		}
	}
	f.killedAt(t, c.code, "", 0)
	t.Logf("%d kills", kills)
	f.log.Reset()
	f.start()
	f.ready()
	stop()
	f.complete(t, natsURL, 0)
	return kills
}

// diverged has a slot that holds events which the stream has.
var diverged = gap{name: "diverged", code: "divergence", smash: func(t *testing.T, f *faulty) {
	f.replaceStream(t, func(all []*oracle.Message) []*oracle.Message {
		last := all[len(all)-1]
		last.Outflow.Thru++
		last.Header.Set("Outflow", last.Outflow.String())
		return all
	})
}}

func begin(t *testing.T, natsURL string, g gap) *faulty {
	t.Helper()
	if g.code == "divergence" {
		return unconfirmed(t, natsURL, "killed")
	}
	return publishing(t, natsURL, "killed").stopped(t)
}

// killing is a gap, and what a repair says when it is killed, or a moment later.
type killing struct {
	gap
	at []string
}

// together runs a subtest for each case, all at the same time: they wait more than they work.
func together[C any](t *testing.T, cases []C, name func(C) string, test func(t *testing.T, i int, c C)) {
	t.Helper()
	var wg sync.WaitGroup
	for i, c := range cases {
		wg.Go(func() { t.Run(name(c), func(t *testing.T) { test(t, i, c) }) })
	}
	wg.Wait()
}

// TestRepairs are repairs of further kinds.
func TestRepairs(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	type repairTest struct {
		name string
		test func(t *testing.T, natsURL string)
	}
	together(t, []repairTest{
		{"unfinished", repairUnfinished}, {"zombie", repairZombie}, {"where", repairWhere}, {"other settings", repairOtherSettings},
		{"other cluster", repairOtherCluster}, {"zombie in between", repairZombieInBetween},
	}, func(c repairTest) string { return c.name }, func(t *testing.T, _ int, c repairTest) { c.test(t, ns.URL()) })
}

// repairUnfinished: between a repair that died and the next one outflow run stops.
func repairUnfinished(t *testing.T, natsURL string) {
	var f *faulty
	for try := 1; ; try++ {
		f = publishing(t, natsURL, "half").stopped(t)
		f.dropSlot(t)
		row(t, f.conn, "lost", 1000, "{}")
		if f.killedAt(t, "slot_missing", "waiting", 0) {
			break
		}
		if try == tries {
			t.Fatal("it came to its end")
		}
	}
	f.start()
	f.ends(4, "a repair of slot", "--accept slot_missing", "LSN range", "`outflow repair --accept repair_unfinished`")
	f.killedAt(t, "repair_unfinished", "", 0)
	f.start()
	f.goesOn(t, natsURL, 0)
	if r, stderr, code := f.repair("--accept", "slot_missing"); code != 0 || r.Fault != "" {
		t.Errorf("repaired once more: exit code %d, %+v %s", code, r, stderr)
	}
}

// repairZombie: an outflow sleeps while the slot is lost and the gap is repaired. What it still has in hand when it wakes up is
// refused, and it goes on from what the repair left.
func repairZombie(t *testing.T, natsURL string) {
	f := publishing(t, natsURL, "zombie")
	awaitMessages(t, f.js, f.stream, before)
	f.ready()
	must(t, f.child.Pause())
	f.loseRows(t)
	eventually(t, "the slot is free", func() error {
		_, err := f.conn.Exec(t.Context(), "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active", f.slot)
		if err == nil {
			_, err = f.conn.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", f.slot)
		}
		return err
	})
	f.killedAt(t, "slot_missing", "", 0)
	must(t, f.child.Resume())
	row(t, f.conn, "after", 2000, "{}")
	f.complete(t, natsURL, 0)
	if code := f.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// repairZombieInBetween: an outflow that slept wakes up while a repair publishes, and sends what it had in hand. If its messages took
// sequences, those of the repair would be refused there and the ones behind them accepted. The door that it knows is shut.
func repairZombieInBetween(t *testing.T, natsURL string) {
	f := publishing(t, natsURL, "between").stopped(t)
	f.dropSlot(t)
	mustExec(t, f.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'much', 'bob', n, '{}' FROM generate_series(1, 40000) n")
	in := ingress(t, f)
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	r := f.repairing("--accept", "slot_missing")
	was := s.CachedInfo().State.LastSeq
	for bursts, begun := 0, time.Now(); bursts < 8 && time.Since(begun) < patience; {
		info, err := s.Info(t.Context())
		must(t, err)
		last := info.State.LastSeq
		if last < was+100 {
			continue // it does not publish yet
		}
		if last >= was+30_000 {
			break
		}
		for seq := last; seq < last+2000; seq++ {
			if seq%30 > 9 {
				continue // few enough that none of those that are refused for them asks for an acknowledgement
			}
			m := nats.NewMsg(in + "outbox.zombie")
			h := outbox.Header{Pos: outbox.Position{LSN: 0x100, Index: uint32(seq)}, Of: 1, Due: 0x100, Thru: 0x100, Timeline: 1, ID: fmt.Sprint("zombie", seq)}
			m.Header.Set(outbox.HeaderName, h.String())
			m.Header.Set(nats.ExpectedLastSeqHdr, fmt.Sprint(seq))
			must(t, f.js.Conn().PublishMsg(m))
		}
		bursts++
	}
	report, stderr, code := r.wait()
	if code != 0 || !report.Repaired {
		t.Fatalf("exit code %d, %+v %s", code, report, stderr)
	}
	times, zombies := map[string]int{}, 0
	for _, m := range messages(t, f.js, f.stream) {
		if times[m.Outflow.ID]++; strings.HasPrefix(m.Outflow.ID, "zombie") {
			zombies++
		}
	}
	var lost, double int
	rows, err := f.conn.Query(t.Context(), "SELECT id::text FROM outbox")
	must(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	for _, id := range ids {
		switch n := times[id]; {
		case n == 0:
			lost++
		case n > 1:
			double++
		}
	}
	if lost > 0 || double > 0 || zombies > 0 {
		t.Errorf("%d of %d rows are in no message, %d in several, %d messages are the zombie's\n%s", lost, len(ids), double, zombies, stderr)
	}
}

// repairWhere: rows that were there before init, and rows whose messages retention has removed, are told apart by a condition.
func repairWhere(t *testing.T, natsURL string) {
	f := &faulty{js: js(t, natsURL)}
	f.outflow, f.conn, f.url = installation(t, pgtest.Server(t), natsURL, "cond")
	mustExec(t, f.conn, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL)`)
	row(t, f.conn, "old", 1, "{}")
	f.init()
	f.start()
	mustExec(t, f.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', 'anna', n, '{}' FROM generate_series(100, 139) n")
	f.stopped(t)
	s, err := f.js.Stream(t.Context(), f.stream)
	must(t, err)
	f.dropSlot(t)
	f.loseRows(t)
	if r, stderr, code := f.repair(); code != 4 || r.Missing != meanwhile+1 || r.First.Doc != "lost" || r.Last.Doc != "old" {
		t.Fatalf("exit code %d, %+v %s", code, r, stderr)
	}
	must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(11)))
	if _, stderr, code := f.repair(); code != 3 || !strings.Contains(stderr, "10 messages of stream") || !strings.Contains(stderr, "--where") {
		t.Errorf("messages removed: exit code %d, %s", code, stderr)
	}
	if _, stderr, code := f.repair("--where", "counter >"); code != 2 || !strings.Contains(stderr, "--where") {
		t.Errorf("no condition: exit code %d, %s", code, stderr)
	}
	r, stderr, code := f.repair("--accept", "slot_missing", "--where", "counter >= 110 -- and what else")
	if code != 0 || r.Rows != 30+meanwhile || r.Published != meanwhile {
		t.Fatalf("exit code %d, %+v %s", code, r, stderr)
	}
	f.start()
	f.ready()
	row(t, f.conn, "after", 2000, "{}")
	awaitMessages(t, f.js, f.stream, 40+meanwhile+1)
	if code := f.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	var keys []string
	for _, m := range messages(t, f.js, f.stream)[30:] {
		keys = append(keys, m.Outflow.Key+" "+m.Outflow.Due.String()+" "+m.Outflow.Thru.String())
	}
	if len(keys) != meanwhile+1 || !strings.HasPrefix(keys[0], "anna:00000000000000001000") || !strings.HasPrefix(keys[meanwhile], "anna:00000000000000002000") {
		t.Errorf("behind the 30 messages that were left: %v", keys)
	}
}

// TestRepairedBytes: what a repair publishes of a row is, but for its place, what outflow run publishes of it.
func TestRepairedBytes(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	together(t, []shape{
		{
			"computed key",
			`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
			seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL,
			at timestamptz, d date, n numeric, f float8, raw bytea, flag bool, iv interval, words text)`,
			`INSERT INTO outbox (doc_id, actor_id, counter, payload, at, d, n, f, raw, flag, iv, words) VALUES
			('a b.*', 'anna', -5, '{"n": 9007199254740993, "x": 1.10}', '2024-02-29 23:59:59.123456+02', '0044-03-15 BC', 1.10, 0.1, '\x00ff', true, '1 day 2 hours', E' two\r\nlines '),
			('', 'ünal', 7, '[1.0]', 'infinity', '-infinity', 'NaN', '-Infinity', '', false, '-1 mon', ''),
			(repeat('x', 5000), 'anna', 123456789012, '"\u00e9"', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
			('big', 'anna', 1, to_jsonb(repeat('y', 3000)), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)`,
			[]string{"HEADERS=At=at,Day=d,Num=n,Float=f,Raw=raw,Flag=flag,Span=iv,Words=words,Count=counter", "SINK_MAX_PAYLOAD=2KiB", "SINK_ON_POISON=dead_letter", "SINK_DEAD_LETTER_SUBJECT=dead",
				"SUBJECT=x.{doc_id}.{flag}.{partition(actor_id, 7)}"},
		},
		{
			"bytea",
			`CREATE TABLE outbox (id bytea, doc_id int, seq_key text, payload bytea, kind varchar(9))`,
			`INSERT INTO outbox SELECT decode(lpad(to_hex(n), 6, '0'), 'hex'), n % 3, 'k' || n, decode(lpad(to_hex(n * 7919), 8, '0'), 'hex'), 'kind ' || n FROM generate_series(1, 40) n`,
			[]string{"HEADERS=Kind=kind", "REORDER_SORT=seq_key", "SINK_MSG_ID=true"},
		},
	}, func(c shape) string { return c.name }, func(t *testing.T, _ int, c shape) {
		a := &faulty{js: js(t, ns.URL())}
		a.outflow, a.conn, a.url = installation(t, pg, ns.URL(), "bytes_run", c.settings...)
		b := &faulty{js: a.js, conn: a.conn, url: a.url}
		b.outflow = newOutflow(t, a.url, ns.URL(), slotName("bytes_repair"), c.settings...)
		b.named(strings.ToUpper(b.slot))
		mustExec(t, a.conn, c.table)
		a.init()
		b.init()
		b.dropSlot(t)
		mustExec(t, a.conn, c.rows)
		var n int
		must(t, a.conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n))
		a.start()
		awaitMessages(t, a.js, a.stream, n)
		b.killedAt(t, "slot_missing", "", 0)
		want, got := map[string]*oracle.Message{}, messages(t, b.js, b.stream)
		for _, m := range messages(t, a.js, a.stream) {
			want[m.Outflow.ID] = m
		}
		if len(got) != n || len(want) != n {
			t.Fatalf("%d messages repaired, %d from the WAL, want %d", len(got), len(want), n)
		}
		for i, m := range got {
			w := want[m.Outflow.ID]
			h := m.Outflow
			if h.N != i || h.Of != n || h.Due != h.Thru || h.Due != h.Pos.LSN || h.Pull != 0 || h.Pos.Index != 1<<30+uint32(i) || h.Key != w.Outflow.Key {
				t.Errorf("header %v, from the WAL %v", &h, &w.Outflow)
			}
			if i > 0 && c.name == "bytea" && m.Subject < got[i-1].Subject {
				t.Errorf("%s after %s", m.Subject, got[i-1].Subject)
			}
			if x, y := comparable(m, w), comparable(w, w); x != y {
				t.Errorf("repaired\n%s\nfrom the WAL\n%s", x, y)
			}
		}
	})
}

// shape is a table, its rows, and settings.
type shape struct {
	name, table, rows string
	settings          []string
}

// comparable is all of a message but its place: its own sequence, position and window.
func comparable(m, named *oracle.Message) string {
	var b strings.Builder
	fmt.Fprintln(&b, m.Subject)
	var lines []string
	for name, values := range m.Header {
		if name != "Outflow" && name != nats.ExpectedLastSeqHdr && name != nats.MsgIdHdr {
			lines = append(lines, fmt.Sprintf("%s: %q", name, values))
		}
	}
	slices.Sort(lines)
	data := string(m.Data)
	if m.Header.Get("Outflow-Dead-Letter") != "" {
		data = strings.Replace(data, m.Outflow.Pos.String(), named.Outflow.Pos.String(), 1)
	}
	fmt.Fprintf(&b, "%s\n%q", strings.Join(lines, "\n"), data)
	return b.String()
}
