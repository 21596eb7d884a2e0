package catalog

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestSetupMayBeRunAgain(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.setup()
		defer s.Close()
		if made, err := s.EnsureTable(within(t)); err != nil || made {
			t.Error(made, err)
		}
		first, err := s.Publication(within(t))
		must.Succeed(t, err)
		if made, id, err := s.EnsurePublication(within(t)); err != nil || made || id != first {
			t.Error(made, id, err)
		}
		_, err = s.CreateSlot(within(t))
		wantFault(t, err, outbox.Fatal, "slot_exists")
		state, err := s.Slot(within(t))
		if err != nil || state.Plugin != "pgoutput" || state.Confirmed == 0 || state.Restart == 0 ||
			state.Invalidation != "" ||
			state.SafeWALSize != -1 || state.WALStatus != "reserved" || state.Active ||
			state.Database != d.Text("SELECT current_database()") {
			t.Errorf("%+v, %v", state, err)
		}
	})
}

// From 17 on the slot is one that standbys may synchronise.
func TestSlotIsForFailover(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		d := newDatabase(t, srv)
		s := d.setup()
		defer s.Close()
		if _, err := s.CreateSlot(within(t)); err != nil {
			t.Fatal(err)
		}
		want := ""
		if srv.Installation.Major >= 17 {
			want = "true"
		}
		const failover = "SELECT coalesce(to_jsonb(s) ->> 'failover', '') FROM pg_replication_slots s " +
			"WHERE slot_name = $1"
		if got := d.Text(failover, d.cfg.Slot); got != want {
			t.Errorf("failover is %q, want %q", got, want)
		}
	})
}

// Creating a slot waits for every transaction that writes.
func TestBlockedSlotNamesWhoBlocks(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.Exec("SET application_name = 'order service'")
	d.Exec("BEGIN")
	d.Exec("CREATE TABLE unfinished (id int)")
	d.cfg.Patience = 50 * time.Millisecond
	s := d.setup()
	defer s.Close()
	_, err := s.CreateSlot(within(t))
	f := wantFault(t, err, outbox.Fatal, "slot_blocked")
	for _, want := range []string{fmt.Sprint("pid ", d.Conn.PgConn().PID()), "order service", "open for"} {
		if !strings.Contains(f.Hint, want) {
			t.Errorf("%s: does not name %s", f.Hint, want)
		}
	}
	if state, err := s.Slot(within(t)); err != nil || state.Exists {
		t.Errorf("half a slot is left: %+v, %v", state, err)
	}
	d.Exec("ROLLBACK")
	s.cfg.Patience = outboxdb.Patience
	if _, err := s.CreateSlot(within(t)); err != nil {
		t.Error(err)
	}
}

func TestAServerThatCannotBeUsedIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ setting, code string }{
		{"wal_level=replica", "wal_level"},
		{"max_replication_slots=0", "max_replication_slots"},
	} {
		t.Run(c.code, func(t *testing.T) {
			t.Parallel()
			d := newDatabase(t, pgtest.Own(t, 0, c.setting))
			s := d.setup()
			defer s.Close()
			f := wantFault(t, s.CheckServer(within(t)), outbox.Fatal, c.code)
			if name, value, _ := strings.Cut(c.setting, "="); !strings.Contains(f.Error(), name) ||
				!strings.Contains(f.Message, value) {
				t.Errorf("%v does not name %s", f, c.setting)
			}
		})
	}
	t.Run("role", func(t *testing.T) {
		t.Parallel()
		d := newDatabase(t, pgtest.Server(t))
		role := strings.Replace(d.cfg.Slot, "outflow_", "plain_", 1)
		d.Exec("CREATE ROLE " + role + " LOGIN")
		t.Cleanup(func() { d.Exec("DROP ROLE " + role) })
		d.cfg.URL = outboxdb.WithUser(t, d.URL, role)
		d.cfg.Table = "pg_catalog.outbox"
		s := d.setup()
		defer s.Close()
		_, err := s.EnsureTable(within(t))
		wantFault(t, err, outbox.Fatal, "no_right")
		_, err = s.CreateSlot(within(t))
		wantFault(t, err, outbox.Fatal, "no_replication_right")
	})
	for version, bad := range map[int]bool{130022: true, 140000: false, 180004: false} {
		if err := CheckVersion(version); (err != nil) != bad {
			t.Errorf("version %d: %v", version, err)
		}
	}
}

// What --print shows makes what init makes.
func TestThePrintedStatementsMakeTheSame(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.cfg.Table, d.cfg.Publication = `public.out"box`, `pub's "one"`
	d.cfg.Mapping.Doc, d.cfg.Mapping.Actor = "Doc Id", `a"ctor`
	d.cfg.Mapping.Span = "length"
	d.cfg.Columns = []string{"id", "Doc Id", `a"ctor`, "counter", "length", "payload"}
	statements, err := Statements(d.cfg)
	if err != nil || len(statements) != 3 {
		t.Fatal(statements, err)
	}
	for _, sql := range statements {
		d.Exec(sql)
	}
	s := d.setup()
	defer s.Close()
	if made, err := s.EnsureTable(within(t)); err != nil || made {
		t.Error(made, err)
	}
	if made, _, err := s.EnsurePublication(within(t)); err != nil || made {
		t.Error(made, err)
	}
	d.Exec(`INSERT INTO "out""box" ("Doc Id", "a""ctor", counter, payload) VALUES ('d', 'anna', 42, '{}')`)
	if key := d.Text(
		`SELECT seq_key || ' ' || length FROM "out""box"`); key != "anna:00000000000000000042 1" {
		t.Errorf("seq_key and length %q", key)
	}
	if slot, err := s.Slot(within(t)); err != nil || slot.Plugin != "pgoutput" {
		t.Errorf("slot %+v, %v", slot, err)
	}
}

func TestATableMayLackTheOptionalColumns(t *testing.T) {
	t.Parallel()
	cfg := SetupConfig{
		Config:  Config{Table: "outbox", Slot: "s", Publication: "p"},
		Mapping: relay.Mapping{Doc: "topic", Payload: "message"}, CreatedAt: "at",
	}
	statements, err := Statements(cfg)
	must.Succeed(t, err)
	want := "CREATE TABLE \"public\".\"outbox\" (\n  \"topic\" text NOT NULL,\n  \"message\" jsonb NOT " +
		"NULL,\n  \"at\" timestamptz NOT NULL DEFAULT now()\n)"
	if statements[0] != want {
		t.Errorf("got %s, want %s", statements[0], want)
	}
}

// PostgreSQL says by how much a slot is beyond its limit. That is no room, and not that there is no limit.
func TestASlotBeyondItsLimitHasNoRoom(t *testing.T) {
	t.Parallel()
	beyond := int64(-1)
	if got := (slotRow{WALStatus: "unreserved", SafeWALSize: &beyond}).state("", "").SafeWALSize; got != 0 {
		t.Errorf("%d bytes", got)
	}
}
