package conns

import (
	"context"
	"errors"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/sink"
)

// WhileConnected returns a context that is also cancelled when the connection is lost, and a function that
// explains an error: if the connection was lost, or the server denied a permission, that is returned in place
// of what failed because of it. The function must be called exactly once, with a nil error too.
func WhileConnected(ctx context.Context, conn *sink.Conn) (context.Context, func(error) error) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer crash.Guard()
		select {
		case <-conn.Lost():
			cancel(conn.Err())
		case <-done:
		}
	}()
	return ctx, func(err error) error {
		close(done)
		cause := context.Cause(ctx)
		cancel(nil)
		if err != nil && cause != nil && conn.Err() != nil && errors.Is(cause, conn.Err()) {
			return conn.Err()
		}
		return err
	}
}
