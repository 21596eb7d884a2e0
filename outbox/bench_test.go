package outbox

import (
	"strings"
	"testing"
)

// BenchmarkHeader makes the packed header of one message.
func BenchmarkHeader(b *testing.B) {
	for _, c := range []struct{ name, id, key string }{
		{"computed", "", "author-01:00000000000000012345"},
		{"uuid", "6f1c2c5e-8c2a-4b1e-9d52-000000012345",
			"6f1c2c5e-8c2a-4b1e-9d52-3a5d8e7f1c20:00000000000000012345"},
		{"escaped", "6f1c2c5e-8c2a-4b1e-9d52-000000012345", "émile zola:00000000000000012345"},
		{"cut", "6f1c2c5e-8c2a-4b1e-9d52-000000012345", strings.Repeat("k", 300)},
	} {
		b.Run(c.name, func(b *testing.B) {
			h := Header{
				Pos: Position{LSN: 0x2A_16B3748, Index: 37}, N: 37, Of: 100, Due: 0x2A_16B3748,
				Thru: 0x2A_16B37F0, Timeline: 1, ID: c.id, Key: c.key,
			}
			var line []byte
			b.ReportAllocs()
			for b.Loop() {
				line = h.Append(line[:0])
			}
		})
	}
}

// BenchmarkToken encodes a document's name as one token of a subject.
func BenchmarkToken(b *testing.B) {
	for _, name := range []string{"document-000123", "6f1c2c5e-8c2a-4b1e-9d52-000000012345",
		"eu/customers/42.json"} {
		b.Run(name, func(b *testing.B) {
			var token []byte
			b.ReportAllocs()
			for b.Loop() {
				token = AppendToken(token[:0], name)
			}
		})
	}
}
