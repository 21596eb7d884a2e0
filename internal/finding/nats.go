package finding

var nats = []Finding{
	{Code: "nats_connect", Severity: Critical, Classes: transient,
		Title: "NATS can't be reached",
		Hint:  "See that it runs, and that host and port are right. `outflow run` goes on by itself.",
		Runbook: "Nothing is lost while NATS is away: the slot keeps the WAL, and Outflow publishes it " +
			"in order when NATS is back.\n\n- Does a server answer at nats.url from this host? `nats " +
			"--server URL server ping`, or `outflow doctor --only nats`.\n- Does it take much longer? " +
			"The slot is lost when it has kept more than `max_slot_wal_keep_size`; without that limit " +
			"PostgreSQL's disk fills up. The page, `outflow status` and the metrics say how far that " +
			"is. `ALTER SYSTEM SET max_slot_wal_keep_size` and a reload give more time.\n- The address " +
			"has changed? Correct nats.url and start again: nothing else is needed, if the stream is " +
			"the same.\n\n`run` waits for NATS, `drain` until its `--timeout`; every other command ends " +
			"with exit code 3 and can be run again."},
	{Code: "nats_lost", Severity: Warning, Classes: transient,
		Title: "The connection to NATS is lost",
		Hint:  "Outflow connects again by itself. If it cannot, the code becomes nats_connect."},
	{Code: "nats_error", Severity: Warning, Classes: transient,
		Title: "NATS reports an error on the connection",
		Hint:  "Outflow connects again by itself. If it comes back, look into the server's log."},
	{Code: "closed", Severity: Note, Classes: transient,
		Title: "The connection to NATS was closed by Outflow itself",
		Hint:  "Nothing to do: it happens when a session ends."},
	{Code: "nats_auth", Severity: Critical, Classes: fatal,
		Title: "NATS refuses the credentials",
		Hint: "Check nats.creds, nats.nkey, nats.user with its password, nats.token or the context, and " +
			"the server's accounts. Have the credentials expired?"},
	{Code: "nats_credentials", Severity: Critical, Classes: fatal,
		Title: "A file with NATS credentials or certificates, or the context, can't be used",
		Hint:  "Check the context and the files that the settings under nats name, and who may read them."},
	{Code: "nats_tls", Severity: Critical, Classes: fatal,
		Title: "No TLS connection to NATS can be made",
		Hint: "Check nats.tls: ca must hold the certificate that signed the server's. Has a certificate " +
			"expired? Does the server offer TLS at all?"},
	{Code: "nats_permission", Severity: Critical, Classes: fatal,
		Title:   "NATS forbids something that Outflow needs",
		Hint:    "Give its user the permissions that docs/nats.md lists.",
		Runbook: "[The permissions](nats.md#least-privilege)."},
	{Code: "nats_jetstream", Severity: Critical, Classes: fatal,
		Title: "The NATS server has no JetStream for this account",
		Hint: "Enable JetStream in the server and for the account, or name the right domain in the " +
			"context."},
	{Code: "nats_version", Severity: Error, Classes: fatal,
		Title: "The nats-server is too old",
		Hint:  "Install 2.10.23 or later: earlier ones can lose whole streams."},
	{Code: "server_max_payload", Severity: Error, Classes: fatal,
		Title: "The NATS server's max_payload is below sink.max_payload",
		Hint:  "Raise max_payload of the server, or lower sink.max_payload to it."},
	{Code: "account_full", Severity: Critical, Classes: transient,
		Title: "The NATS account is at its JetStream limit",
		Hint: "Raise the account's storage limit, or remove streams that nobody needs. Outflow goes on " +
			"by itself."},
	{Code: "no_storage", Severity: Critical, Classes: transient,
		Title: "The NATS server has no room left for JetStream",
		Hint: "Give it disk (or max_file_store), or remove streams that nobody needs. Outflow goes on " +
			"by itself."},
	{Code: "no_responders", Severity: Critical, Classes: transient,
		Title: "Nobody answers to the stream's ingress",
		Hint: "The stream was removed, or the cluster has lost its majority: look with `nats stream " +
			"info`. Outflow goes on by itself when it answers."},
	{Code: "ack_timeout", Severity: Warning, Classes: transient,
		Title: "A published message was not acknowledged in time",
		Hint: "It may be stored or not; Outflow connects again and finds out. If it comes back, the " +
			"NATS server or its disk is too slow.",
		Runbook: "A timeout means that nobody knows: the messages may be stored or not. Outflow " +
			"connects again, reads the end of the stream and goes on behind what is there. If it " +
			"happens often, look at the disk of the stream's leader and, with replicas, at `nats server " +
			"report jetstream`."},
	{Code: "throttled", Severity: Warning, Classes: transient,
		Title: "The NATS server's queue for the stream is full",
		Hint: "Outflow sends again by itself. If it comes back, the server is too slow for what is " +
			"published to it."},
	{Code: "batch_incomplete", Severity: Warning, Classes: transient,
		Title: "Not all of a batch came in, and NATS refused it",
		Hint:  "Outflow sends it again by itself."},
	{Code: "batch_refused", Severity: Note, Classes: transient,
		Title:   "The stream or its server takes no atomic batches",
		Hint:    "Nothing to do: Outflow publishes message by message from then on.",
		Runbook: "[Atomic batches](nats.md#atomic-batches)."},
	{Code: "duplicate_ack", Severity: Warning, Classes: transient,
		Title: "NATS took a message for a duplicate",
		Hint: "Outflow reads the stream again and goes on. If it comes back, somebody else publishes to " +
			"the stream."},
	{Code: "unexpected_ack", Severity: Warning, Classes: transient,
		Title: "NATS answered with something that is not the expected acknowledgement",
		Hint: "Outflow reads the stream again and goes on. If it comes back, somebody else publishes to " +
			"the stream, or the stream takes no sequence checks."},
	{Code: "wrong_last_sequence", Severity: Warning, Classes: transient,
		Title: "The stream is not at the sequence at which Outflow publishes",
		Hint: "Another outflow has taken over, or somebody else publishes: Outflow reads the stream " +
			"again and finds out which."},
	{Code: "fenced", Severity: Warning, Classes: transient,
		Title: "Another cluster goes on with the stream: it has a cut that this Outflow did not know",
		Hint: "Outflow reads the stream again and finds out which. Nothing of what it sent behind the cut " +
			"is stored, and nothing is lost.",
		Runbook: "Each message names the newest [cut](format.md#cuts) that its sender knows, and NATS " +
			"refuses it where the stream has another one. `outflow tail` shows cuts, with the cluster that " +
			"wrote them."},
	{Code: "refused", Severity: Error, Classes: transient,
		Title: "NATS refused a message for a reason that Outflow does not know",
		Hint:  "The message has NATS's own error. Outflow tries again by itself."},
	{Code: "nats_slow", Severity: Warning,
		Title: "NATS takes long to answer",
		Hint:  "Run Outflow near the server: a message waits for its acknowledgement at least so long."},
	{Code: "nats_storage", Severity: Warning,
		Title: "The account's JetStream storage is nearly full",
		Hint: "Raise the account's limits, or let streams of the account keep less: Outflow waits when " +
			"it is full."},
}
