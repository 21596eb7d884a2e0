// Package partition keeps the outbox table small: it makes partitions ahead of time, and lets the oldest go
// when somebody else durably has their rows and nobody needs them here.
//
// # What may go
//
// A partition is dropped, and a row of a plain table deleted, only while all clauses of rule.go hold. None of
// them believes a time stamp or an id of a row:
//
//  1. It is detached, and a fence lies behind its rows. DETACH waits for every transaction that holds the
//     table, prepared ones too, and whoever writes to the detached table itself is kept out by a SHARE lock
//     while the fence F is read: the end of WAL. So each of its rows was committed below F.
//  2. Every slot that reads rows from this database (pgoutput, less those that the operator names) has
//     confirmed F. For Outflow's own that means: all of it is durable in the stream.
//  3. Its rows are verified to be there, or in the archive where there is one: those whose ids are in no
//     message were never published. They are refused until the operator accepts their number.
//  4. The archive has come to F or, without one, it was sealed longer ago than the time that a repair has to
//     work with.
//  5. No record says that a repair or a snapshot is under way, and the stream is the one that was verified.
//
// Rows of a plain table are not detached, and their fence has two parts; see fences.go.
//
// Age, size and number of rows choose how much goes, never whether it may.
//
// # Killed at any point
//
// A partition's state is a row of outflow_partitions, beside the outbox. It is written before what it
// announces, and what was done is read from the catalogs: an interrupted DETACH leaves inhdetachpending,
// which FINALIZE ends, and a fence is only ever moved on. The last step is one transaction: lock, check every
// clause again, DROP. Two runs are kept apart by an advisory lock of the session that does the work; a run
// whose session is gone can't do anything any more.
package partition
