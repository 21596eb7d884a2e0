package erasure

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Table is the name of the table of requests, in the outbox's schema.
const Table = "outflow_erasures"

const columns = `
  root text NOT NULL,
  root_oid oid,
  root_system text,
  slot text NOT NULL,
  request text NOT NULL,
  document bytea NOT NULL,
  key bytea NOT NULL,
  system_id text NOT NULL,
  stream text NOT NULL,
  stream_created timestamptz NOT NULL,
  notified text,
  rows bigint NOT NULL DEFAULT 0,
  cut pg_lsn,
  cut_sequence bigint,
  sequences text NOT NULL DEFAULT '',
  archived bigint NOT NULL DEFAULT 0,
  copies jsonb NOT NULL DEFAULT '{}',
  parked bigint NOT NULL DEFAULT 0,
  certificate jsonb,
  requested_at timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz,
  PRIMARY KEY (slot, request)`

// rowsTable is the name of the table of what was erased: for each event the hash of its id.
const rowsTable = "outflow_erased_rows"

const rowsColumns = `
  sum uuid NOT NULL,
  slot text NOT NULL,
  request text NOT NULL,
  PRIMARY KEY (sum, slot, request)`

// Record is a request.
type Record struct {
	Slot     string
	Request  string
	Document []byte // HMAC of its name
	key      []byte
	table    string // that has the request
	rows     string // the table that has the hashes of what was erased
	System   string // system identifier
	Stream   string
	Created  time.Time // of the stream, in PostgreSQL's precision

	Notified  string            // the id of the last event; "": none was asked for, or not yet
	Rows      int64             // deleted
	Cut       outbox.LSN        // 0: rows may be left
	CutSeq    uint64            // see Cut; not behind an end that the stream has lost since
	Erased    outbox.Sequences  // messages of the stream that were erased, or are about to be
	Archived  int64             // messages that were erased from the archive
	Copies    map[string]uint64 // of other streams, how many were erased
	Parked    int64             // events that consumers had parked
	Away      []string          // replicas that were away when messages had been erased; in the certificate
	Requested time.Time
	Finished  time.Time // zero: not yet
}

// Goes reports whether a message of the document, by its header, lies before the cut and is not the last
// event. seq 0: the sequence is not known.
func (r *Record) Goes(header string, seq uint64) bool {
	h, err := outbox.ParseHeader(header)
	return err == nil && (seq > 0 && seq <= r.CutSeq || h.Pos.LSN < r.Cut) && !r.IsLast(header)
}

// GoesFrom reports that of a message of a stream that was made at a time: all of an earlier one goes, and of
// a later one nothing is known but positions.
func (r *Record) GoesFrom(created time.Time, header string, seq uint64) bool {
	switch {
	case created.Before(r.Created):
		return !r.IsLast(header)
	case !created.Equal(r.Created):
		seq = 0
	}
	return r.Goes(header, seq)
}

// IsLast reports whether a message is the last event.
func (r *Record) IsLast(header string) bool {
	return r.Notified != "" && outbox.HeaderID(header) == string(outbox.AppendHeaderValue(nil, r.Notified))
}

// Ledger is the table of requests, of one slot. One goroutine uses it.
type Ledger struct {
	Reader string // the role that repair and the like read it as; "": the owner

	conn  *pgx.Conn
	root  catalog.Table
	slot  string
	owner string
	table string
	rows  string // [rowsTable]
}

// Open connects. root is the outbox. The caller closes it.
func Open(ctx context.Context, target postgres.Target, table, slot string) (_ *Ledger, err error) {
	conn, err := target.Connect(ctx)
	if err != nil {
		return nil, err
	}
	l := &Ledger{conn: conn, slot: slot}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if l.root, err = catalog.ReadTable(ctx, conn, table); err != nil {
		return nil, err
	}
	l.table, l.rows = beside(l.root, Table), beside(l.root, rowsTable)
	l.owner, err = ownerOf(ctx, conn, l.root.Schema, l.root.Name)
	return l, err
}

// Close closes the connection, and lets the next run begin.
func (l *Ledger) Close() { postgres.Close(l.conn) }

// beside is the quoted name of a table in the schema of another one.
func beside(root catalog.Table, name string) string {
	return pgx.Identifier{root.Schema, name}.Sanitize()
}

// make makes the tables. They belong to the outbox's owner, because what they say is believed.
func (l *Ledger) make(ctx context.Context) error {
	for _, t := range [][2]string{{l.table, columns}, {l.rows, rowsColumns}} {
		all := []string{
			"CREATE TABLE IF NOT EXISTS " + t[0] + " (" + t[1] + "\n)",
			"ALTER TABLE " + t[0] + " OWNER TO " + postgres.Quote(l.owner),
		}
		if l.Reader != "" && l.Reader != l.owner {
			all = append(all, "GRANT SELECT ON "+t[0]+" TO "+postgres.Quote(l.Reader))
		}
		for _, sql := range all {
			if _, err := l.conn.Exec(ctx, sql); err != nil {
				return l.explain("make table "+t[0], err)
			}
		}
	}
	return nil
}

// exists looks for the tables of an outbox, and refuses one that belongs to somebody else than that.
func exists(ctx context.Context, q catalog.Querier, root catalog.Table) (bool, error) {
	ours, err := ownerOf(ctx, q, root.Schema, root.Name)
	n := 0
	for _, name := range []string{Table, rowsTable} {
		if err != nil {
			return false, err
		}
		var owner string
		if owner, err = ownerOf(ctx, q, root.Schema, name); owner == ours {
			n++
		} else if owner != "" {
			err = catalog.ForeignKept(beside(root, name), owner, ours)
		}
	}
	return n == 2, err
}

// tables are those that have requests of an outbox: also where it was moved to another schema and has left
// them behind.
func tables(ctx context.Context, q catalog.Querier, root catalog.Table) ([]catalog.Kept, error) {
	there, err := exists(ctx, q, root)
	if err != nil {
		return nil, err
	}
	all, err := catalog.Beside(ctx, q, root, Table)
	return slices.DeleteFunc(all, func(k catalog.Kept) bool { return k.Own && !there }), err
}

// takeUp gives all requests of the outbox the name that it has now, in its schema.
func (l *Ledger) takeUp(ctx context.Context) error {
	var old bool
	err := l.conn.QueryRow(ctx, "SELECT NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = $1::regclass "+
		"AND attname = 'root_oid')", l.table).Scan(&old)
	if err == nil && old { // an older version made it
		_, err = l.conn.Exec(ctx, "ALTER TABLE "+l.table+" ADD COLUMN IF NOT EXISTS root_oid oid, "+
			"ADD COLUMN IF NOT EXISTS root_system text")
	}
	if err == nil {
		_, err = l.conn.Exec(ctx, "UPDATE "+l.table+" l SET root = $2, root_oid = $1, root_system = "+system+
			" WHERE "+catalog.OfRoot+" AND (root, root_oid, root_system) IS DISTINCT FROM ($2, $1, "+system+
			")", l.root.OID, l.root.Quoted())
	}
	if err != nil {
		return l.explain("write table "+l.table, err)
	}
	kept, err := tables(ctx, l.conn, l.root)
	for _, k := range kept {
		if err != nil || k.Own {
			continue
		}
		if _, err = l.conn.Exec(ctx, `WITH taken AS (DELETE FROM `+k.Table+` l WHERE `+catalog.OfRoot+`
				RETURNING l.*), erased AS (DELETE FROM `+rowsOf(k)+` e USING taken t
				WHERE e.slot = t.slot AND e.request = t.request RETURNING e.*), noted AS (
				INSERT INTO `+l.rows+` (sum, slot, request) SELECT sum, slot, request FROM erased
				ON CONFLICT DO NOTHING)
			INSERT INTO `+l.table+` (root, root_oid, root_system, `+rest+`)
			SELECT $2, $1, `+system+`, `+rest+` FROM taken
			ON CONFLICT DO NOTHING`, l.root.OID, l.root.Quoted()); err != nil {
			err = l.explain("write table "+k.Table, err)
		}
	}
	return err
}

// system is the identifier of the server that the connection is to, as SQL.
const system = "(SELECT system_identifier::text FROM pg_control_system())"

// rest are the columns of the table of requests beside those that say which outbox it is.
const rest = `slot, request, document, key, system_id, stream, stream_created, notified, rows, cut,
	cut_sequence, sequences, archived, copies, parked, certificate, requested_at, finished_at`

// rowsOf is the table of what was erased that belongs to one of requests.
func rowsOf(k catalog.Kept) string { return pgx.Identifier{k.Schema, rowsTable}.Sanitize() }

// ownerOf is who owns a table; "": there is none.
func ownerOf(ctx context.Context, q catalog.Querier, schema, name string) (owner string, err error) {
	err = q.QueryRow(ctx, `SELECT pg_get_userbyid(c.relowner) FROM pg_class c JOIN pg_namespace n
		ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2`, schema, name).Scan(&owner)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	if err != nil {
		err = fmt.Errorf("read the owner of table %s: %w", name, err)
	}
	return owner, err
}

// Find reads a request; nil if there is none. One of another document is refused.
func (l *Ledger) Find(ctx context.Context, request, doc string) (*Record, error) {
	kept, err := tables(ctx, l.conn, l.root)
	if err != nil {
		return nil, err
	}
	var all []*Record
	for _, k := range kept {
		some, err := read(ctx, l.conn, k, "slot = $4 AND request = $5 AND ($3::boolean OR "+catalog.OfRoot+
			")", l.root.OID, l.root.Quoted(), k.Own, l.slot, request)
		if err != nil {
			return nil, l.explain("read table "+k.Table, err)
		}
		all = append(all, some...)
	}
	switch {
	case len(all) == 0:
		return nil, nil
	case !all[0].Is(doc):
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "erase_request",
			Message: fmt.Sprintf("request %q is of another document", request)}
	}
	return all[0], nil
}

// Is reports whether a document is the one that the request erases.
func (r *Record) Is(doc string) bool { return hmac.Equal(r.Document, sum(r.key, doc)) }

// read reads requests, the oldest first.
func read(ctx context.Context, q catalog.Querier, k catalog.Kept, condition string, args ...any) ([]*Record,
	error) {
	rows, err := q.Query(ctx, `SELECT slot, request, document, key, system_id, stream, stream_created,
			coalesce(notified, ''), rows, coalesce(cut::text, ''), coalesce(cut_sequence, 0), sequences,
			archived, copies, parked, coalesce(certificate->'replicas_away', '[]'), requested_at, finished_at
		FROM `+k.Table+` l WHERE `+condition+` ORDER BY requested_at, slot, request`, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Record, error) {
		r := &Record{table: k.Table, rows: rowsOf(k)}
		var copies, away []byte
		var cut, sequences string
		var seq int64
		var finished *time.Time
		err := row.Scan(&r.Slot, &r.Request, &r.Document, &r.key, &r.System, &r.Stream, &r.Created,
			&r.Notified, &r.Rows, &cut, &seq, &sequences, &r.Archived, &copies, &r.Parked, &away,
			&r.Requested, &finished)
		if err != nil {
			return nil, err
		}
		if finished != nil {
			r.Finished = *finished
		}
		r.CutSeq = uint64(seq)
		if cut != "" {
			r.Cut, err = outbox.ParseLSN(cut)
		}
		if err == nil {
			err = json.Unmarshal(copies, &r.Copies)
		}
		if err == nil {
			err = json.Unmarshal(away, &r.Away)
		}
		if err == nil {
			r.Erased, err = outbox.ParseSequences(sequences)
		}
		if err != nil {
			return nil, fmt.Errorf("request %q of table %s: %w", r.Request, k.Table, err)
		}
		return r, nil
	})
}

// sum is the HMAC of a document's name.
func sum(key []byte, doc string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(doc))))
	h.Write([]byte(doc))
	return h.Sum(nil)
}

// Begin notes a request of a system, or finds it.
func (l *Ledger) Begin(ctx context.Context, request, doc, of, stream string, created time.Time) (*Record,
	error) {
	there, err := exists(ctx, l.conn, l.root)
	if err == nil && !there {
		err = l.make(ctx)
	}
	if err == nil {
		err = l.takeUp(ctx)
	}
	if err != nil {
		return nil, err
	}
	key := make([]byte, sha256.Size)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	_, err = l.conn.Exec(ctx, `INSERT INTO `+l.table+` (root, slot, request, document, key, system_id, stream,
			stream_created, root_oid, root_system)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, `+system+`) ON CONFLICT DO NOTHING`,
		l.root.Quoted(), l.slot, request, sum(key, doc), key, of, stream, created,
		l.root.OID)
	if err != nil {
		return nil, l.explain("write table "+l.table, err)
	}
	r, err := l.Find(ctx, request, doc)
	if err == nil && r == nil {
		err = fmt.Errorf("request %q is gone from table %s", request, l.table)
	}
	return r, err
}

// Notify runs do, which writes the last event and returns its id, in the transaction that notes the id.
func (l *Ledger) Notify(ctx context.Context, r *Record, do func(tx pgx.Tx) (id string, err error)) error {
	return pgx.BeginFunc(ctx, l.conn, func(tx pgx.Tx) error {
		id, err := do(tx)
		if err != nil {
			return err
		}
		r.Notified = id
		return l.save(ctx, tx, r)
	})
}

// Save stores how far a request has come.
func (l *Ledger) Save(ctx context.Context, r *Record) error { return l.save(ctx, l.conn, r) }

func (l *Ledger) save(ctx context.Context, q catalog.Querier, r *Record) error {
	var cut *string
	if r.Cut != 0 {
		text := r.Cut.String()
		cut = &text
	}
	copies, err := json.Marshal(r.Copies)
	if err != nil {
		return err
	}
	var away *string
	if len(r.Away) > 0 {
		text, err := json.Marshal(r.Away)
		if err != nil {
			return err
		}
		list := string(text)
		away = &list
	}
	var saved string
	err = q.QueryRow(ctx, `UPDATE `+l.table+` SET notified = nullif($3, ''), rows = $4, cut = $5::text::pg_lsn,
			cut_sequence = $6, sequences = $7, archived = $8, copies = $9::text::jsonb, parked = $10,
			certificate = CASE WHEN $11::text IS NULL THEN certificate
				ELSE coalesce(certificate, '{}') || jsonb_build_object('replicas_away', $11::text::jsonb) END
		WHERE slot = $1 AND request = $2 RETURNING request`, l.slot, r.Request, r.Notified, r.Rows, cut,
		int64(r.CutSeq), r.Erased.String(), r.Archived, string(copies), r.Parked, away).Scan(&saved)
	if err != nil {
		return l.explain("write table "+l.table, err)
	}
	return nil
}

// Note notes the ids of what goes, by the headers of messages, so that rows with them are known when they
// come back.
func (l *Ledger) Note(ctx context.Context, r *Record, headers []string) error {
	sums := make([]string, len(headers))
	for i, h := range headers {
		sum := outbox.HeaderIDSum(h)
		sums[i] = hex.EncodeToString(sum[:])
	}
	if _, err := l.conn.Exec(ctx, `INSERT INTO `+l.rows+` (sum, slot, request)
		SELECT unnest($1::text[])::uuid, $2, $3 ON CONFLICT DO NOTHING`, sums, l.slot, r.Request); err != nil {
		return l.explain("write table "+l.rows, err)
	}
	return nil
}

// Rows is the table in which the ids of what goes are noted, as SQL.
func (l *Ledger) Rows() string { return l.rows }

// Finish stores the certificate, and in it, as finished, when the request first had finished.
func (l *Ledger) Finish(ctx context.Context, r *Record, certificate any) error {
	text, err := json.Marshal(certificate)
	if err == nil {
		err = l.conn.QueryRow(ctx, `UPDATE `+l.table+` SET finished_at = coalesce(finished_at, now),
				certificate = $3::text::jsonb || jsonb_build_object('finished', to_char(
					coalesce(finished_at, now) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
			FROM (SELECT clock_timestamp() AS now) clock
			WHERE slot = $1 AND request = $2 RETURNING finished_at`, l.slot, r.Request, string(text)).
			Scan(&r.Finished)
	}
	if err != nil {
		return l.explain("write table "+l.table, err)
	}
	return nil
}

// Behind names the slots that have not confirmed the cut, of those that count. more is said of the slot of
// the settings.
func (l *Ledger) Behind(ctx context.Context, cut outbox.LSN, readers partition.Readers, named []string,
	more string) (behind []string, err error) {
	slots, err := partition.ReadSlots(ctx, l.conn, nil)
	own := false
	for _, s := range readers.Counting(slots, l.slot, named) {
		why := s.Behind(cut)
		if s.Name == l.slot {
			own, why = true, why+more
		}
		if s.Confirmed < cut {
			behind = append(behind, why)
		}
	}
	if err == nil && !own {
		behind = append(behind, fmt.Sprintf("slot %s does not exist", l.slot))
	}
	return behind, err
}

func (l *Ledger) explain(doing string, err error) error {
	if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
		return l.noRight(err, doing)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// noRight is the fault of a role that may not do something with the tables.
func (l *Ledger) noRight(err error, doing string) error {
	return postgres.Fatal(err, "no_right", "Set retain.postgres_url to a URL of role "+l.owner+
		", which owns the outbox, with the right CREATE on schema "+postgres.Quote(l.root.Schema),
		"the role may not %s", doing)
}
