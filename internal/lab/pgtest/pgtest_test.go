package pgtest

import (
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(Tests(m)) }

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close(t.Context()) })
	return conn
}

func TestEachRunsOnItsMajor(t *testing.T) {
	t.Setenv("OUTFLOW_TEST_PG", "all")
	Each(t, func(t *testing.T, s *pgserver.Server) {
		var major string
		err := connect(t, s.URL("postgres")).QueryRow(t.Context(),
			"SELECT (current_setting('server_version_num')::int / 10000)::text").Scan(&major)
		must.Succeed(t, err)
		if want := "TestEachRunsOnItsMajor/postgres-" + major; t.Name() != want {
			t.Errorf("%s runs on PostgreSQL %s", t.Name(), major)
		}
	})
}

// stream starts replication from a slot and leaves it running.
func stream(t *testing.T, url, slot string) {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), url+"&replication=database")
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Conn().Close() })
	conn.Frontend().SendQuery(&pgproto3.Query{
		String: "START_REPLICATION SLOT " + slot +
			" LOGICAL 0/0 (proto_version '1', publication_names 'none')",
	})
	must.Succeed(t, conn.Frontend().Flush())
	if msg, err := conn.ReceiveMessage(t.Context()); err != nil {
		t.Fatal(err)
	} else if _, ok := msg.(*pgproto3.CopyBothResponse); !ok {
		t.Fatalf("START_REPLICATION gave %T", msg)
	}
}

func TestDatabaseIsDroppedWithItsSlots(t *testing.T) {
	var name string
	s := Server(t)
	after := t // connections that are still open when the database is dropped
	t.Run("use", func(t *testing.T) {
		url := Database(t, s)
		conn := connect(after, url)
		err := conn.QueryRow(t.Context(), `SELECT current_database()
			FROM pg_create_logical_replication_slot('left_'||current_database(), 'pgoutput')`).Scan(&name)
		must.Succeed(t, err)
		stream(after, url, "left_"+name)
	})
	var left int
	err := connect(t, s.URL("postgres")).QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_database
		WHERE datname = $1)
		+ (SELECT count(*) FROM pg_replication_slots WHERE database = $1)`, name).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d objects of %s are left, %v", left, name, err)
	}
}

func TestOwnIsNotShared(t *testing.T) {
	t.Parallel()
	shared := Server(t)
	own := Own(t, shared.Installation.Major, "wal_sender_timeout=4s")
	if own.PID() == shared.PID() {
		t.Fatal("the same server")
	}
	var timeout string
	err := connect(t, own.URL("postgres")).QueryRow(t.Context(), "SHOW wal_sender_timeout").Scan(&timeout)
	if err != nil || timeout != "4s" {
		t.Errorf("wal_sender_timeout is %s, %v", timeout, err)
	}
	must.Succeed(t, own.Kill())
	must.Succeed(t, own.Start(t.Context()))
	connect(t, own.URL("postgres"))
}

func TestMajorsAreWhatIsAskedFor(t *testing.T) {
	t.Setenv("OUTFLOW_TEST_PG", "18, 14,18")
	if got := Majors(t); len(got) != 2 || got[0] != 14 || got[1] != 18 {
		t.Errorf("Majors = %v, want 14 and 18", got)
	}
	t.Setenv("OUTFLOW_TEST_PG", "all")
	if got := Majors(t); len(got) != pgserver.Newest-pgserver.Oldest+1 {
		t.Errorf("Majors = %v, want all", got)
	}
	t.Run("missing", func(t *testing.T) {
		t.Cleanup(func() {
			if !t.Skipped() {
				t.Error("PostgreSQL 9 is not installed, but its test was not skipped: " +
					strconv.FormatBool(t.Failed()))
			}
		})
		serverOf(t, 9)
	})
}
