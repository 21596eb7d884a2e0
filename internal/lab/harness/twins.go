package harness

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// Twins are an outflow with a NATS server of its own, and another on a slot and a server of its own that
// nothing happens to.
type Twins struct {
	T              *testing.T
	URL            string
	Conn           *pgx.Conn
	NATS           *natstest.ServerProcess
	Instance, Twin *Outflow
	JS, TwinJS     jetstream.JetStream
}

// AwaitStored waits until the stream has n messages, those that it lost not counted.
func (s *Twins) AwaitStored(n int) {
	s.T.Helper()
	Eventually(s.T, fmt.Sprintf("%d messages", n), func() error {
		st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
		if err != nil {
			return err
		}
		if got := st.CachedInfo().State.Msgs; got < uint64(n) {
			return fmt.Errorf("%d messages", got)
		}
		return nil
	})
}

// MustBeEqual compares the two streams, message by message, and the victim's with the table.
func (s *Twins) MustBeEqual(n int) {
	s.T.Helper()
	s.AwaitStored(n)
	AwaitMessages(s.T, s.TwinJS, s.Twin.Stream, n)
	s.Instance.MustBeComplete(s.Conn, s.NATS.URL())
	SameMessages(s.T, Messages(s.T, s.JS, s.Instance.Stream), Messages(s.T, s.TwinJS, s.Twin.Stream))
}

// Loss is the end that a stream loses, and what becomes of the last sequence.
type Loss struct {
	Form natsserver.Form
	Keep func(last uint64) uint64
}

func LoseNewest(form natsserver.Form, n uint64) *Loss {
	return &Loss{Form: form, Keep: func(last uint64) uint64 { return last - n }}
}

// Tear does nothing for nil.
func (l *Loss) Tear(t *testing.T, dir, stream string) natsserver.Torn {
	t.Helper()
	if l == nil {
		return natsserver.Torn{}
	}
	all, err := natsserver.Tear(dir, stream, natsserver.Back, func(uint64, time.Time) bool { return true })
	Must(t, err)
	keep := l.Keep(all.Last)
	torn, err := natsserver.Tear(dir, stream, l.Form, func(seq uint64, _ time.Time) bool {
		return seq <= keep
	})
	Must(t, err)
	if torn.Messages == 0 {
		t.Fatalf("nothing of the %d messages of %s was lost", all.Last, stream)
	}
	t.Logf("%s, %v: %v", stream, l.Form, torn)
	return torn
}
