package harness

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/outbox"
)

// CompareStreams compares each stream with the table, and the two with each other. With a horizon above 0 it
// also holds claim C4: what is out of order came to the WAL when the window of a higher one had closed (the
// server must track commit timestamps).
func CompareStreams(t *testing.T, pgURL, natsURL, twinURL, stream string, horizon time.Duration) {
	t.Helper()
	conn := Connect(t, pgURL)
	var verdicts []oracle.Verdict
	for _, u := range []string{natsURL, twinURL} {
		v, err := oracle.Compare(t.Context(), conn, "outbox", JetStream(t, u), stream, horizon)
		Must(t, err)
		t.Log(v.String())
		if !v.OK() {
			t.Errorf("stream and table differ: %s", v.String())
		}
		if horizon > 0 && v.OutOfOrder != v.Late {
			t.Errorf("%d events are out of order though the window of no higher one had closed",
				v.OutOfOrder-v.Late)
		}
		verdicts = append(verdicts, v)
	}
	if verdicts[0].Digest != verdicts[1].Digest {
		t.Errorf("the streams differ: digests %s and %s", verdicts[0].Digest, verdicts[1].Digest)
	}
}

// SameMessages compares subject, headers and data, in order.
func SameMessages(t *testing.T, got, want []*oracle.Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d messages, the twin has %d", len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		a, b := got[i], want[i]
		if a.Subject != b.Subject || a.Header.Get(outbox.HeaderName) != b.Header.Get(outbox.HeaderName) ||
			headers(a) != headers(b) || !bytes.Equal(a.Data, b.Data) {
			t.Fatalf("message %d is\n%s %v %s\nthe twin has\n%s %v %s", i+1, a.Subject, a.Header, a.Data,
				b.Subject, b.Header, b.Data)
		}
	}
}

// headers counts a message's headers without the one that says what this stream has lost.
func headers(m *oracle.Message) int {
	if _, lost := m.Header[outbox.HeaderLost]; lost {
		return len(m.Header) - 1
	}
	return len(m.Header)
}

// The peers_*_test.go files hold what other streamers of a WAL were seen to fail at: docs/guarantees.md,
// "Failures seen elsewhere".

// MustBeExact compares stream and table and holds the order: with horizon 0s and sort commit the messages are
// in the order of their positions.
func (o *Outflow) MustBeExact(conn *pgx.Conn, natsURL string) []*oracle.Message {
	o.T.Helper()
	o.MustBeComplete(conn, natsURL)
	all := Messages(o.T, JetStream(o.T, natsURL), o.Stream)
	for i := 1; i < len(all); i++ {
		if a, b := all[i-1].Outflow.Pos, all[i].Outflow.Pos; a.Compare(b) >= 0 {
			o.T.Fatalf("message %d has position %v, the one before it %v", all[i].Seq, b, a)
		}
	}
	return all
}

// InCommitOrder are the settings under which exact holds the order.
var InCommitOrder = []string{"REORDER_HORIZON=0s", "REORDER_SORT=commit"}

// AwaitComplete waits until as many messages as rows are there, and compares them.
func (f *Installation) AwaitComplete(t *testing.T, natsURL string, stranger uint64) {
	t.Helper()
	var n int
	Must(t, f.Conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n))
	Eventually(t, "all rows published", func() error {
		s, err := f.JS.Stream(t.Context(), f.Stream)
		if err != nil {
			return err
		}
		if stranger > 0 { // its message is in the way of the comparison only
			_ = s.DeleteMsg(t.Context(), stranger) // again and again
			if _, err := s.Info(t.Context()); err != nil {
				return err
			}
		}
		if got := s.CachedInfo().State.Msgs; got < uint64(n) {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
	f.MustBeComplete(f.Conn, natsURL)
}

// MustBeComplete compares stream and table.
func (o *Outflow) MustBeComplete(conn *pgx.Conn, natsURL string) oracle.Verdict {
	o.T.Helper()
	v, err := oracle.Compare(o.T.Context(), conn, "outbox", JetStream(o.T, natsURL), o.Stream, 0)
	Must(o.T, err)
	if !v.OK() {
		o.T.Errorf("stream and table differ: %s", v.String())
	}
	return v
}
