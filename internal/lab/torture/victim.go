package torture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// victim is an installation: a slot, a stream and the instances that share them. The twin is one, too, but
// nobody touches it.
type victim struct {
	w      *harness
	n      int // -1: the twin
	slot   string
	stream string

	nats      *broker
	pgLink    *faultproxy.Proxy   // nil: none
	natsLinks []*faultproxy.Proxy // one before each server; none: no proxies
	instances []*instance

	began     oracle.LSN   // the due of its first checkpoint
	resetted  atomic.Bool  // it was started with others: its stream need not be its twin's
	published atomic.Int64 // messages that its stream holds, as last seen
	watching  context.CancelFunc
	watched   chan struct{}
	tornAt    time.Time // when its newest tail was lost
}

const (
	instancesEach = 2
	replicasTwin  = 1
)

func newVictim(ctx context.Context, w *harness, n int) (*victim, error) {
	v := &victim{
		w: w, n: n, slot: fmt.Sprintf("%s_%d", w.name, n+1),
		stream: strings.ToUpper(fmt.Sprintf("%s_%d", w.name, n+1)),
	}
	return v, v.make(ctx, w.o.NATSURL, w.o.Replicas, instancesEach, true)
}

func newTwin(ctx context.Context, w *harness) (*victim, error) {
	v := &victim{w: w, n: sharedByVictim, slot: w.name + "_twin", stream: strings.ToUpper(w.name) + "_TWIN"}
	return v, v.make(ctx, "", replicasTwin, 1, false)
}

func (v *victim) make(ctx context.Context, natsURL string, replicas, instances int,
	attacked bool) (err error) {
	if v.nats, err = newBroker(ctx, v.w.file("nats-"+v.slot), natsURL, replicas, v.stream); err != nil {
		return err
	}
	pgURL, urls := v.w.pgURL, v.nats.urls
	if attacked && v.w.shape.pgLink {
		if v.pgLink, pgURL, err = faultproxy.To(pgURL); err != nil {
			return err
		}
	}
	if attacked && v.w.shape.natsLink {
		urls = nil
		for _, target := range v.nats.urls {
			link, url, err := faultproxy.To(target)
			if err != nil {
				return err
			}
			v.natsLinks, urls = append(v.natsLinks, link), append(urls, url)
		}
	}
	for n := range instances {
		i, err := newInstance(v, n, pgURL, strings.Join(urls, ","), replicas)
		if err != nil {
			return err
		}
		v.instances = append(v.instances, i)
	}
	v.watch()
	return ctx.Err()
}

// init runs outflow init, over the same links.
func (v *victim) init(ctx context.Context) error {
	out, err := process.Again(ctx, func() *exec.Cmd { return v.instances[0].command(ctx, "init") })
	if err != nil {
		return fmt.Errorf("outflow init of %s: %w\n%s", v.slot, err, out)
	}
	// The slot begins where the first checkpoint is; outflow has confirmed nothing yet.
	var at string
	if err := v.w.surely(ctx, []any{&at}, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots "+
		"WHERE slot_name = $1", v.slot); err != nil {
		return err
	}
	v.began, err = oracle.ParseLSN(at)
	return err
}

func (v *victim) start() error {
	for _, i := range v.instances {
		if err := i.start(); err != nil {
			return err
		}
	}
	return nil
}

// holder returns the instance that holds the slot and is proved, nil if none says so.
func (v *victim) holder(ctx context.Context) *instance {
	for _, i := range v.instances {
		if i.state(ctx) == "running" {
			return i
		}
	}
	return nil
}

// target returns an instance for a fault: the one that publishes, or another one. Where none publishes at the
// moment it is the first that runs.
func (v *victim) target(ctx context.Context, standby bool) *instance {
	holder := v.holder(ctx)
	for _, i := range v.instances {
		if i.running() && (holder == nil || (i != holder) == standby) {
			return i
		}
	}
	return holder
}

// watch counts the messages in the stream, on a connection that no fault touches but those of the servers
// themselves.
func (v *victim) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	v.watching, v.watched = cancel, make(chan struct{})
	go func() {
		defer close(v.watched)
		for pause(ctx, 3*pollInterval) == nil {
			if n, ok := v.nats.messages(ctx); ok {
				v.published.Store(n)
			}
		}
	}()
}

// caughtUp reports whether the stream has at least n messages.
func (v *victim) caughtUp(n int64) bool { return v.published.Load() >= n }

// end stops all instances; each must say that the stop was clean.
func (v *victim) end() {
	for _, i := range v.instances {
		i.term()
	}
}

func (v *victim) close() error {
	if v.watching != nil {
		v.watching()
		<-v.watched
	}
	var errs []error
	for _, i := range v.instances {
		i.kill()
	}
	for _, link := range append(v.natsLinks, v.pgLink) {
		if link != nil {
			link.Close()
		}
	}
	if v.nats != nil {
		errs = append(errs, v.nats.close(v.stream))
	}
	return errors.Join(errs...)
}

// spillDir is where its instances spill.
func (v *victim) spillDir() (string, error) {
	dir := filepath.Join(v.w.dir, "spill-"+v.slot)
	return dir, os.MkdirAll(dir, 0o700)
}
