package crash

import (
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestATailLostWhileNATSRestartsEndsTheSession: NATS comes back, and lacks the end of the stream, or of the
// record. The session does not go on: that is for an ordinary start to judge, with its recheck.
func TestATailLostWhileNATSRestartsEndsTheSession(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	pg, twinNATS := pgtest.Server(t), natstest.Server(t).URL()
	const ops = 600
	cases := harness.Part(2, []tail{
		{name: "stream back", stream: part(back, 0.4)},
		{name: "stream hole", stream: part(hole, 0.4)},
		{name: "bucket back", bucket: harness.LoseNewest(back, 2)},
		{name: "both back", stream: part(back, 0.5), bucket: harness.LoseNewest(back, 2)},
	})
	all, loads := make([]*harness.Twins, len(cases)), make([]*harness.Load, len(cases))
	harness.AtOnce(t, len(cases), func(i int) {
		c := &cases[i]
		s := startTwins(t, pg, twinNATS, "restart", "SINK_DURABLE_AFTER=80s")
		all[i], loads[i] = s, harness.StartLoad(t, s.URL, harness.RecordedOps(t, ops), 4, 75, 3)
		s.AwaitStored(ops / 2)
		recorded(s, 4)
		shown(s, c)
		harness.Must(t, s.NATS.Stop())
		harness.Must(t, s.Instance.Process.Resume())
		c.stream.Tear(t, s.NATS.Dir(), s.Instance.Stream)
		c.bucket.Tear(t, s.NATS.Dir(), "KV_"+checkpoint.Bucket(s.Instance.Stream))
		harness.Must(t, s.NATS.Start())
	})
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := all[i]
			on(s, t)
			loads[i].Wait(t)
			s.MustBeEqual(ops)
			if n := s.Instance.Life().Sessions; n < 2 {
				t.Errorf("%v sessions", n)
			}
			if c.shows() {
				s.Instance.MustContain("the log", s.Instance.Log.String(), "a loss was read",
					"published again")
			}
			s.Instance.MustStop(t)
		})
	}
}
