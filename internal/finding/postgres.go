package finding

// What a repair does where only a new slot helps.
const fillsWithNewSlot = "\n\n`outflow repair` makes a new slot and fills the gap from the table."

var postgres = []Finding{
	{Code: "postgres_connect", Severity: Critical, Classes: transient,
		Title: "PostgreSQL can't be reached, or takes no connection",
		Hint:  "See that it runs, and that host and port are right. `outflow run` goes on by itself.",
		Runbook: "Nothing is lost while PostgreSQL can't be reached: the slot keeps what is written " +
			"meanwhile.\n\n- Does it answer at postgres.url from this host? `psql`, or `outflow doctor " +
			"--only postgres`.\n- \"takes no connection\" with too many clients: raise " +
			"`max_connections`, or let the role have more.\n- After a failover postgres.url has to lead " +
			"to the new primary: [what else it needs](postgres.md#failover-to-a-standby).\n\n`run` " +
			"waits for PostgreSQL, `drain` until its `--timeout`; every other command ends with exit " +
			"code 3 and can be run again."},
	{Code: "login", Severity: Critical, Classes: fatal,
		Title: "PostgreSQL refuses the login or the password",
		Hint: "Set the right password (postgres.url, PGPASSWORD or the password file). The role needs " +
			"LOGIN, and a line in pg_hba.conf for it, this database and this host: logical replication " +
			"matches the database's name."},
	{Code: "database_missing", Severity: Critical, Classes: fatal,
		Title: "The PostgreSQL server has no such database",
		Hint: "Name one that exists in the setting that the message names: in postgres.url and " +
			"retain.postgres_url that of the outbox."},
	{Code: "no_replication_right", Severity: Critical, Classes: fatal,
		Title: "The role may not use replication",
		Hint: "ALTER ROLE ... REPLICATION (on managed platforms grant their replication role), and " +
			"GRANT CONNECT ON DATABASE.",
		Runbook: "[Which role needs what](postgres.md#least-privilege)."},
	{Code: "no_right", Severity: Error, Classes: fatal,
		Title: "The role lacks a right on a table, schema or database",
		Hint:  "Grant what the message names, or run the command as another role."},
	{Code: "server_version", Severity: Error, Classes: fatal,
		Title: "The PostgreSQL server is too old",
		Hint:  "Upgrade it to PostgreSQL 14 or later."},
	{Code: "wal_level", Severity: Error, Classes: fatal,
		Title: "wal_level is not logical, so the server can't decode its WAL",
		Hint: "Set wal_level = logical and restart PostgreSQL (managed platforms have a parameter of " +
			"their own for it)."},
	{Code: "max_replication_slots", Severity: Error, Classes: fatal,
		Title: "Every replication slot of the server is in use",
		Hint:  "Drop slots that nobody needs, or raise max_replication_slots and restart PostgreSQL."},
	{Code: "max_wal_senders", Severity: Error, Classes: fatal,
		Title: "max_wal_senders is 0: the server streams to nobody",
		Hint:  "Set max_wal_senders to 10, for example, and restart PostgreSQL."},
	{Code: "in_recovery", Severity: Error, Classes: fatal,
		Title: "The server is a standby, on which nothing can be made or locked",
		Hint:  "Point postgres.url at the primary."},
	{Code: "write_url", Severity: Critical, Classes: fatal,
		Title: "postgres.write_url leads to another database than postgres.url",
		Hint: "Point postgres.write_url at the primary of the cluster and at the database that " +
			"postgres.url names."},
	{Code: "retain_url", Severity: Critical, Classes: fatal,
		Title: "retain.postgres_url leads to another database than postgres.url",
		Hint: "Point retain.postgres_url at the database that postgres.url names, as the role that owns " +
			"the outbox. Nothing was changed there."},
	{Code: "write_standby", Severity: Error, Classes: transient,
		Title: "The server that ticks are written to is a standby and takes no writes",
		Hint:  "Point postgres.write_url at the primary."},
	{Code: "temp_space", Severity: Error, Classes: fatal,
		Title: "The server has no room for temporary files",
		Hint: "Give it room (temp_tablespaces, temp_file_limit), about as much as the table's rows " +
			"take. Then run the command again."},
	{Code: "timeline_history", Severity: Critical, Classes: fatal,
		Title: "The server's timeline has no history file",
		Hint: "Put the file that the message names back into pg_wal, from the archive or another server " +
			"of the cluster."},
	{Code: "system_changed", Severity: Critical, Classes: gap,
		Title: "Another database cluster answers than the one that was published from",
		Hint: "Correct postgres.url. After pg_upgrade, or a dump and restore, this is expected: run " +
			"`outflow repair`.",
		Runbook: "`outflow repair` makes a new slot, fills the gap from the table and records the new " +
			"system identifier. The database must have the same name. [A new major " +
			"version](upgrades.md#postgresql-major-version)."},
	{Code: "server_behind", Severity: Critical, Classes: gap,
		Title: "The server's WAL ends before what was published",
		Hint: "It was restored from an older copy, or postgres.url is another server: correct that. " +
			"Else tell consumers that the stream holds events that the database lacks, and run `outflow " +
			"repair`.",
		Runbook: "The events of the reported range stay in the stream: they were committed once, and " +
			"consumers may have acted on them." + fillsWithNewSlot},
	{Code: "timeline_lost", Severity: Critical, Classes: gap,
		Title: "A standby was promoted before it had everything that was published",
		Hint: "Tell consumers that the stream holds events that the database lacks, and run `outflow " +
			"repair`. If another server is meant, correct postgres.url.",
		Runbook: "The events of the reported range stay in the stream: they were committed on the old " +
			"primary. [How to avoid it](postgres.md#failover-to-a-standby)." + fillsWithNewSlot},
	{Code: "timeline_unknown", Severity: Critical, Classes: gap,
		Title: "The server is on another branch of the timeline history",
		Hint: "Is postgres.url the right server? If so, tell consumers that the stream holds events " +
			"that the database lacks, and run `outflow repair`.",
		Runbook: "The WAL that was published from is no part of this server's history, for example " +
			"after a restore to a point in time." + fillsWithNewSlot},
	{Code: "postgres_slow", Severity: Warning,
		Title: "PostgreSQL takes long to answer",
		Hint:  "Run Outflow near the server: each confirmation is a round trip."},
	{Code: "superuser_role", Severity: Warning,
		Title:   "Outflow's role is a superuser",
		Hint:    "`run` needs REPLICATION and CONNECT only: give it a role of its own.",
		Runbook: "[Which role needs what](postgres.md#least-privilege)."},
	{Code: "few_free_slots", Severity: Warning,
		Title: "No replication slot is free",
		Hint: "Drop slots that nobody needs, or raise max_replication_slots and restart PostgreSQL: a " +
			"repair may need a second slot for a while."},
	{Code: "no_free_senders", Severity: Error,
		Title: "No WAL sender is free",
		Hint: "Raise max_wal_senders and restart PostgreSQL: after a lost connection Outflow may not " +
			"get its own back."},
	{Code: "few_connections", Severity: Warning,
		Title: "PostgreSQL has few connections left",
		Hint:  "Raise max_connections, or find out who holds so many."},
	{Code: "wal_keep_unlimited", Severity: Note,
		Title: "Nothing limits how much WAL a slot keeps",
		Hint: "In a long outage the disk of PostgreSQL fills up. With max_slot_wal_keep_size the slot " +
			"is lost instead, and a repair closes the gap from the table."},
	{Code: "wal_keep_short", Severity: Warning,
		Title: "max_slot_wal_keep_size lasts for a short outage only",
		Hint:  "Make it larger than the WAL of the longest outage that has to pass without a repair."},
	{Code: "idle_slot_timeout", Severity: Warning,
		Title: "PostgreSQL invalidates slots that are idle for some time",
		Hint:  "Set idle_replication_slot_timeout to 0, or to more than your longest outage."},
	{Code: "long_transaction", Severity: Warning,
		Title: "A transaction has been open for long",
		Hint: "End it: the slot keeps all WAL from its first write on, and a new slot can't be made " +
			"while it is open. Before ending a session find out what it does."},
	{Code: "decoding_spills", Severity: Note,
		Title: "Much of what is decoded goes through PostgreSQL's temporary files",
		Hint:  "Raise logical_decoding_work_mem, if the server has memory for it."},
	{Code: "archive_failing", Severity: Warning,
		Title: "PostgreSQL can't archive its WAL",
		Hint: "Look at the server's log and at archive_command: until it works the server keeps all " +
			"WAL, beside what the slot keeps."},
	{Code: "standby_slots_blocked", Severity: Critical,
		Title: "PostgreSQL waits for a standby that is away, and sends nothing",
		Hint: "Bring the standby back, or take its slot off synchronized_standby_slots and reload the " +
			"settings: until then no logical slot gets anything."},
	{Code: "message_public", Severity: Warning,
		Title:   "Every role of the database can write events",
		Hint:    "Revoke EXECUTE on pg_logical_emit_message from PUBLIC.",
		Runbook: "[The statements](security.md#who-may-write-events)."},
	{Code: "standby_not_standby", Severity: Error,
		Title: "The server that --standby names is not a standby",
		Hint:  "Name the standby that is to become the primary."},
	{Code: "standby_other_cluster", Severity: Error,
		Title: "The standby is not one of this server's",
		Hint:  "Name a standby of the server, and the database, that postgres.url names."},
	{Code: "standby_setting", Severity: Error,
		Title:   "A setting of the standby does not fit",
		Hint:    "Set it, and reload or restart the standby as the setting needs.",
		Runbook: "[What a standby needs](postgres.md#failover-to-a-standby)."},
	{Code: "standby_slot", Severity: Error,
		Title: "The standby does not have the slot",
		Hint: "Wait until it is synchronised: the slot has to advance once before a standby can copy " +
			"it, which takes some minutes after `outflow init`.",
		Runbook: "[What a standby needs](postgres.md#failover-to-a-standby)."},
	{Code: "standby_not_waited_for", Severity: Warning,
		Title: "Events may be published that the standby does not have",
		Hint: "Add the standby's primary_slot_name to synchronized_standby_slots on the primary, or " +
			"make sure before the switchover that the standby has everything."},
	{Code: "standby_behind", Severity: Warning,
		Title: "The standby has much WAL to replay",
		Hint:  "Wait until it has caught up: Outflow publishes nothing new until then."},
}
