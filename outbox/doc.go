// Package outbox holds the words of Outflow's format: what a service that writes events or a consumer that reads messages needs to
// name a position in the WAL ([LSN], [Position]), to read a message's header ([Header], [ParseHeader]), to turn a document's name
// into a token of a subject and back ([AppendToken], [ParseToken]), and the errors that Outflow returns ([Fault]). It depends on
// the standard library only.
//
// An event's [Position], the end LSN of its transaction and the index within it, is its identity and its rank in the total
// order of the WAL.
package outbox
