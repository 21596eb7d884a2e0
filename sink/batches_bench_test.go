//go:build unix

package sink

import (
	"fmt"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// BenchmarkBatches compares messages one by one with atomic batches, on a server that syncs each write and on
// one that does not. each is how many are ready at a time; 0: there are always more.
func BenchmarkBatches(b *testing.B) {
	for _, synced := range []bool{true, false} {
		s := natstest.Process(b, natsserver.Options{SyncAlways: synced})
		for _, each := range []int{8, 32, 100, 0} {
			for _, on := range []bool{false, true} {
				name := fmt.Sprintf("synced=%v,each=%d,batches=%v", synced, each, on)
				b.Run(name, func(b *testing.B) {
					cfg := config(s.URL())
					cfg.Batches = new(Batches)
					cfg.Stream = fmt.Sprintf("S%d%v", each, on)
					all := edits(b, 20_000)
					c := door(b, cfg)
					p := c.Publisher(state(b, c).LastSeq)
					p.batch.on = on
					if !on {
						p.batch.allowed = nil
					}
					chunk := len(all)
					if each > 0 {
						chunk = each
					}
					b.ResetTimer()
					for left := b.N; left > 0; left -= chunk {
						mustPublish(b, p, all[:min(left, chunk)])
					}
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
				})
			}
		}
	}
}
