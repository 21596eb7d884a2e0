package replication

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// patience is how long a test waits for something that has to happen.
const patience = 3 * time.Minute

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits until ok says yes.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

var (
	documented = relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter", Key: "seq_key", Payload: "payload"}
	allColumns = []string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload"}
	needed     = []string{"id", "doc_id", "actor_id", "counter", "payload"} // of the documented table, whose seq_key is generated
)

// database is a database of its own with an ordinary connection to it.
type database struct {
	t    testing.TB
	url  string
	conn *pgx.Conn
	cfg  SetupConfig
}

func newDatabase(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	url := pgtest.Database(t, srv)
	d := &database{t: t, url: url}
	name := "outflow_" + url[strings.LastIndex(url, "test_"):]
	name, _, _ = strings.Cut(name, "?")
	d.cfg = SetupConfig{
		Config:  Config{URL: url, Slot: name, Publication: "outflow", Table: "public.outbox"},
		Mapping: documented, ID: "id", Columns: needed,
	}
	conn, err := pgx.Connect(within(t), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeConn(conn) })
	d.conn = conn
	return d
}

// ready is a database with table, publication and slot.
func ready(t testing.TB, srv *pgserver.Server) *database {
	t.Helper()
	d := newDatabase(t, srv)
	s := d.setup()
	defer s.Close()
	ctx := within(t)
	if err := s.CheckServer(ctx); err != nil {
		t.Fatal(err)
	}
	if made, err := s.EnsureTable(ctx); err != nil || !made {
		t.Fatal(made, err)
	}
	if made, _, err := s.EnsurePublication(ctx); err != nil || !made {
		t.Fatal(made, err)
	}
	if lsn, err := s.CreateSlot(ctx); err != nil || lsn == 0 {
		t.Fatal(lsn, err)
	}
	return d
}

func (d *database) setup() *Setup {
	d.t.Helper()
	s, err := OpenSetup(within(d.t), d.cfg)
	if err != nil {
		d.t.Fatal(err)
	}
	return s
}

func (d *database) exec(sql string, args ...any) {
	d.t.Helper()
	if _, err := d.conn.Exec(within(d.t), sql, args...); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

func (d *database) text(sql string, args ...any) string {
	d.t.Helper()
	var s string
	if err := d.conn.QueryRow(within(d.t), sql, args...).Scan(&s); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
	return s
}

func (d *database) open() *Session {
	d.t.Helper()
	s, err := Open(within(d.t), d.cfg.Config)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(s.Close)
	return s
}

func (d *database) start(from outbox.LSN) *Session {
	d.t.Helper()
	s := d.open()
	if err := s.Start(within(d.t), from, false); err != nil {
		d.t.Fatal(err)
	}
	return s
}

// ops are n real edits.
func ops(t testing.TB, n int) []recording.Op {
	t.Helper()
	all, err := recording.Load(recording.FriendsForever)
	if err != nil {
		t.Fatal(err)
	}
	return all[:n]
}

// copyIn writes edits with one COPY.
func (d *database) copyIn(all []recording.Op) {
	d.t.Helper()
	_, err := d.conn.CopyFrom(within(d.t), pgx.Identifier{"outbox"}, []string{"doc_id", "actor_id", "counter", "payload"},
		pgx.CopyFromSlice(len(all), func(i int) ([]any, error) {
			o := all[i]
			return []any{o.Doc, o.Actor, int64(o.Counter), string(o.Payload)}, nil
		}))
	if err != nil {
		d.t.Fatal(err)
	}
}

// insert writes edits with one INSERT of several rows.
func (d *database) insert(all []recording.Op) {
	d.t.Helper()
	var values []string
	var args []any
	for _, o := range all {
		n := len(args)
		values = append(values, fmt.Sprintf("($%d, $%d, $%d, $%d)", n+1, n+2, n+3, n+4))
		args = append(args, o.Doc, o.Actor, int64(o.Counter), string(o.Payload))
	}
	d.exec("INSERT INTO public.outbox (doc_id, actor_id, counter, payload) VALUES "+strings.Join(values, ", "), args...)
}

// seen counts what came through a stream, by pgoutput's message types, until enough says stop.
type seen struct {
	kinds   map[byte]int
	commits []outbox.LSN // header LSNs of the Commit messages
	inserts []string     // the Insert messages
}

func read(t testing.TB, s *Session, enough func(*seen) bool) *seen {
	t.Helper()
	got, ended := readUntil(t, s, enough)
	if ended {
		t.Fatalf("the stream ended: %v; until then %v", s.Err(), got.kinds)
	}
	return got
}

// readUntil is read where the stream may end before there is enough.
func readUntil(t testing.TB, s *Session, enough func(*seen) bool) (got *seen, ended bool) {
	t.Helper()
	got = &seen{kinds: map[byte]int{}}
	ctx := within(t)
	for !enough(got) {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				return got, true
			}
			for _, m := range b.Messages {
				got.add(m)
			}
			b.Release()
		case <-ctx.Done():
			t.Fatalf("not enough came: %v", got.kinds)
		}
	}
	return got, false
}

func (s *seen) add(m Message) {
	if m.Keepalive {
		s.kinds['k']++
		return
	}
	s.kinds[m.Data[0]]++
	switch m.Data[0] {
	case 'C':
		s.commits = append(s.commits, m.WALEnd)
	case 'I':
		s.inserts = append(s.inserts, string(m.Data))
	}
}

func inserts(n int) func(*seen) bool {
	return func(s *seen) bool { return s.kinds['I'] >= n && s.kinds['C'] > 0 && s.kinds['B'] == s.kinds['C'] }
}

// wantFault fails unless err is a fault of that class and code.
func wantFault(t testing.TB, err error, class outbox.Class, code string) *outbox.Fault {
	t.Helper()
	var f *outbox.Fault
	if !errors.As(err, &f) || f.Class != class || f.Code != code {
		t.Fatalf("got %v; want a fault of class %v, code %s", err, class, code)
	}
	return f
}
