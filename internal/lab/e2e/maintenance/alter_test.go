package maintenance

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// plainTable makes an outbox table as users have them: columns that Outflow does not know, and a key that a
// trigger fills.
func plainTable(t *testing.T) func(*pgx.Conn) {
	return func(conn *pgx.Conn) {
		t.Helper()
		harness.Exec(t, conn, `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
			note text DEFAULT 'a note', doc_id text NOT NULL,
			actor_id text NOT NULL, counter bigint NOT NULL, seq_key text NOT NULL, payload jsonb NOT NULL,
			old int DEFAULT 7)`)
		// By way of jsonb: a session does not bear it when the type of a column that the function names
		// changes.
		harness.Exec(t, conn, `CREATE FUNCTION key() RETURNS trigger LANGUAGE plpgsql AS $$
			DECLARE r jsonb := to_jsonb(NEW);
			BEGIN NEW.seq_key := (r->>'actor_id') || ':' || lpad(r->>'counter', 20, '0'); RETURN NEW; END $$`)
		harness.Exec(t, conn,
			"CREATE TRIGGER key BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION key()")
	}
}

// TestAlteringTheTablePublishesNoRowAgain: columns are added, dropped, renamed and get another type while
// rows flow. Several of the changes write every row anew, which must not publish a row again.
func TestAlteringTheTablePublishesNoRowAgain(t *testing.T) {
	t.Parallel()
	// Without commit timestamps: a row that is written anew gets another one.
	p := underLoad(t, pgtest.Server(t), natstest.Server(t).URL(), "altered", 500, plainTable(t))
	for _, sql := range []string{
		"ALTER TABLE outbox ADD COLUMN tenant text",
		// writes every row anew
		"ALTER TABLE outbox ADD COLUMN written timestamptz NOT NULL DEFAULT clock_timestamp()",
		"ALTER TABLE outbox DROP COLUMN old",
		"ALTER TABLE outbox RENAME COLUMN note TO remark",
		"ALTER TABLE outbox DROP COLUMN remark, ADD COLUMN remark text DEFAULT 'another'",
		"ALTER TABLE outbox ALTER COLUMN doc_id TYPE varchar(1000)",
		"CREATE DOMAIN actor AS text",
		"ALTER TABLE outbox ALTER COLUMN actor_id TYPE actor", // Outflow reads such a type in text form only
		"ALTER TABLE outbox ALTER COLUMN counter TYPE numeric",
		"ALTER TABLE outbox ALTER COLUMN payload TYPE text",
		"ALTER TABLE outbox ALTER COLUMN counter TYPE bigint",
		"ALTER TABLE outbox ALTER COLUMN id TYPE text",
		"ALTER TABLE outbox SET (fillfactor = 80)",
		"VACUUM FULL outbox",
		"CLUSTER outbox USING outbox_pkey",
	} {
		harness.Exec(t, p.conn, sql)
		p.publishing()
	}
	p.end()
	if !strings.Contains(p.Log.String(), "binary=false") {
		t.Error("no session read in text form")
	}
}

// TestARenamedColumnTakesAnInit: a column that Outflow reads gets another name, as docs/upgrades.md says: the
// writers stop, everything is drained, init takes the new name.
func TestARenamedColumnTakesAnInit(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	ns := natstest.Server(t)
	p := underLoad(t, timedServer(t), ns.URL(), "renamed", 1500, plainTable(t))
	p.load.Ending.Store(true)
	p.load.Wait(t)
	first := int(p.load.Written.Load())
	p.MustStop(t)
	if r := p.Drain(); r.Sequence != uint64(first) {
		t.Errorf("drained %d messages, want %d", r.Sequence, first)
	}
	harness.Exec(t, p.conn, "ALTER TABLE outbox RENAME COLUMN doc_id TO document")
	harness.Exec(t, p.conn, "ALTER TABLE outbox ADD COLUMN event_type text DEFAULT 'edited'")
	p.MustFail(3, []string{"run"}, "doc_id")
	p.Set("COLUMNS_DOC_ID=document", "HEADERS=Event-Type=event_type")
	p.MustFail(3, []string{"run"}, "outflow init")
	p.Init()
	p.Start()
	const more = 1000
	harness.Exec(t, p.conn, `INSERT INTO outbox (document, actor_id, counter, payload)
		SELECT 'after ' || n % 10, 'x', n, to_jsonb(n) FROM generate_series(1, $1::int) n`, more)
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), p.Stream, first+more)
	harness.Exec(t, p.conn, "ALTER TABLE outbox RENAME COLUMN document TO doc_id") // for the comparison
	p.complete()
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), p.Stream)
	for i, m := range all {
		want := ""
		if i >= first {
			want = "edited"
		}
		if got := m.Header.Get("Event-Type"); got != want {
			t.Fatalf("message %d: Event-Type %q, want %q", i+1, got, want)
		}
	}
}
