// Package tablesnapshot reads rows of the outbox table as they were at one moment: that of a new slot, whose
// exported snapshot holds exactly the transactions that the slot does not decode, or now. Values have the
// text that they have in the stream of changes, so that a row makes the same event whichever way it came.
//
// It is internal to Outflow: its API may change at any time.
package tablesnapshot
