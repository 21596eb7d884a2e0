package maintenance

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// otherMinor returns another minor version of a server's major, if OUTFLOW_TEST_PG_UPGRADE names one; else
// the same one.
func otherMinor(t *testing.T, pg *pgserver.Server) pgserver.Installation {
	t.Helper()
	if os.Getenv("OUTFLOW_TEST_PG_UPGRADE") == "" {
		return pg.Installation
	}
	for _, i := range wholeInstallations(t) {
		if i.Major == pg.Installation.Major && i.Version != pg.Installation.Version {
			return i
		}
	}
	return pg.Installation
}

// TestAMinorUpgradeOfPostgreSQLLosesNothing: PostgreSQL is stopped and started with its files under load, by
// another minor version where there is one.
func TestAMinorUpgradeOfPostgreSQLLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	var majors []pgserver.Installation
	for _, i := range pgserver.Installations() {
		if i.Major >= 17 {
			majors = append(majors, i)
		}
	}
	if len(majors) == 0 {
		tier.Missing(t, "pg17", "no PostgreSQL 17 or 18 on this machine (scripts/postgres fetches them)")
	}
	for n, i := range majors {
		t.Run(fmt.Sprint(i.Major), func(t *testing.T) {
			if n < len(majors)-1 {
				tier.OnlyLong(t, "one major shows it")
			}
			t.Parallel()
			pg := newer(t, i, map[string]string{"fsync": "off", "track_commit_timestamp": "on"})
			p := underLoad(t, pg, natstest.Process(t).URL(), "minor", 1000, nil)
			for _, next := range []pgserver.Installation{otherMinor(t, pg), i} {
				harness.Must(t, pg.Stop("fast"))
				pg.Installation = next
				harness.Must(t, pg.Start(t.Context()))
				t.Logf("PostgreSQL %s", next.Version)
				p.publishing()
			}
			p.conn = harness.Connect(t, p.url) // the old one is cut
			p.end()
		})
	}
}

// TestAMinorUpgradeOfNATSLosesNothing: NATS is stopped and started with its files under load, and once more
// from the older version that OUTFLOW_TEST_NATS_SERVER names.
func TestAMinorUpgradeOfNATSLosesNothing(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	t.Run("of the same version", func(t *testing.T) {
		ns := natstest.Process(t)
		upgradesNATS(t, ns, ns.Stop)
	})
	t.Run("from an older version", func(t *testing.T) {
		program := os.Getenv("OUTFLOW_TEST_NATS_SERVER")
		if program == "" {
			tier.Missing(t, "old-nats", "OUTFLOW_TEST_NATS_SERVER names no older NATS server")
		}
		ns := natstest.Process(t)
		harness.Must(t, ns.Stop())
		cmd := exec.Command(program, "-js", "-sd", ns.Dir(), "-a", "127.0.0.1", "-p", fmt.Sprint(ns.Port()))
		log := &harness.Log{}
		cmd.Stdout, cmd.Stderr = log, log
		old, err := process.Start(cmd, syscall.SIGKILL)
		harness.Must(t, err)
		upgradesNATS(t, ns, func() error {
			err := old.Signal(syscall.SIGTERM)
			<-old.Done()
			line, _, _ := strings.Cut(log.String()[strings.Index(log.String(), "Version:"):], "\n")
			t.Log("from nats-server", line)
			return err
		})
	})
}

// upgradesNATS stops what runs in the place of a server, and then that server, with its files under load.
func upgradesNATS(t *testing.T, ns *natstest.ServerProcess, stop func() error) {
	t.Helper()
	harness.Eventually(t, "NATS", func() error {
		nc, err := nats.Connect(ns.URL())
		if err == nil {
			nc.Close()
		}
		return err
	})
	p := underLoad(t, timedServer(t), ns.URL(), "minor", 1000, nil)
	for _, stop := range []func() error{stop, ns.Stop} {
		harness.Must(t, stop())
		harness.Must(t, ns.Start())
		p.publishing()
	}
	p.end()
}

// TestARollingUpgradeOfNATSLosesNothing: the nodes of a cluster are stopped and started one after the other,
// under load.
func TestARollingUpgradeOfNATSLosesNothing(t *testing.T) {
	tier.OnlyLong(t, "a cluster under load takes minutes")
	t.Parallel()
	c := natstest.Cluster(t, 3)
	p := underLoad(t, timedServer(t), c.URLs(), "rolling", 600, nil, "INIT_REPLICAS=3")
	for node := range 3 {
		c.Stop(node)
		_, err := c.WaitLeader(p.Stream, harness.Patience)
		harness.Must(t, err)
		p.publishing()
		harness.Must(t, c.Start(node))
		harness.Must(t, c.WaitReady(harness.Patience))
		for _, stream := range []string{p.Stream, "KV_outflow-" + p.Stream} {
			replicas(t, c.URLs(), stream, 3)
		}
		p.publishing()
	}
	p.end()
}
