package pipeline

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The cuts of the simulated stream, and the fence by which it refuses messages that do not know the newest.

// accepts reports whether a message is expected where the stream ends, and names its newest cut.
func (js *jetstream) accepts(s *sent) bool {
	return !js.full && s.last == uint64(len(js.messages)) && s.fence == js.newestCut()
}

// newestCut is the sequence of the newest cut that is there, 0 if there is none.
func (js *jetstream) newestCut() uint64 {
	for q := len(js.messages); js.shared && q > js.removed; q-- {
		if m := js.messages[q-1]; m != nil && m.cut != nil {
			return uint64(q)
		}
	}
	return 0
}

func (l *brokerConn) NewestCut(ctx context.Context, lastSeq uint64) (*relay.Stored, error) {
	if err := l.ask(ctx); err != nil {
		return nil, err
	}
	l.lock()
	defer l.unlock()
	q := l.js.newestCut()
	if q == 0 {
		return nil, nil
	}
	if q > lastSeq {
		return nil, &outbox.Fault{Class: outbox.Transient, Code: relay.CodeStreamMoved,
			Message: "the stream has a cut behind its end"}
	}
	m := l.js.messages[q-1]
	return &relay.Stored{Seq: q, Cut: m.cut, Time: m.at}, nil
}

// StoreCut asks once: the real one finds a cut that it has stored before.
func (l *brokerConn) StoreCut(ctx context.Context, cut outbox.Cut, lastSeq, fence uint64) error {
	stored := make(chan bool, 1)
	l.lock()
	l.send(sent{last: lastSeq, fence: fence, cut: &cut, reply: true, answer: func(ok bool) { stored <- ok }})
	l.unlock()
	select {
	case ok := <-stored:
		if !ok {
			return &outbox.Fault{Class: outbox.Transient, Code: "wrong_last_sequence",
				Message: "the cut was refused"}
		}
		return nil
	case <-time.After(5 * time.Second):
		return &outbox.Fault{Class: outbox.Transient, Code: "ack_timeout", Message: "no answer"}
	case <-l.gone:
		return errDown
	case <-ctx.Done():
		return ctx.Err()
	}
}
