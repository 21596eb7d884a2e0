package catalog

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/replication/postgres"
)

// PartitionStates is the name of the table in the outbox's schema that says which partitions Outflow has
// detached.
const PartitionStates = "outflow_partitions"

// DetachedPartitions returns the tables that were partitions of an outbox and wait, detached, until they may
// go: queries of the outbox don't read them any more. Neither that table nor those are believed where they
// belong to another role than the outbox.
//
// What queries of the outbox read is asked of pg_partition_tree, which goes by the newest catalog as they do,
// and not by the transaction's snapshot. Hold a lock on the outbox, so that it does not change.
func DetachedPartitions(ctx context.Context, q Querier, t Table) ([]Table, error) {
	states := pgx.Identifier{t.Schema, PartitionStates}.Sanitize()
	var there, readable bool
	err := q.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_class l JOIN pg_class r ON r.oid = $2
			AND r.relowner = l.relowner WHERE l.oid = to_regclass($1)),
		coalesce(has_table_privilege(to_regclass($1), 'SELECT'), false)`, states, t.OID).Scan(&there, &readable)
	if err != nil {
		return nil, fmt.Errorf("look for table %s: %w", states, err)
	}
	if !there {
		return nil, nil
	}
	if !readable {
		return nil, postgres.Fatal(nil, "no_right", "GRANT SELECT ON "+states+" TO PUBLIC",
			"the role may not read table %s, which says which partitions are detached", states)
	}
	rows, err := q.Query(ctx, `SELECT format('%I.%I', n.nspname, c.relname)
		FROM `+states+` l JOIN pg_class c ON c.oid = l.oid JOIN pg_namespace n ON n.oid = c.relnamespace
			JOIN pg_class r ON r.oid = $1 AND r.relowner = c.relowner
		WHERE l.root = $2 AND l.state NOT IN ('dropped', 'kept') AND l.horizon IS NULL
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
	var all []Table
	for _, name := range names {
		p, err := ReadTable(ctx, q, name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}
