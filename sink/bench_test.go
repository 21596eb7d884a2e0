//go:build unix

package sink

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/relay"
)

func BenchmarkEncode(b *testing.B) {
	enc := testEncoder(b, Config{})
	all := edits(b, 1000)
	var m message
	var frame []byte
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		g := &all[i%len(all)]
		if r := enc.encode(&m, &g.e, &g.h, uint64(i)); r != "" {
			b.Fatal(r)
		}
		frame = appendFrame(frame[:0], &m, nil)
	}
}

// BenchmarkPublish compares, on one stream each and with a server in its own process: core publishes without
// any reply, through nats.go and as frames, and the publisher over both ways out.
func BenchmarkPublish(b *testing.B) {
	s := natstest.Process(b)
	for _, way := range []string{"frames", "library", "plain"} {
		b.Run(way, func(b *testing.B) {
			cfg := config(s.URL())
			cfg.Stream = "BENCH" + way
			all := edits(b, 100_000)
			c := door(b, cfg)
			p := c.Publisher(state(b, c).LastSeq)
			if way == "library" {
				p.out = library{c.nc}
			}
			b.ResetTimer()
			before := cpu(b)
			// the client's; the server is elsewhere
			defer func() { b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op") }()
			if way == "plain" {
				plainPublish(b, c, all)
				return
			}
			for left := b.N; left > 0; left -= len(all) {
				mustPublish(b, p, all[:min(left, len(all))])
			}
		})
	}
}

// BenchmarkRecent reads what gap mode remembers by default.
func BenchmarkRecent(b *testing.B) {
	for _, replicas := range []int{1, 3} {
		var url string
		if replicas == 1 {
			url = natstest.Process(b).URL()
		} else {
			cluster, err := natsserver.StartCluster(b.TempDir(), replicas)
			must.Succeed(b, err)
			b.Cleanup(func() { must.Succeed(b, cluster.Stop()) })
			url = cluster.URLs()
		}
		for _, size := range []int{100, 1_000, 10_000} {
			b.Run(fmt.Sprintf("replicas=%d,payload=%d", replicas, size), func(b *testing.B) {
				s := countedStream(b, url, fmt.Sprintf("RECENT%d", size), replicas)
				s.publish(b, relay.DefaultMemory, size)
				c := connect(b, s.cfg)
				before := cpu(b)
				for b.Loop() {
					got, err := c.Recent(b.Context(), 0, relay.DefaultMemory, relay.DefaultMemory)
					must.Succeed(b, err)
					if len(got) != relay.DefaultMemory {
						b.Fatalf("%d counters", len(got))
					}
				}
				b.ReportMetric(float64(cpu(b)-before)/1e6/float64(b.N), "cpu-ms/op")
			})
		}
	}
}

// cpu is the processor time of this process, in nanoseconds.
func cpu(b *testing.B) int64 {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return r.Utime.Nano() + r.Stime.Nano()
}

// plainPublish publishes to the stream without any check, and asks for an acknowledgement on every 50th
// message to stay within 2000.
func plainPublish(b *testing.B, c *Conn, all []given) {
	var acked atomic.Int64
	wake := make(chan struct{}, 1)
	inbox := c.nc.NewInbox()
	sub, err := c.nc.Subscribe(inbox, func(*nats.Msg) {
		acked.Add(ackEvery)
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	subject := c.Ingress() + "outbox.doc"
	for i := 1; i <= b.N; i++ {
		m := &nats.Msg{Subject: subject, Data: all[i%len(all)].e.Payload,
			Header: nats.Header{"Outflow": {"v=1"}}}
		if i%ackEvery == 0 {
			m.Reply = inbox
		}
		if err := c.nc.PublishMsg(m); err != nil {
			b.Fatal(err)
		}
		for int64(i)-acked.Load() >= MaxInFlight {
			<-wake
		}
	}
	for acked.Load() < int64(b.N/ackEvery*ackEvery) {
		<-wake
	}
}
