package finding

import "github.com/outflowhq/outflow/outbox"

const (
	deadLetter = " Or set sink.on_poison to dead_letter."
	// nothing else helps this row: the WAL holds what was inserted
	onlyDeadLetter = "Set sink.on_poison to dead_letter. For those to come, "
)

const instead = "Nothing after the row is published until you decide: [what dead letters " +
	"do](operations.md#exit-code-5-a-row-that-cannot-be-published)."

var row = []Finding{
	{Code: "undecodable", Severity: Critical, Classes: poison,
		Title: "A row cannot be decoded with the column mapping",
		Hint: "Keep the columns of the mapping in the table, published, and of types that Outflow can " +
			"read." + deadLetter,
		Runbook: "The row was written while a mapped column had another name or type, or was not " +
			"published. Give the column its name back (until then `run` ends with exit code 3). " +
			"`outflow inspect` lists such rows and what follows. A generated column is in the WAL only " +
			"from PostgreSQL 18 on, with publish_generated_columns = stored. A logical message must be " +
			"[as its format says](format.md).\n\n" + instead},
	{Code: "null_doc_id", Severity: Critical, Classes: poison,
		Title:   "A row has no document: doc_id is NULL",
		Hint:    onlyDeadLetter + "make the column NOT NULL, or give the message's content a doc_id.",
		Runbook: instead},
	{Code: "null_seq_key", Severity: Critical, Classes: poison,
		Title: "A row has no order key: seq_key is NULL",
		Hint: onlyDeadLetter + "make the column NOT NULL, or give the message's content a seq_key, or an " +
			"actor_id and a counter.",
		Runbook: instead},
	{Code: "null_payload", Severity: Critical, Classes: poison,
		Title:   "A row has no payload: it is NULL",
		Hint:    onlyDeadLetter + "make the column NOT NULL, or give the message's content a payload.",
		Runbook: instead},
	{Code: "subject_too_long", Severity: Critical, Classes: poison,
		Title:   "A row's subject is too long",
		Hint:    "Make the values that the subject is made of shorter, or use fewer of them." + deadLetter,
		Runbook: "A subject may have 1,000 bytes.\n\n" + instead},
	{Code: "headers_too_large", Severity: Critical, Classes: poison,
		Title:   "A row's mapped headers are too large",
		Hint:    "Map fewer or shorter columns to headers." + deadLetter,
		Runbook: "Mapped headers may have 16 KiB.\n\n" + instead},
	{Code: "too_large", Severity: Critical, Classes: []outbox.Class{outbox.Fatal, outbox.Poison},
		Title: "A row's message is too large",
		Hint: "Raise sink.max_payload, and before it the server's max_payload and the stream's " +
			"max_msg_size." + deadLetter,
		Runbook: "Exit code 3 means that NATS refused the message, because a limit of stream or server " +
			"was lowered since Outflow started.\n\n" + instead},
}
