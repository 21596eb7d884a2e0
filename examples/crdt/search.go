package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
)

// search is the full-text index: each document's text, as its edits in the order in which they come give it.
var search = projection{
	name: "search",
	// A tsvector holds 1 MiB at most, so a long document is indexed by its beginning.
	tables: `
CREATE TABLE IF NOT EXISTS search (
  doc_id text PRIMARY KEY, events bigint NOT NULL, body text NOT NULL,
  words tsvector NOT NULL GENERATED ALWAYS AS (to_tsvector('simple', left(body, 100000))) STORED);
CREATE INDEX IF NOT EXISTS search_words ON search USING gin (words);`,
	apply: func(ctx context.Context, tx pgx.Tx, op *Op, _ []byte) error {
		var body string
		err := tx.QueryRow(ctx, "SELECT body FROM search WHERE doc_id = $1", op.Doc).Scan(&body)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO search AS s (doc_id, events, body) VALUES ($1, 1, $2)
			ON CONFLICT (doc_id) DO UPDATE SET events = s.events + 1, body = excluded.body`, op.Doc, string(apply([]rune(body), op.Edits)))
		return err
	},
	dump: "SELECT s::text FROM search s ORDER BY doc_id",
	seen: "SELECT coalesce(sum(events), 0)::bigint FROM search",
}

// Hit is a document that has what was searched for.
type Hit struct {
	Doc     string `json:"doc"`
	Excerpt string `json:"excerpt"` // what was found is between \x02 and \x03
}

// find searches the index.
func findText(ctx context.Context, db querier, words string) ([]Hit, error) {
	rows, err := db.Query(ctx, `SELECT doc_id, ts_headline('simple', body, q,
		E'StartSel=\x02,StopSel=\x03,MaxWords=12,MinWords=4')
		FROM search, websearch_to_tsquery('simple', $1) q WHERE words @@ q
		ORDER BY ts_rank(words, q) DESC, doc_id LIMIT 8`, words)
	if err != nil {
		return nil, err
	}
	return pgx.AppendRows([]Hit{}, rows, pgx.RowToStructByPos[Hit])
}
