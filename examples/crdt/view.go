package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/jackc/pgx/v5"
)

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// View is what the projections hold of one document.
type View struct {
	Search  SearchView  `json:"search"`
	Audit   []Entry     `json:"audit"` // the newest first
	Billing BillingView `json:"billing"`
}

// SearchView is a document in the index.
type SearchView struct {
	Events int64  `json:"events"`
	Body   string `json:"body"`
	Words  int64  `json:"words"`
	Digest string `json:"digest"` // SHA-256 of the text
}

// Entry is one of the audit log.
type Entry struct {
	N       int64  `json:"n"`
	Version int64  `json:"version"`
	Actor   string `json:"actor"`
	Counter int64  `json:"counter"`
	Hash    string `json:"hash"`
}

// BillingView is a document's bill.
type BillingView struct {
	Turns    int64     `json:"turns"`
	Accounts []Account `json:"accounts"`
}

// Account is what one person owes for a document, in tenths of a cent.
type Account struct {
	Person string `json:"person"`
	Amount int64  `json:"amount"`
}

const auditTail = 6

func viewOf(ctx context.Context, db querier, doc string) (v View, err error) {
	err = db.QueryRow(ctx, "SELECT events, body, length(words) FROM search WHERE doc_id = $1", doc).Scan(
		&v.Search.Events, &v.Search.Body, &v.Search.Words)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return v, err
	}
	v.Search.Digest = digest([]byte(v.Search.Body))
	rows, err := db.Query(ctx, "SELECT n, version, actor, counter, hash FROM audit WHERE doc_id = $1 ORDER "+
		"BY n DESC LIMIT $2", doc, auditTail)
	if err != nil {
		return v, err
	}
	if v.Audit, err = pgx.AppendRows([]Entry{}, rows, pgx.RowToStructByPos[Entry]); err != nil {
		return v, err
	}
	err = db.QueryRow(ctx, "SELECT turns FROM billing_document WHERE doc_id = $1", doc).Scan(&v.Billing.Turns)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return v, err
	}
	rows, err = db.Query(ctx, "SELECT person, amount FROM billing_account WHERE doc_id = $1 ORDER BY person",
		doc)
	if err != nil {
		return v, err
	}
	v.Billing.Accounts, err = pgx.AppendRows([]Account{}, rows, pgx.RowToStructByPos[Account])
	return v, err
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
