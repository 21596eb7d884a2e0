package cli

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/replication/postgres"
)

// consumerDatabase names the database of a consumer's offsets, for the commands that read it.
type consumerDatabase struct {
	url    string
	schema string
}

func (d *consumerDatabase) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&d.url, "database", "", "the database of the consumer (default "+
		config.ConsumerDatabaseEnv+", else postgres.url, or postgres.write_url if that is a standby)")
	cmd.Flags().StringVar(&d.schema, "schema", "",
		"the schema of the consumer's tables (default that of the search_path)")
}

// connect connects to it. The caller closes the connection.
func (d *consumerDatabase) connect(ctx context.Context, a *App, cfg config.Config) (*pgx.Conn, error) {
	var urls []string
	if d.url != "" {
		urls = []string{d.url}
	}
	target := a.consumerTargets(cfg, urls)[0]
	if d.schema != "" {
		a.repeat = append(a.repeat, "--schema="+finding.Word(d.schema))
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	defer progress.Wait(ctx, "waiting for the consumer's database: "+target.String())()
	return target.Connect(ctx, func(c *pgx.ConnConfig) {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	})
}

// consumerTargets are the databases of consumers that --database names, or the default one: the outbox's, on
// the primary if postgres.url is a standby, because that may not know of a consumer yet.
func (a *App) consumerTargets(cfg config.Config, urls []string) (all []postgres.Target) {
	from := "--database"
	for _, url := range urls {
		a.repeat = append(a.repeat, "--database="+finding.Word(config.HidePasswords(url)))
	}
	if len(urls) == 0 {
		urls, from = []string{cfg.Postgres.URL}, consumeradmin.DefaultDatabase
		for _, entry := range a.environ {
			if value, ok := strings.CutPrefix(entry, config.ConsumerDatabaseEnv+"="); ok && value != "" {
				urls, from = []string{value}, config.ConsumerDatabaseEnv
			}
		}
	}
	var where []string
	for _, url := range urls {
		// the search_path is the role's
		target := postgres.Target{Setting: from, URL: url, Pooled: true}
		if from == consumeradmin.DefaultDatabase && cfg.Postgres.WriteURL != url {
			target.Primary = cfg.Postgres.WriteURL
		}
		all, where = append(all, target), append(where, target.String())
	}
	a.where.Consumers = strings.Join(where, ", ")
	return all
}
