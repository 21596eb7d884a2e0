package clusters

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// TestASilentHomeKeepsNoWALElsewhere: what another cluster writes itself is confirmed while the home whose
// rows are read there is silent, and nothing is lost when it goes on.
func TestASilentHomeKeepsNoWALElsewhere(t *testing.T) {
	t.Parallel()
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			natsURL := natstest.Server(t).URL()
			all, _ := mesh(t, major, 2, natsURL)
			home, away := all[0], all[1]
			o := reader(t, all, 1, 0, natsURL)
			js := harness.JetStream(t, natsURL)
			home.o.Start()
			o.Start()
			const each = 50
			for round := range 3 {
				harness.Exec(t, home.conn, harness.InsertNumbered, round*each+1, (round+1)*each)
				harness.AwaitMessages(t, js, o.Stream, (round+1)*each)
				harness.Exec(t, away.conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT "+
					"'of another', 'b', $1 * 1000 + n, '{}' FROM generate_series(1, 200) n", round)
				o.AwaitConfirmed(away.conn, harness.WALEnd(t, away.conn))
				if round == 1 {
					o.Kill()
					o.Start()
				}
			}
			harness.AwaitMessages(t, js, home.o.Stream, 3*each)
			whatIsShown(t, js, home, o, 3*each)
			sameBytes(t, o.Stream, harness.Messages(t, js, o.Stream), harness.Messages(t, js, home.o.Stream))
		})
	}
}

// whatIsShown looks at what metrics, status and doctor say of a home and of a reader of its rows that has n
// of its events, while all is well and while the home is stopped.
func whatIsShown(t *testing.T, js jetstream.JetStream, home *cluster, o *harness.Outflow, n int) {
	t.Helper()
	is := func(at *harness.Outflow, name string, want float64) error {
		if got, ok := at.Series("outflow_cluster_" + name); !ok || got != want {
			return fmt.Errorf("%s: %s is %v, %t; want %v", at.Slot, name, got, ok, want)
		}
		return nil
	}
	says := func(at *harness.Outflow, want ...string) (all error) {
		text, _, _ := at.Run("status")
		for _, w := range want {
			if !strings.Contains(text, w) {
				all = errors.Join(all, fmt.Errorf("outflow status does not say %q:\n%s", w, text))
			}
		}
		return all
	}
	counted := fmt.Sprint("events counted ", n)
	harness.Eventually(t, "both show the newest watermark", func() error {
		_, silent := o.Series("outflow_cluster_kept_since_timestamp_seconds")
		_, here := home.o.Series("outflow_cluster_watermark_timestamp_seconds")
		_, there := o.Series("outflow_cluster_watermark_timestamp_seconds")
		if silent || !here || !there {
			return fmt.Errorf("WAL is kept for the home: %t, watermarks %t, %t", silent, here, there)
		}
		return errors.Join(is(home.o, "info", 1), is(o, "info", 1), is(o, "behind_events", 0),
			says(home.o, "cluster     ✔ home", "number 1 of 2", "watermark ", counted, "kept for to_2 "),
			says(o, "cluster     ✔ reads from_1", fmt.Sprint("events at home ", n), fmt.Sprint("here ", n),
				"behind 0"))
	})
	out, errOut, code := o.Run("doctor", "--only", "cluster")
	if code != 0 || !strings.Contains(out, "the newest watermark is ") {
		t.Errorf("exit code %d:\n%s%s", code, out, errOut)
	}

	home.o.Stop()
	harness.Eventually(t, "the reader keeps WAL for the home", func() error {
		n++ // each one ends the window of the one before
		harness.Exec(t, home.conn, harness.InsertNumbered, n, n)
		bytes, _ := o.Series("outflow_cluster_kept_wal_bytes")
		since, ok := o.Series("outflow_cluster_kept_since_timestamp_seconds")
		if bytes == 0 || !ok || since > float64(time.Now().Unix()+1) {
			return fmt.Errorf("%v bytes since %v, %t", bytes, since, ok)
		}
		return says(o, "kept for the home ")
	})
	home.o.Start()
	harness.Eventually(t, "it lets it go", func() error {
		if since, ok := o.Series("outflow_cluster_kept_since_timestamp_seconds"); ok {
			return fmt.Errorf("since %v", since)
		}
		return is(o, "behind_events", 0)
	})
	harness.AwaitMessages(t, js, home.o.Stream, n)
	harness.AwaitMessages(t, js, o.Stream, n)
}

// TestASubscriptionThatHidesRowsIsRefused: whatever lets rows of the home be missing on another cluster, or
// come with positions that are not theirs, ends init or run.
func TestASubscriptionThatHidesRowsIsRefused(t *testing.T) {
	t.Parallel()
	for _, major := range awayMajors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			natsURL := natstest.Server(t).URL()
			all, _ := mesh(t, major, 2, natsURL)
			home, away := all[0], all[1]
			o := harness.New(t, away.url, natsURL, "reader", clusterSettings(1, 2)...)
			o.UseStream("READER")
			alter := func(sql string, args ...any) {
				t.Helper()
				harness.Exec(t, away.conn, "ALTER SUBSCRIPTION from_1 "+fmt.Sprintf(sql, args...))
			}

			o.Set("CLUSTER_SUBSCRIPTION=nobody")
			o.MustFail(3, []string{"init"}, `no subscription "nobody"`)
			o.Set("CLUSTER_SUBSCRIPTION=from_1")
			alter("SET (origin = any)")
			o.MustFail(3, []string{"init"}, "origin = any", "origin = none")
			alter("SET (origin = none)")
			doctor := func(code int, says string) {
				t.Helper()
				harness.Eventually(t, "doctor says "+says, func() error { // a worker may just be starting
					out, errOut, got := away.o.Run("doctor", "--only", "cluster")
					if got != code || !strings.Contains(out, says) {
						return fmt.Errorf("exit code %d, want %d:\n%s%s", got, code, out, errOut)
					}
					return nil
				})
			}
			doctor(0, "1 subscriptions are applied")
			alter("SKIP (lsn = '0/1')")
			o.MustFail(3, []string{"init"}, "is to skip the transaction")
			doctor(3, "cluster_skips")
			alter("SKIP (lsn = NONE)")
			harness.Exec(t, home.conn, "ALTER PUBLICATION replicated DROP TABLE outflow_control")
			alter("REFRESH PUBLICATION")
			o.MustFail(3, []string{"init"}, "does not bring table public.outflow_control")
			harness.Exec(t, home.conn, "ALTER PUBLICATION replicated ADD TABLE outflow_control")
			alter("REFRESH PUBLICATION WITH (copy_data = false)")
			o.Init()
			o.MustFail(3, []string{"init", "--snapshot"}, "Run it at home")
			for _, command := range []string{"repair", "drain", "partition plan", "archive run", "inspect"} {
				o.MustFail(3, strings.Fields(command), "outflow "+command, "Run it at home")
			}

			home.o.Start()
			o.Start()
			harness.Exec(t, home.conn, harness.InsertNumbered, 1, 10)
			harness.AwaitMessages(t, harness.JetStream(t, natsURL), "READER", 10)
			// Out of it and back again: what was written in between would be missing.
			harness.Exec(t, home.conn, "ALTER PUBLICATION replicated DROP TABLE outbox")
			alter("REFRESH PUBLICATION")
			harness.Exec(t, home.conn, "ALTER PUBLICATION replicated ADD TABLE outbox")
			alter("REFRESH PUBLICATION WITH (copy_data = false)")
			harness.Exec(t, home.conn, harness.InsertNumbered, 11, 20)
			if code := o.Wait(); code != 4 {
				t.Fatalf("outflow run ended with code %d", code)
			}
			o.MustContain("outflow run", o.Said(), "publication_changed", "does not say which of its rows")
		})
	}
}

// TestASkippedTransactionEndsAReader: what a subscription has passed over is found by the home's count, at
// each start.
func TestASkippedTransactionEndsAReader(t *testing.T) {
	t.Parallel()
	majors := awayMajors(t)
	natsURL := natstest.Server(t).URL()
	all, _ := mesh(t, majors[len(majors)-1], 2, natsURL)
	home, away := all[0], all[1]
	o := reader(t, all, 1, 0, natsURL)
	js := harness.JetStream(t, natsURL)
	home.o.Start()
	o.Start()
	harness.Exec(t, home.conn, harness.InsertNumbered, 1, 10)
	harness.AwaitMessages(t, js, o.Stream, 10)
	harness.Eventually(t, "the home has counted", func() error {
		n := harness.Value[int](t, away.conn, "SELECT count(*)::int FROM outflow_control WHERE content LIKE "+
			"'% events=10 %'")
		if n == 0 {
			return errors.New("no such watermark")
		}
		return nil
	})

	harness.Exec(t, away.conn, "ALTER SUBSCRIPTION from_1 DISABLE")
	harness.Eventually(t, "nothing is applied", func() error {
		if n := harness.Value[int](t, away.conn, "SELECT count(pid)::int FROM pg_stat_subscription WHERE "+
			"subname = 'from_1'"); n > 0 {
			return fmt.Errorf("%d workers", n)
		}
		return nil
	})
	harness.Exec(t, home.conn, harness.InsertNumbered, 11, 15)
	harness.Exec(t, away.conn, "SELECT pg_replication_origin_advance('pg_' || oid, $1) FROM pg_subscription "+
		"WHERE subname = 'from_1'", harness.WALEnd(t, home.conn).String())
	harness.Exec(t, away.conn, "ALTER SUBSCRIPTION from_1 ENABLE")
	harness.Exec(t, home.conn, harness.InsertNumbered, 16, 20)
	for start := range 2 {
		if start > 0 {
			o.Start()
		}
		if code := o.Wait(); code != 4 {
			t.Fatalf("outflow run ended with code %d", code)
		}
		o.MustContain("outflow run", o.Said(), "cluster_count", "from_1")
	}
	harness.AwaitMessages(t, js, home.o.Stream, 20)
}
