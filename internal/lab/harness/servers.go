package harness

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/outbox"
)

func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// JetStream connects to JetStream.
func JetStream(t testing.TB, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url, nats.Timeout(AskTimeout), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond))
	Must(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(AskTimeout))
	Must(t, err)
	return js
}

// Connect connects to PostgreSQL.
func Connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	Must(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	return conn
}

// Exec executes SQL, and waits for what is still in use: a slot, a database.
func Exec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	Eventually(t, sql, func() error {
		_, err := conn.Exec(t.Context(), sql, args...)
		if err != nil && !inUse(err) {
			t.Fatalf("%s: %v", sql, err)
		}
		return err
	})
}

// AwaitMessages waits until the stream has had n messages.
func AwaitMessages(t testing.TB, js jetstream.JetStream, stream string, n int) {
	t.Helper()
	Eventually(t, fmt.Sprintf("%d messages", n), func() error {
		s, err := js.Stream(t.Context(), stream)
		if err != nil {
			return err
		}
		if got := s.CachedInfo().State.LastSeq; got < uint64(n) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
}

// Messages reads the whole stream.
func Messages(t testing.TB, js jetstream.JetStream, stream string) []*oracle.Message {
	t.Helper()
	var all []*oracle.Message
	if err := oracle.Read(t.Context(), js, stream, func(m *oracle.Message) error {
		all = append(all, m)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// WALEnd is where the next commit goes.
func WALEnd(t testing.TB, conn *pgx.Conn) outbox.LSN {
	t.Helper()
	return LSN(t, conn, "SELECT pg_current_wal_insert_lsn()::text")
}

// ConfirmedLSN is what the server has of the slot.
func (o *Outflow) ConfirmedLSN(conn *pgx.Conn) outbox.LSN {
	o.T.Helper()
	return LSN(o.T, conn, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1",
		o.Slot)
}

// AwaitConfirmed waits until the slot is confirmed at or above an LSN, and returns where it is.
func (o *Outflow) AwaitConfirmed(conn *pgx.Conn, lsn outbox.LSN) (at outbox.LSN) {
	o.T.Helper()
	Eventually(o.T, fmt.Sprintf("%v confirmed", lsn), func() error {
		if at = o.ConfirmedLSN(conn); at < lsn {
			return fmt.Errorf("confirmed at %v", at)
		}
		return nil
	})
	return at
}

// Value is the one value that a query returns.
func Value[T any](t testing.TB, conn *pgx.Conn, sql string, args ...any) (v T) {
	t.Helper()
	Must(t, conn.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// LSN is the one LSN that a query returns, as text.
func LSN(t testing.TB, conn *pgx.Conn, sql string, args ...any) outbox.LSN {
	t.Helper()
	l, err := outbox.ParseLSN(Value[string](t, conn, sql, args...))
	Must(t, err)
	return l
}

// Insert inserts a row of the default shape, with another key each time.
func Insert(t *testing.T, conn *pgx.Conn, doc string, counter int, payload string) {
	t.Helper()
	Exec(t, conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'anna', $2, $3)", doc,
		counter, payload)
}
