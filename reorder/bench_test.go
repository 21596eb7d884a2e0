package reorder

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/recording"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// load is a WAL to measure with: commits of some rows each, over some documents, of two actors each.
type load struct {
	horizon  time.Duration
	sort     outbox.Sort
	docs     int
	rows     int   // in a commit
	spacing  int64 // microseconds between commits
	disorder int   // events come up to so many places late
	payload  int   // bytes; 0: 200
	trace    bool  // the edits of a recorded session, instead
	gap      bool  // gap mode
}

const loadEvents = 1 << 17

// events makes the load's events, each with its own strings, as the decoder does.
func (l load) events(b *testing.B) []relay.Event {
	if l.trace {
		return edits(b)
	}
	r := rand.New(rand.NewPCG(1, 4))
	counters := make([]int, 2*l.docs)
	list := make([]relay.Event, loadEvents)
	payload := make([]byte, cmp.Or(l.payload, 200))
	for i := range list {
		c := r.IntN(len(counters))
		counters[c]++
		actor := fmt.Sprintf("author-%02d", c%2)
		list[i] = relay.Event{
			Doc: fmt.Sprintf("document-%06d", c/2), Actor: actor,
			Key:     fmt.Sprintf("%s:%020d", actor, counters[c]),
			Counter: outbox.Counter{First: int64(counters[c]), Span: 1},
			ID:      fmt.Sprintf("6f1c2c5e-8c2a-4b1e-9d52-%012d", i), Payload: payload,
			PayloadSize: len(payload),
		}
	}
	for i := range list {
		if j := i + r.IntN(l.disorder+1); j < len(list) {
			list[i], list[j] = list[j], list[i]
		}
	}
	return list
}

// edits are those of two people in one document.
func edits(b *testing.B) (list []relay.Event) {
	ops, err := recording.Load(recording.FriendsForever)
	if err != nil {
		b.Fatal(err)
	}
	for _, op := range ops {
		list = append(list, relay.Event{
			Doc: op.Doc, Actor: op.Actor, Key: fmt.Sprintf("%s:%020d", op.Actor, op.Counter),
			Payload: op.Payload, PayloadSize: len(op.Payload),
		})
	}
	return list
}

func (l load) run(b *testing.B) {
	events := l.events(b)
	set := relay.Settings{Horizon: l.horizon, Sort: l.sort, MaxEvents: 1 << 20, MaxBytes: 1 << 30}
	if l.gap {
		set.Sort = outbox.ByGap
		set.Gap = relay.Gap{Bound: 10 * time.Second, Cold: 10 * time.Second, Memory: relay.DefaultMemory,
			First: 1}
	}
	buffer := New(Config{Settings: set})
	b.ReportAllocs()
	b.ResetTimer()
	var out relay.Event
	lsn, now, windows, pulled, held := outbox.LSN(1), int64(0), 0, 0, 0
	for i := 0; i < b.N; {
		n := min(l.rows, b.N-i, len(events)-i%len(events))
		if l.gap && i%len(events) == 0 { // the counters begin again
			buffer = New(Config{Settings: set})
		}
		for k := range n {
			e := &events[(i+k)%len(events)]
			e.Pos.Index = uint32(k)
			if err := buffer.Append(e); err != nil {
				b.Fatal(err)
			}
		}
		i += n
		lsn += 100
		now += l.spacing
		if i%len(events) == 0 { // the keys begin again: everything before leaves
			now += 1_000_000
		}
		if err := buffer.Commit(relay.Commit{LSN: lsn, Time: now, Kind: relay.Events,
			Events: n}); err != nil {
			b.Fatal(err)
		}
		w, err := buffer.Close()
		if err != nil {
			b.Fatal(err)
		}
		if w == nil {
			continue
		}
		windows++
		pulled += w.Pull
		for {
			ok, err := w.Next(&out)
			if err != nil {
				b.Fatal(err)
			}
			if !ok {
				break
			}
		}
		held = max(held, buffer.held.events)
	}
	b.ReportMetric(float64(b.N)/float64(max(windows, 1)), "events/window")
	b.ReportMetric(float64(pulled)/float64(b.N), "pulled/event")
	b.ReportMetric(float64(held), "held")
}

// BenchmarkBuffer is the cost of one event on its way through the buffer.
func BenchmarkBuffer(b *testing.B) {
	const horizon = 20 * time.Millisecond
	for _, c := range []struct {
		name string
		load
	}{
		{"gap,docs=1,rows=1", load{gap: true, docs: 1, rows: 1, spacing: 10}},
		{"gap,docs=1000,rows=1", load{gap: true, docs: 1000, rows: 1, spacing: 10}},
		{"gap,docs=100000,rows=1", load{gap: true, docs: 100_000, rows: 1, spacing: 10}},
		{"gap,docs=1000,rows=100", load{gap: true, docs: 1000, rows: 100, spacing: 1000}},
		{"gap,docs=1,rows=1,late=30", load{gap: true, docs: 1, rows: 1, spacing: 10, disorder: 30}},
		{"gap,docs=1,rows=1,late=1000", load{gap: true, docs: 1, rows: 1, spacing: 10, disorder: 1000}},
		{"gap,docs=1000,rows=1,late=1000", load{gap: true, docs: 1000, rows: 1, spacing: 10, disorder: 1000}},
		{"horizon=0,docs=1,rows=1", load{docs: 1, rows: 1, spacing: 10}},
		{"horizon=0,docs=1000,rows=1", load{docs: 1000, rows: 1, spacing: 10}},
		{"horizon=0,docs=100000,rows=1", load{docs: 100_000, rows: 1, spacing: 10}},
		{"horizon=0,docs=1,rows=100", load{docs: 1, rows: 100, spacing: 1000}},
		{"horizon=0,docs=1000,rows=100", load{docs: 1000, rows: 100, spacing: 1000}},
		{"horizon=0,docs=100000,rows=100", load{docs: 100_000, rows: 100, spacing: 1000}},
		{"horizon=0,docs=1000,rows=10000", load{docs: 1000, rows: 10_000, spacing: 100_000}},
		{"horizon=0,docs=1000,rows=100,payload=10KB",
			load{docs: 1000, rows: 100, spacing: 1000, payload: 10 << 10}},
		{"horizon=0,docs=1000,rows=100,sort=commit",
			load{docs: 1000, rows: 100, spacing: 1000, sort: outbox.ByCommit}},
		{"horizon=0,rows=100,trace", load{rows: 100, spacing: 1000, trace: true}},
		{"horizon=20ms,docs=1,rows=1", load{horizon: horizon, docs: 1, rows: 1, spacing: 10}},
		{"horizon=20ms,docs=1000,rows=1", load{horizon: horizon, docs: 1000, rows: 1, spacing: 10}},
		{"horizon=20ms,docs=100000,rows=1", load{horizon: horizon, docs: 100_000, rows: 1, spacing: 10}},
		{"horizon=20ms,docs=1000,rows=100", load{horizon: horizon, docs: 1000, rows: 100, spacing: 1000}},
		{"horizon=20ms,docs=1000,rows=1,sort=commit", load{horizon: horizon, docs: 1000, rows: 1, spacing: 10,
			sort: outbox.ByCommit}},
		{"horizon=20ms,rows=1,trace", load{horizon: horizon, rows: 1, spacing: 10, trace: true}},
		{"horizon=20ms,docs=1,rows=1,late=30", load{horizon: horizon, docs: 1, rows: 1, spacing: 10,
			disorder: 30}},
		{"horizon=20ms,docs=1,rows=1,late=1000", load{horizon: horizon, docs: 1, rows: 1, spacing: 10,
			disorder: 1000}},
		{"horizon=20ms,docs=1000,rows=1,late=1000", load{horizon: horizon, docs: 1000, rows: 1, spacing: 10,
			disorder: 1000}},
	} {
		b.Run(c.name, c.load.run)
	}
}
