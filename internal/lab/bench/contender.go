package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"

	"github.com/outflowhq/outflow/internal/lab/process"
)

// contender is one way to bring an outbox into a stream.
type contender interface {
	name() string
	prepare(ctx context.Context, c *Case) error // before the first row is written
	cleanUp(ctx context.Context) error          // removes what prepare has made; called in any case
}

// drainer drains a backlog, until all of it is acknowledged.
type drainer interface {
	contender
	drain(ctx context.Context, c *Case, b backlog) (sample, error)
}

// follower publishes what is written, as it is written.
type follower interface {
	contender
	start(ctx context.Context, c *Case) (table string, err error)
	stop(ctx context.Context) error
	died() error
	pid() int
	stream() string
	subject() string
}

// runCosts is what was used when a run began.
type runCosts struct {
	w              *harness
	postgres, nats time.Duration
	hasPG, hasNATS bool
	wal            outbox.LSN
}

// costs begins to measure what a run costs the servers.
func (w *harness) costs(ctx context.Context) (*runCosts, error) {
	r := &runCosts{w: w}
	var err error
	if r.wal, err = w.lsn(ctx); err != nil {
		return nil, err
	}
	r.read()
	return r, nil
}

func (r *runCosts) read() {
	if r.w.pg != nil {
		r.postgres, r.hasPG = process.TreeCPU(r.w.pg.PID())
	}
	if r.w.broker != nil {
		r.nats, r.hasNATS = r.w.broker.cpu()
	}
}

// end adds to a sample what the run has cost for each of its events.
func (r *runCosts) end(ctx context.Context, events int, s sample) error {
	now := runCosts{w: r.w}
	now.read()
	each := func(m metric, before, after time.Duration, ok bool) {
		if ok {
			s[m] = microseconds(after-before) / float64(events)
		}
	}
	each(cpuPostgres, r.postgres, now.postgres, r.hasPG && now.hasPG)
	each(cpuNATS, r.nats, now.nats, r.hasNATS && now.hasNATS)
	end, err := r.w.lsn(ctx)
	s[walBytes] = float64(end-r.wal) / float64(events)
	return err
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// program is a contender's process, measured.
type program struct {
	pid    int
	before time.Duration // what it had used when the clock started
}

// measured adds to a sample what the process itself has used, to that of others of the same contender. It
// must run still.
func (p program) measured(events int, s sample) {
	if used, _, _, ok := process.CPU(p.pid); ok {
		s[cpuItself] += microseconds(used-p.before) / float64(events)
	}
	if peak, ok := process.Peak(p.pid); ok {
		s[peakMemory] += float64(peak) / (1 << 20)
	}
}

const (
	pollEvery = 10 * time.Millisecond
	stuck     = patience // without another message
)

// awaitMessages waits until streams have n messages together and returns when the last of them was stored.
// died is asked whether the publisher still runs.
func (w *harness) awaitMessages(ctx context.Context, n int, died func() error, streams ...string) (time.Time,
	error) {
	last, moved := uint64(0), time.Now()
	for {
		s, err := w.state(ctx, streams...)
		switch {
		case err != nil:
			return time.Time{}, err
		case s.LastSeq >= uint64(n):
			if err := complete(s.Msgs, s.LastSeq, n); err != nil {
				return time.Time{}, err
			}
			if w.broker.given { // whose clock may not be ours
				return time.Now(), nil
			}
			return s.LastTime, nil
		case s.LastSeq > last:
			last, moved = s.LastSeq, time.Now()
		case time.Since(moved) > stuck:
			return time.Time{}, fmt.Errorf("no message for %v: %d of %d are in the stream", stuck, last, n)
		}
		if err := died(); err != nil {
			return time.Time{}, err
		}
		if err := sleep(ctx, pollEvery); err != nil {
			return time.Time{}, err
		}
	}
}

// verify makes sure that streams hold exactly n messages: asked again at the end, when nobody publishes any
// more.
func (w *harness) verify(ctx context.Context, n int, streams ...string) error {
	s, err := w.state(ctx, streams...)
	if err != nil {
		return err
	}
	return complete(s.Msgs, s.LastSeq, n)
}

func complete(messages, last uint64, n int) error {
	if messages != uint64(n) || last != uint64(n) {
		return fmt.Errorf("the stream has %d messages and ends at %d: %d events were written", messages, last,
			n)
	}
	return nil
}

// rate sets how many events went through a second.
func (s sample) rate(events int, begun, ended time.Time) {
	s[eventRate] = float64(events) / max(ended.Sub(begun), time.Microsecond).Seconds()
}
