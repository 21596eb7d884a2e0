package natstest

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// ServerCluster is several servers in this process that form one JetStream cluster, for replicated streams.
// Its methods are for one goroutine at a time.
type ServerCluster struct {
	nodes   []*natsserver.Server // nil: stopped
	options []natsserver.Options
}

// Cluster starts n nodes (3 for replicated streams) and returns when they have a leader and all nodes are up
// to date.
func Cluster(t testing.TB, n int) *ServerCluster {
	t.Helper()
	routes := make([]int, n)
	addresses := make([]string, n)
	for i := range routes {
		port, err := freeport.Port()
		must.Succeed(t, err)
		routes[i], addresses[i] = port, "127.0.0.1:"+strconv.Itoa(port)
	}
	c := &ServerCluster{nodes: make([]*natsserver.Server, n), options: make([]natsserver.Options, n)}
	for i := range c.options {
		// before the Cleanup: the folders go when nobody writes to them any more
		c.options[i].Dir = t.TempDir()
	}
	t.Cleanup(func() {
		for i := range c.nodes {
			c.Stop(i)
		}
	})
	for i := range c.nodes {
		port, err := freeport.Port()
		must.Succeed(t, err)
		c.options[i] = natsserver.Options{
			Dir: c.options[i].Dir, Port: port, Name: fmt.Sprintf("node%d", i), Open: true,
			Cluster: &natsserver.Routes{Cluster: "cluster", Port: routes[i], Nodes: addresses},
		}
		must.Succeed(t, c.Start(i))
	}
	must.Succeed(t, c.WaitReady(3*time.Minute))
	return c
}

// URL returns the address of one node.
func (c *ServerCluster) URL(node int) string {
	u := url.URL{Scheme: "nats", Host: "127.0.0.1:" + strconv.Itoa(c.options[node].Port)}
	return u.String()
}

// URLs returns the addresses of all nodes, comma-separated.
func (c *ServerCluster) URLs() string {
	all := make([]string, len(c.nodes))
	for i := range all {
		all[i] = c.URL(i)
	}
	return strings.Join(all, ",")
}

// Dir returns the folder of one node.
func (c *ServerCluster) Dir(node int) string { return c.options[node].Dir }

// Stop shuts a node down.
func (c *ServerCluster) Stop(node int) {
	if s := c.nodes[node]; s != nil {
		c.nodes[node] = nil
		s.Shutdown()
	}
}

// Start starts a node that was stopped, in its folder and on its port.
func (c *ServerCluster) Start(node int) error {
	s, err := natsserver.Start(c.options[node])
	if err == nil {
		c.nodes[node] = s
	}
	return err
}

// WaitReady waits until the running nodes agree on a leader of the cluster and have caught up with it. A
// stream's replicas choose a leader of their own: see WaitLeader.
func (c *ServerCluster) WaitReady(timeout time.Duration) error {
	return wait(timeout, "the NATS cluster has no leader, or nodes that lag", c.ready)
}

// WaitLeader waits until a stream's replicas have a leader, 4 to 9 s after the node of the last one has
// stopped, and returns its node.
func (c *ServerCluster) WaitLeader(stream string, timeout time.Duration) (int, error) {
	node := -1
	err := wait(timeout, "stream "+stream+" has no leader", func() bool {
		node = c.Leader(stream)
		return node >= 0
	})
	return node, err
}

func wait(timeout time.Duration, otherwise string, until func() bool) error {
	deadline := time.Now().Add(timeout)
	for !until() {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s within %v", otherwise, timeout)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func (c *ServerCluster) ready() bool {
	running := slices.DeleteFunc(slices.Clone(c.nodes), func(n *natsserver.Server) bool { return n == nil })
	leader := false
	for _, n := range running {
		s := n.Embedded()
		if s.JetStreamIsLeader() {
			leader = true
			if len(s.JetStreamClusterPeers()) < len(running) {
				return false
			}
		}
		if !s.JetStreamIsCurrent() {
			return false
		}
	}
	return leader
}

// Leader returns the node that leads a stream's replicas, or -1 while there is none.
func (c *ServerCluster) Leader(stream string) int {
	for i, n := range c.nodes {
		if n != nil && n.Embedded().JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
			return i
		}
	}
	return -1
}
