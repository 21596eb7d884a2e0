package plan

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// interval is between two looks at the counters.
const interval = time.Second

// reader reads. One goroutine uses it.
type reader struct {
	cfg    config.Config
	o      Options
	conn   *pgx.Conn
	nats   *sink.Conn // nil: it can't be reached
	js     jetstream.JetStream
	layout *wiring.Layout // nil: there is no table
	m      Measured
}

// Read measures. Without PostgreSQL it is an error; without NATS or the table less is measured.
func Read(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (Measured, error) {
	r := &reader{cfg: cfg, o: o}
	defer r.close()
	if err := r.connect(ctx, log); err != nil {
		return r.m, err
	}
	for _, step := range []func(context.Context) error{r.settings, r.sample, r.rates, r.stream} {
		if err := step(ctx); err != nil {
			return r.m, err
		}
	}
	return r.m, nil
}

func (r *reader) close() {
	if r.conn != nil {
		postgres.Close(r.conn)
	}
	if r.nats != nil {
		r.nats.Close()
	}
}

func (r *reader) connect(ctx context.Context, log *slog.Logger) (err error) {
	connected := wiring.WaitPostgres(ctx, r.cfg)
	r.conn, err = postgres.Connect(ctx, r.cfg.Postgres.URL)
	connected()
	if err != nil {
		return err
	}
	sc, err := wiring.Broker(r.cfg, log)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if r.nats, err = wiring.Connect(short, r.cfg, sc); err == nil {
		r.js, err = r.nats.API().JetStream()
	}
	if ctx.Err() == nil && err != nil {
		r.m.NATS, err = err.Error(), nil
		r.o.Progress("NATS says nothing, so the stream is planned by the table: %s", r.m.NATS)
	}
	return err
}

func (r *reader) settings(ctx context.Context) error {
	var walSeconds float64
	m := &r.m
	err := r.conn.QueryRow(ctx, `SELECT
			(SELECT CASE WHEN setting::bigint < 0 THEN -1 ELSE setting::bigint << 20 END FROM pg_settings
				WHERE name = 'max_slot_wal_keep_size'),
			(SELECT setting::bigint << 20 FROM pg_settings WHERE name = 'max_wal_size'),
			(SELECT count(*) FROM pg_stat_replication), current_setting('max_wal_senders')::int,
			(SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
			(SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database), current_setting('max_connections')::int,
			(SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, $2)
				AND pid <> pg_backend_pid()),
			EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1),
			wal_bytes::float8, coalesce(extract(epoch FROM clock_timestamp() - stats_reset), 0)::float8
		FROM pg_stat_wal`, r.cfg.Slot, postgres.NamePrefix(r.cfg.Slot)).Scan(&m.KeepSize, &m.MaxWAL,
		&m.Senders, &m.MaxSenders, &m.Slots, &m.MaxSlots, &m.Connections, &m.MaxConns, &m.Own, &m.SlotThere,
		&m.WALAverage, &walSeconds)
	if err != nil {
		return fmt.Errorf("read the server's settings: %w", err)
	}
	if walSeconds < 60 { // too short to be an average of anything
		m.WALAverage = 0
		return nil
	}
	m.WALAverage /= walSeconds
	m.WALSince = time.Duration(walSeconds * float64(time.Second))
	return nil
}

func (r *reader) sample(ctx context.Context) error {
	if !r.cfg.Source.Rows() {
		return nil
	}
	pg, err := wiring.OpenSetup(ctx, r.cfg, wiring.Setup(r.cfg))
	if err != nil {
		return err
	}
	defer pg.Close()
	r.layout, err = wiring.Apply(ctx, r.cfg, pg)
	if f := outbox.FaultOf(err); f != nil && f.Code == "table_missing" {
		r.layout = nil
		return nil // init makes it
	}
	if err != nil {
		return err
	}
	// as of the last VACUUM or ANALYZE: pg_total_relation_size waits for whoever has locked a partition
	err = r.conn.QueryRow(ctx, `WITH RECURSIVE tree AS (SELECT $1::oid AS relid, 0 AS depth
			UNION ALL SELECT i.inhrelid, depth + 1 FROM tree t JOIN pg_inherits i ON i.inhparent = t.relid),
		parts AS (SELECT c.*, depth FROM tree JOIN pg_class c ON c.oid = relid AND c.relkind = 'r')
		SELECT (SELECT coalesce(sum(f.relpages), 0) * current_setting('block_size')::bigint FROM pg_class f
				WHERE f.oid IN (SELECT oid FROM parts UNION ALL SELECT reltoastrelid FROM parts
					UNION ALL SELECT x.indexrelid FROM pg_index x JOIN parts ON parts.oid = x.indrelid)),
			coalesce(sum(greatest(reltuples, 0)), 0)::float8, count(*) FILTER (WHERE depth > 0)
		FROM parts`, r.layout.Table.OID).Scan(
		&r.m.TableBytes, &r.m.TableRows, &r.m.Partitions)
	if err != nil {
		return fmt.Errorf("read the size of the table: %w", err)
	}
	s, err := pg.SampleSizes(ctx, r.layout.Table, r.layout.Mapping)
	r.m.SampledRows, r.m.MeanRow, r.m.LargestRow = s.Rows, s.Mean, s.Largest
	return err
}

// counters are read at the beginning and at the end, and between for progress.
type counters struct {
	at       time.Time
	wal      int64
	inserted int64
	last     uint64
}

func (r *reader) counters(ctx context.Context) (c counters, err error) {
	table := uint32(0)
	if r.layout != nil {
		table = r.layout.Table.OID
	}
	// The tree is read from pg_inherits: pg_partition_tree waits for whoever has locked a partition.
	err = r.conn.QueryRow(ctx, `WITH RECURSIVE tree AS (SELECT $1::oid AS relid
			UNION SELECT i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.relid)
		SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END - '0/0',
			coalesce((SELECT sum(pg_stat_get_tuples_inserted(relid)) FROM tree), 0)`, table).
		Scan(&c.wal, &c.inserted)
	if err != nil {
		return c, fmt.Errorf("read the end of WAL: %w", err)
	}
	c.at = time.Now()
	if r.nats == nil {
		return c, nil
	}
	st, err := r.nats.Tail(ctx)
	c.last = st.LastSeq
	if err != nil && ctx.Err() == nil {
		err = nil // it moves while it is read: the end counts
	}
	return c, err
}

func (r *reader) rates(ctx context.Context) error {
	first, err := r.counters(ctx)
	if err != nil {
		return err
	}
	r.o.Progress("measuring for %v (--measure)", r.o.Measure)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	defer progress.Until(ctx, "measuring how much is written", time.Now().Add(r.o.Measure), "left").End()
	end := time.NewTimer(r.o.Measure)
	defer end.Stop()
	for done := false; !done; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-end.C:
			done = true
		case <-tick.C:
		}
		c, err := r.counters(ctx)
		if err != nil {
			return err
		}
		m := &r.m
		m.Seconds = c.at.Sub(first.at).Seconds()
		m.WALBytes, m.Inserted = float64(c.wal-first.wal), float64(c.inserted-first.inserted)
		if c.last >= first.last && first.last > 0 {
			m.Published = float64(c.last - first.last)
		}
		if !done { // the figures follow
			r.o.Progress("%.0f of %.0f s: %s of WAL, %.0f rows", m.Seconds, r.o.Measure.Seconds(),
				units.Size(bytes(m.WALBytes)), m.Inserted)
		}
	}
	return nil
}

func (r *reader) stream(ctx context.Context) error {
	if r.js == nil {
		return nil
	}
	s, err := r.js.Stream(ctx, r.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stream %s: %w", r.cfg.Stream, err)
	}
	m, info := &r.m, s.CachedInfo()
	m.Stream, m.Messages, m.StreamBytes = true, info.State.Msgs, info.State.Bytes
	m.MaxBytes, m.Replicas, m.Consumers = info.Config.MaxBytes, info.Config.Replicas, info.State.Consumers
	if took := info.State.LastTime.Sub(info.State.FirstTime); took > time.Minute && m.Messages > 1 {
		m.StreamSeconds = took.Seconds()
		m.StreamMessages = float64(info.State.LastSeq - info.State.FirstSeq)
	}
	b, err := r.js.Stream(ctx, "KV_"+checkpoint.Bucket(r.cfg.Stream))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err == nil {
		m.Bucket = b.CachedInfo().State.Bytes
	}
	return err
}
