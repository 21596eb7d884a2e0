package repair

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/outbox"
)

// killedAt runs outflow repair until it says something, and kills it then, or a random moment later. A step
// that an earlier one has done is not said again: then it is killed when it begins to publish. Without a word
// it runs to its end. It reports whether it was killed.
func killedAt(f *harness.Installation, t *testing.T, accept, word string, later time.Duration) bool {
	t.Helper()
	cmd := exec.Command(harness.Program(f.Env), "repair", "--json", "--accept", accept)
	cmd.Env = f.Env
	stderr, w := io.Pipe()
	cmd.Stderr = w
	child, err := process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
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
			if word != "" && (strings.Contains(line, word) || strings.Contains(line, "publishing")) &&
				!killed {
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
	if !killed && err != nil && harness.Unanswered(t, "repair --accept "+accept, strings.Join(all, "\n")) {
		return killedAt(f, t, accept, word, later)
	}
	if !killed && err != nil {
		t.Fatalf("outflow repair --accept %s: %v\n%s", accept, err, strings.Join(all, "\n"))
	}
	return killed
}

// TestARepairKilledAtAnyStepPublishesEachEventOnce kills repairs with kill -9 at every step, again and again,
// while writers write: the one that comes to its end has every event in the stream once.
func TestARepairKilledAtAnyStepPublishesEachEventOnce(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	publishingOften := []string{"publishing", "publishing", "publishing", "reading the headers", "publishing",
		"durable_after"}
	cases := []killing{
		// the slot is made anew
		{gaps[0], append([]string{"making slot", "made, at"}, publishingOften...)},
		// the same, with a slot that is there
		{diverged, append([]string{"dropping slot", "dropping slot", "made, at"}, publishingOften...)},
		{gaps[1], publishingOften},                                      // it is kept
		{gaps[5], append([]string{"begins again"}, publishingOften...)}, // the stream is made anew
	}
	harness.RunAtOnce(t, harness.Part(2, cases), func(c killing) string { return c.name },
		func(t *testing.T, i int, c killing) {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			// this test stood still for as long as the repair took
			for try := 1; c.kill(t, ns.URL(), rng) == 0; try++ {
				if try == harness.Tries {
					t.Fatal("the repair came to its end before it could be killed")
				}
			}
		})
}

// kill kills repairs of a gap, and returns how many.
func (c killing) kill(t *testing.T, natsURL string, rng *rand.Rand) (kills int) {
	t.Helper()
	f := begin(t, natsURL, c.gapCase)
	stop := harness.StartWriters(t, f.URL)
	defer stop()
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'much', 'bob', "+
		"n, '{}' FROM generate_series(1, 10000) n")
	c.damage(t, f)
	accept := c.code
	for _, word := range c.at {
		later := time.Duration(0)
		if word == "publishing" {
			later = time.Duration(rng.IntN(60)) * time.Millisecond
		}
		if !killedAt(f, t, accept, word, later) {
			break // it came to its end before
		}
		if kills++; kills == 2 {
			f.MustFailInGap("repair_unfinished", "init")
		}
		if kills > 1 { // before, it may have died before its first step
			accept = []string{c.code, "repair_unfinished"}[rng.IntN(2)]
		}
	}
	killedAt(f, t, c.code, "", 0)
	t.Logf("%d kills", kills)
	f.Start()
	f.AwaitReady()
	stop()
	f.AwaitComplete(t, natsURL, 0)
	return kills
}

// diverged has a slot that holds events which the stream has.
var diverged = gapCase{name: "diverged", code: "divergence",
	damage: func(t *testing.T, f *harness.Installation) {
		replaceStream(f, t, func(all []*oracle.Message) []*oracle.Message {
			last := all[len(all)-1]
			last.Outflow.Thru++
			last.Header.Set("Outflow", last.Outflow.String())
			return all
		})
	}}

func begin(t *testing.T, natsURL string, g gapCase) *harness.Installation {
	t.Helper()
	if g.code == "divergence" {
		return unconfirmed(t, natsURL, "killed")
	}
	return stopWhenPublished(publishing(t, natsURL, "killed"), t)
}

// killing is a gap, and what a repair says when it is killed, or a moment later.
type killing struct {
	gapCase
	at []string
}

// TestRepairsThatSleepOrMeetOtherSettingsPublishEachEventOnce are repairs of further kinds.
func TestRepairsThatSleepOrMeetOtherSettingsPublishEachEventOnce(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	type repairTest struct {
		name string
		test func(t *testing.T, natsURL string)
	}
	harness.RunAtOnce(t, harness.Part(2, []repairTest{
		{"unfinished", repairUnfinished}, {"zombie", repairZombie}, {"where", repairWhere},
		{"other settings", repairOtherSettings},
		{"zombie in between", repairZombieInBetween}, {"other cluster", repairOtherCluster},
	}), func(c repairTest) string { return c.name }, func(t *testing.T, _ int, c repairTest) {
		c.test(t, ns.URL())
	})
}

// repairUnfinished: between a repair that died and the next one outflow run stops.
func repairUnfinished(t *testing.T, natsURL string) {
	var f *harness.Installation
	for try := 1; ; try++ {
		f = stopWhenPublished(publishing(t, natsURL, "half"), t)
		f.DropSlot(t)
		harness.Insert(t, f.Conn, "lost", 1000, "{}")
		if killedAt(f, t, "slot_missing", "durable_after", 0) {
			break
		}
		if try == harness.Tries {
			t.Fatal("it came to its end")
		}
	}
	f.Start()
	f.MustEndInGap("repair_unfinished")
	killedAt(f, t, "repair_unfinished", "", 0)
	f.Start()
	mustGoOn(f, t, natsURL, 0)
	if r, stderr, code := f.Repair("--accept", "slot_missing"); code != 0 || r.Fault != "" {
		t.Errorf("repaired once more: exit code %d, %+v %s", code, r, stderr)
	}
}

// repairZombie: an outflow sleeps while the slot is lost and the gap is repaired. What it still has in hand
// when it wakes up is refused, and it goes on from what the repair left.
func repairZombie(t *testing.T, natsURL string) {
	f := publishing(t, natsURL, "zombie")
	harness.AwaitMessages(t, f.JS, f.Stream, before)
	f.AwaitReady()
	harness.Must(t, f.Process.Pause())
	loseRows(f, t)
	harness.Eventually(t, "the slot is free", func() error {
		_, err := f.Conn.Exec(t.Context(), "SELECT pg_terminate_backend(active_pid) FROM "+
			"pg_replication_slots WHERE slot_name = $1 AND active", f.Slot)
		if err == nil {
			_, err = f.Conn.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", f.Slot)
		}
		return err
	})
	killedAt(f, t, "slot_missing", "", 0)
	harness.Must(t, f.Process.Resume())
	harness.Insert(t, f.Conn, "after", 2000, "{}")
	f.AwaitComplete(t, natsURL, 0)
	f.MustStop(t)
}

// repairZombieInBetween: an outflow that slept wakes up while a repair publishes, and sends what it had in
// hand. If its messages took sequences, those of the repair would be refused there and the ones behind them
// accepted. The door that it knows is shut.
func repairZombieInBetween(t *testing.T, natsURL string) {
	f := stopWhenPublished(publishing(t, natsURL, "between"), t)
	f.DropSlot(t)
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'much', 'bob', "+
		"n, '{}' FROM generate_series(1, 40000) n")
	in := ingress(t, f)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	r := f.StartRepair("--accept", "slot_missing")
	was := s.CachedInfo().State.LastSeq
	for bursts, begun := 0, time.Now(); bursts < 8 && time.Since(begun) < harness.Patience; {
		info, err := s.Info(t.Context())
		harness.Must(t, err)
		last := info.State.LastSeq
		if last < was+100 {
			continue // it does not publish yet
		}
		if last >= was+30_000 {
			break
		}
		for seq := last; seq < last+2000; seq++ {
			if seq%30 > 9 {
				// few enough that none of those that are refused for them asks for an acknowledgement
				continue
			}
			m := nats.NewMsg(in + "outbox.zombie")
			h := outbox.Header{Pos: outbox.Position{LSN: 0x100, Index: uint32(seq)}, Of: 1, Due: 0x100,
				Thru: 0x100, Timeline: 1, ID: fmt.Sprint("zombie", seq)}
			m.Header.Set(outbox.HeaderName, h.String())
			m.Header.Set(nats.ExpectedLastSeqHdr, fmt.Sprint(seq))
			harness.Must(t, f.JS.Conn().PublishMsg(m))
		}
		bursts++
	}
	report, stderr, code := r.Wait()
	if code != 0 || !report.Repaired {
		t.Fatalf("exit code %d, %+v %s", code, report, stderr)
	}
	times, zombies := map[string]int{}, 0
	for _, m := range harness.Messages(t, f.JS, f.Stream) {
		if times[m.Outflow.ID]++; strings.HasPrefix(m.Outflow.ID, "zombie") {
			zombies++
		}
	}
	var lost, double int
	rows, err := f.Conn.Query(t.Context(), "SELECT id::text FROM outbox")
	harness.Must(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	harness.Must(t, err)
	for _, id := range ids {
		switch n := times[id]; {
		case n == 0:
			lost++
		case n > 1:
			double++
		}
	}
	if lost > 0 || double > 0 || zombies > 0 {
		t.Errorf("%d of %d rows are in no message, %d in several, %d messages are the zombie's\n%s", lost,
			len(ids), double, zombies, stderr)
	}
}

// repairWhere: rows that were there before init, and rows whose messages retention has removed, are told
// apart by a condition.
func repairWhere(t *testing.T, natsURL string) {
	f := harness.NewInstallation(t, pgtest.Server(t), natsURL, "cond")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
		doc_id text NOT NULL, actor_id text NOT NULL, counter bigint NOT NULL,
		seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20,
		'0')) STORED, payload jsonb NOT NULL)`)
	harness.Insert(t, f.Conn, "old", 1, "{}")
	f.Init()
	f.Start()
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc', 'anna', "+
		"n, '{}' FROM generate_series(100, 139) n")
	stopWhenPublished(f, t)
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	f.DropSlot(t)
	loseRows(f, t)
	if r, stderr, code := f.Repair(); code != 4 || r.Missing != meanwhile+1 || r.First.Doc != "lost" ||
		r.Last.Doc != "old" {
		t.Fatalf("exit code %d, %+v %s", code, r, stderr)
	}
	harness.Must(t, s.Purge(t.Context(), jetstream.WithPurgeSequence(11)))
	if _, stderr, code := f.Repair(); code != 3 || !strings.Contains(stderr, "10 messages of stream") ||
		!strings.Contains(stderr, "--where") {
		t.Errorf("messages removed: exit code %d, %s", code, stderr)
	}
	if _, stderr, code := f.Repair("--where", "counter >"); code != 2 ||
		!strings.Contains(stderr, "--where") {
		t.Errorf("no condition: exit code %d, %s", code, stderr)
	}
	r, stderr, code := f.Repair("--accept", "slot_missing", "--where", "counter >= 110 -- and what else")
	if code != 0 || r.Rows != 30+meanwhile || r.Published != meanwhile {
		t.Fatalf("exit code %d, %+v %s", code, r, stderr)
	}
	f.Start()
	f.AwaitReady()
	harness.Insert(t, f.Conn, "after", 2000, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 40+meanwhile+1)
	f.MustStop(t)
	var keys []string
	for _, m := range harness.Messages(t, f.JS, f.Stream)[30:] {
		keys = append(keys, m.Outflow.Key+" "+m.Outflow.Due.String()+" "+m.Outflow.Thru.String())
	}
	if len(keys) != meanwhile+1 || !strings.HasPrefix(keys[0], "anna:00000000000000001000") ||
		!strings.HasPrefix(keys[meanwhile], "anna:00000000000000002000") {
		t.Errorf("behind the 30 messages that were left: %v", keys)
	}
}

// TestARepairPublishesTheBytesThatRunWould: what a repair publishes of a row is, but for its place, what
// outflow run publishes of it.
func TestARepairPublishesTheBytesThatRunWould(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	pg := pgtest.Server(t)
	harness.RunAtOnce(t, []shape{
		{
			"computed key",
			`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL,
				actor_id text NOT NULL, counter bigint NOT NULL,
			seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS
			AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED, payload jsonb NOT NULL,
			at timestamptz, d date, n numeric, f float8, raw bytea, flag bool, iv interval, words text)`,
			`INSERT INTO outbox (doc_id, actor_id, counter, payload, at, d, n, f, raw, flag, iv, words) VALUES
			('a b.*', 'anna', -5, '{"n": 9007199254740993, "x": 1.10}', '2024-02-29 23:59:59.123456+02',
			'0044-03-15 BC', 1.10, 0.1, '\x00ff', true, '1 day 2 hours', E' two\r\nlines '),
			('', 'ünal', 7, '[1.0]', 'infinity', '-infinity', 'NaN', '-Infinity', '', false, '-1 mon', ''),
			(repeat('x', 5000), 'anna', 123456789012, '"\u00e9"', NULL, NULL, NULL, NULL, NULL, NULL, NULL,
			NULL),
			('big', 'anna', 1, to_jsonb(repeat('y', 3000)), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)`,
			[]string{"HEADERS=At=at,Day=d,Num=n,Float=f,Raw=raw,Flag=flag,Span=iv,Words=words,Count=counter",
				"SINK_MAX_PAYLOAD=2KiB", "SINK_ON_POISON=dead_letter", "SINK_DEAD_LETTER_SUBJECT=dead",
				"SUBJECT=x.{doc_id}.{flag}.{partition(actor_id, 7)}"},
		},
		{
			"bytea",
			`CREATE TABLE outbox (id bytea, doc_id int, seq_key text, payload bytea, kind varchar(9))`,
			`INSERT INTO outbox SELECT decode(lpad(to_hex(n), 6, '0'), 'hex'), n % 3, 'k' || n,
				decode(lpad(to_hex(n * 7919), 8, '0'), 'hex'), 'kind ' || n FROM generate_series(1, 40) n`,
			[]string{"HEADERS=Kind=kind", "REORDER_SORT=seq_key", "SINK_MSG_ID=true"},
		},
	}, func(c shape) string { return c.name }, func(t *testing.T, _ int, c shape) {
		a := harness.NewInstallation(t, pg, ns.URL(), "bytes_run", c.settings...)
		b := &harness.Installation{JS: a.JS, Conn: a.Conn, URL: a.URL}
		b.Outflow = harness.New(t, a.URL, ns.URL(), harness.SlotName("bytes_repair"), c.settings...)
		b.UseStream(strings.ToUpper(b.Slot))
		harness.Exec(t, a.Conn, c.table)
		a.Init()
		b.Init()
		b.DropSlot(t)
		harness.Exec(t, a.Conn, c.rows)
		n := harness.Value[int](t, a.Conn, "SELECT count(*) FROM outbox")
		a.Start()
		harness.AwaitMessages(t, a.JS, a.Stream, n)
		killedAt(b, t, "slot_missing", "", 0)
		want, got := map[string]*oracle.Message{}, harness.Messages(t, b.JS, b.Stream)
		for _, m := range harness.Messages(t, a.JS, a.Stream) {
			want[m.Outflow.ID] = m
		}
		if len(got) != n || len(want) != n {
			t.Fatalf("%d messages repaired, %d from the WAL, want %d", len(got), len(want), n)
		}
		for i, m := range got {
			w := want[m.Outflow.ID]
			h := m.Outflow
			if h.N != i || h.Of != n || h.Due != h.Thru || h.Due != h.Pos.LSN || h.Pull != 0 ||
				h.Pos.Index != 1<<30+uint32(i) || h.Key != w.Outflow.Key {
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

// whileFrozen does something that outflow run, which is frozen meanwhile, sees as a whole: it reads a loss
// twice, 5 s apart, and on a machine that stands still the steps of a test may come further apart than that.
func whileFrozen(o *harness.Outflow, do func()) {
	o.T.Helper()
	harness.Must(o.T, o.Process.Pause())
	defer func() { harness.Must(o.T, o.Process.Resume()) }()
	do()
}
