package checkpoint

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// CodeUnfinished is the code of the fault of a record that a repair left in the middle.
const CodeUnfinished = "repair_unfinished"

// CodeSnapshotUnfinished is the code of the fault of a record that `outflow init --snapshot` left in the
// middle.
const CodeSnapshotUnfinished = "snapshot_unfinished"

// CodeRestoreUnfinished is the code of the fault of a stream that `outflow archive restore` left in the
// middle.
const CodeRestoreUnfinished = "restore_unfinished"

// ErrStandby says that the server is a standby in recovery that does not have everything yet: it is waited
// for.
var ErrStandby = errors.New("standby in recovery: waiting")

// ErrOwner says that another cluster makes the stream, by the record: it is waited for.
var ErrOwner = errors.New("another cluster makes the stream")

// Config names what the readings are of, and carries the two settings that decide with them.
type Config struct {
	Slot         string
	Stream       string
	Publication  string
	Table        string // schema.name
	Mapping      relay.Mapping
	DurableAfter time.Duration // 0 or more
	Cluster      int           // cluster.id of whoever shares the stream with other clusters; 0: with none
}

// Start is where a session starts from, and what is left to prove.
type Start struct {
	// replication starts at its Start(). Where it lay beyond a switch point, its Due is that point
	Checkpoint relay.Checkpoint
	SystemID   string // the home's; "": it is not known here
	LastSeq    uint64 // the next message expects it
	// the newest message that is known to be there; those between End and LastSeq are lost
	End           uint64
	AlreadyStored uint64     // so many of the messages to be made are in the stream already
	Accepted      uint64     // a repair accepted the messages up to here: they are not compared
	Confirmed     outbox.LSN // the slot's

	Asked  time.Time // by this process's clock: not after
	Broker time.Time // the broker's clock said so; zero: it did not say

	// Newest is the header of the message at End: the last of the There must agree with it. nil where it
	// can't be read; Thru, its thru, is 0 then.
	Newest *outbox.Header
	Thru   outbox.LSN

	Checkpoints []StoredCheckpoint // all that are left, oldest first
	// above the oldest checkpoint, and between the messages that it remembers
	Holes []Range
	// the record says that others publish it
	Left []relay.Left
	// the record says that it is published for the home whose rows are read
	Claimed []relay.Claimed
	// checkpoints or holes are not what the record says: it is written before anything is sent
	Rewrite bool
	// what shows a loss, "" if nothing does: it counts only when a recheck agrees
	Loss string

	// Shared: clusters share the stream, so what it holds is made of the WAL and the record's cuts.
	Shared bool
	// Told is what that record says to be confirmed; see [Record.Confirmed].
	Told outbox.LSN
	// Cuts are those of the record behind the checkpoint: the session carries them out.
	Cuts []StoredCut
	// NewCut is the stream's newest message if that is a cut that the record lacks: somebody stored it and
	// did not come further. It is recorded before anything else ([Config.WithCut]). nil: there is none.
	NewCut *relay.Stored
}

// Same reports whether two readings lead to the same start.
func (s Start) Same(o Start) bool {
	return s.Checkpoint.Same(o.Checkpoint) && s.LastSeq == o.LastSeq && s.End == o.End &&
		s.AlreadyStored == o.AlreadyStored && s.Loss == o.Loss && slices.Equal(s.Cuts, o.Cuts)
}

// LostFrom is the first of the messages that the broker lost at the stream's end without going back; 0: there
// are none. Whoever reads the stream can't see that from the sequences.
func (s Start) LostFrom() uint64 {
	if s.End == s.LastSeq {
		return 0
	}
	return s.End + 1
}

// Resolve says where to start. It is a function of the readings alone. Its errors are faults of class gap
// (each with a code, the LSN range and the hint) or fatal, and ErrStandby and ErrOwner. A gap counts only
// when a recheck, on new connections, agrees.
func Resolve(cfg Config, r Readings) (Start, error) {
	v := &resolver{cfg: cfg, Readings: r}
	for _, check := range []func() error{
		v.restored, v.record, v.server, v.slot, v.stream, v.timelines, v.tail, v.cuts, v.behind,
		v.publication,
		v.choose, v.newest, v.stopped,
	} {
		if err := check(); err != nil {
			return Start{}, err
		}
	}
	return v.start, nil
}

// resolver holds what the checks find out, in their order.
type resolver struct {
	Readings
	cfg         Config
	checkpoints []StoredCheckpoint // those of the record; where they lie beyond a switch point, at it
	moved       int                // index of the checkpoint that was moved to a switch point, -1 if none was
	start       Start
}

func (v *resolver) gap(code string, from, to outbox.LSN, hint, what string, args ...any) error {
	return &outbox.Fault{
		Class: outbox.Gap, Code: code, Message: fmt.Sprintf(what, args...), Hint: v.cfg.hintOf(code, hint),
		From: min(from, to), To: max(from, to),
	}
}

func (v *resolver) fatal(code, hint, what string, args ...any) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: fmt.Sprintf(what, args...), Hint: hint}
}

// left is the start of the newest checkpoint that the stream still bears out, 0 (the beginning) if there is
// none.
func (v *resolver) left() outbox.LSN {
	if !v.Stream.Exists || !v.Stream.Created.Equal(v.Record.Created) {
		return 0
	}
	for _, p := range slices.Backward(v.Record.Checkpoints) {
		if p.Seq <= v.Stream.LastSeq {
			if end, left, _ := v.Server.History.Left(p.Timeline); left {
				return min(p.Start(), end) // what this server wrote from there on was not read
			}
			return p.Start()
		}
	}
	return 0
}

// restored refuses a stream that an archive is being restored to, whatever the record says.
func (v *resolver) restored() error {
	if v.Stream.Restoring == "" {
		return nil
	}
	return v.gap(CodeRestoreUnfinished, 0, v.Server.WALEnd, hintRestore,
		"stream %s is being restored from %s, and has a part of that up to sequence %d", v.cfg.Stream,
		v.Stream.Restoring, v.Stream.LastSeq)
}

func (v *resolver) record() error {
	rec := v.Record
	if rec == nil || rec.Creating {
		if f := v.cfg.ForeignSlot(v.Slot, v.Server.Database); f != nil {
			return f
		}
	}
	if rec == nil {
		switch {
		case !v.Slot.Exists && !v.Stream.Exists:
			return v.fatal("not_initialised", v.cfg.hintInit(),
				"there is no slot %s, no stream %s and no checkpoint record",
				v.cfg.Slot, v.cfg.Stream)
		case !v.Slot.Exists && v.Stream.LastSeq == 0:
			return v.fatal("init_unfinished", v.cfg.hintInitAgain(),
				"stream %s is empty, there is no slot %s and no checkpoint record",
				v.cfg.Stream, v.cfg.Slot)
		}
		from := v.Slot.Confirmed
		if v.Stream.Newest != nil {
			from = v.Stream.Newest.Due
		}
		return v.gap("record_missing", from, v.Server.WALEnd,
			v.cfg.hintArchive(v.Stream)+v.cfg.hintRecord(v.Slot.Exists),
			"the checkpoint record of slot %s is missing (bucket %s)", v.cfg.Slot, Bucket(v.cfg.Stream))
	}
	left := rec.Uninstalled(v.Stream)
	if rec.Creating && v.Stream.LastSeq > left && !rec.LostFirstCheckpoint(v.Slot, v.Stream) {
		return v.gap("stream_not_empty", 0, v.Server.WALEnd, v.cfg.hintNotEmpty(),
			"outflow init did not finish, and stream %s has messages all the same: its last sequence is %d",
			v.cfg.Stream, v.Stream.LastSeq)
	}
	if left > 0 && !v.Slot.Exists {
		return v.fatal("not_initialised", v.cfg.hintInitBehind(left),
			"outflow uninstall has removed slot %s, and left stream %s up to sequence %d", v.cfg.Slot,
			v.cfg.Stream, left)
	}
	if rec.Creating {
		return v.fatal("init_unfinished", v.cfg.hintInitAgain(),
			"outflow init did not finish: the checkpoint record says that slot %s is about to be made",
			v.cfg.Slot)
	}
	if rec.Mapping.Shard != v.cfg.Mapping.Shard {
		return v.fatal("shard_changed", hintShard, "shard is %s, the checkpoint record of slot %s has %s",
			shardText(v.cfg.Mapping.Shard), v.cfg.Slot, shardText(rec.Mapping.Shard))
	}
	if rec.Mapping != v.cfg.Mapping {
		return v.fatal("mapping_changed", v.cfg.hintMapping(),
			"source, origin, table and columns are %s, the checkpoint record of slot %s has %s",
			mappingText(v.cfg.Mapping), v.cfg.Slot, mappingText(rec.Mapping))
	}
	if rec.Repairing == ForSnapshot {
		return v.gap(CodeSnapshotUnfinished, 0, v.Server.WALEnd, v.cfg.hintSnapshot(),
			"the snapshot of table %s did not finish: stream %s may have a part of the rows that were "+
				"there before slot %s, and nothing of what follows them",
			v.cfg.Table, v.cfg.Stream, v.cfg.Slot)
	}
	if rec.Repairing != "" {
		return v.gap(CodeUnfinished, v.left(), v.Server.WALEnd, v.cfg.hintUnfinished(),
			"a repair of slot %s (--accept %s) did not finish", v.cfg.Slot, rec.Repairing)
	}
	if rec.Epoch > 0 && rec.Owner != v.cfg.Cluster {
		return fmt.Errorf("cluster %d has stream %s in epoch %d: %w", rec.Owner, v.cfg.Stream, rec.Epoch,
			ErrOwner)
	}
	return nil
}

// stopped comes last: whatever else is wrong is repaired in a way of its own, which clears it as well.
func (v *resolver) stopped() error {
	switch v.Record.Stopped {
	case "":
		return nil
	case CodePublication:
		return v.gap(CodePublication, v.Record.Publication.Seen, v.Server.WALEnd, v.cfg.hintPublication(),
			"rows of table %s were kept out of the stream of changes of publication %s when outflow "+
				"stopped, or may have been: that this is mended brings none of them back",
			v.cfg.Table, v.cfg.Publication)
	case CodeHome:
		return v.gap(CodeHome, v.left(), v.Server.WALEnd, "",
			"subscription %s had not brought the events that their home had counted when outflow stopped",
			v.cfg.Mapping.Subscription)
	}
	return v.gap(v.Record.Stopped, v.left(), v.Server.WALEnd, hintStopped,
		"somebody else published to the ingress of stream %s while outflow ran: a message of ours may have "+
			"been refused for it and be missing",
		v.cfg.Stream)
}

// headed returns the header of the newest message that can be read; nil where there is none, or where a
// repair accepted the message: then it says nothing about the WAL.
func (v *resolver) headed() *outbox.Header {
	if v.Stream.NewestSeq <= v.Record.Base {
		return nil
	}
	return v.Stream.Newest
}

func shardText(s relay.Shard) string {
	if s.Whole() {
		return "not set"
	}
	return s.String()
}

func mappingText(m relay.Mapping) string {
	origin, span := "any", ""
	if m.OwnOnly {
		origin = "own"
	}
	if m.Span != "" {
		span = " span=" + m.Span
	}
	if !m.Source.Rows() {
		key := "in commit order"
		if m.Keyed() {
			key = "ordered by key"
		}
		return fmt.Sprintf("source=%v origin=%s%s, %s", m.Source, origin, span, key)
	}
	if m.Control != "" {
		origin += " control=" + m.Control
	}
	if m.Away() {
		origin += " subscription=" + m.Subscription
	}
	if m.Cluster != 0 {
		origin += fmt.Sprintf(" islands, cluster.id=%d", m.Cluster)
	}
	return fmt.Sprintf("source=%v origin=%s table=%s doc_id=%s actor_id=%s counter=%s%s seq_key=%s "+
		"payload=%s",
		m.Source, origin, m.Table, m.Doc, m.Actor, m.Counter, span, m.Key, m.Payload)
}

func (v *resolver) server() error {
	if v.Server.SystemID != v.Record.SystemID {
		return v.gap("system_changed", v.left(), v.Server.WALEnd, v.cfg.hintServer(),
			"the server has system identifier %s, the checkpoint record of slot %s has %s: it is another "+
				"database cluster",
			v.Server.SystemID, v.cfg.Slot, v.Record.SystemID)
	}
	return nil
}

func (v *resolver) slot() error {
	from, to := v.left(), v.Server.WALEnd
	switch s := v.Slot; {
	case !s.Exists && v.Server.InRecovery:
		return fmt.Errorf("there is no slot %s: %w", v.cfg.Slot, ErrStandby)
	case !s.Exists:
		return v.gap("slot_missing", from, to, v.cfg.hintLost(), "replication slot %s does not exist",
			v.cfg.Slot)
	case v.cfg.ForeignSlot(s, v.Server.Database) != nil:
		f := v.cfg.ForeignSlot(s, v.Server.Database)
		return v.gap(f.Code, from, to, v.cfg.hintForeignSlot(s, v.Server.Database), "%s", f.Message)
	case s.Invalidation != "" || s.WALStatus == "lost":
		why := s.Invalidation
		if why == "" {
			why = "wal_status is lost"
		}
		return v.gap("slot_invalidated", from, to, v.cfg.hintLost(),
			"replication slot %s was invalidated: %s", v.cfg.Slot, why)
	}
	return nil
}

func (v *resolver) stream() error {
	s, home := v.Stream, v.Record.homeID()
	switch {
	case !s.Exists:
		return v.gap("stream_missing", 0, v.Slot.Confirmed, v.cfg.hintArchive(s)+v.cfg.hintStream(),
			"stream %s does not exist", v.cfg.Stream)
	case !s.Created.Equal(v.Record.Created):
		return v.gap("stream_recreated", 0, v.Slot.Confirmed, v.cfg.hintArchive(s)+v.cfg.hintStream(),
			"stream %s was made at %s, the checkpoint record knows one of %s", v.cfg.Stream,
			s.Created.UTC().Format(time.RFC3339Nano), v.Record.Created.UTC().Format(time.RFC3339Nano))
	case s.NewestSeq > v.Record.Base && s.Cut != nil && home != "" && !s.Cut.Of(home):
		return v.gap(CodeCutHome, v.left(), v.Server.WALEnd, hintCut, "%s",
			v.cfg.cutOfAnotherHome(s.NewestSeq, s.Cut, home))
	case s.NewestSeq > v.Record.Base && s.Newest == nil && s.Cut == nil:
		return v.gap("foreign_message", v.left(), v.Server.WALEnd, v.cfg.hintForeign(),
			"the newest message of stream %s, at sequence %d, has no %s header", v.cfg.Stream, s.NewestSeq,
			outbox.HeaderName)
	}
	return nil
}

// tail finds where the stream ends, which checkpoints that leaves, and what is lost.
func (v *resolver) tail() error {
	s, st := &v.start, v.Stream
	s.LastSeq, s.End, s.Confirmed, s.Accepted = st.LastSeq, st.LastSeq, v.Slot.Confirmed, v.Record.Base
	s.Asked, s.Broker, s.SystemID, s.Left = v.Asked, st.Now, v.Record.homeID(), v.Record.Left
	s.Claimed = v.Record.Claimed
	var loss []string
	if 0 < st.NewestSeq && st.NewestSeq < st.LastSeq {
		// The broker lost its end without going back. Whatever is confirmed was durable, so it was removed by
		// somebody; anything younger comes again. (Not: what has been in the record for long. The loss may be
		// older than this start.)
		s.End = st.NewestSeq
		// Of several checkpoints that start at the confirmed LSN only the oldest is known to be durable.
		for i, p := range v.checkpoints {
			if p.Seq <= st.LastSeq && p.Start() <= v.Slot.Confirmed &&
				(i == 0 || v.checkpoints[i-1].Start() < p.Start()) {
				s.End = max(s.End, p.Seq)
			}
		}
	}
	s.Holes = upTo(v.Record.Holes, s.LastSeq)
	if s.End < s.LastSeq {
		hole := Range{s.End + 1, s.LastSeq}
		if count(s.Holes, s.End, s.LastSeq) > 0 {
			loss = append(loss, fmt.Sprintf("messages %d to %d of stream %s are missing at its end",
				hole.From, hole.To, v.cfg.Stream))
		}
		s.Holes = add(s.Holes, hole)
	}
	s.Rewrite = !slices.Equal(s.Holes, v.Record.Holes)
	for i, p := range v.checkpoints {
		if p.Seq > s.End {
			s.Rewrite = true
			newest := v.checkpoints[len(v.checkpoints)-1]
			loss = append(loss, fmt.Sprintf("stream %s ends at sequence %d, the newest checkpoint lies at %d",
				v.cfg.Stream, s.End, newest.Seq))
			s.Checkpoints = v.checkpoints[:i]
			break
		}
		s.Checkpoints = v.checkpoints[:i+1]
	}
	if st.NewestSeq == 0 && st.LastSeq > 0 {
		loss = append(loss, fmt.Sprintf("stream %s is empty, its last sequence was %d", v.cfg.Stream,
			st.LastSeq))
	}
	s.Loss = strings.Join(loss, "; ")
	return nil
}

// publication is seen to have changed on a primary. A standby in recovery may show what was long ago.
func (v *resolver) publication() error {
	err := v.cfg.CheckPublication(v.Record.Publication, v.Publication, v.Server.WALEnd)
	if f := outbox.FaultOf(err); f != nil {
		f.Observed = !v.Server.InRecovery
	}
	return err
}

// choose picks the checkpoint to start from: rather one that leaves a message to make again and compare, so
// that another WAL behind the same names is noticed.
func (v *resolver) choose() error {
	s := &v.start
	top := len(s.Checkpoints) - 1
	if top < 0 || s.Checkpoints[top].Start() < s.Confirmed {
		var from outbox.LSN
		if top >= 0 {
			from = s.Checkpoints[top].Start()
		}
		if v.checkpoints[len(v.checkpoints)-1].Start() >= s.Confirmed {
			return v.gap("stream_shortened", from, s.Confirmed, v.cfg.hintStream(),
				"stream %s ends at sequence %d, before every checkpoint at or above the confirmed LSN "+
					"%v: it lost messages that had been there for %v",
				v.cfg.Stream, s.End, s.Confirmed, v.cfg.DurableAfter)
		}
		return v.gap("slot_ahead", from, v.Server.WALEnd, v.cfg.hintLost(),
			"replication slot %s is confirmed at %v, beyond every checkpoint that outflow recorded: "+
				"somebody moved it or made it anew",
			v.cfg.Slot, s.Confirmed)
	}
	readable := v.Stream.NewestSeq == s.End && v.headed() != nil
	at := top
	// Beyond a switch point the WAL differs from the one that the messages were made from: without one to
	// compare they aren't made again. Nor is what a cut has closed that no record has: the WAL alone does not
	// make it.
	if readable || v.moved < 0 && (v.Stream.Cut == nil || s.Shared) {
		for i := top; i >= 0 && s.Checkpoints[i].Start() >= s.Confirmed; i-- {
			if s.Checkpoints[i].Seq < s.End {
				at = i
				break
			}
		}
	}
	s.Checkpoint = s.Checkpoints[at].Checkpoint
	s.AlreadyStored = count(s.Holes, s.Checkpoint.Seq, s.End)
	if readable {
		s.Newest = v.headed()
		s.Thru = s.Newest.Thru
	}
	if s.Cuts = behind(s.Cuts, s.Checkpoint.Seq); len(s.Cuts) > 0 && s.Cuts[len(s.Cuts)-1].Seq == s.End {
		s.Thru = s.Cuts[len(s.Cuts)-1].LSN
	}
	if v.moved > at && v.moved <= top && s.Checkpoints[v.moved].Settings != s.Checkpoint.Settings {
		// It may be that its settings were changed on the branch that is gone; what is read from here on
		// says.
		s.Checkpoints = slices.Delete(slices.Clone(s.Checkpoints), v.moved, v.moved+1)
	}
	s.Holes = needed(s.Holes, s.Checkpoints[0].Checkpoint)
	return nil
}
