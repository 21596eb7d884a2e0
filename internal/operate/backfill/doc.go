// Package backfill publishes rows of the outbox table that no WAL brings any more: those that a repair misses, and those that were
// there before the slot. It holds what both need: the connections of an attempt and what a start reads over them ([Conns]), rows that
// become events by way of the decoder ([Rows]), and the window in which they are published and then read back ([Window]).
//
// What a backfill publishes has positions with an index from [outbox.RepairedIndex] on, at the LSN from which on the WAL brings what
// follows. Who publishes has given the stream a new ingress before, so that nobody else gets in between, and has said so in the
// checkpoint record, so that nothing takes half of it for the whole.
package backfill
