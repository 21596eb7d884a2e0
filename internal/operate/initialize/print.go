package initialize

import (
	"context"
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Statements returns the SQL that makes the table and the publication, for a role that may run it. What
// exists and fits is only a comment. If PostgreSQL doesn't answer, it is the SQL for an empty database, and
// says so. The slot is not part of it: init never adopts a slot that no record announces.
func Statements(ctx context.Context, cfg config.Config) ([]string, error) {
	sc := wiring.Setup(cfg)
	all, err := catalog.Statements(sc)
	if err != nil {
		return nil, err
	}
	for i := range all {
		all[i] += ";"
	}
	all = all[:len(all)-1]
	publication := len(all) - 1
	pg, err := wiring.OpenSetup(ctx, cfg, sc)
	if err != nil {
		if outbox.FaultOf(err) != nil && outbox.ClassOf(err) == outbox.Usage {
			return nil, err
		}
		return append([]string{"-- PostgreSQL does not answer, so this is for a database that has neither " +
			"of it:\n-- " +
			strings.Join(strings.Fields(err.Error()), " ")}, all...), nil
	}
	defer pg.Close()
	missing := func(err error, code string) bool {
		f := outbox.FaultOf(err)
		return f != nil && f.Code == code
	}
	l, err := wiring.Apply(ctx, cfg, pg)
	switch {
	case missing(err, "table_missing"):
		return all, nil
	case err == nil:
		err = l.CheckKey()
	}
	if err != nil {
		return nil, err
	}
	if cfg.Source.Rows() {
		all[0] = fmt.Sprintf("-- table %s: there", cfg.Table)
	}
	pg.SetColumns(l.Needed())
	switch id, err := pg.Publication(ctx); {
	case err == nil && id.Hidden != nil:
		return nil, id.Hidden
	case err == nil:
		all[publication] = fmt.Sprintf("-- publication %s: there", cfg.Publication)
	case !missing(err, "publication_missing"):
		return nil, err
	}
	return all, nil
}
