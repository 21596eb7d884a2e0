package e2e

import (
	"fmt"
	"regexp"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

var lsnRange = regexp.MustCompile(`LSN range ([0-9A-F]+/[0-9A-F]+) to ([0-9A-F]+/[0-9A-F]+)`)

// lsnRange reads the range from what outflow said last.
func (o *outflow) lsnRange() (from, to outbox.LSN) {
	o.t.Helper()
	found := lsnRange.FindStringSubmatch(o.log.tail(4000))
	if found == nil {
		o.t.Fatalf("no LSN range in %s", o.log.tail(4000))
	}
	var err error
	from, err = outbox.ParseLSN(found[1])
	must(o.t, err)
	to, err = outbox.ParseLSN(found[2])
	must(o.t, err)
	return from, to
}

// confirmed waits until a slot is confirmed at or above an LSN.
func (s *twins) confirmed(lsn outbox.LSN) (at outbox.LSN) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%v confirmed", lsn), func() error {
		var text string
		err := s.conn.QueryRow(s.t.Context(), "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1",
			s.victim.slot).Scan(&text)
		if err == nil {
			at, err = outbox.ParseLSN(text)
		}
		if err == nil && at < lsn {
			err = fmt.Errorf("confirmed at %v", at)
		}
		return err
	})
	return at
}

// digest is what the stream holds.
func (s *twins) digest() string {
	s.t.Helper()
	_, sum, err := oracle.Digest(s.t.Context(), s.js, s.victim.stream)
	must(s.t, err)
	return sum
}

// TestLostTailTooOld: what is lost had been there for durable_after, and PostgreSQL does not have it any more. Outflow stops, says which
// part of the WAL it concerns, and publishes nothing.
func TestLostTailTooOld(t *testing.T) {
	slow(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	cases := []struct {
		name           string
		stream, bucket *loss
		code           string
		what           string
	}{
		{"stream", part(back, 0.5), nil, "stream_shortened", "it lost messages that had been there for 1s"},
		{"whole stream", allBut(back, 0), nil, "stream_shortened", "it lost messages"},
		{"bucket", nil, allBut(back, 2), "slot_ahead", "beyond every place that outflow recorded"},
		{"both", part(back, 0.5), allBut(hole, 2), "slot_ahead", "beyond every place that outflow recorded"},
	}
	const rows = 40
	all := make([]*twins, len(cases))
	lost := make([][]*oracle.Message, len(cases))
	confirmed := make([]outbox.LSN, len(cases))
	before := make([]string, len(cases))
	atOnce(t, len(cases), func(i int) {
		s := startTwins(t, pg, twinNATS, "old")
		all[i] = s
		for n := range rows {
			row(t, s.conn, "doc", n, "{}")
		}
		s.stored(rows)
		there := messages(t, s.js, s.victim.stream)
		confirmed[i] = s.confirmed(outbox.LSN(there[rows-1].Outflow.Thru))
		s.consume("reader")
		torn := s.crash(cases[i].stream, cases[i].bucket)
		if torn.First > 0 {
			lost[i] = there[torn.First-1:]
		}
		confirmed[i] = s.confirmed(confirmed[i]) // while nobody runs
		row(t, s.conn, "doc", rows, "{}")
		must(t, s.nats.Start())
		before[i] = s.digest()
		s.victim.log.Reset()
		s.victim.start()
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			s.on(t)
			s.victim.ends(4, c.what, "outflow init")
			from, to := s.victim.lsnRange()
			if c.code == "stream_shortened" && to != confirmed[i] {
				t.Errorf("the range ends at %v, the slot is confirmed at %v", to, confirmed[i])
			}
			for _, m := range lost[i] {
				if at := outbox.LSN(m.Outflow.Pos.LSN); at <= from || at > to {
					t.Errorf("the lost message %d, at %v, is not in the range %v to %v", m.Seq, at, from, to)
				}
			}
			if c.stream != nil && c.bucket == nil {
				s.victim.mustSay("the log", s.victim.log.String(), "consumers=[reader]")
			}
			s.victim.healthy(c.code)
			if after := s.digest(); after != before[i] {
				t.Error("the stream is not what it was")
			}
		})
	}
}

// TestConfirmedTailMissing: messages that were confirmed are missing at the end, but the sequence did not go back. So it is when somebody
// deleted them, and that must not stop outflow; so it would be if the server lost what was durable, and that must not pass in silence.
func TestConfirmedTailMissing(t *testing.T) {
	slow(t)
	t.Parallel()
	s := startTwins(t, pgtest.Server(t), natstest.Server(t).URL(), "missing")
	const rows = 40
	for n := range rows {
		row(t, s.conn, "doc", n, "{}")
	}
	s.stored(rows)
	s.confirmed(outbox.LSN(messages(t, s.js, s.victim.stream)[rows-1].Outflow.Thru))
	s.crash(part(hole, 0.5), nil)
	row(t, s.conn, "doc", rows, "{}")
	must(t, s.nats.Start())
	s.victim.start()
	awaitMessages(t, s.js, s.victim.stream, rows+1)
	s.victim.mustSay("the log", s.victim.log.String(), "somebody deleted them, or the NATS server lost them", "from=21 to=40")
	awaitMessages(t, s.twinJS, s.twin.stream, rows+1)
	got, want := messages(t, s.js, s.victim.stream), messages(t, s.twinJS, s.twin.stream)
	sameMessages(t, got, append(want[:rows/2:rows/2], want[rows]))
}

// TestRetention: everything in the stream is removed while outflow is away, by somebody or by age. That is no loss: it goes on exactly
// where it was.
func TestRetention(t *testing.T) {
	slow(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	cases := []struct {
		name     string
		settings []string
		empty    func(s *twins)
	}{
		{"purge", nil, func(s *twins) {
			st, err := s.js.Stream(s.t.Context(), s.victim.stream)
			must(s.t, err)
			must(s.t, st.Purge(s.t.Context()))
		}},
		{"purge of all but the newest", nil, func(s *twins) {
			st, err := s.js.Stream(s.t.Context(), s.victim.stream)
			must(s.t, err)
			must(s.t, st.Purge(s.t.Context(), jetstream.WithPurgeKeep(1)))
		}},
		{"age", []string{"INIT_MAX_AGE=2s"}, func(*twins) {}},
		{"age with a horizon of 0", []string{"INIT_MAX_AGE=2s", "REORDER_HORIZON=0s"}, func(*twins) {}},
	}
	const rows, more = 200, 40
	all := make([]*twins, len(cases))
	rest := make([]int, len(cases)) // so many are gone
	atOnce(t, len(cases), func(i int) {
		s := startTwins(t, pg, twinNATS, "gone", cases[i].settings...)
		all[i] = s
		// The twin keeps everything.
		st, err := s.twinJS.Stream(t.Context(), s.twin.stream)
		must(t, err)
		cfg := st.CachedInfo().Config
		cfg.MaxAge = 0
		_, err = s.twinJS.UpdateStream(t.Context(), cfg)
		must(t, err)
		startLoad(t, s.url, traces(t, rows), 4, 0, 3).wait(t)
		awaitMessages(t, s.js, s.victim.stream, rows)
		s.victim.kill()
		cases[i].empty(s)
		rest[i] = rows
		if cases[i].settings != nil {
			eventually(t, "everything is too old", func() error { return s.holds(0) })
		} else if err := s.holds(0); err != nil {
			rest[i] = rows - 1
		}
		mustExec(t, s.conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'later ' || n % 7, 'anna', n, '{}' FROM generate_series(1, $1) n`, more)
		s.victim.start()
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			s.on(t)
			awaitMessages(t, s.js, s.victim.stream, rows+more)
			awaitMessages(t, s.twinJS, s.twin.stream, rows+more)
			want := messages(t, s.twinJS, s.twin.stream)
			got := messages(t, s.js, s.victim.stream)
			if c.settings != nil { // they may be too old before they are all read
				rest[i] = rows + more - len(got)
			}
			sameMessages(t, got, want[rest[i]:])
			if len(got) > 0 && got[0].Seq != want[rest[i]].Seq {
				t.Errorf("the first message left has sequence %d, the twin's %d", got[0].Seq, want[rest[i]].Seq)
			}
			if len(got) < more && c.settings == nil {
				t.Errorf("%d messages", len(got))
			}
			if code := s.victim.term(); code != 0 {
				t.Errorf("stop: exit code %d", code)
			}
		})
	}
}

// holds returns an error unless the stream has n messages.
func (s *twins) holds(n uint64) error {
	st, err := s.js.Stream(s.t.Context(), s.victim.stream)
	if err != nil {
		return err
	}
	if got := st.CachedInfo().State.Msgs; got != n {
		return fmt.Errorf("%d messages", got)
	}
	return nil
}
