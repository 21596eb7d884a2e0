package pgtest

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
)

var databases atomic.Int64

// Database makes an empty database and returns its URL. At the end of the test it is dropped with its slots;
// who is still connected is thrown out.
func Database(t testing.TB, s *pgserver.Server) string {
	t.Helper()
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), databases.Add(1))
	url, err := s.CreateDatabase(t.Context(), name)
	must.Succeed(t, err)
	t.Cleanup(func() {
		if s.PID() == 0 {
			return // the server goes as a whole
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if err := drop(ctx, s, name); err != nil {
			t.Errorf("drop database %s: %v", name, err)
		}
	})
	return url
}

func drop(ctx context.Context, s *pgserver.Server, name string) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for {
		// FORCE spares walsenders, and a database with an active slot is not dropped.
		_, err := conn.Exec(ctx, `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
			WHERE database = $1 AND active_pid IS NOT NULL`, name)
		if err != nil {
			return err
		}
		if _, err = conn.Exec(ctx, "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+
			" WITH (FORCE)"); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}
