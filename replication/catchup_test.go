package replication

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/pgserver"
	"github.com/outflowhq/outflow/internal/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// bySQL reads every backlog by SQL, whatever it looks like, in chunks as small as they get.
func bySQL() *CatchUp {
	c := NewCatchUp(1)
	c.patience, c.rowsPerTx = patience, 1e9
	c.limits = chunkLimits{bytes: 8 << 10, time: time.Minute, rows: 20, minWindow: 16 << 10, maxWindow: 64 << 10, patience: patience, reread: 1 << 40}
	return c
}

// heard is what a session brought, up to a message with the prefix "end".
type heard struct {
	messages []string // of pgoutput, without what it says of relations
	markers  int
}

// hear reads until the end, and checks that keepalives promise what is so.
func hear(t testing.TB, s *Session) (h heard) {
	t.Helper()
	var marker, commit outbox.LSN
	open := false
	for ctx := within(t); ; {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				t.Fatalf("the stream ended: %v", s.Err())
			}
			for _, m := range b.Messages {
				switch {
				case m.Keepalive:
					if !open && m.WALEnd < marker {
						t.Errorf("a keepalive at %v follows one at %v", m.WALEnd, marker)
					}
					if !open {
						h.markers++
						marker = m.WALEnd
					}
					continue
				case m.Data[0] == 'B':
					open = true
				case m.Data[0] == 'C':
					if m.WALEnd <= marker || m.WALEnd <= commit {
						t.Errorf("a commit at %v follows one at %v and a keepalive at %v", m.WALEnd, commit, marker)
					}
					open, commit = false, m.WALEnd
				case m.Data[0] == 'R':
					continue
				}
				h.messages = append(h.messages, string(m.Data))
				if m.Data[0] == 'M' && strings.HasPrefix(string(m.Data[10:]), "end\x00") {
					b.Release()
					return h
				}
			}
			b.Release()
		case <-ctx.Done():
			t.Fatalf("the end does not come; %d messages came", len(h.messages))
		}
	}
}

// twin makes a slot that stands where the database's own does, and returns the database with that one.
func (d *database) twin() *database {
	d.t.Helper()
	t := *d
	t.cfg.Slot += "_twin"
	d.exec("SELECT pg_copy_logical_replication_slot($1, $2)", d.cfg.Slot, t.cfg.Slot)
	return &t
}

func (d *database) confirmed() outbox.LSN {
	d.t.Helper()
	lsn, err := outbox.ParseLSN(d.text("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", d.cfg.Slot))
	if err != nil {
		d.t.Fatal(err)
	}
	return lsn
}

// mixed writes transactions of every kind.
func (d *database) mixed(rnd *rand.Rand, n int, prepared bool) {
	d.t.Helper()
	all := ops(d.t, 400)
	some := func() { d.insert(all[rnd.IntN(300):][:1+rnd.IntN(3)]) }
	for i := range n {
		switch rnd.IntN(10) {
		case 0: // nothing of ours
			d.exec("CREATE TABLE IF NOT EXISTS other (n int)")
			d.exec("INSERT INTO other SELECT generate_series(1, 20)")
		case 1: // nothing at all
			d.exec("BEGIN")
			some()
			d.exec("ROLLBACK")
		case 2:
			d.exec("BEGIN")
			some()
			d.exec("SAVEPOINT s")
			some()
			d.exec("ROLLBACK TO s")
			some()
			d.exec("COMMIT")
		case 3:
			d.exec("SELECT pg_logical_emit_message(true, 'note', $1), pg_logical_emit_message(false, 'note', $1)", strconv.Itoa(i))
		case 4: // many rows, one commit
			d.insert(all[:100+rnd.IntN(100)])
		case 5:
			if prepared {
				id := fmt.Sprintf("%s_%d_%d", d.cfg.Slot, i, rnd.Uint32())
				d.exec("BEGIN")
				some()
				d.exec("PREPARE TRANSACTION " + literal(id))
				some()
				d.exec("COMMIT PREPARED " + literal(id))
			}
		default:
			some()
		}
	}
}

// Whatever is in the WAL and whatever is written at the same time: what a session brings is what it would bring without SQL, message by
// message and byte by byte, also behind a start in the middle.
func TestBacklogBySQLIsTheStream(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		for _, binary := range []bool{false, true} {
			t.Run(fmt.Sprintf("postgres-%d,binary=%v", major, binary), func(t *testing.T) {
				t.Parallel()
				srv := pgtest.Own(t, major, "max_prepared_transactions=10")
				d := ready(t, srv)
				twin := d.twin()
				rnd := rand.New(rand.NewPCG(uint64(major), 1))
				d.mixed(rnd, 150, true)
				// These span the end of the backlog; one has begun before it, and is prepared.
				open, prepared := newDatabaseAt(t, d), newDatabaseAt(t, d)
				open.exec("BEGIN")
				open.insert(ops(t, 50))
				prepared.exec("BEGIN")
				prepared.insert(ops(t, 50))
				prepared.exec("PREPARE TRANSACTION 'spans'")
				d.mixed(rnd, 20, true)

				// Writers go on through all of it, and some commits are forced between any two chunks.
				d.cfg.CatchUp = bySQL()
				between := newDatabaseAt(t, d)
				chunks := 0
				d.cfg.CatchUp.reading = func() {
					if chunks++; chunks%4 == 0 {
						between.insert(ops(t, 2))
					}
				}
				var writers sync.WaitGroup
				stop := make(chan struct{})
				for i := range 2 {
					w := newDatabaseAt(t, d)
					own := rand.New(rand.NewPCG(uint64(i), 2))
					writers.Go(func() {
						for !closed(stop) {
							w.mixed(own, 5, true)
						}
					})
				}
				s := d.open()
				if err := s.Start(within(t), d.confirmed(), binary); err != nil {
					t.Fatal(err)
				}
				if s.streaming().backlog == nil {
					t.Fatal("the backlog is streamed")
				}
				ended := make(chan heard, 1)
				go func() { ended <- hear(t, s) }()
				eventually(t, "the stream goes on", func() bool { return !s.CatchingUp() })
				open.exec("COMMIT")
				prepared.exec("COMMIT PREPARED 'spans'")
				close(stop)
				writers.Wait()
				d.exec("SELECT pg_logical_emit_message(true, 'end', '')")
				got := <-ended
				if chunks < 5 || got.markers == 0 {
					t.Errorf("%d chunks, %d markers", chunks, got.markers)
				}
				if n := d.text("SELECT count(*)::text FROM pg_replication_slots WHERE temporary"); n != "0" {
					eventually(t, "no copy is left", func() bool {
						return d.text("SELECT count(*)::text FROM pg_replication_slots WHERE temporary") == "0"
					})
				}

				u := twin.open()
				if err := u.Start(within(t), twin.confirmed(), binary); err != nil {
					t.Fatal(err)
				}
				alike(t, hear(t, u), got)

				// Behind any commit, what is left is the rest.
				s.Close()
				var commits []int
				for i, m := range got.messages {
					if m[0] == 'C' {
						commits = append(commits, i)
					}
				}
				for range 3 {
					at := commits[rnd.IntN(len(commits)-1)]
					again := d.open()
					eventually(t, "the slot is free", func() bool { return again.Start(within(t), endOf(got.messages[at]), binary) == nil })
					if again.streaming().backlog == nil {
						t.Fatal("the backlog is streamed")
					}
					rest := hear(t, again)
					if tail := behind(got.messages[at+1:]); strings.Join(behind(rest.messages), "") != strings.Join(tail, "") {
						t.Errorf("behind %v: %d messages, want %d", endOf(got.messages[at]), len(rest.messages), len(tail))
					}
					again.Close()
				}
			})
		}
	}
}

// behind leaves out messages that are in no transaction: they come when they are read, so where a start lies between one and the commits
// around it, it may be on either side.
func behind(messages []string) (in []string) {
	open := false
	for _, m := range messages {
		switch m[0] {
		case 'B':
			open = true
		case 'C':
			open = false
		case 'M':
			if !open {
				continue
			}
		}
		in = append(in, m)
	}
	return in
}

// endOf is the end LSN in a Commit message.
func endOf(commit string) outbox.LSN { return outbox.LSN(binary.BigEndian.Uint64([]byte(commit[10:]))) }

func alike(t testing.TB, want, got heard) {
	t.Helper()
	for i := range max(len(want.messages), len(got.messages)) {
		if i >= len(want.messages) || i >= len(got.messages) || want.messages[i] != got.messages[i] {
			t.Fatalf("message %d of %d (by SQL) and %d (streamed) differs", i, len(got.messages), len(want.messages))
		}
	}
}

// The slot is held all the while: who else wants it stands by.
func TestBacklogBySQLHoldsTheSlot(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.mixed(rand.New(rand.NewPCG(1, 1)), 100, false)
	d.cfg.CatchUp = bySQL()
	s := d.start(d.confirmed())
	if !s.CatchingUp() { // nothing was taken yet, and it does not fit into the queue
		t.Fatal("the backlog is streamed")
	}
	if err := d.open().Start(within(t), d.confirmed(), false); !errors.Is(err, ErrSlotInUse) {
		t.Errorf("second start: %v", err)
	}
	if now := d.confirmed(); now == 0 || d.text("SELECT count(*)::text FROM pg_replication_slots WHERE temporary AND database = current_database()") != "1" {
		t.Errorf("confirmed %v", now)
	}
}

// Nobody takes what comes, and still the server hears from us, and can stop.
func TestFastStopInABacklog(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run("postgres-"+strconv.Itoa(major), func(t *testing.T) {
			t.Parallel()
			srv := pgtest.Own(t, major, "autovacuum=off") // PostgreSQL 14 sends its transactions, and nobody takes those either
			d := ready(t, srv)
			edits := ops(t, 20000)
			for range 4 { // more than the queue holds
				d.copyIn(edits)
			}
			d.cfg.CatchUp = bySQL()
			s := d.open()
			if err := s.Start(within(t), d.confirmed(), false); err != nil {
				t.Fatal(err)
			}
			if s.streaming().backlog == nil {
				t.Fatal("the backlog is streamed")
			}
			eventually(t, "the queue is full", func() bool { return len(s.Batches()) == queued })
			closeConn(d.conn)
			if err := srv.Stop("fast"); err != nil { // gives up after a minute
				t.Fatal(err)
			}
			eventually(t, "the session has ended", func() bool { return s.Err() != nil })
			if err := s.Err(); outbox.ClassOf(err) != outbox.Transient {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

// A session that ends in the middle of a chunk ends at once, and nothing of it is left at the server.
func TestEndInTheMiddleOfAChunk(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		d.exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'd', 'a', n, '{}' FROM generate_series(1, 300000) n`)
		for name, end := range map[string]func(*Session) error{
			"closed":  func(s *Session) error { s.Close(); return nil },
			"stopped": func(s *Session) error { return s.Stop(within(t)) },
			"lost": func(s *Session) error {
				d.exec("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1", d.cfg.Slot)
				return nil
			},
		} {
			t.Run(name, func(t *testing.T) {
				asked := make(chan struct{})
				d.cfg.CatchUp = bySQL()
				d.cfg.CatchUp.limits.maxWindow, d.cfg.CatchUp.limits.minWindow = 1<<40, 1<<40
				d.cfg.CatchUp.reading = sync.OnceFunc(func() { close(asked) })
				s := d.open()
				eventually(t, "the slot is free", func() bool { return s.Start(within(t), d.confirmed(), false) == nil })
				if s.streaming().backlog == nil {
					t.Fatal("the backlog is streamed")
				}
				<-asked
				if err := end(s); err != nil {
					t.Error(err)
				}
				for range s.Batches() {
				}
				if s.Err() == nil {
					t.Error("no error")
				}
				eventually(t, "neither the copy nor the query is left", func() bool {
					return d.text(`SELECT count(*)::text FROM pg_replication_slots WHERE temporary AND database = current_database()`) == "0" &&
						d.text(`SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%get_binary_changes%'
							AND pid <> pg_backend_pid()`) == "0"
				})
				if d.cfg.CatchUp.until != 0 {
					t.Error("an end from outside counts as a failure")
				}
			})
		}
	})
}

// logged is what was logged.
type logged struct {
	mu  sync.Mutex
	all strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

// Where a copy of the slot can't be made, or SQL would not be the faster way, the backlog is streamed, and it is all there.
func TestBacklogIsStreamedWhereSQLCannot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		settings []string
		perTx    int
		opened   func(d *database) // once the session has its connections
		change   func(c *CatchUp)
		why      string // what is logged, once; "": nothing
	}{
		{name: "no slot is free", settings: []string{"max_replication_slots=1"}, perTx: 1, why: "can't be read by SQL"},
		{
			name: "no connection is free", perTx: 1, why: "can't be read by SQL",
			opened: func(d *database) { d.exec("ALTER ROLE narrow CONNECTION LIMIT 0") },
		},
		{name: "off", perTx: 1, change: func(c *CatchUp) { c.above = 0 }},
		{name: "a small backlog", perTx: 1, change: func(c *CatchUp) { c.above = 1 << 40 }},
		{name: "large transactions", perTx: 20, change: func(c *CatchUp) { c.rowsPerTx = 10 }, why: "its transactions are large"},
		{name: "a sample that takes long", perTx: 1, change: func(c *CatchUp) { c.patience = time.Nanosecond }, why: "by SQL"},
		{name: "it has failed", perTx: 1, change: func(c *CatchUp) { c.failed(1 << 60) }},
		{
			name: "the copy of a slot that was moved", perTx: 1, why: "can't be read by SQL",
			opened: func(d *database) {
				d.exec("SELECT pg_replication_slot_advance($1, pg_current_wal_insert_lsn())", d.cfg.Slot)
				d.insert(ops(t, 100))
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := ready(t, pgtest.Own(t, 0, c.settings...))
			d.exec("CREATE ROLE narrow LOGIN REPLICATION")
			edits, from := ops(t, 100), d.confirmed()
			for i := 0; i < len(edits); i += c.perTx {
				d.insert(edits[i:][:c.perTx])
			}
			var log logged
			d.cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			d.cfg.CatchUp = bySQL()
			if c.change != nil {
				c.change(d.cfg.CatchUp)
			}
			d.cfg.URL = asRole(d.url, "narrow")
			for range 2 {
				d.exec("ALTER ROLE narrow CONNECTION LIMIT -1")
				s := d.open()
				eventually(t, "the slot is free", func() bool { return d.text("SELECT count(*)::text FROM pg_replication_slots WHERE active") == "0" })
				if c.opened != nil {
					c.opened(d)
				}
				if err := s.Start(within(t), from, false); err != nil {
					t.Fatal(err)
				}
				if s.streaming().backlog != nil {
					t.Fatal("it is read by SQL")
				}
				if got := read(t, s, inserts(100)); got.kinds['I'] != 100 {
					t.Errorf("%d inserts", got.kinds['I'])
				}
				s.Close()
			}
			if n := strings.Count(log.text(), "streamed"); c.why == "" && n != 0 || c.why != "" && (n != 1 || !strings.Contains(log.text(), c.why)) {
				t.Errorf("logged %q; want %q, once", log.text(), c.why)
			}
		})
	}
}

// asRole is a connection URL with another role in it.
func asRole(url, role string) string {
	scheme, rest, _ := strings.Cut(url, "://")
	if _, host, ok := strings.Cut(rest, "@"); ok {
		rest = host
	}
	return scheme + "://" + role + "@" + rest
}

// A chunk that fails ends the session, as any error does; what it was about is streamed by the next one, and so it ends.
func TestFailedChunkIsStreamedByTheNextSession(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.mixed(rand.New(rand.NewPCG(1, 1)), 50, false)
	d.exec("SELECT pg_logical_emit_message(true, 'end', '')")
	from := d.confirmed()
	want := hear(t, d.twin().start(from))
	for name, c := range map[string]struct {
		change func(c *CatchUp)
		fails  bool // and counts as a failure; a session that was killed may not have said why
	}{
		"too slow": {func(c *CatchUp) { c.limits.patience = time.Nanosecond }, true},
		"a session killed": {func(c *CatchUp) {
			c.reading = sync.OnceFunc(func() {
				d.exec("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE temporary AND database = current_database()")
			})
		}, false},
		"the copy is gone": {func(c *CatchUp) { c.copied = func(b *backlog) { b.slot = "gone" } }, true},
	} {
		d.cfg.CatchUp = bySQL()
		c.change(d.cfg.CatchUp)
		s := d.open()
		eventually(t, "the slot is free", func() bool { return s.Start(within(t), from, false) == nil })
		if s.streaming().backlog == nil {
			t.Fatal(name, ": the backlog is streamed")
		}
		err := end(t, s)
		if err == nil || outbox.ClassOf(err) != outbox.Transient {
			t.Errorf("%s: ended with %v", name, err)
		}
		s.Close()
		if failed := d.cfg.CatchUp.until != 0; c.fails && !failed {
			t.Errorf("%s: counts as a failure: %v (%v)", name, failed, err)
		}
		again := d.open()
		eventually(t, "the slot is free", func() bool { return again.Start(within(t), from, false) == nil })
		if sql := again.streaming().backlog != nil; c.fails && sql {
			t.Errorf("%s: afterwards by SQL: %v", name, sql)
		}
		alike(t, want, hear(t, again))
		again.Close()
	}
}

// What is wrong with the WAL is said by the stream, however the backlog is read.
func TestBacklogMeetsNoPublication(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		for _, first := range []int{0, 2 * sampled} { // it is in the sample, or behind it
			d := ready(t, srv)
			for range first / 300 {
				d.insert(ops(t, 300))
			}
			d.exec("DROP PUBLICATION outflow")
			d.insert(ops(t, 2))
			d.exec("CREATE PUBLICATION outflow FOR TABLE outbox WITH (publish = 'insert')")
			d.insert(ops(t, 2))
			d.cfg.CatchUp = bySQL()
			for tries := 0; ; tries++ {
				s := d.open()
				eventually(t, "the slot is free", func() bool { return s.Start(within(t), d.confirmed(), false) == nil })
				bySQL := s.streaming().backlog != nil
				err := end(t, s)
				s.Close()
				if !bySQL {
					wantFault(t, err, outbox.Fatal, "publication_missing")
					break
				}
				if err == nil || outbox.FaultOf(err) != nil || tries > 0 {
					t.Fatalf("by SQL, time %d: %v", tries+1, err)
				}
			}
		}
	})
}

func TestStandbyIsNotReadBySQL(t *testing.T) {
	t.Parallel()
	srv := pgtest.Own(t, 0)
	d := ready(t, srv)
	d.insert(ops(t, 10))
	closeConn(d.conn)
	asStandby(t, srv)
	defer newDatabaseAt(t, d).exec("SELECT pg_promote()") // so that the database can be dropped
	d.cfg.CatchUp = bySQL()
	var choice streamed
	if _, err := d.open().worthIt(within(t), 1); !errors.As(err, &choice) || choice == errSmall {
		t.Errorf("%v", err)
	}
}
