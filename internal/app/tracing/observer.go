package tracing

import (
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/internal/traceparent"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/sink"
)

// Observer is what one session tells of its messages, which are made by the settings of to. It is nil where
// there is nothing to report: no header traceparent is mapped.
func (t *Tracer) Observer(to sink.Config) (pipeline.Observer, error) {
	enc, err := sink.NewEncoder(to)
	if err != nil {
		return nil, err
	}
	o := &observer{t: t, enc: enc, parent: enc.Mapped(traceparent.Name),
		state: enc.Mapped(traceparent.State)}
	if o.parent == nil {
		t.unmapped.say(t.cfg.Logger, "no spans are exported: no header traceparent is "+
			"mapped. Set headers: {traceparent: <column>}")
		return nil, nil
	}
	return o, nil
}

// observer belongs to the loop of one session.
type observer struct {
	t             *Tracer
	enc           *sink.Encoder
	parent, state func(*relay.Event) string // state nil: no such header is mapped

	inFlight []span // ascending by sequence, from head on; no more than the publisher has in flight
	head     int
}

// maxID is how much of an event's id is exported, in bytes.
const maxID = 256

// bounded is a copy of the beginning of a text: the text itself may keep the memory of many events alive, and
// be larger than a span is worth. One that is not UTF-8 would cost all spans of its export.
func bounded(text string, limit int) string {
	return strings.Clone(strings.ToValidUTF8(text[:min(len(text), limit)], ""))
}

// begin starts a span; ok is false for what has none.
func (o *observer) begin(e *relay.Event, h *outbox.Header, seq uint64, received time.Time) (s span, ok bool) {
	text := o.parent(e)
	if text == "" {
		return s, false
	}
	if s.parent, ok = traceparent.Parse(text); !ok {
		o.t.metrics.invalid.Inc()
		o.t.invalid.say(o.t.cfg.Logger, "a traceparent is not valid: the message has it as "+
			"it is, and there is no span", "position", e.Pos.String())
		return s, false
	}
	if !s.parent.Sampled() {
		return s, false
	}
	if o.state != nil {
		if state := o.state(e); len(state) <= traceparent.MaxState { // else no part of it is of use
			s.state = bounded(state, traceparent.MaxState)
		}
	}
	s.pos, s.seq, s.bytes, s.received = e.Pos, seq, e.PayloadSize, received
	s.id = bounded(e.ID, maxID)
	s.commit = relay.CommitTime(e.Time)
	s.subject, s.dead = o.enc.Subject(e, h)
	return s, true
}

// Found reports the span of a message whose acknowledgement the last session may not have seen.
func (o *observer) Found(e *relay.Event, h *outbox.Header, seq uint64, received, stored time.Time) {
	if stored.IsZero() {
		return
	}
	if s, ok := o.begin(e, h, seq, received); ok {
		s.end = stored
		o.t.offer(&s)
	}
}

// Sent begins the span of a message.
func (o *observer) Sent(e *relay.Event, h *outbox.Header, seq uint64, received time.Time) {
	if s, ok := o.begin(e, h, seq, received); ok {
		s.sent = time.Now()
		o.inFlight = append(o.inFlight, s)
	}
}

// Acked ends the spans up to a sequence.
func (o *observer) Acked(seq uint64) {
	if o.head == len(o.inFlight) || o.inFlight[o.head].seq > seq {
		return
	}
	now := time.Now()
	for ; o.head < len(o.inFlight) && o.inFlight[o.head].seq <= seq; o.head++ {
		s := &o.inFlight[o.head]
		s.end = now
		o.t.offer(s)
		*s = span{}
	}
	if o.head == len(o.inFlight) {
		o.inFlight, o.head = o.inFlight[:0], 0
	} else if o.head >= sink.MaxInFlight {
		o.inFlight = append(o.inFlight[:0], o.inFlight[o.head:]...)
		o.head = 0
	}
}

// offer hands a span over, if there is room for it.
func (t *Tracer) offer(s *span) {
	select {
	case t.queue <- *s:
	default:
		t.metrics.queueFull.Inc()
	}
}
