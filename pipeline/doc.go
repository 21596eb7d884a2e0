// Package pipeline runs the stages and moves values between them. It decides what follows from a failure:
// start again, wait, or stop for a person. It is internal to Outflow: its API may change at any time.
//
// # One way to start
//
// Start, reconnect and recovery are the same code: [Pipeline.Run] runs sessions. A session is one replication
// connection, one buffer, and one NATS connection at a time; an error drops all of it, and nothing of it
// survives but metrics. So there is no retry of single messages, and no state that is right only if the last
// session ended well (TestWhateverFailsTheStreamIsTheUndisturbedOne, TestKilledAtEveryStep).
//
// One failure does not end a session: that of NATS alone, in a verified session, for 30 s (reconnect.go). To
// start replication again costs PostgreSQL the decoding of all WAL since the slot's restart point. So the
// session keeps what it has, looks at the stream and the record over a new connection as a start does, and
// goes on if they are exactly what it left there, or what it was about to. Anything else it finds is for the
// next start to judge.
//
// A home for which other clusters publish (Config.Islands, decision 0057) does not wait like that: it reads
// on for what they say, and begins again (listen.go).
//
// A session opens both connections, reads everything ([checkpoint.Reader]), finds the checkpoint to start
// from ([checkpoint.Resolve]), starts replication there and so becomes the owner of the slot, and reads
// everything again: only when that gives the same checkpoint was nobody else in the middle of something. Then
// it makes again the messages that are in the stream already, skips them, and compares the last ones
// ([checkpoint.TailCheck]). From there on the session is verified. Only a verified session publishes, writes
// the record, confirms, or writes heartbeats and changes of settings.
//
// # Who owns what
//
// One goroutine, the loop, owns decoder, buffer, tail check, tracker and publisher, so nothing that decides
// the order is shared. What may block and is not publishing runs as jobs of two workers: one for the record
// and for questions to both servers, one for what is written into the WAL. A job gets values and returns
// values.
//
//	input            decodes batches into the buffer                  input.go
//	output           makes messages of a window                       publish.go
//	checkpointer     stores the record                                checkpointer.go
//	monitor          reads how far both servers are                   monitor.go
//	heartbeatWriter  writes heartbeats and changes of settings        heartbeat.go
//	outage           what is known of NATS's failures                 reconnect.go
//	island           what is agreed with clusters that share nothing  island.go, listen.go
//
// The session puts them together; none of them knows it.
//
// The loop never waits for one thing alone: it waits for WAL data, acknowledgements, both workers, the loss
// of a connection, a timer and the end of ctx at once. While the publisher is full it takes no WAL data, and
// the bounded queue in front of it fills: that is the back-pressure (TestAFullPublisherStopsTheReadingOfWAL).
// A window is handed out before the next input is read, so what is in memory is what the buffer holds, what
// is in flight, and one batch.
//
// # Why no clock decides the order
//
// The loop looks at the clock for four things: when a heartbeat is written into the WAL, when the record is
// stored, which LSN may be confirmed, and when silence counts as a failure. The first becomes part of the WAL
// before it has an effect; the others never reach the buffer.
package pipeline
