//go:build unix

package sink

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/sink/stream"
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

// BenchmarkFence compares messages that name the newest cut with such that do not: by turns, behind a cut
// that is the stream's first message, on one server, with and without batches, and on three, where those with
// a fence wait for one another. The ratio is the median of how much longer a round takes with it.
func BenchmarkFence(b *testing.B) {
	cluster, err := natsserver.StartCluster(b.TempDir(), 3)
	must.Succeed(b, err)
	b.Cleanup(func() { must.Succeed(b, cluster.Stop()) })
	for _, server := range []struct {
		name     string
		url      string
		replicas int
		batches  bool
	}{
		{"default", natstest.Process(b).URL(), 1, false},
		{"synced", natstest.Process(b, natsserver.Options{SyncAlways: true}).URL(), 1, true},
		{"replicated", cluster.URLs(), 3, false},
	} {
		var p [2]*Publisher
		for i := range p {
			cfg := config(server.url)
			cfg.Batches, cfg.Fence, cfg.Stream = new(Batches), i == 1, fmt.Sprint(server.name, i)
			c := connect(b, cfg)
			must.Succeed(b, c.EnsureStream(b.Context(), stream.Options{Replicas: server.replicas}))
			await.Until(b, "the stream has a leader that takes a cut", func() error {
				return c.StoreCut(b.Context(), testCut(1), 0, 0)
			})
			p[i] = c.Publisher(1)
			p[i].BehindCut(1)
			if p[i].batch.on = p[i].batch.on || server.batches; !p[i].batch.on {
				p[i].batch.allowed = nil
			}
		}
		all := edits(b, 5000)
		b.Run(server.name, func(b *testing.B) {
			var ratios []float64
			for b.Loop() {
				var took [2]time.Duration
				for _, i := range []int{0, 1, 1, 0} {
					begun := time.Now()
					mustPublish(b, p[i], all)
					took[i] += time.Since(begun)
				}
				ratios = append(ratios, float64(took[1])/float64(took[0]))
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "ratio")
		})
	}
}
