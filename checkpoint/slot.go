package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The codes of a slot that can't be ours: exit code 3, and 4 where a record says that ours had its name.
const (
	codeSlotPlugin   = "slot_plugin"
	codeSlotDatabase = "slot_database"
)

// ForeignSlot is the fault of a slot that has the name of ours and can't be ours: a physical one, one of
// another output plugin or of another database. nil: it may be ours. Where a record says that there was one
// of ours under that name, it is lost: [Resolve] makes it a gap.
func (c Config) ForeignSlot(s relay.SlotState, database string) *outbox.Fault {
	f := &outbox.Fault{Class: outbox.Fatal, Code: codeSlotPlugin,
		Hint: "Set slot to a name that is not in use: that one is not this outflow's"}
	switch {
	case !s.Exists:
		return nil
	case s.Database == "":
		f.Message = fmt.Sprintf("replication slot %s is a physical one", c.Slot)
	case s.Plugin != "pgoutput":
		f.Message = fmt.Sprintf("replication slot %s has output plugin %q, not pgoutput, and belongs to "+
			"database %s", c.Slot, s.Plugin, s.Database)
	case s.Database != database:
		f.Code = codeSlotDatabase
		f.Message = fmt.Sprintf("replication slot %s belongs to database %s, the connection is to %s", c.Slot,
			s.Database, database)
		f.Hint += fmt.Sprintf(". Or correct postgres.url, if database %s is the one that is meant",
			s.Database)
	default:
		return nil
	}
	f.Message += holder(s)
	return f
}

// SlotTaken is the fault of a slot that somebody else holds, of which there is no record.
func (c Config) SlotTaken(s relay.SlotState) *outbox.Fault {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "slot_taken",
		Message: fmt.Sprintf("there is no checkpoint record of slot %s in stream %s%s", c.Slot, c.Stream,
			holder(s)),
		Hint: "If that is another outflow, a subscription or another program, set slot to a name that " +
			"is not in use. If it is this outflow, stop it first",
	}
}

// holder says who holds a slot.
func holder(s relay.SlotState) string {
	switch {
	case s.ActivePID == 0:
		return "; nobody reads from it now"
	case s.Holder == "":
		return fmt.Sprintf("; the process with pid %d reads from it", s.ActivePID)
	}
	return fmt.Sprintf("; the process with pid %d (%s) reads from it", s.ActivePID, s.Holder)
}
