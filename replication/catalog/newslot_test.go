package catalog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// deaf is a connection whose first requests to cancel do nothing: one is never answered, one fails, one comes
// too early.
type deaf struct{ asked chan time.Time }

func (d *deaf) CancelRequest(ctx context.Context) error {
	d.asked <- time.Now()
	switch len(d.asked) {
	case 1:
		<-ctx.Done()
		return ctx.Err()
	case 2:
		return errors.New("refused")
	}
	return nil
}

// It is asked for until the command has ended, whatever becomes of a request.
func TestCancelIsAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, begun := &deaf{make(chan time.Time, 100)}, time.Now()
		stop := cancelUntil(t.Context(), d, time.Minute)
		time.Sleep(time.Minute + 10*time.Second)
		stop()
		n := len(d.asked)
		if first := (<-d.asked).Sub(begun); n < 4 || first != time.Minute {
			t.Errorf("%d requests, the first after %v", n, first)
		}
		time.Sleep(time.Hour)
		if len(d.asked) != n-1 {
			t.Error("it is asked for after the end")
		}
	})
}

func TestANewSlotWaitsForOpenTransactions(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.setup()
	defer s.Close()
	if _, err := s.DropSlot(within(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.DropSlot(within(t)); err != nil {
		t.Errorf("dropped twice: %v", err)
	}
	d.Exec("BEGIN")
	d.Exec("CREATE TABLE unfinished (id int)")
	d.cfg.Patience = 50 * time.Millisecond
	_, err := CreateSlotWithSnapshot(within(t), d.cfg, false)
	if f := wantFault(t, err, outbox.Fatal, "slot_blocked"); !strings.Contains(f.Hint,
		fmt.Sprint("pid ", d.Conn.PgConn().PID())) {
		t.Errorf("%v", f)
	}
	d.Exec("ROLLBACK")
	if state, err := s.Slot(within(t)); err != nil || state.Exists {
		t.Errorf("half a slot is left: %+v, %v", state, err)
	}
}
