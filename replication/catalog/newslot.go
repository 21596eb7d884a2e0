package catalog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// NewSlot is a slot that was just made, and the replication connection that made it: as long as that is open
// and not used, the server keeps a snapshot of exactly what committed before the slot begins.
type NewSlot struct {
	At       outbox.LSN // what commits after it is decoded
	Snapshot string     // for tablesnapshot.Open
	conn     *pgconn.PgConn
}

// Close ends the connection. A transaction that has taken the snapshot keeps it.
func (n *NewSlot) Close() { postgres.Close(n.conn) }

// CreateSlotWithSnapshot makes the slot, as [Setup.CreateSlot] does, and exports a snapshot of what it does
// not decode. failover makes it one that standbys synchronize (PostgreSQL 17).
func CreateSlotWithSnapshot(ctx context.Context, cfg SetupConfig, failover bool) (*NewSlot, error) {
	s, err := OpenSetup(ctx, cfg) // says what is in the way
	if err != nil {
		return nil, err
	}
	defer s.Close()
	conn, err := cfg.Target().ConnectReplication(ctx)
	if err != nil {
		return nil, err
	}
	n := &NewSlot{conn: conn}
	patience := cfg.Patience
	if patience == 0 {
		patience = slotPatience
	}
	// the server waits for open transactions, and no statement_timeout ends that
	stop := cancelUntil(ctx, conn, patience)
	command := fmt.Sprintf("CREATE_REPLICATION_SLOT %s LOGICAL pgoutput EXPORT_SNAPSHOT",
		postgres.Quote(cfg.Slot))
	if failover && s.version >= 170000 {
		command =
			fmt.Sprintf("CREATE_REPLICATION_SLOT %s LOGICAL pgoutput (SNAPSHOT 'export', FAILOVER true)",
				postgres.Quote(cfg.Slot))
	}
	rows, err := postgres.SimpleQuery(ctx, conn, command)
	stop()
	if err == nil && (len(rows) != 1 || len(rows[0]) < 3) {
		err = errors.New("an answer of another form")
	}
	if err == nil {
		n.At, err = outbox.ParseLSN(rows[0][1])
		n.Snapshot = rows[0][2]
	}
	if err != nil {
		n.Close()
		return nil, s.slotFault(ctx, patience, err)
	}
	return n, nil
}

// cancelAgain is the time between two requests to cancel, cancelLimit how long one may take.
const (
	cancelAgain = time.Second
	cancelLimit = 5 * time.Second
)

// canceller is a connection whose command can be cancelled.
type canceller interface {
	CancelRequest(ctx context.Context) error
}

// cancelUntil asks the server to cancel what the connection does once patience is over, and again until stop
// is called: a request may be lost, and one that comes before the command runs does nothing.
func cancelUntil(ctx context.Context, conn canceller, patience time.Duration) (stop func()) {
	ctx, stopped := context.WithCancel(ctx)
	var asking sync.WaitGroup
	asking.Go(func() {
		defer crash.Guard()
		for wait := patience; ; wait = cancelAgain {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			once, end := context.WithTimeout(ctx, cancelLimit)
			conn.CancelRequest(once) //nolint:errcheck // the next one will do
			end()
		}
	})
	return func() {
		stopped()
		asking.Wait()
	}
}

// DropSlot drops the slot, and reports whether it was one that standbys synchronize. One that is not there is
// no error.
func (s *Setup) DropSlot(ctx context.Context) (failover bool, err error) {
	err = s.conn.QueryRow(ctx,
		`SELECT coalesce((to_jsonb(s)->>'failover')::boolean, false) FROM pg_replication_slots s
			WHERE slot_name = $1`,
		s.cfg.Slot).Scan(&failover)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err == nil {
		_, err = s.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", s.cfg.Slot)
	}
	switch postgres.SQLState(err) {
	case postgres.StateObjectInUse:
		return failover, postgres.Fatal(err, "slot_in_use", "Stop outflow first", "slot %q is in use",
			s.cfg.Slot)
	case postgres.StateUndefinedObject:
		return failover, nil
	}
	if err != nil {
		return failover, fmt.Errorf("drop slot %s: %w", s.cfg.Slot, err)
	}
	return failover, nil
}
