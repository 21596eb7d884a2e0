package model

import (
	"errors"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/outbox"
)

var (
	errKilled  = errors.New("the process died")
	errRestart = errors.New("it drops the session and starts again")
)

// session is one life of the process: the same calls, in the same order, as the pipeline's.
type session struct {
	w       *world
	kill    float64
	tracker *checkpoint.Tracker
	proof   *checkpoint.TailCheck
	base    *checkpoint.Record
	last    uint64 // the record's revision

	next  uint64 // the expected last sequence of the next message
	ready *message
	wire  []sent
	acks  []ack
	save  *save
}

// run lives until everything is published and stored, or something ends it.
func (w *world) run(kill float64) error {
	r, revision, err := w.readings()
	if err != nil {
		return err
	}
	start, err := checkpoint.Resolve(w.cfg, r)
	if err != nil {
		return err
	}
	s := &session{
		w: w, kill: kill, base: r.Record, last: revision, next: start.LastSeq,
		tracker: checkpoint.NewTracker(w.cfg, start, w.clock()), proof: checkpoint.NewTailCheck(w.cfg, start),
	}
	defer s.die()
	if err := s.proof.Stored(w.stored(s.proof.Compares())); err != nil {
		return err
	}
	// PostgreSQL hands out nothing at or below what is confirmed, wherever one asks it to start.
	return s.read(w.make(start.Checkpoint), max(start.Checkpoint.Due, w.confirmed))
}

// die leaves what was sent on its way.
func (s *session) die() {
	for i := range s.wire {
		s.wire[i].acks = nil
	}
	if len(s.wire) > 0 {
		s.w.wires = append(s.w.wires, s.wire)
	}
	if s.save != nil && !s.save.landed {
		s.w.saves = append(s.w.saves, s.save)
	}
}

func (s *session) read(b orderer, from outbox.LSN) error {
	rnd := s.w.rnd
	for k, in := range s.w.wal {
		if in.lsn <= from {
			continue
		}
		if err := s.proof.Input(in.lsn); err != nil {
			return err
		}
		window, err := b.add(in)
		if err != nil {
			return err
		}
		if window != nil {
			if err := s.publish(window); err != nil {
				return err
			}
		}
		if !s.proof.Verified() {
			continue
		}
		if rnd.Float64() < 0.5 {
			if err := s.send(true); err != nil {
				return err
			}
		}
		if !b.held() && !s.tracker.Unacknowledged() && rnd.Float64() < 0.5 { // a keepalive's marker
			edge := in.lsn
			if k+1 < len(s.w.wal) {
				edge = s.w.wal[k+1].lsn - 1
			}
			s.tracker.Keepalive(b.marker(edge))
		}
		if err := s.checkpoint(0.4); err != nil {
			return err
		}
		if err := s.step(); err != nil {
			return err
		}
	}
	return s.finish()
}

func (s *session) publish(w *window) error {
	for _, m := range w.messages() {
		skip, err := s.proof.Skip(&m.header)
		if err != nil {
			return err
		}
		s.tracker.Made(1)
		if skip {
			continue
		}
		if s.tracker.MustSave() {
			if err := s.store(); err != nil {
				return err
			}
		}
		if err := s.send(s.w.rnd.Float64() < 0.3); err != nil {
			return err
		}
		s.ready = &m
	}
	s.tracker.Window(w.place)
	return nil
}

// send puts what was held back on the wire; reply asks for an acknowledgement.
func (s *session) send(reply bool) error {
	if s.ready != nil {
		m := sent{m: s.ready, last: s.next}
		if reply {
			m.acks = &s.acks
		}
		s.wire = append(s.wire, m)
		s.ready = nil
		s.next++
	}
	return s.step()
}

// step lets time pass: messages arrive or are dropped, records are stored, acknowledgements come, the process dies.
func (s *session) step() error {
	w, rnd := s.w, s.w.rnd
	w.now++
	if len(s.wire) > 0 && rnd.Float64() < 0.02 {
		i := rnd.IntN(len(s.wire))
		s.wire = append(s.wire[:i:i], s.wire[i+1:]...)
	}
	for len(s.wire) > 0 && rnd.Float64() < 0.5 {
		w.arrive(s.wire[0])
		s.wire = s.wire[1:]
	}
	for i := range w.wires {
		for len(w.wires[i]) > 0 && rnd.Float64() < 0.5 {
			w.arrive(w.wires[i][0])
			w.wires[i] = w.wires[i][1:]
		}
	}
	if s.save != nil && !s.save.landed && rnd.Float64() < 0.5 {
		w.land(s.save)
	}
	if len(w.saves) > 0 && rnd.Float64() < 0.3 {
		w.land(w.saves[0])
		w.saves = w.saves[1:]
	}
	if w.killIn > 0 {
		if w.killIn--; w.killIn == 0 {
			return errKilled
		}
	}
	if rnd.Float64() < s.kill {
		return errKilled
	}
	return s.hear()
}

func (s *session) hear() error {
	for _, a := range s.acks {
		if !a.ok {
			return errRestart
		}
		s.tracker.Acked(a.seq)
	}
	s.acks = s.acks[:0]
	if s.save == nil || !s.save.landed || s.w.rnd.Float64() < 0.3 { // the answer may take longer than the write
		return nil
	}
	if s.save.conflict {
		return errRestart
	}
	s.last, s.save = s.save.revision, nil
	s.tracker.Saved(s.w.clock())
	return nil
}

// checkpoint confirms, and stores the record when it is time to.
func (s *session) checkpoint(chance float64) error {
	w := s.w
	if w.rnd.Float64() > chance {
		return nil
	}
	if lsn := s.tracker.Confirmable(w.clock()); lsn > w.confirmed {
		s.tracker.Confirmed(lsn)
		if w.rnd.Float64() < 0.7 { // or it never reached the server
			w.earlier = append(w.earlier, w.confirmed)
			w.confirmed = lsn
		}
	}
	if in, ok := s.tracker.SaveIn(w.clock()); !ok || in > 0 {
		return nil
	}
	return s.snapshot()
}

func (s *session) snapshot() error {
	firm := s.tracker.MustSave()
	doc, err := s.base.With(s.tracker.BeginSave(s.w.clock()), identity, s.w.confirmed).Encode()
	if err != nil {
		return err
	}
	s.save = &save{doc: doc, last: s.last, firm: firm}
	return nil
}

// store waits until the record is stored.
func (s *session) store() error {
	if s.save == nil {
		if err := s.snapshot(); err != nil {
			return err
		}
	}
	return s.wait(func() bool { return s.save == nil })
}

func (s *session) wait(done func() bool) error {
	for range 100 {
		if done() {
			return nil
		}
		if err := s.step(); err != nil {
			return err
		}
	}
	return errRestart // it never came
}

// finish is a clean stop.
func (s *session) finish() error {
	if !s.proof.Verified() {
		return errors.New("the WAL ends before what the stream holds")
	}
	if err := s.send(true); err != nil {
		return err
	}
	if err := s.wait(func() bool { return !s.tracker.Unacknowledged() && s.save == nil }); err != nil {
		return err
	}
	if s.tracker.Pending() {
		if err := s.snapshot(); err != nil {
			return err
		}
	}
	return s.wait(func() bool { return s.save == nil })
}
