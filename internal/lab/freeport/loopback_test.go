//go:build unix

package freeport

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// childEnv makes the test binary a process that takes that many ports, prints them and keeps them until its
// standard input ends.
const childEnv = "_LOOPBACK_PORTS"

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv(childEnv)); err == nil {
		for range n {
			port, err := Port()
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			fmt.Println(port)
		}
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestAPortThatIsGivenIsFree(t *testing.T) {
	t.Parallel()
	for range 20 {
		port, err := Port()
		must.Succeed(t, err)
		if port < first || port >= end {
			t.Errorf("port %d is outside the range", port)
		}
		l, err := net.Listen("tcp4", address(port))
		must.Succeed(t, err)
		defer l.Close()
	}
}

// TestTwoServersGetDifferentPorts: two servers that are about to start never get the same port, whichever
// process asks for them.
func TestTwoServersGetDifferentPorts(t *testing.T) {
	t.Parallel()
	const processes, each = 3, block + 10
	seen := map[int]string{}
	note := func(port int, who string) {
		if port < first || port >= end || seen[port] != "" {
			t.Fatalf("port %d comes to %s, and before to %q", port, who, seen[port])
		}
		seen[port] = who
	}
	for i := range processes {
		cmd := exec.Command(os.Args[0])
		cmd.Env, cmd.Stderr = append(os.Environ(), fmt.Sprint(childEnv, "=", each)), os.Stderr
		stdin, err := cmd.StdinPipe()
		must.Succeed(t, err)
		stdout, err := cmd.StdoutPipe()
		must.Succeed(t, err)
		must.Succeed(t, cmd.Start())
		t.Cleanup(func() { stdin.Close(); cmd.Wait() }) //nolint:errcheck // its ports have come
		lines := bufio.NewScanner(stdout)
		for range each {
			if !lines.Scan() {
				t.Fatal("a process got no port")
			}
			port, err := strconv.Atoi(lines.Text())
			must.Succeed(t, err)
			note(port, fmt.Sprint("process ", i))
			begin := port - (port-first)%block
			if claim, ok := claimAt(begin); ok {
				claim.Close()
				t.Fatalf("port %d is another process's, and its block can be claimed here", port)
			}
		}
	}
	for range 2 * block {
		port, err := Port()
		must.Succeed(t, err)
		note(port, "this process")
	}
}
