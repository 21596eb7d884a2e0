package bench

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	minPayload = 40
	maxPayload = 512 << 10

	manyBytes = 60 << 20 // of payloads in a backlog: larger payloads make fewer rows
)

// Names are those of all cases, in the order in which they are measured.
var Names = []string{"drain", "latency", "payload", "shape", "documents", "actors", "horizon", "replicas",
	"sync", "restart"}

// Default are the cases of a run that names none.
var Default = []string{"drain", "latency"}

// plan returns the cases to measure.
func (o *Options) plan() (all []*Case, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	names := o.Cases
	switch {
	case o.Full:
		names = Names
	case len(names) == 0:
		names = Default
	}
	for _, name := range names {
		if !slices.Contains(Names, name) {
			return nil, &outbox.Fault{
				Class: outbox.Usage, Code: "bench", Message: fmt.Sprintf("there is no case %q", name),
				Hint: "There are " + strings.Join(Names, ", "),
			}
		}
	}
	for _, name := range Names {
		if slices.Contains(names, name) {
			all = append(all, o.points(name)...)
		}
	}
	return all, nil
}

// points returns the cases of a name: one for each point of a sweep.
func (o *Options) points(name string) (all []*Case) {
	add := func(point string, change func(*Case)) {
		c := &Case{
			Name: name, Kind: drain, Point: point,
			Rows: o.Rows, PerTx: 100, Documents: 1000, Actors: 4, Payload: o.Payload, Replicas: 1,
		}
		change(c)
		if o.Horizon != nil {
			c.Horizon = *o.Horizon
		}
		c.round()
		all = append(all, c)
	}
	switch name {
	case "drain":
		for _, n := range []int{1, 100} {
			add("", func(c *Case) { c.PerTx = n })
		}
	case "latency":
		add("", func(c *Case) {
			c.Kind, c.PerTx, c.Documents, c.Rate = latency, 1, 100, 1000
			c.Horizons = []time.Duration{0, relay.DefaultHorizon}
			if o.Horizon != nil {
				c.Horizons = []time.Duration{*o.Horizon}
			}
		})
	case "payload":
		for _, n := range []int{200, 1 << 10, 10 << 10} {
			add(size(n), func(c *Case) { c.Payload = n })
		}
	case "shape":
		for _, n := range []int{1, 100, 100_000} {
			add("", func(c *Case) { c.PerTx, c.Point = n, fmt.Sprint(min(n, c.Rows)) })
		}
	case "documents":
		for _, n := range []int{1, 1000, 100_000} {
			add(fmt.Sprint(n), func(c *Case) { c.Documents = n })
		}
	case "actors":
		for _, n := range []int{1, 10, 1000} {
			add(fmt.Sprint(n), func(c *Case) { c.Documents, c.Actors = 10, n })
		}
	case "horizon":
		for _, d := range []time.Duration{0, relay.DefaultHorizon} {
			add(d.String(), func(c *Case) { c.Horizon = d })
		}
	case "replicas":
		for _, n := range []int{1, 3} {
			add(fmt.Sprintf("R%d", n), func(c *Case) { c.Replicas = n })
		}
	case "sync":
		for _, n := range []int{1, 100} {
			add("", func(c *Case) { c.PerTx, c.Sync, c.Rows = n, true, min(c.Rows, 50_000) })
		}
	case "restart":
		// More rows than reorder.memory, which a start in gap mode reads back.
		for _, n := range []int{1, 3} {
			add(fmt.Sprintf("R%d", n), func(c *Case) {
				c.Kind, c.Rows, c.Replicas = restart, min(c.Rows, 20_000), n
			})
		}
	}
	return all
}

// round makes the rows fit: whole transactions, and no more bytes than a machine likes to keep.
func (c *Case) round() {
	if c.Kind == latency {
		c.Rows = 0
		return
	}
	if c.Kind == drain {
		c.Rows = min(c.Rows, max(1000, manyBytes/c.Payload))
	}
	c.PerTx = min(c.PerTx, c.Rows)
	c.Rows -= c.Rows % c.PerTx
}

func size(n int) string {
	if n >= 1<<10 && n%(1<<10) == 0 {
		return fmt.Sprintf("%d KB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
