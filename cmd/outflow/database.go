package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/config"
	"github.com/outflowhq/outflow/outbox"
)

// consumerDatabase is where a consumer keeps its marks, for the commands that look into it.
type consumerDatabase struct {
	url    string
	schema string
}

func (d *consumerDatabase) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&d.url, "database", "", "the database of the consumer (default "+config.ConsumerDatabaseEnv+", else postgres.url)")
	cmd.Flags().StringVar(&d.schema, "schema", "", "the schema of the consumer's tables (default that of the search_path)")
}

// connect connects to it. The caller closes the connection.
func (d *consumerDatabase) connect(ctx context.Context, a *app, cfg config.Config) (*pgx.Conn, error) {
	url, from := d.url, "--database"
	if url == "" {
		for _, entry := range a.environ {
			if value, ok := strings.CutPrefix(entry, config.ConsumerDatabaseEnv+"="); ok {
				url, from = value, config.ConsumerDatabaseEnv
			}
		}
	}
	if url == "" {
		from = "postgres.url"
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, cmp.Or(url, cfg.Postgres.URL))
	var wrong *pgconn.ParseConfigError
	var refused *pgconn.PgError
	switch {
	case err == nil:
		return conn, nil
	case errors.As(err, &wrong):
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "database", What: from, Err: err,
			Cure: "Give a URL such as postgres://user@host/database"}
	case errors.As(err, &refused) && (refused.Code == "3D000" || strings.HasPrefix(refused.Code, "28")):
		return nil, &outbox.Fault{Class: outbox.Fatal, Code: "database", What: from, Err: err,
			Cure: "Correct the address, the role or its password"}
	}
	return nil, fmt.Errorf("%s: %w", from, err)
}
