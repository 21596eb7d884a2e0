package finding

const remakesRecord = "`nats kv history` and `nats kv revert`, as the message says, bring back an older " +
	"revision; Outflow checks it against slot and stream before it goes on.\n\n`outflow repair` makes " +
	"the record from the headers of the stream, after comparing them with the messages that the WAL " +
	"makes. It publishes nothing, unless the stream ends before what was confirmed: then the rows that " +
	"it lacks. If headers and WAL differ, other ordering settings were in force: give those, or " +
	"`--new-slot`. In gap mode only `--new-slot` is possible."

var record = []Finding{
	{Code: "not_initialised", Severity: Error, Classes: fatal,
		Title: "There is no slot, no stream and no checkpoint record yet",
		Hint: "Run `outflow init`. If it has been run: do postgres.url, nats.url, slot and stream name " +
			"the right ones?"},
	{Code: "init_unfinished", Severity: Error, Classes: fatal,
		Title: "outflow init did not finish",
		Hint:  "Run `outflow init` again: it finishes what is missing."},
	{Code: "snapshot_unfinished", Severity: Critical, Classes: gap,
		Title: "outflow init --snapshot did not finish, or is still running",
		Hint: "Let it run, or run it again: it goes on behind what is published. `outflow run` " +
			"publishes nothing before.",
		Runbook: "No repair is needed. [When a snapshot is " +
			"interrupted](snapshot.md#when-it-is-interrupted)."},
	{Code: "repair_unfinished", Severity: Critical, Classes: gap,
		Title: "A repair did not finish",
		Hint: "Run `outflow repair --accept repair_unfinished`: it goes on where it was, as often as it " +
			"takes. Nothing is published until it has finished.",
		Runbook: "`--accept` also takes the code that the repair was begun with. Give the same " +
			"`--where` again."},
	{Code: "record_missing", Severity: Critical, Classes: gap,
		Title: "The checkpoint record is missing",
		Hint: "Put it back from its history (`nats kv history`, `nats kv revert`), or run `outflow " +
			"repair`.",
		Runbook: "The record was deleted, or slot or stream belong to another outflow: then set `slot` " +
			"and `stream` to names that are not in use, and do nothing to theirs.\n\n" + remakesRecord},
	{Code: "record_corrupt", Severity: Critical, Classes: gap,
		Title: "The checkpoint record can't be read",
		Hint: "Put an older revision back (`nats kv history`, `nats kv revert`), or run `outflow repair " +
			"--accept record_corrupt`.",
		Runbook: remakesRecord},
	{Code: "record_version", Severity: Error, Classes: fatal,
		Title:   "A newer outflow wrote the checkpoint record",
		Hint:    "Run the version of outflow that wrote it, or a newer one.",
		Runbook: "[Another version of Outflow](upgrades.md#another-version-of-outflow)."},
	{Code: "bucket_config", Severity: Error, Classes: fatal,
		Title: "The key-value bucket of the checkpoint record keeps too little",
		Hint: "Give it what `outflow init` would have, with the `nats stream edit` of the message: 64 " +
			"revisions that do not expire."},
	{Code: "other_slot", Severity: Critical, Classes: fatal,
		Title: "The outflow of another slot publishes to the same stream",
		Hint: "Give each slot a stream of its own (setting stream). If nobody uses the other slot any " +
			"more, remove its record with `nats kv del`, as the message says."},
	{Code: "mapping_changed", Severity: Critical, Classes: fatal,
		Title: "Source, origin, table and columns differ from the checkpoint record",
		Hint: "Set them back, or run `outflow init` with the new ones: it saves them once everything " +
			"written before is published.",
		Runbook: "**Renaming a column works the same way**. [Changing the column " +
			"mapping](upgrades.md#column-mapping)."},
	{Code: "shard_changed", Severity: Critical, Classes: fatal,
		Title: "The setting shard differs from the checkpoint record",
		Hint:  "Set shard to what the record says, or correct slot and stream if they are another shard's.",
		Runbook: "Each shard has its own `slot`, `publication` and `stream`: what they are of is " +
			"settled when they are made. To divide the table differently, see [another number of " +
			"shards](upgrades.md#another-number-of-shards)."},
	{Code: "record_old", Severity: Warning,
		Title: "The checkpoint record has not advanced for long",
		Hint: "Look at the log of `outflow run`, and for a transaction that has been open for long: a " +
			"start would read " +
			"all WAL since then again."},
}
