// Package replay is `outflow replay`: it reads events again, from the stream while it has them, else from the outbox table, and puts them
// somewhere else than among the live ones.
//
// # Which source
//
// The stream has the events in the order in which they were published: that is the original order. It is read while it is known that it
// has everything of the selection: nothing was ever removed from it, or what was removed lies before the selection's lower end (see
// holds). What retention removed can't be looked at, so in all other cases nobody can say whether it belonged to the selection. Then the
// table is read, in the canonical order: by document, by key and by id, compared as bytes. Within a document that is the order of the stream,
// but for events that came late (beyond the horizon), and between documents it is none that ever was.
//
// The table may lack rows too: services delete them. Before it is taken each event of the selection that the stream still has is looked for
// in it, by id. If one is missing, neither of the two has everything, and nothing is read: a mixture would have an order that nobody made.
// The operator decides with --from. That rows were deleted whose messages retention removed as well can't be found out by anybody.
//
// # Each message once
//
// A replay into a stream carries its own record: each message has the replay's id and its place in the source. A message is published
// when the one before it is acknowledged, and expects the target's last sequence. Three things can happen to an answer that does not come, or that refuses:
//
//   - the message is there, from this process or from one of the same id that was killed: it is found among what has come in since
//     the last known sequence, and counts as published;
//   - somebody else has published: what came in is read, and the message is sent again with the new last sequence;
//   - nothing came in: it is sent again.
//
// A message sent twice is refused the second time, because the first has moved the last sequence. A replay that is run again finds its last
// message in the target and goes on behind it, from the same source and, in the stream, up to the same end. It is refused under the same id
// with another selection.
//
// # Never among the live events
//
// The target's subjects are compared, as patterns, with the live stream's own (the ingress), with all that its template could make, with
// dead letters, and with what belongs to NATS. The target is another stream; what that one transforms or republishes is compared as well.
package replay
