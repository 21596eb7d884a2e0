package loopback

import (
	"net"
	"strconv"
	"testing"
)

func TestPortIsFree(t *testing.T) {
	t.Parallel()
	for range 20 {
		port, err := Port()
		if err != nil {
			t.Fatal(err)
		}
		if port < first || port >= end {
			t.Errorf("port %d is outside the range", port)
		}
		l, err := net.Listen("tcp4", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Fatal(err) // another process can take it in between, one time in many thousands
		}
		defer l.Close()
	}
}

// TestPortsDiffer: two servers that are about to start never get the same port.
func TestPortsDiffer(t *testing.T) {
	t.Parallel()
	seen := map[int]bool{}
	for range 1000 {
		port, err := Port()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Fatalf("port %d comes twice", port)
		}
		seen[port] = true
	}
}
