package reorder

import (
	"errors"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Config is what a Buffer starts from: a checkpoint, and how the process is set up.
type Config struct {
	Settings relay.Settings // in force at Due
	// where replication begins: commits at or below are not inputs
	Start outbox.LSN
	// The checkpoint's due. In gap mode it may lie beyond Start: of the inputs between them only the events
	// of Holds are outstanding. 0: Start.
	Due            outbox.LSN
	PublishedAhead []outbox.Position // the checkpoint's: events beyond Due that are in the stream already
	Holds          []relay.Hold      // the checkpoint's
	// The checkpoint's, and the counters of so many messages, the newest first: of all that this outflow made
	// up to the checkpoint. Span is 0 for one that has none. There may be fewer than Remembered if the stream
	// has no more.
	Remembered int
	Recent     []outbox.Counter
	Unkeyed    bool // horizon 0 and sort commit are in force whatever the settings say
	// 0: relay.MaxPublishedAhead. It decides the order: nothing but tests may set another
	MaxPublishedAhead int
	MaxHolds          int     // 0: relay.MaxHolds. Nothing but tests may set another
	Scratch           Scratch // where a transaction larger than the buffer spills
	// bytes of scratch files at a time; 0: no limit. More is a fatal fault
	MaxSpill int64
	// Stop is asked again and again while scratch files are read, which may take minutes in one call. An
	// error of it ends the call with that error. nil: never stopped.
	Stop func() error
}

// Buffer holds events in their order of commit until they are due. It is owned by one goroutine.
type Buffer struct {
	cfg   Config
	set   relay.Settings // in force, as read
	atDue relay.Settings // in force at the last due
	// events beyond the last due that have left, ascending; shared with checkpoints, so never written to
	taken  []outbox.Position
	newest outbox.LSN // of the last input

	// What is held. A spilled transaction that stays held is the newest commit and comes into the fifo with
	// the next call.
	fifo    fifo
	commits queue[commit] // those with held events, oldest first; one within may have lost them all to pulls
	held    tally
	marks   queue[mark]   // inputs above the last due that the horizon may still make due: see due
	changes queue[change] // changes of settings above the last due
	index   index         // of the events below indexed
	indexed uint64

	// The transaction that is being read: from slot start on, or in spill. A spill with an LSN is not read
	// but held.
	read  tally
	start uint64
	spill *spill

	input   mark // the last input, if Close has still to be called
	waiting bool
	cut     bool // it is a cut

	window  Window
	order   []*slot // the window's events, in order
	other   []*slot // to put them in order
	pulled  []*slot
	touched []*sequence // of the window
	unread  bool        // the window has not been read to its end
	leaving int64       // weight of what the window took that is in memory
	release uint64      // slots below are the window's, or were taken before

	sorting int64 // weight of what sorters hold in memory

	gap    *gap            // nil: gap mode has not been in force yet
	change *relay.Settings // a change that Close carries out: into gap mode, in it, or out of it

	late late
	disk disk
	tune tuning
	err  error // the first: nothing is done after it
}

// commit is an input with held events.
type commit struct {
	lsn   outbox.LSN
	end   uint64 // number of the slot behind its last one
	tally        // of those that are still held
}

// mark is an input as the rules of time see it.
type mark struct {
	lsn   outbox.LSN
	time  int64
	start outbox.LSN // of its commit record
}

type change struct {
	lsn outbox.LSN
	set relay.Settings
}

// New returns an empty buffer that goes on from a checkpoint.
func New(cfg Config) *Buffer {
	if cfg.MaxPublishedAhead == 0 {
		cfg.MaxPublishedAhead = relay.MaxPublishedAhead
	}
	if cfg.MaxHolds == 0 {
		cfg.MaxHolds = relay.MaxHolds
	}
	cfg.Due = max(cfg.Due, cfg.Start)
	b := &Buffer{cfg: cfg, set: cfg.Settings, atDue: cfg.Settings, newest: cfg.Start, tune: defaultTuning}
	b.disk.scratch, b.disk.limit, b.disk.stop = cfg.Scratch, cfg.MaxSpill, cfg.Stop
	b.taken = slices.Clone(cfg.PublishedAhead)
	slices.SortFunc(b.taken, outbox.Position.Compare)
	b.index.init()
	if b.gapMode() {
		b.gap = newGap(b, &b.cfg)
		b.cfg.Recent = nil
	} else if len(cfg.Holds) > 0 {
		b.err = errHolds
	}
	return b
}

var (
	errIndex  = errors.New("reorder: an event's index does not follow its predecessor's")
	errEvents = errors.New("reorder: a commit record does not agree with the events before it")
	errHolds  = errors.New("reorder: the checkpoint holds events back, but gap mode is not in force")
	errBack   = errors.New("reorder: a commit's LSN is not above its predecessor's")
	errCut    = errors.New("reorder: a cut below an input that was read, or within a transaction")
	errCutDue = errors.New("reorder: the checkpoint holds back what a cut below it has closed")
)

// Append adds one event of the transaction that is being read; its Pos.Index counts them from 0, its LSN is
// not known yet. The event is copied, its bytes are not. An error leaves the buffer useless: see Discard.
func (b *Buffer) Append(e *relay.Event) error {
	if err := b.ready(); err != nil {
		return err
	}
	if int(e.Pos.Index) != b.read.events {
		return b.fail(errIndex)
	}
	switch {
	case !b.gapMode():
		e.Counter = outbox.Counter{} // it has no meaning here, and no place in a header
	case e.Bad == "":
		e.Bad = e.Unplaceable()
	}
	b.read.add(tallyOf(e))
	if b.spill != nil {
		return b.fail(b.spill.add(e))
	}
	b.fifo.at(b.fifo.grow(1)).Event = *e
	if b.read.weight > b.allowance() {
		return b.fail(b.overflow())
	}
	return nil
}

// Commit ends the transaction that is being read. Call Close after it.
func (b *Buffer) Commit(c relay.Commit) error {
	if err := b.ready(); err != nil {
		return err
	}
	if c.Kind == relay.Events && c.Events != b.read.events || c.Kind != relay.Events && b.read.events != 0 {
		return b.fail(errEvents)
	}
	if c.Kind == relay.NoInput || c.LSN <= b.cfg.Start {
		b.forget()
		return nil
	}
	if c.LSN <= b.newest {
		return b.fail(errBack)
	}
	b.newest = c.LSN
	switch c.Kind {
	case relay.SettingsChange:
		switch {
		case c.LSN <= b.cfg.Due: // known
		case b.switches(c.Settings):
			b.change = &c.Settings
		default:
			b.set = c.Settings
			b.changes.push(change{c.LSN, c.Settings})
		}
	case relay.Events:
		if b.gapMode() {
			b.stamp(c.LSN, c.Time)
		} else if err := b.hold(c.LSN, c.Time); err != nil {
			return b.fail(err)
		}
	}
	b.input, b.waiting, b.cut = mark{c.LSN, c.Time, c.Start}, true, false
	return nil
}

// Cut closes everything that is held and returns the window, nil if nothing was. It comes behind the inputs
// up to lsn, all of which were read, and before the next one, of which nothing was: a cut below what was read
// is refused. Once more at the same lsn it does nothing, nor does one below the due of the checkpoint that
// was gone on from. At that due it may: a checkpoint of gap mode may be from before the cut.
func (b *Buffer) Cut(lsn outbox.LSN) (*Window, error) {
	if err := b.ready(); err != nil {
		return nil, err
	}
	if lsn < b.cfg.Due {
		if slices.ContainsFunc(b.cfg.Holds, func(h relay.Hold) bool { return h.Oldest.LSN <= lsn }) {
			return nil, b.fail(errCutDue)
		}
		return nil, nil
	}
	if lsn < b.newest || b.read.events > 0 {
		return nil, b.fail(errCut)
	}
	b.newest, b.input.lsn, b.waiting, b.cut = lsn, lsn, true, true
	return b.Close()
}

// hold makes the transaction that was read a held commit. Its events that have left already are dropped.
func (b *Buffer) hold(lsn outbox.LSN, time int64) error {
	from, _ := slices.BinarySearchFunc(b.taken, outbox.Position{LSN: lsn}, outbox.Position.Compare)
	to, _ := slices.BinarySearchFunc(b.taken, outbox.Position{LSN: lsn + 1}, outbox.Position.Compare)
	if b.spill != nil {
		if err := b.spill.commit(lsn, time, b.taken[from:to], &b.read); err != nil {
			return err
		}
	} else {
		b.stamp(lsn, time)
		for _, p := range b.taken[from:to] {
			if n := b.start + uint64(p.Index); n < b.fifo.tail {
				b.read.sub(tallyOf(&b.fifo.at(n).Event))
				*b.fifo.at(n) = slot{}
			}
		}
	}
	if b.read.events == 0 {
		b.forget()
		return nil
	}
	b.held.add(b.read)
	b.commits.push(commit{lsn, b.fifo.tail, b.read})
	b.read, b.start = tally{}, b.fifo.tail
	return nil
}

// stamp tells the events of the transaction that was read what its commit record says.
func (b *Buffer) stamp(lsn outbox.LSN, time int64) {
	if b.spill != nil {
		b.spill.stamp(lsn, time)
		return
	}
	for n := b.start; n < b.fifo.tail; n++ {
		s := b.fifo.at(n)
		s.Pos.LSN, s.Time = lsn, time
	}
}

// forget drops the transaction that is being read.
func (b *Buffer) forget() {
	if b.spill != nil {
		b.spill.drop()
		b.spill = nil
	}
	b.fifo.truncate(b.start)
	b.read = tally{}
}

// ready checks that the caller keeps to the order of calls, and brings back what the last close left in
// scratch files.
func (b *Buffer) ready() error {
	if b.err != nil {
		return b.err
	}
	if b.unread || b.waiting {
		panic("reorder: Append or Commit before the last input's window was closed and read")
	}
	if b.spill != nil && b.spill.lsn != 0 {
		return b.fail(b.restore())
	}
	return nil
}

// fail keeps the first error.
func (b *Buffer) fail(err error) error {
	if err != nil && b.err == nil {
		b.err = err
	}
	return err
}

func (b *Buffer) inForce() relay.Settings {
	if b.cfg.Unkeyed {
		return b.set.Unkeyed()
	}
	return b.set
}

// Held returns how many committed events are held, and their bytes by [relay.Event.Size].
func (b *Buffer) Held() (events int, bytes int64) { return b.held.events, b.held.bytes }

// OldestLSN returns the LSN of the oldest held event's commit; false if nothing is held. Where a close was
// stopped that changes the mode, events are still held by the rule of before.
func (b *Buffer) OldestLSN() (outbox.LSN, bool) {
	if b.gap != nil {
		if oldest := b.gap.all.top(); oldest != nil {
			return oldest.Pos.LSN, true
		}
	}
	if b.commits.len() > 0 {
		return b.commits.at(0).lsn, true
	}
	return 0, false
}

// Settings returns the settings that are in force, as they were read: what Unkeyed does to them is not in
// them.
func (b *Buffer) Settings() relay.Settings { return b.set }

// Reached takes note that all inputs up to lsn were read, which a keepalive says: where nothing is written
// none comes behind them that would. The error is that something is missing that the checkpoint to go on from
// holds back.
func (b *Buffer) Reached(lsn outbox.LSN) error {
	if b.err != nil || b.gap == nil || lsn < b.cfg.Due {
		return b.err
	}
	return b.fail(b.gap.complete())
}

// Marker returns the checkpoint that a keepalive makes: lsn is at or above the last input and below the next.
// In gap mode windows end with it as well. It is asked for when the last window was read to its end; events
// of the next transaction may have been appended. ok is false where there is none: in horizon mode while
// events are held; in gap mode while too many sequences have held events, or before all that the checkpoint
// to go on from holds back was read again (see Reached). Seq and Timeline are left to the caller, and
// PublishedAhead and Holds may not be changed.
func (b *Buffer) Marker(lsn outbox.LSN) (p relay.Checkpoint, ok bool) {
	if b.gapMode() {
		return b.gap.marker(lsn)
	}
	if b.held.events > 0 {
		return relay.Checkpoint{}, false
	}
	return relay.Checkpoint{Due: lsn, PublishedAhead: b.takenBeyond(lsn), Settings: b.set}, true
}

// takenBeyond returns what of taken lies beyond due, nil if nothing does. Nobody writes to it any more.
func (b *Buffer) takenBeyond(due outbox.LSN) []outbox.Position {
	if n := b.passed(due); n < len(b.taken) {
		return slices.Clip(b.taken[n:])
	}
	return nil
}

// passed returns how many of taken lie at or below due.
func (b *Buffer) passed(due outbox.LSN) int {
	n, _ := slices.BinarySearchFunc(b.taken, outbox.Position{LSN: due + 1}, outbox.Position.Compare)
	return n
}

// Late returns how many events have left after a higher key of their sequence had left in an earlier window.
// It counts with a table of fixed size and forgets at a restart: at least so many were late. In gap mode it
// counts the events that are marked late.
func (b *Buffer) Late() uint64 { return b.late.count }

// Discard drops the scratch files and everything held. The buffer must not be used any more.
func (b *Buffer) Discard() {
	b.disk.drop()
	*b = Buffer{err: errDiscarded, late: late{count: b.late.count}}
}

var errDiscarded = errors.New("reorder: the buffer was discarded")
