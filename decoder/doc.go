// Package decoder turns the messages of one replication session (pgoutput, protocol version 1) into outbox
// events and commits. It knows relations, columns and the inputs of the order, and nothing of connections. It
// is internal to Outflow: its API may change at any time.
//
// # Which identity an event carries
//
// An event is known by its index among the events of its transaction, and by the end LSN of that transaction,
// which comes with the Commit message, after the rows. A row's own LSN would be of no use: the rows of one
// COPY share it, and it need not rise from one transaction to the next. So Decode gives events without an
// LSN, numbered from 0, and the commit that follows gives the LSN to all of them. PostgreSQL sends a
// transaction whole, after it has committed, and in the order of the commit LSNs: what it rolled back never
// arrives, and a session that starts again counts the same events in the same way. The decoder holds it to
// that: a row outside of a transaction, a commit that is not the one announced, or an end LSN that does not
// rise is an error.
//
// # What is an input
//
// The order of the stream is a function of the inputs, so what is one is decided here, at the commit, from
// the transaction's content alone: events if it has any, else the last well-formed change of this slot's
// settings, else a tick, else nothing. Where the mapping says so, a transaction with an origin, which was
// replicated from elsewhere, is nothing either. From PostgreSQL 16 on the server leaves it out; below that it
// says the origin, behind Begin.
//
// Where a home's rows are read on another server it is the other way round: only transactions of one origin
// are inputs. The Origin message has the end LSN that the transaction had at home, and the commit record has
// its time from there; so its commit and its events have the position that they have at home, and
// [relay.Commit].Read says where it ended here.
//
// Ticks and changes of settings are logical messages, or, where the mapping names a control table, inserts
// into that one and nothing else: messages are not replicated, and the order must not depend on where the WAL
// is read.
//
// What clusters say to one another about who publishes what are rows of that table as well, and no inputs:
// the order does not depend on them. They are read from the transactions of each cluster that
// Config.Clusters names, this one's own among them, in the order of the WAL.
//
// # Rows and messages
//
// Where the mapping's source says so, a transactional logical message with the prefix outflow.event is an
// event too, or the only kind of event. It takes its index among the rows of its transaction in the order of
// the WAL, which is the order in which the server sends them; those of a savepoint that was rolled back never
// arrive. Its content is JSON, of which nothing is converted: the payload is the bytes that stand there. What
// is not exactly as it should be (an unknown member, one that comes twice, a number where a string must be)
// marks the event as one that can't be published, and says why: a guess at what was meant would be a silent
// change of it.
//
// # Same bytes in both forms
//
// A session may receive values as text or as binary, and a later one the other way. Each event must come out
// the same, to the byte, because a message that is made again is compared with the one in the stream. Binary
// is therefore read only for types whose text PostgreSQL's manual and its output functions fix under the
// settings that the session pins; any other type gives [ErrNeedText]. The payload of a bytea column is its
// bytes, not the hexadecimal digits of the text form.
//
// A generated seq_key column is in the WAL from PostgreSQL 18 on only, and only if the publication says so.
// Where it is not, the key is computed as SQL would do it, so that it does not matter to the order whether
// the column is published.
//
// # Counters
//
// Every event gets its counter and how many counters it takes, whichever mode is in force: settings change in
// the WAL, between one event and the next. Where a value is not a usable integer, the event only says so
// ([relay.Event.Unplaceable]). In horizon mode a counter may be any text, and such an event is as good as any
// other; in gap mode the buffer, which knows the mode, marks it as bad.
//
// # Why the values may be kept
//
// The message that Decode is given lies in a buffer that will be read into again. What an event needs of a
// row is copied once, into an arena: blocks that are filled from front to back and never written to again.
// Strings and payloads refer to these blocks without a copy of their own, and the garbage collector frees a
// block when no event refers to it. One held event thus keeps a block of 256 KiB alive, so what is kept for
// longer than an event (a map's key) should be cloned. A value of 32 KiB or more has memory of its own, and a
// payload above Config.MaxPayload, which nobody may publish, is not copied at all.
//
// # Damage
//
// Lengths and counts in a message are claims. Every read is checked against the message's end and nothing is
// allocated on the strength of a claim, so no bytes whatever make Decode panic or allocate more than in
// proportion to the message. A message that is not exactly what the protocol allows ends the session, and the
// WAL is read again; a value that can't be decoded only marks its row ([relay.Event].Bad), because reading it
// again would not help.
package decoder
