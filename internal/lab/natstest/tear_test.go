package natstest

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// after keeps the messages up to a sequence.
func after(last uint64) func(uint64, time.Time) bool {
	return func(seq uint64, _ time.Time) bool { return seq <= last }
}

// TestATornStreamEndsAtTheCut: what the server makes of a torn stream, whether the cut is at a message (a
// first lost sequence that 3 divides), in the middle of one, or followed by zeros.
func TestATornStreamEndsAtTheCut(t *testing.T) {
	t.Parallel()
	const stored = 1000
	for _, form := range []natsserver.Form{natsserver.Back, natsserver.Hole} {
		for _, keep := range []uint64{0, 700, 701, 998, stored} {
			t.Run(fmt.Sprintf("%v after %d", form, keep), func(t *testing.T) {
				t.Parallel()
				p := Process(t)
				js := connect(t, p.URL())
				_, err := js.CreateStream(t.Context(),
					jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
				must.Succeed(t, err)
				publish(t, js, stored)
				must.Succeed(t, p.Kill())
				torn, err := natsserver.Tear(p.Dir(), "S", form, after(keep))
				must.Succeed(t, err)
				want := natsserver.Torn{First: keep + 1, Last: stored, Messages: stored - int(keep)}
				if keep == stored {
					want.First = 0
				}
				if torn != want {
					t.Errorf("torn %+v, want %+v", torn, want)
				}
				must.Succeed(t, p.Start())
				js = connect(t, p.URL())
				last := keep
				if form == natsserver.Hole {
					last = stored
				}
				s := info(t, js).State
				if s.LastSeq != last || s.Msgs != keep || s.NumDeleted != int(last-keep) && keep > 0 ||
					s.Lost != nil {
					t.Errorf("after the restart: last sequence %d, %d messages, %d deleted, lost %v; want "+
						"%d, %d, %d",
						s.LastSeq, s.Msgs, s.NumDeleted, s.Lost, last, keep, last-keep)
				}
				ack, err := js.Publish(t.Context(), "s.next", nil)
				if err != nil || ack.Sequence != last+1 {
					t.Errorf("the next message: %+v, %v; want sequence %d", ack, err, last+1)
				}
			})
		}
	}
}

// TestAStreamOfSeveralFilesIsTorn tears a stream of several files, by time.
func TestAStreamOfSeveralFilesIsTorn(t *testing.T) {
	t.Parallel()
	p := Process(t)
	js := connect(t, p.URL())
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"},
		MaxBytes: 120 << 10})
	must.Succeed(t, err)
	publish(t, js, 2000)
	st, err := js.Stream(t.Context(), "S")
	must.Succeed(t, err)
	kept, err := st.GetMsg(t.Context(), 1000)
	must.Succeed(t, err)
	must.Succeed(t, p.Kill())
	blocks := func() int {
		paths, _ := filepath.Glob(filepath.Join(p.Dir(), "jetstream", "*", "streams", "S", "msgs", "*.blk"))
		return len(paths)
	}
	before := blocks()
	torn, err := natsserver.Tear(p.Dir(), "S", natsserver.Back, func(_ uint64, stored time.Time) bool {
		return !stored.After(kept.Time)
	})
	if err != nil || torn.First != 1001 || torn.Last != 2000 || torn.Messages != 1000 || blocks() >= before {
		t.Errorf("torn %v, %v; %d of %d files are left", torn, err, blocks(), before)
	}
	must.Succeed(t, p.Start())
	if s := info(t, connect(t, p.URL())).State; s.LastSeq != 1000 {
		t.Errorf("after the restart: last sequence %d, want 1000", s.LastSeq)
	}
}

// TestATornBucketLosesItsNewestRevisions: of a bucket the newest revisions go, and an older one is the value.
func TestATornBucketLosesItsNewestRevisions(t *testing.T) {
	t.Parallel()
	p := Process(t)
	kv, err := connect(t, p.URL()).CreateKeyValue(t.Context(),
		jetstream.KeyValueConfig{Bucket: "B", History: 8})
	must.Succeed(t, err)
	for i := range 100 {
		if _, err := kv.Put(t.Context(), "key", fmt.Append(nil, i+1)); err != nil {
			t.Fatal(err)
		}
	}
	must.Succeed(t, p.Kill())
	if _, err := natsserver.Tear(p.Dir(), "KV_B", natsserver.Back, after(96)); err != nil {
		t.Fatal(err)
	}
	must.Succeed(t, p.Start())
	if kv, err = connect(t, p.URL()).KeyValue(t.Context(), "B"); err != nil {
		t.Fatal(err)
	}
	if e, err := kv.Get(t.Context(), "key"); err != nil || string(e.Value()) != "96" {
		t.Errorf("the value is %v, %v; want 96", e, err)
	}
}

func TestTearSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	if _, err := natsserver.Tear(t.TempDir(), "S", natsserver.Back, after(1)); err == nil {
		t.Error("a stream that is not there was torn")
	}
}

func publish(t *testing.T, js jetstream.JetStream, n int) {
	t.Helper()
	for i := range n {
		if _, err := js.PublishAsync(fmt.Sprintf("s.%d", i%10),
			fmt.Appendf(nil, "message %d", i)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(3 * time.Minute):
		t.Fatal("not all was acknowledged")
	}
}

func info(t *testing.T, js jetstream.JetStream) *jetstream.StreamInfo {
	t.Helper()
	s, err := js.Stream(t.Context(), "S")
	must.Succeed(t, err)
	i, err := s.Info(t.Context())
	must.Succeed(t, err)
	return i
}
