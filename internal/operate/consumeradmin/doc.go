// Package consumeradmin is `outflow consumer`: it lists the consumers of a stream and rewinds one of them.
//
// # Where a consumer keeps its offsets
//
// A consumer of package consumer has an offset for each partition, in its database or in a key-value bucket.
// It makes its durable anew from them at each start, so a rewind lowers the offsets, in one transaction or
// one compare-and-set that also ends the lease's epoch: whatever an instance that nobody noticed still tries
// will fail. No offset is ever raised: a partition that was behind the target stays where it was.
//
// Any other durable has its position in JetStream alone, and no server can move it: the durable is deleted
// and made again. Before that, a durable of another name records its configuration and position in its
// metadata. So, if the command is killed at any moment, either the old durable is still there, or the record
// says what it was and the same command finishes the work.
//
// # Not while the consumer runs
//
// A running consumer would go on from what it has in memory. A consumer of package consumer shows that it
// runs by its lease; any other durable by pulls that wait, by a subscriber, or by deliveries or
// acknowledgements in the last seconds.
package consumeradmin
