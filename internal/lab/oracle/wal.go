package oracle

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// CreateSlot makes the slot that the truth is read from, with the plugin test_decoding. To see what outflow
// sees it has to be made after outflow init and before the first write.
func CreateSlot(ctx context.Context, conn *pgx.Conn, slot string) error {
	_, err := conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'test_decoding')", slot)
	const undefinedFile = "58P01"
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == undefinedFile {
		return fmt.Errorf("slot %s: this PostgreSQL lacks the output plugin test_decoding, from which the "+
			"truth is read; "+
			"install PostgreSQL's contrib modules: %w", slot, err)
	}
	if err != nil {
		return fmt.Errorf("slot %s: %w", slot, err)
	}
	return nil
}

// DropSlot removes the slot.
func DropSlot(ctx context.Context, conn *pgx.Conn, slot string) error {
	_, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot)
	return err
}

// Columns says which column has which role, as the settings columns.* do. Those of Actor, Counter, Key and ID
// may be "" or absent, and Span is where none is mapped.
type Columns struct{ ID, Doc, Actor, Counter, Key, Payload, Span string }

// DefaultColumns are those of the table that init makes.
var DefaultColumns = Columns{"id", "doc_id", "actor_id", "counter", "seq_key", "payload", ""}

// Source says where the truth is and what of it is an event. Zero values mean the default table and subject.
type Source struct {
	Slot   string // made by CreateSlot
	Events Origin // "": OfTable
	// as quote_ident prints them, with the schema: public.outbox. Of a partitioned table: its leaves too
	Tables  []string
	Columns Columns           //
	Subject func(Row) string  // nil: outbox.{doc_id}
	Headers map[string]string // mapped headers: name, column
	// schema.name of the table whose rows are ticks and changes of settings, as it is for outbox
	// public.outbox: of what was written on this server alone, as all that counts then. "": there is none
	Control string
}

// Event is a committed insert, or a committed message in place of one.
type Event struct {
	Pos                  Position
	ID, Doc, Actor, Key  string
	Subject              string // "" for the default one
	Mapped               []string
	Sum                  [16]byte // of the payload: the first half of its SHA-256
	Size                 int      // of the payload, in bytes
	Head                 string   // how the payload begins
	NullDoc, NullPayload bool
	NullKey              bool
	Counter, Span        int64 // Span is 0 where there is no counter that can be used

	Message bool   // it is a logical message, no row
	Bad     string // what is wrong with its content; "": nothing
}

func (e *Event) String() string {
	return fmt.Sprintf("event %s at %v, document %q, actor %q, key %q", e.ID, e.Pos, clip(e.Doc),
		clip(e.Actor), clip(e.Key))
}

// size is what the event counts against the limits.
func (e *Event) size() int64 { return int64(len(e.Doc)+len(e.Actor)+len(e.Key)+e.Size) + overhead }

func (e *Event) sequence() uint64 { return Sequence(e.Doc, e.Actor) }

func (e *Event) subject() string {
	if e.Subject == "" {
		return "outbox." + Token(e.Doc)
	}
	return e.Subject
}

func (e *Event) setPayload(b []byte) {
	sum := sha256.Sum256(b)
	e.Sum, e.Size, e.Head = [16]byte(sum[:16]), len(b), string(b[:min(len(b), 40)])
}

func (e *Event) hasPayload(b []byte) bool {
	sum := sha256.Sum256(b)
	return len(b) == e.Size && e.Sum == [16]byte(sum[:16])
}

// commit is a transaction that may be an input.
type commit struct {
	lsn     LSN
	time    int64 // microseconds
	tick    bool
	changes []change
	events  []*Event
}

// Truth is what the WAL holds. It takes about half a kilobyte of memory an event, whatever the size of its
// payload, which is not kept.
type Truth struct {
	Commits   int // transactions read, also those without events
	Events    int
	Messages  int // of them
	Ticks     int
	Changes   int // changes of settings, for whatever slot
	Malformed int // settings messages that can't be read
	End       LSN // of the last transaction

	commits []commit
}

// Between is how much later one transaction committed than another, by the times in the WAL: what ordering
// added to an event is the time from its own commit to that of the input that closed its window. ok is false
// where one of them was not read.
func (t *Truth) Between(from, to LSN) (d time.Duration, ok bool) {
	at := func(lsn LSN) (int64, bool) {
		i, found := slices.BinarySearchFunc(t.commits, lsn, func(c commit, lsn LSN) int {
			return cmp.Compare(c.lsn, lsn)
		})
		if !found {
			return 0, false
		}
		return t.commits[i].time, true
	}
	a, ok := at(from)
	b, also := at(to)
	return time.Duration(b-a) * time.Microsecond, ok && also
}

// Reader reads the truth from a slot, again and again if wanted, and lets the server discard the WAL that was
// read. It outlives connections: what it has is never read twice.
type Reader struct {
	source Source
	insert []string // what the lines of an insert begin with
	names  []string // of mapped headers, sorted
	atOnce int      // after how many changes the server ends a piece, at the end of the transaction
	truth  Truth
	texts  map[string]string // documents and actors, once each

	// The transaction that is being read.
	open bool
	tx   commit
}

// NewReader returns a reader that has read nothing.
func NewReader(s Source) *Reader {
	if len(s.Tables) == 0 && s.Events != OfMessage {
		s.Tables = []string{"public.outbox"}
	}
	if s.Columns == (Columns{}) {
		s.Columns = DefaultColumns
	}
	r := &Reader{source: s, atOnce: 20_000, texts: map[string]string{},
		names: slices.Sorted(maps.Keys(s.Headers))}
	for _, t := range s.Tables {
		r.insert = append(r.insert, "table "+t+": INSERT:")
	}
	return r
}

// Truth is what was read until now. It grows with Read.
func (r *Reader) Truth() *Truth { return &r.truth }

// pins are the settings of a session that decide how values are printed.
var pins = [][2]string{
	{"DateStyle", "ISO"}, {"IntervalStyle", "postgres"}, {"TimeZone", "UTC"}, {"bytea_output", "hex"},
	{"extra_float_digits", "1"},
	{"client_encoding", "UTF8"},
}

// Read reads all that was committed, and in the WAL's durable part, when it is called. After an error it can
// be called again, on another connection.
func (r *Reader) Read(ctx context.Context, conn *pgx.Conn) error {
	var end string
	if err := conn.QueryRow(ctx, "SELECT pg_current_wal_flush_lsn()::text").Scan(&end); err != nil {
		return fmt.Errorf("end of the WAL: %w", err)
	}
	for atOnce := r.atOnce; ; {
		before := r.truth.End
		n, err := r.piece(ctx, conn, end, atOnce)
		if err != nil {
			return fmt.Errorf("slot %s: %w", r.source.Slot, err)
		}
		// messages without a transaction, which come again until one that follows them is let go
		if r.truth.End == before {
			if n < atOnce {
				return nil
			}
			atOnce *= 2
			continue
		}
		// Only what has arrived here is let go.
		if _, err := conn.Exec(ctx, "SELECT pg_replication_slot_advance($1, $2::text::pg_lsn)", r.source.Slot,
			r.truth.End.String()); err != nil {
			return fmt.Errorf("slot %s: advance to %v: %w", r.source.Slot, r.truth.End, err)
		}
	}
}

// piece reads some whole transactions and returns the number of lines.
func (r *Reader) piece(ctx context.Context, conn *pgx.Conn, end string, atOnce int) (lines int, err error) {
	r.open = false
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it is over in any case
	if err := pin(ctx, tx); err != nil {
		return 0, err
	}
	rows, err := tx.Query(ctx, `SELECT lsn::text, data FROM pg_logical_slot_peek_changes($1, $2::text::pg_lsn,
		$3, 'include-xids', '0', 'include-timestamp', '1', 'skip-empty-xacts', '0', 'only-local', $4)`,
		r.source.Slot, end, atOnce, strconv.FormatBool(r.source.Control != ""))
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		raw := rows.RawValues() // text, whatever the format
		lsn, err := ParseLSN(string(raw[0]))
		if err != nil {
			return 0, err
		}
		if err := r.line(lsn, raw[1]); err != nil {
			return 0, err
		}
		lines++
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	if r.open {
		return 0, fmt.Errorf("the last transaction does not end")
	}
	return lines, nil
}

// line takes one line of test_decoding. The LSN of the line that ends a transaction is the end LSN of its
// commit record.
func (r *Reader) line(lsn LSN, data []byte) error {
	kind := string(data[:min(len(data), 8)])
	switch {
	case strings.HasPrefix(kind, "BEGIN"):
		if r.open {
			return fmt.Errorf("%v: a transaction within another", lsn)
		}
		r.open, r.tx = true, commit{}
		return nil
	case strings.HasPrefix(kind, "COMMIT"):
		return r.commit(lsn, string(data))
	case kind == "message:":
		m, err := parseLogical(string(data))
		if err != nil {
			return fmt.Errorf("%v: %w", lsn, err)
		}
		r.logical(m)
		return nil
	}
	for _, prefix := range r.insert {
		if len(data) >= len(prefix) && string(data[:len(prefix)]) == prefix {
			if !r.open {
				return fmt.Errorf("%v: an insert outside of a transaction", lsn)
			}
			row, err := parseRow(string(data[len(prefix):]))
			if err != nil {
				return fmt.Errorf("%v: %w", lsn, err)
			}
			r.tx.events = append(r.tx.events, r.event(row))
			return nil
		}
	}
	if rest, ok := strings.CutPrefix(string(data), "table "+r.source.Control+": INSERT:"); ok {
		row, err := parseRow(rest)
		if err != nil {
			return fmt.Errorf("%v: %w", lsn, err)
		}
		prefix, _ := row.Get("prefix")
		content, _ := row.Get("content")
		r.logical(logical{transactional: true, prefix: prefix.Value, content: content.Value})
	}
	return nil // another table, another statement
}

func (r *Reader) commit(lsn LSN, line string) (err error) {
	if !r.open {
		return fmt.Errorf("%v: the end of no transaction", lsn)
	}
	r.open = false
	if lsn <= r.truth.End {
		return nil // read before: the server crashed before it had stored how far the slot had come
	}
	r.tx.lsn = lsn
	if r.tx.time, err = commitTime(line); err != nil {
		return err
	}
	t := &r.truth
	t.End = lsn
	t.Commits++
	t.Events += len(r.tx.events)
	t.Changes += len(r.tx.changes)
	if r.tx.tick {
		t.Ticks++
	}
	for i, e := range r.tx.events {
		e.Pos = Position{lsn, uint32(i)}
		if e.Message {
			t.Messages++
		}
	}
	if len(r.tx.events) > 0 || r.tx.tick || len(r.tx.changes) > 0 {
		t.commits = append(t.commits, r.tx)
	}
	return nil
}

func (r *Reader) logical(m logical) {
	if !m.transactional {
		return
	}
	switch m.prefix {
	case "outflow.tick":
		r.tx.tick = true
	case eventPrefix:
		if r.source.Events.messages() {
			r.tx.events = append(r.tx.events, r.fromMessage(m.content))
		}
	case "outflow.settings":
		if c, ok := parseChange(m.content); ok {
			r.tx.changes = append(r.tx.changes, c)
		} else {
			r.truth.Malformed++
		}
	}
}

// event makes an event of a row. The position comes with the commit.
func (r *Reader) event(row Row) *Event {
	c, e := r.source.Columns, &Event{}
	take := func(name string) (string, bool) {
		v, there := row.Get(name)
		return v.Value, there && v.Null
	}
	e.ID, _ = take(c.ID)
	e.ID = strings.Clone(e.ID)
	e.Doc, e.NullDoc = take(c.Doc)
	e.Actor, _ = take(c.Actor)
	e.Doc, e.Actor = r.once(e.Doc), r.once(e.Actor)
	if key, there := row.Get(c.Key); there {
		e.Key, e.NullKey = strings.Clone(key.Value), key.Null
	} else {
		e.Key, e.NullKey = ruleKey(row, c)
	}
	counter, _ := row.Get(c.Counter)
	span, _ := row.Get(c.Span)
	e.counted(counter, span)
	payload, null := take(c.Payload)
	e.NullPayload = null
	e.setPayload([]byte(payload))
	if r.source.Subject != nil {
		e.Subject = r.once(r.source.Subject(row))
	}
	for _, name := range r.names {
		if v, there := row.Get(r.source.Headers[name]); there && !v.Null {
			e.Mapped = append(e.Mapped, name+": "+strings.NewReplacer("\r", " ", "\n", " ").Replace(v.Value))
		}
	}
	return e
}

// counted sets the counter from its column and that of the span.
func (e *Event) counted(counter, span Column) {
	first, ok := integer(counter)
	if !ok {
		return
	}
	if span.Name == "" || span.Null {
		e.place(first, 1)
	} else if n, ok := integer(span); ok {
		e.place(first, n)
	}
}

// integer reads a column that holds one; false: it does not, or there is no such column.
func integer(c Column) (n int64, ok bool) {
	n, err := strconv.ParseInt(c.Value, 10, 64)
	return n, err == nil && c.Type != "bytea" && !strings.HasPrefix(c.Value, "+")
}

// once returns the one copy of a text that many events have.
func (r *Reader) once(s string) string {
	if t, ok := r.texts[s]; ok {
		return t
	}
	s = strings.Clone(s)
	r.texts[s] = s
	return s
}

// ruleKey is the key of a table without one: actor_id || ':' || lpad(counter::text, 20, '0'); "" without
// these columns.
func ruleKey(row Row, c Columns) (key string, null bool) {
	actor, ok := row.Get(c.Actor)
	counter, ok2 := row.Get(c.Counter)
	if !ok || !ok2 || c.Actor == "" || c.Counter == "" {
		return "", false
	}
	if actor.Null || counter.Null {
		return "", true
	}
	padded := strings.Repeat("0", max(0, 20-utf8.RuneCountInString(counter.Value))) + counter.Value
	return actor.Value + ":" + string([]rune(padded)[:20]), false
}

// Partitions returns the leaves of a partitioned table, or the table itself, as test_decoding names them.
func Partitions(ctx context.Context, conn *pgx.Conn, table string) (names []string, err error) {
	rows, err := conn.Query(ctx, `SELECT format('%I.%I', n.nspname, c.relname)
		FROM pg_partition_tree($1::text::regclass) p
		JOIN pg_class c ON c.oid = p.relid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.isleaf`, table)
	if err != nil {
		return nil, err
	}
	if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil && len(names) == 0 {
		names = []string{table}
	}
	return names, err
}

func clip(s string) string {
	if len(s) <= 80 {
		return s
	}
	return s[:60] + fmt.Sprintf("... (%d bytes)", len(s))
}
