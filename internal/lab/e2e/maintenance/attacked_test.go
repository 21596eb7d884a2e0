package maintenance

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/postgres"
)

// attacked is an installation whose rows, messages and archived lines are counted by means of their own: rows
// by SQL, messages one by one, lines from the files whose manifests are there.
type attacked struct {
	*retained
	dir string
	day int
}

// number is in each payload, and tells a row from all others.
type number struct {
	N int `json:"n"`
}

// numbered writes rows of the next day, for which it makes a partition.
func (a *attacked) numbered(rows int) {
	a.t.Helper()
	a.day++
	from := time.Date(2020, 1, a.day, 0, 0, 0, 0, time.UTC)
	// in one transaction: a maintain detaches a partition as soon as it sees it
	harness.Must(a.t, pgx.BeginFunc(a.t.Context(), a.Conn, func(pgx.Tx) error {
		harness.Exec(a.t, a.Conn, fmt.Sprintf("CREATE TABLE old_%d PARTITION OF outbox FOR VALUES FROM "+
			"('%s') TO ('%s')", a.day, from.Format(time.RFC3339), from.AddDate(0, 0, 1).Format(time.RFC3339)))
		harness.Exec(a.t, a.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, created_at)
			SELECT 'doc' || n % 5, 'a', n, jsonb_build_object('n', n),
				CASE WHEN n % 2 = 0 THEN $3 ELSE now() END FROM generate_series($1::bigint, $2) n`,
			a.counter+1, a.counter+rows, from.Add(time.Hour))
		return nil
	}))
	a.counter += rows
}

// rows are the numbers in the table, and in what was detached from it. It is false where a process that
// sleeps has locked a partition.
func (a *attacked) rows() (map[int]bool, bool) {
	a.t.Helper()
	all := map[int]bool{}
	tables := harness.Value[[]string](a.t, a.Conn, "SELECT array_agg(c.oid::regclass::text) FROM pg_class c "+
		"JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'payload' WHERE c.relkind = 'r'")
	harness.Exec(a.t, a.Conn, "SET lock_timeout = '2s'")
	defer harness.Exec(a.t, a.Conn, "RESET lock_timeout")
	for _, table := range tables {
		var numbers []int
		err := a.Conn.QueryRow(a.t.Context(), "SELECT coalesce(array_agg((payload->>'n')::int), '{}') FROM "+
			"ONLY "+table+" WHERE payload ? 'n'").Scan(&numbers)
		switch postgres.SQLState(err) {
		case postgres.StateLockNotAvailable:
			return nil, false
		case "42P01": // it was dropped meanwhile
			continue
		}
		harness.Must(a.t, err)
		for _, n := range numbers {
			all[n] = true
		}
	}
	return all, true
}

// messages are the numbers in the stream, by sequence, and the first sequence.
func (a *attacked) messages() (map[uint64]int, uint64) {
	a.t.Helper()
	all := map[uint64]int{}
	s, err := a.JS.Stream(a.t.Context(), a.Stream)
	harness.Must(a.t, err)
	first, last := s.CachedInfo().State.FirstSeq, s.CachedInfo().State.LastSeq
	for seq := first; seq <= last; seq++ {
		m, err := s.GetMsg(a.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) { // it left meanwhile, or it is lost
			info, err := s.Info(a.t.Context())
			harness.Must(a.t, err)
			if first = info.State.FirstSeq; seq >= first {
				a.t.Errorf("sequence %d of %d to %d is missing", seq, first, last)
			}
			continue
		}
		harness.Must(a.t, err)
		var payload number
		harness.Must(a.t, json.Unmarshal(m.Data, &payload))
		all[seq] = payload.N
	}
	return all, first
}

// lines are the numbers in the archive, by sequence.
func (a *attacked) lines() map[uint64]int {
	a.t.Helper()
	all := map[uint64]int{}
	manifests, err := filepath.Glob(filepath.Join(a.dir, "v1", "*", "*.json"))
	harness.Must(a.t, err)
	for _, name := range manifests {
		text, err := os.ReadFile(name)
		harness.Must(a.t, err)
		var segment struct{ Last uint64 }
		harness.Must(a.t, json.Unmarshal(text, &segment))
		// one that slept may have left another object that begins there, and no manifest has
		file, err := os.Open(fmt.Sprintf("%s-%020d.jsonl.zst", strings.TrimSuffix(name, ".json"),
			segment.Last))
		harness.Must(a.t, err)
		plain, err := zstd.NewReader(file)
		harness.Must(a.t, err)
		for lines := bufio.NewScanner(plain); lines.Scan(); {
			var line struct {
				Seq  uint64
				Data string
			}
			harness.Must(a.t, json.Unmarshal(lines.Bytes(), &line))
			var payload number
			harness.Must(a.t, json.Unmarshal([]byte(line.Data), &payload))
			if was, twice := all[line.Seq]; twice {
				a.t.Errorf("the archive has %d and %d at %d", was, payload.N, line.Seq)
			}
			all[line.Seq] = payload.N
		}
		plain.Close()
		harness.Must(a.t, file.Close())
	}
	return all
}

// check makes sure that what has left a place is in the next one. The table is looked at first, then the
// stream, then the archive: what moves on meanwhile is found where it has come to. It returns how many rows
// have left the table; -1: it can't be looked at.
func (a *attacked) check(when string) (gone int) {
	a.t.Helper()
	rows, readable := a.rows()
	if !readable {
		return -1
	}
	messages, first := a.messages()
	lines := a.lines()
	where := map[int]uint64{}
	for seq, n := range lines {
		where[n] = seq
		if m, both := messages[seq]; both && m != n {
			a.t.Errorf("%s: %d in the archive, %d in the stream at %d", when, n, m, seq)
		}
	}
	for n := 1; n <= a.counter; n++ {
		if where[n] == 0 && !rows[n] {
			a.t.Errorf("%s: row %d left the table before it was archived", when, n)
		}
		if !rows[n] {
			gone++
		}
	}
	for seq := uint64(1); seq < first; seq++ {
		if _, archived := lines[seq]; !archived {
			a.t.Errorf("%s: message %d left the stream before it was archived", when, seq)
		}
	}
	if a.t.Failed() {
		a.t.FailNow()
	}
	return gone
}

// TestMaintainAttackedAtRandomLosesNothing: under load, processes of maintain are killed and stopped at any
// time, others work beside those that sleep, outflow run is killed, and a consumer lags. What has left the
// table is archived, and what has left the stream is archived and read.
func TestMaintainAttackedAtRandomLosesNothing(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	dir := t.TempDir()
	// a server of its own: one that is stopped in a transaction keeps others from making slots
	a := &attacked{dir: dir, retained: newRetained(t, pgtest.Own(t, 0), "attacked", "ARCHIVE_URL=file://"+dir,
		"ARCHIVE_SEGMENT_AGE=0s", "MAINTAIN_EVERY=1s", "RETAIN_STREAM_MESSAGES=20")}
	a.Init()
	a.Start()
	a.MustRun("partition", "apply")
	slow, err := a.JS.CreateConsumer(t.Context(), a.Stream, jetstream.ConsumerConfig{Durable: "slow",
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour})
	harness.Must(t, err)
	next := uint64(1)
	read := func(most int) (n int) {
		t.Helper()
		batch, err := slow.FetchNoWait(most)
		harness.Must(t, err)
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			harness.Must(t, err)
			if meta.Sequence.Stream != next {
				t.Fatalf("the consumer is given %d, and not %d", meta.Sequence.Stream, next)
			}
			harness.Must(t, m.DoubleAck(t.Context()))
			next, n = next+1, n+1
		}
		harness.Must(t, batch.Error())
		return n
	}
	seed := uint64(harness.EnvInt(t, "OUTFLOW_TEST_SEED", 1))
	rnd := rand.New(rand.NewPCG(seed, 0))
	var asleep, awake []*maintainer
	points := []string{"", "", "archive.begin", "archive.written", "archive.verified", "archive.manifest",
		"partition.sealed", "partition.archived", "partition.compared", "partition.verified",
		"partition.dropping", "stream.verified", "stream.checked", "stream.purged"}
	for round := range harness.EnvInt(t, "OUTFLOW_TEST_ROUNDS", harness.Sized(60, 6)) {
		var settings []string
		point, stop := points[rnd.IntN(len(points))], rnd.IntN(2) == 0
		if point != "" {
			at := fmt.Sprintf("%s:%d", point, 1+rnd.IntN(2))
			if stop {
				at = "stop." + at
			}
			settings = append(settings, "OUTFLOW_FAILPOINT="+at)
		}
		m := a.maintain(settings...)
		for range 1 + rnd.IntN(4) {
			a.numbered(10 + rnd.IntN(40))
			a.AwaitConfirmed(a.Conn, harness.WALEnd(t, a.Conn))
			read(1 + rnd.IntN(60))
		}
		switch {
		case rnd.IntN(2) == 0:
			_ = m.child.Kill() // it may have ended
		default:
			_ = m.child.Signal(syscall.SIGSTOP)
			asleep = append(asleep, m)
		}
		if rnd.IntN(3) == 0 {
			a.Kill()
			a.Start()
		}
		for len(asleep) > 0 && rnd.IntN(2) == 0 { // it wakes up while others work
			_ = asleep[0].child.Signal(syscall.SIGCONT)
			awake, asleep = append(awake, asleep[0]), asleep[1:]
		}
		t.Logf("round %d, %v: %d of %d rows are gone, and the consumer is at %d", round, settings,
			a.check(fmt.Sprintf("seed %d, round %d, %v", seed, round, settings)), a.counter, next-1)
	}
	awake = append(awake, asleep...)
	last := a.maintain()
	harness.Eventually(t, "all goes that may go", func() error {
		for _, m := range awake { // one that was woken may have come to where it stops itself
			_ = m.child.Signal(syscall.SIGCONT)
		}
		settle(t, a.Installation)
		for read(1000) > 0 {
		}
		if _, first := a.messages(); first < uint64(a.counter)-30 {
			return fmt.Errorf("the stream begins at %d\n%s", first, last.log.String())
		}
		if n := a.check("at last"); n < a.counter/2 {
			return fmt.Errorf("%d of %d rows are gone\n%s", n, a.counter, last.log.String())
		}
		return nil
	}, last.child)
	a.MustStop(t)
}
