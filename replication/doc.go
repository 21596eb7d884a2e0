// Package replication owns Outflow's connections to PostgreSQL and the replication slot: it reads what the server says of itself,
// streams WAL data and sends standby status.
//
// # Who owns the connection
//
// A [Session] has two connections to one server. The ordinary one answers questions ([Session.Slot], [Session.Publication],
// [Session.Table]) for as long as the session lives, because the other one can't once it streams. The replication one belongs to
// pgconn until [Session.Start] has been answered; then it is taken over, and from there on two goroutines own one half each: the
// reader alone reads from it, the writer alone writes to it. Nothing else touches it, except to close it.
//
// The take-over loses no byte. pgconn reads ahead, so WAL data may lie in its buffer when the answer to START_REPLICATION arrives;
// at a transaction boundary its loss would be silent. Therefore pgconn never gets the chance: it reads through a [handover], which
// hands out one protocol message at a time and keeps the rest, and the reader goes on from what that kept.
//
// # Reading and replying are independent
//
// A server that hears nothing for wal_sender_timeout drops the connection, and then sends everything again. A consumer that is slow
// (a broker that is away, a large transaction that spills) must not cause that. So backpressure only means that the reader stops
// taking data off the socket: its queue is bounded in batches and in bytes. The writer goes on: it answers at once when asked,
// within 100 ms when the confirmed LSN moved, and at least each quarter of wal_sender_timeout (10 s at most). Writes carry a
// deadline, so a dead peer ends the stream instead of holding the writer.
//
// For the same reason the replication connection asks the server for a wal_sender_timeout of 10 s where the server's is longer or
// off: a process that died with its host, or was cut off, then holds the slot for ten seconds rather than a minute.
//
// # A large backlog
//
// A walsender writes each message by itself, which for small transactions is most of what reading them costs.
// pg_logical_slot_get_binary_changes brings the same bytes in large pieces, and [CatchUp] says when a backlog is read so. What may be
// read, and by whom, is still decided by the slot alone:
//
//   - A temporary copy of the slot is made and moved to where the stream would have started. A sample of it shows whether the
//     transactions are small.
//   - The stream is started, and so the slot held, not there but at X, the end of the flushed WAL. That moves nothing: the slot's own
//     position follows from what is confirmed, as ever. The walsender goes through the WAL before X in silence.
//   - Chunks of whole transactions are read out of the copy until it has passed X. Then come the stream's own batches. [Session.Batches]
//     is one channel that carries both in this order.
//
// Nothing is missing at the seam, and nothing comes twice. The server reads a chunk record by record until one ends at or beyond the
// LSN up to which it was asked for, or enough changes have come, and the copy then stands at the end of that record: so a copy that
// stands at E has given every commit whose record begins before E, and no other. The last chunk is the one after which X <= E. A
// decoder that was started at X skips the commits whose record begins before X, and no other; it gives them whole, also those that were
// begun or prepared before X, because it reads from the slot's restart_lsn. So the chunks have all before E, the stream all from X on.
// Both would have what begins between X and E: a record that begins beyond X and ended a chunk, where X is not the end of a
// record. The stream's transactions that begin below E are emptied; what it says of relations in them is kept. By the same argument each
// chunk goes on where the last one ended, and a start at a place goes on behind it. X is an LSN of the flushed WAL, so the server can
// read up to it, and how far a chunk came is what the server says of the copy, not what was asked for.
//
// The messages are the same bytes, because they are made by the same plugin with the same options on a connection with the same pins.
// The order is that of the commits in both. So neither the sample nor a limit of time can do more than choose the slower way.
//
// Where anything fails before the slot is held, the backlog is streamed. What fails later ends the session, and the next one streams
// what lies before X. So whatever is wrong with the WAL is said by the stream.
//
// # What is confirmed
//
// Each status carries one LSN three times: write, flush and apply are what [Session.Confirm] was told, and zero until then, which
// the server takes as "nothing". The position that was received is never sent, since the server would keep it as confirmed where
// flush is zero. The server does not check what it is told either: an LSN beyond its WAL is stored, and whatever commits below it
// is lost at the next start. So the writer never sends more than the stream has been seen to reach, whatever it is told.
//
// # When the server stops
//
// A server that shuts down waits until its walsenders' clients have confirmed everything, and asks for a reply again after each
// reply. An outflow that can't publish would hold it up without end. Five such questions within a second, closer together than
// wal_sender_timeout could make them, mean that the server is stopping: the connection is closed with [ErrServerStopping].
//
// # What ends a stream
//
// The stream ends at the first thing that is out of the ordinary, and [Session.Err] says what: nothing is repaired in place. Two
// cases are faults rather than reasons to connect again. The publication may be missing at this point of the WAL: up to
// PostgreSQL 17 the server says so as an error, from 18 only in a notice, and skips the rows in silence; so that notice ends the
// stream before anything behind it is delivered.
package replication
