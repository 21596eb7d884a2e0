package pipeline

import (
	"fmt"
	"time"
)

// fault is one thing that may go wrong. It happens right after a step, or at some moment; the harness's lock
// is held.
type fault struct {
	name    string
	happens func(s *schedule)
}

// faults are set by init: they lead back to the tally, which counts them.
var faults [kinds]fault

const kinds = 24

func init() {
	faults = [kinds]fault{
		{"kill", (*schedule).killOne}, {"kill again", (*schedule).killOne}, {"stop", (*schedule).stopOne},
		{"postgres cut", (*schedule).cutUpstreams}, {"nats cut", (*schedule).cutLinks},
		{"zombie", (*schedule).zombie},
		{"ack lost", func(s *schedule) { s.js.loseAcks = 1 + s.rnd.IntN(3) }},
		{"acks lost", func(s *schedule) { s.js.lostAcks = s.soon(2 * time.Second) }},
		{"acks slow", func(s *schedule) { s.js.slow = time.Duration(s.rnd.IntN(3000)) * time.Millisecond }},
		{"nats paused", func(s *schedule) { s.js.paused = s.soon(8 * time.Second) }},
		{"message dropped", func(s *schedule) { s.js.drop = 1 }},
		{"stream's tail", func(s *schedule) { s.js.powerLoss(true, false) }},
		{"record's tail", func(s *schedule) { s.js.powerLoss(false, true) }},
		{"tails", func(s *schedule) { s.js.powerLoss(true, true) }},
		{"retention", func(s *schedule) { s.js.retention() }},
		{"record unheard", func(s *schedule) { s.js.saves = saveUnheard }},
		{"record late", func(s *schedule) { s.js.saves = saveLate }},
		{"record lost", func(s *schedule) { s.js.saves = saveNever }},
		{"postgres crash", func(s *schedule) { s.pg.crash() }},
		{"tick fails", func(s *schedule) {
			s.pg.writeFails, s.pg.failsLate = 1+s.rnd.IntN(2),
				s.rnd.IntN(2) == 0
		}},
		{"clock step", (*schedule).stepClock},
		{"nats flaps", (*schedule).flap},
		{"nats away", func(s *schedule) { // sometimes for longer than a session is kept
			for _, l := range s.brokerConns() {
				l.cut(s.rnd.IntN(2) == 0)
			}
			s.js.down = s.soon(pick(s.rnd, 5*time.Second, 2*keepReplication))
		}},
		{"slow questions", func(s *schedule) {
			s.alive[s.one()].lag = pick(s.rnd, 20*time.Millisecond, 200*time.Millisecond,
				900*time.Millisecond)
		}},
	}
}

func (s *schedule) soon(limit time.Duration) time.Time {
	return time.Now().Add(time.Duration(s.rnd.Int64N(int64(limit))))
}

// one is a process that runs.
func (s *schedule) one() int { return pick(s.rnd, s.living()...) }

func (s *schedule) killOne() {
	i := s.one()
	s.alive[i].dies()
	s.respawn(i)
}

func (s *schedule) stopOne() {
	i := s.one()
	pr := s.alive[i]
	pr.stopping = true
	pr.cancel()
	go func() {
		<-pr.ended
		s.with(func() {
			if pr.err != nil && s.broken == nil {
				s.broken = fmt.Errorf("stopped with %w", pr.err)
			}
			s.respawn(i)
		})
	}()
}

func (s *schedule) cutUpstreams() {
	for _, u := range s.postgresConns() {
		u.cut(s.rnd.IntN(2) == 0)
	}
	s.pg.down = s.soon(pick(s.rnd, time.Nanosecond, 100*time.Millisecond, time.Second))
}

func (s *schedule) cutLinks() {
	for _, l := range s.brokerConns() {
		l.cut(s.rnd.IntN(2) == 0)
	}
	s.js.down = s.soon(pick(s.rnd, time.Nanosecond, 100*time.Millisecond, time.Second))
}

// flap cuts the connections to the broker again and again, also those of a session that tries to go on.
func (s *schedule) flap() {
	at := time.Duration(0)
	for range 2 + s.rnd.IntN(4) {
		at += s.noise.about(time.Duration(s.rnd.IntN(pick(s.rnd, 3, 100, 400))) * time.Millisecond)
		time.AfterFunc(at, func() {
			s.with(func() {
				for _, l := range s.brokerConns() {
					l.cut(s.rnd.IntN(2) == 0)
				}
			})
		})
	}
}

// zombie lets the owner of the slot lose it without knowing. It may sleep meanwhile; then it goes on with
// what it has, until it hears of it.
func (s *schedule) zombie() {
	for _, pr := range s.procs {
		if pr.dead || len(pr.ups) == 0 || pr.postgres() != s.pg.active {
			continue
		}
		u, l := pr.postgres(), pr.broker()
		s.pg.active, l.orphan = nil, true
		d := time.Duration(s.rnd.IntN(3000)) * time.Millisecond
		if s.rnd.IntN(2) == 0 {
			u.frozen = time.Now().Add(d)
			l.frozen = u.frozen
			d += s.noise.about(time.Duration(s.rnd.IntN(200)) * time.Millisecond)
		}
		time.AfterFunc(s.noise.about(d), func() { s.with(func() { u.cut(true) }) })
	}
}

// stepClock sets the wall clock of a process's host, forwards or back.
func (s *schedule) stepClock() {
	i := s.one()
	s.alive[i].skew = s.clock + time.Duration(s.rnd.Int64N(int64(s.spread)+1))
}
