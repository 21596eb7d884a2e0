package catalog

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/replication/postgres"
)

// PartitionStates is the name of the table, beside the outbox, that says which partitions Outflow has
// detached.
const PartitionStates = "outflow_partitions"

// The conditions of the rows l of a table that Outflow keeps beside an outbox. They have the outbox's name as
// root, its OID as root_oid (an older version had no such column), and the cluster that the OID is of as
// root_system, or as system_id.
const (
	// Here holds where OIDs of the row are of this database, not of one that it was restored from.
	Here = `(coalesce(to_jsonb(l)->>'root_system', l.system_id) = (SELECT system_identifier::text FROM pg_control_system()) AND
		(to_jsonb(l)->>'root_oid' IS NULL OR
			EXISTS (SELECT FROM pg_class r WHERE r.oid = (to_jsonb(l)->>'root_oid')::oid)))`
	// OfRoot holds where the row is of the outbox with OID $1 and name $2: by its OID, which it keeps under
	// another name and in another schema, and by its name only where its OID is not known here.
	OfRoot = `CASE WHEN ` + Here + ` THEN coalesce((to_jsonb(l)->>'root_oid')::oid = $1, l.root = $2)
		ELSE l.root = $2 END`
)

// A Kept table is one that Outflow keeps beside an outbox.
type Kept struct {
	Schema   string
	Table    string // schema and name, quoted
	Own      bool   // it is in the outbox's schema
	Readable bool   // by this role
}

// Beside returns the tables of that name that may have rows of an outbox, the one in its schema first. An
// outbox that was moved to another schema has left it behind. Only those of its owner are believed.
func Beside(ctx context.Context, q Querier, t Table, name string) (all []Kept, err error) {
	rows, err := q.Query(ctx, `SELECT * FROM (SELECT n.nspname, n.oid = r.relnamespace AS own,
			has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS readable
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			JOIN pg_class r ON r.oid = $1 AND r.relowner = c.relowner
		WHERE c.relname = $2 AND c.relkind = 'r' AND c.relpersistence <> 't' AND (n.oid = r.relnamespace
			OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'root_oid'))) x
		WHERE own OR readable ORDER BY NOT own, nspname`, t.OID, name)
	if err == nil {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (k Kept, err error) {
			err = row.Scan(&k.Schema, &k.Own, &k.Readable)
			k.Table = pgx.Identifier{k.Schema, name}.Sanitize()
			return k, err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("look for tables %s of %s: %w", name, t.Quoted(), err)
	}
	return all, nil
}

// A Former table of states is one that an outbox has, or may have, left behind in another schema.
type Former struct {
	Table string // quoted
	// Doubt says why it may be another outbox's; "": it has rows of this one
	Doubt string
}

// formerWait is how long the lock on a table that is only named is waited for.
const formerWait = time.Second

// StatesElsewhere returns the tables of states in other schemas that an outbox has left behind where it was
// moved: those with rows of it, and those of which its rows may have been taken along.
func (s *Setup) StatesElsewhere(ctx context.Context, table string) (all []Former, err error) {
	var t Table
	if t.Schema, t.Name, err = SplitTable(table); err != nil {
		return nil, err
	}
	if err := s.conn.QueryRow(ctx, "SELECT coalesce(to_regclass($1)::oid, 0)", t.Quoted()).
		Scan(&t.OID); err != nil {
		return nil, fmt.Errorf("look for table %s: %w", t.Quoted(), err)
	}
	kept, err := Beside(ctx, s.conn, t, PartitionStates)
	if err != nil {
		return nil, err
	}
	for _, k := range kept {
		if k.Own {
			continue
		}
		var left, empty bool
		err := pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", formerWait.Milliseconds()))
			if err != nil {
				return err
			}
			return tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+k.Table+" l WHERE "+OfRoot+"), "+
				"NOT EXISTS (SELECT FROM "+k.Table+")", t.OID, t.Quoted()).Scan(&left, &empty)
		})
		switch {
		case postgres.SQLState(err) == postgres.StateLockNotAvailable:
			all = append(all, Former{k.Table, "is locked and was not read"})
		case err != nil:
			return nil, fmt.Errorf("read table %s: %w", k.Table, err)
		case left:
			all = append(all, Former{Table: k.Table})
		case empty:
			all = append(all, Former{k.Table, "is empty"})
		}
	}
	return all, nil
}

// DetachedPartitions returns the tables that were partitions of an outbox and wait, detached, until they may
// go: queries of the outbox don't read them any more. Neither the table of states nor those are believed
// where they belong to another role than the outbox.
//
// What queries of the outbox read is asked of pg_partition_tree, which goes by the newest catalog as they do,
// and not by the transaction's snapshot. Hold a lock on the outbox, so that it does not change.
func DetachedPartitions(ctx context.Context, q Querier, t Table) (all []Table, err error) {
	kept, err := Beside(ctx, q, t, PartitionStates)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, states := range kept {
		if !states.Readable {
			return nil, postgres.Fatal(nil, "no_right", "GRANT SELECT ON "+states.Table+" TO PUBLIC",
				"the role may not read table %s, which says which partitions are detached", states.Table)
		}
		rows, err := q.Query(ctx, `SELECT format('%I.%I', n.nspname, c.relname)
			FROM `+states.Table+` l JOIN pg_class c ON c.oid = CASE WHEN `+Here+` THEN l.oid
				ELSE to_regclass(l.name)::oid END JOIN pg_namespace n ON n.oid = c.relnamespace
				JOIN pg_class o ON o.oid = $1 AND o.relowner = c.relowner
			WHERE `+OfRoot+` AND l.state NOT IN ('dropped', 'kept') AND l.horizon IS NULL
				AND c.relkind = 'r' AND c.relpersistence = 'p'
				AND c.oid NOT IN (SELECT relid FROM pg_partition_tree($1::oid::regclass)) ORDER BY l.lower, 1`,
			t.OID, t.Quoted())
		if err != nil {
			return nil, fmt.Errorf("read which partitions of %s are detached: %w", t.Quoted(), err)
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, fmt.Errorf("read which partitions of %s are detached: %w", t.Quoted(), err)
		}
		for _, name := range names {
			if seen[name] {
				continue
			}
			seen[name] = true
			p, err := ReadTable(ctx, q, name)
			if err != nil {
				return nil, err
			}
			all = append(all, p)
		}
	}
	return all, nil
}
