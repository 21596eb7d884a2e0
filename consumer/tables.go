package consumer

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The consumer's tables. outflow_mark is updated in every transaction: spare room in its pages allows HOT
// updates.
const tables = `CREATE TABLE IF NOT EXISTS %soutflow_consumer (
  name text PRIMARY KEY, stream text NOT NULL, stream_created timestamptz, replay_created timestamptz,
  filters text[] NOT NULL,                  -- sorted
  keying text NOT NULL, partitions int NOT NULL,   -- how a message's document is found, and divided; 0: there are no marks yet
  wanted_keying text, wanted_partitions int, barrier bigint, -- the next layout: nothing is done beyond this stream sequence until all marks are there
  replayed_to bigint NOT NULL DEFAULT 0,    -- events up to this stream sequence are marked as replayed
  epoch bigint NOT NULL DEFAULT 0);         -- the newest that was given to claims
CREATE TABLE IF NOT EXISTS %soutflow_member ( -- the instances; one that has expired counts as dead
  name text NOT NULL, instance text NOT NULL, joined timestamptz NOT NULL, expires timestamptz NOT NULL,
  PRIMARY KEY (name, instance));
CREATE TABLE IF NOT EXISTS %soutflow_mark (
  name text NOT NULL, source text NOT NULL, -- live or replay
  partition int NOT NULL,
  owner text,                               -- the instance that has claimed the partition (in live), for as long as it is a member; hung: and an instance: that one has given it up
  epoch bigint NOT NULL,                    -- of the claim that may move it
  seq bigint NOT NULL,                      -- stream sequence of the message up to which the partition is done
  due pg_lsn NOT NULL, n bigint NOT NULL, lsn pg_lsn NOT NULL, i bigint NOT NULL, -- of its header
  holed boolean NOT NULL DEFAULT false,     -- the broker has lost that message, and what it had comes again under new sequences
  updated_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (name, source, partition)) WITH (fillfactor = 50);
`

// Tables returns the SQL that creates the consumer's tables if they are missing; schema may be empty. The
// consumer runs it itself unless Config.NoCreate is set.
func Tables(schema string) string {
	prefix := ""
	if schema != "" {
		prefix = pgx.Identifier{schema}.Sanitize() + "."
	}
	return strings.ReplaceAll(tables+parkedSchema, "%s", prefix)
}

// create creates the tables. If all of them exist it needs no right to create. Several instances may call it
// at once.
func (s *postgres) create(ctx context.Context) error {
	var exist bool
	err := s.pool.QueryRow(ctx,
		`SELECT pg_catalog.to_regclass($1) IS NOT NULL AND pg_catalog.to_regclass($2) IS NOT NULL
			AND pg_catalog.to_regclass($3) IS NOT NULL AND pg_catalog.to_regclass($4) IS NOT NULL`,
		s.table("outflow_consumer"), s.table("outflow_mark"), s.table("outflow_parked"),
		s.table("outflow_member")).Scan(&exist)
	if err != nil {
		return err
	}
	if err := s.checkOwners(ctx); err != nil || exist {
		return err
	}
	if err := s.checkVersion(ctx); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// IF NOT EXISTS does not protect against another instance that does the same concurrently.
		if _, err := tx.Exec(ctx,
			`SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('outflow_consumer'))`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, Tables(s.cfg.DatabaseSchema))
		return err
	})
}

// checkVersion refuses the tables of a version in which one instance had all partitions.
func (s *postgres) checkVersion(ctx context.Context) error {
	var old bool
	err := s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute
		WHERE attrelid = pg_catalog.to_regclass($1) AND attname = 'before'::pg_catalog.name
			AND NOT attisdropped)`, s.table("outflow_consumer")).Scan(&old)
	if err != nil || !old {
		return err
	}
	return fault(ErrSetup, nil, "Note where its consumers are (SELECT name, min(seq) FROM outflow_mark "+
		"GROUP BY name), stop them, drop outflow_consumer and outflow_mark, start this version, and set it "+
		"to there: `outflow consumer rewind`", "table %s is of an older version",
		s.table("outflow_consumer"))
}

// checkOwners refuses tables that anybody could have created: every role may create in their schema, and
// their owner is neither this role, nor one that it is a member of, nor the database's owner, nor a
// superuser. A trigger on such a table would run with our rights.
func (s *postgres) checkOwners(ctx context.Context) error {
	var table, owner string
	err := s.pool.QueryRow(ctx, `SELECT c.relname::pg_catalog.text, o.rolname::pg_catalog.text
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		JOIN pg_catalog.pg_roles o ON o.oid = c.relowner,
			pg_catalog.pg_roles me, pg_catalog.pg_database d
		WHERE c.oid IN (pg_catalog.to_regclass($1)::pg_catalog.oid,
		pg_catalog.to_regclass($2)::pg_catalog.oid, pg_catalog.to_regclass($3)::pg_catalog.oid,
		pg_catalog.to_regclass($5)::pg_catalog.oid)
			AND me.rolname = current_user AND d.datname = pg_catalog.current_database()
			AND NOT o.rolsuper AND o.oid <> me.oid AND o.oid <> d.datdba
			AND o.rolname::pg_catalog.text <> ALL ($4::pg_catalog.text[])
			AND (me.rolsuper OR NOT pg_catalog.pg_has_role(me.oid, o.oid, 'MEMBER'::pg_catalog.text))
			AND EXISTS (SELECT FROM pg_catalog.aclexplode(coalesce(n.nspacl,
			pg_catalog.acldefault('n'::"char", n.nspowner))) a
				WHERE a.grantee = 0::pg_catalog.oid AND a.privilege_type = 'CREATE'::pg_catalog.text)
		LIMIT 1`, s.table("outflow_consumer"), s.table("outflow_mark"), s.table("outflow_parked"), append([]string{}, s.cfg.AcceptOwners...), s.table("outflow_member")).
		Scan(&table, &owner)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return fault(ErrSetup, nil, "Find out who made it and why. If it is to be used, name the role in "+
		"Config.AcceptOwners, or set Config.NoCreate; else drop it",
		"table %s belongs to role %q, in a schema in which every role may create", table, owner)
}
