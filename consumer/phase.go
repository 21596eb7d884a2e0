package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// phase is the reading of one source by one session: a pump that reads and a lane for each partition.
type phase struct {
	cfg     *Config
	dec     *decoder
	met     *metrics
	handler Handler
	store   store
	parking *parking

	source string
	from   Source
	before []generation // of this source
	begin  beginning    // the pump's
	upTo   uint64       // live events up to here are marked as replayed

	stop context.Context // ends when nothing more is to be begun
	work context.Context // ends when everything is to be dropped
	wait context.Context // ends with either

	flow      *flow
	lanes     []*lane
	releasing sync.Map // documents whose release is on its way to a lane, or there
}

// pollParked is how often parked documents are looked for that are to be released.
const pollParked = 2 * time.Second

// run reads until stop ends, or, of a replay, until its end. It returns when all lanes have stopped: after a clean stop, nil.
func (p *phase) run(ctx context.Context, until uint64, marks []mark) error {
	work, drop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer drop(nil)
	wait, wake := context.WithCancel(ctx)
	defer wake()
	p.stop, p.work, p.wait = ctx, work, wait
	defer context.AfterFunc(work, wake)()
	late := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(p.cfg.StopTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			drop(errors.New("the handler did not return within StopTimeout"))
		case <-work.Done():
		}
	})
	defer late()

	p.flow = newFlow(p.cfg.MaxInFlight, p.cfg.MaxBytes, oldest(marks).Seq)
	all, fail := &errgroup.Group{}, func(err error) error {
		if err != nil {
			drop(err)
		}
		return err
	}
	for i, m := range marks {
		p.lanes = append(p.lanes, newLane(p, i, m))
	}
	for _, l := range p.lanes {
		all.Go(func() error { return fail(l.run()) })
	}
	keep, rest := context.WithCancel(work)
	var keeper sync.WaitGroup
	var kept error
	keeper.Go(func() { kept = fail(p.keep(keep)) })

	pump := newPump(p, until, oldest(marks))
	err := pump.run()
	if errors.Is(err, errStopping) {
		err = nil
	}
	_ = fail(err)
	pump.close()
	for _, l := range p.lanes {
		if err == nil {
			l.push(item{to: pump.at, again: p.begin.again})
		}
		l.close()
	}
	if lanes := all.Wait(); err == nil {
		err = lanes
	}
	pump.ack()
	rest()
	keeper.Wait()
	return firstOf(context.Cause(work), err, kept)
}

func firstOf(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

// keep renews the lease, and looks for parked documents that are to be released. What it has begun when ctx ends it finishes: to cut it
// off would cost the connection, with which the lease is to be given back.
func (p *phase) keep(ctx context.Context) error {
	renew := time.NewTicker(p.store.every())
	defer renew.Stop()
	poll := time.NewTicker(p.cfg.poll)
	defer poll.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-renew.C:
			err = p.store.renew(p.work)
		case <-poll.C:
			err = p.store.read(p.work, p.wanted)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (p *phase) wanted(ctx context.Context, tx pgx.Tx) error {
	if tx == nil {
		return nil
	}
	documents, err := p.parking.wanted(ctx, tx)
	if err != nil {
		return err
	}
	for _, d := range documents {
		if _, there := p.releasing.LoadOrStore(d.document, true); !there {
			p.lanes[partitionOf(d.hash, len(p.lanes))].push(item{release: &d})
		}
	}
	return nil
}
