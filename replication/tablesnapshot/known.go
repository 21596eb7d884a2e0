package tablesnapshot

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// IDHash stands for an event id: the first half of the SHA-256 of the bytes that an event has as its id.
type IDHash [16]byte

// KnownTable holds what a connection knows: the hash of each id, in column sum. It is temporary: the server
// drops it with the connection, and no WAL is written for it. The column is bytea: PostgreSQL makes a uuid of
// a hash by way of its text only, which took it longer than the hash itself.
const KnownTable = "pg_temp.outflow_known"

// LoadKnown tells the reader the ids of what is published, as the function of that name does. Call it once,
// and before the snapshot that the reader takes is exported, which would not see them.
func (r *Reader) LoadKnown(ctx context.Context, fill func(add func(...IDHash) error) error) error {
	err := LoadKnown(ctx, r.conn, func() error { return nil }, fill)
	r.known = err == nil
	return err
}

// The ids go to the server in statements of knownBatch ids, and what there is every knownBeat: PostgreSQL
// hears of a process that waits for ids, and can end the session of one that was stopped
// (idle_session_timeout), which it never does within a COPY.
const (
	knownBatch = 5000
	knownBeat  = 15 * time.Second
)

// LoadKnown makes [KnownTable] on a connection, or adds to it: fill calls add with the hash of each id that
// is published; without any it says whether something has failed meanwhile. The server keeps them, so memory
// does not grow with them. fill may take its time, and leaves the connection alone: what else is done over it
// does between, which is called between the statements.
func LoadKnown(ctx context.Context, conn *pgx.Conn, between func() error,
	fill func(add func(...IDHash) error) error) error {
	return loadKnown(ctx, conn, knownBeat, between, fill)
}

func loadKnown(ctx context.Context, conn *pgx.Conn, beat time.Duration, between func() error,
	fill func(add func(...IDHash) error) error) error {
	_, err := conn.Exec(ctx, "CREATE TEMPORARY TABLE IF NOT EXISTS outflow_known (sum bytea NOT NULL)")
	if err != nil {
		return knownFault(err)
	}
	l := &loader{conn: conn, between: between}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(ended)
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				l.beat(ctx)
			}
		}
	}()
	err = fill(func(ids ...IDHash) error { return l.add(ctx, ids) })
	close(stop)
	<-ended
	if err == nil {
		err = l.flush(ctx)
	}
	if err == nil {
		_, err = conn.Exec(ctx, "ANALYZE "+KnownTable)
	}
	return knownFault(err)
}

// loader sends ids. Any goroutine may use it.
type loader struct {
	mu      sync.Mutex // guards all, and the connection
	conn    *pgx.Conn
	between func() error
	ids     []byte // each with its length before it, as in the binary format of an array
	n       int
	err     error // that the server has refused something, or is gone
}

func (l *loader) add(ctx context.Context, ids []IDHash) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.ids = append(binary.BigEndian.AppendUint32(l.ids, uint32(len(id))), id[:]...)
	}
	if l.n += len(ids); l.n < knownBatch {
		return l.err
	}
	return l.flush(ctx)
}

func (l *loader) beat(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == 0 && l.err == nil {
		l.err = l.conn.Ping(ctx)
	}
	_ = l.flush(ctx) // add returns its error
}

// flush sends what there is in one message: the server waits for the rest of one with the same patience as
// for the next one. As text the array would take the server several times as long.
func (l *loader) flush(ctx context.Context) error {
	if l.err == nil && l.n > 0 {
		// As array_recv in PostgreSQL's arrayfuncs.c reads it: how many dimensions, whether there are NULLs,
		// the type of an element, how many there are, the index of the first one.
		var array []byte
		for _, n := range []int{1, 0, pgtype.ByteaOID, l.n, 1} {
			array = binary.BigEndian.AppendUint32(array, uint32(n))
		}
		_, l.err = l.conn.PgConn().ExecParams(ctx,
			"INSERT INTO "+KnownTable+" SELECT pg_catalog.unnest($1)", [][]byte{append(array, l.ids...)},
			[]uint32{pgtype.ByteaArrayOID}, []int16{pgtype.BinaryFormatCode}, nil).Close()
		l.ids, l.n = l.ids[:0], 0
	}
	if l.err == nil {
		l.err = l.between()
	}
	return l.err
}

func knownFault(err error) error {
	if err == nil {
		return nil
	}
	switch postgres.SQLState(err) {
	case postgres.StateInsufficientPrivilege:
		return postgres.Fatal(err, "no_right",
			"GRANT TEMPORARY ON DATABASE ... to it, for as long as the command runs",
			"the role may not make a temporary table, which would hold what is published already")
	case postgres.StateDiskFull, postgres.StateConfigurationLimitExceeded:
		return postgres.Fatal(err, "temp_space", "Give the server room for temporary files "+
			"(temp_tablespaces, temp_file_limit), then run the command again",
			"the server has no room for a temporary table of what is published already")
	}
	return fmt.Errorf("make a temporary table of what is published: %w", err)
}

// Known is the condition that [KnownTable] has the id of a row of the table that FROM calls by that name.
func Known(table string, id catalog.Column) string {
	as := otherThan(table)
	return "EXISTS (SELECT FROM " + KnownTable + " AS " + as + " WHERE " + as + ".sum = " +
		"substr(sha256(" + BytesOf(columnOf(table, id), id) + "), 1, 16))"
}

// otherThan returns a name for another table, by which a subquery does not hide that one.
func otherThan(table string) string {
	if table == "other" {
		return "another"
	}
	return "other"
}

// HashOf is the IDHash of a row of the table that FROM calls by that name, as a uuid: of the bytes that the
// decoder makes of the column.
func HashOf(table string, id catalog.Column) string {
	return "left(encode(sha256(" + BytesOf(columnOf(table, id), id) + "), 'hex'), 32)::uuid"
}

// BytesOf are the bytes that the decoder makes of a value of a column, both as SQL.
func BytesOf(value string, c catalog.Column) string {
	if c.TypeOID == pgtype.ByteaOID {
		return "coalesce(" + value + ", '')"
	}
	return "textsend(concat(" + value + "))"
}

// columnOf is a column of the table that FROM calls by that name, as SQL.
func columnOf(table string, c catalog.Column) string {
	return postgres.Quote(table) + "." + postgres.Quote(c.Name)
}

// Noted is a row whose id is noted in another table.
type Noted struct {
	ID      []byte // as an event has it
	Doc     string // likewise
	Request string // as that table says
}

// Noted calls f with each row of the query whose id another table has: its column sum is the IDHash, request
// is handed on. condition is one on that table, which is called noted. That it may not be read is the
// caller's to explain.
func (s *Snapshot) Noted(ctx context.Context, q Query, table, condition string, f func(Noted) error) error {
	q.Columns, q.Sorted = []string{rowBytes, rowDoc, rowSum}, false
	sql, params := s.query(q)
	if params != nil {
		panic("replication: a list of ids is not looked up")
	}
	rows, err := s.conn.Query(ctx, "SELECT r.id, r.doc, noted.request FROM ("+sql+") AS r (id, doc, sum) "+
		"JOIN "+table+" AS noted ON noted.sum = r.sum WHERE "+condition)
	if err == nil {
		var n Noted
		var doc []byte
		_, err = pgx.ForEachRow(rows, []any{&n.ID, &doc, &n.Request}, func() error {
			n.Doc = string(doc)
			return f(n)
		})
	}
	if state := postgres.SQLState(err); state != "" && state != postgres.StateInsufficientPrivilege {
		err = s.rowsFault(q, err)
	}
	return err
}

// Querier reads within the snapshot.
func (s *Snapshot) Querier() catalog.Querier { return s.conn }

// Count returns how many rows a query would bring.
func (s *Snapshot) Count(ctx context.Context, q Query) (n int, err error) {
	q.Columns, q.Sorted = nil, false
	sql, params := s.query(q)
	if params != nil {
		panic("replication: a list of ids is not counted") // its length is known
	}
	if err := s.conn.QueryRow(ctx, "SELECT count(*) FROM ("+sql+") AS rows").Scan(&n); err != nil {
		return 0, s.rowsFault(q, err)
	}
	return n, nil
}

// CheckIDs returns how many rows have no id, and how many have the id of another row. Where the table itself
// forbids both, nothing is read.
func (s *Snapshot) CheckIDs(ctx context.Context, id string) (none, double int, err error) {
	c, ok := s.table.Column(id)
	if !ok {
		return 0, 0, fmt.Errorf("table %s.%s has no column %s", s.table.Schema, s.table.Name, id)
	}
	var unique bool
	err = s.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_index WHERE indrelid = $1 AND indisunique
		AND indisvalid AND indimmediate
		AND indnkeyatts = 1 AND indkey[0] = $2 AND indpred IS NULL AND indexprs IS NULL)`, s.table.OID, c.Number).Scan(&unique)
	if err != nil {
		return 0, 0, fmt.Errorf("read the indexes of %s.%s: %w", s.table.Schema, s.table.Name, err)
	}
	if unique && c.NotNull && len(s.detached) == 0 {
		return 0, 0, nil
	}
	where := ""
	for _, ours := range s.shardCondition() {
		where = " WHERE " + ours
	}
	err = s.conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*) - count(%[1]s), count(%[1]s) - count(DISTINCT "+
		"%[2]s) FROM %[3]s",
		postgres.Quote(id), "CASE WHEN "+postgres.Quote(id)+" IS NOT NULL THEN "+printed(id)+
			" COLLATE \"C\" END", s.rows()+" AS "+postgres.Quote(s.table.Name)+where)).Scan(&none, &double)
	if err != nil {
		return 0, 0, s.rowsFault(Query{}, err)
	}
	return none, double, nil
}
