package catalog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// minAwayVersion is the oldest server on which a home's rows are read: subscriptions have origin = none from
// there on.
const minAwayVersion = 160000

// Cluster is what the catalog says of Config.Control and the subscriptions; zero where there is none of them.
type Cluster struct {
	Control uint32 // OID of the control table
	Origin  string // the replication origin of Config.Subscription's transactions
	// Clusters says of which cluster a transaction is, by its replication origin's name; one without is this
	// cluster's. nil without Config.Clusters.
	Clusters map[string]int
}

// ReadCluster reads it. What does not exist is a fault.
func ReadCluster(ctx context.Context, q Querier, version int, cfg Config) (c Cluster, err error) {
	if cfg.Control != "" {
		t, err := readControl(ctx, q, cfg)
		if err != nil {
			return c, err
		}
		c.Control = t.OID
	}
	if cfg.Subscription != "" {
		s, err := readSubscription(ctx, q, version, cfg)
		if err != nil {
			return c, err
		}
		c.Origin = s.origin()
	}
	if len(cfg.Clusters) == 0 {
		return c, nil
	}
	all, err := readClusters(ctx, q, version, cfg)
	if err != nil {
		return c, err
	}
	c.Clusters = map[string]int{"": cfg.Cluster}
	for _, s := range all {
		c.Clusters[s.origin()] = s.cluster
	}
	return c, nil
}

// readClusters reads the subscriptions of Config.Clusters, in the order of the clusters' numbers.
func readClusters(ctx context.Context, q Querier, version int, cfg Config) (all []subscription, err error) {
	if !cfg.Shard.Whole() {
		return nil, postgres.Fatal(nil, "subscription", "Publish the table whole where clusters publish for "+
			"one another", "shard %v can't agree with other clusters on who publishes what: what they say "+
			"names an outbox, and no slot of it", cfg.Shard)
	}
	of := map[string]int{}
	for _, n := range slices.Sorted(maps.Keys(cfg.Clusters)) {
		name := cfg.Clusters[n]
		const hint = "Name one subscription for each other cluster"
		switch other, twice := of[name]; {
		case n == cfg.Cluster:
			return nil, postgres.Fatal(nil, "subscription", hint, "subscription %q can't be that of cluster "+
				"%d: that is this one", name, n)
		case twice:
			return nil, postgres.Fatal(nil, "subscription", hint, "subscription %q can't be that of cluster "+
				"%d: it is that of cluster %d", name, n, other)
		}
		of[name] = n
		c := cfg
		c.Subscription = name
		s, err := readSubscription(ctx, q, version, c)
		if err != nil {
			return nil, err
		}
		s.cluster = n
		all = append(all, s)
	}
	if _, known := of[cfg.Subscription]; cfg.Subscription != "" && !known {
		return nil, postgres.Fatal(nil, "subscription", "Name it among those of the other clusters",
			"subscription %q is of no cluster: nobody can tell whose events it brings", cfg.Subscription)
	}
	return all, nil
}

// readControl reads the control table, and refuses one whose rows can't be read as such.
func readControl(ctx context.Context, q Querier, cfg Config) (Table, error) {
	t, err := ReadTable(ctx, q, cfg.Control)
	if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" {
		return t, postgres.Fatal(nil, "control_table", "Run `outflow init`, which makes it, or set "+
			"cluster.control to its name", "control table %s does not exist", cfg.Control)
	}
	if err != nil {
		return t, err
	}
	for _, name := range relay.ControlColumns {
		if c, ok := t.Column(name); !ok || c.TypeName != "text" {
			return t, badControl(cfg, fmt.Sprintf("column %q of type text", name))
		}
	}
	// A row takes the place of the one before it, which subscribers find by it too.
	var key bool
	err = q.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_index i
			JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		WHERE i.indrelid = $1 AND i.indisprimary AND i.indimmediate AND i.indnkeyatts = 1
			AND a.attname = 'id' AND a.atttypid = 'uuid'::regtype AND a.atthasdef)`, t.OID).Scan(&key)
	if err != nil {
		return t, fmt.Errorf("read the key of %s: %w", cfg.Control, err)
	}
	if !key {
		return t, badControl(cfg, `primary key "id" of type uuid with a default`)
	}
	return t, nil
}

func badControl(cfg Config, lacks string) error {
	return postgres.Fatal(nil, "control_table", "Set cluster.control to a table that is not there yet, and "+
		"run `outflow init`: it makes one", "table %s, which cluster.control names, has no %s", cfg.Control,
		lacks)
}

// createControl makes the control table. The key is for subscribers, to find the row that is deleted.
func createControl(table pgx.Identifier) string {
	return fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (
  "id" uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  "outbox" text NOT NULL,
  "prefix" text NOT NULL,
  "content" text NOT NULL
)`, table.Sanitize())
}

// subscription is a row of pg_subscription, and what it says of the two tables.
type subscription struct {
	name             string
	cluster          int // whose rows it brings, where clusters publish for one another
	oid              uint32
	filter, twoPhase string
	skip             string // the transaction that is to be skipped; 0/0: none
	tables           []subscribed
}

// subscribed is a row of pg_subscription_rel; state is "" where there is none.
type subscribed struct {
	name, state, xmin string
}

func (s *subscription) origin() string { return fmt.Sprintf("pg_%d", s.oid) }

func readSubscription(ctx context.Context, q Querier, version int, cfg Config) (s subscription, err error) {
	s.name = cfg.Subscription
	if version < minAwayVersion {
		return s, postgres.Fatal(nil, "subscription", "Use PostgreSQL 16 or newer for all clusters",
			"the server is PostgreSQL %d: subscriptions have origin = none from 16 on, and without it a "+
				"transaction may have gone through another cluster", version/10000)
	}
	err = q.QueryRow(ctx, `SELECT s.oid, s.suborigin, s.subskiplsn::text, s.subtwophasestate::text
		FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
		WHERE d.datname = current_database() AND s.subname = $1`, cfg.Subscription).Scan(&s.oid, &s.filter,
		&s.skip, &s.twoPhase)
	if errors.Is(err, pgx.ErrNoRows) {
		return s, postgres.Fatal(nil, "subscription", "Set cluster.subscription to the one that brings "+
			"the home's rows. If it was dropped, another one makes another stream (docs/clusters.md)",
			"this database has no subscription %q", cfg.Subscription)
	}
	if err != nil {
		return s, fmt.Errorf("read subscription %s: %w", cfg.Subscription, err)
	}
	for _, name := range []string{cfg.Table, cfg.Control} {
		t, err := ReadTable(ctx, q, name)
		if err != nil {
			return s, err
		}
		r := subscribed{name: t.Schema + "." + t.Name}
		err = q.QueryRow(ctx, `SELECT srsubstate::text, xmin::text FROM pg_subscription_rel
			WHERE srsubid = $1 AND srrelid = $2`, s.oid, t.OID).Scan(&r.state, &r.xmin)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return s, fmt.Errorf("read subscription %s: %w", cfg.Subscription, err)
		}
		s.tables = append(s.tables, r)
	}
	return s, nil
}

// check says why rows of the home may be missing among what the subscription brings; nil if none are.
func (s *subscription) check() *outbox.Fault {
	fault := func(hint, format string, args ...any) *outbox.Fault {
		return postgres.Fatal(nil, "subscription", hint, "subscription %q %s", s.name, fmt.Sprintf(format,
			args...))
	}
	alter := "ALTER SUBSCRIPTION " + postgres.Quote(s.name)
	switch {
	case s.filter != "none":
		return fault(alter+" SET (origin = none), with a subscription from each cluster to each other one",
			"has origin = %s: it brings transactions of other clusters as well, with positions that are "+
				"not their homes'", s.filter)
	case s.twoPhase != "d":
		return fault("Make it without two_phase: what is prepared then comes when it is committed",
			"has two_phase set")
	case s.skip != "0/0":
		return fault(alter+" SKIP (lsn = NONE), and mend the conflict instead",
			"is to skip the transaction that ends at %s: its rows would be missing", s.skip)
	}
	for _, t := range s.tables {
		switch t.state {
		case "r":
		case "":
			return fault("Add the table to the publication at home, then "+alter+
				" REFRESH PUBLICATION WITH (copy_data = false)", "does not bring table %s", t.name)
		default:
			return fault("Wait until it is copied", "still copies table %s (state %q): what is copied has "+
				"no position at home", t.name, t.state)
		}
	}
	return nil
}

// identity changes with each subscription, and whenever one of the tables is taken out of it and put back.
func (s *subscription) identity() string {
	id := s.origin()
	for _, t := range s.tables {
		id += "," + t.xmin
	}
	return id
}

// checkCluster checks that what is published has the control table's rows, and that the subscription brings
// all of the home's. What hides rows of the home is Hidden.
func checkCluster(ctx context.Context, q Querier, version int, cfg Config,
	id *relay.PublicationIdentity) error {
	if cfg.Control != "" {
		t, err := readControl(ctx, q, cfg)
		if err != nil {
			return err
		}
		p, err := readPublication(ctx, q, version, Config{Publication: cfg.Publication}, t)
		if err != nil {
			return err
		}
		control, err := p.check(t, relay.ControlColumns[:])
		if err != nil {
			return err
		}
		if control.Hidden != nil && id.Hidden == nil {
			id.Hidden = control.Hidden
		}
	}
	all, err := subscriptions(ctx, q, version, cfg)
	if err != nil {
		return err
	}
	var ids []string
	for _, s := range all {
		ids = append(ids, s.identity())
		if f := s.check(); f != nil && id.Hidden == nil {
			id.Hidden = f
		}
	}
	id.Subscription = strings.Join(ids, " ")
	return nil
}

// subscriptions are those without which rows would be missing: that of the home, or those of all clusters,
// because what they say to one another comes by them.
func subscriptions(ctx context.Context, q Querier, version int, cfg Config) ([]subscription, error) {
	if len(cfg.Clusters) > 0 {
		return readClusters(ctx, q, version, cfg)
	}
	if cfg.Subscription == "" {
		return nil, nil
	}
	s, err := readSubscription(ctx, q, version, cfg)
	return []subscription{s}, err
}

// BroughtBy returns the names of the subscriptions that bring rows of other servers into a table, or into its
// partitions.
func BroughtBy(ctx context.Context, q Querier, table uint32) (names []string, err error) {
	err = q.QueryRow(ctx, `SELECT coalesce(array_agg(s.subname::text ORDER BY s.subname), '{}')
		FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid AND d.datname = current_database()
		WHERE EXISTS (SELECT FROM pg_subscription_rel r WHERE r.srsubid = s.oid AND (r.srrelid = $1
			OR r.srrelid IN (SELECT relid FROM pg_partition_tree($1))))`, table).Scan(&names)
	if err != nil {
		return nil, fmt.Errorf("read which subscriptions bring rows of the table: %w", err)
	}
	return names, nil
}

// Received is a position of the home up to where Config.Subscription has brought everything, or more: what
// was applied here before the call lies at or below it. ok is false while the subscription has received
// nothing since it was started.
func (s *Setup) Received(ctx context.Context) (lsn outbox.LSN, ok bool, err error) {
	sub, err := readSubscription(ctx, s.conn, s.version, s.cfg.Config)
	if err != nil {
		return 0, false, err
	}
	// What the worker has received says where a new subscription begins; where it begins again after a
	// restart may lie below what was applied.
	var received string
	err = s.conn.QueryRow(ctx, `SELECT greatest(received_lsn, pg_replication_origin_progress($2, false))::text
		FROM pg_stat_subscription WHERE subid = $1 AND relid IS NULL AND leader_pid IS NULL
			AND received_lsn IS NOT NULL`, sub.oid, sub.origin()).Scan(&received)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, s.explain("read how far subscription "+s.cfg.Subscription+" is",
			"EXECUTE on pg_replication_origin_progress(text, boolean)", err)
	}
	lsn, err = outbox.ParseLSN(received)
	return lsn, err == nil, err
}
