package torture

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
)

const (
	sidePostgres = "postgres"
	sideNATS     = "nats"
)

// side chooses whose connections suffer.
func side(r *rand.Rand, s *shape) string {
	if s.pgLink && (!s.natsLink || r.IntN(2) == 0) {
		return sidePostgres
	}
	return sideNATS
}

func linked(s *shape) bool { return s.pgLink || s.natsLink }

// links are the proxies of the fault's side.
func (a *injection) links() []*faultproxy.Proxy {
	if a.Side == sidePostgres {
		return []*faultproxy.Proxy{a.v.pgLink}
	}
	return a.v.natsLinks
}

func (a *injection) each(do func(*faultproxy.Proxy)) {
	for _, l := range a.links() {
		do(l)
	}
}

// during does something to the links for as long as the fault lasts, then resets the connections if they are
// of no use any more, and takes everything back.
func (a *injection) during(ctx context.Context, do func(*faultproxy.Proxy), cut bool) error {
	a.each(do)
	err := pause(ctx, a.Hold)
	if cut {
		a.each((*faultproxy.Proxy).Cut)
	}
	a.each((*faultproxy.Proxy).Heal)
	return err
}

// linkCut resets connections.
var linkCut = &fault{
	name: "network.cut", does: "all connections to PostgreSQL or NATS are reset", weight: 7,
	holds: []resource{theLink},
	fits:  linked,
	plan:  func(r *rand.Rand, s *shape) Params { return Params{Side: side(r, s)} },
	inject: func(_ context.Context, a *injection) error {
		a.each((*faultproxy.Proxy).Cut)
		return nil
	},
}

// linkRefuse resets connections, and new ones for a while.
var linkRefuse = &fault{
	name: "network.refuse", does: "connections are reset, and new ones refused for up to 3 s",
	weight: 3, holds: []resource{theLink},
	fits: linked,
	plan: func(r *rand.Rand, s *shape) Params {
		return Params{Side: side(r, s), Hold: between(r, 100*time.Millisecond, 3*time.Second)}
	},
	inject: func(ctx context.Context, a *injection) error {
		return a.during(ctx, func(p *faultproxy.Proxy) { p.Refuse(true); p.Cut() }, false)
	},
}

// linkHalfOpen leaves connections open that pass nothing, in one direction or both.
var linkHalfOpen = &fault{
	name:   "network.halfopen",
	does:   "connections stay open and pass nothing, in one direction or both, for up to 8 s",
	weight: 4, holds: []resource{theLink},
	fits: linked,
	plan: func(r *rand.Rand, s *shape) Params {
		what := []string{bothWays, fromOutflow, towardsIt}[r.IntN(3)]
		if r.IntN(2) == 0 {
			what += stallDropped
		}
		most := []time.Duration{2 * time.Second, 8 * time.Second}[r.IntN(2)]
		return Params{Side: side(r, s), Hold: between(r, 200*time.Millisecond, most), What: what}
	},
	inject: func(ctx context.Context, a *injection) error {
		lost := a.What == bothWays+stallDropped || a.What == fromOutflow+stallDropped || a.What == towardsIt+
			stallDropped
		return a.during(ctx, func(p *faultproxy.Proxy) {
			p.Mute(faultproxy.ToServer, a.What != towardsIt && a.What != towardsIt+stallDropped)
			p.Mute(faultproxy.ToClient, a.What != fromOutflow && a.What != fromOutflow+stallDropped)
		}, lost)
	},
}

const (
	bothWays     = "both ways"
	fromOutflow  = "from outflow"
	towardsIt    = "to outflow"
	stallDropped = ", then reset"
)

// linkSlow delays and slows down.
var linkSlow = &fault{
	name: "network.slow", does: "a slow link: up to 300 ms more each way, or down to 32 KiB/s",
	weight: 4, holds: []resource{theLink},
	fits: linked,
	plan: func(r *rand.Rand, s *shape) Params {
		p := Params{Side: side(r, s), Hold: between(r, time.Second, 4*time.Second)}
		if r.IntN(2) == 0 {
			p.Delay = between(r, 5*time.Millisecond, 300*time.Millisecond)
		} else {
			p.Rate = 32 << (10 + r.IntN(4))
		}
		return p
	},
	inject: func(ctx context.Context, a *injection) error {
		return a.during(ctx, func(p *faultproxy.Proxy) { p.Delay(a.Delay); p.Rate(a.Rate) }, false)
	},
}

// linkAckLost lets messages through and loses what NATS answers: they are stored, and outflow doesn't know.
var linkAckLost = &fault{
	name:   "network.acklost",
	does:   "messages are stored, and the acknowledgements are lost on their way; then a reset",
	weight: 6, holds: []resource{theLink},
	fits: func(s *shape) bool { return s.natsLink },
	plan: func(r *rand.Rand, _ *shape) Params {
		most := 300 * time.Millisecond
		if r.IntN(3) == 0 {
			most = 6 * time.Second // an acknowledgement is waited for 5 s
		}
		return Params{Side: sideNATS, Hold: between(r, 10*time.Millisecond, most)}
	},
	inject: func(ctx context.Context, a *injection) error {
		return a.during(ctx, func(p *faultproxy.Proxy) { p.Drop(faultproxy.ToClient, true) }, true)
	},
}
