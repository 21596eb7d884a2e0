package finding

// What follows from mending a publication.
const rowsInBetween = "PostgreSQL does not send the rows that were written in the meantime, so the next " +
	"start ends with exit code 4, [publication_changed](#publication_changed)."

var table = []Finding{
	{Code: "table_missing", Severity: Critical, Classes: fatal,
		Title: "The outbox table does not exist",
		Hint: "Run `outflow init`, or set table to the outbox's name, or the URL to its database: the " +
			"message names the one that was asked."},
	{Code: "table_kind", Severity: Error, Classes: fatal,
		Title: "The outbox is not a table or a partitioned table",
		Hint:  "Set table to the table that the services write to."},
	{Code: "table_unlogged", Severity: Critical, Classes: fatal,
		Title: "The outbox table is unlogged or temporary, so its rows never reach the WAL",
		Hint:  "ALTER TABLE ... SET LOGGED."},
	{Code: "schema_missing", Severity: Error, Classes: fatal,
		Title: "There is no schema for the outbox table",
		Hint:  "Make the schema, or correct table."},
	{Code: "no_table", Severity: Error, Classes: fatal,
		Title: "The command needs an outbox table, and source is message",
		Hint: "What is in the stream can be read again from the stream. What is neither there nor in " +
			"the WAL any more is nowhere."},
	{Code: "other_table", Severity: Error, Classes: fatal,
		Title: "The slot publishes another table than the configuration names",
		Hint:  "Give the other table a slot, a publication and a stream of its own."},
	{Code: "former_table", Severity: Error, Classes: fatal,
		Title: "The table and the one that was published before it can't be read as one",
		Hint: "Give the columns of both the same names and types, or drop the former one: its rows that " +
			"are not published are lost then."},
	{Code: "foreign_owner", Severity: Error, Classes: fatal,
		Title: "An object that Outflow would use belongs to another role",
		Hint: "Find out who made it and why. If init is to use it, give --accept-owner with that role. If " +
			"it is a table that Outflow keeps for the outbox of another owner in the same schema, move " +
			"this outbox to a schema of its own. Drop what nobody needs.",
		Runbook: "Whoever owns a table, schema, publication or function can change what is published. " +
			"[Objects that others made](security.md#objects-that-others-made); [two outboxes in one " +
			"schema](retention.md#the-table-of-states)."},
	{Code: "row_security", Severity: Error, Classes: fatal,
		Title: "Row-level security hides rows of the table from the role",
		Hint:  "Run the command as the owner of the table, or as a role with BYPASSRLS."},
	{Code: "rows_missing", Severity: Critical, Classes: gap,
		Title: "Rows are in no message, and the slot will not bring them",
		Hint: "Was a partition unlogged for a while? Run `outflow repair --accept rows_missing` to " +
			"publish them.",
		Runbook: "Only `outflow repair --check` finds this. Rows from before `init`, and rows attached " +
			"with a partition, count too: exclude them with `--where`." + keepsSlot},
	{Code: "column_missing", Severity: Critical, Classes: fatal,
		Title: "A mapped column is missing in the table, or was when a row was written",
		Hint:  "Add it, or map another column (columns, subject, headers).",
		Runbook: "If the message speaks of a point of the WAL, rows were written while the table lacked " +
			"that column. Adding the column back helps only rows that are written from then on; those " +
			"in the WAL stop Outflow each time. [Start anew](operations.md#start-anew), and insert them " +
			"again."},
	{Code: "key_type", Severity: Error, Classes: fatal,
		Title: "The order key is of a number type",
		Hint: "Set columns.actor_id to the column that says who counts, columns.counter to the number " +
			"and columns.seq_key to \"\": the key is made of both.",
		Runbook: "Keys are compared as text, where 10 comes before 9: [give the table another " +
			"key](upgrades.md#a-key-of-a-number-type)."},
	{Code: "not_published", Severity: Error, Classes: fatal,
		Title: "The mapping cannot be changed before everything older is published",
		Hint: "Stop the writers and outflow, run `outflow drain` with the old mapping, then `outflow " +
			"init` again.",
		Runbook: "[Changing the column mapping](upgrades.md#column-mapping)."},
	{Code: "sql_api", Severity: Error, Classes: fatal,
		Title: "outflow.enqueue cannot be made, because it would write a generated column",
		Hint:  "Map a plain column."},
	{Code: "publication_missing", Severity: Critical, Classes: fatal,
		Title:   "The publication does not exist",
		Hint:    "Make it again as the message says, or set publication to its name.",
		Runbook: rowsInBetween},
	{Code: "publication_table", Severity: Critical, Classes: fatal,
		Title:   "The publication does not publish the outbox table",
		Hint:    "ALTER PUBLICATION ... ADD TABLE ..., or set publication to another name.",
		Runbook: "If Outflow published the table before, find out who took it out. " + rowsInBetween},
	{Code: "publication_insert", Severity: Critical, Classes: fatal,
		Title:   "The publication does not publish inserts",
		Hint:    "ALTER PUBLICATION ... SET (publish = 'insert').",
		Runbook: rowsInBetween},
	{Code: "publication_columns", Severity: Critical, Classes: fatal,
		Title: "The publication does not publish a mapped column",
		Hint: "Add it to the publication's column list, or take the list away. A generated column needs " +
			"PostgreSQL 18 and publish_generated_columns = stored."},
	{Code: "control_table", Severity: Critical, Classes: fatal,
		Title: "The control table is missing, or has not the columns that it needs",
		Hint:  "Run `outflow init`, which makes it under a name that is not in use (cluster.control)."},
	{Code: "subscription", Severity: Critical, Classes: fatal,
		Title: "What a subscription brings can't be published as its home's rows",
		Hint: "Mend what the message names, or leave cluster.subscription out: the home publishes its " +
			"rows itself.",
		Runbook: "[What a subscription must be](clusters.md#the-rows-of-another-cluster)."},
	{Code: "cluster_row", Severity: Critical, Classes: fatal,
		Title: "A row by which clusters agree on who publishes what can't be read",
		Hint: "If another cluster runs a newer Outflow, run that one here too. Otherwise somebody else " +
			"writes into the control table, or its rows come by another way than from the cluster that " +
			"wrote them."},
	{Code: "cluster_gap_mode", Severity: Critical, Classes: fatal,
		Title: "Gap mode, and clusters that publish for one another",
		Hint: "Run without `cluster.mode: islands` and with another `reorder.mode` until the change is " +
			"published and `sink.durable_after` has passed since. Then switch the mode on again."},
	{Code: "cluster_mesh", Severity: Error,
		Title: "The clusters do not replicate the outbox from each to each other one",
		Hint: "Each cluster needs a subscription with `origin = none` from each of the others, and " +
			"cluster.count must be how many there are. Else rows go round, or are missing somewhere."},
	{Code: "cluster_skips", Severity: Error,
		Title: "A subscription is to skip a transaction",
		Hint: "Mend the conflict instead, and take it back with `ALTER SUBSCRIPTION ... SKIP (lsn = " +
			"NONE)`: no other cluster can publish the rows of a transaction that was skipped there."},
	{Code: "cluster_deletes", Severity: Warning,
		Title: "A publication for other clusters leaves out the deletes of the control table",
		Hint: "Let it publish deletes too. A row takes the place of the one before it: without its delete, " +
			"that one stays there for ever, and a subscription stops at a row with the same key."},
	{Code: "cluster_count", Severity: Critical, Classes: gap,
		Title: "A subscription has not brought the events that their home has counted",
		Hint: "Find out which of its transactions are missing or were changed here: one that was skipped, " +
			"a row filter, a trigger, an origin that was moved, a home that was put back. The home's own " +
			"stream is not concerned. Start this one anew with `outflow uninstall --with-stream` and " +
			"`outflow init`; without `--with-stream` where the stream is the home's.",
		Runbook: "The message has the range of the home's positions in which they differ: compare the " +
			"rows of the table here and at home. Look for `skipping transaction` in the log of the server " +
			"that subscribes. [What is counted](clusters.md#what-the-home-counts)."},
	{Code: "cluster_mode", Severity: Error, Classes: fatal,
		Title: "The checkpoint record was made with another cluster.mode, or the command is not for " +
			"this one",
		Hint: "Set cluster.mode as it is on the other clusters. To take a mode up, stop the writers and " +
			"outflow, run `outflow drain` with cluster.mode: none, then `outflow init` at home with the " +
			"mode.",
		Runbook: "[Switching the shared mode on](clusters.md#one-nats-for-all), " +
			"[the islands mode](clusters.md#a-nats-for-each)."},
	{Code: "cluster_owner", Severity: Error, Classes: fatal,
		Title: "Another cluster makes the stream at present, or this one makes it for its home",
		Hint: "Start `outflow run` at home, which takes the stream back, leave it running, and run the " +
			"command there again. If it can't start, `outflow repair` takes the stream at home. Or leave " +
			"it to the cluster that the message names.",
		Runbook: "[What each command does](clusters.md#commands-of-a-shared-stream)."},
	{Code: "cluster_home_missing", Severity: Error, Classes: fatal,
		Title: "The home of a shared stream has no checkpoint record: there is nothing to stand by for",
		Hint: "Run `outflow init` at home first. Slot and stream have the names that they have there, and " +
			"nats.url leads to the same NATS."},
	{Code: "cluster_errors", Severity: Note,
		Title: "A subscription has failed to apply what another cluster sent",
		Hint: "Look for its errors in the server's log, mend what is in the way, such as a row with the " +
			"same id, and don't skip the transaction. Then set the counter back.",
		Runbook: "It tries again by itself, unless it has `disable_on_error`: then it stays disabled until " +
			"somebody enables it, whatever the error was, while no rows come and the other cluster keeps " +
			"its WAL. What is skipped is missing here for good: [cluster_count](#cluster_count)."},
	{Code: "cluster_slot", Severity: Warning,
		Title: "A slot keeps much WAL for another cluster, or is near the limit beyond which it is lost",
		Hint: "Bring the other cluster or its subscription back. If it is gone for good, drop the slot. " +
			"max_slot_wal_keep_size bounds what it keeps."},
	{Code: "cluster_slot_lost", Severity: Error,
		Title: "The slot by which another cluster or program reads this database is lost",
		Hint: "A cluster that reads by it lacks rows from here, and its subscription can't go on. Make the " +
			"subscription there anew, and see which rows of the table it has not. If nothing reads by it, " +
			"drop the slot. This cluster's own stream is not concerned.",
		Runbook: "What was removed reaches the other cluster by no subscription. A stream that is made " +
			"there of this cluster's rows ends with [cluster_count](#cluster_count) or " +
			"[publication_changed](#publication_changed), and is to be " +
			"[started anew](clusters.md#the-rows-of-another-cluster). So that it does not come to this, " +
			"give `max_slot_wal_keep_size` room for the longest time that a cluster may be away."},
	{Code: "cluster_home", Severity: Warning,
		Title: "The slot keeps WAL because the home has not confirmed its own",
		Hint: "Look at the home: is its `outflow run` running, does it publish, and is cluster.control set " +
			"there? Do its rows come here? max_slot_wal_keep_size bounds what is kept.",
		Runbook: "The slot of a reader keeps a home's rows until the home says that they are in its " +
			"stream for good. Nothing is lost while there is room. " +
			"[What to watch](clusters.md#what-to-watch)."},
	{Code: "cluster_waits", Severity: Warning,
		Title: "A home waits for other clusters before it publishes again",
		Hint: "Look at the clusters that the message names: does `outflow run` for this home's rows run " +
			"there, and are this home's rows replicated there and theirs here? It goes on by itself when " +
			"each of them has answered. Name one that is gone for good in cluster.gone.",
		Runbook: "A home that was silent for half of cluster.maximum_delay or longer asks each other " +
			"cluster to stop publishing for it. While one of them is gone, the home does not publish. " +
			"After cluster.maximum_delay it leaves its events to those that have answered. " +
			"[When a home comes back](clusters.md#when-a-home-comes-back)."},
	{Code: "cluster_silent", Severity: Warning,
		Title: "This cluster publishes for another one, or others publish for this one",
		Hint: "Look at the home: does its `outflow run` run, and without a fault? Does it reach its NATS, " +
			"and does its stream take messages? Do its rows come to the other clusters? Nothing is lost " +
			"meanwhile.",
		Runbook: "To get all events of a home, read the streams of all clusters. " +
			"[A NATS for each](clusters.md#a-nats-for-each)."},
	{Code: "cluster_lag", Severity: Warning,
		Title: "Rows of another cluster come late, or not at all",
		Hint: "Look at pg_stat_subscription and at the server's log. cluster.maximum_delay should be more " +
			"than four times what rows usually take."},
	{Code: "publication_partition", Severity: Critical, Classes: fatal,
		Title: "A partition is unlogged or foreign, so its rows never reach the WAL",
		Hint:  "Make it an ordinary logged table, or detach it."},
	{Code: "publication_root", Severity: Critical, Classes: fatal,
		Title: "The publication publishes partitions as tables of their own, or under another table's name",
		Hint: "ALTER PUBLICATION ... SET (publish_via_partition_root = true), or set table to the table " +
			"that the message names."},
	{Code: "publication_update", Severity: Critical, Classes: fatal,
		Title: "A shard's publication also publishes updates",
		Hint: "ALTER PUBLICATION ... SET (publish = 'insert'), then `outflow repair --accept " +
			"publication_changed`.",
		Runbook: "PostgreSQL sends an update that moves a row into the shard as an insert, which would " +
			"be published twice. The correction counts as a changed publication: the next start with a " +
			"checkpoint record ends with exit code 4, [publication_changed](#publication_changed)."},
	{Code: "publication_filter", Severity: Critical, Classes: fatal,
		Title: "The publication's row filter is not the one of the shard",
		Hint:  "Correct shard or publication, whichever is another shard's.",
		Runbook: "Each shard has its own `slot`, `publication` and `stream`. To divide the table " +
			"differently, see [another number of shards](upgrades.md#another-number-of-shards)."},
	{Code: "publication_changed", Severity: Critical, Classes: gap,
		Title: "The publication changed, and rows may have been kept out of the stream of changes",
		Hint: "Find out who changed it, and whether it is complete now. Then run `outflow repair " +
			"--accept publication_changed`.",
		Runbook: "The publication, or the table's entry in it, was changed or made again; another table " +
			"has the outbox's name; the table was moved out of the published schema; or a partition is " +
			"unlogged or foreign. The record remembers this, even if you undo the cause, until a repair " +
			"has accepted it. Before the repair each partition must be an ordinary logged table, or " +
			"detached.\n\n`outflow repair` keeps the slot if its WAL can be decoded, otherwise makes a " +
			"new one. It fills the gap from the table, and from the one that was published before, " +
			"whatever its name is now."},
	{Code: "shard_column", Severity: Error, Classes: fatal,
		Title: "The table can't be divided by the document's column",
		Hint: "Make it a column of type text, varchar, uuid or bigint, for example, with the database's " +
			"own collation; or leave shard out. A row filter takes only built-in types and collations."},
	{Code: "shard_version", Severity: Error, Classes: fatal,
		Title: "A shard needs PostgreSQL 15 or later, which can filter rows",
		Hint:  "Leave shard out, or upgrade PostgreSQL."},
	{Code: "column_nullable", Severity: Note,
		Title: "A column that every event needs may be NULL",
		Hint: "Make it NOT NULL, so that the writer learns of it: a row with NULL there stops Outflow, or " +
			"becomes a dead letter (sink.on_poison)."},
	{Code: "table_grows", Severity: Warning,
		Title: "The outbox table is large, or full of dead rows",
		Hint: "Delete old rows, or drop old partitions: what is published is in the stream. Keep as many " +
			"as a repair may need.",
		Runbook: "[Deleting old rows](postgres.md#deleting-old-rows)."},
	{Code: "counter_gaps", Severity: Warning,
		Title: "Counters are missing in the newest rows",
		Hint: "In gap mode events wait for a missing counter up to reorder.bound. Find the writer that " +
			"leaves counters out; rows that were deleted look the same.",
		Runbook: "[What gap mode needs](ordering.md)."},
	{Code: "key_order", Severity: Error,
		Title: "Keys do not sort as their counters do",
		Hint: "Keys are compared byte by byte: write numbers in them at one length, as lpad(number::text, " +
			"20, '0') does."},
	{Code: "payload_large", Severity: Warning,
		Title: "Payloads come near sink.max_payload",
		Hint: "Raise max_payload of the NATS server and sink.max_payload, or write smaller events: a " +
			"larger one can't be published (sink.on_poison)."},
	{Code: "publication_all_tables", Severity: Note,
		Title: "The publication publishes all tables",
		Hint: "PostgreSQL sends every change of the database to Outflow. A publication FOR TABLE saves " +
			"that, but changing it needs a repair: plan it with the next change of the set-up."},
	{Code: "partitions_ahead", Severity: Error,
		Title: "The outbox is about to have no partition for new rows",
		Hint: "Run `outflow partition apply`, and every hour from then on: without a partition the " +
			"services' own transactions fail.",
		Runbook: "[Retention](retention.md)."},
	{Code: "partition_blocked", Severity: Warning,
		Title: "Old rows stay in the outbox, because a slot is behind",
		Hint: "Let the slot's reader catch up. Does nobody need the slot, and is it not an Outflow's? " +
			"Drop it, or name it in retain.other_slots.",
		Runbook: "[What may go](retention.md#what-may-go)."},
	{Code: "partition_unpublished", Severity: Error, Classes: gap,
		Title: "A partition that is to go has rows that were never published",
		Hint: "They are older than init, were attached with the partition, or were written to it when it " +
			"was detached. Publish them, or let them go with `outflow partition apply " +
			"--accept-unpublished N`.",
		Runbook: "[Rows that were never published](retention.md#rows-that-were-never-published)."},
	{Code: "partition_key", Severity: Error, Classes: fatal,
		Title: "The outbox is not partitioned by ranges of time",
		Hint: "Partition it by range of one column of type timestamptz, timestamp or date " +
			"(init.partition.by for a new one), or set retain.table.method to delete.",
		Runbook: "[Which tables](retention.md#which-tables)."},
	{Code: "partition_partman", Severity: Error, Classes: fatal,
		Title: "pg_partman drops partitions of the outbox, and asks nobody",
		Hint: "Set retention_keep_table to true in part_config: pg_partman then detaches them, and Outflow " +
			"drops what everybody has.",
		Runbook: "[With pg_partman](retention.md#with-pg_partman)."},
	{Code: "partition_locked", Severity: Warning, Classes: transient,
		Title: "A lock on the outbox was not to be had in time",
		Hint:  "Nothing was changed. Run the command again, when fewer long transactions are open."},
	{Code: "partition_busy", Severity: Note, Classes: transient,
		Title: "Another run of outflow partition works on the outbox",
		Hint:  "Let it finish. If its process is gone or stands still, pg_terminate_backend(pid) ends it."},
	{Code: "partition_needed", Severity: Error, Classes: fatal,
		Title: "Something needs a partition, or rows, that are to go",
		Hint: "A view reads the partition, or a foreign key refers to its rows: the message says which. " +
			"Drop that, let the view read the outbox itself, or give the constraint ON DELETE CASCADE or " +
			"SET NULL. Everything else goes meanwhile."},
	{Code: "partition_columns", Severity: Error, Classes: fatal,
		Title: "A detached partition has a column otherwise than the outbox",
		Hint: "The outbox's column was renamed, or got another type, and ALTER TABLE no longer reaches the " +
			"partition. Alter it in the same way: the message says how.",
		Runbook: "[What reads detached partitions](retention.md#columns-of-detached-partitions)."},
	{Code: "partition_name", Severity: Error, Classes: fatal,
		Title: "Another table is in a partition's way",
		Hint: "A table has the name that a new partition would get: rename it, and drop it only if nobody " +
			"needs its rows, because it may be a partition of an outbox that was renamed. Or another " +
			"partition has a part of its range. The message says which."},
	{Code: "partition_default", Severity: Error, Classes: fatal,
		Title: "The default partition has rows of a range that lacks a partition",
		Hint: "Nothing is lost: they are published, and the next ranges get partitions of their own. But " +
			"Outflow removes nothing from the default partition: delete its rows of that range by hand, " +
			"when a partition of a later range has gone.",
		Runbook: "[A default partition](retention.md#a-default-partition)."},
	{Code: "partition_default_large", Severity: Error, Classes: fatal,
		Title: "The default partition may take rows of now, and is too large to make others beside it",
		Hint: "Give it a CHECK that none of its rows is of later ranges, so that PostgreSQL need not look " +
			"through it, and run `outflow partition apply` at once.",
		Runbook: "[A default partition](retention.md#a-default-partition)."},
}
