package operate

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// cpuOf is the processor time that a process has taken, in seconds; 0 where there is no /proc.
func cpuOf(pid int) float64 {
	used, _, _, _ := process.CPU(pid)
	return used.Seconds()
}

// BenchmarkShards lets a backlog wait for a number of shards on one server and reports how fast all of them together publish it, and who takes
// how much of the processor. Each walsender decodes all of the WAL: other is WAL that concerns no outbox.
func BenchmarkShards(b *testing.B) {
	for _, shape := range []struct {
		rows, perTx int
		table       string
	}{{200_000, 100, "outbox"}, {100_000, 1, "outbox"}, {100_000, 1, "other"}} {
		for _, n := range []int{0, 1, 2, 4} { // 0: not divided
			b.Run(fmt.Sprintf("%s,rows=%d,tx=%d,shards=%d", shape.table, shape.rows, shape.perTx, n), func(b *testing.B) {
				pg := pgtest.Own(b, 0, "fsync=off", "shared_buffers=512MB", "max_wal_size=8GB")
				ns := natstest.Process(b)
				s := sharded(b, pg, ns.URL(), "bench", max(n, 1), "REORDER_HORIZON=0s")
				if n == 0 {
					s.all[0].Set("SHARD=")
				}
				s.init()
				harness.Exec(b, s.conn, "CREATE TABLE other (LIKE outbox INCLUDING ALL)")
				harness.Exec(b, s.conn, fmt.Sprintf(`CREATE PROCEDURE fill(rows int, per_tx int) LANGUAGE plpgsql AS $$
					BEGIN
						FOR t IN 0 .. rows / per_tx - 1 LOOP
							INSERT INTO %s (doc_id, actor_id, counter, payload)
								SELECT 'doc' || (t * per_tx + n) %% 1000, 'actor', t * per_tx + n, jsonb_build_object('op', repeat('x', 150), 'n', n)
								FROM generate_series(1, per_tx) n;
							COMMIT;
						END LOOP;
					END $$`, shape.table))
				rows, wanted := 0, 0
				var took time.Duration
				var senders, streamers, broker float64 // seconds of processor time
				for b.Loop() {
					harness.Exec(b, s.conn, fmt.Sprintf("CALL fill(%d, %d)", shape.rows, shape.perTx))
					harness.Exec(b, s.conn, "CHECKPOINT")
					rows += shape.rows
					if shape.table == "outbox" {
						wanted += shape.rows
					}
					end, before := harness.WALEnd(b, s.conn), cpuOf(ns.PID())
					begun := time.Now()
					s.start()
					s.await(b, wanted)
					for _, f := range s.all {
						harness.Eventually(b, "the WAL is read", func() error {
							var read bool
							err := s.conn.QueryRow(b.Context(), `SELECT sent_lsn >= $1::text::pg_lsn FROM pg_replication_slots JOIN pg_stat_replication
								ON pid = active_pid WHERE slot_name = $2`, end.String(), f.Slot).Scan(&read)
							if err == nil && !read {
								err = errors.New("not yet")
							}
							return err
						})
					}
					took += time.Since(begun)
					broker += cpuOf(ns.PID()) - before
					for _, f := range s.all {
						var pid int
						harness.Must(b, s.conn.QueryRow(b.Context(), "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1", f.Slot).Scan(&pid))
						senders += cpuOf(pid)
						streamers += cpuOf(f.Process.PID())
						f.Stop()
					}
				}
				b.ReportMetric(float64(rows)/took.Seconds(), "rows/s")
				for name, cpu := range map[string]float64{"walsenders": senders, "outflows": streamers, "nats": broker} {
					b.ReportMetric(cpu/float64(rows)*1e6, name+"-µs/row")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
