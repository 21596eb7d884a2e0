package consumer

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// run reads one source in one session: with a dispatcher, and a worker for each partition.
type run struct {
	cfg     *Config
	dec     *decoder
	met     *metrics
	calls   *calls
	limit   *parkLimit
	fails   *failures
	track   *tracker
	store   store
	parking *parking

	source     string
	src        stream.Source
	layout     layout
	check      streamCheck // the dispatcher's
	replayedTo uint64      // live events up to here are marked as replayed
	live       offsets     // in the stream, while a replay is read
	// replays reports whether there are replayed events to read; nil: none can come
	replays func(ctx context.Context) (bool, error)

	stop   context.Context // ends when nothing new may begin
	finish func()          // ends stop: another session is to follow
	work   context.Context // ends when everything must be abandoned; its cause says why
	wait   context.Context // ends with either

	reached bool // the sequence to stop at
	flow    *flow
	workers map[int]*worker // by partition
}

// pollParked is how often the session looks for parked documents to release.
const pollParked = 2 * time.Second

// read reads until ctx ends or, if until is not 0, up to that sequence. It returns when all workers have
// stopped; nil after a clean stop.
func (r *run) read(ctx context.Context, until uint64, offsets offsets) error {
	work, drop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer drop(nil)
	late := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(r.cfg.StopTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			drop(errors.New("the handler did not return within StopTimeout"))
		case <-work.Done():
		}
	})
	defer late()
	stop, finish := context.WithCancel(ctx) // to finish does not hurry handlers
	defer finish()
	wait, wake := context.WithCancel(stop)
	defer wake()
	defer context.AfterFunc(work, wake)()
	r.stop, r.finish, r.work, r.wait = stop, finish, work, wait
	if j, ok := r.src.(*joined); ok {
		j.wait = wait
	}

	all, fail := &errgroup.Group{}, func(err error) error {
		if err != nil {
			drop(err)
		}
		return err
	}
	r.prepare(offsets)
	for _, w := range r.workers {
		all.Go(func() error { return fail(w.loop()) })
	}
	leaseCtx, endLease := context.WithCancel(work)
	var lease sync.WaitGroup
	var leaseErr error
	lease.Go(func() { leaseErr = fail(r.keepLease(leaseCtx)) })

	d := newDispatcher(r, until, oldest(offsets.list()))
	err := d.loop()
	if errors.Is(err, errStopping) {
		err = nil
	}
	_ = fail(err)
	r.reached = err == nil && until > 0 && d.at.Seq >= until
	d.close()
	for _, w := range r.workers {
		if err == nil {
			w.push(item{to: d.at, republished: r.check.republishing})
		}
		w.close()
	}
	if workers := all.Wait(); err == nil {
		err = workers
	}
	endLease()
	lease.Wait()
	return cmp.Or(context.Cause(work), err, leaseErr)
}

// prepare makes the workers, each with its offset.
func (r *run) prepare(offsets offsets) {
	r.flow = newFlow(r.cfg.MaxInFlight, r.cfg.MaxBytes, oldest(offsets.list()).Seq)
	r.workers = map[int]*worker{}
	for p, o := range offsets {
		r.workers[p] = newWorker(r, p, o)
	}
}

// keepLease renews the lease, looks whether partitions are to be claimed or given back, and for parked
// documents to release. When ctx ends it finishes what it has
// begun: cancelling that would cost the connection over which the lease is given back.
func (r *run) keepLease(ctx context.Context) error {
	renew := time.NewTicker(r.store.renewEvery())
	defer renew.Stop()
	poll := time.NewTicker(r.cfg.poll)
	defer poll.Stop()
	look := time.NewTicker(r.store.dueEvery())
	defer look.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-renew.C:
			err = r.store.renew(r.work)
		case <-look.C:
			var due bool
			if due, err = r.store.due(r.work); due {
				r.finish()
			}
		case <-poll.C:
			err = r.store.read(r.work, r.queueReleases)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *run) queueReleases(ctx context.Context, tx pgx.Tx) error {
	if tx == nil {
		return nil
	}
	var own []int64
	most := maxReleases
	for p, w := range r.workers {
		if n := w.releases(); n < maxReleases { // those that it has are found again
			own, most = append(own, int64(p)), most+n
		}
	}
	documents, err := r.parking.toRelease(ctx, tx, most, r.layout.Partitions, own)
	if err != nil {
		return err
	}
	for _, d := range documents {
		r.workers[partitionOf(d.hash, r.layout.Partitions)].pushRelease(&d)
	}
	return nil
}
