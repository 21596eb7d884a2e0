// Package reorder is the bounded buffer that puts events in order: committed transactions go in, in the order
// of the WAL, and closed windows come out. It is a state machine. It reads no clock, starts nothing, waits
// for nothing; its only effects are scratch files, and those decide nothing. It is internal to Outflow: its
// API may change at any time.
//
// # The calls
//
//	Append(event)     for each event of a transaction, as it is decoded
//	Commit(commit)    its commit record; a heartbeat or a change of settings has no events
//	Close()           once after each Commit: the window that this input made due, or nil
//	Cut(lsn)          instead of both, where the WAL does not say what closes the window
//	window.Next(&e)   until it returns false, before the next Append or Commit
//
// After an error the buffer is of no more use: the session calls Discard, and goes on from a checkpoint with
// a new one.
//
// # What a window is
//
// Inputs are due from the oldest on (due.go): all when the horizon is 0; else those that are a horizon older
// than the one just read, by commit timestamps; and as many as it takes to bring the buffer back below
// max_events and max_bytes. The window takes every held event at or below the newest due input (close.go),
// and pulls those younger ones that have a lower key than a taken event of their sequence, so that the edge
// cuts nothing. If more than MaxPublishedAhead events beyond due would have left the buffer then, it takes
// everything. If nothing is held afterwards, due is raised to thru. order.go and external.go sort it.
//
// # Why the order is a function of the WAL
//
// The state is: the settings, the inputs above the last due, the held events, and the positions that have
// left beyond that due. Each is changed by Commit and Close alone, from the commit records and events that
// PostgreSQL delivers in the order of the WAL, and from settings that are in the WAL too. No rule looks at
// anything else: time is the commit timestamp, sizes are those of the values (not of memory), all comparisons
// are of bytes, numbers and positions, and every order that is sorted by is total, because it ends in the
// position, which is unique. Three things in here do differ from process to process, and none reaches a rule:
//
//   - The index's hash is seeded. It only tells where a sequence lies in the table; the table is never gone
//     through to decide anything.
//   - What spills depends on memory. A spilled transaction is counted by the same tallies, pulled from by the
//     same comparison, and sorted by the same orders, merged instead of in one piece.
//   - Late counts by a table of fixed size; nothing reads the count.
//
// TestTheBufferIsTheModelOfHorizonMode compares all this with the rules written as lists and loops;
// TestTheOrderDependsOnTheInputAlone looks after the imports.
//
// # Why a checkpoint is enough to go on
//
// A checkpoint is (due, taken, settings). Take a buffer right after a window with that due, and a new one
// that starts from it and reads the inputs above due again up to where the other stands. Both have the same
// held events: those above due that are not taken. Both have the same inputs above due, as the horizon and
// the limits see them. The settings at due are given; changes above it are read again. taken is the same, and
// grows by the same pulls. So they are in the same state, provided that the new one has closed no window on
// its way. It has not: suppose that an input at or below thru makes c > due due.
//
//   - The horizon in force at that input is 0, or by it c is a horizon older: the same held for the old
//     buffer when it read that input, so its due would have been c or beyond at that time.
//   - The limits: the new buffer holds a subset of what the old one held when it read that input, and the
//     inputs that the limits count off first are not there. What it would have to count off to get below the
//     limits the old one had to count off as well.
//
// In both cases the old buffer's due would be beyond the checkpoint's: a contradiction. Only windows without
// events may differ on the way, and those are not published. Where due was raised to thru nothing is held and
// nothing was read since: there is nothing to show. The checkpoint of a keepalive is the same, with nothing
// held. TestTheBufferIsTheModelOfHorizonMode goes on from checkpoints of each kind.
//
// # Gap mode
//
// Gap mode has another rule (gap.go). Each event has a counter, and counters are dense in a sequence: so an
// event whose predecessor has been released leaves at once, and one whose predecessor is missing waits for
// it. With scope document everything that is committed later in the same document waits too. A wait ends when
// the gap is filled; when it has lasted the bound by commit timestamps, or cold where nothing is known of
// what precedes the event; when more is held than the limits allow; and when a change of settings alters what
// waits for what. Then the gap is given up: what is missing may still come, and is marked late. An input's
// window is what it released, so due and thru are the input.
//
// The order is a function of the WAL here too. The state is: the settings; the held events; the base of each
// sequence that has held events, which is the last counter that was released, or that nothing is known
// (cold); and what is remembered. Each is changed by inputs alone. What is remembered are the last counters
// among the newest messages, and it is forgotten by their number, so it is a function of the messages made so
// far and not of time or memory. Events are taken in by position, or by document, actor and counter where the
// transaction by itself is larger than the limits: by its events and their sizes, never because it spilled.
// Which wait ends first is decided by the position of the oldest event that waits. Every heap is ordered by a
// value that ends in the position, or only finds all values up to one. The tables are hashed with a seed, and
// never gone through to decide anything. TestTheBufferIsTheModelOfGapMode compares all this with the rule
// written as lists and loops, on transactions that spill and others, through changes of settings and of the
// mode; the scripts show each rule by itself.
//
// A checkpoint is (due, holds, remembered, settings), and there is one behind each input. Every held event of
// a sequence has a last counter above its base, and every event of it that was released and lies at or beyond
// the oldest held one has a last counter at or below: so of the inputs up to due, the sequence's events from
// that position on, with a last counter above the base, are those that are held. For a cold sequence it is
// all of them, because none is released while it is cold. The one order in which that might fail is a sorted
// transaction, where an event may be released before one at a lower position comes: there the sequence in
// hand is not forgotten (gap.keep). Read again, these events are held again without the rule being asked:
// nothing else of those inputs is outstanding, and the settings are those at due. What is remembered is in
// the headers of the newest messages. So the new buffer is in the same state as the old one. A hold has a sum
// over its events: where one of them does not come again as it was, the buffer stops, because it would be
// lost (TestHeldEventThatDoesNotComeAgainStops). While more sequences have held events than a checkpoint
// lists, there is none. TestTheBufferIsTheModelOfGapMode goes on from checkpoints of each kind, and compares
// every checkpoint behind the cut too.
//
// Held events are copies of their own, so that a wait keeps no block of the decoder alive. MaxWeight counts
// them, and what is remembered: TestHeldEventsStayWithinMaxWeight, TestAMillionSequencesLeaveMemorySmall. A
// transaction that spilled is read from its files event by event, what it releases goes into another file,
// and the limits are asked after each event, so that no more is held than they allow:
// TestHugeTransactionInGapMode. An event that does not wait costs a hash of its names and a look at the
// memory; one that waits, a few heaps: TestHotDocumentIsNotQuadratic.
//
// # Cuts
//
// A cut is the one input that is not in the WAL: another cluster goes on with the stream while the home
// is silent. It comes behind the inputs up to its LSN. Everything is due at it, and in gap mode all gaps
// are given up. So the order is a function of the WAL and the cuts. A checkpoint is still enough to go
// on: nothing is held behind a cut, so none lies across it. Only in gap mode a checkpoint whose due is
// the cut's LSN may be from before the cut, so there it is carried out again: if it was before, there is
// nothing to close.
//
// # Memory
//
// A held event is stored once, in a slot of a chunk, and its bytes stay where the decoder put them. Chunks
// are given back as the oldest events leave; nothing that grew with a burst is kept. By weight (held.go: the
// bytes of all values, and 256 for the slot and the lists that it is in; 160 for each sequence in the index):
//
//   - Held events are bounded by the limits: at most max_events, at most max_bytes as it counts them. They
//     weigh more than that by at most 376 bytes an event and their ids and further columns: MaxWeight.
//   - The transaction that is being read spills when it weighs more than max_bytes less what is held, but not
//     before it weighs a fourth of max_bytes, or 1 MiB. So held and read stay within max_bytes, or exceed
//     what is held by a fourth.
//   - Sorting a spilled window takes no more than that again; a merge adds 2 MiB for its blocks (64 runs at a
//     time, or twice the largest event for each of them), two merges at most.
//   - The table for Late takes 768 KiB, spare chunks 192 KiB.
//
// A spilled transaction lies on disk once, and twice while runs are merged into larger ones; with sort commit
// up to three times, because its names are there once more. Config.MaxSpill bounds that. What takes long
// reads scratch files, and asks Config.Stop before each block: a call may sort for minutes, and can be ended
// within milliseconds of work.
//
// # Cost
//
// A close costs what it takes: the due commits are at the front of a queue, and their sequences' events come
// out of the index lowest key first until the next is not pulled. Windows that take everything do without the
// index, so with horizon 0 it is never built. Finding what a horizon makes due is constant per input in the
// long run (due.go).
package reorder
