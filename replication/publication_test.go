package replication

import (
	"errors"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Up to PostgreSQL 17 this is an error in the stream, from 18 a notice and silence.
func TestAMissingPublicationEndsTheStream(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		s := d.start(0)
		edits := outboxdb.Ops(t, 30)
		d.Insert(edits[:10])
		read(t, s, inserts(10))
		d.Exec("DROP PUBLICATION outflow")
		d.Insert(edits[10:20])
		wantFault(t, end(t, s), outbox.Fatal, "publication_missing")
		s.Close()
		// And again, when the stream begins there.
		eventually(t, "the slot is free", func() bool {
			s = d.open()
			err := s.Start(within(t), 0, true)
			if err != nil {
				s.Close()
			}
			return err == nil
		})
		wantFault(t, end(t, s), outbox.Fatal, "publication_missing")
	})
}

// The role that runs the service may log in and replicate: it has no right on the table.
func TestTheRoleNeedsNoRightOnTheTable(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		role := strings.Replace(d.cfg.Slot, "outflow_", "role_", 1)
		d.Exec("CREATE ROLE " + role + " LOGIN REPLICATION")
		t.Cleanup(func() { d.Exec("DROP ROLE " + role) })
		d.cfg.URL = outboxdb.WithUser(t, d.URL, role)
		s := d.open()
		if _, err := s.Server(within(t)); err != nil {
			t.Error(err)
		}
		if _, err := s.Publication(within(t), outboxdb.Needed); err != nil {
			t.Error(err)
		}
		must.Succeed(t, s.Start(within(t), 0, true))
		w := NewWriter(d.config())
		defer w.Close()
		if err := w.Heartbeat(within(t)); err != nil {
			t.Error(err)
		}
		d.Insert(outboxdb.Ops(t, 3))
		read(t, s, func(g *seen) bool { return g.kinds['I'] == 3 && g.kinds['M'] == 1 })
		if state, err := s.Server(within(t)); err != nil || state.History.Timeline != 1 {
			t.Error(state, err)
		}
		if state, err := s.Slot(within(t)); err != nil || !state.Active {
			t.Error(state, err)
		}
		if err := w.Check(within(t), relay.ServerState{SystemID: "another", Database: "x"}); err == nil {
			t.Error("another system was taken for this one")
		}
		d.Exec("ALTER ROLE " + role + " NOREPLICATION")
		_, err := Open(within(t), d.config())
		f := wantFault(t, err, outbox.Fatal, "no_replication_right")
		if errors.Unwrap(f) == nil || postgres.SQLState(err) == "" {
			t.Errorf("no cause in %v", err)
		}
		s.Close()
	})
}
