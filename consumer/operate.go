package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/outbox"
)

// DB is what a pool, a connection and a transaction have in common.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Parked lists the parked events in a consumers' database, and asks for their release, which is done by the
// running consumer. The command outflow parked uses it. Errors that concern the operator are an
// [outbox.Fault].
type Parked struct {
	db                        DB
	consumers, members, table string // quoted
}

// NewParked returns the parked events of the consumers whose tables are in a schema of a database; if it is
// empty, the connection's search_path decides.
func NewParked(db DB, schema string) *Parked {
	return &Parked{db: db, consumers: inSchema(schema, "outflow_consumer"),
		members: inSchema(schema, "outflow_member"), table: inSchema(schema, "outflow_parked")}
}

// ParkedDocument is a parked document. The JSON names are stable.
type ParkedDocument struct {
	Consumer string    `json:"consumer"`
	Document string    `json:"document"`
	Events   int64     `json:"events"`         // including the first one
	Release  string    `json:"release"`        // retry or skip if it is to be released; otherwise empty
	First    ParkedRow `json:"first"`          // the event that failed
	Last     time.Time `json:"last_parked_at"` // when the newest one was parked
}

// ParkedRow is a parked event.
type ParkedRow struct {
	Order    int64       `json:"order"`  // events are released in this order, replayed ones first
	Source   string      `json:"source"` // live or replay
	Sequence int64       `json:"sequence"`
	Position string      `json:"position"`
	ID       string      `json:"id"`
	Subject  string      `json:"subject"`
	Cause    string      `json:"cause"` // poison: it failed; behind: an earlier one did
	Error    string      `json:"error,omitempty"`
	Attempts int         `json:"attempts"`
	Time     time.Time   `json:"published_at"`
	ParkedAt time.Time   `json:"parked_at"`
	Bytes    int64       `json:"bytes"`
	Headers  ParkedBytes `json:"headers,omitempty"` // only from Events, as is Data
	Data     ParkedBytes `json:"data,omitempty"`
}

// ParkedBytes are bytes that are marshalled as they are if they are JSON, otherwise as a base64 string.
type ParkedBytes []byte

// MarshalJSON implements [json.Marshaler].
func (b ParkedBytes) MarshalJSON() ([]byte, error) {
	if json.Valid(b) {
		return b, nil
	}
	return json.Marshal([]byte(b))
}

// List returns the parked documents of one consumer or of all (""), at most limit, ordered by name.
func (p *Parked) List(ctx context.Context, consumer string, limit int) ([]ParkedDocument, error) {
	if consumer != "" {
		if err := p.Known(ctx, consumer); err != nil {
			return nil, err
		}
	}
	rows, err := p.db.Query(ctx, `WITH RECURSIVE d AS (
			(SELECT name, document FROM `+p.table+` WHERE $1 IN ('', name) ORDER BY name, document LIMIT 1)
			UNION ALL
			SELECT n.name, n.document FROM d, LATERAL (
				SELECT t.name, t.document FROM `+p.table+` t WHERE (t.name, t.document) > (d.name, d.document) AND $1 IN ('', t.name)
				ORDER BY t.name, t.document LIMIT 1) AS n
		)
		SELECT d.name, d.document, `+rowColumns+`, f.release,
			(SELECT count(*) FROM `+p.table+` t WHERE t.name = d.name AND t.document = d.document),
			(SELECT max(t.parked_at) FROM `+p.table+` t WHERE t.name = d.name AND t.document = d.document)
		FROM d, LATERAL (SELECT * FROM `+p.table+` t WHERE t.name = d.name AND t.document = d.document ORDER BY `+
		parkedOrder+` LIMIT 1) AS f
		LIMIT $2`, consumer, limit)
	if err != nil {
		return nil, p.explain(err)
	}
	documents, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (d ParkedDocument, err error) {
		into := append([]any{&d.Consumer, &d.Document}, d.First.columns()...)
		err = row.Scan(append(into, &d.Release, &d.Events, &d.Last)...)
		return d, err
	})
	return documents, p.explain(err)
}

const rowColumns = `f.ord, f.source, f.seq, f.position, f.event_id, f.subject, f.cause, f.error, f.attempts, f.published_at, f.parked_at,
	octet_length(f.data)`

func (r *ParkedRow) columns() []any {
	return []any{
		&r.Order, &r.Source, &r.Sequence, &r.Position, &r.ID, &r.Subject, &r.Cause, &r.Error, &r.Attempts,
		&r.Time, &r.ParkedAt, &r.Bytes,
	}
}

// Document returns one parked document.
func (p *Parked) Document(ctx context.Context, consumer, document string) (*ParkedDocument, error) {
	if err := p.Known(ctx, consumer); err != nil {
		return nil, err
	}
	d := ParkedDocument{Consumer: consumer, Document: storable(document)}
	err := p.db.QueryRow(ctx, `SELECT `+rowColumns+`, f.release,
			(SELECT count(*) FROM `+p.table+` t WHERE t.name = f.name AND t.document = f.document),
			(SELECT max(t.parked_at) FROM `+p.table+` t WHERE t.name = f.name AND t.document = f.document)
		FROM `+p.table+` f WHERE f.name = $1 AND f.document = $2 ORDER BY `+parkedOrder+` LIMIT 1`,
		consumer, d.Document).
		Scan(append(d.First.columns(), &d.Release, &d.Events, &d.Last)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, notParked(consumer, document)
	}
	return &d, p.explain(err)
}

// CodeNotParked is the fault code for a document that is not parked.
const CodeNotParked = "not_parked"

func notParked(consumer, document string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: CodeNotParked,
		Message: fmt.Sprintf("document %q of consumer %s is not parked", document, consumer),
		Hint:    "`outflow parked list " + consumer + "` shows what is"}
}

// Events returns the first events of a parked document, with headers and data, at most limit.
func (p *Parked) Events(ctx context.Context, consumer, document string, limit int) ([]ParkedRow, error) {
	rows, err := p.db.Query(ctx, `SELECT `+rowColumns+`, f.headers, f.data FROM `+p.table+` f WHERE f.name = $1 AND f.document = $2
		ORDER BY `+parkedOrder+` LIMIT $3`, consumer, storable(document), limit)
	if err != nil {
		return nil, p.explain(err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r ParkedRow, err error) {
		var headers, data []byte
		err = row.Scan(append(r.columns(), &headers, &data)...)
		r.Headers, r.Data = headers, data
		return r, err
	})
	return all, p.explain(err)
}

// Retry asks for the release of a document: its first event is tried again, and if that succeeds all the
// others follow.
func (p *Parked) Retry(ctx context.Context, consumer, document string) error {
	return p.release(ctx, consumer, document, releaseRetry)
}

// Skip asks to drop the first event of a document without handling it, and to release the others.
func (p *Parked) Skip(ctx context.Context, consumer, document string) error {
	return p.release(ctx, consumer, document, releaseSkip)
}

func (p *Parked) release(ctx context.Context, consumer, document, how string) error {
	if err := p.Known(ctx, consumer); err != nil {
		return err
	}
	tag, err := p.db.Exec(ctx, `UPDATE `+p.table+` SET release = $3 WHERE ord =
		(SELECT ord FROM `+p.table+` WHERE name = $1 AND document = $2 ORDER BY `+parkedOrder+` LIMIT 1)`,
		consumer, storable(document), how)
	if err == nil && tag.RowsAffected() == 0 {
		return notParked(consumer, document)
	}
	return p.explain(err)
}

// Running lists the instances of a consumer that run.
func (p *Parked) Running(ctx context.Context, consumer string) ([]string, error) {
	rows, err := p.db.Query(ctx, `SELECT instance FROM `+p.members+` WHERE name = $1
		AND expires > pg_catalog.clock_timestamp() ORDER BY instance`, consumer)
	if err != nil {
		return nil, p.explain(err)
	}
	instances, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return instances, p.explain(err)
}

// Known returns an error if the database has no such consumer.
func (p *Parked) Known(ctx context.Context, consumer string) error {
	var names []string
	err := p.db.QueryRow(ctx, `SELECT pg_catalog.array_agg(name ORDER BY name) FROM (
		SELECT name FROM `+p.consumers+` ORDER BY name = $1 DESC, name LIMIT 20) AS c`, consumer).Scan(&names)
	if err != nil {
		return p.explain(err)
	}
	for _, name := range names {
		if name == consumer {
			return nil
		}
	}
	f := &outbox.Fault{Class: outbox.Usage, Code: "unknown_consumer",
		Message: fmt.Sprintf("no consumer %q has run with this database", consumer)}
	if f.Hint = "It has none at all: is it the right database?"; len(names) > 0 {
		f.Hint = fmt.Sprintf("It has %q", names)
	}
	return f
}

// explain turns errors that an operator can do something about into faults.
func (p *Parked) explain(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	switch pg.Code {
	case "42P01", "3F000":
		return &outbox.Fault{Class: outbox.Fatal, Code: "no_consumer_tables",
			Message: "the database has no tables of a consumer, or not in this schema", Err: err,
			Hint: "Name the database that the consumer keeps its marks in, and Config.DatabaseSchema if it " +
				"is set there (--database, --schema). " +
				"A consumer makes the tables when it runs for the first time"}
	case "42501":
		return &outbox.Fault{Class: outbox.Fatal, Code: "no_right",
			Message: "the role may not read or change the consumer's tables", Err: err,
			Hint: "Connect as the consumer's role, or grant SELECT on outflow_consumer and " +
				"outflow_member, and SELECT and UPDATE on outflow_parked"}
	}
	return err
}
