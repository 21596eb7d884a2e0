package oracle

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

var gapTrials = flag.Int("gap.trials", 300, "random WALs that the judge is compared on in gap mode")

// The judge's rule and docs/models/gap_model.py make the same stream of random WALs.
func TestTheModelAndTheJudgeAgree(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		tier.Missing(t, "python", "the model of gap mode needs python3: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), python,
		filepath.Join("..", "..", "..", "docs", "models", "gap_model.py"), "order")
	in, err := cmd.StdinPipe()
	must.Succeed(t, err)
	out, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	cmd.Stderr = t.Output()
	must.Succeed(t, cmd.Start())
	scenes, results := json.NewEncoder(in), json.NewDecoder(out)
	held, late := 0, 0
	for seed := range uint64(*gapTrials) {
		s, _ := gapSceneOf(seed)
		must.Succeed(t, scenes.Encode(s.forModel()))
		var want struct{ Messages [][]any }
		must.Succeed(t, results.Decode(&want))
		o := newOrder(s.first, false)
		n := 0
		for _, x := range s.wal {
			w, events := x.feed(o)
			for i, e := range events {
				mode, isLate := "horizon", false
				if w.sort == ByGap {
					mode, isLate = "gap", w.late[i]
				}
				got := fmt.Sprint([]any{e.Pos.LSN.number(), e.Pos.Index, w.thru.number(), i, w.of, mode,
					isLate})
				if n == len(want.Messages) || fmt.Sprint(want.Messages[n]) != got {
					t.Fatalf("seed %d: message %d is %s, the model has %v", seed, n, got,
						want.Messages[n:min(n+1, len(want.Messages))])
				}
				if n++; isLate {
					late++
				}
				if e.Pos.LSN < w.thru {
					held++
				}
			}
		}
		if n != len(want.Messages) {
			t.Fatalf("seed %d: %d messages, the model has %d", seed, n, len(want.Messages))
		}
	}
	must.Succeed(t, in.Close())
	must.Succeed(t, cmd.Wait())
	t.Logf("%d WALs: %d held, %d late", *gapTrials, held, late)
	if held < *gapTrials || late < *gapTrials {
		t.Errorf("%d held, %d late: too few of something", held, late)
	}
}

func (l LSN) number() uint64 { return uint64(l) }

// gapSceneOf is the scene of a seed, the same one in each test: what the judge is to the model, package
// reorder is to the judge.
func gapSceneOf(seed uint64) (gapScene, *rand.Rand) {
	r := rand.New(rand.NewPCG(seed, 7))
	return randomGapScene(r), r
}

// gapScene is a random WAL with the settings that it begins with.
type gapScene struct {
	first Settings
	wal   []testInput
}

// forModel is the scene as the model reads it.
func (s gapScene) forModel() map[string]any {
	var inputs []map[string]any
	for _, x := range s.wal {
		events := [][]any{}
		for _, e := range x.events {
			var c any
			if e.Span > 0 {
				c = e.Counter
			}
			events = append(events, []any{e.Doc, e.Actor, c, e.Span, e.size()})
		}
		in := map[string]any{"lsn": x.lsn, "time": x.time, "events": events, "cut": x.cut}
		if x.set != nil {
			in["settings"] = x.set.forModel()
		}
		inputs = append(inputs, in)
	}
	return map[string]any{"settings": s.first.forModel(), "inputs": inputs}
}

func (s *Settings) forModel() map[string]any {
	mode, scope := "horizon", "sequence"
	if s.Sort == ByGap {
		mode = "gap"
	}
	if s.Gap.Document {
		scope = "document"
	}
	return map[string]any{"mode": mode, "bound": s.Gap.Bound.Microseconds(),
		"cold": s.Gap.Cold.Microseconds(), "memory": max(s.Gap.Memory, 1), "first": s.Gap.First,
		"scope": scope, "max_events": s.MaxEvents, "max_bytes": s.MaxBytes}
}

// randomGapSettings are of gap mode, or now and then those under which each transaction is a window.
func randomGapSettings(r *rand.Rand) Settings {
	pick := func(of ...int) int { return of[r.IntN(len(of))] }
	s := Settings{Sort: ByCommit, MaxEvents: pick(5, 20, 1000, 1000),
		MaxBytes: int64(pick(500, 1<<20, 1<<20))}
	if r.IntN(4) > 0 {
		s.Sort = ByGap
		s.Gap = Gap{time.Duration(pick(500, 5000, 50000)) * time.Microsecond,
			time.Duration(pick(0, 500)) * time.Microsecond, pick(1, 3, 20, 1000), int64(r.IntN(2)),
			r.IntN(2) == 0}
	}
	return s
}

// randomGapScene makes transactions that overtake one another, some rolled back, some counters twice. The
// last input ends all waits.
func randomGapScene(r *rand.Rand) (s gapScene) {
	s.first = randomGapSettings(r)
	docs, actors, spans := 1+r.IntN(4), 1+r.IntN(3), int64(1+2*r.IntN(2))
	lost, again, nulls, changes := r.IntN(2)*5, r.IntN(2)*4, r.IntN(2)*10, r.IntN(3)*5 // in a hundred
	counters := map[[2]int]int64{}
	lsn, now := LSN(0), int64(0)
	var pending [][]*Event
	add := func(in testInput) {
		lsn += LSN(2 + r.IntN(5))
		in.lsn, in.time = lsn, now-int64(r.IntN(300))
		for i, e := range in.events {
			e.Pos = Position{lsn, uint32(i)}
		}
		s.wal = append(s.wal, in)
	}
	for range 5 + r.IntN(50) {
		now += int64(1000 * r.ExpFloat64())
		if r.IntN(100) < changes {
			set := randomGapSettings(r)
			add(testInput{set: &set})
			continue
		}
		if r.IntN(10) == 0 {
			add(testInput{})
			continue
		}
		var events []*Event
		for range []int{1, 1, 2, 3, 12}[r.IntN(5)] {
			q := [2]int{r.IntN(docs), r.IntN(actors)}
			e := func(c, span int64) *Event {
				return &Event{Doc: fmt.Sprint("d", q[0]), Actor: fmt.Sprint("a", q[1]), Counter: c,
					Span: span, Size: r.IntN(60)}
			}
			if r.IntN(100) < nulls {
				events = append(events, e(0, 0))
				continue
			}
			if _, seen := counters[q]; !seen {
				counters[q] = []int64{0, 1, 1, 1, 7}[r.IntN(5)]
			}
			c, span := counters[q], 1+r.Int64N(spans)
			counters[q] += span
			if r.IntN(100) >= lost {
				events = append(events, e(c, span))
			}
			if r.IntN(100) < again {
				events = append(events, e(r.Int64N(c+1), 1+r.Int64N(spans)))
			}
		}
		if r.IntN(2) == 0 {
			r.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		}
		if r.IntN(3) == 0 {
			pending = append(pending, events)
			continue
		}
		add(testInput{events: events})
		if len(pending) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(pending))
			add(testInput{events: pending[i]})
			pending = slices.Delete(pending, i, i+1)
		}
	}
	for _, events := range pending {
		add(testInput{events: events})
	}
	now += 1_000_000
	add(testInput{})
	s.wal = cutAnywhere(r, s.wal)
	return s
}
