package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// awayMajor is the first major on which a subscription says which origins it brings.
const awayMajor = 160000

// Subscription is one that brings rows of the outbox into this database.
type Subscription struct {
	Name    string  `json:"name"`
	Origin  string  `json:"origin"`
	Skip    string  `json:"skip"` // the transaction that is to be skipped; 0/0: none
	Enabled bool    `json:"enabled"`
	Running bool    `json:"running"` // its worker
	Seconds float64 `json:"seconds"` // that the newest message was on its way
	Errors  int64   `json:"errors"`  // of applying, since its statistics were reset
	OID     uint32  `json:"oid"`
	Control bool    `json:"control"` // it brings the control table as well
	// it is disabled by the first error
	DisableOnError bool `json:"disable_on_error"`
}

func (f *Facts) inCluster() bool {
	return f.Config.Cluster.ID > 0 && f.Postgres != nil && f.Config.Source.Rows()
}

func (f *Facts) knowsOrigins() bool { return f.inCluster() && f.Postgres.Number >= awayMajor }

// readSubscriptions reads those that have the outbox, also where something else of the configuration can't be
// used. Below 16 they don't say what has to be known.
func (r *pgReader) readSubscriptions(ctx context.Context) error {
	if !r.f.knowsOrigins() {
		return nil
	}
	var oids [2]uint32 // of the tables that there are
	err := r.reading(ctx, func(q catalog.Querier) error {
		for i, name := range []string{r.f.Config.Table, r.f.Config.Cluster.Control} {
			if name == "" {
				continue
			}
			t, err := catalog.ReadTable(ctx, q, name)
			if f := outbox.FaultOf(err); err != nil && (f == nil || f.Code != "table_missing") {
				return err
			}
			oids[i] = t.OID
		}
		return nil
	})
	if err != nil {
		return err
	}
	return query(ctx, r.conn, &r.f.Subscriptions, many(`SELECT s.subname AS name, s.suborigin AS origin,
			s.subskiplsn::text AS skip, s.subenabled AS enabled, w.pid IS NOT NULL AS running,
			coalesce(extract(epoch FROM w.last_msg_receipt_time - w.last_msg_send_time), 0)::float8 AS seconds,
			coalesce(t.apply_error_count, 0) AS errors, s.oid::bigint AS oid,
			s.subdisableonerr AS disable_on_error, EXISTS (SELECT FROM pg_subscription_rel c
				WHERE c.srsubid = s.oid AND c.srrelid = $2) AS control
		FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid AND d.datname = current_database()
		JOIN pg_subscription_rel r ON r.srsubid = s.oid AND r.srrelid = $1
		LEFT JOIN pg_stat_subscription w ON w.subid = s.oid AND w.relid IS NULL AND w.leader_pid IS NULL
		LEFT JOIN pg_stat_subscription_stats t ON t.subid = s.oid ORDER BY 1`), oids[0], oids[1])
}

var clusterChecks = []check{
	{name: "cluster.mesh", needs: []source{srcSubscriptions}, about: (*Facts).knowsOrigins,
		run: func(f *Facts, r *reporter) {
			n, table, cluster := len(f.Subscriptions), f.Config.Table, f.Config.Cluster
			others := cluster.Others()
			for _, of := range slices.Sorted(maps.Keys(others)) {
				if !slices.ContainsFunc(f.Subscriptions, func(s Subscription) bool {
					return s.Name == others[of]
				}) {
					r.find("cluster_mesh", "no subscription %s brings table %s of cluster %d, as "+
						"cluster.subscriptions says", quote(others[of]), table, of)
				}
			}
			if want := cluster.Count - 1; want > 0 && n != want {
				r.find("cluster_mesh", "%d subscriptions bring table %s, of %d clusters", n, table, want+1)
			}
			for _, s := range f.Subscriptions {
				if s.Origin != "none" {
					r.find("cluster_mesh", "subscription %s has origin = %s", quote(s.Name), s.Origin)
				}
				if !s.Control && (cluster.Islands() || cluster.Shared()) {
					r.find("cluster_mesh", "subscription %s does not bring control table %s", quote(s.Name),
						cluster.Control)
				}
			}
			r.ok("%d subscriptions bring table %s", n, table)
		}},
	{name: "cluster.skips", needs: []source{srcSubscriptions}, about: (*Facts).knowsOrigins,
		run: func(f *Facts, r *reporter) {
			for _, s := range f.Subscriptions {
				if s.Skip != "0/0" {
					r.find("cluster_skips", "subscription %s is to skip the transaction that ends at %s",
						quote(s.Name), s.Skip)
				}
			}
			r.ok("no subscription is to skip a transaction")
		}},
	{name: "cluster.lag", needs: []source{srcSubscriptions}, about: (*Facts).knowsOrigins,
		run: func(f *Facts, r *reporter) {
			// With less room a cluster that is late looks like one that is silent: models/islands_model.py.
			limit := f.Config.Cluster.MaximumDelay / 4
			for _, s := range f.Subscriptions {
				lag := time.Duration(s.Seconds * float64(time.Second))
				switch {
				case !s.Enabled:
					r.find("cluster_lag", "subscription %s is disabled", quote(s.Name))
				case !s.Running:
					r.find("cluster_lag", "nothing applies subscription %s: %d errors so far", quote(s.Name),
						s.Errors)
				case limit > 0 && lag > limit:
					r.find("cluster_lag", "the newest message of subscription %s took %v to arrive, and a "+
						"fourth of cluster.maximum_delay is %v", quote(s.Name), lag.Round(time.Millisecond),
						limit)
				}
			}
			r.ok("%d subscriptions are applied", len(f.Subscriptions))
		}},
	{name: "cluster.errors", needs: []source{srcSubscriptions}, about: (*Facts).knowsOrigins,
		run: func(f *Facts, r *reporter) {
			for _, s := range f.Subscriptions {
				if s.Errors > 0 {
					r.find("cluster_errors", "subscription %s has failed %s to apply a transaction",
						quote(s.Name), units.Of(s.Errors, "time")).Command =
						fmt.Sprintf("SELECT pg_stat_reset_subscription_stats(%d)", s.OID)
				}
				if s.DisableOnError {
					r.findAs(finding.Warning, "cluster_errors", "subscription %s has disable_on_error: the "+
						"first error stops it for good", quote(s.Name)).Command =
						"ALTER SUBSCRIPTION " + postgres.Quote(s.Name) + " SET (disable_on_error = false)"
				}
			}
			r.ok("none")
		}},
	{name: "cluster.slots", needs: []source{srcPostgres, srcSlots}, about: (*Facts).inCluster,
		run: func(f *Facts, r *reporter) {
			n := 0
			for _, s := range f.Slots {
				if s.Plugin != "pgoutput" || s.Database != databaseOf(f.Postgres.Where) || s.Temporary ||
					s.Name == f.Config.Slot || strings.HasPrefix(s.Holder, postgres.Name) {
					continue
				}
				n++
				drop := "SELECT pg_drop_replication_slot(" + postgres.Literal(s.Name) + ")"
				left := int64(-1) // not limited
				if s.Safe != nil {
					left = max(*s.Safe, 0)
				}
				switch {
				case s.WALStatus == "lost" || s.Invalidation != "":
					r.find("cluster_slot_lost", "slot %s is lost: PostgreSQL has removed WAL that it needed",
						s.Name).Command = drop
				case left >= 0 && left*3 < s.Retained:
					r.find("cluster_slot", "slot %s keeps %s, and is lost after another %s of WAL", s.Name,
						size(s.Retained), size(left))
				case left < 0 && s.Retained > muchWAL:
					r.find("cluster_slot", "slot %s keeps %s of WAL, and nothing limits it", s.Name,
						size(s.Retained))
				}
			}
			r.ok("%d keep WAL for others", n)
		}},
	{name: "cluster.deletes", needs: []source{srcPublication},
		about: func(f *Facts) bool { return f.Config.Cluster.Control != "" },
		run: func(f *Facts, r *reporter) {
			for _, name := range f.Publication.NoDeletes {
				r.find("cluster_deletes", "publication %s has control table %s and publishes no deletes",
					quote(name), f.Config.Cluster.Control).Command = "ALTER PUBLICATION " +
					postgres.Quote(name) + " SET (publish = 'insert, update, delete, truncate')"
			}
			r.ok("what replaces a row of the control table is published whole")
		}},
	{name: "cluster.agreement", needs: []source{srcProcess},
		about: func(f *Facts) bool {
			return f.Config.Cluster.Islands() && f.Process.Pipeline.Agreed != nil
		},
		run: func(f *Facts, r *reporter) {
			switch a, cluster := f.Process.Pipeline.Agreed, f.Config.Cluster; {
			case len(a.WaitsFor) > 0:
				r.find("cluster_waits", "cluster %d waits for the answers of cluster %s to its hello %d",
					cluster.ID, strings.Trim(fmt.Sprint(a.WaitsFor), "[]"), a.Hello)
			case a.Publishes:
				r.find("cluster_silent", "cluster %d publishes for the home of subscription %s, which is "+
					"silent, or can't publish", cluster.ID, quote(cluster.Subscription))
			case a.Yielded:
				r.find("cluster_silent", "the home leaves its events to the other clusters: its NATS can't "+
					"be reached or takes no message, or a cluster did not answer it")
			case a.Hello == 0:
				r.ok("the home has said no hello yet: nobody publishes for it")
			default:
				r.ok("the home's newest hello is %d", a.Hello)
			}
		}},
	{name: "cluster.home", needs: []source{srcRecord},
		about: func(f *Facts) bool { return f.Config.Cluster.ID > 0 && f.newest() != nil },
		run: func(f *Facts, r *reporter) {
			said := f.newest().Said
			heard := "no watermark is known"
			if !said.At.IsZero() {
				heard = fmt.Sprintf("the newest watermark is %v old, and says that the home has confirmed %v",
					units.Duration(max(f.Now.Sub(said.At), 0)), said.LSN)
			}
			if k := f.Readings.Record.Kept(f.Config.Sink.DurableAfter, f.Now); k.Long(f.Now) {
				r.find("cluster_home", "slot %s has kept WAL for the home for %v, %s by now; %s",
					f.Config.Slot, units.Duration(f.Now.Sub(k.Since)), size(int64(k.Bytes)), heard)
			}
			r.ok("%s", heard)
		}},
}
