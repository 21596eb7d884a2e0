package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// outflow is the process of one home on one cluster.
type outflow struct {
	home, at int
	binary   string
	env      []string
	listen   string
	log      string // file
	child    *process.Process
	running  bool // it should
}

func newOutflow(m *mesh, c *cluster, home int) (*outflow, error) {
	port, err := freeport.Port()
	if err != nil {
		return nil, err
	}
	o := &outflow{home: home, at: c.number, binary: m.outflow,
		listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		log:    filepath.Join(m.dir, fmt.Sprintf("cluster-%d-home-%d.log", c.number, home))}
	for _, v := range os.Environ() { // nothing of the caller's own settings
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "PG") {
			o.env = append(o.env, v)
		}
	}
	o.env = append(o.env, "OUTFLOW_POSTGRES_URL="+c.url, "OUTFLOW_NATS_URL="+m.natsAt(c),
		"OUTFLOW_LISTEN="+o.listen, "OUTFLOW_CLUSTER_CONTROL=outflow_control",
		"OUTFLOW_CLUSTER_ID="+strconv.Itoa(c.number), "OUTFLOW_CLUSTER_COUNT="+strconv.Itoa(clusters),
		"OUTFLOW_SLOT=home_"+strconv.Itoa(home), "OUTFLOW_STREAM="+streamOf(home))
	if home == c.number {
		o.env = append(o.env, "OUTFLOW_PUBLICATION=home_"+strconv.Itoa(home))
	} else {
		o.env = append(o.env, "OUTFLOW_PUBLICATION=of_"+strconv.Itoa(home),
			"OUTFLOW_CLUSTER_SUBSCRIPTION=from_"+strconv.Itoa(home))
	}
	// How clusters go on for one another.
	o.env = append(o.env, "OUTFLOW_CLUSTER_MODE="+m.mode,
		"OUTFLOW_CLUSTER_MAXIMUM_DELAY="+m.delay.String())
	if m.mode == shared {
		o.env = append(o.env, "OUTFLOW_SINK_DURABLE_AFTER=0s",
			"OUTFLOW_INIT_REPLICAS="+strconv.Itoa(clusters))
	} else {
		var subscriptions []string
		for other := 1; other <= clusters; other++ {
			if other != c.number {
				subscriptions = append(subscriptions, fmt.Sprintf("%d=from_%[1]d", other))
			}
		}
		o.env = append(o.env, "OUTFLOW_CLUSTER_SUBSCRIPTIONS="+strings.Join(subscriptions, ","))
	}
	return o, nil
}

func streamOf(home int) string { return "HOME_" + strconv.Itoa(home) }

// init runs outflow init. Settings take the place of its own.
func (o *outflow) init(ctx context.Context, settings ...string) error {
	out, err := process.Again(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, o.binary, "init")
		cmd.Env = append(slices.Clone(o.env), settings...)
		return cmd
	})
	if err != nil {
		return fmt.Errorf("outflow init, cluster %d, home %d: %w\n%s", o.at, o.home, err, out)
	}
	return nil
}

// start runs outflow run.
func (o *outflow) start() error {
	log, err := os.OpenFile(o.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own handle
	cmd := exec.Command(o.binary, "run")
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, log, log
	o.child, err = process.Start(cmd, syscall.SIGKILL)
	o.running = err == nil
	return err
}

// kill ends it with kill -9, if it runs.
func (o *outflow) kill() {
	o.running = false
	if o.child != nil && o.child.Running() {
		_ = o.child.Kill() // it may just have ended
	}
}

// alive says how it ended, if it should run.
func (o *outflow) alive() error {
	if !o.running || o.child.Running() {
		return nil
	}
	return fmt.Errorf("the outflow of home %d on cluster %d ended: %w", o.home, o.at, o.child.Wait())
}

// owner is the number of the cluster that makes the stream, and the epoch of its ownership, as far as this
// process knows.
func (o *outflow) owner(ctx context.Context) (cluster, epoch int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+o.listen+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		words := strings.Fields(lines.Text())
		switch name, _, _ := strings.Cut(words[0], "{"); name {
		case "outflow_cluster_owner":
			cluster, err = strconv.Atoi(words[len(words)-1])
		case "outflow_cluster_epoch":
			epoch, err = strconv.Atoi(words[len(words)-1])
		}
		if err != nil {
			return 0, 0, err
		}
	}
	if cluster == 0 {
		return 0, 0, errors.New("no owner is known")
	}
	return cluster, epoch, nil
}

// tail is the end of its log.
func (o *outflow) tail() string {
	b, err := os.ReadFile(o.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-2000):])
}

// owner waits until one of these clusters makes the stream of a home, by what its own process says, in a
// later epoch than this one.
func (m *mesh) owner(ctx context.Context, home, after int, of ...int) (by, epoch int, err error) {
	what := fmt.Sprint("somebody makes the stream of home ", home)
	err = m.until(ctx, what, func(ctx context.Context) error {
		for _, at := range of {
			if owner, n, err := m.all[at-1].homes[home-1].owner(ctx); err == nil && owner == at && n > after {
				by, epoch = at, n
				return nil
			}
		}
		return fmt.Errorf("none of %d", of)
	})
	return by, epoch, err
}
