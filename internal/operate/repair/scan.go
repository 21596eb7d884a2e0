package repair

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/slotread"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// openSnapshot takes a snapshot of the table; nil if there is no table.
func openSnapshot(ctx context.Context, l *backfill.Conns, exported string) (*tablesnapshot.Snapshot, error) {
	if !l.Layout.Mapping.Source.Rows() {
		return nil, nil
	}
	defer progress.Wait(ctx, "waiting for a snapshot of table "+l.Layout.Mapping.Table)()
	return tablesnapshot.Open(ctx, l.PGC.Config, exported)
}

// idHash stands for an event id as the header has it: the first bytes of its SHA-256, so that many rows fit
// into memory.
type idHash [16]byte

func hashID(header string) idHash {
	sum := sha256.Sum256([]byte(header))
	return idHash(sum[:16])
}

// outcome is where a candidate's event was found.
type outcome uint8

const (
	missing    outcome = iota
	erased             // it was erased before, and somebody put its row back
	otherEvent         // in the stream its id belongs to another event
	inWAL              // the slot will bring it
	inStream           // in a message
)

// scan compares the table with the stream and, if the slot is kept, with what that will bring.
type scan struct {
	r    *repair
	l    *backfill.Conns
	snap *tablesnapshot.Snapshot

	// a repair was under way before this attempt, the stream's first messages may be of that, and no record
	// says behind which sequence its attempts have published
	unfinished bool
	sameStream bool               // that one was of this stream; else it was put back from a copy
	attempts   []attempt          // of that one
	beside     map[idHash]outcome // of rows that one of them looked at and that are no candidates
	by         map[idHash]int     // the attempt that has published a message of the stream
	replaced   uint64             // how many of the events that they published are known to be gone again
	goesOn     bool               // this attempt goes on with what the last one has begun
	lostAll    bool               // the stream has lost all that they published, and it comes again

	// no row was missing before, and nothing has gone from the stream since: those that are now were written
	// since
	onlyNew bool

	outcomes map[idHash]outcome // of the candidates, the rows for which --where holds
	counts   [5]int             // by fate
	requests []*erasure.Record  // all erasures of the table
	back     erasure.Back       // candidates that were erased before
	identity *identity          // of the candidates; nil if the stream can't have their ids for other events
	listed   []string           // ids of what is missing, as PostgreSQL prints them; nil: too many
	first    *Event
	last     *Event

	read      int              // messages of stream and archive
	archived  uint64           // those that only the archive has
	went      uint64           // without an archive: what went from the front while it was read
	again     outbox.Sequences // what the broker had lost, and came again
	withoutID int              // messages of ours without an event id
	foreign   int              // messages without our header, above the record's base
	lost      int              // messages of commits beyond the end of a timeline that the server left
	lostFrom  uint64           // the first of them
	left      outbox.LSN
	newest    uint64    // the newest message that was read
	newestAt  time.Time // when it was stored

	anchor relay.Checkpoint // where outflow run goes on; Seq is the stream's last sequence
	// messages up to here are covered by the checkpoint that the anchor began as
	known     uint64
	since     outbox.LSN            // that checkpoint's due, where its settings were in force; or 0
	beyond    []streamEvent         // events above the anchor that the stream has
	nextIndex map[outbox.LSN]uint32 // the next free index at LSNs that repairs published at

	repaired map[idHash]struct{} // what repairs published that is not a candidate
}

// streamEvent is an event in the stream.
type streamEvent struct {
	pos   outbox.Position
	id    idHash
	named bool // the id is known
}

// slotEvent is an event that the slot will bring; the counter matters only where the anchor holds events
// back.
type slotEvent struct {
	id      idHash
	counter outbox.Counter
}

// maxBeyond is how many events beyond the anchor are kept in memory before it is moved.
const maxBeyond = 8192

// maxListed is how many missing rows are selected by id. If there are more, all candidates are read.
const maxListed = 50_000

// untrusted is the error that says why the slot can't be kept.
type untrusted struct{ why string }

func (u *untrusted) Error() string { return u.why }

func (r *repair) newScan(l *backfill.Conns, f *finding, snap *tablesnapshot.Snapshot) (*scan, error) {
	s := &scan{r: r, l: l, snap: snap, outcomes: map[idHash]outcome{}, nextIndex: map[outbox.LSN]uint32{},
		repaired: map[idHash]struct{}{}, beside: map[idHash]outcome{}, by: map[idHash]int{},
		unfinished: f.Record == nil || f.Record.Repairing != "" && f.Record.Begun == nil}
	s.sameStream = f.begun()
	if f.Record != nil && f.Record.Begun != nil {
		for _, a := range f.Record.Begun.Attempts {
			s.attempts = append(s.attempts, attempt{Attempt: a})
		}
	}
	var err error
	if f.idsMayRepeat(snap) {
		s.identity, err = newIdentity(r.cfg, l.Layout, snap)
	}
	return s, err
}

// readCandidates reads the ids of the rows that may be missing.
func (s *scan) readCandidates(ctx context.Context) error {
	name := s.l.Layout.ID
	column, _ := s.snap.Table().Column(name)
	var none, double int
	var example string
	task := progress.Count(ctx, "reading table "+s.l.Layout.Mapping.Table, "rows", 0)
	defer task.End()
	err := s.snap.Rows(ctx, tablesnapshot.Query{
		Mapping: s.l.Layout.Mapping, ID: name, Columns: append([]string{name}, s.identity.columns()...),
		Where: s.r.o.Where,
	}, func(v [][]byte) error {
		raw, ok := rawID(column, v[0])
		if !ok {
			none++
			return nil
		}
		task.Add(1)
		id := hashID(string(outbox.AppendHeaderValue(nil, raw)))
		if _, twice := s.outcomes[id]; twice {
			double++
			example = raw
		}
		s.outcomes[id] = missing
		return s.identity.add(id, v[1:])
	})
	if err != nil {
		return err
	}
	s.counts[missing] = len(s.outcomes)
	if none > 0 || double > 0 {
		return &outbox.Fault{
			Class: outbox.Fatal, Code: "repair_ids",
			Message: fmt.Sprintf("table %s: %s %s no %s, %d %s that of another row (e.g. %q): by "+
				"their id nobody can tell whether they are published",
				s.l.Layout.Mapping.Table, units.Of(none, "row"), units.Agree(none, "has", "have"), name,
				double, units.Agree(double, "has", "have"), example),
			Hint: "Leave them out with --where, and decide about them by hand",
		}
	}
	return s.findErased(ctx)
}

// findErased finds the candidates that an erasure deleted before. They are not missing.
func (s *scan) findErased(ctx context.Context) (err error) {
	if s.requests, err = erasure.Read(ctx, s.snap.Querier(), s.snap.Table()); err != nil {
		return err
	}
	defer progress.Wait(ctx, "looking for rows that were erased before")()
	s.back, err = erasure.FindBack(ctx, s.snap, tablesnapshot.Query{Mapping: s.l.Layout.Mapping,
		ID: s.l.Layout.ID, Where: s.r.o.Where}, s.requests)
	for id := range s.back {
		s.set(hashID(string(outbox.AppendHeaderValue(nil, id))), erased)
	}
	return err
}

// rawID is the event id that the decoder makes of what PostgreSQL prints: for a bytea its bytes.
func rawID(c catalog.Column, printed []byte) (string, bool) {
	if printed == nil {
		return "", false
	}
	if c.TypeOID == byteaOID && len(printed) >= 2 {
		if b, err := hex.DecodeString(string(printed[2:])); err == nil {
			return string(b), true
		}
	}
	return string(printed), true
}

const byteaOID = 17

func (s *scan) set(id idHash, f outcome) {
	if was, looked := s.beside[id]; looked && was < f {
		s.beside[id] = f
	}
	was, candidate := s.outcomes[id]
	if candidate && was < f {
		s.outcomes[id] = f
		s.counts[was]--
		s.counts[f]++
	}
}

// readStream notes what the stream has. If the slot is kept, it also collects the events beyond the anchor.
func (s *scan) readStream(ctx context.Context, rd backfill.Readings, keep bool) error {
	if !rd.Stream.Exists {
		return nil
	}
	var base uint64
	if rd.Record != nil {
		base = rd.Record.Base
	}
	var history relay.History // of the timelines that the stream was made from, where they are this cluster's
	if rd.Record != nil && rd.Record.SystemID == rd.Server.SystemID {
		history = rd.Server.History
	}
	s.lost, s.lostFrom = 0, math.MaxUint64
	var due outbox.LSN
	read := func(m backfill.Message) error {
		s.newest, s.newestAt = m.Seq, m.Stored
		s.stored(m.Seq)
		if len(m.Lost) > 0 {
			s.again = s.again.With(m.Lost...)
		}
		if m.Cut != nil {
			return nil
		}
		h, err := outbox.ParseHeader(m.Header)
		if err != nil {
			if m.Seq > base {
				s.foreign++
			}
			return nil
		}
		name := outbox.HeaderID(m.Header)
		if name == "" {
			s.withoutID++
		}
		id := hashID(name)
		if s.identity.sameEvent(id, m) {
			s.set(id, inStream)
		} else {
			s.set(id, otherEvent)
		}
		if h.Pos.Repaired() {
			if _, candidate := s.outcomes[id]; !candidate && keep {
				s.repaired[id] = struct{}{}
			}
			s.nextIndex[h.Pos.LSN] = max(s.nextIndex[h.Pos.LSN], h.Pos.Index+1)
			s.published(m.Seq, &h, id)
			return nil
		}
		if end, left, _ := history.Left(h.Timeline); left && h.Pos.LSN > end {
			if _, there := s.outcomes[id]; !there {
				s.lost++
				s.lostFrom, s.left = min(s.lostFrom, m.Seq), end
			}
		}
		if !keep || m.Seq <= s.known {
			return nil
		}
		beyond := h.Pos.LSN > s.anchor.Due
		if (s.anchor.Settings.ByGap() || h.Sort == outbox.ByGap) && (beyond || len(s.anchor.Holds) > 0) {
			return &untrusted{fmt.Sprintf("message %d lies beyond the checkpoint at %v, and which events "+
				"were "+
				"held back behind it is not known", m.Seq, s.anchor.Due)}
		}
		if due = max(due, h.Due); beyond {
			s.beyond = append(s.beyond, streamEvent{h.Pos, id, true})
		}
		if len(s.beyond) > maxBeyond {
			s.raiseAnchor(due)
		}
		return nil
	}
	s.read, s.archived, s.went, s.again = 0, 0, 0, nil
	err := s.readAll(ctx, rd, read)
	if err == nil && keep && len(s.beyond) > relay.MaxPublishedAhead {
		if s.raiseAnchor(due); len(s.beyond) > relay.MaxPublishedAhead {
			return &untrusted{fmt.Sprintf("the stream has %d events beyond %v", len(s.beyond), s.anchor.Due)}
		}
	}
	return err
}

// raiseAnchor moves the anchor to due: what is missing up to there comes from the table, what lies beyond
// comes from the WAL.
func (s *scan) raiseAnchor(due outbox.LSN) {
	s.anchor.Due = max(s.anchor.Due, due)
	s.beyond = slices.DeleteFunc(s.beyond, func(p streamEvent) bool { return p.pos.LSN <= s.anchor.Due })
}

// setAnchor sets the anchor to start with if the slot is kept: the oldest checkpoint at or above the
// confirmed LSN, or that LSN itself with what is known about it. In gap mode it is the newest one, because no
// checkpoint lists events published ahead; what that holds back comes from the WAL. trusted says whether the
// record's checkpoints are of this stream.
func (s *scan) setAnchor(rd backfill.Readings, trusted bool, settings relay.Settings) {
	s.anchor = relay.Checkpoint{Due: rd.Slot.Confirmed, Settings: settings}
	if rd.Record == nil {
		return
	}
	s.known = rd.Record.Base
	all := rd.Record.Checkpoints
	if n := len(all); n > 0 {
		s.anchor.Settings, s.since = all[n-1].Settings, all[n-1].Due
	}
	if !trusted {
		s.known = 0
		return
	}
	end := rd.Stream.LastSeq
	if rd.Stream.NewestSeq > 0 {
		end = rd.Stream.NewestSeq
	}
	if s.known > end { // the broker lost it since, and with it the checkpoint that says what came ahead
		s.known = 0
	}
	var from *relay.Checkpoint
	for i := range all {
		p := &all[i].Checkpoint
		if p.Seq > end {
			break
		}
		from = p
		if p.Due >= rd.Slot.Confirmed && !p.Settings.ByGap() {
			break
		}
	}
	if from == nil || from.Settings.ByGap() && from.Start() < rd.Slot.Confirmed {
		return
	}
	s.known, s.since = from.Seq, from.Due
	s.anchor.Due, s.anchor.Settings = max(s.anchor.Due, from.Due), from.Settings
	s.anchor.Holds, s.anchor.From, s.anchor.Remembered = from.Holds, from.From, from.Remembered
	for _, pos := range from.PublishedAhead {
		if pos.LSN > s.anchor.Due {
			s.beyond = append(s.beyond, streamEvent{pos: pos})
		}
	}
}

// readSlot notes what the slot will bring beyond the anchor, and makes sure that the stream's newest events
// came from that WAL.
func (s *scan) readSlot(ctx context.Context) error {
	have := map[outbox.Position]streamEvent{}
	for _, p := range s.beyond {
		have[p.pos] = p
	}
	elsewhere := func(id idHash) bool {
		_, repaired := s.repaired[id]
		return repaired || s.outcomes[id] == inStream
	}
	holds := make(map[uint64]relay.Hold, len(s.anchor.Holds))
	for _, h := range s.anchor.Holds {
		holds[h.Sequence] = h
	}
	sums := make(map[uint64]uint64, len(holds)) // of what was read again, as relay.Hold has it
	var tx []slotEvent
	err := slotread.Decode(ctx, s.r.cfg, s.l.Layout, s.r.log, func(res *decoder.Result) error {
		if res.Kind == decoder.Event {
			e := slotEvent{id: hashID(string(outbox.AppendHeaderValue(nil, res.Event.ID)))}
			if len(holds) > 0 {
				e.counter = relay.Countable(res.Event.Counter)
				e.counter.Sequence = outbox.SequenceOf(res.Event.Doc, res.Event.Actor)
			}
			tx = append(tx, e)
			return nil
		}
		if res.Kind != decoder.Commit {
			return nil
		}
		c := &res.Commit
		if c.Kind == relay.SettingsChange && c.LSN > s.since && c.LSN <= s.anchor.Due {
			s.anchor.Settings = c.Settings
		}
		if c.LSN > s.anchor.Due {
			for i, e := range tx {
				pos, id := outbox.Position{LSN: c.LSN, Index: uint32(i)}, e.id
				p, there := have[pos]
				switch {
				case there && p.named && p.id != id:
					return &untrusted{fmt.Sprintf("the stream has another event at position %v than the WAL",
						pos)}
				case there:
					delete(have, pos)
				case elsewhere(id):
					return &untrusted{fmt.Sprintf("the event at position %v of the WAL is in the stream "+
						"under another position", pos)}
				default:
					s.set(id, inWAL)
				}
			}
		}
		if c.LSN > s.anchor.Start() && c.LSN <= s.anchor.Due {
			for i, e := range tx {
				pos := outbox.Position{LSN: c.LSN, Index: uint32(i)}
				h, held := holds[e.counter.Sequence]
				switch {
				case !held || e.counter.Span == 0 || pos.Compare(h.Oldest) < 0 ||
					!h.Cold && e.counter.Last() <= h.Base:
					continue
				case elsewhere(e.id):
					return &untrusted{fmt.Sprintf(
						"the event at position %v of the WAL is in the stream, and "+
							"the checkpoint holds it back", pos)}
				}
				sums[h.Sequence] += relay.HeldSum(pos, e.counter)
				s.set(e.id, inWAL)
			}
		}
		if tx = tx[:0]; cap(tx) > maxListed {
			tx = nil
		}
		return nil
	})
	switch f := outbox.FaultOf(err); {
	case f != nil && (f.Code == "publication_missing" || f.Code == "slot_unusable" ||
		f.Code == "slot_missing" || f.Code == "column_missing"):
		return &untrusted{fmt.Sprintf("what it holds can't be decoded (%s)", f.Message)}
	case err != nil:
		return err
	}
	for _, h := range holds {
		if sums[h.Sequence] != h.Sum {
			return &untrusted{"the WAL does not have what the checkpoint holds back as it was"}
		}
	}
	if s.anchor.Settings.ByGap() && len(s.beyond) > 0 {
		return &untrusted{"gap mode began where the stream has events beyond the checkpoint"}
	}
	for pos := range have {
		return &untrusted{fmt.Sprintf("the stream has the event at position %v, the WAL does not", pos)}
	}
	s.anchor.PublishedAhead = nil
	for _, p := range s.beyond {
		s.anchor.PublishedAhead = append(s.anchor.PublishedAhead, p.pos)
	}
	slices.SortFunc(s.anchor.PublishedAhead, outbox.Position.Compare)
	return nil
}

// findEdges finds the first and the last missing event in the order of publication, and the ids of all if
// there are few.
func (s *scan) findEdges(ctx context.Context) (err error) {
	if s.counts[missing] == 0 {
		return nil
	}
	if s.counts[missing] <= maxListed {
		s.listed = make([]string, 0, s.counts[missing])
	}
	s.first, s.last, err = s.edges(ctx, s.missing, func(printed []byte) {
		if s.listed != nil {
			s.listed = append(s.listed, string(printed))
		}
	})
	return err
}

// edges finds the first and the last of some candidates in the order of publication; nil: there are none. It
// calls f with the id of each, as PostgreSQL prints it.
func (s *scan) edges(ctx context.Context, are func(idHash) bool, f func(printed []byte)) (
	first, last *Event, err error) {
	name := s.l.Layout.ID
	column, _ := s.snap.Table().Column(name)
	defer progress.Wait(ctx, "PostgreSQL sorts the missing rows of table "+s.l.Layout.Mapping.Table)()
	err = s.snap.Rows(ctx, tablesnapshot.Query{
		Mapping: s.l.Layout.Mapping, ID: name, Columns: []string{name, tablesnapshot.SortDoc,
			tablesnapshot.SortKey}, Where: s.r.o.Where, Sorted: true,
	}, func(v [][]byte) error {
		raw, _ := rawID(column, v[0])
		id := hashID(string(outbox.AppendHeaderValue(nil, raw)))
		if !s.candidate(id) || !are(id) {
			return nil
		}
		e := &Event{Doc: string(v[1]), Key: string(v[2]), ID: raw}
		if first == nil {
			first = e
		}
		last = e
		f(v[0])
		return nil
	})
	return first, last, err
}

// freeIndex is the first free index for what is published at the anchor. With the sequence it ascends also if
// nothing is left of what repairs have published there. A stream has more sequences than there are indexes:
// only among those that begin anew it may not.
func (s *scan) freeIndex() uint32 {
	const all = math.MaxUint32 - outbox.RepairedIndex + 1
	free := max(outbox.RepairedIndex, s.nextIndex[s.anchor.Due])
	if at := s.anchor.Seq % all; at+uint64(s.counts[missing]) <= all {
		free = max(free, outbox.RepairedIndex+uint32(at))
	}
	return free
}

// isUntrusted reports whether err says that the slot can't be kept, and why.
func isUntrusted(err error) (why string, ok bool) {
	var u *untrusted
	if errors.As(err, &u) {
		return u.why, true
	}
	return "", false
}
