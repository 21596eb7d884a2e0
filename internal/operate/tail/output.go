package tail

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/outflowhq/outflow/internal/crash"
)

// output writes lines. A reader that does not read keeps whoever has the next line waiting, until its context
// ends: nothing gathers here.
type output struct {
	lines  chan []byte
	failed chan struct{} // closed when a line could not be written
	done   chan struct{} // closed when all were written, or one could not be
	err    error         // why; written before failed is closed
}

func newOutput(w io.Writer) *output {
	o := &output{lines: make(chan []byte), failed: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer crash.Guard()
		defer close(o.done)
		for line := range o.lines {
			if _, err := w.Write(line); err != nil {
				o.err = err
				close(o.failed)
				return
			}
		}
	}()
	return o
}

func (o *output) write(ctx context.Context, line []byte) error {
	select {
	case o.lines <- line:
		return nil
	case <-o.failed:
		return o.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// closed reports whether nothing can be written any more.
func (o *output) closed() bool {
	select {
	case <-o.failed:
		return true
	default:
		return false
	}
}

// failure is why, unless the reader has just had enough.
func (o *output) failure() error {
	if o.closed() && !errors.Is(o.err, syscall.EPIPE) {
		return o.err
	}
	return nil
}

// finish waits for what is being written.
func (o *output) finish(ctx context.Context) error {
	close(o.lines)
	select {
	case <-o.done:
	case <-ctx.Done():
	}
	return o.failure()
}
