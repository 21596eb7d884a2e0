package replication

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// FuzzStream feeds any bytes as what the server sends while it streams. No panic; what comes out is WAL data
// as it went in, with the LSN that stands before it, and keepalives that never go back.
func FuzzStream(f *testing.F) {
	wal := append([]byte{'w', 0, 0, 0, 0, 1, 0x6B, 0x37, 0x48, 0, 0, 0, 0, 1, 0x6B, 0x37, 0x48, 0, 2, 0xB8,
		0x7F, 0, 0, 0, 0}, "B\x00\x00"...)
	keepalive := []byte{'k', 0, 0, 0, 0, 1, 0x6B, 0x37, 0x48, 0, 2, 0xB8, 0x7F, 0, 0, 0, 0, 1}
	f.Add(append(frame('d', wal), frame('d', keepalive)...))
	f.Add(slices.Repeat(frame('d', keepalive), 6))
	f.Add(frame('E', []byte("SERROR\x00C42704\x00Mpublication \"outflow\" does not exist\x00\x00")))
	f.Add(frame('N', []byte("SWARNING\x00C55000\x00Mskipped loading publication: \"outflow\"\x00\x00")))
	f.Add(append(frame('c', nil), append(frame('C', []byte("START_STREAMING\x00")),
		frame('Z', []byte{'I'})...)...))
	f.Fuzz(func(t *testing.T, sent []byte) {
		s := newStream(nil, nil, nil, 0, time.Minute)
		s.splitter = splitter{src: bytes.NewReader(sent),
			pool: newPool(64, make(chan struct{}), make(chan struct{}))}
		var high outbox.LSN
		for {
			b, err := s.splitter.next(s.handle)
			if b != nil {
				for _, m := range b.Messages {
					switch {
					case m.Keepalive && (m.WALEnd < high || m.Data != nil):
						t.Fatalf("keepalive at %v after %v with data %x", m.WALEnd, high, m.Data)
					case m.Keepalive:
						high = m.WALEnd
					case !bytes.Contains(sent, m.Data):
						t.Fatalf("%x was never sent", m.Data)
					}
				}
				b.Release()
			}
			if err != nil {
				return
			}
		}
	})
}

// FuzzHistory reads timeline history files: what is taken ascends, and written again it is the same.
func FuzzHistory(f *testing.F) {
	f.Add(
		[]byte("1\t0/3000148\tno recovery target specified\n\n2\t0/50001A0\tbefore 2000-01-01 00:00:00+00\n"))
	f.Add([]byte("# a comment\n\n7 1/0"))
	f.Fuzz(func(t *testing.T, content []byte) {
		all, err := parseHistory(content)
		if err != nil {
			return
		}
		var again bytes.Buffer
		for i, s := range all {
			if s.Timeline == 0 || i > 0 && (s.Timeline <= all[i-1].Timeline || s.End < all[i-1].End) {
				t.Fatalf("%q is read as %v", content, all)
			}
			fmt.Fprintf(&again, "%d\t%v\treason\n", s.Timeline, s.End)
		}
		back, err := parseHistory(again.Bytes())
		if err != nil || !slices.Equal(back, all) {
			t.Fatalf("%v became %v, %v", all, back, err)
		}
		h := relay.History{Timeline: 1 << 31, Switches: all}
		for _, s := range all {
			h.At(s.End)
			if _, left, known := h.Left(s.Timeline); !left || !known {
				t.Fatalf("timeline %d of %v was not left", s.Timeline, all)
			}
		}
	})
}
