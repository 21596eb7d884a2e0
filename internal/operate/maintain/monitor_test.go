package maintain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
)

// TestSinceWhenAPartFailsIsKnownThoughNATSWasAway: a process that begins while what the one before has left
// can't be read takes that over later, and one that begins again keeps what it knows itself.
func TestSinceWhenAPartFailsIsKnownThoughNATSWasAway(t *testing.T) {
	t.Parallel()
	since := time.Now().Add(-time.Hour)
	worked := since.Add(-time.Hour)
	left := &watch.Maintained{Archive: &watch.Archived{Sequence: 7, Oldest: since},
		Parts: []watch.MaintainPart{
			{Name: "archive", Succeeded: worked, Failing: since, Code: "archive_gap"},
			{Name: "partition", Succeeded: worked, Failing: since, Code: "no_right"},
			{Name: "stream", Succeeded: worked},
		}}
	away := errors.New("no servers available for connection")
	m := &Monitor{Log: slog.New(slog.DiscardHandler),
		Load: func(context.Context) (*watch.Maintained, error) {
			if away != nil {
				return nil, away
			}
			return left, nil
		},
		Save: func(_ context.Context, doc *watch.Maintained) error {
			if away == nil {
				left = doc
			}
			return away
		}}
	part := func(name string, err error) Part {
		return Part{Name: name, Run: func(context.Context, *watch.Maintained) error { return err }}
	}
	c := &Config{Every: time.Minute, Parts: []Part{
		part("archive", failing(outbox.Gap, "archive_gap")), part("partition", nil),
		part("stream", errors.New("no servers available for connection"))}}
	round := func() {
		for _, p := range c.Parts {
			_ = m.run(t.Context(), p) // it is noted
		}
		_ = m.end(t.Context(), nil)
	}
	m.begin(t.Context(), c, false)
	round()
	away = nil
	round()
	knows := func(when string, doc *watch.Maintained) {
		t.Helper()
		archive, partition, stream := doc.Part("archive"), doc.Part("partition"), doc.Part("stream")
		if !archive.Failing.Equal(since) || !archive.Succeeded.Equal(worked) ||
			archive.Code != "archive_gap" || !partition.Failing.IsZero() ||
			!partition.Succeeded.After(since) || !stream.Succeeded.Equal(worked) ||
			!stream.Failing.After(since) || doc.Archive == nil || doc.Archive.Sequence != 7 {
			t.Errorf("%s it knows %+v, archive %+v", when, doc.Parts, doc.Archive)
		}
	}
	knows("when NATS is back", left)
	away = errors.New("timeout")
	m.begin(t.Context(), c, false) // PostgreSQL was restarted meanwhile
	doc := m.Maintained()
	knows("while NATS is away once more", &doc)
}

// TestThatNothingIsStoredIsSaidOnce: each attempt has a port of its own in what it says.
func TestThatNothingIsStoredIsSaidOnce(t *testing.T) {
	t.Parallel()
	log, port := &said{}, 40000
	m := &Monitor{Log: slog.New(slog.NewTextHandler(log, nil)),
		Save: func(context.Context, *watch.Maintained) error {
			port++
			return &outbox.Fault{Class: outbox.Transient, Code: "nats_connect",
				Message: fmt.Sprintf("read tcp 127.0.0.1:%d: i/o timeout", port)}
		}}
	for range 3 {
		_ = m.end(t.Context(), nil)
	}
	if n := strings.Count(log.String(), "can't be told"); n != 1 {
		t.Errorf("it was said %d times:\n%s", n, log)
	}
}

// TestAServerThatDoesNotAnswerDoesNotHoldTheLoop: between rounds the partitions are looked at over the
// connection that has the lock, and who keeps that waits for it.
func TestAServerThatDoesNotAnswerDoesNotHoldTheLoop(t *testing.T) {
	t.Parallel()
	c, _ := config(t, pgtest.Database(t, pgtest.Server(t)))
	l := &lock{c: c}
	defer l.close()
	must.Succeed(t, l.hold(t.Context()))
	bounded, silence := false, errors.New("no answer")
	c.Monitor.Survey = func(ctx context.Context, _ catalog.Querier) (p watch.Partitions, err error) {
		_, bounded = ctx.Deadline()
		return p, silence
	}
	if err := c.Monitor.end(t.Context(), l.conn); !errors.Is(err, silence) || !bounded {
		t.Errorf("%v; it is waited for without a bound: %v", err, !bounded)
	}
}

// TestOneThatLostItsConnectionAfterARoundSaysHow, not only that it is closed.
func TestOneThatLostItsConnectionAfterARoundSaysHow(t *testing.T) {
	t.Parallel()
	c, log := config(t, pgtest.Database(t, pgtest.Server(t)))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	rounds := 0
	c.Every = time.Second
	c.Parts = []Part{{Name: "archive", Run: func(context.Context, *watch.Maintained) error {
		if rounds++; rounds == 2 {
			cancel()
		}
		return nil
	}}}
	c.Monitor.Survey = func(ctx context.Context, q catalog.Querier) (p watch.Partitions, err error) {
		return p, q.QueryRow(ctx, "SELECT pg_terminate_backend(pg_backend_pid())").Scan(new(bool))
	}
	if err := Run(ctx, c); !Ended(ctx, err) {
		t.Fatal(err)
	}
	if said := log.String(); !strings.Contains(said, "57P01") || strings.Contains(said, "conn closed") {
		t.Errorf("it said:\n%s", said)
	}
}

// TestASlowServerKeepsTheLock: each statement of the look at the partitions has a limit of its own. One that
// answers, however slowly, is not taken for one that does not, by which the connection and the lock are lost.
func TestASlowServerKeepsTheLock(t *testing.T) {
	t.Parallel()
	c, _ := config(t, pgtest.Database(t, pgtest.Server(t)))
	l := &lock{c: c}
	defer l.close()
	must.Succeed(t, l.hold(t.Context()))
	c.Monitor.Survey = func(ctx context.Context, q catalog.Querier) (p watch.Partitions, err error) {
		for range 8 { // about so many are sent
			if err := q.QueryRow(ctx, "SELECT 1 FROM pg_sleep(0.75)").Scan(new(int)); err != nil {
				return p, err
			}
		}
		return p, nil
	}
	if err := c.Monitor.end(t.Context(), l.conn); err != nil || l.conn.IsClosed() {
		t.Errorf("%v; the connection is lost: %v", err, l.conn.IsClosed())
	}
}

// TestSinceWhenAPartFailsIsOfWhoeverHadTheLockLast: a process that takes the lock again while NATS is away
// knows how the parts were when it had it before.
func TestSinceWhenAPartFailsIsOfWhoeverHadTheLockLast(t *testing.T) {
	t.Parallel()
	now := time.Now()
	before := func(hours time.Duration) time.Time { return now.Add(-hours * time.Hour) }
	m := &Monitor{doc: watch.Maintained{Archive: &watch.Archived{Sequence: 100, Oldest: before(9)},
		Parts: []watch.MaintainPart{
			{Name: "archive", Succeeded: before(9), Failing: before(8)},
			{Name: "partition", Succeeded: before(9), Failing: before(8)},
			{Name: "stream", Succeeded: before(9)},
			{Name: "works", Succeeded: now}}}}
	m.takeOver(&watch.Maintained{Archive: &watch.Archived{Sequence: 500}, Parts: []watch.MaintainPart{
		{Name: "archive", Succeeded: before(2)},
		{Name: "partition", Succeeded: before(3), Failing: before(1)},
		{Name: "stream", Succeeded: before(4), Failing: before(3)},
		{Name: "works", Succeeded: before(2), Failing: before(1)}}})
	want := []watch.MaintainPart{
		{Name: "archive", Succeeded: before(2), Failing: before(2)},
		{Name: "partition", Succeeded: before(3), Failing: before(1)},
		{Name: "stream", Succeeded: before(4), Failing: before(3)},
		{Name: "works", Succeeded: now}}
	if got := m.Maintained().Parts; !slices.Equal(got, want) {
		t.Errorf("%+v, not %+v", got, want)
	}
	if a := m.Maintained().Archive; a.Sequence != 500 || !a.Oldest.IsZero() {
		t.Errorf("the archive: %+v", a)
	}
}
