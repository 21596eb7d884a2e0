// Package claim is the rule by which clusters that share nothing publish for one another (decision 0057):
// what a home may publish, and who publishes for it when it is silent. It is a state machine without clock
// and I/O. Who drives it gives it what was read from its own WAL, in that order, and the time, by a
// monotonic clock of its process; writes the rows that it asks for; and publishes what it allows.
//
// [Home] is a cluster's own part, [Reader] that of a cluster that reads the rows of one home. Both are
// values: a copy is what has to be kept to go on from that point of the WAL. Nothing in them depends on when
// something was read but the silence that a Reader counts and for how long a commit has been there, which
// both begin anew with each start, and how long a Home's NATS is away, or it waits for the others.
//
// # What the driver owes
//
//   - Everything that was read from the WAL goes in, once and in its order: of a Home the cluster rows, with
//     where and when they were committed, of a Reader also the home's commits with events.
//   - Rows are written by one writer, one after the other. One that isn't committed within a quarter of the
//     delay is never committed: its statement asks the server's clock.
//   - Whether a row was committed is known when it is read in the WAL, and not before. A write that failed,
//     or of which nobody knows, is not repeated: it is asked for again.
//   - After a start, and when its NATS is back, a home reads what its stream has before it publishes
//     anything. What it has counts as published, whether it was acknowledged or not.
//   - It says with [Home.Stored] when NATS has stored a message, or there was none to be stored.
//   - What was left to others stays left: it is recorded before anything is left out.
//   - A [Range] that a Reader gives is published whole, in the home's order, once, however often the process
//     dies meanwhile.
//   - While its NATS can't be reached, a Reader is not told that the WAL is read to its end: it claims
//     nothing.
//   - A hello has a greater number than each one before of the same home, also one that may still be on its
//     way. It is taken when a hello is to be said, and durable before that is.
package claim
