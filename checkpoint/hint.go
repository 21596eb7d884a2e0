package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
)

// The hints: what an operator can do with psql and the nats command line. They are all here, so that they
// change together.

const (
	hintVersion = "Run the version of outflow that wrote it, or a newer one"

	hintCorrupt = "Run `outflow repair`: it says what can be done and changes nothing; `outflow repair " +
		"--accept record_corrupt` then makes " +
		"the record again from stream, slot and table. Or look at its revisions with `nats kv history " +
		"<bucket> <key>` and put the newest good one back with " +
		"`nats kv revert <bucket> <key> <revision>`; outflow checks it against slot and stream before it " +
		"goes on"
)

const hintStopped = "But first keep everybody else out of Outflow's NATS account (docs/nats.md)"

const hintRestore = "Run `outflow archive restore` again: it goes on where it was. Then `outflow repair` " +
	"says what the archive did not have"

// hintArchive is for a stream that is gone or empty: the rows that retention has removed are in the archive
// alone. One that has messages may be the restored one.
func (c Config) hintArchive(s relay.StreamState) string {
	first := ""
	switch {
	case s.LastSeq > 0:
		return ""
	case s.Exists:
		first = fmt.Sprintf("remove the empty stream with `nats stream rm %s` and ", c.Stream)
	}
	return "But if there is an archive, " + first + "run `outflow archive restore` before that: it brings " +
		"the stream back with the sequences that consumers know, and the repair has only to publish what " +
		"the archive lacks. "
}

const hintShard = "Set shard to what the record says: what slot and stream are of is settled when they are " +
	"made. To divide a table otherwise, " +
	"give each new shard a slot, a publication and a stream of its own, as docs/upgrades.md says"

func hintBucket(stream string) string {
	return fmt.Sprintf("Give it what outflow init would have: `nats stream edit %s "+
		"--max-msgs-per-subject=%d --max-age=0`",
		stream, history)
}

// hintOf is the hint of a gap: the repair first, but where a slot stands in its way that may be somebody
// else's, or where it is not the repair that is to go on.
func (c Config) hintOf(code, otherwise string) string {
	switch code {
	case codeSlotDatabase, codeSlotPlugin, CodeSnapshotUnfinished, CodeRestoreUnfinished:
		return otherwise
	}
	if c.Mapping.Away() {
		return c.anew()
	}
	switch c.Mapping.Source {
	case relay.FromMessage:
		return "Run `outflow repair`: it says what can be done and changes nothing. There is no table: " +
			"what is neither in the stream nor in the WAL " +
			"any more can't be brought back. " + otherwise
	case relay.FromBoth:
		otherwise = "Events that were written as messages can't be brought back from it. " + otherwise
	}
	return fmt.Sprintf("Run `outflow repair`: it says what is missing and changes nothing; `outflow repair "+
		"--accept %s` then closes the gap "+
		"from the rows of %s. %s", code, c.Table, otherwise)
}

// events are those of a range of the WAL, at the beginning of a sentence.
func (c Config) events() string {
	switch c.Mapping.Source {
	case relay.FromMessage:
		return "Events"
	case relay.FromBoth:
		return "Rows of " + c.Table + " and message events"
	}
	return "Rows of " + c.Table
}

func (c Config) hintUnfinished() string {
	return "It goes on where it was, as often as it takes; nothing is published until it has finished"
}

func (c Config) hintSnapshot() string {
	return "Run `outflow init --snapshot` again: it goes on behind what is published, as often as it " +
		"takes; `outflow run` publishes nothing before"
}

func (c Config) hintNotEmpty() string {
	return fmt.Sprintf("Or, if its messages are of no use, remove it with `nats stream rm %s` and run "+
		"`outflow init` again", c.Stream)
}

func (c Config) hintInit() string { return "Run `outflow init`" }

func (c Config) hintInitBehind(seq uint64) string {
	return fmt.Sprintf("Run `outflow init`: it goes on in the stream behind sequence %d, with what is "+
		"written after it; or remove what is left with `outflow uninstall --with-stream`", seq)
}

func (c Config) hintInitAgain() string {
	return "Run `outflow init` again: it finishes what is missing"
}

func (c Config) hintMapping() string {
	return "Set source, replication.origin, table and columns to what the record says, or, if they are to " +
		"change, run `outflow init` with the new ones: " +
		"it changes them once all that was written before is published"
}

// anew is the hint of last resort: a new slot, a new stream, a new record. Consumers lose their places by it:
// the page has all steps, and uninstall refuses to remove what nobody has read.
func (c Config) anew() string {
	if c.Mapping.Away() {
		uninstall := "outflow uninstall --with-stream"
		if c.Cluster > 0 { // the stream is the home's, and there is no other
			uninstall = "outflow uninstall"
		}
		return fmt.Sprintf("The table does not say which of its rows are the home's, so nothing fills the "+
			"gap: the home's own stream has them. Start this one anew with `%s` and `outflow init`: it then "+
			"has what subscription %s brings from there on", uninstall, c.Mapping.Subscription)
	}
	const lacks = "that range, and what was committed until init made the new slot,"
	again := "insert the rows of " + lacks + " into " + c.Table + " again"
	if c.Mapping.Source.Messages() {
		again = "let the services write the events of " + lacks + " again"
	}
	return "start anew, as docs/operations.md says: `outflow uninstall --with-stream`, `outflow init`; " +
		"then " + again + ", or accept the gap"
}

func (c Config) hintLost() string {
	return c.events() + " that were committed in that range are not published. As the last resort, " +
		c.anew()
}

func (c Config) hintServer() string {
	return "If this is not the server that is meant, correct postgres.url. As the last resort, " +
		c.anew()
}

// hintForeignSlot never advises to drop the slot: whoever it belongs to may need it.
func (c Config) hintForeignSlot(s relay.SlotState, database string) string {
	first := "Find out whose it is"
	if s.Database != "" && s.Database != database {
		first = fmt.Sprintf("Correct postgres.url, if database %s is the one that is meant. Else find out "+
			"whose it is", s.Database)
	}
	closes := "closes the gap from the rows of " + c.Table
	if !c.Mapping.Source.Rows() {
		closes = "says what can be done without a table"
	}
	return fmt.Sprintf("%s: outflow's own slot of that name is gone. Once the name is free again, `outflow "+
		"repair --accept slot_missing` %s", first, closes)
}

func (c Config) hintStream() string {
	return fmt.Sprintf("If this is not the NATS account that is meant, correct nats.url. If there is a "+
		"backup, put it back with "+
		"`nats stream restore <directory>`. As the last resort, %s", c.anew())
}

func (c Config) hintRecord(slotExists bool) string {
	theirs := ""
	if slotExists {
		theirs = fmt.Sprintf("But if slot %s is not this outflow's (a subscription, another program or "+
			"another outflow may have it), "+
			"set slot to a name that is not in use, and do nothing to that one. ", c.Slot)
	}
	return fmt.Sprintf("%[4]sOr put the record back with `nats kv history %[1]s %[2]s` and `nats kv revert "+
		"%[1]s %[2]s <revision>`, "+
		"or from a backup. Without it nobody knows which of the events of that range are published. As the "+
		"last resort, %[3]s",
		Bucket(c.Stream), c.Slot, c.anew(), theirs)
}

func (c Config) hintForeign() string {
	return fmt.Sprintf("%s. `nats stream view %s` shows what was published: the messages without the "+
		"header. Leave them where they are: to remove them "+
		"brings back no event whose place they took further up", hintStopped, c.Stream)
}

func (c Config) hintBehind() string {
	return "If this is not the server that is meant, correct postgres.url. If it was restored from an " +
		"older copy or promoted " +
		"before it had everything, the stream holds events of that range that the database does not; tell " +
		"their consumers. " +
		"As the last resort, " + c.anew()
}

func (c Config) hintPublication() string {
	return fmt.Sprintf("Rows of %s that were written while %s did not publish them are in no stream. As "+
		"the last resort, %s",
		c.Table, c.Publication, c.anew())
}

func (c Config) hintDivergence() string {
	return fmt.Sprintf("Stream %s was not made from this WAL, or not by these rules: check postgres.url "+
		"and nats.url, and whether "+
		"the server was restored or the slot made anew. As the last resort, %s", c.Stream, c.anew())
}

func hintOtherSlot(c StoreConfig, other string) string {
	return fmt.Sprintf("Give each slot a stream of its own (setting stream). If nobody uses slot %s any "+
		"more, remove its record: nats kv del %s %s",
		other, Bucket(c.Stream), other)
}

func (c Config) hintMemoryLost(memory int) string {
	return fmt.Sprintf("Run `outflow repair`: it says what can be done and changes nothing; `outflow repair "+
		"--accept memory_lost` then goes on with what the stream still has, and sequences that only the "+
		"messages that are missing knew are new to it. Nothing else is lost. Whoever removes messages of "+
		"stream %s must leave the newest ones: `nats stream purge %s --keep=%d` leaves enough", c.Stream,
		c.Stream, 2*memory)
}

func (c Config) hintMemoryLimits(flag string) string {
	return fmt.Sprintf("Change it with `nats stream edit %s %s`, or lower reorder.memory, or set "+
		"reorder.mode to horizon", c.Stream, flag)
}
