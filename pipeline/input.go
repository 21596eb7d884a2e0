package pipeline

import (
	"context"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// input decodes what replication brings and puts it into the buffer.
type input struct {
	source     Source
	decoder    *decoder.Decoder
	buffer     *reorder.Buffer
	check      *checkpoint.TailCheck
	heartbeats *heartbeatWriter
	metrics    *metrics
	log        *slog.Logger
	notices    *notices
	from       outbox.LSN // what ends there or before is published
	due        outbox.LSN // what ends there or before was read, and is of interest only where it is held

	everRead *newestInput           // of the sessions before, too
	shared   bool                   // clusters share the stream
	cuts     []checkpoint.StoredCut // of the record, that are still to be carried out

	batch  *relay.Batch // being read, nil if none
	next   int          // its next message
	result decoder.Result

	island    *island    // nil: nobody publishes for this home
	reader    *reader    // nil: this cluster publishes for no other home
	away      *away      // where a home's rows are read on another server; nil: this one is the home
	tally     *homeTally // nil: there is no control table
	last      outbox.LSN // newest transaction read; of a home's, where it ended there
	keepalive outbox.LSN // newest keepalive or empty transaction since the last WAL data, 0 if none
	lastData  time.Time  // when WAL data last came in
	lastInput time.Time  // when a part of an input last did
	lastTime  int64      // commit timestamp of the newest input
	newest    outbox.LSN // the newest input above due, 0 if none was read
	seen      outbox.LSN // the newest input, whether it is of interest or not
	received  receiveTimes
}

// dueCut returns the next cut of the record if all inputs up to it were read, and none beyond it.
func (in *input) dueCut() (cut checkpoint.StoredCut, due bool) {
	if len(in.cuts) == 0 {
		return cut, false
	}
	read := max(in.from, in.decoder.Complete())
	if in.away == nil {
		read = max(read, in.keepalive)
	}
	return in.cuts[0], in.cuts[0].LSN <= read
}

// carriedOut takes note of a cut, which is the newest input.
func (in *input) carriedOut(cut checkpoint.StoredCut) {
	in.cuts = in.cuts[1:]
	in.from, in.newest, in.last = max(in.from, cut.LSN), max(in.newest, cut.LSN), max(in.last, cut.LSN)
}

// end is up to where the WAL was read.
func (in *input) end() outbox.LSN {
	if in.away != nil {
		return in.away.read
	}
	return max(in.last, in.keepalive)
}

// quiet is up to where a keepalive says that no input follows what was read; 0: nothing does. Of a home that
// is read elsewhere it is the newest input, not what came behind it: whoever goes on from what the home has
// confirmed may find no more than that covered.
func (in *input) quiet() outbox.LSN {
	if in.away != nil && in.keepalive != 0 {
		return max(in.newest, in.due)
	}
	return in.keepalive
}

// atInputs reports whether a checkpoint that holds something has to lie at an input: where other clusters may
// go on from it. They learn of the home's WAL by its inputs alone, and close by a cut what they hold at the
// newest one that they have read: below a checkpoint that lies further on they could not.
func (in *input) atInputs() bool { return in.shared || in.away != nil }

// reached is the LSN of a checkpoint of all that was read.
func (in *input) reached() outbox.LSN {
	if in.atInputs() {
		return max(in.newest, in.due)
	}
	return in.last
}

func (in *input) take(b *relay.Batch, now time.Time) {
	in.batch, in.next = b, 0
	for i := range b.Messages {
		if !b.Messages[i].Keepalive {
			in.lastData = now
			break
		}
	}
}

// release gives the batch in hand back.
func (in *input) release() {
	if in.batch != nil {
		in.batch.Release()
		in.batch = nil
	}
}

// message returns the next message of the batch in hand, nil if there is none any more.
func (in *input) message() *relay.WALMessage {
	if in.batch == nil || in.next == len(in.batch.Messages) {
		in.release()
		return nil
	}
	in.next++
	return &in.batch.Messages[in.next-1]
}

// read takes one message. committed says that it ended a transaction: a window may be due.
func (in *input) read(ctx context.Context, m *relay.WALMessage) (committed bool, err error) {
	if m.Keepalive {
		if !in.decoder.InTransaction() && in.away != nil {
			in.keepalive = max(in.keepalive, m.WALEnd) // it says nothing of the home's WAL
			in.away.passed(m.WALEnd)
		} else if !in.decoder.InTransaction() {
			if len(in.cuts) > 0 && in.cuts[0].LSN <= m.WALEnd { // first that, then what the keepalive says
				in.keepalive = m.WALEnd
				in.next--
				return false, nil
			}
			if err := in.check.Input(m.WALEnd); err != nil {
				return false, err
			}
			if err := in.buffer.Reached(m.WALEnd); err != nil {
				return false, err
			}
			in.keepalive = max(in.keepalive, m.WALEnd)
		}
		return false, nil
	}
	in.keepalive = 0
	if err := in.decoder.Decode(m.Data, &in.result); err != nil {
		return false, err
	}
	if err := in.notice(ctx); err != nil {
		return false, err
	}
	switch in.result.Kind {
	case decoder.Event:
		in.lastInput = in.lastData
		return false, in.buffer.Append(&in.result.Event)
	case decoder.Commit:
		return true, in.commit(&in.result.Commit)
	}
	return false, nil
}

// notice takes note of what was decoded and is not published, or can't be.
func (in *input) notice(ctx context.Context) error {
	r := &in.result
	if r.Malformed != nil {
		in.metrics.malformed.Inc()
		in.notices.malformed.say(in.log, slog.LevelWarn,
			noEffect, "err", r.Malformed)
	}
	if r.Missing {
		// The rows that follow can't be published as they are, nor can any later one while the table lacks
		// the column.
		if _, err := publication(in.source)(ctx); err != nil {
			return err
		}
	}
	if r.Ignored != decoder.NothingIgnored {
		in.metrics.ignored.WithLabelValues(r.Ignored.String()).Inc()
		in.notices.ignored[r.Ignored].say(in.log, slog.LevelWarn, ignoredWhy[r.Ignored], "after", in.last)
	}
	return nil
}

// noEffect is what is logged of a logical message, or control row, that can't be read.
const noEffect = "a change of ordering settings, or a watermark, is malformed, or of an unknown version, " +
	"and has no effect"

var ignoredWhy = map[decoder.Ignored]string{
	decoder.IgnoredMessage: "message events are in the WAL, and source is table: they are not published",
	decoder.IgnoredOutside: "message events that were not written transactionally are in the WAL: they are " +
		"not published",
	decoder.IgnoredRow: "rows of the outbox table are in the WAL, and source is message: they are not " +
		"published",
}

func (in *input) commit(c *relay.Commit) error {
	in.takeRows()
	if c.Kind == relay.Events && c.LSN > in.from {
		in.received.add(c.LSN, in.lastData)
	}
	if c.Kind != relay.NoInput {
		in.seen = c.LSN
	}
	if c.Kind != relay.NoInput && c.LSN > in.due {
		if err := in.check.Input(c.LSN); err != nil {
			return err
		}
		in.lastInput, in.lastTime, in.newest = in.lastData, c.Time, c.LSN
		in.everRead.read(c.LSN, in.lastData)
		if c.Kind == relay.SettingsChange {
			in.settingsChanged(c)
		}
	}
	if c.Kind == relay.NoInput { // PostgreSQL 14 sends empty transactions: they say what a keepalive would
		in.keepalive = c.LSN
	}
	if in.away != nil {
		c.Start = max(c.Start, in.from)
		if c.LSN > in.due { // the home may have read up to there what is not replicated
			c.Start = max(c.Start, in.due)
		}
		in.away.commit(c)
		if c.Kind == relay.NoInput {
			in.keepalive = c.Read
		}
	}
	if in.tally != nil {
		in.tally.commit(c)
	}
	if w := &in.result.Watermark; w.LSN != 0 {
		if err := in.tally.heed(in.away, w, c.Time); err != nil {
			return err
		}
	}
	in.last = max(in.last, c.LSN)
	return in.buffer.Commit(*c)
}

// takeRows takes the cluster rows of the transaction that was decoded.
func (in *input) takeRows() {
	if in.island != nil {
		in.island.take(&in.result)
	}
	if in.reader != nil {
		in.reader.take(&in.result)
	}
}

// settingsChanged takes note of new ordering settings. Whoever may write logical messages can change them as
// often as the server writes WAL.
func (in *input) settingsChanged(c *relay.Commit) {
	level, notice := slog.LevelInfo, &in.notices.ownChanges
	if c.Settings != in.heartbeats.want && in.away == nil { // a home's are nobody's here
		level, notice = slog.LevelWarn, &in.notices.otherChanges
		in.metrics.otherChanges.Inc()
	}
	notice.say(in.log, level, "ordering settings changed in the WAL", "lsn", c.LSN, "settings", c.Settings)
	in.heartbeats.changed(c.Settings)
}

// passes returns when, at the latest, the server's clock passes a commit timestamp: it was not behind the
// newest input's when that came in. Before the first input nothing is known of it: at once.
func (in *input) passes(commit int64) time.Time {
	if in.lastTime == 0 {
		return in.lastInput
	}
	return in.lastInput.Add(max(time.Duration(commit-in.lastTime)*time.Microsecond, 0))
}

// oldestReceived returns when the oldest event that is held was received; ok is false where none is held.
func (in *input) oldestReceived() (at time.Time, ok bool) {
	oldest, held := in.buffer.OldestLSN()
	if !held {
		return time.Time{}, false
	}
	return in.received.of(oldest)
}

// forgetReceived forgets when what is not held any more was received.
func (in *input) forgetReceived() {
	if oldest, held := in.buffer.OldestLSN(); held {
		in.received.forget(oldest)
	} else {
		in.received.clear()
	}
}
