package e2e

import (
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// replayed is a line that outflow replay prints.
type replayed struct {
	Sequence uint64
	Subject  string
	Headers  map[string][]string
	Position string
	Document string
	ID       string
	Key      string
	Time     time.Time
	Data     json.RawMessage
	Base64   *string `json:"data_base64"`
}

// replay runs outflow replay to standard output, which must succeed.
func (o *outflow) replay(args ...string) []replayed {
	o.t.Helper()
	out, errOut, code := o.exec(append([]string{"replay"}, args...)...)
	if code != 0 {
		o.t.Fatalf("outflow replay %v: exit code %d\n%s", args, code, errOut)
	}
	var all []replayed
	for l := range strings.Lines(out) {
		var r replayed
		if err := json.Unmarshal([]byte(l), &r); err != nil {
			o.t.Fatalf("outflow replay %v: %v: %s", args, err, l)
		}
		all = append(all, r)
	}
	return all
}

func keys(all []replayed) string {
	var s []string
	for _, r := range all {
		s = append(s, r.Document+"/"+strings.TrimLeft(strings.Replace(r.Key, ":00000000000000000", ":", 1), " "))
	}
	return strings.Join(s, " ")
}

// replayWorld is a stream of 12 events: documents a and b.*, by anna and bert in turns.
func replayWorld(t *testing.T, name string, settings ...string) (o *outflow, conn *pgx.Conn, s jetstream.JetStream) {
	t.Helper()
	ns := natstest.Server(t)
	o, conn, _ = installation(t, pgtest.Server(t), ns.URL(), name, append([]string{"REORDER_HORIZON=0s", "HEADERS=By=actor_id"}, settings...)...)
	o.init()
	o.start()
	for i := 1; i <= 6; i++ {
		for _, doc := range []string{"a", "b.*"} {
			mustExec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, $2, $3, $4)", doc,
				[]string{"anna", "bert"}[i%2], i, fmt.Sprintf(`{"n": %d, "big": 9007199254740993.10}`, i))
		}
	}
	s = js(t, ns.URL())
	awaitMessages(t, s, o.stream, 12)
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	return o, conn, s
}

func TestReplay(t *testing.T) {
	t.Parallel()
	o, conn, s := replayWorld(t, "replay")
	all := o.replay()
	if len(all) != 12 || all[0].Sequence != 1 || all[11].Sequence != 12 || string(all[0].Data) != `{"n": 1, "big": 9007199254740993.10}` ||
		all[1].Subject != "outbox.b=2E=2A" || all[1].Document != "b.*" || all[0].Headers["By"][0] != "bert" || all[0].Time.IsZero() {
		t.Fatalf("everything: %d events, %+v", len(all), all)
	}

	for _, test := range []struct{ args, want string }{
		{"--doc b.*", "b.*/bert:001 b.*/anna:002 b.*/bert:003 b.*/anna:004 b.*/bert:005 b.*/anna:006"},
		{"--doc a --actor anna", "a/anna:002 a/anna:004 a/anna:006"},
		{"--actor bert --actor nobody --doc a --doc b.*", "a/bert:001 b.*/bert:001 a/bert:003 b.*/bert:003 a/bert:005 b.*/bert:005"},
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
			o.fails(3, append([]string{"replay"}, strings.Fields(test.args)...), "no event of the stream is selected", "has sequence 1", "to 12", "12 rows")
			continue
		}
		if got := keys(o.replay(strings.Fields(test.args)...)); got != test.want {
			t.Errorf("%s: %s", test.args, got)
		}
	}
	file := filepath.Join(t.TempDir(), "ids")
	must(t, os.WriteFile(file, []byte(all[3].ID+"\n\n"+all[0].ID+"\n"), 0o600))
	if got := keys(o.replay("--id", "@"+file, "--from", "table")); got != "a/bert:001 b.*/anna:002" {
		t.Errorf("--id @file: %s", got)
	}
	if got := keys(o.replay("--from", "table", "--key", "bert:..")); got != "a/bert:001 a/bert:003 a/bert:005 b.*/bert:001 b.*/bert:003 b.*/bert:005" {
		t.Errorf("from the table: %s", got)
	}
	if got := o.replay("--from", "table", "--time", "1h"); len(got) != 12 || got[0].Time.IsZero() || got[0].Sequence != 0 || got[0].Position != "" {
		t.Errorf("from the table by time: %+v", got)
	}
	// Stream and table give the same messages of an actor's document; only the header that says where they were read differs.
	fromStream, fromTable := o.replay("--doc", "b.*", "--actor", "anna", "--from", "stream"), o.replay("--doc", "b.*", "--actor", "anna", "--from", "table")
	for i := range fromStream {
		for _, r := range []*replayed{&fromStream[i], &fromTable[i]} {
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

	out, errOut, code := o.exec("replay", "--doc", "a", "--dry-run", "--to", "stream:NOWHERE")
	if code != 0 {
		t.Fatalf("--dry-run: exit code %d\n%s", code, errOut)
	}
	o.mustSay("--dry-run", out, "from     stream", "every message from sequence 1", "events   6", "first    sequence 1,", "last     sequence 11,", "6 outbox.a")
	if _, err := s.Stream(t.Context(), "NOWHERE"); err == nil {
		t.Error("--dry-run has made the stream")
	}

	// Retention takes the first four. What lies behind them is still known to be whole, for everything else the table is asked.
	live, err := s.Stream(t.Context(), o.stream)
	must(t, err)
	must(t, live.Purge(t.Context(), jetstream.WithPurgeSequence(5)))
	for args, says := range map[string]string{
		"--seq 5..":                       "from stream",
		"--doc a":                         "the table has all 4 events of the selection that the stream still has, and 2 more",
		"--id " + all[7].ID:               "from stream",
		"--id " + all[0].ID:               "from table",
		"--position " + all[6].Position:   "from stream: stream " + o.stream + " has sequence 5",
		"--doc a --from stream":           "4 older messages are gone",
		"--key anna:00000000000000000004": "all that the table has",
	} {
		_, errOut, code := o.exec(append([]string{"replay"}, strings.Fields(args)...)...)
		if code != 0 || !strings.Contains(errOut, says) {
			t.Errorf("%s: exit code %d, does not say %q: %s", args, code, says, errOut)
		}
	}
	o.fails(3, []string{"replay", "--seq", "2..7"}, "nobody has this range any more", "has sequence 5", "to 12", "table public.outbox has 12 rows", "--seq: a row does not say")
	o.fails(3, []string{"replay", "--seq", "2..7", "--from", "stream"}, "the sequences below 5 are gone", "has sequence 5")
	o.fails(3, []string{"replay", "--position", all[0].Position}, "nobody has this range any more")
	o.fails(3, []string{"replay", "--seq", "20.."}, "no event of the stream is selected")
	mustExec(t, conn, "DELETE FROM outbox WHERE doc_id = 'a' AND counter IN (1, 4)")
	o.fails(3, []string{"replay", "--doc", "a"}, "4 older messages are gone", "lacks 1 of the 4 events", "--from stream reads the 4 events", "--from table")
	o.fails(3, []string{"replay", "--id", all[0].ID + "," + all[1].ID}, "has 1 of the 2 events")
	if got := o.replay("--doc", "a", "--from", "table"); len(got) != 4 {
		t.Errorf("--from table: %s", keys(got))
	}
	mustExec(t, conn, "TRUNCATE outbox")
	o.fails(3, []string{"replay", "--id", all[0].ID}, "no event of the table is selected", "has 0 rows", "has sequence 5")
}

// TestReplayRefuses: what is not possible is said before anything is read.
func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	o, _, s := replayWorld(t, "replayno", "SINK_ON_POISON=dead_letter", "SINK_DEAD_LETTER_SUBJECT=dead.rows")
	for name, subjects := range map[string][]string{
		"FREE": {"free.>", "one"}, "TWO": {"x.*"}, "NARROW": {"narrow.a.>"}, "DEAD": {"dead.>"},
	} {
		_, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: subjects})
		must(t, err)
	}
	_, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: "QUEUE", Subjects: []string{"queue.>"}, Retention: jetstream.WorkQueuePolicy})
	must(t, err)
	_, err = s.CreateConsumer(t.Context(), o.stream, jetstream.ConsumerConfig{Durable: "plain"})
	must(t, err)
	live, err := s.Stream(t.Context(), o.stream)
	must(t, err)
	ingress := live.CachedInfo().Config.Subjects[0]
	for _, test := range []struct {
		code int
		args []string
		says string
	}{
		{2, []string{"--to", "somewhere"}, "stdout, subject:SUBJECT"},
		{2, []string{"--to", "stream:" + o.stream}, "the live one"},
		{2, []string{"--to", "stream:KV_outflow-" + o.stream}, "bucket"},
		{2, []string{"--to", "stream:" + o.stream + "_replay"}, "consumer:NAME"},
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
		o.fails(test.code, append([]string{"replay"}, test.args...), test.says)
	}
	for _, to := range []string{"subject:one", "subject:free.x.>", "stream:FREE"} {
		if out, errOut, code := o.exec("replay", "--doc", "a", "--to", to); code != 0 {
			t.Errorf("--to %s: exit code %d: %s%s", to, code, out, errOut)
		}
	}
	var got []string
	for _, m := range rawMessages(t, s, "FREE") {
		got = append(got, m.Subject())
		if m.Headers().Get("Outflow-Replay") == "" || m.Headers().Get("Outflow-Replay-Sequence") == "" || m.Headers().Get("By") == "" {
			t.Errorf("headers %v", m.Headers())
		}
	}
	if want := strings.TrimSpace(strings.Repeat("one ", 6) + strings.Repeat("free.x.outbox.a ", 6) + strings.Repeat("free.outbox.a ", 6)); strings.Join(got, " ") != want {
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
	must(t, err)
	if c.CachedInfo().NumPending == 0 {
		return nil
	}
	it, err := c.Messages()
	must(t, err)
	defer it.Stop()
	for {
		m, err := it.Next(jetstream.NextContext(t.Context()))
		must(t, err)
		all = append(all, m)
		if meta, err := m.Metadata(); err != nil || meta.NumPending == 0 {
			must(t, err)
			return all
		}
	}
}

// TestReplayKilled: a replay that is killed again and again, while somebody else publishes to the target, is there once and in order in
// the end: from the stream and from the table.
func TestReplayKilled(t *testing.T) {
	slow(t)
	t.Parallel()
	const events = 1500
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "replaykill")
	o.init()
	mustExec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'doc ' || i % 7, 'anna', i, jsonb_build_object('n', i) FROM generate_series(1, $1::int) i`, events)
	o.start()
	s := js(t, ns.URL())
	awaitMessages(t, s, o.stream, events)
	o.kill()
	for _, from := range []string{"stream", "table"} {
		target := "AGAIN" + strings.ToUpper(from)
		_, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: target, Subjects: []string{target + ".>", "other." + target}})
		must(t, err)
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
		seen, err := s.Conn().ChanSubscribe(target+".>", came) // as they are published: nothing has to be asked again and again
		must(t, err)
		for range 3 {
			cmd := exec.Command(program(o.env), append(args, "--rate", "500")...)
			var log bytes.Buffer
			cmd.Env, cmd.Stderr = o.env, &log
			child, err := process.Start(cmd, syscall.SIGKILL)
			must(t, err)
			for n := 0; n < events/5 && child.Running(); {
				select {
				case <-came:
					n++
				case <-child.Done():
				case <-time.After(patience):
					t.Fatalf("nothing more comes: %s", log.String())
				}
			}
			_ = child.Kill() // it may just have ended
			<-child.Done()
		}
		must(t, seen.Unsubscribe())
		before := 0
		for _, m := range rawMessages(t, s, target) {
			if m.Headers().Get("Outflow-Replay") == "again" {
				before++
			}
		}
		out, errOut, code := o.exec(args...)
		if code != 0 {
			t.Fatalf("from %s: exit code %d, %d events before: %s%s", from, code, before, out, errOut)
		}
		var published int
		if found := regexp.MustCompile(`(\d+) events published`).FindStringSubmatch(out); found != nil {
			published, _ = strconv.Atoi(found[1])
		}
		if published == 0 || published > events-before { // what was on its way when the run before was killed may have come since
			t.Errorf("the last run published %d events, %d had been there before: %s", published, before, out)
		}
		if again, _, code := o.exec(args...); code != 0 || !strings.Contains(again, fmt.Sprintf(" 0 events published to stream:%s, behind the %d", target, events)) {
			t.Errorf("after the end: exit code %d: %s", code, again)
		}
		o.fails(2, append(args, "--doc", "doc 1"), "begun with another selection")
		cancel()
		if n := <-others; n == 0 {
			t.Error("nobody else published")
		}
		want := o.replay("--from", from)
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
