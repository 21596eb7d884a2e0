package torture

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// node returns one of the victim's servers, counted from the one that leads the stream. Without a leader it
// is counted from the first.
func (a *injection) node() *natsserver.Process {
	b := a.v.nats
	if b.cluster == nil {
		return b.nodes[0]
	}
	leader, err := b.cluster.Leader(a.v.stream)
	if err != nil {
		leader = 0
	}
	return b.nodes[(leader+a.Node)%len(b.nodes)]
}

func nodeOf(r *rand.Rand, s *shape) int {
	if s.replicas == 1 || r.IntN(2) == 0 {
		return 0 // the leader
	}
	return r.IntN(s.replicas)
}

func ownNATS(s *shape) bool { return s.ownNATS }

// natsKill is kill -9 of a server.
var natsKill = &fault{
	name: "nats.kill", does: "kill -9 of a NATS server (of three: of the leader or another)",
	weight: 10, holds: []resource{theNATS},
	fits: ownNATS,
	plan: func(r *rand.Rand, s *shape) Params {
		return Params{Hold: between(r, 0, 400*time.Millisecond), Node: nodeOf(r, s)}
	},
	inject: func(ctx context.Context, a *injection) error {
		n := a.node()
		if err := n.Kill(); err != nil {
			return err
		}
		_ = pause(ctx, a.Hold) // it is started in any case
		return n.Start()
	},
}

// natsPause freezes a server.
var natsPause = &fault{
	name: "nats.pause", does: "SIGSTOP of a NATS server for up to 7 s (an acknowledgement is waited " +
		"for 5 s), SIGCONT",
	weight: 4, holds: []resource{theNATS},
	fits: ownNATS,
	plan: func(r *rand.Rand, s *shape) Params {
		hold := between(r, 100*time.Millisecond, 2*time.Second)
		if r.IntN(5) == 0 {
			hold = between(r, 5*time.Second, 7*time.Second)
		}
		return Params{Hold: hold, Node: nodeOf(r, s)}
	},
	inject: func(ctx context.Context, a *injection) error {
		n := a.node()
		if err := n.Pause(); err != nil {
			return err
		}
		_ = pause(ctx, a.Hold) // it goes on in any case
		return n.Resume()
	},
}

// natsAway is an outage that is longer than wal_sender_timeout.
var natsAway = &fault{
	name: "nats.away", does: "NATS is away for longer than wal_sender_timeout (5 s): 6 s, a minute in " +
		"long runs",
	weight: 1, holds: []resource{theNATS}, gap: 40 * time.Second,
	fits: ownNATS,
	plan: func(r *rand.Rand, s *shape) Params {
		if s.long && r.IntN(3) == 0 {
			return Params{Hold: time.Minute}
		}
		return Params{Hold: walSenderTimeout + time.Second}
	},
	inject: func(ctx context.Context, a *injection) error {
		for _, n := range a.v.nats.nodes {
			if err := n.Kill(); err != nil {
				return err
			}
		}
		_ = pause(ctx, a.Hold) // they are started in any case
		started := make(chan error)
		for _, n := range a.v.nats.nodes { // a node of a cluster may wait for others
			go func() { started <- n.Start() }()
		}
		var errs []error
		for range a.v.nats.nodes {
			errs = append(errs, <-started)
		}
		return errors.Join(errs...)
	},
}

// natsStepDown makes the leader of the stream, or of the checkpoint's bucket, hand over.
var natsStepDown = &fault{
	name: "nats.stepdown", does: "the stream's or the record's leader steps down (--replicas 3)",
	weight: 20,
	fits:   func(s *shape) bool { return s.ownNATS && s.replicas > 1 },
	plan: func(r *rand.Rand, _ *shape) Params {
		return Params{What: []string{"stream", "stream", "stream", "record"}[r.IntN(4)]}
	},
	inject: func(_ context.Context, a *injection) error {
		stream := a.v.stream
		if a.What == "record" {
			stream = "KV_" + checkpoint.Bucket(stream)
		}
		if err := a.v.nats.cluster.StepDown(stream); err != nil {
			a.note("%v", err)
			return errMissed
		}
		return nil
	},
}
