package consumertest

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Stream is a stream in memory for [NewConsumer]. Several consumers may use it one after the other or, under
// different names, at the same time.
type Stream struct {
	mu       sync.Mutex
	created  time.Time
	messages []stream.Message
	grown    chan struct{} // closed when messages are added
}

// NewStream returns an empty stream.
func NewStream() *Stream {
	return &Stream{created: time.Now().UTC(), grown: make(chan struct{})}
}

// Add appends events, each as if from a commit of its own, and returns the sequence of the last one.
func (s *Stream) Add(events ...Event) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range events {
		s.messages = append(s.messages, e.message(uint64(len(s.messages))+1))
	}
	close(s.grown)
	s.grown = make(chan struct{})
	return uint64(len(s.messages))
}

// message is the event as Outflow would have published it.
func (e Event) message(seq uint64) stream.Message {
	m := stream.Message{Subject: e.Subject, Data: e.Data, Sequence: seq, Time: e.Time, Header: nats.Header{}}
	maps.Copy(m.Header, e.Header)
	if m.Subject == "" {
		m.Subject = string(outbox.AppendToken([]byte("outbox."), e.Document))
	}
	if m.Time.IsZero() {
		m.Time = time.Now()
	}
	if e.Type != "" {
		m.Header["Event-Type"] = []string{e.Type}
	}
	if e.ID == "" {
		e.ID = strconv.FormatUint(seq, 10)
	}
	lsn := outbox.LSN(0x1000000 + seq<<8)
	h := outbox.Header{
		Pos: outbox.Position{LSN: lsn}, Of: 1, Due: lsn, Thru: lsn + 0x80, Timeline: 1, Sort: outbox.BySeqKey,
		ID: e.ID, Key: e.Key,
	}
	m.Header[outbox.HeaderName] = []string{h.String()}
	return m
}

// source is a stream as package consumer reads it.
type source struct{ *Stream }

func (s source) State(context.Context) (stream.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return stream.State{Created: s.created, First: 1, Last: uint64(len(s.messages))}, nil
}

func (s source) Get(_ context.Context, seq uint64) (*stream.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if seq == 0 || seq > uint64(len(s.messages)) {
		return nil, nil
	}
	m := s.messages[seq-1]
	return &m, nil
}

func (s source) Next(_ context.Context, seq uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if seq = max(seq, 1); seq > uint64(len(s.messages)) {
		return 0, nil
	}
	return seq, nil
}

func (s source) Open(_ context.Context, after uint64) (stream.Reader, error) {
	return &reader{stream: s.Stream, at: after, closed: make(chan struct{})}, nil
}

// reader reads a stream.
type reader struct {
	stream *Stream
	at     uint64 // handed out
	once   sync.Once
	closed chan struct{}
}

var errClosed = errors.New("the reader is closed")

func (r *reader) Read(ctx context.Context) (*stream.Message, error) {
	for {
		r.stream.mu.Lock()
		grown := r.stream.grown
		if r.at < uint64(len(r.stream.messages)) {
			m := r.stream.messages[r.at]
			r.at++
			r.stream.mu.Unlock()
			return &m, nil
		}
		r.stream.mu.Unlock()
		select {
		case <-grown:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-r.closed:
			return nil, errClosed
		}
	}
}

func (r *reader) Check(context.Context) (uint64, error) { return r.at, nil }

func (r *reader) Buffered() int { return 0 }

func (r *reader) Close() { r.once.Do(func() { close(r.closed) }) }
