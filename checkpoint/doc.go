// Package checkpoint knows where Outflow is: the checkpoints from which replication can go on, the record
// that keeps them, the start that follows from slot, record and stream, and the LSN that may be confirmed to
// PostgreSQL. It is internal to Outflow: its API may change at any time.
//
// A session calls, in this order:
//
//	Reader.Read, Resolve              where to start; twice where a loss shows, again once the slot is held
//	Start.Memory, Config.CheckMemory  what gap mode reads back from the stream
//	TailCheck.Input, TailCheck.Skip   for each input and message, until all the stream was made again
//	Tracker.Made, Window, Keepalive   what was made of the WAL
//	Tracker.Acked                     what the stream holds
//	Tracker.BeginSave, Store.Save, Tracker.Saved
//	Tracker.Confirmable, Tracker.Confirmed
//
// Resolve, TailCheck and Tracker are pure: no clock, no goroutine, no input or output. Times are passed in.
// The scripts in testdata show what they answer (TestEachScriptEndsAsItSays).
//
// # The argument
//
// Durable means here: it survives whatever the broker may lose. Everything that the broker acknowledged
// durable_after ago is durable; of what is younger it may lose the end, from any point on, of stream and
// record separately, once in that time.
//
// A checkpoint is true: all windows up to its sequence are in the stream when it is made ([Tracker.Acked]
// came first), and they are a function of the WAL up to its due. So replication may start there, if the
// stream still reaches its sequence. A checkpoint beyond the stream's end is not true any more, and Resolve
// drops it.
//
// The confirmed LSN is safe: a checkpoint is always left at or above it
// (TestOnlyDurableCheckpointsAreConfirmed; the pipeline's TestWhateverFailsTheStreamIsTheUndisturbedOne
// checks each confirmation). Let c be the checkpoint that was confirmed. It had been in the record for
// durable_after before, by the clock that makes it younger and with a broker that has answered since, and its
// messages were acknowledged before it was stored. So they are durable, and so is the revision that first
// held c: whatever revision the broker is left with is that one or a later one. A later one holds c, or c was
// pruned from it because a newer checkpoint had been confirmed, for which the same holds. The stream reaches
// c's sequence, so c is not dropped, and its start is not below the confirmed LSN. A checkpoint that was read
// at the start counts from the time beside it, which is never before the store acknowledged it
// ([Tracker.Saved], [Record.StoredAt]); that it could be read shows that it was not lost meanwhile.
//
// Nothing is lost and nothing comes twice (the pipeline's TestWhateverFailsTheStreamIsTheUndisturbedOne,
// TestKilledAtEveryStep). From a true checkpoint the same messages are made again. The first
// Start.AlreadyStored of them are in the stream and are skipped. Holes are not counted: what was in them is
// made after the stream's last message, and they were written to the record before anything was sent
// (TestWhatAStartFoundLostIsRecordedFirst). Where the broker lost its end without going back, End is the
// newest message that can be read. What is missing between it and a confirmed checkpoint was durable, so the
// broker can't have lost it: somebody removed it, and it is not published again. A checkpoint's age is no
// sign of that: a loss may have happened long before the start that sees it.
//
// Two checkpoints are stored each time, and always one of a smaller sequence than the newest. A start from
// the newest would have nothing to make again: it would go on behind a stream that was made from some other
// WAL. A start from one with a smaller sequence makes the last message again and compares it. That one is
// where the last window begins, not where the last record did, so a restart makes little again.
//
// In gap mode a checkpoint starts below its due while events are held, at the commit record of the oldest.
// Its messages are still a function of the WAL up to its due, of the holds and of the messages remembered: of
// what is read again up to its due nothing is published. Its start never goes back, but several checkpoints
// may start at one LSN. So the confirmed LSN alone does not tell which of them is durable: only the oldest of
// those is for certain. The record therefore keeps the newest checkpoint that is known to be durable, not the
// newest that starts at or below the confirmed LSN; otherwise a lost tail could leave none.
//
// A repair (outflow repair) publishes messages that no WAL makes. So up to its base the record says that
// messages are accepted: none of them is compared with the WAL, its end or its timelines, and the only
// checkpoint lies at base, so none has to be made again. The repair waited for durable_after before it said
// so: what lies below base is durable, as what lies below a confirmed checkpoint is.
//
// Where a home's rows are read on another server, due, positions and thru are the home's, and so is the
// order of checkpoints. The slot is not: so each checkpoint has in Read where its start lies in the WAL of
// the server that is read, and what is compared with the slot, with the end of WAL or with timelines is that.
// Several checkpoints may have one due, and differ in Read. Such a checkpoint is also a pair of positions:
// replication from Read on brings all inputs above what it covers. One at or below what the home has
// confirmed ([Tracker.Limit]) stays in the record, and the slot is not confirmed beyond it. The home always
// has a checkpoint at or above what it has confirmed, and for that there is such a pair: so whoever has both
// records can go on with the home's stream ([Record.Elsewhere]).
//
// What a home has left to other clusters ([relay.Left]) is not in the stream. The record says so before
// anything is left out, and names messages that the WAL makes: so from a true checkpoint the same ones are
// made again, without those, whatever the broker has lost.
//
// The record is written with compare-and-set. A writer that was overtaken is refused, and one that got no
// answer can't know ([ErrUnknown]): both drop the session.
package checkpoint
