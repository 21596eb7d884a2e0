// Package oracle is a second opinion about a stream. It reads the stream back as any consumer would, and the
// truth from where outflow does not: from a slot of its own with PostgreSQL's test_decoding, and from the
// outbox table. It shares nothing with the streamer (a test looks after that): header, subjects and the rules
// of ordering are written here a second time, as the documents say them, without any of what makes the
// streamer bounded and able to go on where it stopped.
//
// [CreateSlot], then writing, then [Reader.Read] as often as one likes, then [Judge]: a stream is right if it
// is, message by message and byte by byte, the sequence that the WAL makes. [Truth.CheckTable] holds the
// truth itself against the table. [Compare] is the small form, for streams without such a slot: it compares
// stream and table alone.
package oracle
