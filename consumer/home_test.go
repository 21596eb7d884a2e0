package consumer

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// of lets messages name their home.
func of(home string, all ...*stream.Message) []*stream.Message {
	for _, m := range all {
		m.Header.Set(outbox.HeaderOrigin, home)
	}
	return all
}

// A stream whose messages name their home is read like any other, also where the earlier ones name none, and
// where the broker loses its end. The handler learns the home.
func TestAnEventSaysWhichClusterItIsOf(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	before := s.events(4, 3)
	all := slices.Concat(before, of("3", s.events(6, 3)...))
	src.publish(all...)
	cfg := w.config(src)
	wrong := errors.New("another home than the message names")
	r := w.start(w.consumer(cfg), func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if want := 3; e.Sequence > uint64(len(before)) != (e.Home == want) || e.Home != 0 && e.Home != want {
			return wrong
		}
		return handler(ctx, tx, e)
	})
	w.await(all)
	r.stopped()
	src.lose(8, true)
	more := of("3", s.events(2, 3)...)
	src.publish(slices.Concat(all[7:], more)...)
	w.readAll(cfg, slices.Concat(all, more))
	src.removeTo(12)
	last := s.events(2, 3) // an older outflow has published them
	src.publish(last...)
	w.readAll(cfg, slices.Concat(all, more, last))
}

// Of a stream with events of several clusters nobody can tell by the marks what is done: Run ends at the
// first that is another's, whatever its position is, and has the effects of what came before.
func TestEventsOfSeveralClustersEndRun(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		at      outbox.LSN // where the other cluster's events begin
		restart bool       // another session reads those
	}{
		"below": {0, false}, "above": {1 << 20, false}, "above, next session": {1 << 20, true},
		"below, next session": {0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, src := newHarness(t), newMemoryStream()
			one, two := &publisher{}, &publisher{lsn: test.at, n: 100}
			all, other := of("1", one.events(4, 3)...), of("2", two.events(3, 3)...)
			src.publish(all...)
			cfg := w.config(src)
			if test.restart {
				w.readAll(cfg, all)
			}
			src.publish(other...)
			w.fails(cfg, ErrStream, "sequence 5 is an event of cluster 2", "one of cluster 1",
				"docs/clusters.md")
			if test.restart {
				w.exactly(all)
			}
		})
	}
}

// A message with the header of a home that Outflow would not write is a stranger's.
func TestAMalformedOriginEndsRun(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(3, 3)
	src.publish(all...)
	w.readAll(w.config(src), all)
	src.publish(of("0", s.events(1, 3)...)...)
	w.fails(w.config(src), ErrForeign, outbox.HeaderOrigin)
	w.exactly(all)
}
