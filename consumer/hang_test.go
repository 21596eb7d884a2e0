package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
)

// none is for a store whose instance need not avoid any partition.
func none(layout) map[int]bool { return nil }

// claimer is an instance that only claims.
type claimer struct {
	*postgres
	avoids map[int]bool
}

// look does what an instance does whenever it looks whether other partitions are its own by now. It reports
// whether it claimed anew.
func (c *claimer) look(t *testing.T) bool {
	t.Helper()
	if c.lease != nil {
		due, err := c.due(t.Context())
		if must.Succeed(t, err); !due {
			return false
		}
		c.abandon()
	}
	_, err := c.acquire(t.Context(), func(layout) map[int]bool { return maps.Clone(c.avoids) })
	var held *heldError
	if !errors.As(err, &held) {
		must.Succeed(t, err)
	}
	return true
}

// Whatever instances come, leave and die, and wherever their handlers hang and return: when nothing changes
// any more, each partition is at an instance that may have it, if there is one, all have as many but one, and
// nobody claims anything else.
func TestWhereHandlersHangOthersClaim(t *testing.T) {
	t.Parallel()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for i := range uint64(2 * *trials) {
		t.Run(fmt.Sprint("seed-", first+i), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(first+i, 11))
			w := newHarness(t)
			partitions := 1 + rnd.IntN(1+rnd.IntN(9))
			var all []*claimer
			for range 15 {
				switch n := rnd.IntN(8); {
				case len(all) == 0 || n < 2 && len(all) < 6:
					all = append(all, w.claimer(partitions))
				case n == 2 && len(all) > 1:
					i := rnd.IntN(len(all))
					must.Succeed(t, all[i].release(t.Context()))
					all = slices.Delete(all, i, i+1)
				case n == 3:
					clear(all[rnd.IntN(len(all))].avoids)
				case n < 6: // one event that hangs everywhere, or nearly
					p, but := rnd.IntN(partitions), rnd.IntN(2*len(all))
					for i, c := range all {
						if clear(c.avoids); i != but {
							c.avoids[p] = true
						}
					}
				default:
					c, p := all[rnd.IntN(len(all))], rnd.IntN(partitions)
					if c.avoids[p] = true; c.lease != nil { // a hang ends the session
						c.abandon()
					}
				}
				w.settle(rnd, all)
				w.settled(all, partitions)
			}
		})
	}
}

// claimer is another instance of a consumer, which it makes if there is none.
func (w *harness) claimer(partitions int) *claimer {
	w.t.Helper()
	cfg := w.config(newMemoryStream())
	cfg.Partitions, cfg.Lease = partitions, time.Hour
	of := w.consumer(cfg)
	s, err := of.offsets.open(w.t.Context(), nil, &of.cfg)
	must.Succeed(w.t, err)
	w.t.Cleanup(s.abandon)
	c := &claimer{s.(*postgres), map[int]bool{}}
	if c.look(w.t); c.share.layout.Partitions == 0 {
		must.Succeed(w.t, s.begin(w.t.Context(), of.cfg.layout(), of.cfg.Filters, offset{}, time.Now()))
	}
	return c
}

// A partition whose row is still locked is given up when that has ended, and not claimed meanwhile.
func TestAPartitionWhoseRowIsLockedIsGivenUpLater(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	c := w.claimer(3)
	c.look(t)
	open, err := w.mine.Begin(t.Context())
	must.Succeed(t, err)
	_, err = open.Exec(t.Context(), "SELECT FROM outflow_mark WHERE partition = 1 FOR UPDATE")
	must.Succeed(t, err)
	c.avoids[1] = true
	c.abandon()
	c.look(t)
	g, err := c.readGroup(t.Context(), w.mine)
	must.Succeed(t, err)
	wanted, _ := g.share(c.me, c.avoids, nil)
	if want := []int{0, 2}; g.owners[1] != c.me || !slices.Equal(c.share.claimed, want) ||
		!slices.Equal(wanted, want) {
		t.Errorf("it has %v, claimed %v and wants %v", g.owners, c.share.claimed, wanted)
	}
	must.Succeed(t, open.Rollback(t.Context()))
	await.Until(t, "the partition given up", func() error {
		c.look(t)
		g, err := c.readGroup(t.Context(), w.mine)
		if err == nil && !g.givenUp[1] {
			err = fmt.Errorf("%v", g.owners)
		}
		return err
	})
}

// An instance that avoids several partitions leaves when another one comes, though the shares are even.
func TestAnInstanceThatAvoidsSeveralPartitionsLeavesToOthers(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	first := w.claimer(4)
	first.avoids[0], first.avoids[1] = true, true
	first.abandon()
	all := []*claimer{first}
	rnd := rand.New(rand.NewPCG(1, 1))
	w.settle(rnd, all)
	w.settled(all, 4)
	all = append(all, w.claimer(4))
	w.settle(rnd, all)
	w.settled(all, 4)
}

// settle lets all instances look until nothing changes any more.
func (w *harness) settle(rnd *rand.Rand, all []*claimer) {
	w.t.Helper()
	var before, now string
	for range 20 + 5*len(all) {
		claims := 0
		for _, i := range rnd.Perm(len(all)) {
			if all[i].look(w.t) && all[i].lease != nil {
				claims++
			}
		}
		must.Succeed(w.t, w.mine.QueryRow(w.t.Context(), `SELECT concat(
			(SELECT string_agg(coalesce(owner, '-'), ' ' ORDER BY partition) FROM outflow_mark), ' of ',
			(SELECT string_agg(instance, ' ' ORDER BY instance) FROM outflow_member))`).Scan(&now))
		if claims == 0 && now == before {
			return
		}
		before = now
	}
	w.t.Fatal("they claim again and again")
}

func (w *harness) settled(all []*claimer, partitions int) {
	w.t.Helper()
	rows, err := w.mine.Query(w.t.Context(), `SELECT m.partition, i.instance FROM outflow_mark m
		JOIN outflow_member i ON i.instance = m.owner WHERE source = 'live'`)
	must.Succeed(w.t, err)
	owners := map[int]string{}
	var p int
	var owner string
	_, err = pgx.ForEachRow(rows, []any{&p, &owner}, func() error {
		owners[p] = owner
		return nil
	})
	must.Succeed(w.t, err)
	var shows strings.Builder
	least, most, sharing := partitions, 0, 0
	for _, c := range all {
		n := 0
		for p, owner := range owners {
			if owner != c.me {
				continue
			}
			if n++; c.avoids[p] {
				w.t.Errorf("an instance has partition %d, which it avoids", p)
			}
		}
		fmt.Fprintf(&shows, "\n%d partitions, avoids %v", n, slices.Sorted(maps.Keys(c.avoids)))
		if len(c.avoids) <= 1 {
			least, most, sharing = min(least, n), max(most, n), sharing+1
		}
	}
	var members []string
	must.Succeed(w.t, w.mine.QueryRow(w.t.Context(), "SELECT array_agg(instance) FROM outflow_member").
		Scan(&members))
	for _, c := range all {
		if len(c.avoids) > 1 && len(members) > 1 && slices.Contains(members, c.me) {
			w.t.Errorf("an instance that avoids %v stays", c.avoids)
		}
	}
	if sharing == 0 && len(members) != 1 {
		w.t.Errorf("%d instances stay, want one", len(members))
	}
	if sharing > 0 && most-least > 1 {
		w.t.Errorf("the shares differ: %d to %d", least, most)
	}
	for p := range partitions {
		may := 0
		for _, c := range all {
			if (len(c.avoids) <= 1 || sharing == 0 && slices.Contains(members, c.me)) && !c.avoids[p] {
				may++
			}
		}
		if (owners[p] != "") != (may > 0) {
			w.t.Errorf("partition %d is at instance %q, %d may have it", p, owners[p], may)
		}
	}
	if w.t.Failed() {
		w.t.Fatalf("%d partitions at %v:%s", partitions, owners, shows.String())
	}
}

// hangOnce makes a handler ignore the end of its context at the first call for an event, until it may return.
type hangOnce struct {
	event    string // its ID
	hangs    atomic.Bool
	returns  chan struct{}
	returned chan error // what became of its transaction
}

func newHangOnce(m *stream.Message) *hangOnce {
	return &hangOnce{event: string(m.Data), returns: make(chan struct{}), returned: make(chan error, 1)}
}

func (o *hangOnce) in(h Handler) Handler {
	return func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.ID != o.event || o.hangs.Swap(true) {
			return h(ctx, tx, e)
		}
		<-o.returns
		err := h(context.Background(), tx, e)
		o.returned <- err
		return err
	}
}

// hang is how long a handler may take to return after its context has ended. That, and the timeout, are
// longer than a slow machine needs for an event: one more that seems to hang would cost another partition.
const hang = 500 * time.Millisecond

// hangConfig is one whose handlers hang soon, and fail as often as they like.
func (w *harness) hangConfig(src stream.Source) Config {
	cfg := w.config(src)
	cfg.Timeout, cfg.ParkAfter, cfg.Lease = 2*time.Second, time.Hour, time.Hour
	return cfg
}

// A handler that ignores the end of its context costs its instance the partition of its event, until it
// returns. All others are handled meanwhile, and that one too if there is another instance.
func TestAHandlerThatHangsCostsItsPartition(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		instances int
		sql       bool
	}{
		"one instance": {1, false}, "two": {2, false},
		"one of database/sql": {1, true}, "two of database/sql": {2, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(32, 16)
			src.publish(all...)
			further := s.events(32, 16)
			once := newHangOnce(further[3])
			var instances []*Consumer
			var registries []*prometheus.Registry
			var runs []*running
			for range c.instances {
				cfg := w.hangConfig(src)
				registries = append(registries, prometheus.NewRegistry())
				cfg.Registerer = registries[len(instances)]
				var of *Consumer
				if c.sql {
					db := w.sql()
					db.SetMaxOpenConns(2) // the handler that hangs must not keep one
					of = w.sqlConsumer(db, cfg)
					runs = append(runs, w.start(of, once.in(sqlHandler)))
				} else {
					of = w.consumer(cfg)
					runs = append(runs, w.start(of, once.in(handler)))
				}
				of.cfg.hang = hang
				instances = append(instances, of)
			}
			shares, without := []int{8}, []int{7}
			if c.instances == 2 {
				shares, without = []int{4, 4}, []int{4, 4}
			}
			w.awaitShares(shares...)
			w.await(all)

			joined := func() (all string) {
				must.Succeed(t, w.mine.QueryRow(t.Context(),
					"SELECT string_agg(joined::text, ' ' ORDER BY joined) FROM outflow_member").Scan(&all))
				return all
			}
			before := joined()
			src.publish(further...)
			hung := -1
			await.Until(t, "an instance that says so", func() error {
				hung = slices.IndexFunc(instances, func(c *Consumer) bool {
					err := c.State().Err
					return err != nil && strings.Contains(err.Error(), "sequence 36")
				})
				if hung < 0 {
					return errors.New("none")
				}
				return nil
			})
			partition, err := instances[hung].partition(further[3])
			must.Succeed(t, err)
			done := all
			for _, m := range further {
				if p, err := instances[hung].partition(m); err != nil || p != partition || c.instances > 1 {
					done = append(done, m)
				}
			}
			w.await(done)
			w.awaitShares(without...)
			hangs := func(n float64) func() error {
				return func() error {
					state := instances[hung].State()
					got := gather(t, registries[hung])["outflow_consumer_hung_handlers consumer=orders"]
					if got != n || (state.Err != nil) != (n > 0) || state.Status != Active ||
						n > 0 && slices.Contains(state.Partitions, partition) {
						return fmt.Errorf("%v handlers hang, %+v", got, state)
					}
					return nil
				}
			}
			await.Until(t, "a handler that hangs", hangs(1))
			if now := joined(); now != before {
				t.Errorf("an instance has left and come again: joined at %s, then %s", before, now)
			}

			close(once.returns)
			if err := <-once.returned; err == nil {
				t.Error("the handler that hung has still a transaction")
			}
			await.Until(t, "no handler that hangs", hangs(0))
			w.awaitShares(shares...)
			more := s.events(32, 16)
			src.publish(more...)
			w.await(slices.Concat(all, further, more))
			for _, r := range runs {
				r.stopped()
			}
			w.exactly(slices.Concat(all, further, more))
		})
	}
}

// With offsets that are in no database the instance gives its lease up, and waits.
func TestAHandlerThatHangsCostsTheLeaseWithoutADatabase(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(8, 4)
	once, offsets := newHangOnce(all[4]), Memory()
	handled := make([]chan string, 2)
	start := func(i int) *running {
		handled[i] = make(chan string, 100)
		c, err := New(nil, offsets, w.hangConfig(src))
		must.Succeed(t, err)
		c.cfg.confirm, c.cfg.hang = time.Millisecond, hang
		return w.start(c, once.in(func(ctx context.Context, _ pgx.Tx, e *Event) error {
			handled[i] <- e.ID
			return ctx.Err()
		}))
	}
	gets := func(i int, m *stream.Message) {
		t.Helper()
		await.Until(t, "the event "+string(m.Data), func() error {
			select {
			case id := <-handled[i]:
				if id == string(m.Data) {
					return nil
				}
			default:
			}
			return errors.New("not yet")
		})
	}
	start(0)
	src.publish(all[:4]...)
	gets(0, all[0])
	src.publish(all[4])
	await.Until(t, "the call", func() error {
		if !once.hangs.Load() {
			return errors.New("not yet")
		}
		return nil
	})
	second := start(1)
	gets(1, all[4])
	close(once.returns)
	must.Succeed(t, <-once.returned)
	second.stopped()
	src.publish(all[5:]...)
	gets(0, all[7])
}

// A handler that still hangs when Run ends is told of.
func TestAHandlerThatIsLeftBehindIsTold(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(30, 3)
	src.publish(all...)
	once := newHangOnce(all[9])
	t.Cleanup(func() { close(once.returns) })
	c := w.consumer(w.hangConfig(src))
	c.cfg.hang = hang
	frozen := w.start(c, once.in(handler))
	if !await.True(func() bool { return len(c.state.hanging()) > 0 }) {
		t.Fatal("it does not hang")
	}
	frozen.stop()
	if err := frozen.ends(); !errors.Is(err, ErrHandler) || !strings.Contains(err.Error(), "sequence 10") {
		t.Errorf("Run: %v", err)
	}
	w.start(w.consumer(w.config(src)), handler)
	w.await(all)
}
