package config

import (
	"math"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

//go:generate go test -run TestTheDocumentIsMadeFromTheSettings -update

// setting is a row of the table.
type setting struct {
	path     string                // in the file; the flag's name; the environment's with OUTFLOW_
	def      string                // the default, as it could be written
	defDoc   string                // what documents say in place of def, if that depends on something
	want     string                // what it accepts, so that "Give <want>" is a hint
	doc      string                // what it does, a line
	fallback []string              // environment variables that count before the default
	secret   secrecy               //
	choices  []string              // all values, for completion
	reloads  bool                  // a running process takes it over at SIGHUP
	bind     func(c *Config) value // the field
}

// env returns the setting's name in the environment.
func (s *setting) env() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(s.path, ".", "_"))
}

// defText is the default for people.
func (s *setting) defText() string {
	if s.defDoc != "" {
		return s.defDoc
	}
	return s.def
}

const (
	wantColumn   = `the name of a column, or "" if the table has none`
	wantRequired = "the name of a column, 1 to 63 bytes"
	wantFile     = "the path of a file"
	wantDir      = "the path of a directory"
	wantSize     = "in bytes or with a unit such as KiB, MiB, MB"
	longest      = time.Duration(math.MaxInt64)

	maxClusters = outbox.MaxCluster
)

var settings = []setting{
	{path: "postgres.url", defDoc: "libpq's PG* variables", fallback: []string{"DATABASE_URL"},
		secret: postgresKey,
		want:   "a URL postgres://user@host:5432/database or keywords host=... dbname=...",
		doc: "The database that holds the outbox. If neither this nor DATABASE_URL is set, PGHOST, PGUSER, " +
			"... apply.",
		bind: func(c *Config) value { return textValue{&c.Postgres.URL, postgresURL} }},
	{path: "postgres.write_url", defDoc: "postgres.url", secret: postgresKey,
		want: "a URL postgres://user@host:5432/database or keywords host=... dbname=...",
		doc:  "Where ticks and changes of settings are written: the primary, if postgres.url is a replica.",
		bind: func(c *Config) value { return textValue{&c.Postgres.WriteURL, postgresURL} }},

	{path: "replication.origin", def: OriginOwn, want: "own or any", choices: []string{OriginOwn, OriginAny},
		doc: "own: rows that logical replication brought from another server are not published. any: they " +
			"are. If it is not set, an existing checkpoint record decides.",
		bind: func(c *Config) value {
			return choiceValue{&c.Replication.Origin, []string{OriginOwn, OriginAny}}
		}},

	{path: "cluster.id", def: "0", fallback: []string{"CLUSTER_ID"}, want: "a number from 1 to 64, or 0",
		doc: "Which of several active databases this is; their rows are replicated to one another. Only " +
			"rows written here are published, whatever an older record says. 0: there is one database.",
		bind: func(c *Config) value { return intValue{&c.Cluster.ID, 0, maxClusters} }},
	{path: "cluster.count", def: "0", fallback: []string{"CLUSTERS_COUNT"},
		want: "a number from 1 to 64, or 0",
		doc:  "How many such databases there are. 0: not said.",
		bind: func(c *Config) value { return intValue{&c.Cluster.Count, 0, maxClusters} }},
	{path: "cluster.mode", def: ModeNone, want: "none, shared or islands",
		choices: []string{ModeNone, ModeShared, ModeIslands},
		doc: "shared: all clusters reach one NATS, which syncs each write, and another cluster goes on " +
			"with the stream of a home that is silent. Needs cluster.id, cluster.count, cluster.control, " +
			"cluster.maximum_delay and sink.durable_after: 0s. With cluster.subscription, slot and stream " +
			"are those that the home has. islands: each cluster has a NATS of its own, and another one " +
			"publishes for a home that is silent, into a stream of its own. Needs cluster.id, " +
			"cluster.count, cluster.control, cluster.maximum_delay and cluster.subscriptions. none: no " +
			"cluster publishes for another one.",
		bind: func(c *Config) value {
			return choiceValue{&c.Cluster.Mode, []string{ModeNone, ModeShared, ModeIslands}}
		}},
	{path: "cluster.maximum_delay", def: "0s", fallback: []string{"MAXIMUM_DELAY"}, want: "from 0s to 24h",
		doc: "How long whoever makes a stream may be silent before another cluster takes it over, or " +
			"publishes for it. The same on all clusters, 5s at least, and longer than a restart of " +
			"PostgreSQL and Outflow takes. With cluster.mode: none it is read and checked, and has no " +
			"effect.",
		bind: func(c *Config) value {
			return durationValue{&c.Cluster.MaximumDelay, 0, 24 * time.Hour, time.Millisecond}
		}},

	{path: "cluster.control", want: "schema.name, or name for one of public",
		doc: "The table whose rows are ticks and changes of settings, in place of logical messages, which " +
			"are not replicated: so that what this cluster publishes can be made from its rows on another " +
			"one. `outflow init` makes it. Needs cluster.id.",
		bind: func(c *Config) value { return textValue{&c.Cluster.Control, emptyOrTable} }},
	{path: "cluster.subscription", want: "the name of a subscription",
		doc: "Publish the rows that this subscription brings from another cluster, as they are published " +
			"there, and none that was written here; into a stream of their own. From PostgreSQL 16 on; " +
			"needs cluster.control, with the name that the table has there.",
		bind: func(c *Config) value { return textValue{&c.Cluster.Subscription, emptyOrIdentifier} }},

	{path: "cluster.subscriptions", want: "number=name,number=name,... with a cluster.id each",
		doc: "With cluster.mode: islands, the subscription that brings the rows of each other cluster. " +
			"Without that it is read and has no effect.",
		bind: func(c *Config) value { return subscriptionsValue{&c.Cluster.Subscriptions} }},
	{path: "cluster.gone", want: "number,number,... of other clusters",
		doc: "With cluster.mode: islands, the clusters that are gone for good: a home that returns does " +
			"not wait for their answers. What one of them has published for it, and could not say, comes " +
			"twice; what it had claimed and not published is missing. Take a number out again before that " +
			"cluster is started.",
		bind: func(c *Config) value { return numbersValue{&c.Cluster.Gone} }},

	{path: "nats.url", def: "nats://127.0.0.1:4222", fallback: []string{"NATS_URL"}, secret: natsKey,
		want: "one or more of nats://host:4222, tls://host:4222, separated by commas",
		doc:  "The servers.",
		bind: func(c *Config) value { return textValue{&c.NATS.URL, natsURLs} }},
	{path: "nats.context", want: "the name of a context or the path of its file",
		doc:  "A context of the nats command line, in place of nats.url and the credentials below.",
		bind: func(c *Config) value { return textValue{&c.NATS.Context, nil} }},
	{path: "nats.creds", want: wantFile, doc: "A credentials file (JWT and seed).",
		bind: func(c *Config) value { return textValue{&c.NATS.Creds, nil} }},
	{path: "nats.nkey", want: wantFile, doc: "A file that holds an NKey seed.",
		bind: func(c *Config) value { return textValue{&c.NATS.NKey, nil} }},
	{path: "nats.user", want: "a user's name",
		doc:  "The user name.",
		bind: func(c *Config) value { return textValue{&c.NATS.User, nil} }},
	{path: "nats.password", secret: secret, want: "a password",
		doc: "The user's password. As a flag, everyone on the machine can see it: prefer " +
			"nats.password_file.",
		bind: func(c *Config) value { return textValue{&c.NATS.Password, nil} }},
	{path: "nats.password_file", want: wantFile,
		doc:  "A file that holds the password. A newline at its end is ignored.",
		bind: func(c *Config) value { return textValue{&c.NATS.PasswordFile, nil} }},
	{path: "nats.token", secret: secret, want: "a token",
		doc:  "A token. As a flag, everyone on the machine can see it: prefer nats.token_file.",
		bind: func(c *Config) value { return textValue{&c.NATS.Token, nil} }},
	{path: "nats.token_file", want: wantFile,
		doc:  "A file that holds the token. A newline at its end is ignored.",
		bind: func(c *Config) value { return textValue{&c.NATS.TokenFile, nil} }},
	{path: "nats.tls.ca", want: wantFile,
		doc:  "CA certificates (PEM) to check the server's certificate with, in place of the system's.",
		bind: func(c *Config) value { return textValue{&c.NATS.TLS.CA, nil} }},
	{path: "nats.tls.cert", want: wantFile,
		doc:  "The client certificate (PEM), with nats.tls.key.",
		bind: func(c *Config) value { return textValue{&c.NATS.TLS.Cert, nil} }},
	{path: "nats.tls.key", want: wantFile, doc: "The key (PEM) of nats.tls.cert.",
		bind: func(c *Config) value { return textValue{&c.NATS.TLS.Key, nil} }},

	{path: "source", def: "table", want: "table, message or both",
		choices: []string{"table", "message", "both"},
		doc: "What counts as an event: a row inserted into the table, a logical message with the prefix " +
			"outflow.event (no table is needed), or both in one order.",
		bind: func(c *Config) value {
			return parsedValue[relay.Source]{&c.Source, relay.ParseSource, "table|message|both"}
		}},
	{path: "table", def: "public.outbox",
		want: "schema.name, or name for a table of the schema public, case as in the catalog, no quotes",
		doc:  "The outbox table. If it is partitioned, the root.",
		bind: func(c *Config) value { return textValue{&c.Table, tableName} }},
	{path: "shard", defDoc: "none: all rows", want: "k/n, such as 0/4: n from 1 to 64, k from 0 to n-1",
		doc: "Which part of the table is published: part k of n, by a hash of the document. Each part has " +
			"its own slot, publication and stream. PostgreSQL 15 or later.",
		bind: func(c *Config) value {
			return parsedValue[relay.Shard]{&c.Shard, relay.ParseShard, "k/n"}
		}},

	{path: "columns.id", def: "id", want: wantColumn,
		doc:  "The event's id, for the Outflow header.",
		bind: func(c *Config) value { return columnValue{&c.Columns.ID, false} }},
	{path: "columns.doc_id", def: "doc_id", want: wantRequired,
		doc:  "The document. Events of one document are ordered among themselves.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Doc, true} }},
	{path: "columns.actor_id", def: "actor_id", want: wantColumn,
		doc:  "Who made the event. Document and actor together name the sequence.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Actor, false} }},
	{path: "columns.counter", def: "counter", want: wantColumn,
		doc:  "The actor's counter. Actor and counter make the key if the WAL has none.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Counter, false} }},
	{path: "columns.span", want: wantColumn,
		doc: "How many counters an event takes, from its counter on, for libraries whose counters advance " +
			"by length. Without the column, and where it is NULL: 1. Only gap mode uses it.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Span, false} }},
	{path: "columns.seq_key", def: "seq_key", want: wantColumn,
		doc: "The text by which a document's events are ordered, compared as bytes. A column of a number " +
			"type is refused.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Key, false} }},
	{path: "columns.payload", def: "payload", want: wantRequired,
		doc:  "The message's data.",
		bind: func(c *Config) value { return columnValue{&c.Columns.Payload, true} }},

	{path: "headers", want: "a mapping of header names to columns; in a flag or the environment " +
		"Name=column,Name=column",
		doc: "Columns that become headers of the message. Names that begin with Nats- or Outflow are " +
			"refused. A table that init makes has these columns, of type text. For traces: " +
			"traceparent and tracestate.",
		bind: func(c *Config) value { return headersValue{&c.Headers} }},

	{path: "slot", def: "outflow", want: "1 to 63 characters of a-z 0-9 _",
		doc: "The replication slot, and the key of the checkpoint record. The instance that holds the slot " +
			"publishes; others wait.",
		bind: func(c *Config) value { return textValue{&c.Slot, slotName} }},
	{path: "publication", def: "outflow", want: "a name of 1 to 63 bytes",
		doc:  "The publication of the table.",
		bind: func(c *Config) value { return textValue{&c.Publication, identifier} }},
	{path: "stream", def: "OUTBOX", want: "1 to 244 characters of A-Z a-z 0-9 _ -",
		doc:  "The JetStream stream. The checkpoint record is in the bucket outflow-<stream>.",
		bind: func(c *Config) value { return textValue{&c.Stream, StreamName} }},
	{path: "subject", def: "outbox.{doc_id}", want: "a template such as outbox.{doc_id}",
		doc: "The template of the subjects: a literal token first, then columns in braces. See the message " +
			"format.",
		bind: func(c *Config) value { return textValue{&c.Subject, filled} }},

	{path: "reorder.mode", def: ModeHorizon, want: "horizon or gap", choices: []string{ModeHorizon, ModeGap},
		doc: "horizon: every event waits for the horizon, and windows are sorted. gap: an event waits only " +
			"if its counter shows that an earlier one of its sequence is missing; counters must have no " +
			"gaps.",
		bind: func(c *Config) value {
			return choiceValue{&c.Reorder.Mode, []string{ModeHorizon, ModeGap}}
		}},
	{path: "reorder.horizon", def: "20ms",
		want: "a duration of 0s to 24h in whole microseconds, such as 20ms",
		doc: "How long, by commit time, events wait for others with earlier keys. 0s: every transaction is " +
			"a window of its own. Not used in gap mode.",
		bind: func(c *Config) value {
			return durationValue{&c.Reorder.Horizon, 0, relay.MaxHorizon, time.Microsecond}
		}},
	{path: "reorder.sort", def: "seq_key", want: "seq_key or commit", choices: []string{"seq_key", "commit"},
		doc: "How a window is sorted: by document and key, or in commit order with the keys of each " +
			"sequence ascending. Not used in gap mode.",
		bind: func(c *Config) value {
			return parsedValue[outbox.Sort]{&c.Reorder.Sort, parseSort, "seq_key|commit"}
		}},
	{path: "reorder.bound", def: "10s", want: "a duration of 1us to 24h in whole microseconds, such as 10s",
		doc: "Gap mode: how long, by commit time, an event waits for a missing counter. Longer than the " +
			"longest that a transaction takes to commit.",
		bind: func(c *Config) value {
			return durationValue{&c.Reorder.Bound, time.Microsecond, relay.MaxBound, time.Microsecond}
		}},
	{path: "reorder.cold", def: "20ms",
		want: "a duration of 0s to reorder.bound in whole microseconds, such as 20ms",
		doc: "Gap mode: how long an event waits whose sequence is not remembered, so that nothing shows " +
			"whether an earlier one is missing.",
		bind: func(c *Config) value {
			return durationValue{&c.Reorder.Cold, 0, relay.MaxBound, time.Microsecond}
		}},
	{path: "reorder.memory", def: "16384", want: "a whole number of messages, 1 to 1048576",
		doc: "Gap mode: how many of the stream's newest messages are remembered, each with the last " +
			"counter of its sequence. They are read back at every start.",
		bind: func(c *Config) value { return intValue{&c.Reorder.Memory, 1, relay.MaxMemory} }},
	{path: "reorder.first_counter", def: "1", want: "0 or 1",
		doc:  "Gap mode: the counter of a sequence's first event.",
		bind: func(c *Config) value { return intValue{&c.Reorder.FirstCounter, 0, 1} }},
	{path: "reorder.gap_scope", def: "sequence", want: "sequence or document",
		choices: []string{"sequence", "document"},
		doc: "Gap mode: what waits behind a missing counter. sequence: the later events of the same " +
			"sequence. document: all later events of the document.",
		bind: func(c *Config) value {
			return parsedValue[relay.Scope]{&c.Reorder.GapScope, relay.ParseScope, "sequence|document"}
		}},
	{path: "reorder.max_events", def: "65536", want: "a whole number of events, 1 to 4194304",
		doc: "Most events held in memory. When there are more, the oldest are published early, whatever " +
			"the horizon.",
		bind: func(c *Config) value { return intValue{&c.Reorder.MaxEvents, 1, relay.MaxMaxEvents} }},
	{path: "reorder.max_bytes", def: "64MiB", want: "a size of 1 to 1GiB, " + wantSize,
		doc: "Most bytes held in memory (document, actor, key, payload, and 64 per event). When there are " +
			"more, the oldest events are published early. A larger transaction spills to disk.",
		bind: func(c *Config) value { return sizeValue[int64]{&c.Reorder.MaxBytes, 1, relay.MaxMaxBytes} }},
	{path: "reorder.tick", def: TickWAL, want: "wal or off", choices: []string{TickWAL, TickOff},
		doc: "wal: Outflow writes a small message into the WAL to close the last window when the outbox " +
			"falls silent. off: something else has to write it.",
		bind: func(c *Config) value { return choiceValue{&c.Reorder.Tick, []string{TickWAL, TickOff}} }},
	{path: "reorder.spill_dir", defDoc: "the system's temporary directory", want: wantDir,
		doc: "Where a transaction that is larger than the buffer spills. It should be on a disk, not in " +
			"memory.",
		bind: func(c *Config) value { return textValue{&c.Reorder.SpillDir, filled} }},
	{path: "reorder.max_spill", def: "64GiB", want: "a size, " + wantSize,
		doc: "Most disk space that a spilled transaction may take, about three times its size. A larger " +
			"one ends run with exit code 3. 0: no limit.",
		bind: func(c *Config) value { return sizeValue[int64]{&c.Reorder.MaxSpill, 0, math.MaxInt64} }},

	{path: "sink.durable_after", def: "150s", want: "a duration of 0s or more, such as 150s",
		doc: "How long after its acknowledgement a message counts as durable. PostgreSQL keeps the WAL " +
			"until then. 0s: at once, for servers that always sync; a backlog may then go in atomic " +
			"batches.",
		bind: func(c *Config) value { return durationValue{&c.Sink.DurableAfter, 0, longest, 0} }},
	{path: "sink.on_poison", def: PoisonStop, want: "stop or dead_letter",
		choices: []string{PoisonStop, PoisonDeadLetter},
		doc: "What happens to a row that cannot be published: stop with exit code 5, or publish a dead " +
			"letter in its place.",
		reloads: true,
		bind: func(c *Config) value {
			return choiceValue{&c.Sink.OnPoison, []string{PoisonStop, PoisonDeadLetter}}
		}},
	{path: "sink.dead_letter_subject", defDoc: "<stream>.dead_letter",
		want: "a subject without wildcards that the template cannot produce",
		doc:  "The subject of dead letters.",
		bind: func(c *Config) value { return textValue{&c.Sink.DeadLetterSubject, nil} }},
	{path: "sink.max_payload", def: "1MiB", want: "a size of 1KiB to 64MiB, " + wantSize,
		doc: "The largest message: data, headers and 128 bytes. No more than the server and the stream " +
			"allow.",
		bind: func(c *Config) value { return sizeValue[int]{&c.Sink.MaxPayload, 1 << 10, 64 << 20} }},
	{path: "sink.msg_id", def: "false", want: "true or false",
		doc: "Set Nats-Msg-Id to the event's position. Not needed for correctness, and it costs " +
			"throughput.",
		bind: func(c *Config) value { return boolValue{&c.Sink.MsgID} }},

	{path: "init.replicas", def: "1", want: "a number from 1 to 5",
		doc:  "Replicas of the stream and of the checkpoint's bucket.",
		bind: func(c *Config) value { return intValue{&c.Init.Replicas, 1, 5} }},
	{path: "init.storage", def: "file", want: "file or memory", choices: []string{"file", "memory"},
		doc:  "Where the stream is stored.",
		bind: func(c *Config) value { return choiceValue{&c.Init.Storage, []string{"file", "memory"}} }},
	{path: "init.max_age", def: "0s", want: "0s or a duration of 100ms or more, such as 720h",
		doc:  "How long messages stay in the stream. 0s: no limit. At least twice sink.durable_after.",
		bind: func(c *Config) value { return durationValue{&c.Init.MaxAge, 0, longest, 0} }},
	{path: "init.max_bytes", def: "0", want: "a size, " + wantSize,
		doc:  "How large the stream may grow before the oldest messages are removed. 0: no limit.",
		bind: func(c *Config) value { return sizeValue[int64]{&c.Init.MaxBytes, 0, math.MaxInt64} }},

	{path: "init.partition.by", want: `the name of a column, or "" for a plain table`,
		doc: "The column of the insert's time, by whose ranges a table that init makes is partitioned. " +
			"Usually created_at. Its key is then the id and this column.",
		bind: func(c *Config) value { return textValue{&c.Init.Partition.By, emptyOrIdentifier} }},
	{path: "init.partition.every", def: "24h", want: "a duration of 1s or more in whole seconds, such as 24h",
		doc: "What each partition of that table spans.",
		bind: func(c *Config) value {
			return durationValue{&c.Init.Partition.Every, time.Second, longest, time.Second}
		}},

	{path: "retain.postgres_url", defDoc: "postgres.url", secret: postgresKey,
		want: "a URL postgres://user@host:5432/database or keywords host=... dbname=...",
		doc: "The same database, as the role that owns the table: outflow partition makes and drops over " +
			"this connection. outflow run never uses it.",
		bind: func(c *Config) value { return textValue{&c.Retain.PostgresURL, postgresURL} }},
	{path: "retain.other_slots", want: "names of slots, separated by commas",
		doc: "Replication slots that rows need not wait for. All other slots of the database that use " +
			"pgoutput have to confirm a row before outflow partition lets it go, even those that nobody " +
			"reads. Slots by which Outflow reads the table count in any case.",
		bind: func(c *Config) value { return listValue{&c.Retain.OtherSlots, slotName} }},
	{path: "retain.table.method", def: RetainPartition, want: "partition or delete",
		choices: []string{RetainPartition, RetainDelete},
		doc: "How outflow partition keeps the table small. partition: it makes, detaches and drops " +
			"partitions. delete: it deletes rows of a table that is not partitioned.",
		bind: func(c *Config) value {
			return choiceValue{&c.Retain.Table.Method, []string{RetainPartition, RetainDelete}}
		}},
	{path: "retain.table.keep", def: "168h", want: "a duration of 0s or more, such as 168h",
		doc: "How long rows stay for a repair after their fence was set. With an archive only those do " +
			"that another stream has as well: of partitions with shard, or of a table that another " +
			"Outflow reads.",
		bind: func(c *Config) value { return durationValue{&c.Retain.Table.Keep, 0, longest, 0} }},
	{path: "retain.table.age", def: "0s", want: "a duration of 0s or more, such as 720h",
		doc: "Rows go when they are older. If age, size and rows are 0, every row that may go does. None " +
			"of the three lets a row go that somebody still needs.",
		bind: func(c *Config) value { return durationValue{&c.Retain.Table.Age, 0, longest, 0} }},
	{path: "retain.table.size", def: "0", want: "a size, " + wantSize,
		doc: "The oldest partitions go while the table, with its indexes, is larger. 0: no limit. Of no " +
			"use for method delete.",
		bind: func(c *Config) value { return sizeValue[int64]{&c.Retain.Table.Size, 0, math.MaxInt64} }},
	{path: "retain.table.rows", def: "0", want: "a whole number of rows",
		doc:  "The oldest partitions, or rows, go while the table has more rows. 0: no limit.",
		bind: func(c *Config) value { return intValue{&c.Retain.Table.Rows, 0, math.MaxInt} }},
	{path: "retain.table.every", def: "0s", want: "0s or a duration of 1s or more, such as 24h",
		doc: "What each new partition spans. 0s: as much as the newest one.",
		bind: func(c *Config) value {
			return durationValue{&c.Retain.Table.Every, 0, longest, time.Second}
		}},
	{path: "retain.table.ahead", def: "4", want: "a number from 2 to 64",
		doc: "How many partitions are made ahead. Without one the services' inserts fail, so doctor warns " +
			"of fewer than 2.",
		bind: func(c *Config) value { return intValue{&c.Retain.Table.Ahead, 2, 64} }},
	{path: "retain.table.slack", def: "1h", want: "a duration of 0s or more, such as 1h",
		doc: "How long a partition stays attached after its range has ended, and after the last insert " +
			"into it: an insert into the range of a detached one fails.",
		bind: func(c *Config) value { return durationValue{&c.Retain.Table.Slack, 0, longest, 0} }},
	{path: "retain.stream.age", def: "0s", want: "a duration of 0s or more, such as 720h",
		doc: "outflow stream apply lets messages go that are older. If age, size and messages are 0, " +
			"none goes. None of the three lets a message go that somebody still needs.",
		bind: func(c *Config) value { return durationValue{&c.Retain.Stream.Age, 0, longest, 0} }},
	{path: "retain.stream.size", def: "0", want: "a size, " + wantSize,
		doc:  "The oldest messages go while the stream is larger. 0: no limit.",
		bind: func(c *Config) value { return sizeValue[int64]{&c.Retain.Stream.Size, 0, math.MaxInt64} }},
	{path: "retain.stream.messages", def: "0", want: "a whole number of messages",
		doc:  "The oldest messages go while the stream has more of them. 0: no limit.",
		bind: func(c *Config) value { return intValue{&c.Retain.Stream.Messages, 0, math.MaxInt} }},
	{path: "retain.stream.ignore_consumers", want: "names of consumers, separated by commas",
		doc: "Consumers that messages need not wait for. All others of the stream count, also those that " +
			"do not run.",
		bind: func(c *Config) value { return listValue{&c.Retain.Stream.IgnoreConsumers, consumerName} }},

	{path: "archive.url", secret: natsKey, want: "file:///path/of/a/folder, s3://bucket?region=..., " +
		"gs://bucket or azblob://container?storage_account=..., without credentials",
		doc: "Where outflow archive keeps the confirmed messages of the stream. Empty: nowhere. outflow " +
			"run never uses it.",
		bind: func(c *Config) value { return textValue{&c.Archive.URL, archiveURL} }},
	{path: "archive.segment_size", def: "64MiB", want: "a size from 64KiB to 512MiB, " + wantSize,
		doc: "How large a segment of the archive may get, compressed, before the next one begins. One is " +
			"kept in memory while it is made.",
		bind: func(c *Config) value {
			return sizeValue[int64]{&c.Archive.SegmentSize, 64 << 10, 512 << 20}
		}},
	{path: "archive.segment_age", def: "1h", want: "a duration of 0s or more, such as 1h",
		doc:  "How old a smaller segment's first message is before it is archived.",
		bind: func(c *Config) value { return durationValue{&c.Archive.SegmentAge, 0, longest, 0} }},

	{path: "maintain.every", def: "1m", want: "a duration of 1s or more, such as 1m",
		doc:  "How often outflow maintain archives and applies retention.",
		bind: func(c *Config) value { return durationValue{&c.Maintain.Every, time.Second, longest, 0} }},
	{path: "maintain.listen", want: `host:port, or "" for none`,
		doc: "Where outflow maintain serves /metrics, /healthz, /readyz and /status.json of its own. " +
			"outflow run shows most of it as well.",
		bind: func(c *Config) value { return textValue{&c.Maintain.Listen, listenAddress} }},

	{path: "listen", def: "127.0.0.1:7422", want: `host:port, or "" for none`,
		doc:  "Where /metrics, /healthz, /readyz and the status page are served.",
		bind: func(c *Config) value { return textValue{&c.Listen, listenAddress} }},
	{path: "listen_hosts", want: "host names without a port, separated by commas",
		doc: "Host names by which the pages may be requested, besides localhost, the name in listen, and " +
			"any IP address.",
		bind: func(c *Config) value { return textValue{&c.ListenHosts, hostNames} }},
	{path: "log.format", def: "text", want: "text or json", choices: []string{"text", "json"},
		doc:  "The format of the log, which is written to standard error.",
		bind: func(c *Config) value { return choiceValue{&c.Log.Format, []string{"text", "json"}} }},
	{path: "log.level", def: "info", want: "debug, info, warn or error",
		choices: []string{"debug", "info", "warn", "error"},
		doc:     "The lowest level that is logged.",
		reloads: true,
		bind:    func(c *Config) value { return levelValue{&c.Log.Level} }},
	{path: "on_fault", def: FaultExit, want: "exit or hold", choices: []string{FaultExit, FaultHold},
		doc: "What run does at a fault that needs a person (exit codes 3, 4 and 5). exit: it ends. hold: " +
			"it publishes nothing and holds no slot, but keeps page, metrics and probes, and looks every " +
			"30 s, and at SIGHUP, whether the fault is gone. With cluster.mode: islands it looks every " +
			"2 × cluster.count × cluster.maximum_delay if that is longer, so that other clusters can " +
			"publish in between.",
		bind: func(c *Config) value { return choiceValue{&c.OnFault, []string{FaultExit, FaultHold}} }},
	{path: "stop_timeout", def: "10s", want: "a duration of 0s or more, such as 10s",
		doc:  "How long a clean stop waits for messages in flight.",
		bind: func(c *Config) value { return durationValue{&c.StopTimeout, 0, longest, 0} }},
}

// byPath finds a setting, sections and their settings are told apart by it.
var byPath = func() map[string]*setting {
	m := make(map[string]*setting, len(settings))
	for i := range settings {
		m[settings[i].path] = &settings[i]
	}
	return m
}()

// paths lists all settings in the table's order, sections the mappings that hold them.
var paths, sections = func() (paths, sections []string) {
	seen := map[string]bool{}
	for _, s := range settings {
		paths = append(paths, s.path)
		for i, c := range s.path {
			if c == '.' && !seen[s.path[:i]] {
				seen[s.path[:i]] = true
				sections = append(sections, s.path[:i])
			}
		}
	}
	return paths, sections
}()
