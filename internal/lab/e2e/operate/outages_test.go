package operate

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/alerts"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

var record = flag.Bool("record", false, "play the outages and write internal/lab/alerts/testdata")

// scene is a pair in an outage that is recorded.
type scene struct {
	*harness.Installation
	t       *testing.T
	rec     *alerts.Recorder
	both    []*harness.Outflow
	service string // the address of a consumer's metrics; "": there is none
	named   byte   // what the consumer's instance is called
	pool    *pgxpool.Pool
	counter int
	every   func() // between two scrapes

	child *process.Process // an outflow maintain
	pages string           // its address; "": none runs
	said  harness.Log
}

// newScene starts a pair on servers.
func newScene(t *testing.T, pg *pgserver.Server, natsURL string, settings ...string) *scene {
	t.Helper()
	rules, err := alerts.Rules(harness.Path())
	harness.Must(t, err)
	s := &scene{Installation: harness.NewInstallation(t, pg, natsURL, "scene", settings...), t: t,
		rec: alerts.NewRecorder(rules), named: 'b'}
	other := harness.New(t, s.URL, natsURL, s.Slot)
	other.Env = append(slices.Clone(s.Env), "OUTFLOW_LISTEN="+other.Listen)
	s.both = []*harness.Outflow{s.Outflow, other}
	config, err := pgxpool.ParseConfig(s.URL)
	harness.Must(t, err)
	config.ConnConfig.ConnectTimeout = harness.AskTimeout
	s.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	harness.Must(t, err)
	t.Cleanup(s.pool.Close)
	s.Init()
	for _, o := range s.both {
		o.Start()
	}
	harness.AwaitRoles(s.Outflow, other)
	return s
}

// set changes settings of both instances, for their next start.
func (s *scene) set(settings ...string) {
	for _, o := range s.both {
		o.Set(settings...)
	}
}

// restart ends both instances, whatever their exit code, and starts them.
func (s *scene) restart() {
	for _, o := range s.both {
		o.Stop()
	}
	for _, o := range s.both {
		o.Start()
	}
}

// supervise starts what has ended again, as systemd would.
func (s *scene) supervise() {
	for _, o := range s.both {
		if !o.Process.Running() {
			o.Wait()
			o.Start()
		}
	}
}

// write writes events of one document, in order. While PostgreSQL is away that fails, as a service would.
func (s *scene) write(n int, payload string) {
	ctx, cancel := context.WithTimeout(s.t.Context(), harness.AskTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
		SELECT 'note', 'anna', n, to_jsonb($3::text) FROM generate_series($1::bigint, $2) n`, s.counter+1,
		s.counter+n, payload); err == nil {
		s.counter += n
	}
}

// consume runs a consumer of package consumer as a further instance that is scraped, until it is stopped.
func (s *scene) consume(cfg consume.Config, h consume.Handler) (stop func()) {
	s.named++
	var end func()
	s.service, end = consumeWith(s.t, s.Installation, cfg, h)
	return func() {
		s.service = ""
		end()
	}
}

// newMaintained starts a pair on an outbox of partitions, with an outflow maintain that archives.
func newMaintained(t *testing.T) *scene {
	t.Helper()
	s := newScene(t, pgtest.Own(t, 0), natstest.Server(t).URL(), "INIT_PARTITION_BY=written_at",
		"ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s", "RETAIN_TABLE_SLACK=0s",
		"MAINTAIN_EVERY=1s")
	s.maintain()
	return s
}

// maintain starts an outflow maintain, which is scraped.
func (s *scene) maintain() {
	s.t.Helper()
	port, err := freeport.Port()
	harness.Must(s.t, err)
	s.pages = fmt.Sprint("127.0.0.1:", port)
	cmd := exec.Command(harness.Program(s.Env), "maintain")
	cmd.Env = append(slices.Clone(s.Env), "OUTFLOW_MAINTAIN_LISTEN="+s.pages)
	cmd.Stdout, cmd.Stderr = &s.said, &s.said
	s.child, err = process.Start(cmd, syscall.SIGKILL)
	harness.Must(s.t, err)
	child := s.child
	s.t.Cleanup(func() {
		_ = child.Kill() // it may have ended
		_ = child.Wait()
	})
	harness.Eventually(s.t, "outflow maintain has done all of its parts", func() error {
		at := &harness.Outflow{T: s.t, Listen: s.pages}
		s.write(1, "")
		_, page := at.Get("/metrics")
		if !strings.Contains(page, "outflow_maintain_reported_timestamp_seconds{") {
			return errors.New(s.said.String())
		}
		return nil
	}, child)
}

func (s *scene) killMaintain() {
	harness.Must(s.t, s.child.Kill())
	s.pages = ""
}

// purge removes all messages but the last one.
func (s *scene) purge() {
	stream, err := s.JS.Stream(s.t.Context(), s.Stream)
	harness.Must(s.t, err)
	harness.Must(s.t, stream.Purge(s.t.Context(), jetstream.WithPurgeKeep(1)))
}

// phase records for so long, as it is played, while a few events are written.
func (s *scene) phase(what string, minutes int) {
	s.t.Helper()
	s.rec.Mark(what)
	s.t.Logf("%v: %s", time.Now().Format(time.TimeOnly), what)
	next := time.Now()
	for range minutes * int(time.Minute/alerts.Step) {
		if d := time.Until(next); d > 0 {
			time.Sleep(d) // the pace of the scrapes, nothing waits for it
		}
		next = time.Now().Add(time.Second)
		at, pages := time.Now(), map[string]string{}
		for i, o := range s.both {
			if code, page := o.Get("/metrics"); code == 200 {
				pages[fmt.Sprintf(`job="outflow",instance="%c"`, 'a'+i)] = page
			}
		}
		if s.service != "" {
			if code, page := (&harness.Outflow{T: s.t, Listen: s.service}).Get("/"); code == 200 {
				pages[fmt.Sprintf(`job="service",instance="%c"`, s.named)] = page
			}
		}
		if s.pages != "" {
			if code, page := (&harness.Outflow{T: s.t, Listen: s.pages}).Get("/metrics"); code == 200 {
				pages[`job="maintain",instance="m"`] = page
			}
		}
		harness.Must(s.t, s.rec.Scrape(at, pages))
		s.write(2, "")
		if s.every != nil {
			s.every()
		}
	}
}

// active returns the instance that publishes, and the other one.
func (s *scene) active() (active, standby *harness.Outflow) {
	return harness.AwaitRoles(s.both[0], s.both[1])
}

// outages are what is recorded: each file of internal/lab/alerts/testdata by its name.
var outages = map[string]func(t *testing.T) *scene{
	"calm": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		s.consume(consume.Config{}, ignore)
		s.phase("nothing happens", 60)
		return s
	},
	"nats_killed": func(t *testing.T) *scene {
		ns := natstest.Process(t)
		s := newScene(t, pgtest.Server(t), ns.URL())
		s.phase("all is well", 5)
		harness.Must(t, ns.Kill())
		s.phase("NATS is killed", 30)
		harness.Must(t, ns.Start())
		s.phase("NATS is back", 15)
		return s
	},
	"postgres_killed": func(t *testing.T) *scene {
		pg := pgtest.Own(t, 0)
		s := newScene(t, pg, natstest.Server(t).URL())
		s.consume(consume.Config{}, ignore)
		s.phase("all is well", 5)
		harness.Must(t, pg.Kill())
		s.phase("PostgreSQL is killed", 30)
		harness.Must(t, pg.Start(t.Context()))
		s.phase("PostgreSQL is back", 15)
		return s
	},
	"instances_killed": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		s.phase("all is well", 5)
		active, standby := s.active()
		active.Kill()
		s.phase("the active instance is killed", 25)
		standby.Kill()
		s.phase("the other one is killed", 25)
		active.Start()
		standby.Start()
		s.phase("both are back", 10)
		return s
	},
	"crash_loop": func(t *testing.T) *scene { // exit code 4
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		s.phase("all is well", 5)
		for _, o := range s.both {
			o.MustStop(t)
		}
		s.DropSlot(t)
		s.every = s.supervise
		s.phase("somebody has dropped the slot", 40)
		return s
	},
	"misconfigured": func(t *testing.T) *scene { // exit code 3
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		s.phase("all is well", 5)
		for _, o := range s.both {
			o.MustStop(t)
		}
		s.set("PUBLICATION=other")
		s.every = s.supervise
		s.phase("the publication's name is wrong", 30)
		s.set("PUBLICATION=" + s.Slot)
		s.phase("the name is right", 10)
		return s
	},
	"slot_lost": func(t *testing.T) *scene {
		ns := natstest.Process(t)
		pg := pgtest.Own(t, 0, "max_slot_wal_keep_size=128MB", "max_wal_size=1GB", "checkpoint_timeout=1h")
		s := newScene(t, pg, ns.URL(), "ON_FAULT=hold")
		wal := func(mib int) func() {
			return func() {
				harness.Exec(t, s.Conn, "SELECT count(pg_logical_emit_message(false, 'other', "+
					"repeat('x', 1 << 20))) FROM generate_series(1, $1)", mib)
			}
		}
		s.phase("all is well", 5)
		harness.Must(t, ns.Kill())
		s.every = wal(1)
		s.phase("NATS is killed, and WAL is written", 26)
		s.every = nil
		s.phase("no more WAL is written", 20)
		wal(64)()
		s.phase("the limit is passed", 5)
		harness.Exec(t, s.Conn, "CHECKPOINT")
		s.phase("a checkpoint removes the WAL", 5)
		harness.Must(t, ns.Start())
		s.phase("NATS is back", 10)
		return s
	},
	"storage_full": func(t *testing.T) *scene {
		ns := natstest.Server(t)
		limitStorage(t, ns, 8<<20)
		s := newScene(t, pgtest.Server(t), ns.URL())
		s.phase("all is well", 5)
		s.every = func() { s.write(1, strings.Repeat("x", 256<<10)) }
		s.phase("large events come", 30)
		s.every = nil
		limitStorage(t, ns, 1<<30)
		s.phase("the account has room", 35)
		return s
	},
	"fault_held": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL(), "ON_FAULT=hold")
		s.phase("all is well", 5)
		s.write(1, strings.Repeat("x", 2<<20))
		s.phase("an event is too large", 15)
		s.set("SINK_ON_POISON=dead_letter")
		s.restart()
		s.phase("dead letters are allowed", 10)
		s.phase("one was written", 10)
		return s
	},
	"rows": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL(), "SINK_ON_POISON=dead_letter")
		s.phase("all is well", 5)
		s.write(1, strings.Repeat("x", 2<<20))
		s.phase("an event is too large", 10)
		s.phase("that is over", 10)
		harness.EmitAll(t, s.Conn, harness.EventContent("note", "bert", 1, "{}"))
		s.phase("a message comes, where the table is the source", 10)
		s.phase("that is over, too", 10)
		harness.Insert(t, s.Conn, "note", 0, "{}")
		s.phase("an event is late", 10)
		return s
	},
	"gaps": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL(), "REORDER_MODE=gap", "REORDER_BOUND=1s")
		s.phase("all is well", 5)
		s.counter++
		s.phase("a counter is missing", 30)
		s.phase("that is over", 40)
		return s
	},
	"gaps_wait": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL(), "REORDER_MODE=gap", "REORDER_BOUND=1h",
			"REORDER_MAX_EVENTS=650")
		s.phase("all is well", 5)
		harness.Exec(t, s.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT 'doc' || n, 'bert', c, '{}' FROM generate_series(1, 600) n, unnest(ARRAY[1, 3]) c`)
		s.phase("a counter is missing in each of 600 documents", 20)
		harness.Exec(t, s.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT 'doc' || n, 'bert', 2, '{}' FROM generate_series(1, 600) n`)
		s.phase("the counters come", 10)
		return s
	},
	"slow": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL(), "REORDER_HORIZON=1200ms")
		s.phase("events wait for 1.2 s", 20)
		return s
	},
	"write_url_away": func(t *testing.T) *scene {
		pg := pgtest.Server(t)
		proxy, to, err := faultproxy.To(pg.URL("postgres"))
		harness.Must(t, err)
		t.Cleanup(proxy.Close)
		s := newScene(t, pg, natstest.Server(t).URL())
		database, err := pgserver.InDatabase(to, s.Conn.Config().Database)
		harness.Must(t, err)
		s.set("POSTGRES_WRITE_URL=" + database)
		s.restart()
		s.active()
		s.phase("all is well", 5)
		proxy.Refuse(true)
		proxy.Cut()
		s.phase("no connection to write_url", 20)
		proxy.Heal()
		s.phase("there is one", 15)
		return s
	},
	"replica_away": func(t *testing.T) *scene {
		c, err := natsserver.StartCluster(t.TempDir(), 3, natsserver.Options{Open: true})
		harness.Must(t, err)
		t.Cleanup(func() { harness.Must(t, c.Stop()) })
		s := newScene(t, pgtest.Server(t), c.URLs(), "INIT_REPLICAS=3")
		s.phase("all is well", 5)
		leader, err := c.Leader(s.Stream)
		harness.Must(t, err)
		follower := c.Node((leader + 1) % c.Len())
		harness.Must(t, follower.Kill())
		s.phase("a follower is killed", 25)
		harness.Must(t, follower.Start())
		s.phase("it is back", 10)
		return s
	},
	"maintain_killed": func(t *testing.T) *scene {
		s := newMaintained(t)
		s.phase("all is well", 5)
		s.killMaintain()
		s.phase("outflow maintain is killed", 30)
		harness.Exec(t, s.Conn, `DO $$ DECLARE p regclass; BEGIN
			FOR p IN SELECT c.oid FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
				WHERE inhparent = 'outbox'::regclass ORDER BY pg_get_expr(relpartbound, c.oid) OFFSET 2 LOOP
				EXECUTE 'DROP TABLE ' || p;
			END LOOP; END $$`)
		s.phase("one partition is left ahead", 15)
		s.maintain()
		s.phase("outflow maintain is back", 10)
		return s
	},
	"rows_blocked": func(t *testing.T) *scene {
		s := newMaintained(t)
		other := s.Slot + "_other"
		s.phase("all is well", 5)
		harness.Exec(t, s.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", other)
		harness.Exec(t, s.Conn, "CREATE TABLE old PARTITION OF outbox FOR VALUES FROM ('2024-05-01') TO "+
			"('2024-05-02')")
		s.phase("nobody reads another slot", 75)
		harness.Exec(t, s.Conn, "SELECT pg_drop_replication_slot($1)", other)
		s.phase("it is dropped", 10)
		return s
	},
	"archive_gap": func(t *testing.T) *scene {
		s := newMaintained(t)
		s.phase("all is well", 5)
		s.killMaintain()
		s.write(10, "")
		harness.Eventually(t, "all is published", func() error {
			if at, ok := s.both[0].Series("outflow_unpublished_events"); ok && at > 0 {
				return fmt.Errorf("%v events wait", at)
			}
			return nil
		})
		s.purge()
		s.maintain()
		s.phase("messages were removed that are not archived", 55)
		return s
	},
	"consumer_idle": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		_, err := s.JS.CreateConsumer(t.Context(), s.Stream, jetstream.ConsumerConfig{Durable: "billing",
			AckPolicy: jetstream.AckExplicitPolicy})
		harness.Must(t, err)
		s.phase("all is well", 5)
		s.write(11_000, "")
		s.phase("nobody reads", 35)
		return s
	},
	"consumer_replaced": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Server(t), natstest.Server(t).URL())
		stop := s.consume(consume.Config{}, ignore)
		s.phase("all is well", 5)
		stop()
		s.phase("the consumer has ended", 5)
		s.purge()
		s.consume(consume.Config{AcceptGap: true}, ignore)
		harness.Eventually(t, "the gap is counted before the first scrape", func() error {
			at := &harness.Outflow{T: t, Listen: s.service}
			if _, page := at.Get("/"); !regexp.MustCompile(`(?m)^outflow_consumer_gap_messages_total.* [1-9]`).
				MatchString(page) {
				return errors.New(page)
			}
			return nil
		})
		s.phase("another one begins, and messages are missing", 10)
		return s
	},
	"handler_hangs": func(t *testing.T) *scene {
		s := newScene(t, pgtest.Own(t, 0), natstest.Server(t).URL()) // as below
		var hangs atomic.Bool
		returns := make(chan struct{})
		s.consume(consume.Config{Partitions: 2, Timeout: time.Second},
			func(context.Context, pgx.Tx, *consume.Event) error {
				if hangs.CompareAndSwap(true, false) {
					<-returns
				}
				return nil
			})
		s.phase("all is well", 5)
		hangs.Store(true)
		s.phase("a handler hangs", 14)
		close(returns)
		s.phase("it has returned", 6)
		return s
	},
	"consumer_fails": func(t *testing.T) *scene {
		// a server of its own: a handler that hangs has a transaction open, which no slot can be made beside
		s := newScene(t, pgtest.Own(t, 0), natstest.Server(t).URL())
		var hang sync.RWMutex
		var mended atomic.Bool
		s.consume(consume.Config{MaxInFlight: 4, Partitions: 1, AcceptGap: true,
			Timeout: time.Hour, ParkLimit: -1},
			func(_ context.Context, _ pgx.Tx, e *consume.Event) error {
				hang.RLock() // who holds it makes the handler hang
				defer hang.RUnlock()
				if strings.HasPrefix(e.Document, "bad") && !mended.Load() {
					return consume.Poison(errors.New("the document is bad"))
				}
				return nil
			})
		s.phase("all is well", 5)
		bad := 0
		s.every = func() {
			bad++
			harness.Insert(t, s.Conn, fmt.Sprint("bad", bad), 1, "{}")
		}
		s.phase("one event of three fails", 16)
		s.every = nil
		mended.Store(true)
		harness.Eventually(t, "nothing is parked", func() error {
			var parked []consume.ParkedDocument
			harness.Must(t, json.Unmarshal([]byte(s.MustRun("parked", "list", "orders", "--json")), &parked))
			if len(parked) == 0 {
				return nil
			}
			retry := []string{"parked", "retry", "orders"}
			for _, p := range parked {
				retry = append(retry, p.Document)
			}
			s.Run(retry...) // one of them may have left meanwhile
			return fmt.Errorf("%d documents", len(parked))
		})
		s.phase("all is well again", 8)
		hang.Lock()
		s.phase("the handler hangs", 18)
		s.purge()
		hang.Unlock()
		s.phase("it goes on, and messages are missing", 6)
		return s
	},
}

// TestOutagesAreRecordedForTheAlerts makes outages of a pair, minutes each, and writes what Prometheus would
// have of them for the tests of internal/lab/alerts. With -parallel 9 it takes ten minutes:
//
//	go test ./internal/lab/e2e/operate -run TestOutagesAre -record -parallel 9 -timeout 1h
//
// -run TestOutagesAreRecordedForTheAlerts/calm records that one alone.
func TestOutagesAreRecordedForTheAlerts(t *testing.T) {
	if !*record {
		t.Skip("only with -record: it writes the files that the tests of internal/lab/alerts play")
	}
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := outage(t)
			if t.Failed() {
				return
			}
			recording := s.rec.Recording()
			harness.Must(t, recording.Write(harness.Path(alerts.Recordings, name+".yaml")))
		})
	}
}
