package consumer

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// parkedSchema creates the table of parked events; %s is its schema with a dot. Of a parked document it holds
// the first event, whose cause is poison, and all later ones, in the order of parkedOrder. release, which is
// only set in the document's first row, asks the running consumer to release it. hash is the document's:
// modulo the number of partitions it is the partition.
const parkedSchema = `CREATE TABLE IF NOT EXISTS %soutflow_parked (
  ord bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL, document text NOT NULL, hash bigint NOT NULL, source text NOT NULL, seq bigint NOT NULL,
  subject text NOT NULL, headers jsonb NOT NULL, data bytea NOT NULL, published_at timestamptz NOT NULL,
  position text NOT NULL, event_id text NOT NULL,
  cause text NOT NULL CHECK (cause IN ('poison', 'behind')),
  error text NOT NULL DEFAULT '', attempts int NOT NULL DEFAULT 0,
  parked_at timestamptz NOT NULL DEFAULT now(),
  release text NOT NULL DEFAULT '' CHECK (release IN ('', 'retry', 'skip')),
  UNIQUE (name, source, seq, position)
);
CREATE INDEX IF NOT EXISTS outflow_parked_document ON %soutflow_parked (name, document, source DESC, ord);
CREATE INDEX IF NOT EXISTS outflow_parked_release ON %soutflow_parked (name, ord) WHERE release <> '';
`

// parkedOrder is the order of a document's rows. A replayed event is only parked before the live ones of its
// document: see [parking.parkBehind].
const parkedOrder = "source DESC, ord" // replay, live

// How much is released in one transaction.
const (
	releaseEvents = 64
	releaseBytes  = 4 << 20
)

// maxError is how much of a handler's error is kept, in bytes.
const maxError = 8 << 10

// parkedTable is the table of parked events as one consumer uses it. Each method runs in the transaction that
// it is given, which holds the offset of the document's partition: nobody else adds or deletes rows of the
// document.
type parkedTable struct {
	table string // quoted, with its schema
	name  string // the consumer's
}

func newParkedTable(schema, name string) parkedTable {
	return parkedTable{table: inSchema(schema, "outflow_parked"), name: name}
}

// inSchema is the quoted name of a table; an empty schema leaves it to the search path.
func inSchema(schema, table string) string {
	if schema == "" {
		return pgx.Identifier{table}.Sanitize()
	}
	return pgx.Identifier{schema, table}.Sanitize()
}

// failure is why the first event of a document was parked.
type failure struct {
	attempts int
	error    string
}

// add inserts the events in order, in one round trip; without a failure only those of parked documents. An
// event that is in the table already, because the consumer was rewound, stays as it is. All events are of one
// source.
func (p parkedTable) add(ctx context.Context, tx DB, events []*Event, head *failure) (map[*Event]bool,
	error) {
	if len(events) == 0 {
		return nil, nil
	}
	var seqs, hashes []int64
	var documents, subjects, headers, positions, ids []string
	var data [][]byte
	var times []time.Time
	bySeq := make(map[int64]*Event, len(events))
	for _, e := range events {
		h, err := json.Marshal(headerText(e.Header))
		if err != nil {
			return nil, fmt.Errorf("park message %d: headers: %w", e.seq, err)
		}
		seqs = append(seqs, int64(e.seq))
		bySeq[int64(e.seq)] = e
		hashes = append(hashes, int64(e.hash))
		documents, subjects, headers = append(documents, storable(e.Document)), append(subjects,
			e.raw.Subject), append(headers, string(h))
		positions, ids = append(positions, e.Position.String()), append(ids, storable(e.ID))
		payload := e.raw.Data
		if payload == nil {
			payload = []byte{}
		}
		data, times = append(data, payload), append(times, e.Time)
	}
	cause, condition := causeBehind, "WHERE EXISTS (SELECT FROM "+p.table+
		" p WHERE p.name = $1 AND p.document = u.document)"
	if head == nil {
		head = &failure{}
	} else {
		cause, condition = causePoison, ""
	}
	rows, err := tx.Query(ctx, `INSERT INTO `+p.table+` (name, source, cause, error, attempts,
			seq, hash, document, subject, headers, data, published_at, position, event_id)
		SELECT $1, $2, $3, $4, $5, u.seq, u.hash, u.document, u.subject, u.headers::jsonb, u.data, u.published_at, u.position, u.event_id
		FROM unnest($6::bigint[], $7::bigint[], $8::text[], $9::text[], $10::text[], $11::bytea[], $12::timestamptz[], $13::text[], $14::text[])
			WITH ORDINALITY AS u (seq, hash, document, subject, headers, data, published_at, position, event_id, place)
		`+condition+` ORDER BY u.place
		ON CONFLICT (name, source, seq, position) DO UPDATE SET name = excluded.name
		RETURNING seq`,
		p.name, events[0].source, cause, head.error, head.attempts, seqs, hashes, documents, subjects,
		headers, data, times, positions, ids)
	if err != nil {
		return nil, fmt.Errorf("park %d events: %w", len(events), err)
	}
	added, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("park %d events: %w", len(events), err)
	}
	parked := make(map[*Event]bool, len(added))
	for _, seq := range added {
		parked[bySeq[seq]] = true
	}
	return parked, nil
}

// replayed says of replayed events which of them are parked already, and which are to be parked because an
// earlier event of the same replay is. Of one that was read from the stream, its position or id decides: what
// the broker lost has another sequence than when it was parked, and so has what had its effect before that.
// Of one that was read from the outbox table its id does, or nothing.
func (p parkedTable) replayed(ctx context.Context, tx DB, events []*Event) (already map[*Event]bool,
	behind []*Event, err error) {
	var seqs []int64
	var documents, positions, ids []string
	for _, e := range events {
		seqs, documents = append(seqs, int64(e.Sequence)), append(documents, storable(e.Document))
		positions, ids = append(positions, e.Position.String()), append(ids, storable(e.ID))
	}
	rows, err := tx.Query(ctx, `SELECT
			coalesce(bool_or(CASE WHEN u.seq = 0 THEN p.event_id = u.event_id AND u.event_id <> ''
				ELSE p.position = u.position OR p.source = 'live' AND p.event_id = u.event_id
					AND u.event_id <> '' END), false),
			coalesce(bool_or(CASE WHEN p.source = 'live' THEN u.seq = 0 AND u.event_id = ''
				ELSE u.seq = 0 OR coalesce((p.headers -> '`+replaySequenceHeader+`' ->> 0)::bigint, 0) < u.seq END), false)
		FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[])
			WITH ORDINALITY AS u (seq, document, position, event_id, place)
		LEFT JOIN `+p.table+` p ON p.name = $1 AND p.document = u.document
		GROUP BY u.place ORDER BY u.place`, p.name, seqs, documents, positions, ids)
	if err != nil {
		return nil, nil, fmt.Errorf("look for %d replayed events among what is parked: %w", len(events), err)
	}
	already = map[*Event]bool{}
	var known, waits bool
	i := 0
	_, err = pgx.ForEachRow(rows, []any{&known, &waits}, func() error {
		if e := events[i]; known {
			already[e], e.parkedBefore = true, true
		} else if waits {
			behind = append(behind, e)
		}
		i++
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("look for %d replayed events among what is parked: %w", len(events), err)
	}
	return already, behind, nil
}

// parkedRow is a parked event.
type parkedRow struct {
	ord      int64
	skip     bool // to be dropped without being handled
	attempts int  // before it was parked
	message  stream.Message
}

// first returns the first rows of a document that is to be released, at most n rows and about releaseBytes
// of data; none if the document is no longer to be released.
func (p parkedTable) first(ctx context.Context, tx DB, document string, n int) ([]parkedRow, error) {
	rows, err := tx.Query(ctx, `SELECT ord, source, release, attempts, seq, subject, headers, data,
		published_at FROM (
			SELECT *, row_number() OVER w AS place, sum(octet_length(data)) OVER w
			AS bytes, pg_catalog.first_value(release) OVER w AS word FROM (
				SELECT * FROM `+p.table+` WHERE name = $1 AND document = $2 ORDER BY `+parkedOrder+` LIMIT $3
			) AS head WINDOW w AS (ORDER BY `+parkedOrder+`)
		) AS batch WHERE word <> '' AND (place = 1 OR bytes <= $4) ORDER BY place`, p.name, storable(document), n, releaseBytes)
	if err != nil {
		return nil, fmt.Errorf("read what is parked of document %q: %w", document, err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r parkedRow, err error) {
		var source, release string
		var seq int64
		var headers []byte
		m := &r.message
		if err = row.Scan(&r.ord, &source, &release, &r.attempts, &seq, &m.Subject, &headers, &m.Data,
			&m.Time); err != nil {
			return r, err
		}
		r.skip, r.message.Sequence, r.message.Replay = release == releaseSkip, uint64(seq), source == replay
		r.message.Header, err = parseHeaderText(headers)
		return r, err
	})
	if err != nil {
		return nil, fmt.Errorf("read what is parked of document %q: %w", document, err)
	}
	return all, nil
}

// errChanged: somebody changed release, or deleted rows.
var errChanged = errors.New("what is parked has changed")

// done deletes rows that were handled or skipped, and sets release in the document's new first row, unless it
// is set: what was replayed is parked before rows that are to be released already. It reports whether there
// is one.
func (p parkedTable) done(ctx context.Context, tx DB, document string, rows []parkedRow) (more bool,
	err error) {
	ords, skipped := make([]int64, len(rows)), []int64{}
	for i := range rows {
		if ords[i] = rows[i].ord; rows[i].skip {
			skipped = append(skipped, rows[i].ord)
		}
	}
	tag, err := tx.Exec(ctx, `DELETE FROM `+p.table+
		` WHERE ord = ANY($1) AND name = $2 AND (release = 'skip') = (ord = ANY($3))`, ords, p.name, skipped)
	if err == nil && tag.RowsAffected() != int64(len(ords)) {
		err = fmt.Errorf("%w: %d of %d rows are as they were read", errChanged, tag.RowsAffected(), len(ords))
	}
	if err == nil {
		tag, err = tx.Exec(ctx, `UPDATE `+p.table+` SET release = coalesce(nullif(release, ''), 'retry') WHERE ord =
			(SELECT ord FROM `+p.table+` WHERE name = $1 AND document = $2 ORDER BY `+parkedOrder+` LIMIT 1)`,
			p.name, storable(document))
	}
	if err != nil {
		return false, fmt.Errorf("remove what was parked of document %q: %w", document, err)
	}
	return tag.RowsAffected() > 0, nil
}

// failed parks the first row of a document again that was to be released. attempts counts all of them.
func (p parkedTable) failed(ctx context.Context, tx DB, row parkedRow, attempts int, cause error) error {
	_, err := tx.Exec(ctx, `UPDATE `+p.table+
		` SET cause = 'poison', release = '', attempts = $3, error = $4 WHERE ord = $1 AND name = $2`,
		row.ord, p.name, attempts, errorText(cause))
	if err != nil {
		return fmt.Errorf("park message %d again: %w", row.message.Sequence, err)
	}
	return nil
}

// has reports whether events of a document are parked.
func (p parkedTable) has(ctx context.Context, tx DB, document string) (is bool, err error) {
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+p.table+` WHERE name = $1 AND document = $2)`,
		p.name, storable(document)).Scan(&is)
	if err != nil {
		return false, fmt.Errorf("read what is parked of document %q: %w", document, err)
	}
	return is, nil
}

// parkedDocument is a document that is parked.
type parkedDocument struct {
	document string    // as it is stored
	hash     uint32    // decides its partition
	parkedAt time.Time // its first event
}

// documents returns parked documents, at most n. Each costs one index lookup, however many events it has.
func (p parkedTable) documents(ctx context.Context, db DB, n int) ([]parkedDocument, error) {
	const first = "SELECT t.document, t.hash, t.parked_at FROM "
	const order = " ORDER BY t.document, t.source DESC, t.ord LIMIT 1"
	rows, err := db.Query(ctx, `WITH RECURSIVE d AS (
			(`+first+p.table+` t WHERE t.name = $1`+order+`)
			UNION ALL
			SELECT next.* FROM d, LATERAL (`+first+p.table+` t WHERE t.name = $1 AND t.document > d.document`+order+`) next
		) SELECT document, hash, parked_at FROM d LIMIT $2`, p.name, n)
	if err != nil {
		return nil, fmt.Errorf("read which documents are parked: %w", err)
	}
	documents, err := pgx.CollectRows(rows, scanDocument)
	if err != nil {
		return nil, fmt.Errorf("read which documents are parked: %w", err)
	}
	return documents, nil
}

func scanDocument(row pgx.CollectableRow) (d parkedDocument, err error) {
	var hash int64
	err = row.Scan(&d.document, &hash, &d.parkedAt)
	d.hash = uint32(hash)
	return d, err
}

// toRelease returns documents of some of so many partitions that are to be released, at most n, in the order
// in which they were parked. A word at another row than a document's first one does not count yet.
func (p parkedTable) toRelease(ctx context.Context, db DB, n, partitions int, own []int64) ([]parkedDocument,
	error) {
	rows, err := db.Query(ctx, `SELECT document, hash, parked_at FROM `+p.table+
		` t WHERE name = $1 AND release <> '' AND hash % $3::bigint = ANY ($4::bigint[]) AND ord = (
			SELECT ord FROM `+p.table+` WHERE name = $1 AND document = t.document ORDER BY `+parkedOrder+` LIMIT 1)
		ORDER BY ord LIMIT $2`,
		p.name, n, partitions, own)
	if err != nil {
		return nil, fmt.Errorf("read which documents are to be released: %w", err)
	}
	all, err := pgx.CollectRows(rows, scanDocument)
	if err != nil {
		return nil, fmt.Errorf("read which documents are to be released: %w", err)
	}
	return all, nil
}

// maxStorable limits values of indexed columns; PostgreSQL refuses those of more than 2,704 bytes.
const maxStorable = 1000

// storable is a value as it is stored: unchanged or, if PostgreSQL would refuse it, as a token of a subject.
func storable(s string) string {
	if len(s) <= maxStorable && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 {
		return s
	}
	return string(outbox.AppendToken(nil, s))
}

// errorText is an error's text, cut to maxError.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	s := err.Error()
	if len(s) > maxError {
		s = s[:maxError] + "…"
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// headerText is what headers become as JSON: a value is a string, or {"base64": "..."} where PostgreSQL could
// not take it as text.
func headerText(h nats.Header) map[string][]any {
	all := make(map[string][]any, len(h))
	for name, values := range h {
		for _, v := range values {
			if utf8.ValidString(v) && strings.IndexByte(v, 0) < 0 {
				all[name] = append(all[name], v)
			} else {
				all[name] = append(all[name],
					map[string]string{"base64": base64.StdEncoding.EncodeToString([]byte(v))})
			}
		}
	}
	return all
}

// parseHeaderText reverses headerText.
func parseHeaderText(text []byte) (nats.Header, error) {
	var all map[string][]any
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("headers: %w", err)
	}
	h := make(nats.Header, len(all))
	for name, values := range all {
		for _, v := range values {
			switch v := v.(type) {
			case string:
				h[name] = append(h[name], v)
			case map[string]any:
				s, _ := v["base64"].(string)
				b, err := base64.StdEncoding.DecodeString(s)
				if err != nil {
					return nil, fmt.Errorf("header %s: %w", name, err)
				}
				h[name] = append(h[name], string(b))
			default:
				return nil, fmt.Errorf("header %s: %v is neither a text nor base64", name, v)
			}
		}
	}
	return h, nil
}
