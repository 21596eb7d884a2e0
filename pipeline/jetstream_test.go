package pipeline

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// jetstream is a broker with one stream and one record. The harness's lock guards it.
type jetstream struct {
	w   *harness
	rnd *rand.Rand

	created    time.Time
	exists     bool
	messages   []*storedMessage // by sequence; lost ones stay as nil where the broker did not go back
	removed    int              // retention has removed all up to this sequence
	replicated bool
	moving     bool // its newest message is replaced before it can be read
	revisions  []revision
	kept       []revision // of what cluster 2 keeps for itself, in the same bucket
	gaps       string     // their names, beside the record
	last       uint64     // of the record's revisions

	ackEvery int              // a publisher asks for an acknowledgement with each so many messages
	limit    int              // messages in flight
	more     int              // messages that can be read of the stream's end
	latency  time.Duration    // one way
	paused   time.Time        // it does nothing until then
	down     time.Time        // nothing can connect until then
	lostAcks time.Time        // acknowledgements are lost until then
	loseAcks int              // so many of the next acknowledgements are lost
	slow     time.Duration    // what acknowledgements take longer
	drop     int              // so many of the next messages are lost on the way
	recall   time.Duration    // how long the counters of its messages take to be read
	saves    saving           // what happens to the next record
	poison   string           // a payload that can't be published
	now      func() time.Time // what its clock says; nil: it does not
	onFull   func(int)        // called with the number of calls of a publisher's Full
	sound    bool             // it loses and removes nothing
	shared   bool             // clusters share it: there may be cuts
	onCut    func()           // called when one was stored
	deaf     bool             // nobody may watch who publishes
	full     bool             // it takes no messages

	lossAt  uint64 // the first revision after the last loss, 0 if there was none
	lost    int
	refused int
	holes   int
	resumed int // sessions that went on after a failure of the broker
	late    int // messages of dead sessions that were stored
	between int // messages of dead sessions that came between those of a living one
}

type storedMessage struct {
	line
	at       time.Time // when it was stored
	lost     uint64    // Outflow-Lost
	stranger bool      // it has no header of ours
	cut      *outbox.Cut
}

func newJetstream(w *harness, seed uint64) *jetstream {
	return &jetstream{
		w: w, rnd: rand.New(rand.NewPCG(seed, 2)), created: time.Now(), exists: true, ackEvery: 50,
		limit: 2000, more: 1 << 17, latency: 200 * time.Microsecond,
	}
}

func (js *jetstream) newest() int {
	for q := len(js.messages); q > js.removed; q-- {
		if js.messages[q-1] != nil {
			return q
		}
	}
	return 0
}

// firm is how many messages, from the first, the broker can't lose any more.
func (js *jetstream) firm() int {
	now := time.Now()
	for q, m := range js.messages {
		if m != nil && now.Sub(m.at) < js.w.loses {
			return q
		}
	}
	return len(js.messages)
}

// arrive lets a message reach the broker, which stores it only at the sequence that its sender predicted.
func (js *jetstream) arrive(l *brokerConn, s sent) {
	if js.drop > 0 {
		js.drop--
		js.w.step("dropped", s.last+1)
		return
	}
	if l.dead || l.orphan {
		for _, o := range js.w.brokerConns() {
			if !o.orphan && o.sent > 0 {
				js.between++
				break
			}
		}
	}
	ok := js.accepts(&s)
	if ok {
		js.messages = append(js.messages, &storedMessage{line: s.line, at: time.Now(), lost: s.lost,
			cut: s.cut})
		if s.cut != nil && js.onCut != nil {
			js.onCut()
		}
		if l.dead {
			js.late++
		}
		js.w.step("stored", s.last+1)
	} else {
		js.refused++
		js.w.step("refused", s.last+1)
	}
	if !s.reply || l.dead || time.Now().Before(js.lostAcks) {
		return
	}
	if s.cut != nil {
		s.answer(ok)
		return
	}
	if js.loseAcks > 0 {
		js.loseAcks--
		js.w.step("ack lost", s.last+1)
		return
	}
	// Acknowledgements come one after the other, as on one connection.
	l.ackAt = later(later(time.Now(), l.frozen).Add(l.noise.about(js.latency+js.slow)),
		l.ackAt.Add(time.Nanosecond))
	time.AfterFunc(time.Until(l.ackAt), func() {
		js.w.mu.Lock()
		defer js.w.mu.Unlock()
		if !l.dead {
			l.pub.answered(s.last+1, ok)
			js.w.step("acknowledged", s.last+1)
		}
	})
}

// intrude lets a stranger publish a message. Connections that watch hear of it in the order of their
// acknowledgements.
func (js *jetstream) intrude() {
	js.messages = append(js.messages, &storedMessage{at: time.Now(), stranger: true})
	js.w.step("intruded", uint64(len(js.messages)))
	for _, l := range js.w.brokerConns() {
		if !l.watching {
			continue
		}
		l.ackAt = later(later(time.Now(), l.frozen).Add(l.noise.about(js.latency)),
			l.ackAt.Add(time.Nanosecond))
		time.AfterFunc(time.Until(l.ackAt), func() {
			js.w.mu.Lock()
			defer js.w.mu.Unlock()
			l.hears()
		})
	}
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// powerLoss makes the broker forget what it stored less than durable_after ago, from any point on, of the
// stream, of the record, or of each. It loses no more before that is durable which the first process to come
// stores.
func (js *jetstream) powerLoss(stream, record bool) bool {
	if js.sound {
		return false
	}
	now := time.Now()
	if js.lossAt != 0 {
		i := slices.IndexFunc(js.revisions, func(r revision) bool { return r.number >= js.lossAt })
		if i < 0 || now.Sub(js.revisions[i].at) < js.w.loses {
			return false
		}
	}
	for _, l := range js.w.brokerConns() {
		l.cut(js.rnd.IntN(2) == 0)
	}
	for _, l := range js.w.all { // what a sleeping process has yet to send goes to a server that is gone
		if js.shared && now.Before(l.frozen) {
			l.wire = nil
		}
	}
	cut := len(js.messages)
	if firm := js.firm(); stream {
		cut = firm + js.rnd.IntN(cut-firm+1)
	}
	js.lost += len(js.messages) - cut
	readable := false
	for q := js.removed; q < cut; q++ {
		readable = readable || js.messages[q] != nil
	}
	if readable && js.rnd.IntN(3) == 0 { // the index survived: the sequence does not go back
		if cut < len(js.messages) {
			js.holes++
		}
		for q := cut; q < len(js.messages); q++ {
			js.messages[q] = nil
		}
		for _, l := range js.w.all { // what was on its way to a server that died is gone
			l.wire = nil
		}
	} else {
		js.messages = js.messages[:cut]
	}
	js.removed = min(js.removed, cut)
	oldest := 0
	for i, r := range js.revisions {
		if now.Sub(r.at) >= js.w.loses {
			oldest = i
		}
	}
	if record {
		js.revisions = js.revisions[:oldest+js.rnd.IntN(len(js.revisions)-oldest)+1]
		left := js.loseKept(now)
		if js.rnd.IntN(2) == 0 { // the bucket's sequence goes back too
			js.last = left
		}
	}
	js.w.epoch++ // writes of the record that are on their way are gone
	for _, m := range js.messages[js.removed:] {
		if m != nil {
			m.at = minTime(m.at, now.Add(-js.w.loses))
		}
	}
	for _, all := range [][]revision{js.revisions, js.kept} {
		for i := range all {
			all[i].at = minTime(all[i].at, now.Add(-js.w.loses))
		}
	}
	js.lossAt = js.last + 1
	return true
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// retention removes from the front what is durable, sometimes all there is, but nothing that gap mode
// remembers at a checkpoint.
func (js *jetstream) retention() {
	if js.newest() == len(js.messages) && !js.sound {
		js.removed = max(js.removed, min(js.rnd.IntN(js.firm()+1), js.unremembered()))
	}
}

// unremembered is up to where nothing is remembered at any checkpoint that may be gone on from.
func (js *jetstream) unremembered() int {
	from := len(js.messages)
	for i := range js.revisions {
		rec, err := js.revisions[i].record()
		if err != nil {
			js.w.broken = err
			return 0
		}
		for _, p := range rec.Checkpoints {
			at := min(int(p.Seq), len(js.messages))
			for n := 0; n < p.Remembered && at > js.removed; at-- {
				if m := js.messages[at-1]; m != nil && m.packed() != nil {
					n++
				}
			}
			from = min(from, at)
		}
	}
	return from
}
