package partition

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// unread writes rows that no slot brings, because the publication does not have the table.
func (w *world) unread(rows int) {
	w.T.Helper()
	w.Exec("ALTER PUBLICATION " + w.Slot + " DROP TABLE outbox")
	w.insert(0, rows, false)
	w.Exec("ALTER PUBLICATION " + w.Slot + " ADD TABLE outbox")
}

// rewrites are what gives rows another place in the table, and some of them another transaction.
var rewrites = []string{
	"UPDATE outbox SET payload = payload || '{\"seen\": true}'",
	"ALTER TABLE outbox ALTER counter TYPE numeric",
	"ALTER TABLE outbox ALTER counter TYPE bigint",
	"VACUUM (FULL) outbox",
	"VACUUM (FREEZE) outbox",
	"CLUSTER outbox USING outbox_pkey",
}

// TestRowsThatAreWrittenAgainAreNotTakenForPublished: an update, or a statement that rewrites the table,
// makes rows that are older than init, or that no slot has read, look as if they had come later.
func TestRowsThatAreWrittenAgainAreNotTakenForPublished(t *testing.T) {
	t.Parallel()
	for _, how := range rewrites {
		w := newPlain(t, 0)
		w.insert(0, 12, false)
		w.insert(0, 40, true)
		w.mustRemove()
		w.unread(3)
		w.Exec(how)
		w.insert(0, 5, true)
		for range 3 {
			w.settle()
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			w.Exec(how)
		}
		if got := w.rows(); got != "15" {
			t.Errorf("%s: %s rows are left of 15 that are in no message, and 45 others", how, got)
		}
		w.settle()
		w.o.AcceptUnpublished = 15
		w.mustRemove()
		if got := w.rows(); got != "0" {
			t.Errorf("%s: %s rows are left at the end", how, got)
		}
	}
}

// TestRowsThatASubscriptionBringsGoBehindTheFence: nobody publishes them here, so they are in no message.
func TestRowsThatASubscriptionBringsGoBehindTheFence(t *testing.T) {
	t.Parallel()
	for _, ownOnly := range []bool{true, false} {
		w := newPlain(t, 0)
		w.cfg.OwnOnly = ownOnly
		w.insert(0, 2, false)
		w.mustRemove()
		w.Exec("CREATE SUBSCRIPTION s CONNECTION 'dbname=none' PUBLICATION p WITH (connect = false)")
		w.Exec("INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) SELECT oid, " +
			"'outbox'::regclass, 'r' FROM pg_subscription")
		w.T.Cleanup(func() {
			w.Exec("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
			w.Exec("DROP SUBSCRIPTION s")
		})
		w.insert(0, 4, false)
		want := map[bool]string{true: "2", false: "6"}[ownOnly]
		for range 2 {
			w.confirm(w.Slot)
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
		}
		if got := w.rows(); got != want {
			t.Errorf("own only %v: %s rows are left, not %s", ownOnly, got, want)
		}
	}
}

// TestNoHistoryDeletesARowThatNobodyHas: whatever is done to the table, slot, publication and stream between
// runs, each row that goes was in the stream.
func TestNoHistoryDeletesARowThatNobodyHas(t *testing.T) {
	t.Parallel()
	histories := uint64(4)
	if tier.Long() {
		histories = 60
	}
	for seed := range histories {
		w := newPlain(t, 0)
		rnd := rand.New(rand.NewPCG(seed, 2))
		w.Exec("CREATE TABLE had (id uuid)") // the rows that the stream has, or had
		var log []string
		unread, gone := 0, int64(0)
		for range 50 {
			var what string
			switch n := rnd.IntN(12); n {
			case 0, 1, 2:
				what = "insert"
				w.insert(0, 1+rnd.IntN(5), true)
				for id := range w.published {
					w.Exec("INSERT INTO had VALUES ($1::uuid)", id)
				}
			case 3:
				what = "unread"
				n := 1 + rnd.IntN(3)
				unread += n
				w.unread(n)
			case 4:
				what = "anew"
				n := rnd.IntN(3)
				unread += n
				w.anew(func() { w.insert(0, n, false) })
			case 5:
				what = "confirm"
				w.confirm(w.Slot)
			case 6, 7:
				what = rewrites[rnd.IntN(len(rewrites))]
				w.Exec(what)
			case 8:
				what = "limits"
				clear(w.published)
			default:
				what = "confirm, remove"
				w.confirm(w.Slot)
				s, err := w.remove()
				if err != nil {
					wantFault(t, err, outbox.Gap, codeUnpublished)
				}
				gone += s.Rows
			}
			log = append(log, what)
			left := w.Text("SELECT count(*)::text FROM outbox WHERE id NOT IN (SELECT id FROM had)")
			if left != fmt.Sprint(unread) {
				t.Fatalf("seed %d: %s of %d rows are left that were in no message, after %s", seed, left,
					unread, strings.Join(log, ", "))
			}
		}
		if gone == 0 {
			t.Errorf("seed %d: no row has gone, after %s", seed, strings.Join(log, ", "))
		}
	}
}

// TestARowThatWasNeverPublishedTakesNoOthersWithIt: rows that were compared count as published when the
// stream has their messages no more, also beside some that were never published, in more fences than are
// kept. With many of these in one they don't, and when they are published all go.
func TestARowThatWasNeverPublishedTakesNoOthersWithIt(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		rounds, lost int
		left         string
	}{{fences + 2, 1, strconv.Itoa(fences + 2)}, {1, maxMissing, strconv.Itoa(maxMissing)},
		{1, maxMissing + 1, strconv.Itoa(maxMissing + 3)}} {
		t.Run(fmt.Sprintf("%+v", k), func(t *testing.T) {
			t.Parallel()
			w := newPlain(t, 0)
			w.cfg.Keep = time.Hour
			for range k.rounds {
				w.insert(0, 2, true)
				w.insert(0, k.lost, false)
				for range 2 {
					w.settle()
				}
			}
			clear(w.published)
			w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
			_, err := w.remove()
			wantFault(t, err, outbox.Gap, codeUnpublished)
			if w.rows() != k.left {
				t.Errorf("%s rows are left, want %s", w.rows(), k.left)
			}
			w.publish()
			if w.mustRemove(); w.rows() != "0" {
				t.Errorf("%s rows are left when all are published", w.rows())
			}
		})
	}
}

// TestRowsBesideManyThatWereNeverPublished count as published when these are, or are accepted, while the
// stream still has their messages. The refusal says so.
func TestRowsBesideManyThatWereNeverPublished(t *testing.T) {
	t.Parallel()
	for _, accept := range []bool{false, true} {
		w := newPlain(t, 0)
		w.cfg.Keep = time.Hour
		w.insert(0, 2, true)
		w.insert(0, maxMissing, false)
		w.settle()
		_, err := w.remove()
		f := wantFault(t, err, outbox.Gap, codeUnpublished)
		if strings.Contains(f.Hint, "between two fences") {
			t.Errorf("of %d rows it says %q", maxMissing, f.Hint)
		}
		w.insert(0, 2, true)
		w.insert(0, maxMissing+1, false)
		w.settle()
		_, err = w.remove()
		f = wantFault(t, err, outbox.Gap, codeUnpublished)
		if !strings.Contains(f.Hint, "More than 1000 of them") ||
			!strings.Contains(f.Hint, "before the stream") {
			t.Errorf("it says %q", f.Hint)
		}
		if accept {
			w.o.AcceptUnpublished = 2*maxMissing + 1
		} else {
			w.publish()
		}
		w.mustRemove()
		w.o.AcceptUnpublished = 0
		clear(w.published)
		w.Exec("UPDATE outflow_partitions SET sealed_at = sealed_at - interval '2 h'")
		if w.mustRemove(); w.rows() != "0" {
			t.Errorf("accepted %v: %s rows are left", accept, w.rows())
		}
	}
}
