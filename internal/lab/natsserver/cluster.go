package natsserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/freeport"
)

const (
	clusterTimeout = 3 * time.Minute // from the start of the processes until they are a cluster
	askTimeout     = 2 * time.Second // one question to one node: a paused one never answers
)

// Cluster is several server processes that form one JetStream cluster, for replicated streams. Its nodes can
// be killed one by one. Its methods may be called from any goroutine.
type Cluster struct {
	nodes []*Process
	pages []int // ports of the nodes' monitoring pages
}

// StartCluster starts n nodes (3 for replicated streams), each with a folder in dir, and returns when they
// are a cluster. Options, if given, are for all nodes; Dir, Port, Name, Monitor and Cluster are set here.
func StartCluster(dir string, n int, options ...Options) (*Cluster, error) {
	var o Options
	if len(options) > 0 {
		o = options[0]
	}
	o.user() // one password for all
	ports, err := freePorts(3 * n)
	if err != nil {
		return nil, err
	}
	routes := Routes{Cluster: "outflow"}
	for _, port := range ports[:n] {
		routes.Nodes = append(routes.Nodes, "127.0.0.1:"+strconv.Itoa(port))
	}
	c := &Cluster{pages: ports[n : 2*n]}
	for i := range n {
		own := routes
		own.Port = ports[i]
		o.Dir, o.Name, o.Cluster = filepath.Join(dir, nodeName(i)), nodeName(i), &own
		o.Monitor, o.Port = c.pages[i], ports[2*n+i]
		node, err := StartProcess(o)
		if err != nil {
			return nil, errors.Join(err, c.Stop())
		}
		c.nodes = append(c.nodes, node)
	}
	if err := c.WaitReady(clusterTimeout); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

// freePorts returns n ports, no two the same.
func freePorts(n int) ([]int, error) {
	var all []int
	for len(all) < n {
		port, err := freeport.Port()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(all, port) {
			all = append(all, port)
		}
	}
	return all, nil
}

func nodeName(i int) string { return "node" + strconv.Itoa(i) }

// Len returns the number of nodes.
func (c *Cluster) Len() int { return len(c.nodes) }

// Node returns a node, counted from 0.
func (c *Cluster) Node(i int) *Process { return c.nodes[i] }

// URLs returns the addresses of all nodes, comma-separated.
func (c *Cluster) URLs() string {
	all := make([]string, len(c.nodes))
	for i, n := range c.nodes {
		all[i] = n.URL()
	}
	return strings.Join(all, ",")
}

// Stop ends all nodes with kill -9.
func (c *Cluster) Stop() error {
	var all error
	for _, n := range c.nodes {
		if err := n.Kill(); err != nil && !errors.Is(err, errNotRunning) {
			all = errors.Join(all, err)
		}
	}
	return all
}

// WaitReady waits until the running nodes have a leader that knows them all, and each has caught up with the
// cluster and with all replicas of streams that it holds. Without a majority that never comes.
func (c *Cluster) WaitReady(timeout time.Duration) error {
	return await(timeout, c.ready)
}

// Leader returns the node that leads a stream's replicas. While there is none, that is an error.
func (c *Cluster) Leader(stream string) (int, error) {
	why := errors.New("no node runs")
	for _, n := range c.nodes {
		if !n.Running() {
			continue
		}
		var info struct {
			Cluster struct {
				Leader string `json:"leader"`
			} `json:"cluster"`
		}
		// A node without a leader answers as well, and names none.
		if err := request(n.URL(), "$JS.API.STREAM.INFO."+stream, &info); err != nil {
			why = err
			continue
		}
		for i := range c.nodes {
			if info.Cluster.Leader == nodeName(i) && c.nodes[i].Running() {
				return i, nil
			}
		}
		why = errors.New("the replicas have none")
	}
	return -1, fmt.Errorf("leader of stream %s: %w", stream, why)
}

// WaitLeader waits until a stream's replicas have a leader, 4 to 9 s after the node of the last one was
// killed, and returns its node.
func (c *Cluster) WaitLeader(stream string, timeout time.Duration) (node int, err error) {
	err = await(timeout, func() (err error) {
		node, err = c.Leader(stream)
		return err
	})
	return node, err
}

// StepDown makes the leader of a stream's replicas hand over to another one. It returns when the leader has
// agreed.
func (c *Cluster) StepDown(stream string) error {
	leader, err := c.Leader(stream)
	if err != nil {
		return err
	}
	if err := request(c.nodes[leader].URL(), "$JS.API.STREAM.LEADER.STEPDOWN."+stream,
		&struct{}{}); err != nil {
		return fmt.Errorf("step-down of stream %s's leader: %w", stream, err)
	}
	return nil
}

func (c *Cluster) ready() error {
	running, known := 0, 0
	for i, n := range c.nodes {
		if !n.Running() {
			continue
		}
		running++
		if err := c.page(i, "healthz", nil); err != nil {
			return fmt.Errorf("%s: %w", nodeName(i), err)
		}
		var js server.JSInfo
		if err := c.page(i, "jsz", &js); err != nil {
			return fmt.Errorf("%s: %w", nodeName(i), err)
		}
		if js.Meta == nil || js.Meta.Leader != nodeName(i) {
			continue
		}
		known = 1
		for _, peer := range js.Meta.Replicas {
			if !peer.Offline && peer.Current {
				known++
			}
		}
	}
	if running == 0 || known < running {
		return fmt.Errorf("%d of %d running nodes are in the cluster", known, running)
	}
	return nil
}

// page reads one of a node's monitoring pages into v.
func (c *Cluster) page(node int, name string, v any) error {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		fmt.Sprintf("http://127.0.0.1:%d/%s", c.pages[node], name), nil)
	if err != nil {
		return err
	}
	req.Close = true // no connection is kept for a node that may be killed
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("/%s: %s", name, body)
	case v == nil:
		return nil
	}
	return json.Unmarshal(body, v)
}

// request asks JetStream's API on a connection of its own, so that a node that is frozen or killed leaves
// nothing behind.
func request(url, subject string, v any) error {
	nc, err := nats.Connect(url, nats.NoReconnect(), nats.Timeout(askTimeout))
	if err != nil {
		return err
	}
	defer nc.Close()
	m, err := nc.Request(subject, nil, askTimeout)
	if err != nil {
		return err
	}
	var failed server.ApiResponse
	if err := json.Unmarshal(m.Data, &failed); err != nil {
		return err
	}
	if failed.Error != nil {
		return failed.Error
	}
	return json.Unmarshal(m.Data, v)
}

func await(timeout time.Duration, until func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := until()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the NATS cluster is not ready within %v: %w", timeout, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
