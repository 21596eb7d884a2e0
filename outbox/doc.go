// Package outbox holds the words that every part of Outflow shares: LSN, Position, Event, Commit, Settings, Place, Header and
// the classes of failure. It depends on the standard library only, and every other package may import it.
//
// Two identities run through all of it. An event's [Position] (the end LSN of its transaction, the index within it) is its
// identity and its place in the total order of the WAL. A [Place] is a point to go on from: a pair of an LSN and a stream
// sequence that are known to belong together.
package outbox
