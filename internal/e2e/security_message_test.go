package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
)

// TestWhoMayWriteMessages: after the statement of docs/security.md a role without the right can't write an event, one with it can, and
// outflow, as the role of docs/postgres.md, still writes its ticks.
func TestWhoMayWriteMessages(t *testing.T) {
	t.Parallel()
	const password = "documented"
	pg := pgtest.Own(t, 0)
	database, err := pg.CreateDatabase(t.Context(), "app")
	must(t, err)
	admin := db(t, database)
	mustExec(t, admin, "CREATE ROLE app; CREATE ROLE other; CREATE ROLE outflow LOGIN REPLICATION PASSWORD '"+password+"'")
	mustExec(t, admin, documented(t, "security.md", "Who may write events", 0))
	ns := natstest.Server(t)
	o := newOutflow(t, database, ns.URL(), "messages", "SOURCE=message")
	o.init()
	o.set("POSTGRES_URL=" + strings.Replace(database, "postgres@", "outflow:"+password+"@", 1))
	o.start()
	o.ready()

	conn := db(t, database)
	event := content("d", "a", 1, "{}")
	mustExec(t, conn, "SET ROLE other")
	_, err = conn.Exec(t.Context(), emitEvent, event)
	const noRight = "42501"
	if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != noRight {
		t.Errorf("a role without the right: %v", err)
	}
	mustExec(t, conn, "RESET ROLE; SET ROLE app")
	emit(t, conn, event) // a tick closes its window
	awaitMessages(t, js(t, ns.URL()), o.stream, 1)
	if _, text := o.get("/metrics"); !strings.Contains(text, "outflow_tick_errors_total 0") {
		t.Errorf("ticks could not be written:\n%s", text)
	}
}
