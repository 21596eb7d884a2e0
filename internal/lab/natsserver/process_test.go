package natsserver

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func startProcess(t *testing.T, o Options) *Process {
	t.Helper()
	p, err := StartProcess(o)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// stream makes stream S there, or finds it, and returns what lies in it.
func stream(t *testing.T, url string, replicas int) (nats.JetStreamContext, uint64) {
	t.Helper()
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(time.Minute))
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	js, err := nc.JetStream(nats.MaxWait(20 * time.Second))
	must.Succeed(t, err)
	// Where the node that led the cluster has just ended, nobody answers for some seconds.
	var info *nats.StreamInfo
	for deadline := time.Now().Add(3 * time.Minute); info == nil; {
		info, err = js.AddStream(&nats.StreamConfig{Name: "S", Subjects: []string{"s"}, Replicas: replicas})
		if err != nil && time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	return js, info.State.Msgs
}

func TestProcessKeepsWhatItIs(t *testing.T) {
	t.Parallel()
	p := startProcess(t, Options{Dir: t.TempDir(), MaxPayload: 4096, SyncInterval: time.Second})
	url, pid := p.URL(), p.PID()
	end := []func() error{
		p.Kill,
		p.Stop,
		func() error { // frozen, it ends all the same
			if err := p.Pause(); err != nil {
				return err
			}
			return p.Stop()
		},
	}
	for i, end := range end {
		js, n := stream(t, p.URL(), 1)
		if n != uint64(i) {
			t.Errorf("life %d: %d messages", i, n)
		}
		if _, err := js.Publish("s", nil); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(); err == nil {
			t.Error("a server that runs was started")
		}
		must.Succeed(t, end())
		if p.Running() {
			t.Error("it runs after its end")
		}
		if err := p.Kill(); err == nil {
			t.Error("a server that has ended was killed")
		}
		must.Succeed(t, p.Start())
		if p.URL() != url || p.PID() == pid {
			t.Errorf("%s, process %d after %s, process %d", p.URL(), p.PID(), url, pid)
		}
	}
}

func TestProcessCanBeKilledWhileItStarts(t *testing.T) {
	t.Parallel()
	p := startProcess(t, Options{Dir: t.TempDir()})
	for range 5 {
		must.Succeed(t, p.Kill())
		started := make(chan error, 1)
		go func() { started <- p.Start() }()
		for p.Kill() != nil { // until there is something to kill
			time.Sleep(time.Millisecond)
		}
		if err := <-started; err == nil && p.Running() {
			t.Error("it runs after kill -9")
		}
		must.Succeed(t, p.Start())
	}
}

func TestProcessSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	if _, err := StartProcess(Options{Dir: t.TempDir(), Tune: func(*server.Options) {}}); err == nil {
		t.Error("a function was passed to another process")
	}
	p := startProcess(t, Options{Dir: t.TempDir()})
	if _, err := StartProcess(Options{Dir: t.TempDir(), Port: p.Port()}); err == nil ||
		!strings.Contains(err.Error(), "in use") {
		t.Errorf("error %v for a port in use", err)
	}
}

func TestChildReturnsWithoutAnOrder(t *testing.T) {
	if _, ok := os.LookupEnv(childEnv); ok {
		t.Fatal(childEnv, "is set")
	}
	Child()
}

func TestAClusterOfProcessesElectsALeader(t *testing.T) {
	t.Parallel()
	c, err := StartCluster(t.TempDir(), 3, Options{SyncInterval: 5 * time.Second})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = c.Stop() })
	if n := len(strings.Split(c.URLs(), ",")); n != 3 || c.Len() != 3 {
		t.Errorf("%d nodes, URLs %s", c.Len(), c.URLs())
	}
	js, _ := stream(t, c.URLs(), 3)
	if _, err := js.Publish("s", nil); err != nil {
		t.Fatal(err)
	}
	mustRefuseNode(t, c.Node(0).options.Cluster.Port)

	first, err := c.WaitLeader("S", 3*time.Minute)
	must.Succeed(t, err)
	must.Succeed(t, c.StepDown("S"))
	second := first
	for deadline := time.Now().Add(3 * time.Minute); second == first; {
		if second, err = c.WaitLeader("S", 3*time.Minute); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("the leader has not stepped down")
		}
	}

	must.Succeed(t, c.Node(second).Kill())
	third, err := c.WaitLeader("S", 3*time.Minute)
	if err != nil || third == second {
		t.Fatalf("node %d leads after the end of node %d, %v", third, second, err)
	}
	if js, n := stream(t, c.Node(third).URL(), 3); n != 1 {
		t.Errorf("%d messages on the node that leads", n)
	} else if _, err := js.Publish("s", nil); err != nil {
		t.Error("two of three nodes refuse a message:", err)
	}
	must.Succeed(t, c.Node(second).Start())
	must.Succeed(t, c.WaitReady(3*time.Minute))

	for i := range 2 {
		must.Succeed(t, c.Node(i).Pause())
	}
	if err := c.WaitReady(0); err == nil {
		t.Error("a cluster with two of three nodes frozen is ready")
	}
	for i := range 2 {
		must.Succeed(t, c.Node(i).Resume())
	}
	if err := c.WaitReady(3 * time.Minute); err != nil {
		t.Error(err)
	}
	if _, err := c.Leader("NONE"); err == nil {
		t.Error("a stream that does not exist has a leader")
	}
}

// mustRefuseNode: nobody without the password can be a node of the cluster.
func mustRefuseNode(t *testing.T, port int) {
	t.Helper()
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	must.Succeed(t, err)
	defer conn.Close()
	if _, err := io.WriteString(conn,
		"CONNECT {\"name\":\"stranger\",\"cluster\":\"outflow\"}\r\nPING\r\n"); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(conn); lines.Scan(); { // until the node hangs up
		if strings.HasPrefix(lines.Text(), "PONG") {
			t.Fatal("a node lets a stranger in")
		}
	}
}
