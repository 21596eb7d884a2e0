package partition

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// TestATransactionIDHas64Bits: the youngest that it can be, whatever the epoch, for rows that are 2^31
// transactions old as well as for those that a lock has followed to beyond the snapshot.
func TestATransactionIDHas64Bits(t *testing.T) {
	t.Parallel()
	w := outboxdb.New(t, pgtest.Server(t))
	const epoch = 1 << 32
	for _, c := range []struct{ xmin, next, want int64 }{
		{700, 750, 700},
		{749, 750, 749},
		{760, 750, 760}, // of a transaction that is younger than the snapshot
		{700, epoch + 750, epoch + 700},
		{1 << 31, epoch + 750, 1 << 31},
		{xidAhead + 751, epoch + 750, xidAhead + 751},         // the oldest that there can be
		{xidAhead + 750, epoch + 750, epoch + xidAhead + 750}, // looks new
		{epoch - 1, epoch + 5, epoch - 1},
		{3, 7*epoch + 5, 7*epoch + 3},
		{2, 750, 2}, // frozen by an old release
		{2, epoch + 750, epoch + 2},
		{epoch - 1000, 750, -1000}, // of a transaction that never was
	} {
		got := w.Text("SELECT ("+writtenBy("x.xmin", fmt.Sprintf("(%d)", c.next+xidAhead))+")::text FROM "+
			"(SELECT $1::text::xid) x (xmin)", fmt.Sprint(c.xmin))
		if got != fmt.Sprint(c.want) {
			t.Errorf("%d before %d: %s, want %d", c.xmin, c.next, got, c.want)
		}
	}
}

// TestRowsGoAfterMoreThanTwoBillionTransactions: a row and its fence may be so old, and the next epoch may
// have begun. What came later stays, and so does all when a fence is too old for it to be seen.
func TestRowsGoAfterMoreThanTwoBillionTransactions(t *testing.T) {
	t.Parallel()
	all := pgserver.Installations()
	i := slices.IndexFunc(all, func(i pgserver.Installation) bool {
		_, ok := i.Tool("pg_resetwal")
		return ok
	})
	if i < 0 {
		tier.Missing(t, "pg_resetwal", "no installation of PostgreSQL has pg_resetwal")
	}
	srv := pgtest.Own(t, all[i].Major, "wal_level=logical", "autovacuum=off")
	var w *world
	t.Cleanup(func() { _ = w.Conn.Close(context.Background()) }) // after what newPlainOn does at the end
	w = newPlainOn(t, srv)
	w.cfg.Keep = time.Hour
	skip := func(to uint64) {
		t.Helper()
		w.Exec("SELECT pg_drop_replication_slot($1)", w.Slot)
		w.Exec("UPDATE pg_database SET datallowconn = true")
		for _, name := range []string{"postgres", "template0", "template1", w.Conn.Config().Database} {
			conn, err := pgx.Connect(outboxdb.Within(t), srv.URL(name))
			must.Succeed(t, err)
			_, err = conn.Exec(outboxdb.Within(t), "VACUUM (FREEZE)")
			must.Succeed(t, err)
			must.Succeed(t, conn.Close(outboxdb.Within(t)))
		}
		must.Succeed(t, w.Conn.Close(outboxdb.Within(t)))
		must.Succeed(t, srv.Stop("fast"))
		must.Succeed(t, srv.SkipTo(outboxdb.Within(t), to))
		must.Succeed(t, srv.Start(outboxdb.Within(t)))
		var err error
		w.Conn, err = pgx.Connect(outboxdb.Within(t), w.URL)
		must.Succeed(t, err)
		w.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", w.Slot)
	}
	w.insert(0, 20, true)
	w.mustRemove()
	w.confirm(w.Slot)
	w.mustRemove()
	skip(3 << 29) // PostgreSQL itself bears less than 2^31 without a VACUUM
	skip(3 << 30)
	w.insert(0, 5, true)
	w.settle()
	if got := w.rows(); got != "25" {
		t.Fatalf("%s rows are left of 25 that are not old enough", got)
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h' WHERE horizon < 1000000")
	if s := w.mustRemove(); s.Rows != 20 || w.rows() != "5" {
		t.Errorf("%v; %s rows are left", s, w.rows())
	}
	skip(1<<32 + 1<<29) // in another epoch
	w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
	w.settle()
	if got := w.rows(); got != "0" {
		t.Errorf("%s rows are left", got)
	}
	w.Exec("UPDATE outflow_partitions SET sealed_at = clock_timestamp()")
	w.insert(0, 7, true)
	w.settle()
	w.Exec("UPDATE outflow_partitions SET horizon = horizon - $1, sealed_at = sealed_at - interval '2 h'",
		xidReach)
	if s := w.mustRemove(); s.Action != Wait || !strings.Contains(s.Why, "retain.table.keep") ||
		w.rows() != "7" {
		t.Errorf("%v; %s rows are left", s, w.rows())
	}
}

// TestABaselineThatIsTooOldShowsNothing: rows that are older than it look younger then, so nothing counts as
// cleared of them.
func TestABaselineThatIsTooOldShowsNothing(t *testing.T) {
	t.Parallel()
	w := newPlain(t, 0)
	w.cfg.ID = ""
	w.insert(0, 4, false)
	w.mustRemove()
	w.out.Stream.Created = w.out.Stream.Created.Add(time.Minute)
	w.Exec("UPDATE outflow_partitions SET state = 'verified', horizon = horizon - $1 WHERE name = 'baseline'",
		xidReach)
	w.settle()
	_, err := w.remove()
	wantFault(t, err, outbox.Gap, codeUnpublished)
	if got := w.rows(); got != "4" {
		t.Errorf("%s of 4 rows are left that nothing shows to be published", got)
	}
}
