// Package consumeradmin is `outflow consumer`: it lists the consumers of the stream, and sets one back.
//
// # Where a consumer is
//
// A consumer of package consumer keeps a mark for each partition: in its database or in a key-value bucket. The durable is made anew from
// the marks at each start, so to set such a consumer back is to lower its marks, in one transaction or one compare-and-set that also ends
// the lease's epoch: whatever an instance that nobody saw still tries fails. No mark is raised: a partition that was behind the new
// place stays where it was.
//
// For any other durable the place is in JetStream alone, and no server moves it: the durable is deleted and made again. Before that a
// durable of another name is made that holds configuration and place in its metadata. Killed at any moment, either the old durable is there,
// or the record says what it was and the same command finishes: the place is never lost in silence.
//
// # Not while it runs
//
// What runs would go on from what it knows. A consumer of package consumer says so by its lease; any other durable by pulls that
// wait, by a subscriber, or by what was delivered or acknowledged in the last seconds.
package consumeradmin
