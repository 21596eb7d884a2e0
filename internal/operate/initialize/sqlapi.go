package initialize

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/internal/operate/sqlapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// apiLock keeps concurrent runs of init from making the same objects.
const apiLock = "SELECT pg_advisory_xact_lock(hashtext('outflow.enqueue'))"

// SQLAPI makes the function outflow.enqueue for the table as it is, and the table of counters. The function
// is replaced each time; the counters are filled from the existing rows when their table is made.
func SQLAPI(ctx context.Context, cfg config.Config, report func(format string, args ...any),
	acceptOwners []string) error {
	pc := wiring.Setup(cfg)
	pc.AcceptOwners = acceptOwners
	pg, err := wiring.OpenSetup(ctx, cfg, pc)
	if err != nil {
		return err
	}
	defer pg.Close()
	api, err := apiOf(ctx, cfg, pg)
	if err != nil {
		return err
	}
	statements, there := append([]string{apiLock}, api.Function...), true
	if api.CounterTable != "" {
		if there, err = pg.HasTable(ctx, api.CounterTable); err != nil {
			return fmt.Errorf("look for table %s: %w", api.CounterTable, err)
		}
		if !there {
			statements = append(statements, api.Counters...)
		}
	}
	defer wiring.WaitPostgres(ctx, cfg)()
	err = pg.Run(ctx, "make function "+sqlapi.Name,
		"the right CREATE on the database, and on the schema of the table",
		catalog.Auxiliary{Schema: sqlapi.Schema, Table: api.CounterTable,
			Functions: append(sqlapi.ConsumerFunctions(), sqlapi.Function)},
		statements)
	if err != nil {
		return err
	}
	switch {
	case !there:
		report("%s: made", parts.Counters.Of(api.CounterTable))
	case api.CounterTable != "":
		report("%s: there", parts.Counters.Of(api.CounterTable))
	}
	report("%s: made", parts.Function.Of(sqlapi.Name))
	return nil
}

// SQLAPIStatements returns the statements of SQLAPI, to be run by hand: for the table as it is, or as init
// would make it.
func SQLAPIStatements(ctx context.Context, cfg config.Config) ([]string, error) {
	pg, err := wiring.OpenSetup(ctx, cfg, wiring.Setup(cfg))
	if err != nil {
		return nil, err
	}
	defer pg.Close()
	api, err := apiOf(ctx, cfg, pg)
	if err != nil {
		return nil, err
	}
	return api.Statements(), nil
}

func apiOf(ctx context.Context, cfg config.Config, pg *catalog.Setup) (*sqlapi.API, error) {
	l, err := wiring.Apply(ctx, cfg, pg)
	if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" {
		var t catalog.Table
		if t, err = catalog.PlannedTable(wiring.Setup(cfg)); err == nil {
			l, err = wiring.ApplyTo(cfg, t)
		}
	}
	if err != nil {
		return nil, err
	}
	return sqlapi.New(cfg, l)
}
