package streamretain

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// TestHowMuchGoes: by number, age and size, and nothing where none is set.
func TestHowMuchGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.publish(40)
	w.confirm(40)
	w.cfg.Retain.Stream.Messages = 0
	w.goes(0, "none of retain.stream.age, size and messages is set: nothing goes", "up to 39 may go")
	w.cfg.Retain.Stream.Messages = 30
	w.goes(10)
	must.Succeed(t, w.s.DeleteMsg(t.Context(), 35))
	w.publish(1)
	w.confirm(41)
	w.goes(10) // 30 are left
	w.cfg.Retain.Stream.Messages = 0

	info, err := w.s.Info(t.Context())
	must.Succeed(t, err)
	tenth := int64(info.State.Bytes / info.State.Msgs * 10)
	w.cfg.Retain.Stream.Size = int64(info.State.Bytes) - tenth
	before := info.State.Bytes
	_, err = w.run(true)
	must.Succeed(t, err)
	info, err = w.s.Info(t.Context())
	must.Succeed(t, err)
	if got := int64(before - info.State.Bytes); got < tenth || got > tenth*12/10 {
		t.Errorf("%d bytes went, want %d", got, tenth)
	}
	w.cfg.Retain.Stream.Size = 0

	m, err := w.s.GetMsg(t.Context(), 30)
	must.Succeed(t, err)
	last, err := w.js.Publish(t.Context(), "outbox.now", nil)
	must.Succeed(t, err)
	newest, err := w.s.GetMsg(t.Context(), last.Sequence)
	must.Succeed(t, err)
	if got, err := w.older(m.Time); err != nil || got != 29 {
		t.Errorf("older than message 30: %d, %v", got, err)
	}
	if got, err := w.older(newest.Time.Add(time.Hour)); err != nil || got != last.Sequence {
		t.Errorf("older than the end: %d, %v", got, err)
	}
	w.cfg.Retain.Stream.Age = time.Nanosecond
	w.confirm(41)
	w.goes(41)
}

// TestAPurgeEndsWithItsTurn, at a segment, and the next one goes on: what it has read back goes.
func TestAPurgeEndsWithItsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.database()
	w.cfg.Archive.URL = "file://" + t.TempDir()
	for n := range uint64(3) {
		w.publish(10)
		w.confirm(10 * (n + 1))
		w.archived()
	}
	w.o.Turn = 1
	for _, to := range []uint64{10, 20, 29, 0} {
		r, err := w.run(true)
		must.Succeed(t, err)
		if r.GoesTo != to || to > 0 && w.first() != to+1 {
			t.Errorf("%d went, want %d", r.GoesTo, to)
		}
	}
}

// TestAStreamThatIsNearlyFullWaitsForNoSegment: it would refuse messages for as long.
func TestAStreamThatIsNearlyFullWaitsForNoSegment(t *testing.T) {
	t.Parallel()
	srv := natstest.Server(t)
	w := newWorld(t, srv.URL(), 1)
	w.database()
	w.cfg.Archive.URL = "file://" + t.TempDir()
	w.o.Known = &archive.Known{}
	w.publish(40)
	w.confirm(30)
	w.archived()
	for _, c := range []struct {
		limit    int64
		messages int
		first    uint64
		account  int64
	}{{0, 35, 6, 0}, {0, 30, 6, 0}, {38, 30, 11, 0}, {38, 25, 11, 0}, {33, 25, 16, 0}, {0, 20, 16, 120},
		{0, 20, 21, 105}} {
		sc := streamConfig(1)
		sc.MaxMsgs, sc.Discard = c.limit, jetstream.DiscardNew
		_, err := w.js.UpdateStream(t.Context(), sc)
		must.Succeed(t, err)
		if c.account > 0 { // percent of what it has
			info, err := w.js.AccountInfo(t.Context())
			must.Succeed(t, err)
			must.Succeed(t, srv.Embedded().GlobalAccount().UpdateJetStreamLimits(
				map[string]server.JetStreamAccountLimits{"": {MaxMemory: -1, MaxStreams: -1, MaxConsumers: -1,
					MaxStore: int64(info.Store) * c.account / 100}}))
		}
		w.cfg.Retain.Stream.Messages = c.messages
		_, err = w.run(true)
		must.Succeed(t, err)
		if w.first() != c.first {
			t.Errorf("%v: it leaves %d on", c, w.first())
		}
	}
}

// TestTheRestOfASegmentWaitsOnlyIfAPartHasGone: what was read in vain is read again by the next round.
func TestTheRestOfASegmentWaitsOnlyIfAPartHasGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.cfg.Archive.URL = "file://" + t.TempDir()
	w.o.Known = &archive.Known{}
	w.publish(40)
	w.confirm(30)
	w.archived()
	w.cfg.Retain.Stream.Messages = 35
	w.o.Hit = func(point string) {
		if point == "stream.verified" {
			w.durable("late", "outbox.>")
		}
	}
	_, err := w.run(true)
	must.Succeed(t, err)
	if w.first() != 1 {
		t.Fatal("a durable has read nothing, and messages are gone")
	}
	w.o.Hit = nil
	must.Succeed(t, w.s.DeleteConsumer(t.Context(), "late"))
	w.goes(5)
}

// TestTheNewestMessageStays: after a repair all are confirmed. An empty stream would be one that has lost its
// end, to a start and to doctor.
func TestTheNewestMessageStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.database()
	w.publish(10)
	w.confirm(10)
	w.cfg.Retain.Stream.Messages, w.cfg.Retain.Stream.Age = 0, 1
	w.goes(9, "10 is the newest message")
	w.goes(9, "10 is the newest message")
	w.publish(5)
	w.goes(10)
}

// TestTheNewestMessageThatIsLeftStays: the broker has lost the end of the stream and still knows how far that
// came. A start publishes again what was lost, because it finds the message before it.
func TestTheNewestMessageThatIsLeftStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.database()
	w.publish(10)
	w.confirm(8)
	for _, seq := range []uint64{9, 10} {
		must.Succeed(t, w.s.DeleteMsg(t.Context(), seq))
	}
	w.cfg.Retain.Stream.Messages, w.cfg.Retain.Stream.Age = 0, 1
	w.goes(7, "8 is the newest message")
}

// TestGapModeFindsWhatItRemembers: what a start reads back from the stream is still there.
func TestGapModeFindsWhatItRemembers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	w.gap = &relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
		MaxBytes: relay.DefaultMaxBytes, Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold,
			Memory: 20, First: relay.DefaultFirst}}
	w.publish(100)
	w.confirm(70)
	w.goes(50, "gap mode remembers the 20 messages before a checkpoint")
	api := jsapi.New(w.nc, "")
	remembers := func() error {
		rec, _, err := w.store.Load(t.Context())
		must.Succeed(t, err)
		start := checkpoint.Start{Checkpoint: rec.Checkpoints[0].Checkpoint}
		found, err := start.Recent(t.Context(), streams.New(api, "OUTBOX",
			slog.New(slog.DiscardHandler)).Recent)
		must.Succeed(t, err)
		return checkpoint.Config{Stream: "OUTBOX"}.CheckMemory(start, len(found))
	}
	must.Succeed(t, remembers())
	must.Succeed(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(52)))
	w.wantFault(remembers(), "memory_lost")
	// where it may come into force: configured, and the record is one of another mode yet
	w.gap = nil
	w.confirm(95)
	w.cfg.Reorder.Mode, w.cfg.Reorder.Memory = config.ModeGap, 15
	w.goes(80, "gap mode remembers the 15 messages")
	// behind a repair it may have to look back to the stream's beginning
	w.base = 85
	w.confirm(95)
	w.goes(0, "memory: up to 0 may go")
}

// TestGapModeFindsWhatItRemembersAmongCuts: a cut is no message that it remembers, and no record knows all of
// them.
func TestGapModeFindsWhatItRemembersAmongCuts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	cfg := streamConfig(1)
	cfg.Subjects = append(cfg.Subjects, outbox.CutSubject)
	_, err := w.js.UpdateStream(t.Context(), cfg)
	must.Succeed(t, err)
	w.gap = &relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
		MaxBytes: relay.DefaultMaxBytes, Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold,
			Memory: 20, First: relay.DefaultFirst}}
	w.publish(55)
	cut := outbox.Cut{LSN: 55 * 16, SystemID: 1, Timeline: 1, Epoch: 2, Owner: 2}
	for range 3 {
		_, err := w.js.PublishMsg(t.Context(), &nats.Msg{Subject: outbox.CutSubject,
			Header: nats.Header{outbox.HeaderCut: {cut.String()}}})
		must.Succeed(t, err)
	}
	w.publish(42)
	w.cfg.Cluster.Mode, w.cfg.Cluster.ID = config.ModeShared, 1
	w.store = checkpoint.NewStore(jsapi.New(w.nc, ""),
		checkpoint.StoreConfig{Stream: "OUTBOX", Slot: "outflow", Cluster: 1})
	w.epoch = 3
	w.confirm(70)
	w.goes(47, "gap mode remembers the 20 messages before a checkpoint")
	rec, _, err := w.store.Load(t.Context())
	must.Succeed(t, err)
	start := checkpoint.Start{Checkpoint: rec.Checkpoints[0].Checkpoint, Shared: true}
	found, err := start.Recent(t.Context(), streams.New(jsapi.New(w.nc, ""), "OUTBOX",
		slog.New(slog.DiscardHandler)).Recent)
	must.Succeed(t, err)
	must.Succeed(t, checkpoint.Config{Stream: "OUTBOX"}.CheckMemory(start, len(found)))
}

// TestWhatTheArchiveHasLostStays: the segments are read back before.
func TestWhatTheArchiveHasLostStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	dir := t.TempDir()
	w.cfg.Archive.URL = "file://" + dir
	w.publish(40)
	for _, seq := range []uint64{10, 30} {
		w.confirm(seq)
		w.archived()
	}
	objects, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.zst"))
	must.Succeed(t, err)
	if len(objects) != 2 {
		t.Fatal(objects)
	}
	must.Succeed(t, os.Rename(objects[1], objects[1]+".away"))
	_, err = w.run(true)
	w.wantFault(err, "archive_damaged")
	w.cfg.Retain.Stream.Messages = 31 // only what the first segment has
	w.goes(9)
	w.cfg.Retain.Stream.Messages = 1
	must.Succeed(t, os.Rename(objects[1]+".away", objects[1]))
	first, err := os.ReadFile(objects[0])
	must.Succeed(t, err)
	first[len(first)/2] ^= 1
	must.Succeed(t, os.WriteFile(objects[0], first, 0o600))
	_, err = w.run(true)
	w.wantFault(err, "archive_damaged")
	first[len(first)/2] ^= 1
	must.Succeed(t, os.WriteFile(objects[0], first, 0o600))
	w.goes(30)
	w.wantFault(archive.SameAs(t.Context(), jsapi.New(w.nc, ""), "OUTBOX", 35, archive.Hash{}),
		"archive_differs")
}

// TestAPurgeThatTheStreamDeniesIsNotPlanned: the server refuses it.
func TestAPurgeThatTheStreamDeniesIsNotPlanned(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	must.Succeed(t, w.js.DeleteStream(t.Context(), "OUTBOX"))
	cfg := streamConfig(1)
	cfg.DenyPurge = true
	var err error
	w.s, err = w.js.CreateStream(t.Context(), cfg)
	must.Succeed(t, err)
	w.publish(20)
	w.confirm(10)
	w.goes(0, "stream: up to 0 may go: the stream has deny_purge")
}

// TestLimitsOfTheStreamAreNamed: with an archive they take away what is not archived.
func TestLimitsOfTheStreamAreNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Server(t).URL(), 1)
	c := streamConfig(1)
	c.MaxAge, c.MaxBytes, c.MaxMsgs, c.MaxMsgsPerSubject = time.Hour, 1<<20, 1000, 500
	_, err := w.js.UpdateStream(t.Context(), c)
	must.Succeed(t, err)
	w.publish(1)
	if r, err := w.run(false); err != nil || len(r.Notes) != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	w.cfg.Archive.URL = "file://" + t.TempDir()
	w.goes(0, "archive_limits", "max_age 1h", "max_msgs 1000", "max_bytes 1048576",
		"max_msgs_per_subject 500")
	refuses := streamretain.Limits{MaxBytes: 10, MaxMsgs: 10, PerSubject: -1, Discard: "new"}
	if got := refuses.String(); got != "" {
		t.Errorf("a stream that refuses new messages has %q", got)
	}
}
