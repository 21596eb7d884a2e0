// Package parts names everything that `outflow init` makes, and `outflow partition`. Init reports by these
// names what it makes, and uninstall has to say of each what becomes of it: so neither can know a part that
// the other one does not.
package parts

// Part is a kind of object that belongs to an installation.
type Part string

// The parts.
const (
	Table       Part = "table"
	Publication Part = "publication"
	Stream      Part = "stream"
	Bucket      Part = "bucket" // of the checkpoint record
	Slot        Part = "slot"
	Record      Part = "checkpoint record"
	Counters    Part = "table of counters" // of --sql-api, and of package producer
	Function    Part = "function"          // of --sql-api, with its schema
	States      Part = "table of states"   // of outflow partition
)

// All lists them in the order in which init makes them.
func All() []Part {
	return []Part{Table, Publication, Stream, Bucket, Slot, Record, Counters, Function, States}
}

// Of names an object: the kind, and the name if it has one.
func (p Part) Of(name string) string {
	if name == "" {
		return string(p)
	}
	return string(p) + " " + name
}
