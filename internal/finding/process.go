package finding

var process = []Finding{
	{Code: "panic", Severity: Critical, Classes: transient,
		Title: "A defect of Outflow has ended the process",
		Hint: "Start it again: it goes on where it was, as after any end. Report the defect with the stack " +
			"that it has printed.",
		Runbook: "The stack stands before the message, or under `stack` where the log is JSON. If it ends " +
			"so each time, events wait in the WAL: nothing is lost."},
	{Code: "spill_dir", Severity: Error,
		Title: "The folder for transactions larger than the buffer can't be written to",
		Hint:  "Set reorder.spill_dir to a folder on a disk that the service may write to."},
	{Code: "spill_memory", Severity: Warning,
		Title: "The folder for transactions larger than the buffer is in memory",
		Hint: "Set reorder.spill_dir to a folder on a disk: a large transaction would take up the memory " +
			"that it is to save."},
	{Code: "spill_space", Severity: Warning,
		Title: "The folder for transactions larger than the buffer has little room",
		Hint: "Free some, or set reorder.spill_dir to another disk: such a transaction takes about three " +
			"times its size."},
	{Code: "memory_limit", Severity: Warning,
		Title: "The memory limit is too low for the ordering settings",
		Hint:  "Raise the container's limit, or lower reorder.max_bytes and reorder.max_events."},
	{Code: "process_absent", Severity: Note,
		Title: "No process of Outflow runs on this host",
		Hint:  "Nothing is wrong if it runs on another one: slot.active says whether the slot is read."},
	{Code: "process_other", Severity: Warning,
		Title: "The process on this host belongs to another installation",
		Hint:  "Give doctor the configuration of that process, or each of them a `listen` of its own."},
	{Code: "process_not_ready", Severity: Error,
		Title: "The process on this host publishes nothing",
		Hint:  "Its state and its last error say why; so does its log."},
	{Code: "single_instance", Severity: Note,
		Title: "No second Outflow waits to take over",
		Hint: "Start another `outflow run` with the same configuration on another host: it stands by, and " +
			"goes on within seconds when this one is gone."},
}
