package cli

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/replication/postgres"
)

// consumerDatabase names the database of a consumer's offsets, for the commands that read it.
type consumerDatabase struct {
	url    string
	schema string
}

func (d *consumerDatabase) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&d.url, "database", "", "the database of the consumer (default "+
		config.ConsumerDatabaseEnv+", else postgres.url)")
	cmd.Flags().StringVar(&d.schema, "schema", "",
		"the schema of the consumer's tables (default that of the search_path)")
}

// connect connects to it. The caller closes the connection.
func (d *consumerDatabase) connect(ctx context.Context, a *App, cfg config.Config) (*pgx.Conn, error) {
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
	if d.url != "" {
		a.repeat = append(a.repeat, "--database="+finding.Word(config.HidePasswords(d.url)))
	}
	if d.schema != "" {
		a.repeat = append(a.repeat, "--schema="+finding.Word(d.schema))
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	// the search_path is the role's
	target := postgres.Target{Setting: from, URL: cmp.Or(url, cfg.Postgres.URL), Pooled: true}
	defer progress.Wait(ctx, "waiting for the consumer's database: "+target.String())()
	a.where.Consumers = target.String()
	return target.Connect(ctx, func(c *pgx.ConnConfig) {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	})
}
