package config

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// write makes a file of the text and returns its name.
func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "outflow.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func loadText(t *testing.T, text string, environ ...string) (Config, error) {
	t.Helper()
	return Load(Args{"config": write(t, text)}, environ)
}

func TestWithoutSourcesTheDefaultsHold(t *testing.T) {
	t.Parallel()
	c, err := Load(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.from = nil
	want := Config{
		NATS:        NATS{URL: "nats://127.0.0.1:4222"},
		Replication: Replication{Origin: OriginOwn},
		Table:       "public.outbox",
		Columns: Columns{
			ID: Column{Name: "id"}, Doc: Column{Name: "doc_id"}, Actor: Column{Name: "actor_id"},
			Counter: Column{Name: "counter"}, Key: Column{Name: "seq_key"}, Payload: Column{Name: "payload"},
		},
		Slot: "outflow", Publication: "outflow", Stream: "OUTBOX", Subject: "outbox.{doc_id}",
		Reorder: Reorder{
			Mode: ModeHorizon, Bound: relay.DefaultBound, Cold: relay.DefaultCold,
			Memory: relay.DefaultMemory, FirstCounter: relay.DefaultFirst,
			Horizon: relay.DefaultHorizon, Sort: outbox.BySeqKey, MaxEvents: relay.DefaultMaxEvents,
			MaxBytes: relay.DefaultMaxBytes, Tick: TickWAL, SpillDir: os.TempDir(), MaxSpill: 64 << 30,
		},
		Sink: Sink{
			DurableAfter: 150 * time.Second, OnPoison: PoisonStop, DeadLetterSubject: "OUTBOX.dead_letter",
			MaxPayload: 1 << 20,
		},
		Cluster: Cluster{Mode: ModeNone},
		Init:    Init{Replicas: 1, Storage: "file", Partition: InitPartition{Every: 24 * time.Hour}},
		Retain: Retain{Table: RetainTable{Method: RetainPartition, Keep: 168 * time.Hour, Ahead: 4,
			Slack: time.Hour}},
		Archive:  Archive{SegmentSize: 64 << 20, SegmentAge: time.Hour},
		Maintain: Maintain{Every: time.Minute},
		Listen:   "127.0.0.1:7422", Log: Log{Format: "text", Level: slog.LevelInfo},
		OnFault: FaultExit, StopTimeout: 10 * time.Second,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("defaults:\n%+v\nwant:\n%+v", c, want)
	}
	if err := c.Reorder.Settings().Validate(); err != nil {
		t.Error(err)
	}
}

// Each source alone, and with all weaker ones beside it.
func TestTheStrongerSourceWins(t *testing.T) {
	t.Parallel()
	file := "reorder: {horizon: 2ms}\npostgres: {url: postgres://file}\n"
	for _, tt := range []struct {
		name         string
		args         Args
		file         bool
		environ      []string
		horizon, url string
		from         string
	}{
		{"default", nil, false, nil, "20ms", "", "default"},
		{"fallback", nil, false, []string{"DATABASE_URL=postgres://fallback"}, "20ms", "postgres://fallback",
			"default"},
		{"empty fallback", nil, false, []string{"DATABASE_URL="}, "20ms", "", "default"},
		{"file", nil, true, []string{"DATABASE_URL=postgres://fallback"}, "2ms", "postgres://file", "file"},
		{"environment", nil, true,
			[]string{"OUTFLOW_REORDER_HORIZON=3ms", "OUTFLOW_POSTGRES_URL=postgres://env"},
			"3ms", "postgres://env", "environment OUTFLOW_REORDER_HORIZON"},
		{"flag", Args{"reorder.horizon": "4ms", "postgres.url": "postgres://flag"}, true,
			[]string{"OUTFLOW_REORDER_HORIZON=3ms", "OUTFLOW_POSTGRES_URL=postgres://env"}, "4ms",
			"postgres://flag",
			"flag --reorder.horizon"},
		{"impossible, but overridden", Args{"reorder.horizon": "4ms"}, false,
			[]string{"OUTFLOW_REORDER_HORIZON=soon"}, "4ms", "",
			"flag --reorder.horizon"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			environ := tt.environ
			if tt.file {
				environ = append([]string{"OUTFLOW_CONFIG=" + write(t, file)}, environ...)
			}
			c, err := Load(tt.args, environ)
			if err != nil {
				t.Fatal(err)
			}
			if got := formatDuration(c.Reorder.Horizon); got != tt.horizon {
				t.Errorf("horizon %s, want %s", got, tt.horizon)
			}
			if c.Postgres.URL != tt.url || c.Postgres.WriteURL != tt.url {
				t.Errorf("url %q, write_url %q, want %q", c.Postgres.URL, c.Postgres.WriteURL, tt.url)
			}
			if got := c.from["reorder.horizon"].String(); !strings.HasPrefix(got, tt.from) {
				t.Errorf("origin %q, want %q", got, tt.from)
			}
		})
	}
}

func TestConfigFlagBeforeEnvironment(t *testing.T) {
	t.Parallel()
	c, err := Load(Args{"config": write(t, "stream: FLAG")},
		[]string{"OUTFLOW_CONFIG=" + write(t, "stream: ENV")})
	if err != nil {
		t.Fatal(err)
	}
	if c.Stream != "FLAG" {
		t.Errorf("stream %s", c.Stream)
	}
}

func TestCompletionKnowsTheSettings(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, text string
		environ    []string
		get        func(Config) string
		want       string
	}{
		{"schema", "table: orders", nil, func(c Config) string { return c.Table }, "public.orders"},
		{"write url", "postgres: {url: postgres://a, write_url: postgres://b}", nil,
			func(c Config) string { return c.Postgres.WriteURL }, "postgres://b"},
		{"libpq", "", []string{"PGHOST=db", "PGDATABASE=app"},
			func(c Config) string { return c.from["postgres.url"].String() },
			"environment PGHOST, PGDATABASE"},
		{"nats fallback", "", []string{"NATS_URL=nats://n:4222"}, func(c Config) string { return c.NATS.URL },
			"nats://n:4222"},
		{"context before NATS_URL", "nats: {context: prod}", []string{"NATS_URL=nats://n:4222"},
			func(c Config) string { return c.NATS.URL }, ""},
		{"dead letter", "stream: OPS", nil, func(c Config) string { return c.Sink.DeadLetterSubject },
			"OPS.dead_letter"},
		{"no listener", `listen: ""`, nil, func(c Config) string { return c.Listen }, ""},
		{"no actor", "", []string{"OUTFLOW_COLUMNS_ACTOR_ID="}, func(c Config) string {
			return c.Columns.Actor.Name
		}, ""},
		{"digits as text", "nats: {user: u, password: 0123}", nil, func(c Config) string {
			return c.NATS.Password
		}, "0123"},
		{"literal", "nats:\n  user: u\n  password: >-\n    a b\n", nil, func(c Config) string {
			return c.NATS.Password
		}, "a b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, err := loadText(t, tt.text, tt.environ...)
			if err != nil {
				t.Fatal(err)
			}
			if got := tt.get(c); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

func TestColumnsTellDefaultsFromNames(t *testing.T) {
	t.Parallel()
	c, err := loadText(t, `columns: {doc_id: doc_id, actor_id: ""}`, "OUTFLOW_COLUMNS_COUNTER=n")
	if err != nil {
		t.Fatal(err)
	}
	want := Columns{
		ID: Column{"id", false}, Doc: Column{"doc_id", true}, Actor: Column{"", true},
		Counter: Column{"n", true},
		Key:     Column{"seq_key", false}, Payload: Column{"payload", false},
	}
	if c.Columns != want {
		t.Errorf("%+v, want %+v", c.Columns, want)
	}
}

// The same mapping is the same configuration, however it is written.
func TestAMappingMayBeWrittenInAnyForm(t *testing.T) {
	t.Parallel()
	want := []Header{{"Event-Type", "event_type"}, {"traceparent", "trace"}}
	text := "traceparent=trace,Event-Type=event_type"
	for name, load := range map[string]func() (Config, error){
		"file": func() (Config, error) {
			return loadText(t, "headers:\n  traceparent: trace\n  Event-Type: event_type\n")
		},
		"flow": func() (Config, error) {
			return loadText(t, "headers: {traceparent: trace, Event-Type: event_type}")
		},
		"environment": func() (Config, error) { return Load(nil, []string{"OUTFLOW_HEADERS=" + text}) },
		"flags": func() (Config, error) {
			cmd, args := &cobra.Command{}, Args{}
			AddFlags(cmd, args)
			err := cmd.Flags().Parse([]string{"--headers", "traceparent=trace",
				"--headers=Event-Type=event_type"})
			if err != nil {
				return Config{}, err
			}
			return Load(args, nil)
		},
	} {
		c, err := load()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(c.Headers, want) {
			t.Errorf("%s: %v, want %v", name, c.Headers, want)
		}
	}
}

func TestAChecksErrorNamesItsSetting(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want string
	}{
		{errors.New("begins with a column"), `subject = "{doc_id}" (flag --subject): begins with a column`},
		{&outbox.Fault{Message: "no literal token", Hint: "Begin with one."},
			`subject = "{doc_id}" (flag --subject): no literal token. Begin with one.`},
		{&outbox.Fault{Message: `subject "{doc_id}": no literal token`, Hint: "Begin with one"},
			`subject "{doc_id}": no literal token (flag --subject). Begin with one.`},
		{nil, ""},
	} {
		check := Check{[]string{"subject", "stream"}, func(Config) error { return tt.err }}
		_, err := Load(Args{"subject": "{doc_id}"}, nil, check)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != tt.want) {
			t.Errorf("%v, want %s", err, tt.want)
		}
		_, err = Load(Args{"subject": "{doc_id}", "stream": "a b"}, nil, check)
		if err == nil || strings.Contains(err.Error(), "literal") || strings.Contains(err.Error(), "begins") {
			t.Errorf("a check was asked though the stream is impossible: %v", err)
		}
	}
}

func TestALoginIsReadFromItsFiles(t *testing.T) {
	t.Parallel()
	n := NATS{PasswordFile: write(t, "p w\r\n"), Token: "tok"}
	password, token, err := n.Login()
	if password != "p w" || token != "tok" || err != nil {
		t.Errorf("%q %q %v", password, token, err)
	}
	n.TokenFile = filepath.Join(t.TempDir(), "none")
	if _, _, err = n.Login(); err == nil || !strings.Contains(err.Error(), "nats.token_file") {
		t.Errorf("%v, want it to name nats.token_file", err)
	}
}

// A process that runs reads its files again: it must not wait for a pipe that somebody put in their place.
func TestAPipeInPlaceOfAFileIsNotWaitedFor(t *testing.T) {
	name := filepath.Join(t.TempDir(), "outflow.yaml")
	must.Succeed(t, syscall.Mkfifo(name, 0o600))
	if _, err := Load(Args{"config": name}, nil); err == nil ||
		!strings.Contains(err.Error(), name+": no regular file, and nothing is written to it") {
		t.Errorf("nobody writes: %v", err)
	}
	pipe, err := os.OpenFile(name, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer pipe.Close()
	was := readTimeout
	t.Cleanup(func() { readTimeout = was })
	readTimeout = time.Millisecond
	if _, err := Load(Args{"config": name}, nil); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("somebody has opened it, and writes nothing: %v", err)
	}
	if _, err := Load(Args{"config": t.TempDir()}, nil); err == nil {
		t.Error("a folder is no file")
	}
}

// A shell gives what a command prints as a pipe.
func TestAFileMayBeAPipe(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	must.Succeed(t, err)
	defer r.Close()
	_, err = w.WriteString("stream: PIPED\n")
	must.Succeed(t, errors.Join(err, w.Close()))
	c, err := Load(Args{"config": fmt.Sprintf("/dev/fd/%d", r.Fd())}, nil)
	if err != nil || c.Stream != "PIPED" {
		t.Errorf("%q, %v", c.Stream, err)
	}
}

// TestWhatIsRepeatedHidesSecrets: the file and what the command line gave, ready for a shell.
func TestWhatIsRepeatedHidesSecrets(t *testing.T) {
	t.Parallel()
	args := Args{"postgres.url": "postgres://u:hunter2@h/d", "nats.password": "hunter2", "slot": "a b",
		"sink.msg_id": "true"}
	got := strings.Join(args.Repeat([]string{"OUTFLOW_CONFIG=/etc/it's.yaml", "OUTFLOW_STREAM=X"}), " ")
	want := `--config '/etc/it'\''s.yaml' --postgres.url='postgres://u:***@h/d' --nats.password='***' ` +
		`--slot='a b' --sink.msg_id=true`
	if got != want {
		t.Errorf("%s\nnot %s", got, want)
	}
}
