package operate

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// tailed is a line of outflow tail --json.
type tailed struct {
	Sequence      uint64
	Position      string
	Subject       string
	Document      string
	Key, ID, Type string
	Bytes         int      `json:"payload_bytes"`
	Latency       *float64 `json:"latency_ms"`
	Payload       string
	Cut           bool `json:"payload_cut"`
}

func tailedLines(t *testing.T, out string) (all []tailed) {
	t.Helper()
	for d := json.NewDecoder(strings.NewReader(out)); d.More(); {
		var l tailed
		harness.Must(t, d.Decode(&l))
		all = append(all, l)
	}
	return all
}

// sequences are those of the lines, such as "1 2 3".
func sequences(lines []tailed) string {
	var all []string
	for _, l := range lines {
		all = append(all, fmt.Sprint(l.Sequence))
	}
	return strings.Join(all, " ")
}

// mustHaveNoConsumers makes sure that nothing is left of commands that have ended. One that its server does
// not answer for a moment leaves its consumer to it.
func mustHaveNoConsumers(t *testing.T, js jetstream.JetStream, stream string) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	harness.Must(t, err)
	if n := s.CachedInfo().State.Consumers; n > 0 && !await.StoodStill(harness.Patience) {
		t.Errorf("%d consumers are left behind", n)
	}
}

func mustHaveConsumers(t *testing.T, f *harness.Installation, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprint(n, " read"), func() error {
		s, err := f.JS.Stream(t.Context(), f.Stream)
		if err == nil && s.CachedInfo().State.Consumers < n {
			err = errors.New("not yet")
		}
		return err
	})
}

func TestTailShowsWhatIsPublished(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "tail", "REORDER_HORIZON=0s",
		"HEADERS=Type=event_type,Created=created_at")
	harness.Exec(t, f.Conn, `CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, payload text,
		event_type text, created_at timestamptz DEFAULT clock_timestamp() - interval '1 hour')`)
	f.Init()
	f.Start()
	insert := func(doc string, counter int, payload string) {
		t.Helper()
		harness.Exec(t, f.Conn, "INSERT INTO outbox VALUES ($1, $2, 'anna', $3, $4, 'moved')",
			fmt.Sprint("id ", counter), doc, counter, payload)
	}
	insert("a b", 1, "first")
	insert("c", 2, "\x1b[31mred\u009b\u202e\r\n")
	insert("a b", 3, strings.Repeat("ä", 5000))
	insert("c", 4, "last")
	harness.AwaitMessages(t, f.JS, f.Stream, 4)

	all := tailedLines(t, f.MustRun("tail", "--json", "--payload", "--seq", "1", "--count", "4"))
	if got := sequences(all); got != "1 2 3 4" {
		t.Fatalf("sequences %s", got)
	}
	if l := all[0]; l.Document != "a b" || l.Subject != "outbox.a=20b" || l.ID != "id 1" ||
		l.Key != "anna:00000000000000000001" || l.Type != "moved" || l.Bytes != 5 || l.Payload != "first" ||
		!strings.HasSuffix(l.Position, "-0") || l.Latency == nil || *l.Latency < 3_600_000 {
		t.Errorf("%+v", l)
	}
	if l := all[1]; l.Payload != "\x1b[31mred\u009b\u202e\r\n" {
		t.Errorf("payload %q", l.Payload)
	}
	if l := all[2]; l.Bytes != 10_000 || !l.Cut || l.Payload != strings.Repeat("ä", 2048) {
		t.Errorf("cut %v, %d bytes of %d", l.Cut, len(l.Payload), l.Bytes)
	}

	for _, c := range []struct {
		want string
		args []string
	}{
		{"3 4", []string{"--last", "2", "--count", "2"}},
		{"1 3", []string{"--last", "9", "--doc", "a b", "--count", "2"}},
		{"3", []string{"--last", "1", "--doc", "a b", "--count", "1"}},
		{"2 4", []string{"--since", "1h", "--filter", "outbox.c", "--count", "2"}},
		{"1 2", []string{"--seq", "1", "--doc", "c", "--doc", "a b", "--count", "2"}},
		{"4", []string{"--seq", "3", "--filter", "*.c", "--count", "1"}},
	} {
		out := f.MustRun(append([]string{"tail", "--json"}, c.args...)...)
		if got := sequences(tailedLines(t, out)); got != c.want {
			t.Errorf("outflow tail %v: sequences %s, want %s", c.args, got, c.want)
		}
	}

	text := f.MustRun("tail", "--seq", "1", "--count", "4", "--payload")
	f.MustContain("outflow tail", text, " seq=1 ", " pos="+all[0].Position+" ", " subject=outbox.a=20b ",
		` doc="a b" `, " key=anna:00000000000000000001 ", ` id="id 1" `, " type=moved ", " size=10000 ",
		" latency=3", ` payload=\x1b[31mred\u009b\u202e\r\n`, " payload=last\n")
	lines := f.MustRun("tail", "--seq", "2", "--count", "1", "--payload", "--json")
	for _, out := range []string{text, lines} {
		if strings.ContainsAny(out, "\x1b\u009b\u202e\r") {
			t.Errorf("control characters: %q", out)
		}
	}
	if out := f.MustRun("tail", "--seq", "1", "--count", "1", "--json"); strings.Contains(out, "first") ||
		tailedLines(t, out)[0].Bytes != 5 {
		t.Errorf("without --payload: %s", out)
	}

	// a message that was removed is named, on standard error
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Must(t, s.DeleteMsg(t.Context(), 1))
	harness.Must(t, s.DeleteMsg(t.Context(), 3))
	out, errOut, code := f.Run("tail", "--seq", "1", "--count", "2", "--json")
	if got := sequences(tailedLines(t, out)); got != "2 4" || code != 0 ||
		!strings.Contains(errOut, "sequence 1 is not in the stream") ||
		!strings.Contains(errOut, "sequence 3 is not in the stream") {
		t.Errorf("sequences %s, exit code %d: %s", got, code, errOut)
	}
	out = f.MustRun("tail", "--last", "2", "--count", "2", "--json")
	if got := sequences(tailedLines(t, out)); got != "2 4" {
		t.Errorf("the last 2 are %s", got)
	}
	mustHaveNoConsumers(t, f.JS, f.Stream)

	f.MustFail(2, []string{"tail", "--last", "1", "--seq", "1"}, "--last, --since and --seq")
	f.MustFail(2, []string{"tail", "--since", "soon"}, "--since", "90m")
	f.MustFail(2, []string{"tail", "--filter", "a b"}, "--filter", "tokens")
	f.MustFail(2, []string{"tail", "--filter", "a.>.b"}, "--filter", "at the end")
	f.MustFail(2, []string{"tail", "--filter", "a", "--doc", "b"}, "--doc and --filter")
	f.Set("SUBJECT=all.{actor_id}")
	f.MustFail(2, []string{"tail", "--doc", "b"}, "does not hold the document")
	f.Set("STREAM=NOWHERE")
	f.MustFail(3, []string{"tail"}, "stream NOWHERE does not exist")
}

// following is an outflow tail --json that runs.
type following struct {
	t           *testing.T
	p           *process.Process
	out, errOut *harness.Log
}

func follow(t *testing.T, o *harness.Outflow, args ...string) *following {
	t.Helper()
	f := &following{t: t, out: &harness.Log{}, errOut: &harness.Log{}}
	cmd := exec.Command(harness.Program(o.Env), append([]string{"tail", "--json"}, args...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, f.out, f.errOut
	var err error
	f.p, err = process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	t.Cleanup(func() { _ = f.p.Kill() }) // it may have ended
	return f
}

// await waits until it has shown these sequences, each once and in order.
func (f *following) await(want string) {
	f.t.Helper()
	harness.Eventually(f.t, "sequences "+want, func() error {
		text := f.out.String()
		text = text[:strings.LastIndexByte(text, '\n')+1]
		if got := sequences(tailedLines(f.t, text)); got != want {
			return errors.New(got + f.errOut.String())
		}
		return nil
	}, f.p)
}

// stop interrupts it, which it ends by itself.
func (f *following) stop() {
	f.t.Helper()
	harness.Must(f.t, f.p.Signal(syscall.SIGINT))
	select {
	case <-f.p.Done():
	case <-time.After(harness.Patience):
		f.t.Fatal("it goes on after SIGINT")
	}
	if err := f.p.Wait(); err != nil {
		f.t.Errorf("after SIGINT: %v: %s", err, f.errOut)
	}
}

// TestTailGoesOnWhereNATSWasAway: without a gap, without a repeat; what was purged meanwhile is named.
func TestTailGoesOnWhereNATSWasAway(t *testing.T) {
	t.Parallel()
	ns := natstest.Process(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "tailaway", "REORDER_HORIZON=0s")
	f.MustFail(3, []string{"tail"}, "does not exist", "outflow init")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "a", 1, "{}")
	harness.Insert(t, f.Conn, "b", 2, "{}")
	shows, some := follow(t, f.Outflow, "--seq", "1"), follow(t, f.Outflow, "--seq", "1", "--doc", "b")
	later := follow(t, f.Outflow, "--seq", "6", "--count", "1")
	shows.await("1 2")
	some.await("2")
	mustHaveConsumers(t, f, 3)

	harness.Must(t, ns.Stop())
	harness.Eventually(t, "that NATS is away is said", func() error {
		if said := shows.errOut.String(); !strings.Contains(said, "trying again") {
			return errors.New(said)
		}
		return nil
	}, shows.p)
	harness.Insert(t, f.Conn, "b", 3, "{}")
	harness.Must(t, ns.Start())
	shows.await("1 2 3")
	some.await("2 3")
	if said := shows.errOut.String(); strings.Count(said, "trying again") != 1 ||
		!strings.Contains(said, "going on with sequence 3") {
		t.Errorf("%s", said)
	}

	// it is away, and what was published meanwhile is purged
	harness.Must(t, ns.Stop())
	harness.Insert(t, f.Conn, "b", 4, "{}")
	harness.Must(t, shows.p.Pause())
	harness.Must(t, ns.Start())
	js := harness.JetStream(t, ns.URL())
	s, err := js.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	harness.Eventually(t, "sequence 4", func() error {
		info, err := s.Info(t.Context())
		if err == nil && info.State.LastSeq != 4 {
			err = fmt.Errorf("%+v", info.State)
		}
		return err
	})
	harness.Must(t, s.Purge(t.Context()))
	harness.Must(t, shows.p.Resume())
	harness.Insert(t, f.Conn, "b", 5, "{}")
	shows.await("1 2 3 5")
	if said := shows.errOut.String(); !strings.Contains(said, "sequence 4 is not in the stream any more") {
		t.Errorf("%s", said)
	}
	harness.Insert(t, f.Conn, "b", 6, "{}")
	later.await("6")
	if said := later.errOut.String(); strings.Contains(said, "has lost") {
		t.Errorf("it was never there: %s", said)
	}
	shows.stop()
	some.stop()
	mustHaveNoConsumers(t, js, f.Stream)
}

// TestTailEndsWithItsReader: head has enough after a line, and nothing more is published.
func TestTailEndsWithItsReader(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "tailpipe", "REORDER_HORIZON=0s")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "a", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	cmd := exec.CommandContext(t.Context(), harness.Program(f.Env), "tail", "--seq", "1")
	var said harness.Log
	cmd.Env, cmd.Stderr = f.Env, &said
	out, err := cmd.StdoutPipe()
	harness.Must(t, err)
	harness.Must(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, "seq=1 ") {
		t.Fatalf("%q: %v", line, err)
	}
	harness.Must(t, out.Close())
	err = cmd.Wait()
	other := slices.DeleteFunc(slices.Collect(strings.Lines(said.String())), func(line string) bool {
		return strings.HasPrefix(line, "waiting for ") // on a slow machine it may
	})
	if err != nil || len(other) > 0 {
		t.Errorf("%v: %s", err, said.String())
	}
	mustHaveNoConsumers(t, f.JS, f.Stream)
}

// TestTailWaitsForASequenceThatIsToCome: the server begins at the stream's end instead.
func TestTailWaitsForASequenceThatIsToCome(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "tailwait", "REORDER_HORIZON=0s")
	f.Init()
	f.Start()
	shows, news := follow(t, f.Outflow, "--seq", "3", "--count", "1"), follow(t, f.Outflow, "--count", "1")
	harness.Eventually(t, "both read", func() error {
		s, err := f.JS.Stream(t.Context(), f.Stream)
		if err == nil && s.CachedInfo().State.Consumers < 2 {
			err = errors.New("not yet")
		}
		return err
	}, shows.p, news.p)
	for i := range 3 {
		harness.Insert(t, f.Conn, "a", i+1, "{}")
	}
	harness.AwaitMessages(t, f.JS, f.Stream, 3)
	for shown, by := range map[string]*following{"3": shows, "1": news} {
		select {
		case <-by.p.Done():
		case <-time.After(harness.Patience):
			t.Fatal("it does not end after --count messages")
		}
		by.await(shown)
	}
}

// TestTailNamesTheMissingRight: and those of the documented user are enough.
func TestTailNamesTheMissingRight(t *testing.T) {
	t.Parallel()
	sample := harness.AccountsConfig(t)
	ns := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Accounts, o.Users = sample.Accounts, sample.Users
	}})
	url := pgtest.Database(t, pgtest.Server(t))
	o := harness.New(t, url, ns.URL(), harness.SlotName("tailrights"),
		"NATS_USER=outflow-init", "NATS_PASSWORD="+harness.AccountPassword, "REORDER_HORIZON=0s")
	o.Init()
	o.MustFail(3, []string{"tail"}, `"$JS.API.CONSUMER.CREATE.OUTBOX.`, "publish to", "$JS.API.CONSUMER.CREATE.OUTBOX.>")
	o.Set("NATS_USER=outflow")
	o.Start()
	harness.Insert(t, harness.Connect(t, url), "a", 1, "{}")
	o.MustContain("outflow tail", o.MustRun("tail", "--seq", "1", "--count", "1"), " seq=1 ")
	_, admin := harness.LogIn(t, ns, "outflow-admin", harness.AccountPassword)
	mustHaveNoConsumers(t, admin, "OUTBOX")
}
