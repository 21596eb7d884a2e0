package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication/catalog"
)

var (
	now     = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	created = now.Add(-24 * time.Hour)
)

// healthy are facts in which nothing is wrong, and nothing is missing that a check is about.
func healthy(t *testing.T) *Facts {
	t.Helper()
	cfg, err := config.Load(config.Args{"nats.creds": "/secret/creds", "source": "both"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Postgres.URL, cfg.Postgres.WriteURL = "postgres://db1/app", "postgres://db1/app"
	cfg.Reorder.Mode = config.ModeGap
	cfg.Cluster = config.Cluster{ID: 1, Count: 2, MaximumDelay: 10 * time.Second,
		Control: "public.outflow_control"}
	text := func(name string, n int16) catalog.Column {
		return catalog.Column{Name: name, Number: n, TypeOID: 25, TypeName: "text", NotNull: true,
			Category: "S"}
	}
	layout, err := wiring.ApplyTo(cfg, catalog.Table{OID: 7, Schema: "public", Name: "outbox",
		Columns: []catalog.Column{text("doc_id", 1), text("actor_id", 2),
			{Name: "counter", Number: 3, TypeOID: 20,
				NotNull: true}, text("seq_key", 4), text("payload", 5)}})
	if err != nil {
		t.Fatal(err)
	}
	lsn := outbox.LSN(1000)
	link := Link{TLS: true, Verified: true,
		Certificates: []Certificate{{"a certificate", now.Add(90 * 24 * time.Hour)}}}
	published := relay.PublicationIdentity{OID: 1, Xmin: 2, RelOID: 3, RelXmin: 4, TableOID: 7}
	ours := Slot{Name: cfg.Slot, Plugin: "pgoutput", Database: "app", Active: true, PID: 11,
		Holder: "outflow", WALStatus: "reserved", Safe: ptr[int64](80 << 30),
		Retained: 1 << 20, Failover: true}
	f := &Facts{
		Writer: Writer{Where: "db1:6432/app"},
		Config: cfg, Layout: layout, Now: now, missing: map[source]missing{},
		Postgres: &Server{Where: "db1:5432/app", RoundTrip: time.Millisecond, Link: link, Number: 170005,
			Version: "17.5", Role: "outflow", Stats: true},
		Identity: relay.ServerState{SystemID: "99", Database: "app", Version: 170005, WALEnd: 2000,
			History: relay.History{Timeline: 1}},
		Settings: map[string]string{"wal_level": "logical", "max_replication_slots": "10",
			"max_wal_senders": "10",
			"max_connections": "100", "superuser_reserved_connections": "3",
			"max_slot_wal_keep_size":        "102400",
			"idle_replication_slot_timeout": "0", "synchronized_standby_slots": "db2",
			"logical_decoding_work_mem": "65536"},
		Slots: []Slot{ours, {Name: "db2", Active: true}, {Name: "to_2", Plugin: "pgoutput",
			Database: "app", Active: true, Holder: "from_1", WALStatus: "reserved",
			Safe: ptr[int64](80 << 30), Retained: 1 << 20}},
		Stats: Stats{Connections: 20, Senders: 2, Standbys: 1, Instances: 2, WALBytes: 3600 << 20,
			WALSeconds: 3600 * 24,
			TotalBytes: 1000},
		Partitions:  partition.Survey{Ranges: true, Ahead: 4, Until: now.Add(96 * time.Hour)},
		Table:       TableStats{Rows: 5000, Dead: 10},
		Publication: publication{Identity: published},
		Rows:        Rows{Looked: 100, Largest: 5000},
		Subscriptions: []Subscription{{Name: "from_2", Origin: "none", Skip: "0/0", Enabled: true,
			Running: true, Seconds: 0.1, Control: true}},
		NATS: &Broker{Server: "n1 at 10.0.0.1:4222", Version: "2.12.0", RoundTrip: time.Millisecond,
			Cluster: "c", Link: link},
		Account:   Account{Storage: 10, Limits: AccountLimits{Storage: 100}},
		Consumers: []Consumer{{Name: "search", Waiting: 1}},
		Shared: []Shared{{Consumer: "texts", Table: "public.outflow_consumer", Filters: []string{">"},
			Partitions: 8, Running: 2, Least: 30}},
		Host: Host{SpillDir: "/var/spill", SpillFree: 50 << 30, MemoryLimit: 4 << 30},
		Process: Process{Listens: true, Slot: named{cfg.Slot}, Stream: named{cfg.Stream}, Outflow: true,
			Ready: true},
	}
	f.Process.Self = &struct {
		Version string `json:"version"`
		Host    string `json:"host"`
	}{Version: "v1"}
	f.Config.Archive.URL = "file:///archive"
	// as much as is not said yet
	f.Maintained = &watch.Maintained{At: now.Add(-17 * time.Minute), Interval: time.Minute,
		Parts:   []watch.MaintainPart{{Name: "archive"}},
		Archive: &watch.Archived{Oldest: now.Add(-90 * time.Minute), SegmentAge: time.Hour}}
	f.Consumers[0].Config.Durable, f.Consumers[0].Config.Ack = "search", "explicit"
	f.Consumers[0].Delivered.Stream, f.Consumers[0].AckFloor.Stream = 30, 30
	f.Stream.Config.Name, f.Stream.Config.Replicas, f.Stream.Config.Storage = cfg.Stream, 3, "file"
	f.Stream.Config.Discard = "old"
	f.Stream.State.First, f.Stream.State.Last, f.Stream.State.Messages, f.Stream.State.Subjects =
		21, 30, 10, 3
	newest := outbox.Header{Pos: outbox.Position{LSN: 900}, Due: 900, Thru: 900, Timeline: 1}
	f.Readings = checkpoint.Readings{
		Slot: relay.SlotState{Exists: true, Plugin: "pgoutput", Database: "app", Active: true, Confirmed: lsn,
			Restart: lsn, WALStatus: "reserved", SafeWALSize: -1},
		Stream: relay.StreamState{Exists: true, Created: created, LastSeq: 30, Messages: 10, NewestSeq: 30,
			Newest: &newest},
		Server: f.Identity, Publication: published,
		Record: &checkpoint.Record{Slot: cfg.Slot, Database: "app", SystemID: "99", Mapping: layout.Mapping,
			Stream: cfg.Stream, Created: created,
			Publication: checkpoint.PublicationSeen{PublicationIdentity: published},
			Checkpoints: []checkpoint.StoredCheckpoint{{Since: now.Add(-time.Second),
				Checkpoint: relay.Checkpoint{
					Due: lsn, Seq: 30, Timeline: 1, Settings: cfg.Reorder.Settings()}}}},
	}
	standby := *f.Postgres
	standby.Where, standby.InRecovery = "db2:5432/app", true
	copied := ours
	copied.Active, copied.Synced = false, true
	f.Standby = &Standby{Server: &standby, SystemID: "99", Slots: []Slot{copied},
		Settings: map[string]string{"wal_level": "logical", "sync_replication_slots": "on",
			"hot_standby_feedback": "on", "primary_slot_name": "db2", "max_replication_slots": "10",
			"max_wal_senders": "10"}}
	inIslands(f)
	return f
}

// inIslands switches that mode on.
func inIslands(f *Facts) *pipeline.Agreement {
	f.Config.Cluster.Mode, f.Config.Cluster.Subscriptions = config.ModeIslands, "2=from_2"
	f.Process.Pipeline.Agreed = &pipeline.Agreement{Hello: 1}
	return f.Process.Pipeline.Agreed
}

func ptr[T any](v T) *T { return &v }

// found runs all checks over facts, and returns the results of one.
func found(f *Facts, name string) (all []Result) {
	for _, r := range report(f, checks).Results {
		if r.Check == name {
			all = append(all, r)
		}
	}
	return all
}

func TestAHealthyChainHasNoFinding(t *testing.T) {
	t.Parallel()
	for _, r := range report(healthy(t), checks).Results {
		if r.Status != OK {
			t.Errorf("%+v", r)
		}
	}
}

// harm is what can be wrong, and how bad that is, by the check that has to see it.
var harm = []struct {
	check  string
	code   string
	status string
	do     func(f *Facts)
}{
	{"config.secret_files", "secret_file_mode", "warning", func(f *Facts) {
		f.Host.Open = []string{"/secret/creds"}
	}},
	{"config.in_force", "settings_differ", "warning", func(f *Facts) { f.Config.Reorder.Bound++ }},

	{"postgres.reachable", "postgres_slow", "warning", func(f *Facts) { f.Postgres.RoundTrip = time.Second }},
	{"postgres.connection", "connection_unencrypted", "warning", func(f *Facts) {
		f.Postgres.Link.TLS = false
	}},
	{"postgres.connection", "connection_unverified", "warning", func(f *Facts) {
		f.Postgres.Link.Verified = false
	}},
	{"postgres.certificates", "certificate_expiry", "warning", func(f *Facts) {
		f.Postgres.Link.Certificates = []Certificate{{"the client certificate", now.Add(13 * 24 * time.Hour)}}
	}},
	{"postgres.certificates", "certificate_expiry", "critical", func(f *Facts) {
		f.Postgres.Link.Certificates = []Certificate{{"the client certificate", now.Add(-time.Hour)}}
	}},
	{"postgres.primary", "in_recovery", "error", func(f *Facts) { f.Postgres.InRecovery = true }},
	{"postgres.writes", "write_standby", "error", func(f *Facts) { f.Writer.InRecovery = true }},
	{"postgres.writes", "write_url", "critical", func(f *Facts) {
		f.missing[srcWriter] = missing{err: fault(outbox.Fatal, "write_url")}
	}},
	{"postgres.replication", "no_replication_right", "critical", func(f *Facts) {
		f.missing[srcReplication] = missing{err: fault(outbox.Fatal, "no_replication_right")}
	}},
	{"postgres.wal_level", "wal_level", "error", func(f *Facts) { f.Settings["wal_level"] = "replica" }},
	{"postgres.role", "superuser_role", "warning", func(f *Facts) { f.Postgres.Superuser = true }},
	{"postgres.free_slots", "few_free_slots", "warning", func(f *Facts) {
		f.Settings["max_replication_slots"] = "2"
	}},
	{"postgres.free_slots", "max_replication_slots", "error", func(f *Facts) {
		f.Settings["max_replication_slots"] = "1"
		f.Slots = f.Slots[1:]
	}},
	{"postgres.free_senders", "no_free_senders", "warning", func(f *Facts) { f.Stats.Senders = 10 }},
	{"postgres.free_senders", "no_free_senders", "error", func(f *Facts) {
		f.Stats.Senders, f.Slots[0].Active = 10, false
	}},
	{"postgres.free_connections", "few_connections", "warning", func(f *Facts) { f.Stats.Connections = 93 }},
	{"postgres.keep_size", "wal_keep_unlimited", "note", func(f *Facts) {
		f.Settings["max_slot_wal_keep_size"] = "-1"
	}},
	{"postgres.keep_size", "wal_keep_short", "warning", func(f *Facts) {
		f.Settings["max_slot_wal_keep_size"] = "100"
	}},
	{"postgres.idle_timeout", "idle_slot_timeout", "warning", func(f *Facts) {
		f.Settings["idle_replication_slot_timeout"] = "3600"
	}},
	{"postgres.transactions", "long_transaction", "warning", func(f *Facts) {
		f.Activity.Transactions = []Transaction{{PID: 5, Database: "other", Seconds: 301},
			{PID: 6, Seconds: 3}}
	}},
	{"postgres.transactions", "long_transaction", "error", func(f *Facts) {
		f.Activity.Transactions = []Transaction{{Prepared: "it's", Seconds: 3600}}
	}},
	{"postgres.decoding", "decoding_spills", "note", func(f *Facts) { f.Stats.SpillBytes = 101 }},
	{"postgres.archive", "archive_failing", "warning", func(f *Facts) { f.Stats.ArchiveFailing = true }},
	{"postgres.standby_slots", "standby_slots_blocked", "critical", func(f *Facts) {
		f.Slots[1].Active = false
	}},
	{"postgres.standby_slots", "standby_slots_blocked", "critical", func(f *Facts) {
		f.Settings["synchronized_standby_slots"] = `db2, "Db3"`
	}},
	{"postgres.messages", "message_public", "warning", func(f *Facts) { f.Stats.PublicEmits = true }},
	{"postgres.clock", "clock_differs", "warning", func(f *Facts) { f.Postgres.Clock = -2 * time.Second }},
	{"postgres.clock", "clock_differs", "error", func(f *Facts) { f.Postgres.Clock = 16 * time.Second }},

	{"slot.start", "system_changed", "critical", func(f *Facts) { f.Readings.Server.SystemID = "98" }},
	{"slot.start", "slot_ahead", "critical", func(f *Facts) { f.Readings.Slot.Confirmed = 1500 }},
	{"slot.start", "stream_tail_lost", "warning", func(f *Facts) {
		rec := f.Readings.Record
		later := rec.Checkpoints[0]
		later.Due, later.Seq = 1500, 31
		rec.Checkpoints = append(rec.Checkpoints, later)
	}},
	{"slot.usable", "slot_missing", "critical", func(f *Facts) {
		f.Slots, f.Readings.Slot = f.Slots[1:], relay.SlotState{}
		f.missing[srcRecord] = missing{err: errors.New("away")}
	}},
	{"slot.usable", "not_initialised", "error", func(f *Facts) { // outflow uninstall has been there
		f.Slots, f.Readings.Slot = f.Slots[1:], relay.SlotState{}
		rec := f.Readings.Record
		rec.Creating, rec.Base, rec.Checkpoints = true, f.Readings.Stream.LastSeq, nil
		f.missing[srcPublication] = missing{err: errors.New("there is none")}
	}},
	{"slot.usable", "not_initialised", "error", func(f *Facts) {
		f.Slots, f.Readings.Slot, f.Readings.Record = f.Slots[1:], relay.SlotState{}, nil
		f.missing[srcStream] = missing{err: errors.New("away")}
	}},
	{"slot.usable", "slot_invalidated", "critical", func(f *Facts) {
		f.Slots[0].WALStatus, f.Readings.Slot.Invalidation = "lost", "its WAL was removed"
		f.missing[srcRecord] = missing{err: errors.New("away")}
	}},
	{"slot.usable", "slot_plugin", "critical", func(f *Facts) {
		f.Slots[0].Plugin, f.Readings.Slot.Plugin = "wal2json", "wal2json"
		f.missing[srcRecord] = missing{err: errors.New("away")}
	}},
	{"slot.headroom", "slot_unreserved", "critical", func(f *Facts) { f.Slots[0].WALStatus = "unreserved" }},
	{"slot.headroom", "slot_headroom", "warning", func(f *Facts) { f.Slots[0].Retained = 250 << 30 }},
	{"slot.headroom", "slot_headroom", "critical", func(f *Facts) { f.Slots[0].Safe = ptr[int64](100) }},
	{"slot.headroom", "slot_headroom", "critical", func(f *Facts) { // far from the limit, but not for long
		f.Slots[0].Active, f.Stats.WALBytes = false, 3600*24*(6<<20)
	}},
	{"slot.headroom", "slot_retains", "warning", func(f *Facts) {
		f.Slots[0].Safe, f.Slots[0].Retained = nil, 11<<30
	}},
	{"slot.active", "slot_unused", "error", func(f *Facts) { f.Slots[0].Active = false }},
	{"slot.active", "slot_reader", "warning", func(f *Facts) { f.Slots[0].Holder = "debezium" }},
	{"slot.restart", "slot_restart_behind", "warning", func(f *Facts) { f.Slots[0].Behind = 2 << 30 }},
	{"slot.catalog_xmin", "old_catalog_xmin", "warning", func(f *Facts) { f.Slots[0].XminAge = 200_000_000 }},
	{"slot.failover", "slot_no_failover", "warning", func(f *Facts) { f.Slots[0].Failover = false }},
	{"slot.orphans", "slot_orphan", "warning", func(f *Facts) {
		f.Slots = append(f.Slots, Slot{Name: f.Config.Slot + "_old", Plugin: "pgoutput", Database: "app"},
			Slot{Name: f.Config.Slot + "_elsewhere", Plugin: "pgoutput", Database: "another"})
	}},

	{"table.usable", "table_missing", "critical", func(f *Facts) {
		f.missing[srcTable] = missing{err: fault(outbox.Fatal, "table_missing")}
	}},
	{"table.usable", "key_type", "error", func(f *Facts) { f.Layout.Table.Columns[3].Category = "N" }},
	{"table.nulls", "column_nullable", "note", func(f *Facts) { f.Layout.Table.Columns[4].NotNull = false }},
	{"table.growth", "table_grows", "warning", func(f *Facts) { f.Table.Rows = 10_000_001 }},
	{"table.growth", "table_grows", "warning", func(f *Facts) { f.Table.Dead = 1_000_000 }},
	{"table.partitions", "partitions_ahead", "error", func(f *Facts) { f.Partitions.Ahead = 0 }},
	{"table.partitions", "partitions_ahead", "error", func(f *Facts) {
		f.Partitions.Managed, f.Partitions.Ahead = true, 1
	}},
	{"table.partitions", "partition_default", "warning", func(f *Facts) {
		f.Partitions.Default, f.Partitions.Hole = true, now.Add(time.Hour)
	}},
	{"table.partitions", "partition_blocked", "warning", func(f *Facts) {
		f.Partitions.Blocked = []partition.Blocked{{Name: "outbox_p20240501", Slot: "debezium", Fence: 5,
			Since: now.Add(-2 * time.Hour)}}
	}},
	{"table.counters", "counter_gaps", "warning", func(f *Facts) {
		f.Rows.Gaps = []Sequence{{After: 4, At: 7}}
	}},
	{"table.counters", "counter_gaps", "note", func(f *Facts) {
		f.Config.Reorder.Mode, f.Rows.Gaps = config.ModeHorizon, []Sequence{{After: 4, At: 7}}
	}},
	{"table.key_order", "key_order", "error", func(f *Facts) {
		f.Rows.Disorder = []Sequence{{After: 9, At: 10}}
	}},
	{"table.payloads", "payload_large", "warning", func(f *Facts) { f.Rows.Largest = 900_000 }},
	{"table.payloads", "payload_large", "error", func(f *Facts) { f.Rows.Largest = 2 << 20 }},
	{"publication.complete", "publication_missing", "critical", func(f *Facts) {
		f.missing[srcPublication] = missing{err: fault(outbox.Fatal, "publication_missing")}
	}},
	{"publication.complete", "publication_changed", "critical", func(f *Facts) {
		f.Publication.Identity.OID, f.missing[srcStream] = 5, missing{err: errors.New("away")}
	}},
	{"publication.complete", "table_unlogged", "critical", func(f *Facts) {
		f.Publication.Identity.Hidden = fault(outbox.Fatal, "table_unlogged")
	}},
	{"publication.all_tables", "publication_all_tables", "note", func(f *Facts) {
		f.Publication.AllTables = true
	}},

	{"nats.reachable", "nats_connect", "critical", func(f *Facts) {
		f.missing[srcNATS] = missing{err: fault(outbox.Transient, "nats_connect")}
	}},
	{"nats.reachable", "nats_slow", "warning", func(f *Facts) { f.NATS.RoundTrip = 600 * time.Millisecond }},
	{"nats.reachable", "nats_slow", "error", func(f *Facts) { f.NATS.RoundTrip = 2 * time.Second }},
	{"nats.connection", "connection_unencrypted", "warning", func(f *Facts) { f.NATS.Link.TLS = false }},
	{"nats.certificates", "certificate_expiry", "critical", func(f *Facts) {
		f.NATS.Link.Certificates = []Certificate{{"the user", now.Add(time.Hour)}}
	}},
	{"slot.active", "no_storage", "critical", func(f *Facts) { f.Waiting.Code = "no_storage" }},
	{"slot.active", "ack_timeout", "error", func(f *Facts) { f.Waiting.Code = "ack_timeout" }},
	{"nats.storage", "nats_storage", "warning", func(f *Facts) { f.Account.Storage = 75 }},
	{"nats.storage", "nats_storage", "error", func(f *Facts) { f.Account.Storage = 90 }},

	{"stream.usable", "stream_missing", "critical", func(f *Facts) {
		f.Stream, f.Readings.Stream = Stream{}, relay.StreamState{}
		f.missing[srcSlots] = missing{err: errors.New("away")}
	}},
	{"stream.usable", "stream_retention", "error", func(f *Facts) {
		f.Stream.Fault = fault(outbox.Fatal, "stream_retention")
	}},
	{"stream.replicas", "stream_unreplicated", "warning", func(f *Facts) { f.Stream.Config.Replicas = 1 }},
	{"stream.replicas", "stream_replica", "warning", func(f *Facts) {
		f.Stream.Cluster = &jsapi.Cluster{Replicas: []jsapi.Replica{{Name: "n2", Current: true, Lag: 201}}}
	}},
	{"stream.storage", "stream_memory", "warning", func(f *Facts) { f.Stream.Config.Storage = "memory" }},
	{"stream.fill", "stream_filling", "warning", func(f *Facts) {
		f.Stream.Config.Discard, f.Stream.Config.MaxMsgs = "new", 13
	}},
	{"stream.fill", "stream_filling", "error", func(f *Facts) {
		f.Stream.Config.Discard, f.Stream.Config.MaxBytes, f.Stream.State.Bytes = "new", 100, 95
	}},
	{"maintain.runs", "maintain_absent", "warning", func(f *Facts) {
		f.Maintained.At = now.Add(-19 * time.Minute)
	}},
	{"maintain.runs", "maintain_absent", "warning", func(f *Facts) { // from cron, for the first time
		f.Maintained.Interval, f.Maintained.At = 0, now.Add(-25*time.Hour)
	}},
	{"maintain.runs", "maintain_failing", "note", func(f *Facts) {
		f.Maintained.Parts[0].Failing = now.Add(-14 * time.Minute)
	}},
	{"maintain.runs", "maintain_failing", "warning", func(f *Facts) {
		f.Maintained.Parts[0].Failing = now.Add(-16 * time.Minute)
	}},
	{"maintain.runs", "maintain_failing", "warning", func(f *Facts) {
		f.Maintained.Parts[0].Fail(&outbox.Fault{Class: outbox.Gap, Code: "archive_gap"},
			now.Add(-time.Second))
	}},
	{"archive.behind", "archive_behind", "warning", func(f *Facts) {
		f.Maintained.Archive.Oldest = now.Add(-92 * time.Minute)
	}},
	{"stream.archive", "archive_limits", "warning", func(f *Facts) {
		f.Stream.Config.MaxAge = time.Hour
	}},
	{"stream.subjects", "many_subjects", "warning", func(f *Facts) { f.Stream.State.Subjects = 1_000_001 }},
	{"stream.clock", "clock_differs", "warning", func(f *Facts) { f.Stream.Clock = 3 * time.Second }},

	{"record.readable", "record_corrupt", "critical", func(f *Facts) {
		f.missing[srcRecord] = missing{err: fault(outbox.Gap, "record_corrupt")}
	}},
	{"record.readable", "record_missing", "critical", func(f *Facts) {
		f.Readings.Record, f.missing[srcStream] = nil, missing{err: errors.New("away")}
	}},
	{"record.age", "record_old", "warning", func(f *Facts) {
		f.Identity.WALEnd, f.Readings.Record.Checkpoints[0].Since = 100<<20, now.Add(-time.Hour)
	}},

	{"consumers.reading", "consumer_idle", "warning", func(f *Facts) {
		f.Consumers[0].Waiting, f.Consumers[0].Pending = 0, 1
	}},
	{"consumers.reading", "consumer_paused", "note", func(f *Facts) {
		f.Consumers[0].Waiting, f.Consumers[0].Pending, f.Consumers[0].Paused = 0, 1, true
	}},
	{"consumers.behind", "consumer_behind", "warning", func(f *Facts) { f.Consumers[0].Pending = 10_001 }},
	{"consumers.behind", "consumer_behind", "note", func(f *Facts) {
		f.Earlier = slices.Clone(f.Consumers)
		f.Earlier[0].Pending, f.Consumers[0].Pending = 20_000, 15_000
	}},
	{"consumers.retention", "consumer_lost", "critical", func(f *Facts) {
		f.Consumers[0].Delivered.Stream, f.Consumers[0].AckFloor.Stream = 19, 19
	}},
	{"consumers.beyond_end", "consumer_beyond_end", "critical", func(f *Facts) {
		f.Consumers[0].AckFloor.Stream = 31
	}},
	{"consumers.redelivery", "consumer_redelivers", "warning", func(f *Facts) {
		f.Consumers[0].Redelivered = 1
	}},
	{"consumers.settings", "consumer_max_deliver", "warning", func(f *Facts) {
		f.Consumers[0].Config.MaxDeliver = 5
	}},
	{"consumers.settings", "consumer_ack_none", "warning", func(f *Facts) {
		f.Consumers[0].Config.Ack = "none"
	}},
	{"consumers.rewind", "rewind_unfinished", "error", func(f *Facts) {
		f.Consumers[0].Config.Metadata = map[string]string{rewindMark: "{}"}
	}},
	{"consumers.instances", "consumer_idle", "warning", func(f *Facts) {
		f.Shared[0].Running, f.Shared[0].Least = 0, 29
	}},
	{"consumers.instances", "consumer_unowned", "warning", func(f *Facts) { f.Shared[0].Unowned = 1 }},
	{"consumers.instances", "consumer_silent", "warning", func(f *Facts) {
		f.Shared[0].Silent = []string{"db1-77"}
	}},
	{"consumers.instances", "consumer_databases", "warning", func(f *Facts) {
		reader := Consumer{Name: "texts-1", Waiting: 1}
		reader.Config.Metadata = map[string]string{ofConsumer: "texts"}
		f.Consumers = append(f.Consumers, reader, reader, reader)
	}},
	{"consumers.instances", "consumer_behind", "warning", func(f *Facts) {
		f.Stream.State.Last, f.Readings.Stream.LastSeq = 10_031, 10_031
	}},
	{"consumers.layout", "consumer_change", "note", func(f *Facts) { f.Shared[0].Wanted = 16 }},
	{"consumers.lost_end", "consumer_holed", "note", func(f *Facts) { f.Shared[0].Holed = 2 }},
	{"consumers.parked", "events_parked", "warning", func(f *Facts) {
		f.Parked = []Parked{{Consumer: "search", Events: 1}}
	}},
	{"consumers.parked", "events_parked", "error", func(f *Facts) {
		f.Parked = []Parked{{Consumer: "search", Events: 1, Seconds: 4000}}
	}},

	{"cluster.mesh", "cluster_mesh", "error", func(f *Facts) { f.Subscriptions = nil }},
	{"cluster.mesh", "cluster_mesh", "error", func(f *Facts) { f.Subscriptions[0].Origin = "any" }},
	{"cluster.mesh", "cluster_mesh", "error", func(f *Facts) { f.Subscriptions[0].Name = "another" }},
	{"cluster.mesh", "cluster_mesh", "error", func(f *Facts) { f.Subscriptions[0].Control = false }},
	{"cluster.mesh", "cluster_mesh", "error", func(f *Facts) {
		f.Config.Cluster.Mode, f.Subscriptions[0].Control = config.ModeShared, false
	}},
	{"cluster.agreement", "cluster_waits", "warning", func(f *Facts) {
		inIslands(f).WaitsFor = []int{2}
	}},
	{"cluster.agreement", "cluster_silent", "warning", func(f *Facts) { inIslands(f).Publishes = true }},
	{"cluster.agreement", "cluster_silent", "warning", func(f *Facts) { inIslands(f).Yielded = true }},
	{"cluster.skips", "cluster_skips", "error", func(f *Facts) { f.Subscriptions[0].Skip = "0/17" }},
	{"cluster.lag", "cluster_lag", "warning", func(f *Facts) { f.Subscriptions[0].Seconds = 2.6 }},
	{"cluster.lag", "cluster_lag", "warning", func(f *Facts) { f.Subscriptions[0].Running = false }},
	{"cluster.lag", "cluster_lag", "warning", func(f *Facts) { f.Subscriptions[0].Enabled = false }},
	{"cluster.errors", "cluster_errors", "note", func(f *Facts) { f.Subscriptions[0].Errors = 1 }},
	{"cluster.errors", "cluster_errors", "warning", func(f *Facts) {
		f.Subscriptions[0].DisableOnError = true
	}},
	{"cluster.slots", "cluster_slot_lost", "error", func(f *Facts) { f.Slots[2].WALStatus = "lost" }},
	{"cluster.slots", "cluster_slot_lost", "error", func(f *Facts) { // PostgreSQL 14 has subscribers as well
		f.Postgres.Number, f.Slots[2].WALStatus = 140020, "lost"
	}},
	{"cluster.slots", "cluster_slot", "warning", func(f *Facts) { f.Slots[2].Safe = ptr[int64](300 << 10) }},
	{"cluster.slots", "cluster_slot", "warning", func(f *Facts) {
		f.Slots[2].Safe, f.Slots[2].Retained = nil, muchWAL+1
	}},
	{"cluster.slots", "cluster_slot", "warning", func(f *Facts) { // a subscription may be called so
		f.Slots[2].Holder, f.Slots[2].Safe = "outflow_from_1", ptr[int64](0)
	}},
	{"cluster.deletes", "cluster_deletes", "warning", func(f *Facts) {
		f.Publication.NoDeletes = []string{"replicated"}
	}},
	{"cluster.home", "cluster_home", "warning", func(f *Facts) {
		r := f.Readings.Record
		late := r.Checkpoints[0]
		late.Due, late.Home = late.Due+1, relay.Confirmed{LSN: late.Due - 1, Timeline: 1}
		late.Since = f.Now.Add(-15*time.Minute - f.Config.Sink.DurableAfter)
		r.Checkpoints = append(r.Checkpoints, late)
	}},

	{"host.spill_dir", "spill_dir", "error", func(f *Facts) { f.Host.SpillError = "permission denied" }},
	{"host.spill_dir", "spill_memory", "warning", func(f *Facts) { f.Host.SpillMemory = true }},
	{"host.spill_dir", "spill_space", "warning", func(f *Facts) { f.Host.SpillFree = 1 << 20 }},
	{"host.memory", "memory_limit", "warning", func(f *Facts) { f.Host.MemoryLimit = 64 << 20 }},
	{"process.listen", "process_absent", "note", func(f *Facts) { f.Process = Process{} }},
	{"process.listen", "listen", "error", func(f *Facts) { f.Process = Process{Listens: true} }},
	{"process.listen", "process_other", "warning", func(f *Facts) { f.Process.Slot.Name = "another" }},
	{"process.instances", "single_instance", "note", func(f *Facts) { f.Stats.Instances = 1 }},
	{"process.state", "process_not_ready", "error", func(f *Facts) { f.Process.Ready = false }},
	{"process.state", "ack_timeout", "error", func(f *Facts) {
		f.Process.Ready, f.Process.Verdict.Code = false, "ack_timeout"
	}},
	{"process.state", "nats_connect", "critical", func(f *Facts) {
		f.Process.Ready, f.Process.Verdict.Code = false, "nats_connect"
	}},

	{"standby.reachable", "standby_not_standby", "error", func(f *Facts) { f.Standby.InRecovery = false }},
	{"standby.cluster", "standby_other_cluster", "error", func(f *Facts) { f.Standby.SystemID = "98" }},
	{"standby.cluster", "standby_other_cluster", "error", func(f *Facts) { f.Standby.Number = 180000 }},
	{"standby.database", "standby_other_cluster", "error", func(f *Facts) {
		f.Standby.Where = "db2:5432/postgres"
	}},
	{"standby.settings", "standby_setting", "error", func(f *Facts) {
		f.Standby.Settings["hot_standby_feedback"] = "off"
	}},
	{"standby.slot", "standby_slot", "error", func(f *Facts) { f.Standby.Slots = nil }},
	{"standby.slot", "standby_slot", "error", func(f *Facts) { f.Standby.Slots[0].Temporary = true }},
	{"standby.slot", "standby_slot", "error", func(f *Facts) {
		f.Standby.Slots[0].Invalidation = "wal_removed"
	}},
	{"standby.slot", "standby_slot", "error", func(f *Facts) { f.Standby.Number = 160000 }},
	{"standby.waited_for", "standby_not_waited_for", "warning", func(f *Facts) {
		f.Settings["synchronized_standby_slots"] = ""
	}},
	{"standby.capacity", "standby_setting", "warning", func(f *Facts) {
		f.Standby.Settings["max_wal_senders"] = "5"
	}},
	{"standby.replay", "standby_behind", "warning", func(f *Facts) { f.Standby.Behind = 65 << 20 }},
}

func fault(class outbox.Class, code string) *outbox.Fault {
	return &outbox.Fault{Class: class, Code: code, Message: "it is so"}
}

func TestEachCheckFindsWhatItIsFor(t *testing.T) {
	t.Parallel()
	tested := map[string]bool{}
	for _, h := range harm {
		f := healthy(t)
		h.do(f)
		all := found(f, h.check)
		if !slices.ContainsFunc(all, func(r Result) bool {
			return r.Code == h.code && string(r.Status) == h.status && r.Message != "" && r.Title != "" &&
				r.Hint != ""
		}) {
			t.Errorf("%s: want %s %s, got %+v", h.check, h.status, h.code, all)
		}
		if _, known := finding.Of(h.code); !known {
			t.Errorf("%s is not in the catalogue", h.code)
		}
		tested[h.check] = true
	}
	for _, c := range checks {
		if !tested[c.name] {
			t.Errorf("nothing makes %s find something", c.name)
		}
	}
}

// What can't be read is never taken for good.
func TestWhatIsNotKnownIsNeverOK(t *testing.T) {
	t.Parallel()
	for i := range checks {
		c := &checks[i]
		for _, s := range c.needs {
			f := healthy(t)
			f.missing[s] = missing{err: errors.New("the server said no")}
			if all := found(f, c.name); len(all) != 1 || all[0].Status != Unknown || all[0].Message == "" {
				t.Errorf("%s without %s: %+v", c.name, s, all)
			}
			f.missing[s] = missing{err: noRight("GRANT x TO y"), right: "GRANT x TO y"}
			if all := found(f, c.name); len(all) != 1 || all[0].Status != Unknown {
				t.Errorf("%s without the right to %s: %+v", c.name, s, all)
			}
		}
	}
}

// TestNobodyIsToldToDropOutflowsOwnSlot because old rows wait for it: what it has not confirmed would be in
// no message.
func TestNobodyIsToldToDropOutflowsOwnSlot(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{true, false} {
		f := healthy(t)
		b := partition.Blocked{Name: "outbox_p20240501", Slot: "debezium", Fence: 5,
			Since: now.Add(-2 * time.Hour)}
		if own {
			b.Slot = f.Config.Slot
		}
		f.Partitions.Blocked = []partition.Blocked{b}
		all := found(f, "table.partitions")
		if len(all) != 1 || all[0].Code != "partition_blocked" ||
			strings.Contains(all[0].Hint, "Drop it") == own {
			t.Errorf("own %v: %+v", own, all)
		}
	}
}

func TestEachSubjectHasAHeading(t *testing.T) {
	t.Parallel()
	for i := range checks {
		if subject, _, _ := strings.Cut(checks[i].name, "."); subjects[subject] == "" {
			t.Errorf("check %s stands below a line without a word", checks[i].name)
		}
	}
}

// A thousand consumers that nobody reads are a thousand results, and a few lines.
func TestFindingsThatAreAlikeAreCounted(t *testing.T) {
	t.Parallel()
	rep := &Report{Slot: "s", Stream: "S"}
	for i := range 1000 {
		rep.Results = append(rep.Results, Result{Check: "consumers.reading", Status: "warning",
			Code: "consumer_idle", Message: fmt.Sprintf("nobody reads from consumer c%d", i)})
	}
	rep.Results = append(rep.Results, Result{Check: "consumers.reading", Status: "note",
		Code: "consumer_paused", Message: "consumer p is paused"})
	var b strings.Builder
	must.Succeed(t, rep.Write(&b))
	for text, n := range map[string]int{
		"nobody reads from consumer c": 3,
		"  WARN   reading: 997 more such findings [consumer_idle]; --json has all\n": 1,
		"consumer p is paused": 1, "1000 warnings": 1,
	} {
		if got := strings.Count(b.String(), text); got != n {
			t.Errorf("%q %d times, want %d:\n%s", text, got, n, b.String())
		}
	}
}
