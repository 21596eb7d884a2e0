// Package snapshot is `outflow init --snapshot`: it publishes the rows that are already in the outbox table,
// and makes the slot that brings everything after them.
//
// # Why each row is published once
//
// PostgreSQL exports a snapshot with a new slot. The snapshot shows exactly the transactions that committed
// before the slot begins, and the slot brings all others. So each row is in one of the two, whatever is
// written meanwhile: PostgreSQL waits for transactions that are open when the slot is made, and for those
// whose commit is in the WAL but not visible yet, because they wait for a synchronous standby.
//
// The exported snapshot lives only as long as its connection. A process that is killed loses it, and no other
// snapshot shows the same rows: the table doesn't say which of them the old slot would bring. So the next
// attempt makes another slot with another snapshot, and leaves out the rows whose event ids the stream
// already has. Until a snapshot finishes, nothing but snapshots publishes to the stream: the record forbids
// it, and each attempt renews the ingress. So it is enough to compare the stream with the table. A row is in
// the stream, in the new snapshot, or comes from the new slot.
//
// # The steps, each of which may be followed by a kill -9
//
//  1. Table, publication, stream and bucket are made, as outflow init makes them.
//  2. The record says that a snapshot is under way, and has no checkpoints: from now on run and init stop
//     (snapshot_unfinished). Then the stream gets a new ingress, so that another snapshot, suspended or still
//     running, can't publish any more, and nothing that an earlier attempt has sent arrives late.
//  3. The event ids in the stream are read into a temporary table on the server, so that memory doesn't grow
//     with them.
//  4. The table is locked against ALTER TABLE and TRUNCATE, which a snapshot would not see correctly. The
//     record is read once more. The slot, if there is one, is dropped, and a new one made with a snapshot.
//  5. The rows are published as one window in the order (document, key, id). The server sorts them.
//  6. The window is read back. After sink.durable_after the record is saved without the mark and with its
//     first checkpoint, which is where the slot begins, behind the window.
//
// Each further attempt begins with step 2.
package snapshot
