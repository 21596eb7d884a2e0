package finding

import "github.com/outflowhq/outflow/outbox"

const onlyMissing = "Give a condition that only rows hold to that may be missing, for example --where " +
	"\"created_at > '...'\"."

const snapshotAgain = "Then run `outflow init --snapshot` again."

var commands = []Finding{
	{Code: "accept", Severity: Error, Classes: usage,
		Title: "--accept names another code than what is found",
		Hint:  "Look with `outflow repair`, or `outflow uninstall`, then accept the code that it names."},
	{Code: "accept_loss", Severity: Error, Classes: usage,
		Title: "A repair would lose events that are in no table, and that is not accepted",
		Hint:  "If that is accepted, say so with the --accept-loss of the message. Nothing was changed.",
		Runbook: "Events that were written as logical messages are in no table: [what a repair " +
			"does](operations.md#what-a-repair-does)."},
	{Code: "archive_damaged", Severity: Error, Classes: gap,
		Title: "An object of the archive is lost, or is not what was written",
		Hint: "Bring the object back from a copy or an older version of it, and run `outflow archive " +
			"verify`.",
		Runbook: "[What to do](archive.md#an-object-is-lost-or-damaged)."},
	{Code: "archive_differs", Severity: Error, Classes: gap,
		Title: "The stream has other messages than the archive under the same sequences",
		Hint: "Find out which of the two is older than it should be: a NATS server or an archive was " +
			"restored from a backup. Until then nothing is archived, and rows that are not stay in the " +
			"table. If it is the stream, make it from the archive: `nats stream rm`, `outflow archive " +
			"restore`, and `outflow repair`, which publishes again what only the table has. `outflow " +
			"repair` and `outflow replay` do without the archive where archive.url is empty.",
		Runbook: "[Restoring a stream](archive.md#restoring-a-stream)."},
	{Code: "archive_gap", Severity: Error, Classes: gap,
		Title: "Messages were removed from the stream before they were archived",
		Hint: "See first that archive.url is the archive of before, and mounted. If the loss is accepted, " +
			"give the range to `outflow archive run --accept-gap`; set the stream's limits to none, or " +
			"archive more often.",
		Runbook: "[What a gap is](archive.md#a-gap)."},
	{Code: "archive_empty", Severity: Error, Classes: fatal,
		Title: "The archive has nothing of the stream",
		Hint: "If nothing was archived yet, the first segment is made after archive.segment_age, or at " +
			"once with --now. If something was: is its volume mounted, and are archive.url, with its " +
			"prefix, and stream those of whoever archives? `outflow archive list` shows what is there.",
		Runbook: "[What a gap is](archive.md#a-gap)."},
	{Code: "archive_denied", Severity: Error, Classes: transient,
		Title: "The archive may not be read, or written",
		Hint: "Run the command as the user whose files these are, which is the one that has written them, " +
			"or give it the right. `list`, `verify`, `replay` and `restore` only read; the others need a " +
			"folder that can be written. Of a bucket, give the credentials the rights.",
		Runbook: "[The rights in a bucket](archive.md#in-a-bucket)."},
	{Code: "archive_full", Severity: Error, Classes: transient,
		Title: "There is no room left for the archive",
		Hint: "Make room on the file system of the folder that archive.url names, or move the archive to a " +
			"larger one and set archive.url to it. Until then nothing is archived, and nothing that is not " +
			"archived leaves table or stream."},
	{Code: "rows_columns", Severity: Error, Classes: fatal,
		Title: "Archived messages do not carry what the rows of the table need",
		Hint: "Give the columns a default until the rows are back, and subject, headers and columns as " +
			"they were when the messages were published."},
	{Code: "rows_cut", Severity: Error, Classes: gap,
		Title: "Some messages have only the beginning of a long id, document or key",
		Hint: "All other rows are back. Take those from a backup of the database: `outflow replay --seq " +
			"N` shows their messages."},
	{Code: "rows_partition", Severity: Error, Classes: fatal,
		Title: "A row that is put back has no partition",
		Hint: "Make it, then run the command again: `outflow partition apply` makes those of now. Where " +
			"messages carry the time of their rows, the rows need partitions of then, or a default one."},
	{Code: "rows_origin", Severity: Error, Classes: fatal,
		Title: "Rows can't be put back in a way that outflow run tells from new ones",
		Hint: "Rows that are put back need a replication origin. Set replication.origin to own, and let a " +
			"superuser do it, or grant EXECUTE on pg_replication_origin_create, pg_replication_origin_oid " +
			"and pg_replication_origin_session_setup to the role of retain.postgres_url."},
	{Code: "restore_exists", Severity: Error, Classes: fatal,
		Title: "The stream that is to be restored exists",
		Hint: "If nothing of it is needed, remove it with `nats stream rm`. To look at the past only, " +
			"give another name with --to."},
	{Code: "restore_unfinished", Severity: Critical, Classes: gap,
		Title: "The stream is being restored from the archive",
		Hint: "Run `outflow archive restore` again: it goes on where it was. Then `outflow repair` says " +
			"what the archive did not have.",
		Runbook: "[Restoring a stream](archive.md#restoring-a-stream). Nothing else works on the stream " +
			"until that has finished."},
	{Code: "archive_limits", Severity: Warning,
		Title: "The stream removes messages by itself, and there is an archive",
		Hint: "Take the limits away, and let `outflow stream apply` remove messages: it waits until they " +
			"are archived, and everybody has them.",
		Runbook: "[What leaves the stream](retention.md#the-stream)."},
	{Code: "archive_behind", Severity: Warning,
		Title: "The archive is far behind the stream",
		Hint: "Nothing that is not archived leaves table or stream. See what `outflow maintain` logs, or " +
			"run `outflow archive run`.",
		Runbook: "[Maintain](maintain.md)."},
	{Code: "maintain_absent", Severity: Warning,
		Title: "Nobody runs outflow maintain any more",
		Hint: "Start it again: nothing is archived, no partitions are made, and nothing leaves table or " +
			"stream. It looks at least every maintain.every; from cron, as often as before. If nobody is " +
			"to maintain any more, `nats kv del outflow-STREAM maintained.SLOT` ends this finding.",
		Runbook: "[Maintain](maintain.md)."},
	{Code: "maintain_failing", Severity: Warning,
		Title: "A part of outflow maintain fails",
		Hint: "The message has the fault of the part: see to that. The other parts go on, and it is tried " +
			"again.",
		Runbook: "[Maintain](maintain.md)."},
	{Code: "archive_record", Severity: Error, Classes: fatal,
		Title: "The checkpoint record does not say up to where the stream is confirmed",
		Hint:  "Do what `outflow status` says until `outflow run` publishes. Then archive again."},
	{Code: "archive_url", Severity: Error, Classes: usage,
		Title: "Where the archive is, is not set or can't be used",
		Hint:  "Set archive.url, for example to file:///var/lib/outflow/archive."},
	{Code: "erase_busy", Severity: Note, Classes: transient,
		Title: "An erasure is at work on the outbox, or outflow archive rows or a replay is",
		Hint: "Let it finish, then run it again. A replay that is interrupted goes on with its " +
			"`--replay-id`, an erasure with the same `--request`."},
	{Code: "erase_denied", Severity: Error, Classes: fatal,
		Title: "A stream has messages of the document, and lets nobody delete them",
		Hint: "Make it anew without deny_delete, then run the erasure again. The stream of the settings: " +
			"end `outflow run`, then `outflow archive run --now`, `nats stream rm`, `outflow archive " +
			"restore`, and `outflow repair`, which publishes what only the table has; without an archive " +
			"the rest is gone. A copy: remove it, and make it again when the erasure has finished.",
		Runbook: "[Streams that let nobody delete](erasure.md#what-it-waits-for)."},
	{Code: "erase_kept", Severity: Error, Classes: fatal,
		Title: "Rows of a document stay in the table although they are deleted",
		Hint: "A trigger (BEFORE DELETE, that returns NULL) keeps them. Let it delete rows for the role " +
			"that erases, or disable it meanwhile (`ALTER TABLE ... DISABLE TRIGGER`), then run the " +
			"erasure again.",
		Runbook: "[What it does, in this order](erasure.md#what-it-does-in-this-order)."},
	{Code: "erase_forgotten", Severity: Critical, Classes: gap,
		Title: "The database is from before an erasure, and a repair would publish rows of it",
		Hint: "The rows of what was erased may be there again. The archive's manifests name the requests; " +
			"delete the rows of their documents from the table, or leave them out with `--where`, then add " +
			"`--despite-erasure`. Nothing was published.",
		Runbook: "[When the database was put back](erasure.md#what-comes-back)."},
	{Code: "erase_notify", Severity: Error, Classes: usage,
		Title: "The last event of a document that is erased can't be written",
		Hint: "Correct --notify and --notify-key, or write the event yourself before the erasure and leave " +
			"--notify out."},
	{Code: "erase_record", Severity: Error, Classes: fatal,
		Title: "Nothing can be erased: up to where the stream is confirmed is not known",
		Hint: "Do what `outflow status` says until `outflow run` publishes. Nothing was changed " +
			"by this run."},
	{Code: "erase_request", Severity: Error, Classes: usage,
		Title: "The request for an erasure is one for another document",
		Hint:  "Give the document that it was begun with, or another name for the request."},
	{Code: "erase_room", Severity: Error, Classes: fatal,
		Title: "The stream has no room to note more erased messages",
		Hint: "Let messages leave the front of the stream (`outflow stream apply`), then run the erasure " +
			"again. A restore takes fewer messages: remove what it has made (`nats stream rm`), then " +
			"`outflow archive restore --from SEQUENCE`.",
		Runbook: "[What consumers see](erasure.md#consumers)."},
	{Code: "erase_server", Severity: Error, Classes: gap,
		Title: "The erasure was begun on another database cluster, or the database was put back",
		Hint: "Its rows may be there again: erase the document once more, with another name for the " +
			"request."},
	{Code: "erase_unfinished", Severity: Error, Classes: gap,
		Title: "A repair would publish rows while an erasure has not finished",
		Hint: "Run `outflow erase` with that request until it ends with 0. Where it waits for `outflow " +
			"run`, which this repair is for, add `--despite-erasure` to the repair: events of the document " +
			"that were written since, and that the repair publishes, may be erased with the others. " +
			"Nothing was published.",
		Runbook: "[What comes back](erasure.md#what-comes-back)."},
	{Code: "erase_untold", Severity: Error, Classes: fatal,
		Title: "Messages do not say which document they are of",
		Hint: "Nothing can be erased by document then. Put the document's column into `subject` or " +
			"`headers`; messages that were published before still lack it."},
	{Code: "erase_waits", Severity: Warning, Classes: transient,
		Title: "An erasure has not finished: something has to come first",
		Hint: "Do what the message says, if it does, then run it again with the same options: it goes on " +
			"where it was. Where it waits for messages, others have to be published behind them.",
		Runbook: "[What it waits for](erasure.md#what-it-waits-for)."},
	{Code: "erased_rows", Severity: Error, Classes: gap,
		Title:   "Very many rows of the table were erased before, and are there again",
		Hint:    "Somebody put them back. Delete them from the table, then run the command again.",
		Runbook: "[What comes back](erasure.md#what-comes-back)."},
	{Code: "erase_written", Severity: Warning, Classes: transient,
		Title: "A document is written to while it is erased",
		Hint:  "Stop what writes it, then run the erasure again."},
	{Code: "database", Severity: Error, Classes: fatal,
		Title: "The checkpoint record is of another database",
		Hint:  "Point postgres.url at the database that holds the outbox."},
	{Code: "repair_ids", Severity: Error, Classes: fatal,
		Title: "By their ids nobody can tell which rows are published",
		Hint: "Set columns.id to a column that tells events apart, or leave rows out with --where and " +
			"decide about them by hand.",
		Runbook: "Without an id column that was set when the events were published, [start " +
			"anew](operations.md#start-anew)."},
	{Code: "repair_removed", Severity: Error, Classes: fatal,
		Title: "Messages were removed from the stream, so their rows look like missing ones",
		Hint:  onlyMissing,
		Runbook: "Retention, or somebody, removed them: [what a repair " +
			"does](operations.md#what-a-repair-does)."},
	{Code: "repair_archived", Severity: Error, Classes: fatal,
		Title: "The stream is gone or empty, and the archive has messages of it, or is away",
		Hint: "`outflow archive restore` makes the stream again, under the same sequences, and `outflow " +
			"repair` publishes the rows that it lacks. If the archive is not to count, say " +
			"--archive.url \"\" with the command.",
		Runbook: "[Restoring a stream](archive.md#restoring-a-stream)."},
	{Code: "rows_replicated", Severity: Error, Classes: fatal,
		Title: "Rows of other servers are in the table, and nothing says which",
		Hint: "They are in the streams of the servers that they were written to, and would be published " +
			"here as well. Give `outflow repair` a condition with --where that holds only for rows that " +
			"were written here. `outflow init --snapshot` can't leave them out: run `outflow init` without.",
		Runbook: "[Several active databases](clusters.md)."},
	{Code: "snapshot_ids", Severity: Error, Classes: fatal,
		Title: "A snapshot needs an id that tells rows apart",
		Hint: "Set columns.id to a column that is unique and never NULL, or give each row an id of its " +
			"own. " + snapshotAgain},
	{Code: "snapshot_installed", Severity: Error, Classes: fatal,
		Title: "A snapshot comes first, and the slot is set up already",
		Hint: "Take the snapshot into another stream, with slot, publication and stream of its own; or " +
			"let `outflow repair` publish the older rows behind what the stream has.",
		Runbook: "[An installation that is there](snapshot.md#an-installation-that-is-there)."},
	{Code: "snapshot_archived", Severity: Error, Classes: fatal,
		Title: "A stream of that name was archived, with rows that the table may not have any more",
		Hint: "`outflow archive restore` makes the stream again, under the same sequences, and `outflow " +
			"repair` publishes the rows that it lacks. If the archive is not to count, say " +
			"--archive.url \"\" with the command.",
		Runbook: "[Rows that only the archive has](snapshot.md#rows-that-only-the-archive-has)."},
	{Code: "snapshot_removed", Severity: Error, Classes: fatal,
		Title: "Messages of an unfinished snapshot were removed from the stream",
		Hint:  "Remove the stream with `nats stream rm`. " + snapshotAgain + " It starts over."},
	{Code: "snapshot_rows", Severity: Error, Classes: fatal,
		Title: "The table has more rows than a snapshot can have",
		Hint:  "Delete rows that nobody needs."},
	{Code: "snapshot_server", Severity: Error, Classes: fatal,
		Title: "The unfinished snapshot is of another database or server, or of one that was put back",
		Hint: "Correct postgres.url. If the server was restored from an older copy, remove the stream with " +
			"`nats stream rm`, then run `outflow init --snapshot` again: it starts over."},
	{Code: "snapshot_taken_over", Severity: Error, Classes: fatal,
		Title: "Another outflow init --snapshot has begun for the slot",
		Hint:  "Let that one finish; if there is none any more, run `outflow init --snapshot` again."},
	{Code: "uninstall_gone", Severity: Error, Classes: usage,
		Title: "--gone names a server that answers, or no server",
		Hint:  "Leave it out: what that server has is to be removed as well. Nothing was changed."},
	{Code: "uninstall_server", Severity: Error, Classes: fatal,
		Title: "The checkpoint record is of another server or database than the one to uninstall from",
		Hint:  "Correct postgres.url.",
		Runbook: "[Uninstall](uninstall.md#what-it-refuses). Where the server was replaced and nothing of " +
			"the old one is left, accept it."},
	{Code: "uninstall_unfinished", Severity: Error, Classes: fatal,
		Title: "A repair or a snapshot of the slot that is to be removed has not finished",
		Hint:  "Run it again: it goes on where it was.",
		Runbook: "[Uninstall](uninstall.md#what-it-refuses). Accepted, the rows that it would have " +
			"published stay in the table, and in no message."},
	{Code: "uninstall_standby", Severity: Error, Classes: fatal,
		Title: "Another cluster stands by for the stream whose home is to be uninstalled",
		Hint: "Stop that cluster's outflow, and run `outflow uninstall` there first: its slot would keep " +
			"WAL for ever. If the cluster is gone for good: `--accept uninstall_standby`."},
	{Code: "uninstall_unknown", Severity: Error, Classes: fatal,
		Title:   "Nothing shows that the slot that is to be removed is Outflow's",
		Hint:    "Correct slot, stream and nats.url if it is another outflow's, or a subscription's.",
		Runbook: "[Uninstall](uninstall.md#what-it-refuses)."},
	{Code: "uninstall_unpublished", Severity: Error, Classes: fatal,
		Title: "The slot that is to be removed has events that are not published",
		Hint:  "Stop the writers, run `outflow drain`, then run the command again.",
		Runbook: "[Uninstall](uninstall.md#what-it-refuses). Accepted, the events stay rows of the table " +
			"and are in no message; those that were written as logical messages are lost."},
	{Code: "uninstall_unread", Severity: Error, Classes: fatal,
		Title: "Consumers have not read all of the stream that is to be removed",
		Hint: "Let them read it, release what they have parked, or delete those that nobody needs with " +
			"`nats consumer rm`.",
		Runbook: "[Uninstall](uninstall.md#what-it-refuses)."},
	{Code: "replay_alike", Severity: Error, Classes: fatal,
		Title: "Rows are too much alike to tell where a replay was",
		Hint: "Begin again with another --replay-id, into another subject or stream. With an id column " +
			"(columns.id) a replay can go on anywhere."},
	{Code: "replay_consumer", Severity: Error, Classes: fatal,
		Title: "The consumer that replay should reach does not exist, or can't take a replay",
		Hint: "`outflow consumer list` names those that there are. A consumer that is not one of " +
			"package consumer needs a subject or stream that it reads, or `outflow consumer rewind`."},
	{Code: "replay_filter", Severity: Error, Classes: usage,
		Title: "replay --filter is not a subject",
		Hint:  "Write a subject, with * for one token and > at the end for the rest."},
	{Code: "replay_from", Severity: Error, Classes: usage,
		Title: "replay --from is not stream or table, or not what the replay was begun from",
		Hint:  "Write stream or table; to go on with a replay, leave it out."},
	{Code: "replay_gone", Severity: Error, Classes: fatal,
		Title:   "Nobody has the whole range that is to be replayed",
		Hint:    "The message says what there still is: choose from that.",
		Runbook: "[From the stream or from the table](replay.md#from-the-stream-or-from-the-table)."},
	{Code: "replay_id", Severity: Error, Classes: []outbox.Class{outbox.Fatal, outbox.Usage},
		Title: "The --replay-id can't be used",
		Hint: "Use up to 64 letters, digits and . : _ -, the same options as when it was begun, and a " +
			"target that keeps its messages."},
	{Code: "replay_ids", Severity: Error, Classes: fatal,
		Title: "Not all of the ids that are to be replayed are there",
		Hint:  "Look with --dry-run --json which are, and leave out the others."},
	{Code: "replay_live", Severity: Error, Classes: usage,
		Title: "A replay would go among the live events",
		Hint:  "Name another subject or stream; --to stream:NAME makes one that is not there."},
	{Code: "replay_no_key", Severity: Error, Classes: fatal,
		Title: "The table has neither a key nor an id that counts, so it has no order to replay in",
		Hint:  "Only the stream can be replayed."},
	{Code: "replay_range", Severity: Error, Classes: usage,
		Title: "The range that is to be replayed can't be read",
		Hint:  "Write from..to, the smaller one first; one of them may be left out."},
	{Code: "replay_rate", Severity: Error, Classes: usage,
		Title: "replay --rate is not a rate",
		Hint:  "Give events per second; 0 is no limit."},
	{Code: "replay_refused", Severity: Error, Classes: fatal,
		Title: "The target of a replay refuses a message",
		Hint:  "Give the stream room, raise max_payload of the server, or leave the event out."},
	{Code: "replay_removed", Severity: Error, Classes: fatal,
		Title: "Messages were removed while they were replayed",
		Hint: "What came before them was read in order. Look with --dry-run what there is now, and go " +
			"on with --from table. If the broker has lost the stream's end, run the same command again " +
			"when Outflow has published that again."},
	{Code: "replay_table", Severity: Error, Classes: fatal,
		Title: "The table can't answer how events are chosen",
		Hint:  "Choose by --doc, --key, --id or --time, as far as the table has such columns."},
	{Code: "replay_target", Severity: Error, Classes: fatal,
		Title: "No stream, or not the right one, takes what is replayed",
		Hint:  "Replay to stream:NAME: it is made if there is none."},
	{Code: "replay_time", Severity: Error, Classes: fatal,
		Title: "The table has no column that says when a row was written",
		Hint:  "Name one of type timestamptz with --time-column, or choose by --key or --doc."},
	{Code: "time_column", Severity: Error, Classes: usage,
		Title: "--time-column is not a timestamp column of the table",
		Hint:  "Name one that it has."},
	{Code: "replay_to", Severity: Error, Classes: usage,
		Title: "replay --to is not a target",
		Hint:  "Write stdout, subject:SUBJECT, stream:STREAM or consumer:NAME."},
	{Code: "replay_unsure", Severity: Error, Classes: fatal,
		Title:   "Neither stream nor table is known to have the whole range",
		Hint:    "Decide: --from stream reads what it still has, --from table what the table has.",
		Runbook: "[From the stream or from the table](replay.md#from-the-stream-or-from-the-table)."},
	{Code: "replay_untold", Severity: Error, Classes: fatal,
		Title: "Messages do not say their document or actor",
		Hint: "Read from the table with --from table, or leave them out with --seq or --filter. For " +
			"later events let the subject or a mapped header hold it."},
}
