// Package catalog makes and checks what Outflow needs in PostgreSQL: the outbox table, its publication and
// the replication slot.
//
// What is read comes from the system catalogs, over an ordinary connection, and takes no right on the table.
// The publication is read with its identity (OIDs and transaction ids of its catalog rows), so that one that
// was dropped and created again, or that did not publish the table for a while, is not taken for the one
// before: rows written meanwhile are not in the stream of changes.
//
// It is internal to Outflow: its API may change at any time.
package catalog
