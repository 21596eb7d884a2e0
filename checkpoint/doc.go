// Package checkpoint knows where we are: the places from which replication can go on, the record that keeps them, the start that
// is found from slot, record and stream, and the LSN that may be confirmed to PostgreSQL.
//
// A session calls, in this order:
//
//	Store.Load, Resolve           where to start; twice where a loss shows, and again once the slot is held
//	Proof.Input, Proof.Skip       for each input and each message, until all that the stream holds has been made again
//	Tracker.Made, Window, Marker  what the rules made
//	Tracker.Acked                 what the stream holds
//	Tracker.Snapshot, Store.Save, Tracker.Stored
//	Tracker.Confirmable, Tracker.Confirmed
//
// Resolve, Proof and Tracker are pure: no clock, no goroutine, no input or output. Times are passed in.
//
// # The argument
//
// Durable below means: survives whatever the broker may lose. That is everything the broker acknowledged durable_after ago; what is
// younger it may lose from any point on, stream and record each on its own, once in that time.
//
// A place is true: all windows up to its sequence are in the stream when it becomes one ([Tracker.Acked] came first), and they are
// a function of the WAL up to its due. So replication may start there, if the stream still reaches its sequence. A place that
// lies beyond the stream's end is not true any more, and Resolve drops it.
//
// The confirmed LSN is safe, and a place is always left at or above it. Let c be the place that was confirmed. It was in the record
// for durable_after before, by the clock that makes it younger and with a broker that has answered since, and its messages were
// acknowledged before it was stored. So they are durable, and so is the revision that first held c: whatever revision the broker is
// left with is that one or a later one. A later one holds c, or c was pruned from it because a newer place had been confirmed, for which the same holds. The stream reaches c's sequence, so c is not dropped, and
// its due is not below the confirmed LSN. A place read at the start counts from the time beside it, which is never before the store
// acknowledged it ([Tracker.Stored], [Record.StoredAt]); that it could be read shows that it was not lost meanwhile.
//
// Nothing is lost, nothing comes twice. From a true place the rules make the same messages again. The first Start.There of them
// are in the stream and are skipped; holes are not counted, because what was in them is made after the stream's last message and was
// written to the record before anything was sent. Where the broker lost its end without going back, End is the newest message that
// can be read. What is missing between it and a confirmed place was durable, so the broker can't have lost it: somebody removed it,
// and it does not come again. The age of a place is no sign of that: a loss may have happened long before the start that sees it.
//
// Two places are stored each time, and always one of a smaller sequence than the newest. From the newest place nothing is left to
// be made again: a start from there would go on behind a stream that some other WAL made. From one with a smaller sequence the last
// message is made again and compared. It is the last window's beginning, not the last record's, so a restart makes little again.
//
// A repair (outflow repair) publishes what no WAL makes. So up to its base the record says that messages are accepted: none of them is
// compared with the WAL, its end or its timelines, and its only place lies at base, so that none has to be made again. It waited for
// durable_after before it said so: what lies below base is durable, as what lies below a confirmed place is.
//
// The record is written with compare-and-set. A writer that was overtaken is refused, and one whose answer is late does not
// know ([ErrUnknown]): both drop the session.
package checkpoint
