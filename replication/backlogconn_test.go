package replication

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/pgtest"
)

// By default a connection is first tried with TLS, and a server without it is dialled a second time.
func TestBacklogBySQLWhereTLSIsRefused(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.insert(ops(t, 100))
	d.cfg.URL = strings.Replace(d.url, "sslmode=disable", "sslmode=prefer", 1)
	if d.cfg.URL == d.url {
		t.Fatal("the URL says nothing of TLS: ", d.url)
	}
	d.cfg.CatchUp = bySQL()
	s := d.start(d.confirmed())
	if s.streaming().backlog == nil {
		t.Fatal("the backlog is streamed")
	}
	if got := read(t, s, inserts(100)); got.kinds['I'] != 100 {
		t.Errorf("%d inserts", got.kinds['I'])
	}
}

// A connection that can't be used for the backlog does not stay open.
func TestBacklogOfAnotherServer(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.insert(ops(t, 100))
	d.cfg.CatchUp = bySQL()
	s := d.open()
	s.started = "some other day"
	if err := s.Start(within(t), d.confirmed(), false); err != nil {
		t.Fatal(err)
	}
	if s.streaming().backlog != nil {
		t.Fatal("it is read by SQL")
	}
	eventually(t, "the session has its two connections alone", func() bool {
		return d.text("SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type IN ('client backend', 'walsender')") == "2"
	})
}
