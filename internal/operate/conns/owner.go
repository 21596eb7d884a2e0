package conns

import (
	"context"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
)

// CheckOwner refuses a retain.postgres_url that leads to another database than postgres.url: what is named as
// the outbox is there, has other rows.
func CheckOwner(ctx context.Context, cfg config.Config,
	server func(context.Context) (relay.ServerState, error)) error {
	if cfg.Retain.PostgresURL == "" || cfg.Retain.PostgresURL == cfg.Postgres.URL {
		return nil
	}
	there, err := server(ctx)
	if err != nil {
		return err
	}
	conn, err := Owner(cfg).Connect(ctx)
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	outbox := postgres.Database{System: there.SystemID, Name: there.Database}
	err = outbox.Check(ctx, conn, "retain_url", "retain.postgres_url")
	if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
		err = postgres.Fatal(err, "retain_url", "GRANT EXECUTE ON FUNCTION pg_control_system() TO the role, "+
			"or leave retain.postgres_url out", "it can't be told whether retain.postgres_url leads to the "+
			"database of postgres.url")
	}
	return err
}
