package finding

import "github.com/outflowhq/outflow/outbox"

const keepsSlot = "\n\n`outflow repair` keeps the slot and fills the gap from the table."

var slot = []Finding{
	{Code: "slot_missing", Severity: Critical, Classes: fatalGap,
		Title: "The replication slot does not exist",
		Hint: "Is postgres.url the right server? If so, run `outflow repair`, then `outflow repair " +
			"--accept slot_missing`.",
		Runbook: "- Is it another server, or a standby that was promoted without the slot? `SELECT " +
			"slot_name, active, wal_status FROM pg_replication_slots` shows what there is. PostgreSQL " +
			"17 and later can [keep the slot on standbys](postgres.md#failover-to-a-standby).\n- If it " +
			"was dropped, PostgreSQL may have removed the WAL that it kept, so a new slot alone would " +
			"begin too late: Outflow would notice, and stop.\n\n`outflow repair` makes a new slot and " +
			"fills the gap from the table."},
	{Code: "slot_invalidated", Severity: Critical, Classes: gap,
		Title: "The replication slot was invalidated: PostgreSQL has removed its WAL",
		Hint: "Give max_slot_wal_keep_size and idle_replication_slot_timeout more room, then run " +
			"`outflow repair`.",
		Runbook: "`SELECT wal_status, invalidation_reason FROM pg_replication_slots` says why " +
			"(PostgreSQL 17 and later): the slot fell too far behind, or was idle too long. Find out " +
			"what kept Outflow from confirming: its log, and the time at which its metrics " +
			"stopped." + fillsWithNewSlot},
	{Code: "slot_ahead", Severity: Critical, Classes: gap,
		Title: "The replication slot is confirmed beyond everything that was published",
		Hint: "Somebody moved the slot, or dropped it and made it again: find out who reads from it. " +
			"Then run `outflow repair`.",
		Runbook: keepsSlot[2:]},
	{Code: "slot_plugin", Severity: Critical, Classes: fatalGap,
		Title: "The slot's name belongs to a physical slot or to another output plugin",
		Hint:  "Set slot to a name that is not in use. Do not drop that one: find out whose it is.",
		Runbook: "The message says what the slot is, which database it belongs to and which process " +
			"reads from it.\n\nExit code 4 means that there was a slot of Outflow's under that name, " +
			"and it is gone. `outflow repair` does nothing until the name is free again; then run " +
			"`outflow repair --accept slot_missing`."},
	{Code: "slot_database", Severity: Critical, Classes: fatalGap,
		Title: "The replication slot belongs to another database of the server",
		Hint: "Correct postgres.url, or set slot to a name that is not in use. Do not drop that one: " +
			"find out whose it is.",
		Runbook: "The message says which database it belongs to and which process reads from " +
			"it.\n\nExit code 4 means that there was a slot of Outflow's under that name, and it is " +
			"gone. `outflow repair` does nothing until the name is free again; then run `outflow repair " +
			"--accept slot_missing`."},
	{Code: "slot_taken", Severity: Critical, Classes: fatal,
		Title: "Somebody reads from the slot, and there is no checkpoint record for it",
		Hint: "If that is another outflow, a subscription or another program, set slot to a name that " +
			"is not in use. If it is this outflow, stop it first.",
		Runbook: "The message says which process reads from the slot. Do not drop it."},
	{Code: "slot_exists", Severity: Error, Classes: fatal,
		Title: "The slot that init is to make exists already",
		Hint:  "Set slot to another name, or drop it if nobody needs it."},
	{Code: "slot_in_use", Severity: Note, Classes: []outbox.Class{outbox.Transient, outbox.Fatal},
		Title: "Another process reads from the replication slot",
		Hint: "`outflow run` waits as a standby and takes over when the slot is free. Other commands: " +
			"stop outflow first."},
	{Code: "slot_held", Severity: Error, Classes: fatal,
		Title: "The command needs the slot, and a running outflow holds it",
		Hint:  "Stop outflow first. While it runs there is no gap: it stops when it finds one."},
	{Code: "slot_blocked", Severity: Error, Classes: fatal,
		Title: "The slot could not be made, because transactions that write are open",
		Hint: "Let them end, or end them with pg_terminate_backend(pid), then run `outflow init` again. " +
			"The message lists them."},
	{Code: "slot_unfinished", Severity: Error, Classes: fatal,
		Title: "The slot is still being made by another server process",
		Hint: "It waits until the transactions that write now have ended. Wait for that, or end it with " +
			"pg_terminate_backend(pid), then run the command again."},
	{Code: "slot_unusable", Severity: Critical, Classes: fatal,
		Title: "The replication slot can't be read",
		Hint:  "Run `outflow status`: it says what happened to the slot and what to do."},
	{Code: "slot_unreserved", Severity: Critical,
		Title: "The slot is lost at the next checkpoint",
		Hint: "Let Outflow catch up now, and raise max_slot_wal_keep_size (a reload is enough): `ALTER " +
			"SYSTEM SET max_slot_wal_keep_size = ...`."},
	{Code: "slot_headroom", Severity: Warning,
		Title: "The slot comes near the limit beyond which it is lost",
		Hint: "Find out what keeps Outflow from confirming, and raise max_slot_wal_keep_size if the " +
			"disk has room."},
	{Code: "slot_retains", Severity: Warning,
		Title: "The slot keeps much WAL, and nothing limits it",
		Hint:  "Find out what keeps Outflow from confirming: the disk of PostgreSQL fills up."},
	{Code: "slot_unused", Severity: Error,
		Title: "Nobody reads from the slot",
		Hint: "Start `outflow run`. If this installation is not needed any more, drop the slot: it " +
			"keeps WAL."},
	{Code: "slot_reader", Severity: Warning,
		Title: "Something else than Outflow reads from the slot",
		Hint:  "Find out what it is, and give it a slot of its own: Outflow never gets what it confirms."},
	{Code: "slot_restart_behind", Severity: Warning,
		Title: "The slot keeps WAL that is confirmed already",
		Hint: "End transactions that have been open for long. The rest goes when a later one has been " +
			"decoded."},
	{Code: "old_catalog_xmin", Severity: Warning,
		Title: "The slot holds back the cleaning of PostgreSQL's catalogs",
		Hint:  "Find out what keeps Outflow from confirming: in the end transaction ids run out."},
	{Code: "slot_no_failover", Severity: Warning,
		Title: "No standby keeps the slot",
		Hint: "Stop Outflow and run the command on a connection with replication=database. Without the " +
			"failover property a promoted standby lacks the slot, and a repair is needed.",
		Runbook: "[What a standby needs](postgres.md#failover-to-a-standby)."},
	{Code: "slot_orphan", Severity: Warning,
		Title: "Another slot that looks like Outflow's is read by nobody, and keeps WAL",
		Hint: "If it is another shard's or installation's, start that one. If nobody needs it, `outflow " +
			"uninstall` with its configuration removes it, or drop it."},
}
