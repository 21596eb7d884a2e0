// Package erasure knows what an erasure of a document is: which messages are its, up to where, and how far it
// has come.
//
// # The cut
//
// First all rows of the document are deleted. The cut is the end of WAL, and the stream's last sequence
// before that, read when no row of it was left and no transaction was open that might still have written one.
// So what the stream had by then, and what was committed below that LSN, is what goes, wherever it lies; and
// what is written later stays, and is published and archived as ever.
//
// Messages of an earlier cluster have LSNs of another WAL, and nothing in them says so: only the sequence
// tells that they came before. So where a stream loses its end, whoever goes on behind it lowers the cuts
// first.
//
// When every slot has confirmed the cut, no WAL brings the messages again. Those at or below the confirmed
// checkpoint go from the stream: a start compares none of them. Those behind it, the newest message, and what
// gap mode remembers, have to wait.
//
// # The record
//
// A request is a row of outflow_erasures, beside the outbox. It has no name of a document, only an HMAC of
// it, under a key of its own. Each step is found again after a kill: what is done is looked for in the table,
// the stream and the archive themselves, and only the cut is remembered.
package erasure
