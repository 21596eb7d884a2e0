package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// silence is how long the story says nothing, at most.
const silence = 1500 * time.Millisecond

// story prints lines with the time since its begin. While nothing happens it says how things are.
type story struct {
	begun time.Time
	done  chan struct{}
	ended sync.WaitGroup

	mu    sync.Mutex
	out   io.Writer
	said  time.Time
	state func() string // how things are
}

func newStory(out io.Writer) *story {
	now := time.Now()
	s := &story{begun: now, said: now, out: out, done: make(chan struct{}), state: func() string {
		return "starting"
	}}
	s.ended.Go(s.fill)
	return s
}

// fill ends each silence.
func (s *story) fill() {
	for {
		s.mu.Lock()
		due, state := time.Until(s.said.Add(silence)), s.state
		s.mu.Unlock()
		if due <= 0 {
			s.say("    … %s", state())
			continue
		}
		select {
		case <-s.done:
			return
		case <-time.After(due):
		}
	}
}

func (s *story) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = time.Now()
	fmt.Fprintf(s.out, "%6.1f s  %s\n", s.said.Sub(s.begun).Seconds(), fmt.Sprintf(format, args...))
}

func (s *story) tellsOf(state func() string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = state
}

// quiet ends the story. Further calls do nothing.
func (s *story) quiet() {
	s.mu.Lock()
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	s.mu.Unlock()
	s.ended.Wait()
}
