package decoder

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// insertsOf gives a decoder inside a transaction, with the table described, and the inserts that follow.
func insertsOf(t testing.TB, c capture) (*Decoder, [][]byte) {
	t.Helper()
	d := New(c.config(t))
	var r Result
	for i, msg := range c.Messages {
		if msg[0] == 'I' {
			var inserts [][]byte
			for _, msg := range c.Messages[i:] {
				if msg[0] == 'I' {
					inserts = append(inserts, msg)
				}
			}
			return d, inserts
		}
		must.Succeed(t, d.Decode(msg, &r))
	}
	t.Fatal("no inserts")
	return nil, nil
}

// eachEdits calls f with the captures of plain inserts of the newest server.
func eachEdits(t testing.TB, f func(name string, c capture)) {
	all := load(t)
	for _, c := range all[len(all)-1].Captures {
		if c.Scenario == "edits-200" || c.Scenario == "edits-1k" {
			f(fmt.Sprintf("%s/binary=%v", c.Scenario, c.Binary), c)
		}
	}
}

// BenchmarkInsert decodes and copies one row: six columns that are read, the key computed from two of them.
func BenchmarkInsert(b *testing.B) {
	eachEdits(b, func(name string, c capture) {
		b.Run(name, func(b *testing.B) {
			d, inserts := insertsOf(b, c)
			var r Result
			b.SetBytes(int64(len(inserts[0])))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := d.Decode(inserts[i%len(inserts)], &r); err != nil {
					b.Fatal(err)
				}
			}
			if d.tx.events == 0 || r.Event.Payload == nil {
				b.Fatal("no events")
			}
		})
	})
}

// BenchmarkPayload decodes and copies rows whose payloads are of other sizes, from more messages than a cache
// holds.
func BenchmarkPayload(b *testing.B) {
	for _, size := range []int{200, 1 << 10, 10 << 10, 100 << 10} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			payload := strings.Repeat("x", size)
			var inserts [][]byte
			for i := range 32 << 20 / (size + 150) {
				inserts = append(inserts, row(fmt.Sprint(i), payload))
			}
			d := New(config)
			var r Result
			for _, msg := range [][]byte{begin(1), relation(tableOID, columns...)} {
				if err := d.Decode(msg, &r); err != nil {
					b.Fatal(err)
				}
			}
			b.SetBytes(int64(len(inserts[0])))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := d.Decode(inserts[i%len(inserts)], &r); err != nil {
					b.Fatal(err)
				}
			}
			if len(r.Event.Payload) != size {
				b.Fatal("no payload")
			}
		})
	}
}

// BenchmarkMessage decodes and copies a message event.
func BenchmarkMessage(b *testing.B) {
	cfg := config
	cfg.Mapping.Source = relay.FromMessage
	d := New(cfg)
	var r Result
	if err := d.Decode(begin(1), &r); err != nil {
		b.Fatal(err)
	}
	msg := logical(1, outbox.EventPrefix,
		`{"doc_id": "document-000123", "actor_id": "author-01", "counter": 12345, "payload": `+edit200+`}`)
	b.SetBytes(int64(len(msg)))
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Decode(msg, &r); err != nil {
			b.Fatal(err)
		}
	}
	if r.Event.Payload == nil {
		b.Fatal("no event")
	}
}

// BenchmarkTransaction decodes a transaction of one row.
func BenchmarkTransaction(b *testing.B) {
	msgs := [][]byte{begin(0), row("1", `[[0, 0, "A"]]`), commit(0, 0, 0)}
	d := New(config)
	var r Result
	for _, msg := range [][]byte{begin(1), relation(tableOID, columns...), commit(1, 2, 0)} {
		if err := d.Decode(msg, &r); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for i := uint64(3); b.Loop(); i += 2 {
		be.PutUint64(msgs[0][1:], i)
		be.PutUint64(msgs[2][2:], i)
		be.PutUint64(msgs[2][10:], i+1)
		for _, msg := range msgs {
			if err := d.Decode(msg, &r); err != nil {
				b.Fatal(err)
			}
		}
	}
	if r.Commit.Kind != relay.Events {
		b.Fatal("no events")
	}
}

// In steady state a row costs no allocation of its own.
func TestNoAllocationPerRow(t *testing.T) {
	eachEdits(t, func(name string, c capture) {
		d, inserts := insertsOf(t, c)
		var r Result
		const rounds = 50
		allocs := testing.AllocsPerRun(10, func() {
			for range rounds {
				for _, msg := range inserts {
					must.Succeed(t, d.Decode(msg, &r))
				}
			}
		})
		// What remains are the arena's blocks: one for each 256 KiB, and one for each slab of strings.
		rows := float64(rounds * len(inserts))
		if limit := rows * (1200.0/blockSize*2 + 2.0/slabSize*2); allocs > limit {
			t.Errorf("%s: %v allocations for %v rows, want at most %v", name, allocs, rows, limit)
		}
	})
}
