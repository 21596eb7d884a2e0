package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/lab/oracle"
)

// fault is a kind of fault. It holds no state: the same value is used by all injections.
type fault struct {
	name   string // group.kind
	does   string // a phrase
	weight int    // how often, against the others
	holds  []resource
	shared bool // hits all victims at once
	kills  bool // counts as a kill of outflow
	// gap is the least time between two faults of this kind on one victim.
	gap time.Duration
	// most is how often it hits one victim in a run; 0: as often as it comes.
	most int
	// fits tells whether there is what it needs; nil: it needs nothing.
	fits func(s *shape) bool
	// plan chooses the parameters of one injection.
	plan func(r *rand.Rand, s *shape) Params
	// inject does it, for as long as it lasts, and returns when nothing of it is left. It returns errMissed
	// where there was nothing to hit; another error says that the run can't go on.
	inject func(ctx context.Context, a *injection) error
}

func (f *fault) group() string { return strings.SplitN(f.name, ".", 2)[0] }

// possible tells whether there is what it needs.
func (f *fault) possible(s *shape) bool { return f.fits == nil || f.fits(s) }

// resource is what only one fault at a time may hold.
type resource string

const (
	theOutflows      resource = "outflow" // a victim's instances
	theNATS          resource = "nats"    // a victim's servers
	theLink          resource = "link"    // a victim's proxies on the side that the parameters name
	theNATSLink      resource = "link " + sideNATS
	thePostgres      resource = "postgres"
	thePostgresClock resource = "clock"
)

// sharedByVictim stands for the number of a victim where all are meant, or none.
const sharedByVictim = -1

// errMissed: there was nothing to inject the fault into.
var errMissed = errors.New("nothing to strike at")

// Params are what a fault is injected with. Zero values are not printed.
type Params struct {
	Hold     time.Duration `json:"hold,omitempty"`     // how long it lasts
	Standby  bool          `json:"standby,omitempty"`  // the instance that waits, not the one that publishes
	Point    string        `json:"point,omitempty"`    // where outflow ends itself
	Node     int           `json:"node,omitempty"`     // of a cluster, counted from the leader
	Side     string        `json:"side,omitempty"`     // which connections
	Delay    time.Duration `json:"delay,omitempty"`    // added to each write
	Rate     int           `json:"rate,omitempty"`     // bytes per second
	Settings string        `json:"settings,omitempty"` // other ordering settings
	What     string        `json:"what,omitempty"`     // a variant
	Step     time.Duration `json:"step,omitempty"`     // of the clock
	Age      time.Duration `json:"age,omitempty"`      // of what is lost, at most
}

func (p Params) String() string {
	var b strings.Builder
	add := func(name string, value any, there bool) {
		if there {
			fmt.Fprintf(&b, " %s=%v", name, value)
		}
	}
	add("what", p.What, p.What != "")
	add("point", p.Point, p.Point != "")
	add("side", p.Side, p.Side != "")
	add("instance", "standby", p.Standby)
	add("node", fmt.Sprintf("leader+%d", p.Node), p.Node > 0)
	add("step", p.Step, p.Step != 0)
	add("age", p.Age, p.Age > 0)
	add("settings", p.Settings, p.Settings != "")
	add("delay", p.Delay, p.Delay > 0)
	add("rate", fmt.Sprintf("%dB/s", p.Rate), p.Rate > 0)
	add("hold", p.Hold, p.Hold > 0)
	return strings.TrimPrefix(b.String(), " ")
}

// shape is what there is to attack. With the seed it is all that the schedule depends on.
type shape struct {
	victims     int
	replicas    int
	ownPostgres bool
	ownNATS     bool
	pgLink      bool // a proxy can stand between outflow and PostgreSQL
	natsLink    bool
	clock       string // the library that moves PostgreSQL's clock; "": none
	long        bool
	minutes     bool            // it lasts two minutes or more
	settings    oracle.Settings // those in force at first
	columns     oracle.Columns  // of the table
}

func shapeOf(o *Options) shape {
	return shape{
		victims: o.Victims, replicas: o.Replicas, ownPostgres: o.PostgresURL == "", ownNATS: o.NATSURL == "",
		pgLink: proxyablePostgres(o.PostgresURL), natsLink: proxyableNATS(o.NATSURL), clock: clockLibrary(o),
		long: o.Duration >= longRun || o.Kills >= 200, minutes: o.Duration >= 2*time.Minute || o.Kills >= 200,
		settings: settingsOf(o), columns: columnsOf(o),
	}
}

// all kinds, in the order in which they are shown.
var all = []*fault{
	kill, term, point, zombie, outflowPause, outflowLeave, outflowAway, resettings,
	pgCrash("kill", 5, "kill -9 of PostgreSQL, then crash recovery"),
	pgCrash("immediate", 2, "immediate stop of PostgreSQL, then crash recovery"),
	pgCrash("fast", 2, "fast stop of PostgreSQL: it waits for walsenders, which must not hold it up"),
	pgTerminate, pgPause,
	natsKill, natsPause, natsFreeze, natsAway, natsTail, natsStepDown,
	linkCut, linkRefuse, linkHalfOpen, linkSlow, linkAckLost,
	spillFull, clockStep, clockOutflow,
}

// Faults lists all kinds of faults with what they do, for the help text.
func Faults() string {
	var b strings.Builder
	for _, f := range all {
		fmt.Fprintf(&b, "  %-18s %s\n", f.name, f.does)
	}
	return strings.TrimRight(b.String(), "\n")
}

// chosen is a kind that may be injected, and how often against the others.
type chosen struct {
	*fault
	weight int
}

// choose returns the kinds that a list names and that fit. "name*3" makes them come three times as often as
// they would.
func choose(list string, s *shape) ([]chosen, error) {
	times := map[*fault]int{}
	matches := func(name string) (found []*fault) {
		for _, f := range all {
			if name == "all" || name == f.name || name == f.group() {
				found = append(found, f)
			}
		}
		return found
	}
	for i, word := range strings.Split(list, ",") {
		name, without := strings.CutPrefix(strings.TrimSpace(word), "-")
		name, factor, multiplied := strings.Cut(name, "*")
		if i == 0 && (name == "" || without) {
			for _, f := range all {
				times[f] = 1
			}
		}
		if name == "" {
			continue
		}
		found := matches(name)
		if len(found) == 0 {
			return nil, usage(fmt.Sprintf("--faults %s: there is no fault %q", list, name),
				"outflow-lab torture --help lists them")
		}
		n := 1
		if multiplied {
			var err error
			if n, err = strconv.Atoi(factor); err != nil || n < 1 || n > 1000 || without {
				return nil, usage(fmt.Sprintf("--faults %s: %q is not possible", list, word),
					"Give a name and a factor from 1 to 1000, such as nats.tail*10")
			}
		}
		for _, f := range found {
			times[f] = n
			if without {
				delete(times, f)
			}
		}
	}
	var fit []chosen
	for _, f := range all {
		if times[f] > 0 && f.possible(s) {
			fit = append(fit, chosen{f, times[f] * f.weight})
		}
	}
	if len(fit) == 0 {
		return nil, usage(fmt.Sprintf("--faults %s: none of them is possible here", list),
			"outflow-lab torture --help lists them, and what each needs")
	}
	return fit, nil
}

// between returns a random duration from least to most, in whole milliseconds.
func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64((most-least)/time.Millisecond)+1))*time.Millisecond
}
