package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// monitorInterval is how often both servers' states are read while a session runs.
const monitorInterval = 2 * time.Second

// monitor reads how far PostgreSQL is, for metrics, and whether JetStream lives and its stream still has its
// end. What is stored there counts as durable only for as long as it is known to live.
type monitor struct {
	asked  time.Time  // when the states were last asked for
	acked  uint64     // the last sequence that was acknowledged then
	walEnd outbox.LSN // of the server, as it last said
	start  uint64     // the stream's last sequence at the session's start
	newest uint64     // and that of its newest message
}

// states are both servers' states.
type states struct {
	walEnd outbox.LSN
	slot   relay.SlotState
	stream relay.StreamState
	// the stream changed too fast to be read: it lives, and its acknowledgements say where it is
	moved bool
	asked time.Time // when JetStream was
}

func (m *monitor) due(now time.Time) bool { return now.Sub(m.asked) >= monitorInterval }

// readStates reads them. It runs as a job.
func (c *Conns) readStates(ctx context.Context) (st states, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if st.slot, err = c.Source.Slot(ctx); err != nil {
		return st, err
	}
	server, err := c.Source.Server(ctx)
	if err != nil {
		return st, err
	}
	st.walEnd, st.asked = server.WALEnd, time.Now()
	ctx, cancel = untilLost(ctx, c.JetStream)
	defer cancel()
	st.stream, err = c.JetStream.Tail(ctx)
	if f := outbox.FaultOf(err); f != nil && f.Code == relay.CodeStreamMoved || st.stream.Open != "" {
		st.moved, err = true, nil // what is open stays known: the next start records nothing of it
	}
	return st, ofJetStream(err)
}

// check returns an error where the stream has lost its end, or where somebody has changed it so that others'
// messages get in. Nobody watches another way into it than the ingress, and one of them may have taken the
// sequence of a message of ours, which was refused without a word (see package sink).
func (m *monitor) check(st *states) error {
	if open := st.stream.Open; open != "" {
		return &outbox.Fault{
			Class: outbox.Gap, Code: "foreign_message", Observed: true,
			Message: open + ", since somebody changed it while Outflow published: a message of ours may " +
				"have been refused for another one and be missing",
			Hint: "Undo the change. Then run `outflow repair`: it looks for messages of others and says " +
				"what is missing; `outflow repair --accept foreign_message` publishes it",
		}
	}
	least := m.newest // that the newest message's sequence can be
	if m.acked > m.start {
		least = m.acked
	}
	if !st.moved && (st.stream.LastSeq < m.acked || st.stream.Messages > 0 && st.stream.NewestSeq < least) {
		return fmt.Errorf("the stream has lost its end: its newest message is %d, its last sequence %d, "+
			"and %d was acknowledged",
			st.stream.NewestSeq, st.stream.LastSeq, m.acked)
	}
	return nil
}

// untilLost ends a context with the connection to JetStream.
func untilLost(ctx context.Context, js JetStream) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer crash.Guard()
		select {
		case <-js.Lost():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
