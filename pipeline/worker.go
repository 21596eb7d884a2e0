package pipeline

import (
	"context"

	"github.com/outflowhq/outflow/internal/crash"
)

// worker runs jobs in a goroutine of its own, one at a time. What a job returns is called by the loop, which
// gets it from done: so a job needs nothing that the loop changes meanwhile.
type worker struct {
	jobs    chan func(context.Context) func() error
	done    chan func() error
	busy    bool // the loop's: a job was started, and its result was not taken
	cancel  context.CancelFunc
	stopped chan struct{}
}

func newWorker() *worker {
	ctx, cancel := context.WithCancel(context.Background())
	w := &worker{
		jobs: make(chan func(context.Context) func() error, 1), done: make(chan func() error, 1),
		cancel: cancel, stopped: make(chan struct{}),
	}
	go w.run(ctx)
	return w
}

func (w *worker) run(ctx context.Context) {
	defer crash.Guard()
	defer close(w.stopped)
	for {
		select {
		case <-ctx.Done():
			return
		case job := <-w.jobs:
			w.done <- job(ctx)
		}
	}
}

// start starts a job; none may be under way. Its context ends with the worker.
func (w *worker) start(job func(context.Context) func() error) {
	w.busy = true
	w.jobs <- job
}

// take calls what a job has returned.
func (w *worker) take(result func() error) error {
	w.busy = false
	return result()
}

// close ends the goroutine, and cuts short what it is doing.
func (w *worker) close() {
	w.cancel()
	<-w.stopped
}
