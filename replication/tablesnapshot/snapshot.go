package tablesnapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/rowfilter"
)

// Snapshot reads the outbox's rows, or those of a shard, as they were at one moment. A value has the text
// that it has in the stream of changes, because both connections have the same pinned settings. It holds a
// transaction open. One goroutine uses it.
type Snapshot struct {
	cfg    catalog.Config
	conn   *pgx.Conn
	known  bool // see [Reader.LoadKnown]
	table  catalog.Table
	former *catalog.Table // see [Snapshot.IncludeFormer]
	// partitions that were detached, and not dropped yet: their rows are the outbox's as before
	detached []catalog.Table
	// columns of the outbox that one of the tables has otherwise, and why it can't be read as the outbox's:
	// they are in no query that reads these tables
	differ map[string]error
	// columns of the publication; nil below PostgreSQL 18, which lists generated ones but doesn't publish
	// them
	published []string
}

// Query says which rows are wanted. SQL in Where is the caller's: it runs with the rights of the role, and
// can change nothing.
type Query struct {
	Mapping   relay.Mapping
	ID        string   // the id column
	Columns   []string // what to read of each row; a name is a column, SortDoc or SortKey
	Where     string   // a condition; "": all rows
	Only      []string // rows with these ids, in the text that PostgreSQL prints; nil: all
	SkipKnown bool     // only rows whose ids the reader does not know ([Reader.LoadKnown])
	// by document, key and id, bytewise; without a key by document and id, a number or a time as such
	Sorted bool
	Bounds []Bound
	After  *Cursor // only rows behind this one in that order; nil: all
}

// What the rows are sorted by, as columns of a Query: text, never NULL.
const (
	SortDoc = "\x00doc"
	SortKey = "\x00key"
)

// The document's bytes, and the id's and their [IDHash], as columns of a Query.
const (
	rowDoc   = "\x00docbytes"
	rowBytes = "\x00bytes"
	rowSum   = "\x00sum"
)

// Open takes the exported snapshot of that name, or, if it is empty, one of now.
func Open(ctx context.Context, cfg catalog.Config, exported string) (*Snapshot, error) {
	r, err := OpenReader(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return r.Snapshot(ctx, exported)
}

// Reader is a connection that is to take a snapshot. One goroutine uses it.
type Reader struct {
	cfg   catalog.Config
	conn  *pgx.Conn
	known bool
}

// OpenReader connects.
func OpenReader(ctx context.Context, cfg catalog.Config) (_ *Reader, err error) {
	conn, err := cfg.Target().Connect(ctx)
	if err != nil {
		return nil, err
	}
	r := &Reader{cfg: cfg, conn: conn}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	if err := postgres.KeepBytes(ctx, conn.PgConn()); err != nil {
		return nil, err
	}
	// A temporary table is no matter of standbys.
	if _, err := conn.Exec(ctx, "SET synchronous_commit = local"); err != nil {
		return nil, fmt.Errorf("take a snapshot: %w", err)
	}
	return r, nil
}

// Close closes the connection.
func (r *Reader) Close() { postgres.Close(r.conn) }

// Snapshot takes the exported snapshot of that name, or, if it is empty, one of now. The reader's connection
// is the snapshot's then.
func (r *Reader) Snapshot(ctx context.Context, exported string) (_ *Snapshot, err error) {
	s := &Snapshot{cfg: r.cfg, conn: r.conn, known: r.known, differ: map[string]error{}}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if s.table, err = catalog.ReadTable(ctx, s.conn, s.cfg.Table); err != nil {
		return nil, err
	}
	begin := []string{"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"}
	if exported != "" {
		begin = append(begin, "SET TRANSACTION SNAPSHOT "+postgres.Literal(exported))
	}
	if s.table.Partitioned { // so that no partition is detached from now on
		begin = append(begin, "LOCK TABLE ONLY "+s.table.Quoted()+" IN ACCESS SHARE MODE")
	}
	for _, sql := range begin {
		if _, err := s.conn.Exec(ctx, sql); err != nil {
			if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
				return nil, s.rowsFault(Query{}, err)
			}
			return nil, fmt.Errorf("take a snapshot: %w", err)
		}
	}
	if s.table, err = catalog.ReadTable(ctx, s.conn, s.cfg.Table); err != nil { // the first query takes it
		return nil, err
	}
	if err := s.findDetached(ctx); err != nil {
		return nil, err
	}
	err = s.conn.QueryRow(ctx, `SELECT ARRAY(SELECT jsonb_array_elements_text(to_jsonb(p)->'attnames'))
		FROM pg_publication_tables p
		WHERE pubname = $1 AND schemaname = $2 AND tablename = $3
		AND current_setting('server_version_num')::int >= 180000`,
		s.cfg.Publication, s.table.Schema, s.table.Name).Scan(&s.published)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read the published columns of %s.%s: %w", s.table.Schema, s.table.Name, err)
	}
	return s, nil
}

// findDetached finds the partitions that queries of the outbox no longer read, and keeps them from being
// dropped.
func (s *Snapshot) findDetached(ctx context.Context) (err error) {
	if !s.table.Partitioned {
		return nil
	}
	if s.detached, err = catalog.DetachedPartitions(ctx, s.conn, s.table); err != nil {
		return err
	}
	for _, p := range s.detached {
		if _, err := s.conn.Exec(ctx, "LOCK TABLE "+p.Quoted()+" IN ACCESS SHARE MODE"); err != nil {
			if postgres.SQLState(err) == postgres.StateInsufficientPrivilege {
				return postgres.Fatal(err, "no_right",
					fmt.Sprintf("GRANT SELECT ON %s to it, for as long as the command runs", p.Quoted()),
					"the role may not read the detached partition %s.%s", p.Schema, p.Name)
			}
			return fmt.Errorf("lock the detached partition %s: %w", p.Quoted(), err)
		}
		if err := s.compareColumns(p); err != nil {
			return err
		}
	}
	return nil
}

// codeFormer is the code of a table that was published before and can't be read as the outbox.
const codeFormer = "former_table"

// compareColumns notes which columns a table that is read beside the outbox has otherwise. It refuses one
// that is called as the outbox: its name would stand for the whole row.
func (s *Snapshot) compareColumns(t catalog.Table) error {
	for _, c := range s.table.Columns {
		_, err := s.table.ColumnOf(t, c.Name)
		if f := outbox.FaultOf(err); f != nil && s.former != nil {
			f.Code = codeFormer
			f.Hint += fmt.Sprintf(". Or drop %s: its rows that are not published are lost then", t.Quoted())
		}
		if err != nil && s.differ[c.Name] == nil {
			s.differ[c.Name] = err
		}
	}
	return s.differ[s.table.Name]
}

// differs is the fault of a column that can't be read, where the server says that a query's tables lack it.
func (s *Snapshot) differs(err error) error {
	if postgres.SQLState(err) != postgres.StateUndefinedColumn {
		return nil
	}
	for _, c := range s.table.Columns {
		if f := s.differ[c.Name]; f != nil && names(err.Error(), c.Name) {
			return f
		}
	}
	return nil
}

// names reports whether a message has a name that is no part of a longer one.
func names(message, name string) bool {
	in := func(r rune) bool { return r == '_' || r == '$' || unicode.IsLetter(r) || unicode.IsDigit(r) }
	for rest := message; ; {
		before, after, is := strings.Cut(rest, name)
		if !is {
			return false
		}
		last, _ := utf8.DecodeLastRuneInString(message[:len(message)-len(after)-len(name)])
		next, _ := utf8.DecodeRuneInString(after)
		if !in(last) && !in(next) {
			return true
		}
		rest = rest[len(before)+1:]
	}
}

// Close ends the transaction and the connection.
func (s *Snapshot) Close() { postgres.Close(s.conn) }

// Table is the outbox's description.
func (s *Snapshot) Table() catalog.Table { return s.table }

// IncludeFormer makes Rows read the table with that OID, too, but for rows whose ids the outbox has: it was
// published before the outbox was made anew. It returns the name of that table, "" if it no longer exists.
func (s *Snapshot) IncludeFormer(ctx context.Context, oid uint32) (name string, err error) {
	var schema, table string
	err = s.conn.QueryRow(ctx, "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = "+
		"c.relnamespace WHERE c.oid = $1", oid).
		Scan(&schema, &table)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look for the table with OID %d: %w", oid, err)
	}
	t, err := catalog.ReadTable(ctx, s.conn, pgx.Identifier{schema, table}.Sanitize())
	if err != nil {
		return "", err
	}
	s.former = &t
	return schema + "." + table, s.compareColumns(t)
}

// CountReused counts the rows of q that have the id of another event in the table of
// [Snapshot.IncludeFormer]: of one with another value in one of the columns. Ids from a sequence start again
// with a new table.
func (s *Snapshot) CountReused(ctx context.Context, q Query) (n int, err error) {
	var differ []string
	former := otherThan(s.table.Name)
	for _, name := range q.Columns {
		now, ok := s.table.Column(name)
		before, was := s.former.Column(name)
		if ok && was && now.TypeOID == before.TypeOID { // else the text of a copy may be another one
			differ = append(differ, fmt.Sprintf("concat(%[3]s.%[1]s) <> concat(%[2]s.%[1]s)",
				postgres.Quote(name), postgres.Quote(s.table.Name), former))
		}
	}
	if len(differ) == 0 {
		return 0, nil
	}
	where := "true"
	if q.Where != "" {
		where = "(" + q.Where + "\n)"
	}
	err = s.conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*) FROM %s AS %s WHERE %s AND EXISTS (SELECT FROM "+
		"%s AS %[7]s WHERE %[7]s.%[5]s = %[2]s.%[5]s AND (%[6]s))",
		s.rows(), postgres.Quote(s.table.Name), where, s.former.Only(), postgres.Quote(q.ID),
		strings.Join(differ, " OR "), former)).Scan(&n)
	if err != nil {
		return 0, s.rowsFault(q, err)
	}
	return n, nil
}

// StreamedColumns returns those of the columns that are in the stream of changes: a generated one only where
// the publication has it.
func (s *Snapshot) StreamedColumns(columns []string) []catalog.Column {
	var in []catalog.Column
	for _, name := range columns {
		c, ok := s.table.Column(name)
		if ok && (!c.Generated || slices.Contains(s.published, name)) {
			in = append(in, c)
		}
	}
	return in
}

// flushPatience is how long WAL may take to reach the disk: by default the server's WAL writer needs 0.6 s.
const flushPatience = 30 * time.Second

// AwaitFlush waits until the WAL is on disk as far as it was written when the snapshot was taken. Only what
// is on disk can be decoded, and a transaction with synchronous_commit = off is visible before.
func (s *Snapshot) AwaitFlush(ctx context.Context) error {
	var target outbox.LSN
	begun := time.Now()
	for {
		var inserted, flushed string
		if err := s.conn.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text, "+
			"pg_current_wal_flush_lsn()::text").Scan(&inserted, &flushed); err != nil {
			return fmt.Errorf("read the end of WAL: %w", err)
		}
		at, err := outbox.ParseLSN(inserted)
		if err != nil {
			return err
		}
		if target == 0 {
			target = at
		}
		if edge := target % walPage; time.Since(begun) > walWriter &&
			(edge == shortHeader || edge == longHeader) {
			// behind a page's end it points behind the next page's header, which is written with the next
			// record only
			target -= edge
		}
		if at, err = outbox.ParseLSN(flushed); err != nil {
			return err
		}
		if at >= target {
			return nil
		}
		if time.Since(begun) > flushPatience {
			return fmt.Errorf("the WAL up to %v was not on disk within %v", target, flushPatience)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// The layout of WAL (xlog_internal.h).
const (
	walPage     = 8192
	shortHeader = 24
	longHeader  = 40

	walWriter = 2 * time.Second // more than the WAL writer takes
)

// Rows calls f with each row: the text of its values as PostgreSQL prints it, nil for NULL. They are valid
// until f returns. An error of f ends it and is returned; the snapshot is of no more use then.
func (s *Snapshot) Rows(ctx context.Context, q Query, f func(values [][]byte) error) error {
	sql, params := s.query(q)
	formats := make([]int16, len(q.Columns)) // text
	types := make([]uint32, len(params))
	for i := range types {
		types[i] = pgtype.TextArrayOID
	}
	rows := s.conn.PgConn().ExecParams(ctx, sql, params, types, nil, formats)
	for rows.NextRow() {
		if err := f(rows.Values()); err != nil {
			postgres.Close(s.conn) // with the rest of the rows unread
			return err
		}
	}
	if _, err := rows.Close(); err != nil {
		return s.rowsFault(q, err)
	}
	return nil
}

// TryRows is Rows, but if PostgreSQL can't carry out the query, the snapshot is still of use.
func (s *Snapshot) TryRows(ctx context.Context, q Query, f func(values [][]byte) error) error {
	if _, err := s.conn.Exec(ctx, "SAVEPOINT try"); err != nil {
		return fmt.Errorf("set a savepoint: %w", err)
	}
	err, end := s.Rows(ctx, q, f), "RELEASE SAVEPOINT try"
	if postgres.SQLState(err) != "" {
		end = "ROLLBACK TO SAVEPOINT try"
	} else if err != nil {
		return err
	}
	if _, failed := s.conn.Exec(ctx, end); failed != nil {
		return failed
	}
	return err
}

// ofCondition are the classes of the errors that a condition has whenever it is tried: of its text, of what
// it names, of the values that it is given, of functions that it calls.
var ofCondition = []string{"0A", "21", "22", "2F", "38", "39", "3F", "42", "P0"}

func (s *Snapshot) rowsFault(q Query, err error) error {
	table, quoted := s.table.Schema+"."+s.table.Name, s.table.Quoted()
	if s.former != nil {
		table, quoted = table+" or "+s.former.Schema+"."+s.former.Name, quoted+", "+s.former.Quoted()
	}
	state := postgres.SQLState(err)
	if f := s.differs(err); f != nil {
		return f
	}
	switch {
	case state == postgres.StateDiskFull || state == postgres.StateConfigurationLimitExceeded:
		return postgres.Fatal(err, "temp_space", "Give the server room for temporary files "+
			"(temp_tablespaces, temp_file_limit): it sorts the rows of "+table+
			", and needs about as much as they take, then run the command again",
			"the server has no room to sort table %s", table)
	case state == postgres.StateInsufficientPrivilege && strings.Contains(err.Error(), "row-level security"):
		return postgres.Fatal(err, "row_security",
			fmt.Sprintf("Run the command as the owner of %s, or as a role with BYPASSRLS", s.table.Quoted()),
			"row-level security hides rows of table %s from the role", table)
	case state == postgres.StateInsufficientPrivilege:
		return postgres.Fatal(err, "no_right",
			fmt.Sprintf("GRANT SELECT ON %s to it, for as long as the command runs", quoted),
			"the role may not read table %s", table)
	case s.former != nil && q.Where == "" &&
		slices.Contains([]string{postgres.StateUndefinedColumn, postgres.StateUndefinedFunction,
			postgres.StateDatatypeMismatch, postgres.StateCannotCoerce}, state):
		return postgres.Fatal(err, codeFormer, fmt.Sprintf("Give the columns of %s the names and types "+
			"that they have in %s, or drop it: its rows that are not published are lost then",
			s.former.Quoted(), s.table.Quoted()), "tables %s can't be read as one: their columns differ",
			table)
	case q.Where != "" && slices.Contains(ofCondition, state[:min(2, len(state))]):
		return &outbox.Fault{
			Class: outbox.Usage, Code: "where", Message: fmt.Sprintf("--where %q is no condition on table %s",
				q.Where, table), Err: err,
			Hint: "Write what could stand behind WHERE in a query of the table",
		}
	}
	if f := q.boundsFault(err); f != nil {
		return f
	}
	return fmt.Errorf("read table %s: %w", table, err)
}

func (s *Snapshot) query(q Query) (sql string, params [][]byte) {
	doc, key, id := s.sortDoc(q.Mapping), s.sortKey(q.Mapping), sortID(q.ID)
	columns := make([]string, len(q.Columns))
	for i, name := range q.Columns {
		switch name {
		case SortDoc:
			columns[i] = doc
		case SortKey:
			columns[i] = key
		case SortID:
			columns[i] = id
		case rowDoc:
			c, _ := s.table.Column(q.Mapping.Doc)
			columns[i] = BytesOf(columnOf(s.table.Name, c), c)
		case rowBytes, rowSum:
			c, _ := s.table.Column(q.ID)
			if columns[i] = BytesOf(columnOf(s.table.Name, c), c); name == rowSum {
				columns[i] = HashOf(s.table.Name, c)
			}
		default:
			columns[i] = postgres.Quote(name)
		}
	}
	sql = "SELECT " + strings.Join(columns, ", ") + " FROM " + s.from(q)
	conditions := s.shardCondition()
	if q.SkipKnown && s.known {
		c, _ := s.table.Column(q.ID)
		conditions = append(conditions, "NOT "+Known(s.table.Name, c))
	}
	if q.Where != "" {
		conditions = append(conditions, "("+q.Where+"\n)") // a comment at its end ends there
	}
	if q.Only != nil {
		conditions = append(conditions, id+" = ANY($1)")
		array, err := pgtype.NewMap().Encode(pgtype.TextArrayOID, pgtype.TextFormatCode, q.Only, nil)
		if err != nil {
			panic("replication: encode ids: " + err.Error()) // strings only
		}
		params = append(params, array)
	}
	conditions = append(conditions, s.conditions(q)...)
	if len(conditions) > 0 {
		sql += " WHERE " + strings.Join(conditions, " AND ")
	}
	if q.Sorted {
		sql += fmt.Sprintf(` ORDER BY %s COLLATE "C", %s COLLATE "C", %s`, doc, key, s.tiebreaker(q, id))
	}
	return sql, params
}

// shardCondition is the condition of the rows that the stream of changes brings: none where the table is not
// divided.
func (s *Snapshot) shardCondition() []string {
	if condition := rowfilter.Condition(s.cfg.Shard, postgres.Quote(s.cfg.ShardBy)); condition != "" {
		return []string{condition}
	}
	return nil
}

// from is the table, and under its name what it is read with.
func (s *Snapshot) from(q Query) string {
	name := postgres.Quote(s.table.Name)
	if s.former == nil {
		return s.rows() + " AS " + name
	}
	return fmt.Sprintf("(SELECT * FROM %s AS t UNION ALL SELECT %s FROM %s AS f WHERE NOT EXISTS (SELECT "+
		"FROM %[1]s AS n WHERE n.%[4]s = f.%[4]s)) AS %[5]s",
		s.rows(), s.columnsOf(*s.former), s.former.Only(), postgres.Quote(q.ID), name)
}

// rows is the table, and the partitions that are detached, without a name.
func (s *Snapshot) rows() string {
	if len(s.detached) == 0 && s.former == nil {
		return s.table.Only()
	}
	all := []string{"SELECT " + s.columnsOf(s.table) + " FROM " + s.table.Only()}
	for _, p := range s.detached {
		all = append(all, "SELECT "+s.columnsOf(p)+" FROM "+p.Only())
	}
	return "(" + strings.Join(all, " UNION ALL ") + ")"
}

// columnsOf are the columns of the outbox, as another table has them, but for those of which one of the
// tables can't tell: a query that needs one of these fails.
func (s *Snapshot) columnsOf(t catalog.Table) string {
	var all []string
	for _, c := range s.table.Columns {
		if sql, err := s.table.ColumnOf(t, c.Name); err == nil && s.differ[c.Name] == nil {
			all = append(all, sql+" AS "+postgres.Quote(c.Name))
		}
	}
	return strings.Join(all, ", ")
}

// tiebreaker orders what has the same key. Where no row has one it is all the order there is: a number or a
// time is one as such, then.
func (s *Snapshot) tiebreaker(q Query, printed string) string {
	if c, _ := s.table.Column(q.ID); !q.Mapping.Keyed() && slices.Contains(countable, c.TypeOID) {
		return postgres.Quote(q.ID)
	}
	return printed + ` COLLATE "C"`
}

// countable are the types whose order is not that of their text.
var countable = []uint32{
	pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID, pgtype.OIDOID, pgtype.NumericOID, pgtype.DateOID,
	pgtype.TimestampOID, pgtype.TimestamptzOID,
}

// printed is a column as the server prints it, which a cast to text is not for every type.
func printed(column string) string { return "concat(" + postgres.Quote(column) + ")" }

func (s *Snapshot) sortDoc(m relay.Mapping) string { return printed(m.Doc) }

// sortKey is the key as the decoder has it: a generated column that is not published is computed from actor
// and counter.
func (s *Snapshot) sortKey(m relay.Mapping) string {
	both := m.Actor != "" && m.Counter != ""
	switch {
	case m.Key != "" && (len(s.StreamedColumns([]string{m.Key})) > 0 || !both):
		return printed(m.Key)
	case both:
		return fmt.Sprintf("coalesce(%s::text || ':' || lpad(%s::text, 20, '0'), '')",
			postgres.Quote(m.Actor), postgres.Quote(m.Counter))
	}
	return "''"
}
