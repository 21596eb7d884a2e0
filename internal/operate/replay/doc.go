// Package replay is `outflow replay`: it reads events again, from the stream as long as that has them,
// otherwise from the outbox table, and writes them anywhere but among the live events.
//
// # Which source
//
// The stream has the events in their original order, the order of publication. It is read if it is known to
// have the whole selection: nothing was ever removed from it, or what was removed lies before the lower end
// of the selection (see holds). What retention removed can't be looked at, so in all other cases it might
// have belonged to the selection. Then the table is read in the canonical order: by document, key and id,
// compared as bytes. Within a document that is the order of the stream, except for events that came late
// (beyond the horizon). Between documents it is an order of its own.
//
// The table may lack rows too, because services delete them. Before it is read, each event of the selection
// that the stream still has is looked up in it by id. If one is missing, neither source has everything, and
// nothing is read: a mixture would have an order that never existed. The operator decides with --from. Rows
// that were deleted and whose messages were also removed can't be found at all.
//
// # Each message once
//
// A replay into a stream needs no record of its own: each message has the replay's id and its position in the
// source. A message is published when the one before it is acknowledged, and expects the target's last
// sequence. If no answer comes, or a refusal, there are three cases:
//
//   - the message is in the target, from this process or from one with the same id that was killed: it is
//     found among the messages behind the last known sequence, and counts as published;
//   - somebody else has published: those messages are read, and the message is sent again with the new last
//     sequence;
//   - nothing new is in the target: it is sent again.
//
// A message that is sent twice is refused the second time, because the first has moved the last sequence. A
// replay that is run again finds its last message in the target and continues behind it, from the same source
// and, if that is the stream, up to the same end. The same id with another selection is refused.
//
// # Never among the live events
//
// The target's subjects are compared, as patterns, with the live stream's own (the ingress), with everything
// that its template could make, with dead letters, and with what belongs to NATS. The target is another
// stream; what that transforms or republishes is compared as well.
package replay
