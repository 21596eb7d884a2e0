// Package backfill publishes rows of the outbox table that no WAL brings any more: rows that a repair found
// missing, and rows that are older than the slot. It has what both need: the connections of an attempt and
// what a start reads over them ([Conns]), rows turned into events by the decoder ([Rows]), and the window
// that they are published as and then read back ([Window]).
//
// What a backfill publishes has positions with an index from [outbox.RepairedIndex] on, at the LSN behind
// which the WAL brings everything. Before it publishes, the caller gives the stream a new ingress, so that
// nobody else can publish in between, and says so in the checkpoint record, so that an unfinished backfill is
// not taken for a finished one.
package backfill
