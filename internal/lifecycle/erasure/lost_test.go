package erasure

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// lower does it, as a user.
func (o *erased) lower(user string, end End) error {
	o.t.Helper()
	l, err := Open(outboxdb.Within(o.t), postgres.Target{URL: outboxdb.WithUser(o.t, o.URL, user)}, o.table,
		o.Slot)
	must.Succeed(o.t, err)
	defer l.Close()
	if err := l.CheckLower(outboxdb.Within(o.t), end); err != nil {
		return err
	}
	return l.Lower(outboxdb.Within(o.t), end)
}

// TestACutBehindALostEndIsLowered, of that stream alone, and beside no erasure that may have read one. The
// outbox was moved, and has left the request behind.
func TestACutBehindALostEndIsLowered(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	created := o.begin().Created
	role := o.Slot + "_run"
	o.Exec("CREATE ROLE " + role + " LOGIN")
	t.Cleanup(func() { o.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	o.Exec("GRANT SELECT ON outflow_erasures, outflow_erased_rows TO " + role)
	o.Exec("UPDATE outflow_erasures SET cut = '0/9000', cut_sequence = 100")
	o.Exec("CREATE SCHEMA notes; GRANT USAGE ON SCHEMA notes TO " + role +
		"; ALTER TABLE outbox SET SCHEMA notes")
	o.table = "notes.outbox"
	at := func(last uint64) End { return End{Stream: "OUTBOX", Created: created.Add(9), Last: last} }
	want := func(seq string) {
		t.Helper()
		if got := o.Text("SELECT cut_sequence::text FROM outflow_erasures"); got != seq {
			t.Errorf("the cut is at %s, want %s", got, seq)
		}
	}
	busy, err := Open(outboxdb.Within(t), postgres.Target{URL: o.URL}, o.table, o.Slot)
	must.Succeed(t, err)
	must.Succeed(t, busy.Alone(outboxdb.Within(t)))
	for _, end := range []End{at(100), {Stream: "OTHER", Created: created, Last: 60},
		{Stream: "OUTBOX", Created: created.Add(time.Second), Last: 60}} {
		must.Succeed(t, o.lower(role, end))
	}
	want("100")
	outboxdb.WantFault(t, o.lower("postgres", at(60)), outbox.Transient, "erase_busy")
	o.Exec("UPDATE outflow_erasures SET cut = NULL, cut_sequence = NULL")
	outboxdb.WantFault(t, o.lower(role, at(60)), outbox.Transient, "erase_busy")
	// a closed connection has its locks for as long as the server does not look
	_, err = busy.conn.Exec(outboxdb.Within(t), "SELECT pg_advisory_unlock_all()")
	must.Succeed(t, err)
	busy.Close()
	must.Succeed(t, o.lower(role, at(60))) // what it has read is gone with it
	o.Exec("UPDATE outflow_erasures SET cut = '0/9000', cut_sequence = 100")
	f := outboxdb.WantFault(t, o.lower(role, at(60)), outbox.Fatal, "no_right")
	if f != nil && !strings.Contains(f.Hint, "retain.postgres_url") {
		t.Error(f.Hint)
	}
	want("100")
	for _, last := range []uint64{60, 60, 80} {
		must.Succeed(t, o.lower("postgres", at(last)))
		want("60")
	}
}
