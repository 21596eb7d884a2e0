package torture

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Entry is one fault of the schedule.
type Entry struct {
	At     time.Duration `json:"at"`     // from the beginning of the attack, at the earliest
	Victim int           `json:"victim"` // counted from 0; -1: all
	Fault  string        `json:"fault"`
	Params Params        `json:"params"`

	kind *fault
}

func (e *Entry) who() string {
	if e.Victim == sharedByVictim {
		return "all"
	}
	return fmt.Sprintf("%d", e.Victim+1)
}

// warmUp is before the first fault.
const warmUp = 500 * time.Millisecond

// sharedEvery: what hits all victims comes so many times less often than what hits one.
const sharedEvery = 4

// longest is the longest time that is planned for where none of the kinds kills: some come a number of times
// only.
const longest = 24 * time.Hour

// schedule is the plan of the attack: a pure function of seed, options and shape.
func schedule(o *Options, s *shape, kinds []chosen) []Entry {
	if o.Kills == 0 {
		return timetable(o, s, kinds, o.Duration)
	}
	for d := max(o.Every, time.Duration(o.Kills)*o.Every/time.Duration(s.victims)); ; d *= 2 {
		all := timetable(o, s, kinds, d)
		n := 0
		for i := range all {
			if all[i].kind.kills {
				n++
			}
			if n == o.Kills {
				return all[:i+1]
			}
		}
		if n == 0 && (len(all) > max(1000, o.Kills) || d > longest) { // none of the chosen kinds kills
			return all[:min(len(all), o.Kills)]
		}
	}
}

// timetable plans for a time.
func timetable(o *Options, s *shape, kinds []chosen, d time.Duration) []Entry {
	var own, shared []chosen
	for _, f := range kinds {
		if f.shared {
			shared = append(shared, f)
		} else {
			own = append(own, f)
		}
	}
	var all []Entry
	for v := range s.victims {
		fits := slices.DeleteFunc(slices.Clone(own), func(f chosen) bool {
			changes := f.fault == resettings
			return changes && v != s.victims-1 // the others stay comparable with the twin
		})
		all = append(all, line(rand.New(rand.NewPCG(o.Seed, uint64(v))), s, fits, v, o.Every, d)...)
	}
	every := o.Every * sharedEvery
	if len(own) == 0 {
		every = o.Every
	}
	all = append(all, line(rand.New(rand.NewPCG(o.Seed, 1<<32)), s, shared, sharedByVictim, every, d)...)
	slices.SortStableFunc(all, func(a, b Entry) int { return cmp.Compare(a.At, b.At) })
	return all
}

// line plans what happens to one victim.
func line(r *rand.Rand, s *shape, kinds []chosen, victim int, every, d time.Duration) (entries []Entry) {
	if len(kinds) == 0 {
		return nil
	}
	last, struck := map[string]time.Duration{}, map[string]int{}
	at := warmUp
	for {
		at += min(time.Duration(r.ExpFloat64()*float64(every)), 4*every).Round(time.Millisecond)
		if at >= d {
			return entries
		}
		f := pick(r, kinds, func(a *fault) bool {
			before, ok := last[a.name]
			return (!ok || at-before >= a.gap) && (a.most == 0 || struck[a.name] < a.most)
		})
		if f == nil {
			continue
		}
		last[f.name] = at
		struck[f.name]++
		entries = append(entries, Entry{At: at, Victim: victim, Fault: f.name, Params: f.plan(r, s),
			kind: f})
	}
}

// pick chooses a kind by weight.
func pick(r *rand.Rand, kinds []chosen, allowed func(*fault) bool) *fault {
	total := 0
	for _, f := range kinds {
		if allowed(f.fault) {
			total += f.weight
		}
	}
	if total == 0 {
		return nil
	}
	n := r.IntN(total)
	for _, f := range kinds {
		if !allowed(f.fault) {
			continue
		}
		if n -= f.weight; n < 0 {
			return f.fault
		}
	}
	return nil
}
