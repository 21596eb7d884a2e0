package finding

var order = []Finding{
	{Code: "counter_missing", Severity: Error, Classes: fatal,
		Title: "reorder.mode is gap, and the table has no counter",
		Hint: "Set columns.counter to the column that counts the events of an actor, or reorder.mode to " +
			"horizon.",
		Runbook: "[How Outflow orders](ordering.md)."},
	{Code: "memory_limits", Severity: Error, Classes: fatal,
		Title: "The stream's limits can remove messages that gap mode remembers",
		Hint: "Change them with the `nats stream edit` of the message, lower reorder.memory, or set " +
			"reorder.mode to horizon. A max_age cannot be kept in gap mode."},
	{Code: "memory_lost", Severity: Critical, Classes: gap,
		Title: "Messages that gap mode remembers were removed from the stream",
		Hint: "Find out who removes messages, and leave the newest reorder.memory alone, twice as many " +
			"to be safe. Then run `outflow repair --accept memory_lost`.",
		Runbook: "`outflow repair` goes on with what the stream still has: no event is missing, but a " +
			"sequence that is not remembered any more is [cold](ordering.md#what-it-cannot-do) once. If " +
			"the stream has messages beyond the newest checkpoint, it makes a new slot and fills the " +
			"gap from the table; give it a `--where` that leaves out rows whose messages were removed, " +
			"but none that may have been held."},
	{Code: "held_missing", Severity: Critical, Classes: fatal,
		Title: "An event that gap mode held does not come again from the WAL as it was",
		Hint: "The columns of document, actor and counter changed while events were held: change them " +
			"back until reorder.bound has passed."},
	{Code: "spill_limit", Severity: Critical, Classes: fatal,
		Title: "A transaction needs more disk to be sorted than reorder.max_spill allows",
		Hint: "Raise reorder.max_spill to about three times the transaction's size, with " +
			"reorder.spill_dir on a disk that has the room. Nothing is lost: PostgreSQL keeps the " +
			"transaction until it is published."},
}
