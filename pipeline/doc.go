// Package pipeline runs the stages and moves values between them. It decides what follows from a failure: start again, wait, or
// stop for a person.
//
// # One path
//
// Start, reconnect and recovery are the same code: [Pipeline.Run] runs sessions. A session is one replication connection and one buffer,
// and one NATS connection at a time; an error drops the whole of it, and nothing of it survives but metrics. So there is no retry of
// single messages, and no state that is right only if the last session ended well.
//
// One failure is outlived: that of NATS alone, in a proved session, for 30 s (session.rejoin). To start replication anew costs PostgreSQL the
// decoding of all WAL since the slot's restart point. So the session waits with all that it has, looks at the stream and the record over a
// new connection as a start does, and goes on if they are exactly what it left there, or what it was leaving. Everything else it finds
// is the next start's to judge.
//
// A session opens both connections, reads slot, record, stream and server, lets [checkpoint.Resolve] find the place, starts
// replication there and so becomes the owner of the slot, and reads everything again: only when that gives the same place was
// nobody else in the middle of something. Then the messages that are in the stream already are made again and skipped, and the
// last of them is compared. From there on the session is proved, and only a proved session publishes, writes the record,
// confirms, or writes ticks and changes of settings.
//
// # Who owns what
//
// One goroutine, the loop, owns decoder, buffer, proof, tracker and publisher, so nothing that decides the order is shared. Two
// others do what may block: the recorder (reads the publication, stores the record) and the scribe (writes ticks and changes of
// settings). They get values and return values.
//
// The loop never waits for one thing alone: it waits for WAL data, acknowledgements, the recorder, the scribe, the loss of a
// connection, a timer and the end of ctx at once. While the publisher is full it takes no WAL data, and the bounded queue in
// front of it fills: that is the back-pressure. A window is handed out before the next input is read, so what is in memory is
// what the buffer holds, what is in flight, and one batch.
//
// # Why no clock decides the order
//
// The loop looks at the clock for four things: when a tick is written into the WAL, when the record is stored, which LSN may be
// confirmed, and when silence counts as a failure. The first becomes part of the WAL before it has an effect; the others never
// reach the buffer.
package pipeline
