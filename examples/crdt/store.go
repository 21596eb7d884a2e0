package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/producer"
)

//go:embed schema.sql
var serviceSchema string

// store is the documents in PostgreSQL.
type store struct {
	pool   *pgxpool.Pool
	outbox *producer.Outbox
}

func newStore(pool *pgxpool.Pool) (*store, error) {
	outbox, err := producer.New(producer.Config{})
	return &store{pool, outbox}, err
}

// Stored says where an operation is in its document.
type Stored struct {
	Actor    string `json:"actor"`
	Counter  int64  `json:"counter"`
	Version  int64  `json:"version"`
	Repeated bool   `json:"repeated,omitempty"` // it was there already
}

// conflictError is an operation that does not fit what is stored: 409.
type conflictError struct {
	Actor    string `json:"actor"`
	Counter  int64  `json:"counter"`
	Expected int64  `json:"expected"` // counter
	Reason   string `json:"error"`
}

func (e *conflictError) Error() string { return e.Reason }

// staleError is an operation whose edits were made on another version than the document has: 412.
type staleError struct {
	Version int64  `json:"version"` // of the document
	Reason  string `json:"error"`
}

func (e *staleError) Error() string { return e.Reason }

// append stores operations and their events in one transaction and returns where they are. base, if it is not
// negative, is the version that the first new operation's edits were made on.
func (s *store) append(ctx context.Context, doc string, base int64, ops []Op) (version int64, stored []Stored,
	err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// The document's row is locked until the commit, so a document's versions are committed one after the
		// other, and the order in the WAL is their order.
		if err := tx.QueryRow(ctx, `INSERT INTO document (id) VALUES ($1) ON CONFLICT (id) DO UPDATE
			SET id = excluded.id
			RETURNING version`, doc).Scan(&version); err != nil {
			return err
		}
		fresh, known, err := sift(ctx, tx, doc, ops)
		if err != nil {
			return err
		}
		stored = known
		if len(fresh) > 0 && base >= 0 && base != version {
			return &staleError{version,
				fmt.Sprintf("the edits were made on version %d, the document has version %d: "+
					"get what is missing, make the edits anew and send them again", base, version)}
		}
		events := make([]producer.Event, 0, len(fresh))
		inserts := &pgx.Batch{}
		for _, op := range fresh {
			version++
			op.Doc, op.Version = doc, version
			body, err := json.Marshal(op)
			if err != nil {
				return err
			}
			inserts.Queue("INSERT INTO operation VALUES ($1, $2, $3, $4, $5)", doc, version, op.Actor,
				op.Counter, body)
			events = append(events, producer.Event{Document: doc, Actor: op.Actor, Counter: op.Counter,
				Payload: body})
			stored = append(stored, Stored{Actor: op.Actor, Counter: op.Counter, Version: version})
		}
		if len(fresh) == 0 {
			return nil
		}
		inserts.Queue("UPDATE document SET version = $2 WHERE id = $1", doc, version)
		if err := tx.SendBatch(ctx, inserts).Close(); err != nil {
			return err
		}
		_, err = s.outbox.Enqueue(ctx, tx, events...)
		return err
	})
	return version, stored, err
}

// sift parts the operations that are new from those that are there already, and refuses what fits neither.
func sift(ctx context.Context, tx pgx.Tx, doc string, ops []Op) (fresh []Op, known []Stored, err error) {
	last := map[string]int64{}
	for _, op := range ops {
		newest, seen := last[op.Actor]
		if !seen {
			err := tx.QueryRow(ctx, "SELECT coalesce(max(counter), 0) FROM operation WHERE doc_id = $1 AND "+
				"actor = $2", doc, op.Actor).Scan(&newest)
			if err != nil {
				return nil, nil, err
			}
		}
		switch {
		case op.Counter == newest+1:
			fresh = append(fresh, op)
			newest++
		case op.Counter > newest+1:
			return nil, nil, &conflictError{op.Actor, op.Counter, newest + 1, fmt.Sprintf(
				"%s's operation %d does not follow: %d is expected", op.Actor, op.Counter, newest+1)}
		default:
			version, err := find(ctx, tx, doc, op, newest)
			if err != nil {
				return nil, nil, err
			}
			known = append(known, Stored{op.Actor, op.Counter, version, true})
		}
		last[op.Actor] = newest
	}
	return fresh, known, nil
}

// find returns the version of an operation that is said to be there. The same counter with another update is
// not the same operation.
func find(ctx context.Context, tx pgx.Tx, doc string, op Op, newest int64) (version int64, err error) {
	var body []byte
	err = tx.QueryRow(ctx, "SELECT version, body FROM operation WHERE doc_id = $1 AND actor = $2 AND "+
		"counter = $3",
		doc, op.Actor, op.Counter).Scan(&version, &body)
	var there Op
	switch {
	case errors.Is(err, pgx.ErrNoRows): // twice in one request
	case err != nil:
		return 0, err
	default:
		if err := json.Unmarshal(body, &there); err != nil {
			return 0, err
		}
	}
	if !bytes.Equal(there.Update, op.Update) {
		return 0, &conflictError{op.Actor, op.Counter, newest + 1, fmt.Sprintf(
			"%s's counter %d is taken by another operation: %d is expected", op.Actor, op.Counter, newest+1)}
	}
	return version, nil
}

// pageSize is how many operations one answer holds at most.
const pageSize = 1000

// since returns the operations after a version, as JSON, pageSize at most, and the document's version.
func (s *store) since(ctx context.Context, doc string, after int64) (version int64, ops []json.RawMessage,
	err error) {
	ops = []json.RawMessage{}
	rows, err := s.pool.Query(ctx, "SELECT body FROM operation WHERE doc_id = $1 AND version > $2 ORDER BY "+
		"version LIMIT $3",
		doc, after, pageSize)
	if err != nil {
		return 0, nil, err
	}
	if ops, err = pgx.AppendRows(ops, rows, pgx.RowTo[json.RawMessage]); err != nil {
		return 0, nil, err
	}
	// Read after the operations: a client that has fewer asks again.
	err = s.pool.QueryRow(ctx, "SELECT coalesce(max(version), 0) FROM document WHERE id = $1",
		doc).Scan(&version)
	return version, ops, err
}
