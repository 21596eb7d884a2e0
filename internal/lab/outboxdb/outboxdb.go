// Package outboxdb gives tests of what reads PostgreSQL a database of their own, edits to write into an
// outbox, and waiting.
package outboxdb

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Patience is how long a test waits for something that has to happen.
const Patience = 3 * time.Minute

// The columns of the table as documented.
var (
	Mapping = relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter", Key: "seq_key",
		Payload: "payload"}
	Columns = []string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload"}
	Needed  = []string{"id", "doc_id", "actor_id", "counter", "payload"} // seq_key is generated
)

// PlainTable makes a table like the documented one without generated columns.
const PlainTable = `CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL,
	actor_id text NOT NULL,
	counter bigint NOT NULL, seq_key text, payload jsonb NOT NULL)`

// DB is a database of its own with a connection to it.
type DB struct {
	T    testing.TB
	URL  string
	Slot string // a name that no other database's slot has
	Conn *pgx.Conn
}

// New makes an empty database. It goes with the test.
func New(t testing.TB, srv *pgserver.Server) *DB {
	t.Helper()
	url := pgtest.Database(t, srv)
	name, _, _ := strings.Cut(url[strings.LastIndex(url, "test_"):], "?")
	d := &DB{T: t, URL: url, Slot: "outflow_" + name}
	d.Connect()
	return d
}

// EachWithRowFilters is pgtest.Each on the majors that can filter rows.
func EachWithRowFilters(t *testing.T, test func(t *testing.T, srv *pgserver.Server)) {
	t.Helper()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		if srv.Installation.Major < 15 {
			t.Skip("no row filters")
		}
		t.Parallel()
		test(t, srv)
	})
}

// Connect connects, again where the server has been away.
func (d *DB) Connect() {
	d.T.Helper()
	conn, err := pgx.Connect(Within(d.T), d.URL)
	must.Succeed(d.T, err)
	d.T.Cleanup(func() { conn.Close(context.Background()) })
	d.Conn = conn
}

// Exec runs a statement.
func (d *DB) Exec(sql string, args ...any) {
	d.T.Helper()
	if _, err := d.Conn.Exec(Within(d.T), sql, args...); err != nil {
		d.T.Fatalf("%s: %v", sql, err)
	}
}

// Text runs a query for one text.
func (d *DB) Text(sql string, args ...any) string {
	d.T.Helper()
	var s string
	if err := d.Conn.QueryRow(Within(d.T), sql, args...).Scan(&s); err != nil {
		d.T.Fatalf("%s: %v", sql, err)
	}
	return s
}

// CopyIn writes edits with one COPY.
func (d *DB) CopyIn(all []recording.Op) {
	d.T.Helper()
	_, err := d.Conn.CopyFrom(Within(d.T), pgx.Identifier{"outbox"},
		[]string{"doc_id", "actor_id", "counter", "payload"},
		pgx.CopyFromSlice(len(all), func(i int) ([]any, error) {
			o := all[i]
			return []any{o.Doc, o.Actor, int64(o.Counter), string(o.Payload)}, nil
		}))
	must.Succeed(d.T, err)
}

// Insert writes edits with one INSERT of several rows.
func (d *DB) Insert(all []recording.Op) {
	d.T.Helper()
	var values []string
	var args []any
	for _, o := range all {
		n := len(args)
		values = append(values, fmt.Sprintf("($%d, $%d, $%d, $%d)", n+1, n+2, n+3, n+4))
		args = append(args, o.Doc, o.Actor, int64(o.Counter), string(o.Payload))
	}
	d.Exec("INSERT INTO public.outbox (doc_id, actor_id, counter, payload) VALUES "+
		strings.Join(values, ", "), args...)
}

// Ops are n real edits.
func Ops(t testing.TB, n int) []recording.Op {
	t.Helper()
	all, err := recording.Load(recording.FriendsForever)
	must.Succeed(t, err)
	return all[:n]
}

// Within is a context that ends when patience does.
func Within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// Eventually waits until ok says yes.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !await.True(ok) {
		t.Fatalf("still not: %s", what)
	}
}

// WantFault fails unless err is a fault of that class and code.
func WantFault(t testing.TB, err error, class outbox.Class, code string) *outbox.Fault {
	t.Helper()
	var f *outbox.Fault
	if !errors.As(err, &f) || f.Class != class || f.Code != code {
		t.Fatalf("got %v; want a fault of class %v, code %s", err, class, code)
	}
	return f
}

// WithUser is a connection URL for another role.
func WithUser(t testing.TB, raw, user string) string {
	t.Helper()
	u, err := url.Parse(raw)
	must.Succeed(t, err)
	u.User = url.User(user)
	return u.String()
}
