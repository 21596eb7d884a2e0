package main

import (
	"context"
	"errors"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// billing is what people owe, in tenths of a cent. Whoever takes the pen from somebody else pays a turn; each
// character that is written costs more in a longer document. Both depend on what came before: the order is
// money.
var billing = projection{
	name: "billing",
	tables: `
CREATE TABLE IF NOT EXISTS billing_document (
  doc_id text PRIMARY KEY, events bigint NOT NULL, pen text NOT NULL, turns bigint NOT NULL,
  length bigint NOT NULL);
CREATE TABLE IF NOT EXISTS billing_account (
  doc_id text NOT NULL, person text NOT NULL, amount bigint NOT NULL, PRIMARY KEY (doc_id, person));`,
	apply: func(ctx context.Context, tx pgx.Tx, op *Op, _ []byte) error {
		m := meter{}
		err := tx.QueryRow(ctx, "SELECT pen, turns, length FROM billing_document WHERE doc_id = $1",
			op.Doc).Scan(&m.pen, &m.turns, &m.length)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		amount := m.charge(op)
		both := &pgx.Batch{}
		both.Queue(`INSERT INTO billing_document AS b VALUES ($1, 1, $2, $3, $4)
			ON CONFLICT (doc_id) DO UPDATE
			SET events = b.events + 1, pen = excluded.pen, turns = excluded.turns, length = excluded.length`, op.Doc, m.pen, m.turns, m.length)
		both.Queue(`INSERT INTO billing_account AS b VALUES ($1, $2, $3)
			ON CONFLICT (doc_id, person) DO UPDATE
			SET amount = b.amount + excluded.amount`, op.Doc, person(op.Actor), amount)
		return tx.SendBatch(ctx, both).Close()
	},
	dump: `SELECT b::text FROM (SELECT 1 AS part, doc_id, '' AS person, d::text AS b FROM billing_document d
		UNION ALL SELECT 2, doc_id, person, a::text FROM billing_account a) b ORDER BY part, doc_id, person`,
	seen: "SELECT coalesce(sum(events), 0)::bigint FROM billing_document",
}

// The prices, in tenths of a cent.
const (
	pricePerTurn = 50
	priceShort   = 1 // per character, while the document has fewer than tierLong
	priceLong    = 2
	tierLong     = 2000 // characters
)

// meter is the state of a document's bill.
type meter struct {
	pen    string // who wrote last
	turns  int64
	length int64 // of the text
}

// charge returns what an operation costs its author.
func (m *meter) charge(op *Op) (amount int64) {
	if who := person(op.Actor); who != m.pen {
		m.pen = who
		m.turns++
		amount += pricePerTurn
	}
	for _, e := range op.Edits {
		price := int64(priceShort)
		if m.length >= tierLong {
			price = priceLong
		}
		written := int64(utf8.RuneCountInString(e.Ins))
		amount += price * written
		m.length = max(0, m.length-int64(e.Del)) + written
	}
	return amount
}
