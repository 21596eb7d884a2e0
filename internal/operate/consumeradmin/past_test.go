package consumeradmin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// archived writes the stream's messages up to one to an archive, and lets retention take those up to another.
func (w *world) archived(to, removed uint64) {
	w.t.Helper()
	w.Archive = "file://" + w.t.TempDir()
	store, err := archive.Open(w.t.Context(), w.Archive)
	must(w.t, err)
	defer store.Close() //nolint:errcheck // a test
	a, err := archive.Load(w.t.Context(), store, archive.FolderOf("OUTBOX", w.live.CachedInfo().Created), nil)
	must(w.t, err)
	for a.Next() <= to { // two segments
		s, err := a.NewSegment()
		must(w.t, err)
		for seq, end := a.Next(), min(to, a.Next()+6); seq <= end; seq++ {
			m, err := w.API.Message(w.t.Context(), "OUTBOX", jsapi.MessageRequest{Seq: seq})
			must(w.t, err)
			if m == nil {
				continue
			}
			h, err := nats.DecodeHeadersMsg(m.Header)
			must(w.t, err)
			must(w.t, s.Add(&archive.Message{Seq: seq, Time: m.Time, Subject: m.Subject, Header: h,
				Data: m.Data}))
		}
		_, err = a.Append(w.t.Context(), s, 0)
		must(w.t, err)
	}
	must(w.t, w.live.Purge(w.t.Context(), jetstream.WithPurgeSequence(removed+1)))
}

var errPlanned = errors.New("planned")

// planned is what a rewind to a place would do.
func (w *world) planned(to string) (*Plan, error) {
	w.past = nil
	var plan *Plan
	err := w.Rewind(w.t.Context(), Rewind{Name: "texts", To: to, Confirm: func(p *Plan) error {
		plan = p
		return errPlanned
	}})
	if errors.Is(err, errPlanned) {
		err = nil
	}
	return plan, err
}

// TestARewindGoesBackToWhatIsArchived: by each kind of place, and says what comes from where.
func TestARewindGoesBackToWhatIsArchived(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stored, err := w.API.Message(t.Context(), "OUTBOX", jsapi.MessageRequest{Seq: 4})
	must(t, err)
	must(t, w.live.DeleteMsg(t.Context(), 5))
	w.archived(12, 10)
	w.park("d1", 9)  // in the archive alone
	w.park("d2", 5)  // nowhere: the only copy
	w.park("d3", 19) // in the stream
	for to, want := range map[string]struct{ to, again, archived, first uint64 }{
		"start":            {0, 17, 9, 1},
		"seq:4":            {3, 14, 6, 4},
		"seq:5":            {4, 13, 5, 6},
		"seq:11":           {10, 8, 0, 11},
		"seq:13":           {12, 6, 0, 13},
		"position:0/40-0":  {3, 14, 6, 4},
		"position:0/50-0":  {5, 13, 5, 6},
		"position:0/A0-0":  {9, 9, 1, 10},
		"position:0/B0-0":  {10, 8, 0, 11},
		"position:0/100-0": {15, 3, 0, 16},
		"time:" + stored.Time.UTC().Format(time.RFC3339Nano): {3, 14, 6, 4},
		"time:1h": {0, 17, 9, 1},
	} {
		p, err := w.planned(to)
		if err != nil {
			t.Errorf("%s: %v", to, err)
			continue
		}
		if p.To != want.to || p.Again != want.again || p.Archived != want.archived || p.First != want.first {
			t.Errorf("%s: %+v, want %+v", to, p, want)
		}
		if says := "in the archive alone: the consumer needs Config.Archive"; strings.Contains(
			fmt.Sprint(p.Lines()), says) != (want.archived > 0) {
			t.Errorf("%s: %q", to, p.Lines())
		}
	}
	w.exec(`UPDATE outflow_consumer SET filters = '{outbox.d2}'`) // sequences 3, 8, 13, 18
	if p, err := w.planned("start"); err != nil || p.First != 3 || p.Exact {
		t.Errorf("with a filter: %+v, %v", p, err)
	}
	w.exec(`UPDATE outflow_consumer SET filters = '{outbox.none}'`)
	p, err := w.planned("start")
	if err != nil || !slices.Contains(p.Lines(), "again    no event of its filter") {
		t.Errorf("with a filter that lets none through: %+v, %v", p, err)
	}
	w.exec(`UPDATE outflow_consumer SET filters = '{>}'`)

	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:5",
		Confirm: func(*Plan) error { return nil }}))
	if got := w.text(`SELECT seq || '@' || lsn FROM outflow_mark WHERE source = 'live' ORDER BY partition`); got !=
		"4@0/40 4@0/40 4@0/40 4@0/40" {
		t.Errorf("marks %s", got)
	}
	if got := w.text(`SELECT seq::text FROM outflow_parked`); got != "5" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindNeedsAnArchiveThatReachesTheStream: otherwise it is refused, with the way out, as it is for a
// durable, which knows of no archive, and where the archive is that of another stream.
func TestARewindNeedsAnArchiveThatReachesTheStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain"})
	must(t, err)
	w.archived(8, 10)
	_, err = w.planned("start")
	wantFault(t, err, "rewind_removed", "begins at sequence 11", "Config.Archive", "--to seq:11")
	w.Archive = "file://" + t.TempDir() // of another stream, or none
	_, err = w.planned("position:0/40-0")
	wantFault(t, err, "rewind_removed", "Config.Archive")
	w.Archive = ""
	_, err = w.planned("start")
	wantFault(t, err, "rewind_removed", "archive.url")

	w = newWorld(t)
	plain, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain"})
	must(t, err)
	batch, err := plain.Fetch(20)
	must(t, err)
	for m := range batch.Messages() {
		must(t, m.DoubleAck(t.Context()))
	}
	w.archived(12, 10)
	wantFault(t, w.Rewind(t.Context(), Rewind{Name: "plain", To: "start"}), "rewind_removed")
}

// TestARewindGoesBackBehindWhatWasErased: the archive ends before that, and the stream begins behind it.
func TestARewindGoesBackBehindWhatWasErased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.archived(8, 10)
	erase := func(sequences string) {
		cfg := w.live.CachedInfo().Config
		cfg.Metadata = map[string]string{outbox.MetadataErased: sequences}
		_, err := w.JS.UpdateStream(t.Context(), cfg)
		must(t, err)
	}
	erase("9")
	_, err := w.planned("start")
	wantFault(t, err, "rewind_removed")
	erase("9+1")
	if p, err := w.planned("start"); err != nil || p.To != 0 || p.Archived != 8 {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestARewindFindsItsPlaceOnAReplicaThatLags: not an earlier one.
func TestARewindFindsItsPlaceOnAReplicaThatLags(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := w.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "BEHIND",
		Subjects: []string{"behind"}})
	must(t, err)
	js, n := w.JS, 0
	more := func() {
		if n++; n <= 20 {
			w.publish(js, "behind", n)
		}
	}
	more()
	w.JS = natstest.Lagging{JetStream: js, Behind: "BEHIND", More: more}
	p, err := w.planned("position:0/A0-0")
	must(t, err)
	if p.To != 9 {
		t.Errorf("back to %d, want 9", p.To)
	}
	n = 20 // nothing comes any more
	_, err = w.planned("time:" + time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	wantFault(t, err, "rewind_ahead")
}
