package conns

import (
	"context"
	"fmt"

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
	var system, database string
	err = conn.QueryRow(ctx, `SELECT s.system_identifier::pg_catalog.text, pg_catalog.current_database()
		FROM pg_catalog.pg_control_system() s`).Scan(&system, &database)
	if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
		return nil // a platform that hides it
	}
	if err != nil {
		return fmt.Errorf("ask where retain.postgres_url leads: %w", err)
	}
	if system != there.SystemID || database != there.Database {
		return postgres.Fatal(nil, "retain_url", "Point retain.postgres_url at the database of postgres.url",
			"retain.postgres_url leads to database %s of system %s, the outbox is in database %s of "+
				"system %s", database, system, there.Database, there.SystemID)
	}
	return nil
}
