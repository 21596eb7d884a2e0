package replay

import (
	"context"
	"errors"

	"github.com/outflowhq/outflow/sink"
)

// While returns a context that ends with the connection too, and a function that says what an error means: where the connection is gone,
// or the server forbids something, that is what went wrong, not what ended with it. Call it once, with nil too.
func While(ctx context.Context, conn *sink.Conn) (context.Context, func(error) error) {
	ctx, cancel := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		select {
		case <-conn.Lost():
			cancel(conn.Err())
		case <-over:
		}
	}()
	return ctx, func(err error) error {
		close(over)
		cause := context.Cause(ctx)
		cancel(nil)
		if err != nil && cause != nil && conn.Err() != nil && errors.Is(cause, conn.Err()) {
			return conn.Err()
		}
		return err
	}
}
