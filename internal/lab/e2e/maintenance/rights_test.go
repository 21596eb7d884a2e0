package maintenance

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// rights are those of a user of a document, as users of a server: the user itself, and for each right that it
// may publish with, but the last ones, one that lacks it.
type rights struct {
	broker     *natsserver.Server
	documented string
	lacking    [][2]string // users, and what each lacks
}

// documentedRights starts a server with them. The last spare ones are needed only sometimes.
func documentedRights(t *testing.T, doc, section string, spare int) *rights {
	t.Helper()
	conf, err := server.ProcessConfigFile(harness.WriteFile(t, "nats.conf", strings.ReplaceAll(
		harness.DocumentedBlock(t, doc, section, 0), "…", harness.AccountPassword)))
	harness.Must(t, err)
	documented := conf.Users[0]
	r := &rights{documented: documented.Username}
	users := []*server.User{{Username: "admin", Password: harness.AccountPassword}, documented}
	allowed := documented.Permissions.Publish.Allow
	for i, subject := range allowed[:len(allowed)-spare] {
		u := &server.User{Username: fmt.Sprint("lacks", i), Password: harness.AccountPassword}
		u.Permissions = &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: slices.Delete(slices.Clone(allowed), i, i+1)},
			Subscribe: documented.Permissions.Subscribe}
		users, r.lacking = append(users, u), append(r.lacking, [2]string{u.Username, subject})
	}
	r.broker = natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) { o.Users = users }})
	return r
}

// as is the server's URL for a user.
func (r *rights) as(user string) string {
	return strings.Replace(r.broker.URL(), "nats://", "nats://"+user+":"+harness.AccountPassword+"@", 1)
}

// TestTheDocumentedRightsAreEnoughToMaintain: a user with what docs/retention.md says archives, and takes
// rows and messages away; without any of it the error says what is missing.
func TestTheDocumentedRightsAreEnoughToMaintain(t *testing.T) {
	t.Parallel()
	nats := documentedRights(t, "retention.md", "Rights", 1)
	r := newRetainedAt(t, pgtest.Server(t), nats.as("admin"), "maintainrights",
		"ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s", "RETAIN_STREAM_MESSAGES=1",
		"RETAIN_STREAM_IGNORE_CONSUMERS=texts")
	r.UseStream("OUTBOX") // that of the page
	r.Init()
	r.Start()
	r.MustRun("partition", "apply") // makes a partition of now
	r.beat()
	c, err := consumer.New(r.JS, consumer.JetStream(), consumer.Config{Name: "texts", Stream: "OUTBOX",
		Log: slog.New(slog.DiscardHandler)})
	harness.Must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	harness.Must(t, c.Run(ctx, func(context.Context, pgx.Tx, *consumer.Event) error {
		stop()
		return nil
	}))
	env := slices.Clone(r.Env)

	once := func(user string) (string, int) {
		r.beat()
		r.Set("NATS_URL=" + nats.as(user))
		defer func() { r.Env = slices.Clone(env) }()
		out, said, code := r.Run("maintain", "--once")
		return out + said, code
	}
	for _, l := range nats.lacking {
		said, code := once(l[0])
		if strings.HasPrefix(l[1], "$KV.") { // for the status page: all else is done
			if code != 0 || !strings.Contains(said, "can't be told") ||
				!strings.Contains(said, "NATS forbids") {
				t.Errorf("without %s: exit code %d: %s", l[1], code, said)
			}
			continue
		}
		if code != 3 || !strings.Contains(said, "nats_permission") {
			t.Errorf("without %s: exit code %d: %s", l[1], code, said)
		}
	}
	harness.Eventually(t, "partitions go, and the messages of all but the last", func() error {
		said, code := once(nats.documented)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, said)
		}
		s, err := r.JS.Stream(t.Context(), "OUTBOX")
		harness.Must(t, err)
		if state := s.CachedInfo().State; r.left() != "" || state.FirstSeq == 1 {
			return fmt.Errorf("left: %s and %+v: %s", r.left(), state, said)
		}
		return nil
	})
	r.MustStop(t)
}

// TestRowsOfAnotherDatabaseStay: retain.postgres_url leads to another database, which has a table of the
// outbox's name. No command touches it.
func TestRowsOfAnotherDatabaseStay(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	f := harness.NewInstallation(t, pg, natstest.Server(t).URL(), "elsewhere", "SINK_DURABLE_AFTER=0s",
		"RETAIN_TABLE_METHOD=delete", "RETAIN_TABLE_KEEP=0s", "ARCHIVE_URL=file://"+t.TempDir())
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	f.MustRun("drain")
	harness.Insert(t, f.Conn, "doc", 2, "{}") // the newest window is not archived
	f.MustRun("drain")
	f.MustRun("archive", "run", "--now")
	other := harness.Connect(t, pgtest.Database(t, pg))
	harness.Exec(t, other, harness.GeneratedKey)
	harness.Insert(t, other, "doc", 1, "{}")
	f.Set("RETAIN_POSTGRES_URL=" + other.Config().ConnString())
	for _, args := range [][]string{{"partition", "plan"}, {"partition", "apply"}, {"maintain", "--once"},
		{"erase", "--doc", "doc", "--request", "r"}, {"erase", "--doc", "doc", "--request", "r", "--yes"},
		{"archive", "rows"}} {
		f.MustFail(3, args, "code retain_url", other.Config().Database)
	}
	var rows, tables int
	harness.Must(t, other.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM outbox),
		(SELECT count(*) FROM pg_tables WHERE tablename LIKE 'outflow%')`).Scan(&rows, &tables))
	if rows != 1 || tables != 0 {
		t.Errorf("the other database has %d rows and %d tables of Outflow", rows, tables)
	}
}

// TestInitMakesNoSlotBesideWhichItMayNotWrite: it would keep WAL until somebody has corrected the setting.
func TestInitMakesNoSlotBesideWhichItMayNotWrite(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	f := harness.NewInstallation(t, pg, natstest.Server(t).URL(), "init_elsewhere",
		"RETAIN_POSTGRES_URL="+harness.Connect(t, pgtest.Database(t, pg)).Config().ConnString())
	f.MustFail(3, []string{"init"}, "code retain_url")
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1",
		f.Slot); n != 0 {
		t.Error("it has made the slot")
	}
	f.Set("RETAIN_POSTGRES_URL=")
	f.Init()
}
