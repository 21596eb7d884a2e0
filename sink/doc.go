// Package sink publishes ordered events to one JetStream stream and reports the acknowledged prefix. Package
// stream below it creates, checks and reads that stream; package internal/jsapi asks JetStream's API for
// both.
//
// It is internal to Outflow: its API may change at any time.
//
// # Why the stream is an exact prefix
//
// Every message carries Nats-Expected-Last-Sequence: the sequence that it is predicted to get, less one.
// Messages are pipelined, each predicted from the one before. The server stores a message only if the
// stream's last sequence is the expected one. So the message predicted for sequence s is stored only when s-1
// is the last, that is, only directly after the message predicted for s-1. If one is dropped on the way,
// refused or late, all those behind it are refused as well: the stream holds a prefix of what was sent,
// without holes and in the same order.
//
// In an atomic batch only the first message carries it, because the server accepts it on no other. It covers
// all of them: the server stores a batch whole or not at all, directly behind the sequence that its first
// message expects, and checks that when the batch ends. If one message of it is lost on the way, so are the
// batch and everything behind it (see [Batches]).
//
// This is safe against anything lost, late or refused, and against a second Outflow of the same slot, such as
// a zombie: the order is a function of the WAL, so it sends the very same message for a given sequence. It is
// not safe against a foreign message: that takes a sequence, our message for the sequence is refused
// (silently, if it asked for no acknowledgement), and the one behind it finds the last sequence that it
// expects. Each foreign message would cost one of ours. So nothing foreign may get in.
//
// Nothing foreign gets in because the stream has a private ingress: its only subject is _outflow.<random>.>,
// and a subject transform of the stream takes that prefix off. A publish to the public subject reaches no
// stream. [Conn.CheckStream] refuses a stream that is built otherwise, or to which the server itself adds
// messages. Nobody else may know the ingress or be permitted to publish there. If somebody does publish
// there, [Conn.Watch] notices.
//
// Where clusters share a stream, somebody else may go on with it in another way than the one whose messages
// are still on their way: behind a cut ([outbox.Cut]). So there each message also names the newest cut that
// its sender knows ([Publisher.BehindCut]), and is refused if the stream has another one. With more than one
// replica the server takes one such message at a time, or one batch.
//
// # What an acknowledgement proves
//
// The acknowledgement of sequence s proves every message up to s, so only some messages ask for one: every
// 50th, one per 256 KiB, and the last of what is ready (see [Publisher.Flush]); of an atomic batch the last
// one. It counts only if it names our stream, the predicted sequence, and is no duplicate: anything else
// means that the prediction was wrong. It does not prove an fsync: see the setting sink.durable_after.
//
// # Done, not done, unknown
//
// A refusal says "not done", an acknowledgement "done". A time-out, a lost connection and an unexpected
// acknowledgement say "unknown": the messages may be in the stream, or still on their way into it. Sending
// them again does not resolve that. This package reports an error, the connection is of no more use, and the
// next one reads the stream itself ([Conn.State]). Its first message expects the last sequence found there.
// So a message that the old connection still had on its way is either stored where it belongs, and then the
// new connection fails and reads again, or it is refused.
//
// # Going on after a failure
//
// The next connection may belong to the same session ([Conn.Resume]). A publisher keeps the messages that it
// has sent and that are not acknowledged, as they were encoded, and the newest acknowledged one. If the
// stream has only these behind the acknowledged one ([Conn.Stored]), it is a prefix of what was sent, and the
// rest is sent again: the same bytes, each at the sequence that it was predicted for. The old connection's
// copy of a message, if it arrives late, expects the same last sequence. Whichever copy is first is stored,
// and then the last sequence is not what the other one expects. So the copies may arrive in any mixture: each
// sequence gets one of two equal messages, and a message is stored only behind the one before it. If our copy
// is the second and asks for an acknowledgement, it is refused: an error like any other, after which the
// stream is read again and its end is found further on.
//
// # Rows that can't be published
//
// A row that is too large, lacks a required value, or could not be decoded never reaches the stream as it is.
// Which rows these are depends only on the row and the settings, never on the server's limits, so that every
// Outflow decides alike ([Conn.CheckStream] refuses a server or a stream whose limit is below
// sink.max_payload). The reasons are in [Reason].
package sink
