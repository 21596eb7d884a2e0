package conns

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// TestTheOwnerIsOneOfTheOutboxesDatabase: elsewhere a table of that name has other rows, and nobody guesses
// where the server does not say where that is.
func TestTheOwnerIsOneOfTheOutboxesDatabase(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	db, other := outboxdb.New(t, pg), outboxdb.New(t, pg)
	there := relay.ServerState{SystemID: db.Text("SELECT system_identifier::text FROM pg_control_system()"),
		Database: db.Text("SELECT current_database()")}
	db.Exec("REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC")
	for url, refused := range map[string]bool{
		"":                                 false,
		db.URL:                             false,
		db.URL + "&application_name=owner": false,
		other.URL:                          true,
		db.URL + "&role=pg_signal_backend": true,
	} {
		var cfg config.Config
		cfg.Postgres.URL, cfg.Retain.PostgresURL = db.URL, url
		conn, err := Owner(cfg, there).Connect(outboxdb.Within(t))
		if refused {
			outboxdb.WantFault(t, err, outbox.Fatal, "retain_url")
			continue
		}
		must.Succeed(t, err)
		postgres.Close(conn)
	}
}
