// Package consumer reads the events of an Outflow stream: documents in parallel, each document strictly in order, and, with a
// PostgreSQL database, with the effect of each event exactly once.
//
// A handler gets an event and a transaction. What it writes through the transaction is committed together with a mark that says how far
// the document's partition is. So the effect is there if and only if the mark is beyond the event. The rest of this text argues that no
// event is applied twice or never; the tests are named with the cases.
//
// # What is kept
//
// Documents are divided into partitions by a hash. Each has a mark, one row: the stream sequence, and the header, of the message up to
// which everything of the partition is done. One instance is active, by a lease with an epoch; the others stand by. A session, the time
// from one start or error to the next, does this:
//
//  1. It takes the lease. That writes a new epoch into the consumer's row and into all marks.
//  2. It reads the marks, and compares the message at the newest one with the stream.
//  3. It deletes the durable JetStream consumer and makes it anew behind the oldest mark.
//  4. It reads. An event at or before the mark of its partition is passed over. For the others the partition's lane begins a
//     transaction whose first statement, in the same round trip, moves the mark from the value that this session knows, under this
//     session's epoch: UPDATE ... WHERE epoch = $mine AND seq = $known. If that finds no row, the session is over. Then the handler
//     runs, then COMMIT.
//
// Starting, connecting again and recovering are these same steps: nothing of an ended session is used again.
//
// # Why nothing is applied twice
//
// The effect of an event and the move of the mark over it are one transaction, and a transaction only begins when the mark is still
// before the event. The mark's row stays locked until the transaction ends, so no two transactions of a partition overlap, whoever
// began them. Hence:
//
//   - Redelivery, a crash before the acknowledgement, an acknowledgement that is lost: acknowledgements only let the server hand out
//     more. What comes again is at or before the mark. (TestCrashAnywhere, TestRandomFaults)
//   - Two instances: the lease keeps them from disturbing each other; it is not what makes the effects right. One whose lease ended, or
//     that slept through a take-over (SIGSTOP), has the old epoch: its next transaction finds no row. One that it had open when the
//     other took over is waited for, because the take-over updates the locked row; the server ends it when the handler's time
//     (Config.Timeout and 5 s) is over. (TestZombie, TestZombieInATransaction, internal/lab/e2e TestConsumerKills)
//   - A COMMIT whose answer is lost, for instance because PostgreSQL restarts, may have happened. The session ends. The next one
//     updates the marks, which waits for that transaction to end, and then reads them: they say. (TestLostAnswers,
//     TestPostgresRestarts)
//   - PostgreSQL fails over to a standby that lacks the last commits, or is put back from a copy: marks and effects go back together.
//
// # Why nothing is left out
//
// A mark moves over messages in the order of the stream only, and a session reads contiguously from behind the oldest mark:
//
//   - The reader of a session is the only one who may take messages from the durable. The durable's own sequence rises by one with
//     every delivery to anybody, so a delivery that went elsewhere (a thief, a zombie's pull request, a connection that broke, a client
//     that dropped messages) shows as a jump, and one that comes again as a step back: the session ends. What was taken last, without
//     anything behind it, shows when the reader is idle and the durable says that it has handed out more. (TestThief)
//   - NATS restarts, or a replicated stream or durable gets another leader: its state may go back by some deliveries. That is a step
//     back, too. The stream's state, and single messages, are asked of the leader only. (TestNATSRestarts, TestLeaderChanges)
//   - A lane that has nothing to do moves its mark to what the pump has read, in the lane's own queue, so behind everything that was
//     read before. With a filter the pump also moves on over what the filter leaves out, after the leader has said twice, some seconds
//     apart, that there is nothing for the filter before a message that was there the first time.
//   - Retention or a purge that removes what was not read: the stream's first sequence is beyond a mark, or a sequence is missing
//     between two messages. That is an error with the sequences (ErrGap), unless Config.AcceptGap is set. (TestGaps)
//   - A stream with another creation time, or another message at the newest mark, is an error (ErrStream). If that message is the same,
//     the stream was put back from a copy, and is read on. (TestAnotherStream)
//
// # A stream that lost its end
//
// A broker acknowledges before it syncs. After a crash the end of the stream may be gone. Outflow publishes it again, the same messages
// in the same order (docs/guarantees.md).
//
// If the last sequence went back, they get the sequences that they had. They are passed over up to the marks. The message at the newest
// mark must be the one that was there.
//
// If the last sequence stayed there is a hole, and they come again under new sequences, beyond the marks. Then the header decides:
// Outflow publishes in the order of (due, n), a repair's events by their index, so a message that is not behind the mark in that order
// was before it. This comparison is made only where it is known to be right. The order goes back, too, when the database was moved to
// another cluster, whose WAL begins at lower positions, and those events are new. So a session asks for the message at the newest mark.
// If it is there, nothing that was done has been lost, and sequences alone decide. If it is gone while older ones are there, each mark
// whose message is gone is marked as holed, and keeps that until it moves. It holds only until the stream is beyond what comes again:
// until a message comes that is later than all holed marks, or the order goes back although the message before is still there. A hole
// that appears while a session reads shows as an order that goes back, with the message before gone: the session ends, and the next one
// does the above. So it does if what comes next is not behind the newest mark, whose message was there when the session looked, and is
// gone now. Where retention has removed the newest mark's message, and earlier positions follow, nobody can tell: that is an
// error. (TestStreamLosesItsEnd, TestStreamLosesItsEndBeforeItIsRead, TestPositionsGoBack, TestRandomFaults)
//
// A repair that publishes once more, under new positions, what a broker lost for good after this consumer had read it, publishes
// another event: only its id tells.
//
// # Another number of partitions
//
// Only between sessions, with the lease held. The new marks begin at the oldest old one: up to there everything is done. What is done
// beyond, the old marks say: they are kept, unchanged, as a generation, and an event is passed over if the mark that its document had
// then is not before it. A generation goes when all marks are beyond it, also by their headers if it is holed. An
// instance with another number beside one that lives gets ErrPartitions. (TestPartitionsChange)
//
// # Order, and what fails
//
// A document belongs to one partition, a partition to one lane, and a lane does one thing after the other in the order of the stream.
// An event that fails is tried again in its lane, with pauses; the lane's later events wait, other lanes go on, until
// Config.MaxInFlight messages wait and the reader stops. After Config.MaxAttempts the event is parked, in a transaction that moves the
// mark over it, and so are all later events of its document until it is released: an event is in the table of the parked exactly if the
// mark is beyond it and its effect is not there.
//
// # Without a database
//
// With [JetStream] marks the handler's effect and the mark are not one. The mark is written after the effect, at most a second later:
// after a crash what was done since comes again, in the same order. At least once. An instance that could not renew its lease begins
// nothing more when it is over. (TestWithoutDatabase, TestLeaseThatCanNotBeRenewed)
package consumer
