package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// PublicationUse is what decides whether a publication may be dropped.
type PublicationUse struct {
	Exists bool
	OID    uint32
	// what tells it from one that `outflow init` makes for the configured table; "": nothing
	Differs string
	Owned   bool     // the role may drop it
	Readers []string // application_name and pid of processes that stream it for another slot
	Slots   []string // further pgoutput slots of the database; which publications they read nobody knows
}

// PublicationUse reads it. Readers of other roles are seen by a role with pg_read_all_stats.
func (s *Setup) PublicationUse(ctx context.Context) (u PublicationUse, err error) {
	schemas := "0"
	if s.version >= 150000 {
		schemas = "(SELECT count(*) FROM pg_publication_namespace n WHERE n.pnpubid = p.oid)"
	}
	var all, insertOnly bool
	var inSchemas int
	var tables []string
	err = s.conn.QueryRow(ctx, `SELECT p.oid, p.puballtables,
			p.pubinsert AND NOT p.pubupdate AND NOT p.pubdelete AND NOT p.pubtruncate, `+schemas+`,
			pg_has_role(p.pubowner, 'USAGE'),
			ARRAY(SELECT concat(n.nspname, '.', c.relname) FROM pg_publication_rel r
				JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
				WHERE r.prpubid = p.oid ORDER BY 1 LIMIT 100)
		FROM pg_publication p WHERE p.pubname = $1`, s.cfg.Publication).
		Scan(&u.OID, &all, &insertOnly, &inSchemas, &u.Owned, &tables)
	if errors.Is(err, pgx.ErrNoRows) {
		return u, nil
	}
	fail := func(err error) (PublicationUse, error) {
		return PublicationUse{}, fmt.Errorf("read publication %s: %w", s.cfg.Publication, err)
	}
	if err != nil {
		return fail(err)
	}
	u.Exists = true
	var own []string
	if s.cfg.Table != "" {
		schema, name, err := SplitTable(s.cfg.Table)
		if err != nil {
			return fail(err)
		}
		own = []string{schema + "." + name}
	}
	others := slices.DeleteFunc(tables, func(t string) bool { return slices.Contains(own, t) })
	switch {
	case all:
		u.Differs = "it publishes all tables"
	case inSchemas > 0:
		u.Differs = "it publishes a whole schema"
	case len(others) > 0:
		u.Differs = "it publishes " + strings.Join(others, ", ")
	case !insertOnly:
		u.Differs = "it publishes more than inserts"
	}
	if u.Readers, err = s.texts(ctx, `SELECT format('%s (pid %s)', a.application_name, a.pid)
		FROM pg_stat_activity a JOIN pg_replication_slots s ON s.active_pid = a.pid
		WHERE s.slot_name <> $2 AND s.database = current_database()
			AND a.query LIKE 'START_REPLICATION SLOT %' AND position($1 IN a.query) > 0
		ORDER BY a.pid LIMIT 16`, postgres.Quote(s.cfg.Publication), s.cfg.Slot); err != nil {
		return fail(err)
	}
	if u.Slots, err = s.texts(ctx, `SELECT slot_name::text FROM pg_replication_slots
		WHERE plugin = 'pgoutput' AND database = current_database() AND slot_name <> $1
		ORDER BY 1 LIMIT 1000`, s.cfg.Slot); err != nil {
		return fail(err)
	}
	return u, nil
}

func (s *Setup) texts(ctx context.Context, sql string, args ...any) ([]string, error) {
	rows, err := s.conn.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// DropPublication drops the publication. One that is not there is no error.
func (s *Setup) DropPublication(ctx context.Context) error {
	return s.drop(ctx, "publication "+s.cfg.Publication,
		"DROP PUBLICATION IF EXISTS "+postgres.Quote(s.cfg.Publication))
}

// Functions lists the functions of a name, with their arguments as DROP FUNCTION takes them, and whether the
// body of each has a text in it.
func (s *Setup) Functions(ctx context.Context, schema, name, text string) (all []Function, err error) {
	rows, err := s.conn.Query(ctx, `SELECT format('%I.%I(%s)', n.nspname, p.proname,
			pg_get_function_identity_arguments(p.oid)), position($3 IN p.prosrc) > 0
		FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = $1 AND p.proname = $2 ORDER BY 1`, schema, name, text)
	if err == nil {
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Function])
	}
	if err != nil {
		return nil, fmt.Errorf("list the functions %s.%s: %w", schema, name, err)
	}
	return all, nil
}

// Function is one of them.
type Function struct {
	Signature string
	Has       bool
}

// DropFunctions drops functions, by their signatures, and then the schema if nothing else is in it.
func (s *Setup) DropFunctions(ctx context.Context, schema string, signatures []string) error {
	for _, signature := range signatures {
		if err := s.drop(ctx, "function "+signature, "DROP FUNCTION IF EXISTS "+signature); err != nil {
			return err
		}
	}
	err := s.drop(ctx, "schema "+schema, "DROP SCHEMA IF EXISTS "+postgres.Quote(schema))
	if postgres.SQLState(err) == postgres.StateDependentObjects {
		return nil // something of somebody else is in it
	}
	return err
}

func (s *Setup) drop(ctx context.Context, what, statement string) error {
	_, err := s.conn.Exec(ctx, statement)
	switch {
	case err == nil:
		return nil
	case postgres.SQLState(err) == postgres.StateInsufficientPrivilege:
		return &outbox.Fault{Class: outbox.Fatal, Code: "no_right", Message: "the role may not drop " + what,
			Err: err, Hint: "Let its owner run `" + statement + "`, then run the command again"}
	}
	return fmt.Errorf("drop %s: %w", what, err)
}

// Connected lists, by application_name and pid, what was connected for the slot before this connection was: a
// second outflow that stands by, or a command.
func (s *Setup) Connected(ctx context.Context) ([]string, error) {
	return s.texts(ctx, `SELECT format('%s (pid %s)', a.application_name, a.pid)
		FROM pg_stat_activity a, pg_stat_activity own
		WHERE own.pid = pg_backend_pid()
			AND (starts_with(a.application_name, $1) OR starts_with(a.application_name, $2)
				OR starts_with(a.application_name, $3))
			AND a.backend_start < own.backend_start ORDER BY a.pid LIMIT 16`,
		postgres.NamePrefix(s.cfg.Slot), postgres.CommandPrefix(s.cfg.Slot), postgres.WaitsPrefix(s.cfg.Slot))
}

// Writers names the open transactions, prepared ones among them, that may have written rows of a table or of
// its partitions: those that hold the lock that writing takes.
func (s *Setup) Writers(ctx context.Context, table uint32) ([]string, error) {
	return s.texts(ctx, `WITH RECURSIVE tree AS (SELECT $1::oid AS relid
			UNION SELECT i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.relid)
		SELECT DISTINCT CASE WHEN l.pid IS NULL THEN format('prepared transaction %s', p.gid)
			ELSE format('server process %s', l.pid) END
		FROM pg_locks l JOIN tree t ON t.relid = l.relation
			LEFT JOIN pg_locks own ON own.pid IS NULL AND own.virtualtransaction = l.virtualtransaction
				AND own.locktype = 'transactionid' AND own.mode = 'ExclusiveLock'
			LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
		WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		ORDER BY 1 LIMIT 16`, table)
}
