package backfill

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

func keys(all []harness.ReplayedEvent) string {
	var s []string
	for _, r := range all {
		s = append(s, r.Document+"/"+strings.TrimLeft(strings.Replace(r.Key, ":00000000000000000", ":", 1),
			" "))
	}
	return strings.Join(s, " ")
}

func TestReplaySelectsTheSameEventsFromStreamAndTable(t *testing.T) {
	t.Parallel()
	o, conn, s := harness.ReplayableStream(t, "replay")
	all := o.Replay()
	if len(all) != 12 || all[0].Sequence != 1 || all[11].Sequence != 12 ||
		string(all[0].Data) != `{"n": 1, "big": 9007199254740993.10}` ||
		all[1].Subject != "outbox.b=2E=2A" || all[1].Document != "b.*" || all[0].Headers["By"][0] != "bert" ||
		all[0].Time.IsZero() {
		t.Fatalf("everything: %d events, %+v", len(all), all)
	}

	for _, test := range []struct{ args, want string }{
		{"--doc b.*", "b.*/bert:001 b.*/anna:002 b.*/bert:003 b.*/anna:004 b.*/bert:005 b.*/anna:006"},
		{"--doc a --actor anna", "a/anna:002 a/anna:004 a/anna:006"},
		{"--actor bert --actor nobody --doc a --doc b.*",
			"a/bert:001 b.*/bert:001 a/bert:003 b.*/bert:003 a/bert:005 b.*/bert:005"},
		{"--filter outbox.a", "a/bert:001 a/anna:002 a/bert:003 a/anna:004 a/bert:005 a/anna:006"},
		{"--seq 3..4", "a/anna:002 b.*/anna:002"},
		{"--seq 12", "b.*/anna:006"},
		{"--seq ..1", "a/bert:001"},
		{"--position " + all[4].Position + ".." + all[5].Position, "a/bert:003 b.*/bert:003"},
		{"--position " + strings.TrimSuffix(all[4].Position, "-0"), "a/bert:003"},
		{"--time " + all[10].Time.Format(time.RFC3339Nano) + "..", "a/anna:006 b.*/anna:006"},
		{"--time .." + all[0].Time.Format(time.RFC3339Nano), "a/bert:001"},
		{"--id " + all[7].ID + "," + all[2].ID, "a/anna:002 b.*/anna:004"},
		{"--key bert: --doc a", ""},
		{"--key bert:00000000000000000003.. --doc a", "a/bert:003 a/bert:005"},
	} {
		if test.want == "" {
			o.MustFail(3, append([]string{"replay"}, strings.Fields(test.args)...),
				"no event of the stream is selected", "has sequence 1", "to 12", "12 rows")
			continue
		}
		if got := keys(o.Replay(strings.Fields(test.args)...)); got != test.want {
			t.Errorf("%s: %s", test.args, got)
		}
	}
	file := filepath.Join(t.TempDir(), "ids")
	harness.Must(t, os.WriteFile(file, []byte(all[3].ID+"\n\n"+all[0].ID+"\n"), 0o600))
	if got := keys(o.Replay("--id", "@"+file, "--from", "table")); got != "a/bert:001 b.*/anna:002" {
		t.Errorf("--id @file: %s", got)
	}
	if got := keys(o.Replay("--from", "table", "--key", "bert:..")); got != "a/bert:001 a/bert:003 "+
		"a/bert:005 b.*/bert:001 b.*/bert:003 b.*/bert:005" {
		t.Errorf("from the table: %s", got)
	}
	if got := o.Replay("--from", "table", "--time", "1h"); len(got) != 12 || got[0].Time.IsZero() ||
		got[0].Sequence != 0 || got[0].Position != "" {
		t.Errorf("from the table by time: %+v", got)
	}
	// Stream and table give the same messages of an actor's document; only the header that says where they
	// were read differs.
	fromStream, fromTable := o.Replay("--doc", "b.*", "--actor", "anna", "--from",
		"stream"), o.Replay("--doc", "b.*", "--actor", "anna", "--from", "table")
	for i := range fromStream {
		for _, r := range []*harness.ReplayedEvent{&fromStream[i], &fromTable[i]} {
			if !strings.Contains(r.Headers["Outflow"][0], " id="+r.ID+" key="+r.Key) {
				t.Errorf("header %v", r.Headers)
			}
			delete(r.Headers, "Outflow")
			r.Sequence, r.Position, r.Time = 0, "", time.Time{}
		}
	}
	if len(fromStream) != 3 || !reflect.DeepEqual(fromStream, fromTable) {
		t.Errorf("stream and table differ:\n%+v\n%+v", fromStream, fromTable)
	}

	out := o.MustRun("replay", "--doc", "a", "--dry-run", "--to", "stream:NOWHERE")
	o.MustContain("--dry-run", out, "from     stream", "every message from sequence 1", "events   6",
		"first    sequence 1,", "last     sequence 11,", "6 outbox.a")
	if _, err := s.Stream(t.Context(), "NOWHERE"); err == nil {
		t.Error("--dry-run has made the stream")
	}

	// Retention takes the first four. What lies behind them is still known to be whole, for everything else
	// the table is asked.
	live, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	harness.Must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(5)))
	for args, says := range map[string]string{
		"--seq 5..": "from stream",
		"--doc a": "the table has all 4 events of the selection that the stream " +
			"still has, and 2 more",
		"--id " + all[7].ID:               "from stream",
		"--id " + all[0].ID:               "from table",
		"--position " + all[6].Position:   "from stream: stream " + o.Stream + " has sequence 5",
		"--doc a --from stream":           "4 older messages are gone",
		"--key anna:00000000000000000004": "all that the table has",
	} {
		_, errOut, code := o.Run(append([]string{"replay"}, strings.Fields(args)...)...)
		if code != 0 || !strings.Contains(errOut, says) {
			t.Errorf("%s: exit code %d, does not say %q: %s", args, code, says, errOut)
		}
	}
	o.MustFail(3, []string{"replay", "--seq", "2..7"}, "nobody has this range any more", "has sequence 5",
		"to 12", "table public.outbox has 12 rows", "--seq: a row does not say")
	o.MustFail(3, []string{"replay", "--seq", "2..7", "--from", "stream"}, "the sequences below 5 are gone",
		"has sequence 5")
	o.MustFail(3, []string{"replay", "--position", all[0].Position}, "nobody has this range any more")
	o.MustFail(3, []string{"replay", "--seq", "20.."}, "no event of the stream is selected")
	harness.Exec(t, conn, "DELETE FROM outbox WHERE doc_id = 'a' AND counter IN (1, 4)")
	o.MustFail(3, []string{"replay", "--doc", "a"}, "4 older messages are gone", "lacks 1 of the 4 events",
		"--from stream reads the 4 events", "--from table")
	o.MustFail(3, []string{"replay", "--id", all[0].ID + "," + all[1].ID}, "has 1 of the 2 events")
	if got := o.Replay("--doc", "a", "--from", "table"); len(got) != 4 {
		t.Errorf("--from table: %s", keys(got))
	}
	harness.Exec(t, conn, "TRUNCATE outbox")
	o.MustFail(3, []string{"replay", "--id", all[0].ID}, "no event of the table is selected", "has 0 rows",
		"has sequence 5")
}

// TestReplayRefusesTheImpossibleBeforeReading: what is not possible is said before anything is read.
func TestReplayRefusesTheImpossibleBeforeReading(t *testing.T) {
	t.Parallel()
	o, _, s := harness.ReplayableStream(t, "replayno", "SINK_ON_POISON=dead_letter",
		"SINK_DEAD_LETTER_SUBJECT=dead.rows")
	for name, subjects := range map[string][]string{
		"FREE": {"free.>", "one"}, "TWO": {"x.*"}, "NARROW": {"narrow.a.>"}, "DEAD": {"dead.>"},
	} {
		_, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: subjects})
		harness.Must(t, err)
	}
	_, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: "QUEUE", Subjects: []string{"queue.>"},
		Retention: jetstream.WorkQueuePolicy})
	harness.Must(t, err)
	_, err = s.CreateConsumer(t.Context(), o.Stream, jetstream.ConsumerConfig{Durable: "plain"})
	harness.Must(t, err)
	live, err := s.Stream(t.Context(), o.Stream)
	harness.Must(t, err)
	ingress := live.CachedInfo().Config.Subjects[0]
	for _, test := range []struct {
		code int
		args []string
		says string
	}{
		{2, []string{"--to", "somewhere"}, "stdout, subject:SUBJECT"},
		{2, []string{"--to", "stream:" + o.Stream}, "the live one"},
		{2, []string{"--to", "stream:KV_outflow-" + o.Stream}, "bucket"},
		{2, []string{"--to", "stream:" + o.Stream + "_replay"}, "consumer:NAME"},
		{2, []string{"--to", "stream:a b"}, "no name"},
		{3, []string{"--to", "stream:TWO"}, "none of them ends in"},
		{3, []string{"--to", "stream:QUEUE", "--replay-id", "x"}, "drops what is consumed"},
		{2, []string{"--to", "stream:DEAD"}, "live subjects dead.rows"},
		{2, []string{"--to", "subject:" + ingress}, "belongs to outflow"},
		{2, []string{"--to", "subject:_outflow.x"}, "belongs to outflow"},
		{2, []string{"--to", "subject:outbox.a"}, "live subjects outbox.*"},
		{2, []string{"--to", "subject:outbox.>"}, "live subjects outbox.*"},
		{2, []string{"--to", "subject:>"}, "belongs to"},
		{2, []string{"--to", "subject:$JS.API.x"}, "belongs to"},
		{2, []string{"--to", "subject:a.*.b"}, "not a subject"},
		{3, []string{"--to", "subject:nobody.takes.this"}, "no stream takes it"},
		{3, []string{"--to", "subject:narrow.>"}, "only a part"},
		{3, []string{"--to", "consumer:nobody"}, "has no consumer nobody"},
		{3, []string{"--to", "consumer:plain"}, "not one of package consumer"},
		{2, []string{"--to", "consumer:a.b"}, "no name"},
		{2, []string{"--replay-id", "x"}, "standard output"},
		{2, []string{"--replay-id", "x y", "--to", "stream:FREE"}, "--replay-id"},
		{2, []string{"--from", "memory"}, "stream or table"},
		{2, []string{"--seq", "5..2"}, "ends before it begins"},
		{2, []string{"--seq", "0"}, "begin at 1"},
		{2, []string{"--seq", ".."}, "without ends"},
		{2, []string{"--time", "yesterday"}, "neither a time such as"},
		{2, []string{"--position", "5"}, "X/X"},
		{2, []string{"--key", "b..a"}, "ends before"},
		{2, []string{"--filter", "outbox..a"}, "empty token"},
		{2, []string{"--id", "@/no/such/file"}, "no such file"},
		{2, []string{"--rate", "-1"}, "--rate"},
		{2, []string{"--id", "no-uuid", "--from", "table"}, "can't be one of its column"},
		{2, []string{"--time-column", "payload", "--from", "table"}, "timestamp"},
		{3, []string{"--seq", "1", "--from", "table"}, "does not say at which sequence"},
		{3, []string{"--doc", `it's \ nobody`, "--from", "table"}, "no event of the table"},
	} {
		o.MustFail(test.code, append([]string{"replay"}, test.args...), test.says)
	}
	for _, to := range []string{"subject:one", "subject:free.x.>", "stream:FREE"} {
		o.MustRun("replay", "--doc", "a", "--to", to)
	}
	var got []string
	for _, m := range rawMessages(t, s, "FREE") {
		got = append(got, m.Subject())
		if m.Headers().Get("Outflow-Replay") == "" || m.Headers().Get("Outflow-Replay-Sequence") == "" ||
			m.Headers().Get("By") == "" {
			t.Errorf("headers %v", m.Headers())
		}
	}
	if want := strings.TrimSpace(strings.Repeat("one ", 6) + strings.Repeat("free.x.outbox.a ", 6) +
		strings.Repeat("free.outbox.a ", 6)); strings.Join(got, " ") != want {
		t.Errorf("subjects %v", got)
	}
	if last := live.CachedInfo().State.LastSeq; last != 12 {
		t.Errorf("the live stream has %d messages", last)
	}
}

// rawMessages reads a stream.
func rawMessages(t *testing.T, s jetstream.JetStream, stream string) (all []jetstream.Msg) {
	t.Helper()
	c, err := s.OrderedConsumer(t.Context(), stream, jetstream.OrderedConsumerConfig{})
	harness.Must(t, err)
	if c.CachedInfo().NumPending == 0 {
		return nil
	}
	it, err := c.Messages()
	harness.Must(t, err)
	defer it.Stop()
	for {
		m, err := it.Next(jetstream.NextContext(t.Context()))
		harness.Must(t, err)
		all = append(all, m)
		if meta, err := m.Metadata(); err != nil || meta.NumPending == 0 {
			harness.Must(t, err)
			return all
		}
	}
}

// TestAKilledReplayEndsWithEachEventOnceAndInOrder: a replay that is killed again and again, while somebody
// else publishes to the target, is there once and in order in the end: from the stream, which is of gap mode,
// and from the table.
func TestAKilledReplayEndsWithEachEventOnceAndInOrder(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	const events = 1500
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "replaykill", "REORDER_MODE=gap")
	o.Init()
	harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc ' || i % 7, 'anna', (i - 1) / 7 + 1, jsonb_build_object('n', i) FROM generate_series(1, $1::int) i`, events)
	o.Start()
	s := harness.JetStream(t, ns.URL())
	harness.AwaitMessages(t, s, o.Stream, events)
	o.Kill()
	for _, from := range []string{"stream", "table"} {
		target := "AGAIN" + strings.ToUpper(from)
		_, err := s.CreateStream(t.Context(),
			jetstream.StreamConfig{Name: target, Subjects: []string{target + ".>", "other." + target}})
		harness.Must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		others := make(chan int)
		go func() { // the other publisher
			n := 0
			for ctx.Err() == nil {
				if _, err := s.Publish(ctx, "other."+target, nil); err == nil {
					n++
				}
				time.Sleep(5 * time.Millisecond)
			}
			others <- n
		}()
		args := []string{"replay", "--from", from, "--to", "stream:" + target, "--replay-id", "again"}
		came := make(chan *nats.Msg, 10*events)
		// as they are published: nothing has to be asked again and again
		seen, err := s.Conn().ChanSubscribe(target+".>", came)
		harness.Must(t, err)
		for range 3 {
			cmd := exec.Command(harness.Program(o.Env), append(args, "--rate", "500")...)
			var log bytes.Buffer
			cmd.Env, cmd.Stderr = o.Env, &log
			child, err := process.Start(cmd, syscall.SIGKILL)
			harness.Must(t, err)
			for n := 0; n < events/5 && child.Running(); {
				select {
				case <-came:
					n++
				case <-child.Done():
				case <-time.After(harness.Patience):
					t.Fatalf("nothing more comes: %s", log.String())
				}
			}
			_ = child.Kill() // it may just have ended
			<-child.Done()
		}
		harness.Must(t, seen.Unsubscribe())
		before := 0
		for _, m := range rawMessages(t, s, target) {
			if m.Headers().Get("Outflow-Replay") == "again" {
				before++
			}
		}
		out := o.MustRun(args...)
		var published int
		if found := regexp.MustCompile(`(\d+) events published`).FindStringSubmatch(out); found != nil {
			published, _ = strconv.Atoi(found[1])
		}
		// what was on its way when the run before was killed may have come since
		if published == 0 || published > events-before {
			t.Errorf("the last run published %d events, %d had been there before: %s", published, before, out)
		}
		if again, _, code := o.Run(args...); code != 0 ||
			!strings.Contains(again, fmt.Sprintf(" 0 events published to stream:%s, behind the %d", target,
				events)) {
			t.Errorf("after the end: exit code %d: %s", code, again)
		}
		o.MustFail(2, append(args, "--doc", "doc 1"), "begun with another selection")
		cancel()
		if n := <-others; n == 0 {
			t.Error("nobody else published")
		}
		want := o.Replay("--from", from)
		var got []string
		for _, m := range rawMessages(t, s, target) {
			if m.Headers().Get("Outflow-Replay") == "again" {
				got = append(got, m.Subject()+string(m.Data()))
			}
		}
		if len(got) != len(want) {
			t.Fatalf("from %s: %d messages, want %d", from, len(got), len(want))
		}
		for i, w := range want {
			if got[i] != target+"."+w.Subject+string(w.Data) {
				t.Fatalf("from %s: message %d is %s, want %s", from, i, got[i], w.Subject)
			}
		}
	}
}
