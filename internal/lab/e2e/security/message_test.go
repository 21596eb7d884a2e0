package security

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

// TestOnlyGrantedRolesWriteMessages: settings of an unknown version or beyond a maximum, which any role may
// write, have no effect and are counted. After the statement of docs/security.md a role without the right
// can't write them, nor an event; one with it can, and outflow, as the role of docs/postgres.md, still writes
// its ticks and changes of settings.
func TestOnlyGrantedRolesWriteMessages(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	for _, major := range pgtest.Majors(t) {
		t.Run("postgres-"+strconv.Itoa(major), func(t *testing.T) {
			const password = "documented"
			pg := pgtest.Own(t, major)
			database, err := pg.CreateDatabase(t.Context(), "app")
			harness.Must(t, err)
			admin := harness.Connect(t, database)
			harness.Exec(t, admin, "CREATE ROLE app; CREATE ROLE other; CREATE ROLE outflow LOGIN "+
				"REPLICATION PASSWORD '"+password+"'")
			o := harness.New(t, database, ns.URL(), "messages"+strconv.Itoa(major), "SOURCE=message",
				"STREAM=MESSAGES"+strconv.Itoa(major), "SUBJECT=messages"+strconv.Itoa(major)+".{doc_id}")
			o.Stream = "MESSAGES" + strconv.Itoa(major)
			o.Init()

			conn := harness.Connect(t, database)
			const emitSettings = "SELECT pg_logical_emit_message(true, 'outflow.settings', $1)"
			largest := relay.Settings{Horizon: relay.MaxHorizon, MaxEvents: relay.MaxMaxEvents,
				MaxBytes: relay.MaxMaxBytes}
			beyond := largest
			beyond.MaxBytes++
			harness.Exec(t, conn, "SET ROLE other")
			for _, content := range []string{"v=2 slot=" + o.Slot + " x", beyond.Content(o.Slot),
				largest.Content(o.Slot)} {
				harness.Exec(t, conn, emitSettings, content)
			}
			harness.Exec(t, admin, harness.DocumentedBlock(t, "security.md", "Who may write events", 0))
			o.Set("POSTGRES_URL=" + strings.Replace(database, "postgres@", "outflow:"+password+"@", 1))
			o.Start()
			o.AwaitReady()

			event := harness.EventContent("d", "a", 1, "{}")
			denied := map[string]string{harness.EmitEvent: event, emitSettings: largest.Content(o.Slot)}
			if major >= 17 {
				denied["SELECT pg_logical_emit_message(true, 'outflow.settings', $1, true)"] =
					largest.Content(o.Slot)
			}
			const noRight = "42501"
			for statement, content := range denied {
				_, err = conn.Exec(t.Context(), statement, content)
				if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != noRight {
					t.Errorf("a role without the right: %s: %v", statement, err)
				}
			}
			harness.Exec(t, conn, "RESET ROLE; SET ROLE app")
			harness.EmitAll(t, conn, event) // a tick closes its window: with the largest horizon it would not
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
			for name, want := range map[string]float64{"tick_errors": 0, "malformed_settings": 2,
				"foreign_settings": 1} {
				if got := harness.Metric(t, o, "outflow_"+name+"_total"); got != want {
					t.Errorf("%s is %v, want %v", name, got, want)
				}
			}
			o.MustStop(t)
		})
	}
}
