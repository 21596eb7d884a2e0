package harness

import (
	"bytes"
	"strings"
	"sync"
)

// Log is a log that may be written and read at the same time.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *Log) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *Log) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *Log) size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Len()
}

func (s *Log) Tail(n int) string {
	text := s.String()
	return strings.TrimLeft(text[max(0, len(text)-n):], "\n")
}
