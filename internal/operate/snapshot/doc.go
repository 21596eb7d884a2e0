// Package snapshot is `outflow init --snapshot`: it publishes the rows that are in the outbox table already, and makes the slot that
// brings what follows them.
//
// # The argument
//
// PostgreSQL exports a snapshot with a new slot: it shows exactly the transactions that committed before the slot begins. What the
// slot brings are the others. So a row is in one of both, whatever is written meanwhile: a transaction that is open when the slot is
// made is waited for, one that has its commit in the WAL and is not visible yet (it waits for a synchronous standby) too.
//
// The exported snapshot lives as long as a connection. Whoever is killed has lost it, and no other shows the same rows: which of them
// the old slot would bring is not in the table. So the next attempt makes another slot, which exports another snapshot, and leaves
// out of it what the stream has already, by event id. Until it has come to its end nothing but snapshots has published to the stream
// (the record says so, and the ingress is new with each attempt), so the stream and the table are all that has to be compared. A row is
// published once by this, and none is left out: it is in the stream, in the new snapshot, or comes from the new slot.
//
// # Steps, each of which may be the last before a kill -9
//
//  1. Table, publication, stream and bucket are made, as outflow init makes them.
//  2. The record says that a snapshot is under way, without places: from now on run and init stop (snapshot_unfinished). Then the stream
//     gets a new ingress, so that another one that sleeps, or still runs, publishes nothing any more, and nothing that an earlier attempt
//     has sent comes in late.
//  3. The event ids that the stream has are read into a temporary table of the server: memory does not grow with them.
//  4. The record is looked at once more. A slot that is there is dropped, and made anew, with a snapshot. The table is locked before against ALTER TABLE and TRUNCATE,
//     which a snapshot does not see as it should.
//  5. The rows are published as one window in the order (document, key, id), which the server sorts.
//  6. The window is read back. After sink.durable_after the record is saved without the mark, with its first place: where the slot
//     begins, behind the window.
//
// An attempt that follows begins with step 2 again.
package snapshot
