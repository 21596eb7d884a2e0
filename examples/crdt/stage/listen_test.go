package main

import (
	"net"
	"strings"
	"testing"
)

func TestListenIsTriedFirst(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, address := range []string{"127.0.0.1:99999", l.Addr().String()} {
		if err := free(address); err == nil || !strings.Contains(err.Error(), "-listen "+address) {
			t.Errorf("%s: %v", address, err)
		}
	}
	if err := free(""); err != nil {
		t.Error(err)
	}
}
