package crash

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// digest is what the stream holds.
func digest(s *harness.Twins) string {
	s.T.Helper()
	_, sum, err := oracle.Digest(s.T.Context(), s.JS, s.Instance.Stream)
	harness.Must(s.T, err)
	return sum
}

// TestALostTailThatTheWALNoLongerHasStopsOutflow: what is lost had been there for durable_after, and
// PostgreSQL does not have it any more. Outflow stops, says which part of the WAL it concerns, and publishes
// nothing.
func TestALostTailThatTheWALNoLongerHasStopsOutflow(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	cases := []struct {
		name           string
		stream, bucket *harness.Loss
		code           string
	}{
		{"stream", part(back, 0.5), nil, "stream_shortened"},
		{"whole stream", allBut(back, 0), nil, "stream_shortened"},
		{"bucket", nil, allBut(back, 2), "slot_ahead"},
		{"both", part(back, 0.5), allBut(hole, 2), "slot_ahead"},
	}
	const rows = 40
	all := make([]*harness.Twins, len(cases))
	lost := make([][]*oracle.Message, len(cases))
	confirmed := make([]outbox.LSN, len(cases))
	before := make([]string, len(cases))
	harness.AtOnce(t, len(cases), func(i int) {
		s := startTwins(t, pg, twinNATS, "old")
		all[i] = s
		for n := range rows {
			harness.Insert(t, s.Conn, "doc", n, "{}")
		}
		s.AwaitStored(rows)
		there := harness.Messages(t, s.JS, s.Instance.Stream)
		confirmed[i] = s.Instance.AwaitConfirmed(s.Conn, outbox.LSN(there[rows-1].Outflow.Thru))
		consume(s, "reader")
		torn := crash(s, cases[i].stream, cases[i].bucket)
		if torn.First > 0 {
			lost[i] = there[torn.First-1:]
		}
		confirmed[i] = s.Instance.AwaitConfirmed(s.Conn, confirmed[i]) // while nobody runs
		harness.Insert(t, s.Conn, "doc", rows, "{}")
		harness.Must(t, s.NATS.Start())
		before[i] = digest(s)
		s.Instance.Start()
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			on(s, t)
			s.Instance.MustEndInGap(c.code)
			from, to := s.Instance.LSNRange()
			if c.code == "stream_shortened" && to != confirmed[i] {
				t.Errorf("the range ends at %v, the slot is confirmed at %v", to, confirmed[i])
			}
			for _, m := range lost[i] {
				if at := outbox.LSN(m.Outflow.Pos.LSN); at <= from || at > to {
					t.Errorf("the lost message %d, at %v, is not in the range %v to %v", m.Seq, at, from, to)
				}
			}
			if c.stream != nil && c.bucket == nil {
				s.Instance.MustContain("the log", s.Instance.Said(), "consumers=[reader]")
			}
			s.Instance.AwaitHealth(c.code)
			if after := digest(s); after != before[i] {
				t.Error("the stream is not what it was")
			}
		})
	}
}

// TestAConfirmedTailThatIsMissingIsReported: messages that were confirmed are missing at the end, but the
// sequence did not go back. So it is when somebody deleted them, and that must not stop outflow; so it would
// be if the server lost what was durable, and that must not pass in silence.
func TestAConfirmedTailThatIsMissingIsReported(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	s := startTwins(t, pgtest.Server(t), natstest.Server(t).URL(), "missing")
	const rows = 40
	for n := range rows {
		harness.Insert(t, s.Conn, "doc", n, "{}")
	}
	s.AwaitStored(rows)
	s.Instance.AwaitConfirmed(s.Conn,
		outbox.LSN(harness.Messages(t, s.JS, s.Instance.Stream)[rows-1].Outflow.Thru))
	crash(s, part(hole, 0.5), nil)
	harness.Insert(t, s.Conn, "doc", rows, "{}")
	harness.Must(t, s.NATS.Start())
	s.Instance.Start()
	harness.AwaitMessages(t, s.JS, s.Instance.Stream, rows+1)
	s.Instance.MustContain("the log", s.Instance.Said(),
		"somebody deleted them, or the NATS server lost them", "from=21 to=40")
	harness.AwaitMessages(t, s.TwinJS, s.Twin.Stream, rows+1)
	got, want := harness.Messages(t, s.JS, s.Instance.Stream), harness.Messages(t, s.TwinJS, s.Twin.Stream)
	harness.SameMessages(t, got, append(want[:rows/2:rows/2], want[rows]))
}

// TestOutflowGoesOnInAStreamThatWasEmptied: everything in the stream is removed while outflow is away, by
// somebody or by age. That is no loss: it goes on exactly where it was.
func TestOutflowGoesOnInAStreamThatWasEmptied(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	cases := []struct {
		name     string
		settings []string
		empty    func(s *harness.Twins)
	}{
		{"purge", nil, func(s *harness.Twins) {
			st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
			harness.Must(s.T, err)
			harness.Must(s.T, st.Purge(s.T.Context()))
		}},
		{"purge of all but the newest", nil, func(s *harness.Twins) {
			st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
			harness.Must(s.T, err)
			harness.Must(s.T, st.Purge(s.T.Context(), jetstream.WithPurgeKeep(1)))
		}},
		{"age", []string{"INIT_MAX_AGE=2s"}, func(*harness.Twins) {}},
		{"age with a horizon of 0", []string{"INIT_MAX_AGE=2s", "REORDER_HORIZON=0s"},
			func(*harness.Twins) {}},
	}
	const rows, more = 200, 40
	all := make([]*harness.Twins, len(cases))
	rest := make([]int, len(cases)) // so many are gone
	harness.AtOnce(t, len(cases), func(i int) {
		s := startTwins(t, pg, twinNATS, "gone", cases[i].settings...)
		all[i] = s
		// The twin keeps everything.
		st, err := s.TwinJS.Stream(t.Context(), s.Twin.Stream)
		harness.Must(t, err)
		cfg := st.CachedInfo().Config
		cfg.MaxAge = 0
		_, err = s.TwinJS.UpdateStream(t.Context(), cfg)
		harness.Must(t, err)
		harness.StartLoad(t, s.URL, harness.RecordedOps(t, rows), 4, 0, 3).Wait(t)
		harness.AwaitMessages(t, s.JS, s.Instance.Stream, rows)
		s.Instance.Kill()
		cases[i].empty(s)
		rest[i] = rows
		if cases[i].settings != nil {
			harness.Eventually(t, "everything is too old", func() error { return holds(s, 0) })
		} else if err := holds(s, 0); err != nil {
			rest[i] = rows - 1
		}
		harness.Exec(t, s.Conn,
			`INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'later ' || n % 7, 'anna', n, '{}'
				FROM generate_series(1, $1) n`, more)
		s.Instance.Start()
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			on(s, t)
			harness.AwaitMessages(t, s.JS, s.Instance.Stream, rows+more)
			harness.AwaitMessages(t, s.TwinJS, s.Twin.Stream, rows+more)
			want := harness.Messages(t, s.TwinJS, s.Twin.Stream)
			got := harness.Messages(t, s.JS, s.Instance.Stream)
			if c.settings != nil { // they may be too old before they are all read
				rest[i] = rows + more - len(got)
			}
			harness.SameMessages(t, got, want[rest[i]:])
			if len(got) > 0 && got[0].Seq != want[rest[i]].Seq {
				t.Errorf("the first message left has sequence %d, the twin's %d", got[0].Seq,
					want[rest[i]].Seq)
			}
			if len(got) < more && c.settings == nil {
				t.Errorf("%d messages", len(got))
			}
			s.Instance.MustStop(t)
		})
	}
}

// holds returns an error unless the stream has n messages.
func holds(s *harness.Twins, n uint64) error {
	st, err := s.JS.Stream(s.T.Context(), s.Instance.Stream)
	if err != nil {
		return err
	}
	if got := st.CachedInfo().State.Msgs; got != n {
		return fmt.Errorf("%d messages", got)
	}
	return nil
}
