package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// serverVersion is that of our own NATS.
const serverVersion = server.VERSION

// broker is the NATS of a case.
type broker struct {
	replicas int
	sync     bool
	given    bool

	url     string
	dir     string
	one     *natsserver.Process
	several *natsserver.Cluster
	conn    *nats.Conn
	js      jetstream.JetStream
}

// useBroker makes the present NATS one that fits the case.
func (w *harness) useBroker(ctx context.Context, c *Case) (err error) {
	if b := w.broker; b != nil {
		if b.given || b.replicas == c.Replicas && b.sync == c.Sync {
			return nil
		}
		w.broker = nil
		if err := b.close(false); err != nil {
			return err
		}
	}
	b := &broker{replicas: c.Replicas, sync: c.Sync, given: w.o.NATSURL != "", url: w.o.NATSURL}
	w.broker = b
	if !b.given {
		if b.dir, err = os.MkdirTemp(w.dir, "nats-"); err != nil {
			return err
		}
		// A machine that stands still while a server starts is no reason to give up.
		if err := persist(ctx, func(context.Context) error { return b.start() }); err != nil {
			return fmt.Errorf("start NATS: %w", err)
		}
	}
	if b.conn, err = nats.Connect(b.url, nats.MaxReconnects(-1), nats.ReconnectWait(pause),
		nats.Timeout(attempt)); err != nil {
		return fmt.Errorf("NATS: %w", err)
	}
	b.js, err = jetstream.New(b.conn, jetstream.WithDefaultTimeout(attempt))
	return err
}

func (b *broker) start() (err error) {
	o := natsserver.Options{Dir: b.dir, SyncAlways: b.sync}
	if b.replicas > 1 {
		if b.several, err = natsserver.StartCluster(b.dir, b.replicas, o); err == nil {
			b.url = b.several.URLs()
		}
		return err
	}
	if b.one, err = natsserver.StartProcess(o); err == nil {
		b.url = b.one.URL()
	}
	return err
}

// cpu returns what our own servers have used.
func (b *broker) cpu() (total time.Duration, ok bool) {
	var pids []int
	if b.one != nil {
		pids = append(pids, b.one.PID())
	}
	if b.several != nil {
		for i := range b.several.Len() {
			pids = append(pids, b.several.Node(i).PID())
		}
	}
	for _, pid := range pids {
		used, _, _, there := process.CPU(pid)
		if !there {
			return 0, false
		}
		total += used
	}
	return total, len(pids) > 0
}

// close ends our own servers.
func (b *broker) close(keep bool) error {
	if b.conn != nil {
		b.conn.Close()
	}
	var err error
	if b.one != nil {
		err = b.one.Kill()
	}
	if b.several != nil {
		err = b.several.Stop()
	}
	if b.given || keep {
		return err
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}

// makeStream makes a stream that is not outflow's.
func (w *harness) makeStream(ctx context.Context, c *Case, name, subjects string) error {
	return persist(ctx, func(ctx context.Context) error {
		_, err := w.broker.js.CreateOrUpdateStream(ctx,
			jetstream.StreamConfig{Name: name, Subjects: []string{subjects}, Replicas: c.Replicas})
		return err
	})
}

// dropStream removes a stream.
func (w *harness) dropStream(ctx context.Context, name string) error {
	return persist(ctx, func(ctx context.Context) error {
		if err := w.broker.js.DeleteStream(ctx, name); err != nil &&
			!errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		return nil
	})
}

// held is what streams hold together.
type held struct {
	Msgs, LastSeq uint64
	LastTime      time.Time // of the newest message
}

// state returns what streams hold.
func (w *harness) state(ctx context.Context, streams ...string) (all held, err error) {
	for _, name := range streams {
		err := persist(ctx, func(ctx context.Context) error {
			stream, err := w.broker.js.Stream(ctx, name)
			if err != nil {
				return err
			}
			s := stream.CachedInfo().State
			all.Msgs, all.LastSeq = all.Msgs+s.Msgs, all.LastSeq+s.LastSeq
			if s.LastTime.After(all.LastTime) {
				all.LastTime = s.LastTime
			}
			return nil
		})
		if err != nil {
			return held{}, err
		}
	}
	return all, nil
}
