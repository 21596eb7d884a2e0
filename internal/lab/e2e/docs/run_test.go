package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/alerts"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// docPages are the pages of docs that are run as they stand, and what else is done around some of them.
var docPages = []struct {
	name string
	// makes the page's world; finish comes behind the last block
	around func(t *testing.T, p *pageRun) (finish func())
}{
	{name: "first-event"},
	{name: "first-consumer"},
	{name: "replay"},
	{name: "snapshot"},
	{name: "ordering"},
	{name: "from-polling", around: aroundPolling},
	{name: "cut-over", around: aroundCutover},
	{name: "from-debezium"},
	{name: "from-wal-listener"},
}

// TestThePagesWorkAsWritten does what the pages say, block by block, against real servers, and sees what they
// say that a reader sees.
func TestThePagesWorkAsWritten(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	// A server of its own: the pages use slots by their default name.
	pg := pgtest.Own(t, 0)
	for _, page := range docPages {
		t.Run(page.name, func(t *testing.T) {
			p := newPageRun(t, page.name, pgtest.Database(t, pg), natstest.Server(t).URL())
			finish := func() {}
			if page.around != nil {
				finish = page.around(t, p)
			}
			p.play("")
			finish()
			p.stop()
		})
	}
}

// TestPrometheusScrapesAsWritten does what docs/metrics.md says, until Prometheus answers what a panel asks.
func TestPrometheusScrapesAsWritten(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	alerts.Tool(t, "prometheus")
	p := newPageRun(t, "metrics", pgtest.Database(t, pgtest.Own(t, 0)), natstest.Server(t).URL())
	port, err := freeport.Port()
	harness.Must(t, err)
	p.as = []string{"127.0.0.1:7422", p.listen, "127.0.0.1:9090", fmt.Sprintf("127.0.0.1:%d", port)}
	harness.Must(t, os.Symlink(harness.Path("packaging"), filepath.Join(p.dir, "packaging")))
	p.play("Prometheus and Grafana")
	p.stop()
}

// TestMaintenanceWorksAsWritten does what the sections of docs/maintenance.md say, each in a world of its
// own.
func TestMaintenanceWorksAsWritten(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg := pgtest.Own(t, 0) // the sections use the slot by its default name
	for _, section := range []struct {
		title string
		world func(t *testing.T, pg *pgserver.Server) *upkeep
		own   bool // it has a server of its own
	}{
		{"Pause", plainUpkeep, false},
		{"A password in PostgreSQL", withPassword, false},
		{"Credentials in NATS", withNKeys, false},
		{"Another name for the table", withView, false},
		{"NATS on another server", withTwoNATS, false},
		{"NATS restored from a backup", withBackup, false},
		{"PostgreSQL on another server", withNextPostgreSQL, false},
		{"Switchover to a standby", withStandby, true},
		{"PostgreSQL restored from a backup", withPostgreSQLBackup, true},
		{"Both restored", withPostgreSQLBackup, true},
	} {
		t.Run(section.title, func(t *testing.T) {
			if section.own {
				t.Parallel()
			}
			section.world(t, pg).run(section.title)
		})
	}
}
