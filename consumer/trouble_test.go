package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// A transaction that an earlier claim has open on a replay keeps others from its partition alone.
func TestAnOpenTransactionOfAReplayHoldsItsPartitionOnly(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	c := w.claimer(3)
	c.look(t)
	must.Succeed(t, c.beginReplay(t.Context(), time.Now(), time.Time{}))
	open, err := w.mine.Begin(t.Context())
	must.Succeed(t, err)
	_, err = open.Exec(t.Context(),
		"SELECT FROM outflow_mark WHERE partition = 1 AND source = 'replay' FOR UPDATE")
	must.Succeed(t, err)
	w.expire()
	other := w.claimer(3)
	if want := []int{0, 2}; !slices.Equal(other.share.claimed, want) {
		t.Errorf("claimed %v, want %v", other.share.claimed, want)
	}
	must.Succeed(t, open.Rollback(t.Context()))
	other.abandon()
	if other.look(t); len(other.share.claimed) != 3 {
		t.Errorf("claimed %v when it had ended", other.share.claimed)
	}
}

// TestAReplayThatBeginsAnewIsOfNoEarlierClaim: the stream of replays was deleted and made anew, and another
// instance begins with it while this one still has events of the earlier one. Both count from the beginning.
func TestAReplayThatBeginsAnewIsOfNoEarlierClaim(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	c := w.claimer(1)
	c.look(t)
	claim := func() {
		t.Helper()
		c.abandon()
		c.look(t)
	}
	begin := func(created, was time.Time) { must.Succeed(t, c.beginReplay(t.Context(), created, was)) }
	move := func() error { return c.move(t.Context(), replay, 0, offset{}, offset{Seq: 7}, nothing) }
	first, second := time.Now().Truncate(time.Microsecond), time.Now().Add(time.Hour)
	begin(first, time.Time{})
	claim()
	begin(second, first)
	if err := move(); !errors.Is(err, errMoved) {
		t.Errorf("an event of the earlier replay moved the offset of the new one: %v", err)
	}
	claim()
	must.Succeed(t, move())
	begin(time.Now(), first) // of an instance that had looked before
	var seq uint64
	must.Succeed(t, w.mine.QueryRow(t.Context(), "SELECT seq FROM outflow_mark WHERE source = 'replay'").
		Scan(&seq))
	if seq != 7 {
		t.Errorf("an instance that stood still has set the replay back to %d", seq)
	}
}

// asked is a stream that says when it is asked for a message.
type asked struct {
	*memoryStream
	get func()
}

func (s *asked) Get(ctx context.Context, seq uint64) (*stream.Message, error) {
	s.get()
	return s.memoryStream.Get(ctx, seq)
}

// What a session does before it reads may take longer than the lease: that is renewed meanwhile. Otherwise
// others would take the partitions, and need as long.
func TestTheLeaseIsRenewedBeforeTheStreamIsRead(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"OnAssigned", "what is parked", "the offsets' messages"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(10, 5)
			src.publish(all...)
			w.readAll(w.config(src), all)
			renewed := func() {
				var first, now time.Time
				if !await.True(func() bool {
					if err := w.mine.QueryRow(t.Context(), "SELECT expires FROM outflow_member").
						Scan(&now); err != nil {
						return false
					}
					if first.IsZero() {
						first = now
					}
					return now.After(first)
				}) {
					t.Error("the lease is not renewed")
				}
			}
			cfg := w.config(src)
			cfg.Timeout = 10 * time.Minute
			started := func() {}
			switch where {
			case "OnAssigned":
				cfg.OnAssigned = func(context.Context, []int) { renewed() }
			case "what is parked":
				open, err := w.mine.Begin(t.Context())
				must.Succeed(t, err)
				_, err = open.Exec(t.Context(), "LOCK TABLE outflow_parked")
				must.Succeed(t, err)
				started = func() {
					renewed()
					must.Succeed(t, open.Rollback(t.Context()))
				}
			default:
				cfg = w.config(&asked{src, renewed})
			}
			more := s.events(10, 5)
			src.publish(more...)
			w.start(w.consumer(cfg), handler)
			started()
			w.await(append(all, more...))
		})
	}
}

// Code of the application that ends its goroutine, panics or never returns when it is told of partitions
// stops nothing.
func TestAnInstanceGoesOnWhateverOnAssignedDoes(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	t.Cleanup(func() { close(end) })
	for name, does := range map[string]func(){"exits": runtime.Goexit, "panics": func() { panic("told") },
		"hangs": func() { <-end }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, src := newHarness(t), &publisher{}, newMemoryStream()
			all := s.events(10, 5)
			src.publish(all...)
			cfg := w.config(src)
			if name == "hangs" {
				cfg.Timeout = time.Second
			}
			cfg.OnAssigned = func(context.Context, []int) { does() }
			c := w.consumer(cfg)
			c.cfg.hang = time.Millisecond
			w.start(c, handler)
			w.await(all)
		})
	}
}

// An instance that slept while its consumer was deleted does not begin anew by itself, which would repeat
// all effects; one that is started does.
func TestAnInstanceWhoseConsumerIsDeletedEnds(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(10, 5)
	src.publish(all...)
	r := w.start(w.consumer(w.config(src)), handler)
	w.await(all)
	w.exec("DELETE FROM outflow_mark; DELETE FROM outflow_member; DELETE FROM outflow_consumer")
	if err := r.ends(); !errors.Is(err, ErrSetup) {
		t.Errorf("Run: %v", err)
	}
	w.exactly(all)
	var left int
	if err := w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_consumer").Scan(&left); err != nil ||
		left != 0 {
		t.Errorf("%d consumers are left (%v)", left, err)
	}
	w.exec("DELETE FROM effect")
	w.start(w.consumer(w.config(src)), handler)
	w.await(all)
}

// The same without a database.
func TestAnInstanceWhoseDocumentIsDeletedEnds(t *testing.T) {
	t.Parallel()
	w, src, offsets := newHarness(t), newMemoryStream(), Memory()
	src.publish((&publisher{}).events(10, 5)...)
	c, err := New(nil, offsets, w.config(src))
	must.Succeed(t, err)
	c.cfg.confirm = time.Millisecond
	var n atomic.Int32
	r := w.start(c, func(context.Context, pgx.Tx, *Event) error { n.Add(1); return nil })
	if !await.True(func() bool { return n.Load() == 10 }) {
		t.Fatal("the events are not handled")
	}
	cell := offsets.(*memoryOffsets).cells["orders"]
	cell.mu.Lock()
	cell.value, cell.revision = nil, 0
	cell.mu.Unlock()
	if err := r.ends(); !errors.Is(err, ErrSetup) || n.Load() != 10 {
		t.Errorf("%d events were handled, Run: %v", n.Load(), err)
	}
}

// laggingCell is a bucket of which each second answer is that of a replica that lags.
type laggingCell struct {
	*memoryCell
	loads int
}

func (c *laggingCell) load(ctx context.Context) ([]byte, uint64, error) {
	if c.loads++; c.loads%2 == 0 {
		return nil, 0, nil
	}
	return c.memoryCell.load(ctx)
}

type laggingOffsets struct{}

func (laggingOffsets) open(_ context.Context, _ jetstream.JetStream, cfg *Config) (store, error) {
	return newDocumentStore(&laggingCell{memoryCell: &memoryCell{}}, cfg), nil
}

// TestAReplicaThatLagsDeletesNoConsumer: any replica of the bucket may answer, also one that has not heard of
// the consumer yet.
func TestAReplicaThatLagsDeletesNoConsumer(t *testing.T) {
	t.Parallel()
	w, src := newHarness(t), newMemoryStream()
	src.publish((&publisher{}).events(10, 5)...)
	c, err := New(nil, laggingOffsets{}, w.config(src))
	must.Succeed(t, err)
	var n atomic.Int32
	r := w.start(c, func(context.Context, pgx.Tx, *Event) error { n.Add(1); return nil })
	await.Until(t, "all events to be handled", func() error {
		select {
		case <-r.ended:
			t.Fatalf("Run: %v", r.err)
		default:
		}
		if n := n.Load(); n != 10 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	r.stopped()
}

// Another layout does not wait for a replay that was removed when some partitions had read it, and others had
// not. The next replay is read.
func TestAnotherLayoutDoesNotWaitForAReplayThatIsGone(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 5)
	publish(t, js, all...)
	w.start(w.onStream(js, nil), handler)
	w.await(all)
	w.newest.stopped()
	w.exec(`INSERT INTO outflow_mark (name, source, partition, owner, epoch, seq, due, n, lsn, i)
		SELECT name, 'replay', partition, owner, epoch, partition, '0/0', 0, '0/0', 0 FROM outflow_mark`)
	w.exec("UPDATE outflow_consumer SET replay_created = now()")
	w.start(w.onStream(js, func(c *Config) { c.Partitions = 3 }), handler)
	if !await.True(func() bool { return len(w.offsets()) == 3 }) {
		t.Fatalf("the offsets are %v", w.offsets())
	}
	publishReplay(t, js, all)
	w.await(append(all, all...))
}

// readsBefore is a connection that does something before a consumer is made to read a stream with.
type readsBefore struct {
	jetstream.JetStream
	do func(stream string)
}

func (r *readsBefore) CreateConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (
	jetstream.Consumer, error) {
	r.do(stream)
	return r.JetStream.CreateConsumer(ctx, stream, cfg)
}

// TestAReplayThatIsMadeAnewIsReadFromItsBeginning: the stream of replays is deleted and made anew when an
// instance has seen what it has to read of it, and has not begun. What is in it by then has its effect once.
func TestAReplayThatIsMadeAnewIsReadFromItsBeginning(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 3)
	publish(t, js, all...)
	w.start(w.onStream(js, nil), handler)
	w.await(all)
	publishReplay(t, js, all[:5])
	done := append(slices.Clone(all), all[:5]...)
	w.await(done)
	w.newest.stopped()
	publishReplayed(t, js, 5, all[5:7])
	var once sync.Once
	w.start(w.onStream(&readsBefore{js, func(of string) {
		if of == replayStream("OUTBOX") {
			once.Do(func() {
				must.Succeed(t, js.DeleteStream(t.Context(), of))
				publishReplay(t, js, all[:8])
			})
		}
	}}, nil), handler)
	w.await(append(done, all[:8]...))
}

// TestAReplayThatAnotherInstanceReadsIsNotEnded: another layout waits for a replay of which an instance finds
// nothing left. While it waits for the consumer's row, more is replayed, and another instance has done that.
func TestAReplayThatAnotherInstanceReadsIsNotEnded(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 5)
	publish(t, js, all...)
	w.start(w.onStream(js, func(c *Config) { c.Partitions = 2 }), handler)
	w.await(all)
	w.awaitOffsets(20)
	w.newest.stopped()

	next := slices.IndexFunc(all, func(m *stream.Message) bool { // that the other instance has
		p, err := w.onStream(js, func(c *Config) { c.Partitions = 2 }).partition(m)
		return err == nil && p == 0
	})
	publishReplay(t, js, all[:1])
	of, err := js.Stream(t.Context(), replayStream("OUTBOX"))
	must.Succeed(t, err)
	must.Succeed(t, of.Purge(t.Context()))
	other := w.claimer(2)
	must.Succeed(t, other.beginReplay(t.Context(), of.CachedInfo().Created.Truncate(time.Microsecond),
		time.Time{}))
	w.exec("UPDATE outflow_mark SET seq = partition WHERE source = 'replay'")
	w.exec("UPDATE outflow_consumer SET wanted_keying = keying, wanted_partitions = 3, barrier = 20")
	row := make(chan pgx.Tx, 1)
	var once sync.Once
	w.start(w.onStream(js, func(c *Config) {
		c.Lease, c.Partitions = time.Minute, 3
		c.OnAssigned = func(context.Context, []int) {
			once.Do(func() {
				open, err := w.mine.Begin(t.Context())
				must.Succeed(t, err)
				_, err = open.Exec(t.Context(), "SELECT FROM outflow_consumer FOR UPDATE")
				must.Succeed(t, err)
				row <- open
			})
		}
	}), handler)
	count := func(sql string) (n int) {
		t.Helper()
		must.Succeed(t, w.mine.QueryRow(t.Context(), "SELECT count(*) FROM "+sql).Scan(&n))
		return n
	}
	counts := func(sql string, want int) {
		t.Helper()
		await.Until(t, sql, func() error {
			if n := count(sql); n != want {
				return fmt.Errorf("%d, want %d", n, want)
			}
			return nil
		})
	}
	counts("outflow_member", 2)
	other.look(t) // it gives partition 1 back
	open := <-row
	counts("pg_stat_activity WHERE datname = current_database() AND application_name = 'consumer' "+
		"AND wait_event_type = 'Lock'", 1)
	publishReplayed(t, js, next, all[next:next+1])
	must.Succeed(t, other.move(t.Context(), replay, 0, offset{}, offset{Seq: 2}, nothing))
	must.Succeed(t, open.Rollback(t.Context()))
	counts("outflow_mark WHERE source = 'live'", 3)
	if n := count("outflow_mark WHERE source = 'replay' AND seq = 2"); n != 3 {
		t.Errorf("%d offsets are at what was done of the replay, want 3", n)
	}
	w.newest.stopped()
	w.exactly(all)
}

// locksReplay locks the offset of a partition in a replay, as a transaction that moves it does.
func (w *harness) locksReplay(partition int) pgx.Tx {
	w.t.Helper()
	open, err := w.mine.Begin(w.t.Context())
	must.Succeed(w.t, err)
	_, err = open.Exec(w.t.Context(), "SELECT FROM outflow_mark WHERE partition = $1 AND source = 'replay' "+
		"FOR UPDATE", partition)
	must.Succeed(w.t, err)
	return open
}

// TestAReplayIsNotEndedWhileOneOffsetMoves: that would stay, move on with what is replayed next, and then be
// made anew.
func TestAReplayIsNotEndedWhileOneOffsetMoves(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	c := w.claimer(3)
	c.look(t)
	must.Succeed(t, c.beginReplay(t.Context(), time.Now(), time.Time{}))
	gone := func(context.Context) (bool, error) { return true, nil }
	open := w.locksReplay(1)
	for _, want := range []int{3, 0} {
		must.Succeed(t, c.endReplay(t.Context(), gone))
		if want > 0 {
			must.Succeed(t, open.Rollback(t.Context()))
		}
		var n int
		must.Succeed(t, w.mine.QueryRow(t.Context(), "SELECT count(*) FROM outflow_mark, outflow_consumer "+
			"WHERE source = 'replay' AND replay_created IS NOT NULL").Scan(&n))
		if n != want {
			t.Errorf("%d offsets, want %d", n, want)
		}
	}
}

// TestAnotherLayoutKeepsAReplayWhoseOffsetMoves: without its offset it would never be read on.
func TestAnotherLayoutKeepsAReplayWhoseOffsetMoves(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	c := w.claimer(1)
	c.look(t)
	must.Succeed(t, c.beginReplay(t.Context(), time.Now(), time.Time{}))
	w.exec("UPDATE outflow_consumer SET wanted_keying = keying, wanted_partitions = 2, barrier = 0")
	open := w.locksReplay(0)
	moved := time.AfterFunc(time.Second, func() { _ = open.Rollback(t.Context()) })
	w.claimer(1)
	if moved.Stop() {
		must.Succeed(t, open.Rollback(t.Context()))
	}
	var replays, partitions int
	must.Succeed(t, w.mine.QueryRow(t.Context(), "SELECT count(*) FILTER (WHERE source = 'replay'), "+
		"count(*) FILTER (WHERE source = 'live') FROM outflow_mark").Scan(&replays, &partitions))
	if replays != partitions {
		t.Errorf("%d offsets of the replay, %d of the stream", replays, partitions)
	}
}

// TestAnotherLayoutDoesNotWaitForTheEndOfAReplayThatIsGone: one partition had come to it, and another one had
// not, when it was removed, such as by an erasure.
func TestAnotherLayoutDoesNotWaitForTheEndOfAReplayThatIsGone(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 5)
	publish(t, js, all...)
	w.start(w.onStream(js, func(c *Config) { c.Partitions = 2 }), handler)
	w.await(all)
	publishReplay(t, js, all[:5])
	w.await(append(slices.Clone(all), all[:5]...))
	w.awaitOffsets(20)
	w.newest.stopped()
	of, err := js.Stream(t.Context(), replayStream("OUTBOX"))
	must.Succeed(t, err)
	must.Succeed(t, of.DeleteMsg(t.Context(), 4))
	must.Succeed(t, of.DeleteMsg(t.Context(), 5))
	w.exec("UPDATE outflow_mark SET seq = 3 WHERE source = 'replay' AND partition = 1")

	w.start(w.onStream(js, func(c *Config) { c.Partitions = 3 }), handler)
	await.Until(t, "the layout", func() error {
		var n, at int
		err := w.mine.QueryRow(t.Context(), "SELECT count(*), count(*) FILTER (WHERE seq = 5) "+
			"FROM outflow_mark WHERE source = 'replay'").Scan(&n, &at)
		if err == nil && (n != 3 || at != 3) {
			err = fmt.Errorf("%d offsets of the replay, %d at its end", n, at)
		}
		return err
	})
	w.newest.stopped()
	w.exactly(append(all, all[:5]...))
}

// TestAnotherLayoutLeavesRoomForALostEndOfAReplay: one partition had done what the broker has lost, and
// another one had not. It comes again under the same sequences.
func TestAnotherLayoutLeavesRoomForALostEndOfAReplay(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	publishReplay(t, js, s.events(3, 1))
	c := w.onStream(js, nil)
	r := &runner{Consumer: c, store: newDocumentStore(&memoryCell{}, &c.cfg)}
	now, err := stateOf(t.Context(), r.replay())
	must.Succeed(t, err)
	st := &state{Wanted: &layout{}, Created: map[string]time.Time{replay: now.Created}, Furthest: 5,
		Offsets: map[string]offsets{live: {0: {}}, replay: {0: {Seq: 3}}}}
	var log bytes.Buffer
	c.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	for range 2 {
		if _, last, due, err := r.replayed(t.Context(), st); err != nil || last != 3 || due {
			t.Errorf("to %d, due: %v, %v", last, due, err)
		}
	}
	if n := strings.Count(log.String(), "go on with it by its --replay-id"); n != 1 {
		t.Errorf("told %d times: %s", n, &log)
	}
	err = r.checkBarrier(t.Context(), st, newMemoryStream(), 0)
	for _, words := range []string{"up to sequence 5, ", "(`nats stream purge OUTBOX_replay --subject " +
		"'_outflow_replay.OUTBOX.orders.>'`)"} {
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v does not say %q", err, words)
		}
	}
	st.Furthest = 3
	if err := r.checkBarrier(t.Context(), st, newMemoryStream(), 0); !errors.Is(err, errBarrier) {
		t.Errorf("where nothing is lost: %v", err)
	}
}

// TestAReplayInPlaceOfALostOneIsTold: the broker lost what was done, and others came under its sequences
// before the consumer saw that. A replay of the table that goes on gives its rows other positions.
func TestAReplayInPlaceOfALostOneIsTold(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(4, 1)
	publishReplay(t, js, all[:3])
	row := outbox.Header{Pos: outbox.Position{LSN: 5, Index: outbox.RepairedIndex}, Of: 1}
	all[3].Subject = replayPrefix("OUTBOX", "orders") + all[3].Subject
	all[3].Header = nats.Header{"Outflow-Replay": {"r1"}, outbox.HeaderName: {row.String()}}
	publish(t, js, all[3])
	h, err := outbox.ParseHeader(all[2].Header.Get(outbox.HeaderName))
	must.Succeed(t, err)
	other := h
	other.Pos.LSN--
	row.Pos.LSN--
	for _, c := range []struct {
		at    offset
		taken bool
	}{
		{offsetOf(3, &h), false}, {offsetOf(3, &other), true},
		{offsetOf(4, &row), false}, {offset{Seq: 3}, false},
	} {
		in := w.onStream(js, nil)
		r := &runner{Consumer: in, store: newDocumentStore(&memoryCell{}, &in.cfg)}
		now, err := stateOf(t.Context(), r.replay())
		must.Succeed(t, err)
		st := &state{Created: map[string]time.Time{replay: now.Created},
			Offsets: map[string]offsets{replay: {0: c.at}}}
		var log bytes.Buffer
		in.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		for range 2 {
			_, _, _, err := r.replayed(t.Context(), st)
			must.Succeed(t, err)
		}
		if n := strings.Count(log.String(), "others were replayed in its place"); n != b2i(c.taken) {
			t.Errorf("%+v: told %d times: %s", c, n, &log)
		}
	}
}

// TestAReplayWithoutItsOffsetsIsToldAndEnds: nobody can tell how much of it was done. When it is purged, what
// is replayed next is read.
func TestAReplayWithoutItsOffsetsIsToldAndEnds(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 5)
	publish(t, js, all...)
	w.start(w.onStream(js, nil), handler)
	w.await(all)
	publishReplay(t, js, all[:5])
	done := append(slices.Clone(all), all[:5]...)
	w.await(done)
	w.newest.stopped()
	w.exec("DELETE FROM outflow_mark WHERE source = 'replay'")
	r := w.start(w.onStream(js, nil), handler)
	const way = "nats stream purge OUTBOX_replay --subject '_outflow_replay.OUTBOX.orders.>'`), " +
		"start the consumer, which forgets it then, and only after that replay"
	if err := r.ends(); !errors.Is(err, ErrStream) || !strings.Contains(outbox.FaultOf(err).Hint, way) {
		t.Errorf("%v", err)
	}
	of, err := js.Stream(t.Context(), replayStream("OUTBOX"))
	must.Succeed(t, err)
	must.Succeed(t, of.Purge(t.Context()))
	w.start(w.onStream(js, nil), handler)
	await.Until(t, "the end of the replay", func() error {
		var n int
		err := w.mine.QueryRow(t.Context(), "SELECT count(replay_created) FROM outflow_consumer").Scan(&n)
		if err == nil && n != 0 {
			err = errors.New("it is not ended")
		}
		return err
	})
	publishReplayed(t, js, 5, all[5:8])
	w.await(append(done, all[5:8]...))
}
