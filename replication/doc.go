// Package replication streams WAL data from a logical replication slot, confirms what need not come again,
// and reads what the server says of itself. Its sub-packages open connections, make and check what is in the
// catalog, and read the table.
//
// It is internal to Outflow: its API may change at any time.
//
// # Who owns the connection
//
// A [Session] has two connections to one server. The ordinary one answers questions ([Session.Slot],
// [Session.Publication], [Session.Table]) for as long as the session lives, because the other one can't once
// it streams. The replication one belongs to pgconn until [Session.Start] has been answered; then it is taken
// over, and from there on two goroutines own one half each: the reader alone reads from it, the writer alone
// writes to it. Nothing else touches it, except to close it.
//
// A session that only asks ([Inspect]), such as an operator's command, has one connection for both.
//
// The take-over loses no byte. pgconn reads ahead, so WAL data may lie in its buffer when the answer to
// START_REPLICATION arrives; at a transaction boundary its loss would be silent. Therefore pgconn never gets
// the chance: it reads through a frameReader, which hands out one protocol message at a time and keeps the
// rest, and the reader goes on from what is left in it.
//
// # Reading and replying are independent
//
// A server that hears nothing for wal_sender_timeout drops the connection, and then sends everything again. A
// consumer that is slow (a broker that is away, a large transaction that spills) must not cause that. So
// backpressure only means that the reader stops taking data off the socket: its queue is bounded in batches
// and in bytes. The writer goes on: it answers at once when asked, within 100 ms when the confirmed LSN
// moved, and at least each quarter of wal_sender_timeout (10 s at most). Writes carry a deadline, so a dead
// peer ends the stream instead of holding the writer.
//
// For the same reason the replication connection asks the server for a wal_sender_timeout of 10 s where the
// server's is longer or off: a process that died with its host, or was cut off, then holds the slot for ten
// seconds rather than a minute.
//
// # What is confirmed
//
// Each status carries one LSN three times: write, flush and apply are what [Session.Confirm] was told, and
// zero until then, which the server takes as "nothing". The position that was received is never sent, since
// the server would keep it as confirmed where flush is zero. The server does not check what it is told
// either: an LSN beyond its WAL is stored, and whatever commits below it is lost at the next start. So the
// writer never sends more than the stream has been seen to reach, whatever it is told.
//
// # When the server stops
//
// A server that shuts down waits until its walsenders' clients have taken and confirmed everything. An
// outflow that can't publish would hold it up without end, and what the server could say of it on the stream
// lies behind everything that is to be taken first. But before that it ends all ordinary connections. So the
// session's own is watched whenever nobody uses it, and its end ends the stream at once, whatever the
// consumer does.
//
// # What ends a stream
//
// The stream ends at the first thing that is out of the ordinary, and [Session.Err] says what: nothing is
// repaired in place. Two cases are faults rather than reasons to connect again. The publication may be
// missing at this point of the WAL: up to PostgreSQL 17 the server says so as an error, from 18 only in a
// notice, and skips the rows in silence; so that notice ends the stream before anything behind it is
// delivered.
package replication
