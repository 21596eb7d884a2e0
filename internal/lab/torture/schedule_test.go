package torture

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

func planned(t *testing.T, o Options) []Entry {
	t.Helper()
	must.Succeed(t, o.complete())
	s := shapeOf(&o)
	s.clock = "" // the same on every machine
	kinds, err := choose(o.Faults, &s)
	must.Succeed(t, err)
	return schedule(&o, &s, kinds)
}

func text(plan []Entry) string {
	var b strings.Builder
	for i := range plan {
		e := &plan[i]
		b.WriteString(e.At.String() + " " + e.who() + " " + e.Fault + " " + e.Params.String() + "\n")
	}
	return b.String()
}

func TestScheduleIsAFunctionOfTheSeed(t *testing.T) {
	t.Parallel()
	o := Options{Seed: 42, Duration: 5 * time.Minute}
	first := text(planned(t, o))
	if again := text(planned(t, o)); again != first {
		t.Errorf("the same seed gave two schedules:\n%s\n%s", first, again)
	}
	o.Seed++
	if text(planned(t, o)) == first {
		t.Error("another seed gave the same schedule")
	}
}

func TestScheduleHoldsEveryKind(t *testing.T) {
	t.Parallel()
	for _, replicas := range []int{1, 3} {
		seen := map[string]bool{}
		for _, e := range planned(t, Options{Seed: 1, Duration: time.Hour, Replicas: replicas}) {
			seen[e.Fault] = true
			if (e.Fault == "outflow.settings") && e.Victim != defaultVictims-1 {
				t.Errorf("victim %d gets other settings: it could not be compared with the twin", e.Victim)
			}
		}
		s := shape{victims: 2, replicas: replicas, ownPostgres: true, ownNATS: true, pgLink: true,
			natsLink: true, minutes: true}
		for _, f := range all {
			if name := f.name; f.possible(&s) != seen[name] {
				t.Errorf("with %d replicas: %s fits: %v, planned: %v", replicas, name, f.possible(&s),
					seen[name])
			}
		}
	}
}

func TestScheduleEndsAtTheKills(t *testing.T) {
	t.Parallel()
	plan := planned(t, Options{Seed: 3, Kills: 200})
	n := 0
	for i := range plan {
		if plan[i].kind.kills {
			n++
		}
	}
	if n != 200 || !plan[len(plan)-1].kind.kills {
		t.Errorf("%d kills, the last fault is %s", n, plan[len(plan)-1].Fault)
	}
}

func TestServersOfSomebodyElseAreNotHarmed(t *testing.T) {
	t.Parallel()
	o := Options{Seed: 1, Duration: time.Hour, PostgresURL: "postgres://u@db:5432/app",
		NATSURL: "nats://n:4222"}
	for _, e := range planned(t, o) {
		group := e.kind.group()
		if group == "nats" || e.Fault == "clock.step" || group == "postgres" &&
			e.Fault != "postgres.terminate" || e.Params.What == byTimeout {
			t.Errorf("%s %v", e.Fault, e.Params)
		}
	}
	o.PostgresURL, o.NATSURL = "postgres://u@db:5432/app?sslmode=verify-full", "tls://n:4222"
	for _, e := range planned(t, o) {
		if e.kind.group() == "network" {
			t.Errorf("%s, though no proxy can stand there", e.Fault)
		}
	}
}

func TestFaultsAreChosenByNameAndGroup(t *testing.T) {
	t.Parallel()
	s := shape{victims: 2, replicas: 1, ownPostgres: true, ownNATS: true, pgLink: true, natsLink: true}
	for list, want := range map[string][]string{
		"outflow.kill, nats.kill":        {"outflow.kill", "nats.kill"},
		"disk,outflow.kill,outflow.kill": {"outflow.kill", "disk.full"},
		"outflow,-outflow.zombie,-outflow.term": {"outflow.kill", "outflow.point", "outflow.pause",
			"outflow.leave", "outflow.away", "outflow.settings"},
		"-network,-nats,-postgres,-outflow": {"disk.full", "clock.outflow"},
	} {
		chosen, err := choose(list, &s)
		var got []string
		for _, f := range chosen {
			got = append(got, f.name)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %v; want %v", list, got, err, want)
		}
	}
	for _, list := range []string{"outflow.kil", "nats.stepdown", "-all", "nats.tail*0", "nats.tail*x",
		"-nats.tail*2"} {
		if _, err := choose(list, &s); outbox.ClassOf(err) != outbox.Usage {
			t.Errorf("%s: %v", list, err)
		}
	}
}

func TestAFactorMakesAFaultStrikeMoreOften(t *testing.T) {
	t.Parallel()
	count := func(list string) (tails int) {
		for _, e := range planned(t, Options{Seed: 1, Duration: time.Hour, Every: time.Minute,
			Faults: list}) {
			tails += strings.Count(e.Fault, "nats.tail")
		}
		return tails
	}
	if once, often := count("all"), count("all,nats.tail*50"); often < 5*once {
		t.Errorf("%d lost tails, and %d with a factor", once, often)
	}
}

func TestOptionsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{Replicas: 2}, {Kills: -1}, {Sort: "x"}, {Mode: "x"}, {Horizon: -1},
		{Every: -1},
		{Sabotage: "x"}} {
		_, err := Run(t.Context(), o)
		if f := outbox.FaultOf(err); f == nil || f.Class != outbox.Usage {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestOperationsRepeatWithOtherDocuments(t *testing.T) {
	t.Parallel()
	o, err := newOperations()
	must.Succeed(t, err)
	type id struct {
		doc, actor string
		counter    int64
	}
	seen := map[id]bool{}
	for range 2*len(o.all) + 5 {
		op := o.next(1)[0]
		k := id{op.doc, op.actor, op.counter}
		if seen[k] {
			t.Fatalf("%v comes twice", k)
		}
		seen[k] = true
	}
}

// The counters that operations with spans take are all there, as those of the recording are.
func TestSpansLeaveNoGap(t *testing.T) {
	t.Parallel()
	next := int64(1)
	for recorded := int64(1); recorded < 100; recorded++ {
		first, span := spanned(recorded)
		if first != next || span < 1 {
			t.Fatalf("operation %d takes %d counters from %d on, and the next one is %d", recorded, span,
				first, next)
		}
		next = first + span
	}
}

// What lasts long is bounded: in number, in the time between two, and to runs that are long enough.
func TestLongStandstillsAreFewAndFarBetween(t *testing.T) {
	t.Parallel()
	for seed := range uint64(5) {
		last, frozen := map[string]time.Duration{}, map[int]int{}
		for _, e := range planned(t, Options{Seed: seed + 1, Duration: time.Hour}) {
			kind, name := e.kind, e.who()+e.Fault
			if before, ok := last[name]; ok && e.At-before < kind.gap {
				t.Errorf("seed %d: %s at %v and %v", seed+1, name, before, e.At)
			}
			last[name] = e.At
			if e.Fault == "nats.freeze" {
				frozen[e.Victim]++
			}
			if e.Params.Hold > 10*time.Second && e.Fault != "nats.freeze" && e.Fault != "nats.away" {
				t.Errorf("seed %d: %s %v", seed+1, e.Fault, e.Params)
			}
		}
		for v, n := range frozen {
			if n > 1 {
				t.Errorf("seed %d: victim %d: %d long freezes", seed+1, v, n)
			}
		}
		for _, e := range planned(t, Options{Seed: seed + 1, Duration: 119 * time.Second}) {
			if e.Fault == "nats.freeze" {
				t.Errorf("seed %d: %s in a short run", seed+1, e.Fault)
			}
		}
	}
	if plan := planned(t, Options{Seed: 1, Kills: 300, Faults: "nats.freeze"}); len(plan) != 2 {
		t.Errorf("%d long freezes of two victims", len(plan))
	}
}
