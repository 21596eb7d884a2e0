package finding

// The way out for a stream with a setting that cannot be changed.
const anotherStream = "Name another stream and run `outflow init`."

const fromBackup = "Correct nats.url if it is another account. With an archive: `outflow archive " +
	"restore`; with a backup: `nats stream restore`. Then look again with `outflow repair`."

var stream = []Finding{
	{Code: "stream_erased", Severity: Error, Classes: fatal,
		Title: "What the stream's metadata say was erased can't be read",
		Hint: "Somebody changed outflow-erased in the metadata of the stream. Set it to what it was; " +
			"without it consumers take erased messages for a gap.",
		Runbook: "[The format](format.md#erased-messages)."},
	{Code: "stream_missing", Severity: Critical, Classes: fatalGap,
		Title: "The stream does not exist",
		Hint:  fromBackup,
		Runbook: "The stream was deleted, or another account answers. `outflow repair` makes the " +
			"stream, keeps the slot and publishes **all** rows of the table, unless `--where` limits " +
			"them.\n\nExit code 3 means that there was none yet: run `outflow init`, or name the right " +
			"stream."},
	{Code: "stream_recreated", Severity: Critical, Classes: gap,
		Title: "The stream was made again, or restored from a backup",
		Hint:  fromBackup,
		Runbook: "`outflow repair` accepts a backup that has everything that is confirmed, and " +
			"publishes nothing. Otherwise it keeps the slot and fills the gap from the table. [NATS " +
			"restored from a backup](maintenance.md#nats-restored-from-a-backup)."},
	{Code: "stream_shortened", Severity: Critical, Classes: gap,
		Title: "The stream lost messages that counted as durable",
		Hint: "Find out what happened to the NATS server, and whether sink.durable_after is longer than " +
			"its sync_interval. Then run `outflow repair`.",
		Runbook: keepsSlot[2:]},
	{Code: "stream_not_empty", Severity: Critical, Classes: fatalGap,
		Title: "The stream has messages, and init did not finish",
		Hint: "Are they needed? If not: `nats stream rm`, then `outflow init`. If they are, run " +
			"`outflow repair`, or set stream to another name.",
		Runbook: "`outflow init` died after it had made the stream, or somebody published to it. " +
			"`outflow repair` makes a new slot and fills the gap from the table. `outflow init " +
			"--snapshot` needs an empty stream."},
	{Code: "foreign_message", Severity: Critical, Classes: fatalGap,
		Title: "Somebody else published to the stream: a message is not one of Outflow's",
		Hint: "Shut them out: give Outflow its own NATS account. Then run `outflow repair --accept " +
			"foreign_message`.",
		Runbook: "In a shared account every user of JetStream's API can publish to the ingress " +
			"([nats](nats.md#in-a-shared-account)). Starting again or removing the message does not " +
			"help, because a message of Outflow's may be missing after it " +
			"([why](decisions/0001-strangers-at-the-ingress.md)). The record remembers it until a " +
			"repair has accepted it. The same holds where somebody gave the stream another subject, " +
			"sources or delete markers while Outflow published: undo that first.\n\n`outflow repair` " +
			"accepts the strangers' messages where they are, and publishes from WAL and table what they " +
			"kept out.\n\n`replay` and `consumer` end " +
			"with exit code 3 if they come across such a message: choose a range without it."},
	{Code: "cut_home", Severity: Critical, Classes: gap,
		Title: "The stream has a cut of another home",
		Hint: "A cluster goes on with the wrong home's stream: correct its stream or its nats.url. Then " +
			"run `outflow repair --accept cut_home`.",
		Runbook: "A [cut](format.md#cuts) names the system identifier of the server whose events it " +
			"closes. What follows it may be another home's events, and one of this home's may be missing. " +
			"`outflow tail` shows cuts, with the cluster that wrote them."},
	{Code: "cut_order", Severity: Critical, Classes: gap,
		Title: "The stream's cuts are out of order, or not those of the checkpoint record",
		Hint: "Something copies messages into the stream, or two clusters go on with it from records " +
			"that differ: stop them. Then run `outflow repair --accept cut_order`.",
		Runbook: "`outflow tail` shows [cuts](format.md#cuts), with the epoch and the cluster that wrote " +
			"them."},
	{Code: "cut_ahead", Severity: Critical, Classes: gap,
		Title: "The stream has a cut behind the checkpoint, and this Outflow does not go on behind one",
		Hint: "A newer Outflow wrote it on another cluster: run that one here too. Or let no other " +
			"cluster go on with this stream, then run `outflow repair --accept cut_ahead`.",
		Runbook: "What follows a [cut](format.md#cuts) is not what the WAL alone makes. `outflow repair` " +
			"takes the stream as it is, and publishes what it lacks."},
	{Code: "divergence", Severity: Critical, Classes: gap,
		Title: "The stream's newest messages are not the ones that this WAL makes",
		Hint: "Are two set-ups mixed up (postgres.url, nats.url), or was a server restored? If neither " +
			"can be undone, run `outflow repair`.",
		Runbook: "`run` and `repair` compare the newest messages of the stream with those made from the " +
			"WAL; `status` does not. With cluster.mode: islands `outflow repair` is refused, and other " +
			"clusters publish for this home meanwhile: [when something fails](clusters.md" +
			"#when-something-fails-in-this-mode)." + fillsWithNewSlot},
	{Code: "stream_full", Severity: Critical, Classes: transient,
		Title: "The stream is at its limit and refuses messages",
		Hint: "Raise max_bytes or max_msgs of the stream with `nats stream edit`, or set discard to old " +
			"if old messages may go. Outflow goes on by itself.",
		Runbook: "Nothing is lost: the slot keeps what is not published. `nats stream info` shows " +
			"messages and bytes beside their limits. With `discard old`, as `outflow init` makes it, a " +
			"full stream drops its oldest messages instead, and consumers that have not read them miss " +
			"them. With cluster.mode: islands other clusters publish meanwhile, and this home goes on " +
			"[some time later](clusters.md#when-something-fails-in-this-mode)."},
	{Code: "no_leader", Severity: Critical, Classes: transient,
		Title: "The stream has no leader",
		Hint: "A majority of its replicas must be up: look with `nats stream info` and `nats server " +
			"report jetstream`. Outflow goes on by itself.",
		Runbook: "Nothing is lost: the slot keeps what is not published. A stream of three replicas " +
			"needs two of their servers, one of five needs three."},
	{Code: "stream_moved", Severity: Note, Classes: transient,
		Title: "The stream changed while it was read",
		Hint:  "Nothing to do: it is read again."},
	{Code: "wrong_stream", Severity: Critical, Classes: fatal,
		Title: "Another stream takes the ingress",
		Hint:  "No two streams may have the same subjects: take the ingress away from the other one."},
	{Code: "stream_create", Severity: Error, Classes: fatal,
		Title: "The stream can't be made",
		Hint: "Check init.replicas, init.storage, init.max_age and init.max_bytes against what the " +
			"account may have."},
	{Code: "stream_max_age", Severity: Error, Classes: fatal,
		Title: "The stream's max_age is below twice sink.durable_after",
		Hint: "Raise max_age of the stream, or lower sink.durable_after: messages must not be gone " +
			"before they are durable."},
	{Code: "stream_limits", Severity: Error, Classes: fatal,
		Title: "More rows would be published at once than the stream keeps messages",
		Hint: "Raise max_msgs or max_bytes of the stream with `nats stream edit`, until consumers have " +
			"read what is published. A repair can leave out the oldest rows with --where."},
	{Code: "stream_max_msg_size", Severity: Error, Classes: fatal,
		Title: "The stream's max_msg_size is below sink.max_payload",
		Hint:  "Raise max_msg_size, or lower sink.max_payload to it."},
	{Code: "stream_mirror", Severity: Error, Classes: fatal,
		Title: "The stream mirrors another stream",
		Hint:  anotherStream},
	{Code: "stream_sources", Severity: Error, Classes: fatal,
		Title: "Messages of other streams flow into the stream (sources)",
		Hint:  "Take the sources away; a stream that collects may source from this one."},
	{Code: "stream_sealed", Severity: Critical, Classes: fatal,
		Title: "The stream is sealed",
		Hint:  "It stays so. " + anotherStream},
	{Code: "stream_subjects", Severity: Error, Classes: fatal,
		Title: "The stream's subjects are not one private ingress",
		Hint: "Outflow needs a stream that nobody else publishes to: name another one and run `outflow " +
			"init`, or set exactly one subject of the form _outflow.3f9a17c0.>."},
	{Code: "stream_transform", Severity: Error, Classes: fatal,
		Title: "The stream's subject transform is not Outflow's",
		Hint: "While nothing is published, set subject_transform to the source and destination that the " +
			"message names."},
	{Code: "stream_retention", Severity: Error, Classes: fatal,
		Title: "The stream's retention is not limits",
		Hint:  anotherStream + " Retention must be limits."},
	{Code: "stream_persist_mode", Severity: Error, Classes: fatal,
		Title: "The stream acknowledges messages before they are written (persist_mode async)",
		Hint:  anotherStream},
	{Code: "stream_no_ack", Severity: Error, Classes: fatal,
		Title: "The stream acknowledges nothing (no_ack)",
		Hint:  "Set no_ack to false."},
	{Code: "stream_counter", Severity: Error, Classes: fatal,
		Title: "The stream refuses messages with an expected sequence (allow_msg_counter)",
		Hint:  anotherStream},
	{Code: "stream_delete_marker", Severity: Error, Classes: fatal,
		Title: "The server itself adds messages to the stream (subject_delete_marker_ttl)",
		Hint:  "Set subject_delete_marker_ttl to 0."},
	{Code: "stream_unreplicated", Severity: Warning,
		Title: "The stream has one replica in a cluster",
		Hint: "`nats stream edit STREAM --replicas=3`, and the same for the checkpoint bucket's stream: " +
			"otherwise events stop, and may be lost, with one server."},
	{Code: "stream_replica", Severity: Warning,
		Title: "A replica of the stream is offline or lags behind",
		Hint: "Look at that NATS server: `nats stream report`. Until it is back one more failure may " +
			"stop publishing."},
	{Code: "stream_memory", Severity: Warning,
		Title: "The stream is stored in memory",
		Hint: "It is gone when its servers stop, and Outflow then needs a repair. Make a stream on file " +
			"instead."},
	{Code: "stream_filling", Severity: Warning,
		Title: "The stream is nearly full, and refuses messages when it is",
		Hint:  "Raise its limits, or set discard to old: when it is full nothing is published any more."},
	{Code: "many_subjects", Severity: Warning,
		Title: "The stream has very many subjects",
		Hint: "The server keeps an index of them in memory: choose a subject template with fewer, or " +
			"let messages go sooner."},
	{Code: "stream_tail_lost", Severity: Warning,
		Title: "The stream lost messages at its end",
		Hint: "Start `outflow run`: it publishes them again, under the same sequences, if a second " +
			"reading agrees. A consumer that had them has to be set back."},
}
