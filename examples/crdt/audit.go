package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/jackc/pgx/v5"
)

// audit is the log of all operations, to which one can only append. Each entry's hash is over the hash before
// it and the event, so the newest hash of a document stands for all that happened to it, and in which order.
var audit = projection{
	name: "audit",
	tables: `
CREATE TABLE IF NOT EXISTS audit (
  doc_id text NOT NULL, n bigint NOT NULL, version bigint NOT NULL, actor text NOT NULL,
  counter bigint NOT NULL, hash text NOT NULL,
  PRIMARY KEY (doc_id, n));
CREATE OR REPLACE FUNCTION audit_refuses() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN RAISE EXCEPTION 'the audit log is for appending only'; END $$;
CREATE OR REPLACE TRIGGER audit_appends_only BEFORE UPDATE OR DELETE ON audit
FOR EACH ROW EXECUTE FUNCTION audit_refuses();`,
	apply: func(ctx context.Context, tx pgx.Tx, op *Op, data []byte) error {
		var n int64
		var before string
		err := tx.QueryRow(ctx, "SELECT n, hash FROM audit WHERE doc_id = $1 ORDER BY n DESC LIMIT 1",
			op.Doc).Scan(&n, &before)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		sum := sha256.Sum256(append([]byte(before), data...))
		_, err = tx.Exec(ctx, "INSERT INTO audit VALUES ($1, $2, $3, $4, $5, $6)",
			op.Doc, n+1, op.Version, op.Actor, op.Counter, hex.EncodeToString(sum[:]))
		return err
	},
	dump: "SELECT a::text FROM audit a ORDER BY doc_id, n",
	seen: "SELECT count(*) FROM audit",
}
