package catalog

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Auxiliary is what is made beside the outbox: it is found or made, and used with the rights of those who
// write events.
type Auxiliary struct {
	Schema    string // with all functions of these names in it
	Functions []string
	Table     string // quoted; "" for none
}

// owner lists roles and whether their objects may be used. A role is trusted if it could do what it likes
// anyway, or if whoever runs the command answers for it: itself, the database's owner, a superuser, or a role
// that it was made a member of. (A superuser counts as a member of every role, which says nothing.)
const owner = `SELECT o.oid, o.rolname, o.rolsuper OR o.oid = me.oid OR o.oid = d.datdba
	OR o.rolname = 'pg_database_owner'
		OR NOT me.rolsuper AND pg_has_role(me.oid, o.oid, 'MEMBER') AS trusted
	FROM pg_roles o, pg_roles me, pg_database d WHERE me.rolname = current_user
	AND d.datname = current_database()`

// checkTableOwner refuses a table that anybody could have made: its owner is not trusted, and every role may
// create in its schema. Otherwise somebody gave the owner the right to create there, and the table is taken
// to be meant as the outbox.
func (s *Setup) checkTableOwner(ctx context.Context, t Table) error {
	var name string
	var trusted bool
	err := s.conn.QueryRow(ctx, `WITH owner AS (`+owner+`)
		SELECT o.rolname, o.trusted OR o.rolname = ANY($2) OR NOT EXISTS (
			SELECT FROM aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a WHERE a.grantee = 0 AND a.privilege_type = 'CREATE')
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN owner o ON o.oid = c.relowner WHERE c.oid = $1`,
		t.OID, append([]string{}, s.cfg.AcceptOwners...)).Scan(&name, &trusted)
	if err != nil {
		return fmt.Errorf("read the owner of table %s.%s: %w", t.Schema, t.Name, err)
	}
	if trusted {
		return nil
	}
	return foreignOwner("table "+t.Quoted(), name, fmt.Sprintf("in whose schema every role may create "+
		"(REVOKE CREATE ON SCHEMA %s FROM PUBLIC)", postgres.Quote(t.Schema)))
}

// checkAuxiliary refuses what another role has made: that role can change it at any time, and it runs with
// the rights of whoever writes an event. The outbox's owner may own it.
func checkAuxiliary(ctx context.Context, tx pgx.Tx, cfg SetupConfig, b Auxiliary) error {
	table := ""
	if cfg.Table != "" {
		schema, name, err := SplitTable(cfg.Table)
		if err != nil {
			return err
		}
		table = pgx.Identifier{schema, name}.Sanitize()
	}
	var what, name string
	rows, err := tx.Query(ctx, `WITH owner AS (`+owner+`), things AS (
			SELECT 1 AS n, concat('schema ', quote_ident(nspname)) AS what, nspowner AS owner FROM pg_namespace WHERE nspname = $1
			UNION ALL SELECT 2, concat('function ', p.oid::regprocedure), proowner
				FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = ANY($2)
			UNION ALL SELECT 3, concat('table ', c.oid::regclass), relowner FROM pg_class c WHERE c.oid = to_regclass(nullif($3, ''))
		)
		SELECT t.what, o.rolname FROM things t JOIN owner o ON o.oid = t.owner
		WHERE NOT o.trusted AND o.rolname <> ALL($4) AND o.oid IS DISTINCT FROM (SELECT relowner FROM pg_class WHERE oid = to_regclass(nullif($5, '')))
		ORDER BY t.n, t.what LIMIT 1`, b.Schema, b.Functions, b.Table, append([]string{}, cfg.AcceptOwners...), table)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&what, &name}, func() error {
			return foreignOwner(what, name, "who can change it at any time")
		})
	}
	if err != nil && outbox.FaultOf(err) == nil {
		return fmt.Errorf("read who owns what is there: %w", err)
	}
	return err
}

func foreignOwner(what, owner, why string) error {
	return postgres.Fatal(nil, "foreign_owner", fmt.Sprintf("Find out who made it and why. If it is to be "+
		"used, give --accept-owner %s; else drop it", owner),
		"%s belongs to role %q, %s", what, owner, why)
}

// ForeignKept is the fault of a table that Outflow keeps beside an outbox, and that belongs to another role.
// It may be that of another outbox in the same schema, which needs what it says.
func ForeignKept(table, owner, ours string) error {
	return postgres.Fatal(nil, "foreign_owner", fmt.Sprintf("If role %[1]s has an outbox in this schema, "+
		"leave the table to it and move this outbox to a schema of its own (ALTER TABLE ... SET SCHEMA), or "+
		"let one role own both. If the outbox was given to %[2]s and %[1]s has none, give "+
		"%[2]s the table as well (ALTER TABLE ... OWNER TO). If nobody knows the table, drop it",
		owner, ours), "table %s belongs to role %q, the outbox to %q", table, owner, ours)
}
