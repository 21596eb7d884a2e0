package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
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
	var url string
	must.Succeed(t, asAdmin(t.Context(), s, func(conn *pgx.Conn) (err error) {
		url, err = s.CreateDatabaseOn(t.Context(), conn, name)
		return err
	}))
	t.Cleanup(func() {
		if s.PID() == 0 {
			return // the server goes as a whole
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if err := asAdmin(ctx, s, func(conn *pgx.Conn) error { return drop(ctx, conn, name) }); err != nil {
			t.Errorf("drop database %s: %v", name, err)
		}
	})
	return url
}

// idle holds the idle connections of asAdmin, a chan *pgx.Conn for each shared *pgserver.Server. The others
// may be stopped at any time.
var idle sync.Map

const mostIdle = 4 // per server

// asAdmin gives do a connection of the superuser's, an idle one if there is one. For PostgreSQL a connection
// costs as much as making a database does.
func asAdmin(ctx context.Context, s *pgserver.Server, do func(*pgx.Conn) error) (err error) {
	var conn *pgx.Conn
	var kept chan *pgx.Conn
	if k, ok := idle.Load(s); ok {
		kept = k.(chan *pgx.Conn)
	}
	select {
	case conn = <-kept:
	default:
	}
	if conn == nil || conn.Ping(ctx) != nil { // some test may terminate whatever it sees
		if conn, err = pgx.Connect(ctx, s.URL("postgres")); err != nil {
			return err
		}
	}
	if err = do(conn); err == nil {
		select {
		case kept <- conn:
			return nil
		default: // no shared server's, or enough are idle
		}
	}
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

// closeIdle closes what asAdmin has kept.
func closeIdle(s *pgserver.Server) {
	kept, ok := idle.LoadAndDelete(s)
	if !ok {
		return
	}
	for {
		select {
		case conn := <-kept.(chan *pgx.Conn):
			_ = conn.Close(context.Background()) // the server goes
		default:
			return
		}
	}
}

func drop(ctx context.Context, conn *pgx.Conn, name string) error {
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
