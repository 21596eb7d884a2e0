// Package sink publishes ordered events to one JetStream stream and reports the acknowledged prefix. Package stream below it
// creates, checks and reads that stream; package internal/jsapi asks JetStream's API for both.
//
// It is internal to Outflow: its API may change at any time.
//
// # Why the stream is an exact prefix
//
// Every message carries Nats-Expected-Last-Sequence, which is the sequence that it is predicted to get, less one; messages are
// pipelined, each predicted from the one before. The server stores a message only if the stream's last sequence is the expected
// one. So the message predicted for sequence s is stored only when s-1 is the last, that is, only directly after the message
// predicted for s-1. If one is dropped on the way, refused or late, all that were sent behind it are refused as well: the stream
// holds a prefix of what was sent, never a hole, never another order.
//
// In an atomic batch only the first message carries it, because the server takes it on no other. It holds for all of them: the server
// stores a batch whole or not at all, directly behind the sequence that its first message expects, and checks that when the batch
// ends. A message of it that is lost on the way takes the batch with it, and all that were sent behind (see [Batches]).
//
// That holds against everything that is lost, late or refused, and against a second Outflow of the same slot, a zombie for
// example: by the rules of the order it sends, for a given sequence, the very same message. It does not hold against a foreign
// message: that one takes a sequence, ours for that sequence is refused, in silence if it asked for no acknowledgement, and the
// one behind it finds the last sequence that it expects. One of ours would be lost for each foreign one. So nothing foreign may
// get in.
//
// Nothing foreign gets in, because the stream has a door of its own: its only subject is a private ingress, _outflow.<random>.>, and
// a subject transform of the stream takes that prefix off. A publish to the public subject reaches no stream. [Conn.CheckStream]
// refuses a stream that is built otherwise, or to which the server itself adds messages. Nobody else may be told the ingress, or be
// permitted to publish there. Who publishes there all the same is noticed: [Conn.Watch].
//
// # What an acknowledgement proves
//
// The acknowledgement of sequence s proves every message up to s, so only some messages ask for one: every 50th, one per 256 KiB,
// and the last of what is ready (see [Publisher.Flush]); of an atomic batch the last one. It counts only if it names our stream, the
// predicted sequence, and is no duplicate: anything else says that the prediction was wrong. What it does not prove is an fsync: see
// sink.durable_after.
//
// # Done, not done, unknown
//
// A refusal says "not done", an acknowledgement "done". A time-out, a lost connection and an unexpected acknowledgement say
// "unknown": the messages may be in the stream, or still on their way into it. Sending again alone never resolves that. This package
// reports an error, the connection is of no more use, and whoever comes next asks the stream itself ([Conn.State]). Its first message
// expects the last sequence that it found, so what the old connection still had on its way is either the very message that belongs there
// or is refused, and then the new one ends and asks again.
//
// # Going on behind a failure
//
// Who comes next may be the same session on a new connection ([Conn.Resume]). A publisher keeps what it has sent and is not
// proved, as it was encoded, and the newest message that is proved. If the stream has nothing else behind what is proved
// ([Conn.Stored]), it is a prefix of what was sent, and the rest is sent again: the same bytes, each at the sequence that it
// was predicted for. The old connection's copy of a message, if it comes late, expects the same last sequence. Whichever of the
// two is first is stored, and with it the last sequence is no more what the other one expects. So they may arrive in any
// mixture: at each sequence there is one of two equal messages, and a message is stored only behind the one before it. Where
// our copy is the second and asks for an acknowledgement, it is refused: that is an error as any other, and the next look at
// the stream finds its end further on.
//
// # Rows that can't be published
//
// A row that is too large, lacks a value that it must have, or could not be decoded never reaches the stream as it is. Which
// rows these are depends on the row and on the settings alone, never on the server's limits ([Conn.CheckStream] refuses a server
// or a stream whose limit is below sink.max_payload), so that every Outflow decides alike. The reasons are in [Reason].
package sink
