package torture

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// natsTail is a machine's crash that comes before fsync: the end of the stream, of the checkpoint's bucket,
// or of both is gone though it was acknowledged. What is lost is younger than sink.durable_after, so it must
// be published again from the WAL.
var natsTail = &fault{
	name: "nats.tail", does: "NATS crashes and loses what it acknowledged last (stream, record or " +
		"both; the sequence goes back, or stays with a hole)",
	weight: 3, holds: []resource{theNATS, theNATSLink}, gap: tornAgain,
	fits: func(s *shape) bool { return s.ownNATS && s.replicas == 1 },
	plan: func(r *rand.Rand, _ *shape) Params {
		form := []natsserver.Form{natsserver.Back, natsserver.Hole}[r.IntN(2)]
		p := Params{
			What: []string{ofStream, ofStream, ofRecord, ofBoth}[r.IntN(4)] + ", " + form.String(),
			Age:  between(r, 50*time.Millisecond, durableAfter-tailMargin),
			Hold: between(r, 0, 300*time.Millisecond),
		}
		if r.IntN(3) == 0 {
			// longer than what remains of durableAfter
			p.What, p.Hold = p.What+unnoticed, between(r, time.Second, 5*time.Second)
		}
		return p
	},
	inject: func(ctx context.Context, a *injection) error {
		n := a.v.nats.nodes[0]
		// One such loss in durable_after is what outflow stands: what came after the last one must have been
		// confirmed. Before the first one too: a stream that loses all it has looks like one that was purged,
		// of which nothing comes again.
		if err := pause(ctx, time.Until(a.v.tornAt.Add(tornAgain))); err != nil {
			return err
		}
		if !a.settled(ctx) {
			return errMissed
		}
		a.Side = sideNATS
		silent := strings.HasSuffix(a.What, unnoticed) && len(a.links()) > 0
		if silent {
			a.each(func(p *faultproxy.Proxy) {
				p.Mute(faultproxy.ToServer, true)
				p.Mute(faultproxy.ToClient, true)
			})
		}
		if err := n.Kill(); err != nil {
			return err
		}
		crashed := time.Now()
		_ = pause(ctx, a.Hold) // it is started in any case
		err := a.tear(n, crashed.Add(-a.Age))
		startErr := n.Start()
		if silent {
			a.each((*faultproxy.Proxy).Cut)
			a.each((*faultproxy.Proxy).Heal)
		}
		a.v.tornAt = time.Now()
		return errors.Join(err, startErr)
	},
}

const (
	ofStream = "stream"
	ofRecord = "record"
	ofBoth   = "both"
	// unnoticed: the machine loses power, so no connection is reset; outflow finds out by itself.
	unnoticed = ", unnoticed"
	// A checkpoint in the record is confirmed durableAfter after it was stored; what it stands for was stored
	// before.
	tailMargin = 700 * time.Millisecond
)

// settled waits until there is something in the stream, and what was in the WAL then is confirmed: what was
// published again after the last loss is durable then, however long that took.
func (a *injection) settled(ctx context.Context) bool {
	if !await(ctx, recoverLimit, func() bool { return a.w.load.committed.Load() >= leastRows }) {
		return false
	}
	var end string
	if err := a.w.surely(ctx, []any{&end}, "SELECT pg_current_wal_insert_lsn()::text"); err != nil {
		return false
	}
	return await(ctx, recoverLimit, func() (confirmed bool) {
		err := a.w.query(ctx, []any{&confirmed}, "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM "+
			"pg_replication_slots WHERE slot_name = $2", end, a.v.slot)
		return err == nil && confirmed || pause(ctx, drainEvery/10) != nil
	}) && ctx.Err() == nil
}

// tornAgain is the least time between two such losses: a recheck, a durable_after, and what a busy
// machine adds.
const tornAgain = 10 * time.Second

func (a *injection) tear(n *natsserver.Process, since time.Time) error {
	what, formText, _ := strings.Cut(strings.TrimSuffix(a.What, unnoticed), ", ")
	form := natsserver.Back
	if formText == natsserver.Hole.String() {
		form = natsserver.Hole
	}
	for _, t := range []struct {
		stream string
		not    string
	}{{a.v.stream, ofRecord}, {"KV_" + checkpoint.Bucket(a.v.stream), ofStream}} {
		if what == t.not {
			continue
		}
		torn, err := natsserver.Tear(n.Dir(), t.stream, form, func(_ uint64, stored time.Time) bool {
			return stored.Before(since)
		})
		if err != nil {
			return err
		}
		a.note("%s: %v", t.stream, torn)
	}
	return nil
}
