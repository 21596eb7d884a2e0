package replication

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const oldestAway = 16 // the oldest major whose subscriptions have origin = none

// island is a database of an outflow with a control table, one of several that replicate to each other.
func island(t *testing.T, srv *pgserver.Server, id int) *database {
	t.Helper()
	d := newDatabase(t, srv)
	d.cfg.Control, d.cfg.Cluster = "public.outflow_control", id
	s := d.setup()
	defer s.Close()
	_, err := s.EnsureTable(within(t))
	must.Succeed(t, err)
	_, err = s.EnsureControl(within(t))
	must.Succeed(t, err)
	_, _, err = s.EnsurePublication(within(t))
	must.Succeed(t, err)
	_, err = s.CreateSlot(within(t))
	must.Succeed(t, err)
	d.Exec("CREATE PUBLICATION replicated FOR TABLE outbox, outflow_control")
	return d
}

// subscribe lets d have what is written in another database of the same server.
func (d *database) subscribe(name string, from *database) {
	d.T.Helper()
	slot := fmt.Sprintf("%s_%s", from.Slot, name)
	from.Exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	d.Exec(fmt.Sprintf("CREATE SUBSCRIPTION %s CONNECTION '%s' PUBLICATION replicated WITH (origin = none, "+
		"copy_data = false, create_slot = false, slot_name = '%s')", name, from.URL, slot))
	d.T.Cleanup(func() {
		d.Exec("ALTER SUBSCRIPTION " + name + " DISABLE")
		eventually(d.T, "the subscription's worker ends", func() bool {
			return d.Text("SELECT count(pid)::text FROM pg_stat_subscription WHERE subname = $1", name) == "0"
		})
		d.Exec("ALTER SUBSCRIPTION " + name + " SET (slot_name = NONE)")
		d.Exec("DROP SUBSCRIPTION " + name)
		d.free(slot)
		from.Exec("SELECT pg_drop_replication_slot($1)", slot)
	})
}

// free waits until nobody reads from a slot.
func (d *database) free(slot string) {
	d.T.Helper()
	eventually(d.T, "the slot is free", func() bool {
		return d.Text("SELECT active::text FROM pg_replication_slots WHERE slot_name = $1", slot) == "false"
	})
}

func (d *database) event(doc string) {
	d.T.Helper()
	d.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ($1, 'ann', 1, '{}')", doc)
}

func (d *database) clusterRow(r relay.ClusterRow) {
	d.T.Helper()
	d.Exec("INSERT INTO outflow_control (outbox, prefix, content) VALUES ('public.outbox', $1, $2)",
		relay.ClusterPrefix, r.Content())
}

// TestARowIsOfTheClusterWhoseSubscriptionBroughtIt: with clusters the own slot brings what others wrote as
// well. Of that only what clusters say to one another is read, each from where it came; its rows, ticks and
// times are no inputs, as where the server leaves all of it out.
func TestARowIsOfTheClusterWhoseSubscriptionBroughtIt(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		first, d, third := island(t, srv, 1), island(t, srv, 2), island(t, srv, 3)
		d.cfg.Clusters = map[int]string{1: "from_1", 3: "from_3"}
		if srv.Installation.Major < oldestAway {
			_, err := d.open().Cluster(within(t))
			f := wantFault(t, err, outbox.Fatal, "subscription")
			if !strings.Contains(f.Message, fmt.Sprintf("PostgreSQL %d", srv.Installation.Major)) {
				t.Error(f)
			}
			return
		}
		d.subscribe("from_1", first)
		d.subscribe("from_3", third)
		hello := relay.ClusterRow{Kind: relay.Hello, By: 1, Hello: 7}
		echo := relay.ClusterRow{Kind: relay.Echo, By: 3, Home: 1, Hello: 7}
		own := relay.ClusterRow{Kind: relay.Echo, By: 2, Home: 1, Hello: 7}
		arrive := func(n int) {
			eventually(t, "the others' rows arrive", func() bool {
				return d.Text("SELECT ((SELECT count(*) FROM outbox) + "+
					"(SELECT count(*) FROM outflow_control))::text") == fmt.Sprint(n)
			})
		}
		d.event("own 1")
		first.event("of 1")
		first.clusterRow(hello)
		first.Exec("INSERT INTO outflow_control (outbox, prefix, content) VALUES ('public.outbox', $1, '')",
			relay.HeartbeatPrefix)
		arrive(4)
		d.clusterRow(own)
		third.event("of 3")
		third.clusterRow(echo)
		arrive(7)
		d.event("own 2")

		all := map[string][]string{} // what is decoded: events and cluster rows, and how many ticks
		for name, islands := range map[string]bool{"with clusters": true, "without": false} {
			cfg := d.config()
			cfg.OwnOnly = true
			if !islands {
				cfg.Clusters = nil
			}
			s, err := Open(within(t), cfg)
			must.Succeed(t, err)
			all[name] = decoded(t, s, d, "own 2")
			s.Close()
			d.free(d.cfg.Slot)
		}
		want := []string{"own 1", hello.Content(), own.Content(), echo.Content(), "own 2"}
		if !slices.Equal(all["with clusters"], want) {
			t.Errorf("with clusters:\n%q\nwant\n%q", all["with clusters"], want)
		}
		if want := []string{"own 1", "own 2"}; !slices.Equal(all["without"], want) {
			t.Errorf("without:\n%q\nwant\n%q", all["without"], want)
		}
	})
}

// decoded reads up to an event of a document, and returns what is an input or a cluster row.
func decoded(t *testing.T, s *Session, d *database, last string) (all []string) {
	t.Helper()
	table, err := s.Table(within(t))
	must.Succeed(t, err)
	c, err := s.Cluster(within(t))
	must.Succeed(t, err)
	m := outboxdb.Mapping
	m.Table, m.OwnOnly, m.Control = "public.outbox", true, d.cfg.Control
	dec := decoder.New(decoder.Config{TableOID: table.OID, Mapping: m, ID: "id", Slot: d.cfg.Slot,
		Control: c.Control, Clusters: c.Clusters})
	must.Succeed(t, s.Start(within(t), 0, false))
	var events []string // of the transaction
	for ctx := within(t); ; {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				t.Fatalf("the stream ended: %v", s.Err())
			}
			for _, m := range b.Messages {
				var r decoder.Result
				if m.Keepalive {
					continue
				}
				must.Succeed(t, dec.Decode(m.Data, &r))
				switch r.Kind {
				case decoder.Event:
					events = append(events, r.Event.Doc)
				case decoder.Commit:
					if all = append(all, events...); r.Commit.Kind == relay.Heartbeat {
						all = append(all, "tick")
					}
					for _, row := range r.ClusterRows {
						all = append(all, row.Content())
					}
					events = nil
				}
			}
			b.Release()
			if slices.Contains(all, last) {
				return all
			}
		case <-ctx.Done():
			t.Fatalf("%q did not come: %q", last, all)
		}
	}
}

// TestEachClusterNeedsASubscriptionOfItsOwn: what does not say whose rows come, or hides some, is refused.
func TestEachClusterNeedsASubscriptionOfItsOwn(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		first, d, third := island(t, srv, 1), island(t, srv, 2), island(t, srv, 3)
		right := map[int]string{1: "from_1", 3: "from_3"}
		if srv.Installation.Major < oldestAway {
			d.cfg.Clusters = right
			_, err := d.open().Publication(within(t), outboxdb.Needed)
			wantFault(t, err, outbox.Fatal, "subscription")
			return
		}
		d.subscribe("from_1", first)
		d.subscribe("from_3", third)
		for _, test := range []struct {
			all     map[int]string
			reading string
			says    string
		}{
			{map[int]string{1: "from_1", 3: "from_1"}, "", "it is that of cluster 1"},
			{map[int]string{1: "from_1", 2: "from_3"}, "", "that is this one"},
			{map[int]string{1: "from_1", 3: "nobody"}, "", `no subscription "nobody"`},
			{map[int]string{1: "from_1"}, "from_3", "is of no cluster"},
		} {
			d.cfg.Clusters, d.cfg.Subscription = test.all, test.reading
			s := d.open()
			_, err := s.Cluster(within(t))
			if f := wantFault(t, err, outbox.Fatal, "subscription"); !strings.Contains(f.Message, test.says) {
				t.Errorf("%v does not say %q", f, test.says)
			}
		}
		d.cfg.Clusters, d.cfg.Subscription = right, ""
		d.cfg.Shard, d.cfg.ShardBy = relay.Shard{Index: 0, Of: 2}, "doc_id"
		_, err := d.open().Cluster(within(t))
		if f := wantFault(t, err, outbox.Fatal, "subscription"); !strings.Contains(f.Message, "shard 0/2") {
			t.Errorf("%v does not say which shard", f)
		}
		d.cfg.Shard, d.cfg.ShardBy = relay.Shard{}, ""
		s := d.open()
		identity := func() relay.PublicationIdentity {
			t.Helper()
			id, err := s.Publication(within(t), outboxdb.Needed)
			must.Succeed(t, err)
			return id
		}
		c, err := s.Cluster(within(t))
		must.Succeed(t, err)
		if len(c.Clusters) != 3 || c.Clusters[""] != 2 || c.Origin != "" {
			t.Errorf("%+v", c)
		}
		before := identity()
		if before.Hidden != nil || len(strings.Fields(before.Subscription)) != 2 {
			t.Errorf("%+v", before)
		}
		d.Exec("ALTER SUBSCRIPTION from_3 SET (origin = any)")
		if now := identity(); now.Hidden == nil || !strings.Contains(now.Hidden.Message, "from_3") {
			t.Errorf("origin = any: %+v", now)
		}
		d.Exec("ALTER SUBSCRIPTION from_3 SET (origin = none)")
		third.Exec("ALTER PUBLICATION replicated DROP TABLE outflow_control")
		d.Exec("ALTER SUBSCRIPTION from_3 REFRESH PUBLICATION")
		if now := identity(); now.Hidden == nil || !strings.Contains(now.Hidden.Message, "outflow_control") {
			t.Errorf("without what the third says: %+v", now)
		}
		third.Exec("ALTER PUBLICATION replicated ADD TABLE outflow_control")
		d.Exec("ALTER SUBSCRIPTION from_3 REFRESH PUBLICATION WITH (copy_data = false)")
		if now := identity(); now.Hidden != nil || now.Subscription == before.Subscription {
			t.Errorf("out of it and back again: %+v, before %+v", now, before)
		}
	})
}
