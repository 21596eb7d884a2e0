package replay

import (
	"context"
	"fmt"
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

// seam is a stream with an archive of its beginning.
type seam struct {
	t   *testing.T
	js  jetstream.JetStream
	s   jetstream.Stream
	url string
	api *jsapi.Client
}

func header(seq uint64) string {
	lsn := outbox.LSN(1000 * seq)
	h := outbox.Header{Pos: outbox.Position{LSN: lsn}, N: 0, Of: 1, Due: lsn, Thru: lsn,
		ID: fmt.Sprint("id", seq), Key: fmt.Sprint(seq)}
	return string(h.Append(nil))
}

func (w *seam) publish(subject string, ours bool) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must(w.t, err)
	m := &nats.Msg{Subject: subject, Data: []byte("{}"), Header: nats.Header{}}
	if ours {
		m.Header.Set(outbox.HeaderName, header(info.State.LastSeq+1))
	}
	_, err = w.js.PublishMsg(w.t.Context(), m)
	must(w.t, err)
}

// newSeam makes a stream, and an archive that is empty.
func newSeam(t *testing.T) *seam {
	t.Helper()
	nc, js := natstest.Connect(t, natstest.Server(t).URL())
	w := &seam{t: t, js: js, url: "file://" + t.TempDir(), api: jsapi.New(nc, "")}
	var err error
	w.s, err = w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
		Subjects: []string{"outbox.>", "other.>"}, AllowDirect: true})
	must(t, err)
	return w
}

// archive archives the messages up to one, as change makes them.
func (w *seam) archive(to uint64, change ...func(*archive.Message)) {
	w.t.Helper()
	info, err := w.s.Info(w.t.Context())
	must(w.t, err)
	store, err := archive.Open(w.t.Context(), w.url)
	must(w.t, err)
	a, err := archive.Load(w.t.Context(), store, archive.FolderOf("OUTBOX", info.Created), nil)
	must(w.t, err)
	seg, err := a.NewSegment()
	must(w.t, err)
	for seq := a.Next(); seq <= to; seq++ {
		m, err := w.api.Message(w.t.Context(), "OUTBOX", jsapi.MessageRequest{Seq: seq})
		must(w.t, err)
		if m == nil {
			continue
		}
		msg := &archive.Message{Seq: seq, Time: m.Time, Subject: m.Subject, Data: m.Data}
		if len(m.Header) > 0 {
			msg.Header, err = nats.DecodeHeadersMsg(m.Header)
			must(w.t, err)
		}
		for _, f := range change {
			f(msg)
		}
		must(w.t, seg.Add(msg))
	}
	_, err = a.Append(w.t.Context(), seg, 0)
	must(w.t, err)
}

func (w *seam) source(sel *Selection) *streamSource {
	w.t.Helper()
	l := &extractor{}
	var err error
	l.template, err = outbox.ParseSubjectTemplate("outbox.{doc}")
	must(w.t, err)
	m := &matcher{sel: sel, extractor: l, filters: l.filters(sel, nil)}
	src := &streamSource{js: w.js, api: w.api, name: "OUTBOX", match: m, extractor: l}
	must(w.t, src.open(w.t.Context()))
	return src
}

// open is a source with its archive.
func (w *seam) open(sel *Selection) *streamSource {
	w.t.Helper()
	src := w.source(sel)
	must(w.t, src.openPast(w.t.Context(), w.api, w.url))
	if src.past == nil {
		w.t.Fatal("no past")
	}
	return src
}

// TestRetentionPassesTheArchiveWhileItIsRead: messages that go while the archive is read are not left out
// without a word.
func TestRetentionPassesTheArchiveWhileItIsRead(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	w.archive(40)
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(21)))
	src := w.open(&Selection{})
	sum := &Summary{}
	err := src.summarize(t.Context(), 0, sum, func(m *Message) error {
		if m.Seq == 30 { // retention goes on while the archive is read
			must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(51)))
		}
		return nil
	})
	if f := outbox.FaultOf(err); f == nil || f.Code != "replay_removed" {
		t.Errorf("%d of 60 events: %v", sum.Events, err)
	}
}

// TestRetentionGoesOnBehindAReplay: what it takes from the stream after it was replayed is not missed.
func TestRetentionGoesOnBehindAReplay(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	w.archive(40)
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(21)))
	src, sum, n := w.open(&Selection{}), &Summary{}, 0
	must(t, src.summarize(t.Context(), 0, sum, nil))
	must(t, src.each(t.Context(), 0, sum, func(m *Message) error {
		if n++; m.Seq < 60 {
			return nil
		}
		return w.s.Purge(t.Context(), jetstream.WithPurgeSequence(51))
	}))
	if n != 60 {
		t.Errorf("%d of 60 events", n)
	}
}

// TestRetentionPassesAReplayThatGoesOn: what goes before its next event is read is not left out without a
// word, whether an archive has it or not. What it has published is not missed.
func TestRetentionPassesAReplayThatGoesOn(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	w.archive(40)
	purged := uint64(10)
	for _, archived := range []bool{false, true} {
		for _, c := range []struct {
			behind uint64 // what is purged before the first one that is left
			code   string
		}{{0, "replay_removed"}, {1, ""}} {
			must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(purged)))
			sel := &Selection{}
			src := w.source(sel)
			if archived {
				src = w.open(sel)
			}
			r := &replay{stream: src, o: Options{DryRun: true, Selection: *sel},
				resume: &resumePoint{from: FromStream, seq: purged + 4 + c.behind}}
			chosen, err := r.choose(t.Context())
			must(t, err)
			purged += 6
			must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(purged)))
			rep, err := r.execute(t.Context(), chosen)
			code := ""
			if f := outbox.FaultOf(err); f != nil {
				code = f.Code
			}
			if code != c.code || (err == nil) != (c.code == "") {
				t.Errorf("archived %v, resumed behind %d, below %d purged: %+v: %v", archived,
					r.resume.seq, purged, rep, err)
			}
		}
	}
}

// TestAReplayThatGoesOnMissesTheStreamsEnd: the broker lost it, and it has not come again. Where all that is
// selected was read, nothing is missing.
func TestAReplayThatGoesOnMissesTheStreamsEnd(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 50 {
		w.publish("outbox.a", true)
	}
	forty := uint64(40)
	for _, c := range []struct {
		seq, end uint64
		sel      Selection
		code     string
	}{
		{30, 60, Selection{}, "replay_removed"},
		{60, 60, Selection{}, ""},
		{30, 50, Selection{}, ""},
		{30, 60, Selection{Seq: Range[uint64]{To: &forty}}, ""},
	} {
		r := &replay{stream: w.source(&c.sel), o: Options{DryRun: true, Selection: c.sel},
			resume: &resumePoint{from: FromStream, seq: c.seq, end: c.end}}
		_, err := r.choose(t.Context())
		code := ""
		if f := outbox.FaultOf(err); f != nil {
			code = f.Code
		}
		if code != c.code || (err == nil) != (c.code == "") {
			t.Errorf("behind %d, to %d: %v", c.seq, c.end, err)
		}
	}
}

// TestAReplayThatGoesOnMissesWhatComesAgainBehindItsEnd: the broker lost the stream's end, and kept its last
// sequence, whether that is archived by now or not. What somebody deleted there does not come again, and is
// not missed.
func TestAReplayThatGoesOnMissesWhatComesAgainBehindItsEnd(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	gone := func(from, to uint64) {
		for seq := from; seq <= to; seq++ {
			must(t, w.s.DeleteMsg(t.Context(), seq))
		}
	}
	source := w.source
	missed := func(seq, end uint64, words string) {
		t.Helper()
		r := &replay{stream: source(&Selection{}),
			resume: &resumePoint{from: FromStream, seq: seq, end: end}}
		_, err := r.choose(t.Context())
		f := outbox.FaultOf(err)
		if words == "" && err != nil || words != "" && (f == nil || f.Code != "replay_removed" ||
			!strings.Contains(f.Message, words)) {
			t.Errorf("behind %d, to %d: %v", seq, end, err)
		}
	}
	gone(51, 60)
	missed(30, 60, "has yet to come again")
	_, err := w.js.PublishMsg(t.Context(), &nats.Msg{Subject: "outbox.a", Data: []byte("{}"),
		Header: nats.Header{outbox.HeaderName: {header(51)}, outbox.HeaderLost: {"51"}}})
	must(t, err)
	missed(30, 60, "comes again from sequence 61 on")
	missed(30, 50, "")
	missed(30, 61, "")
	w.publish("outbox.a", true)
	w.publish("outbox.a", true)
	gone(62, 62)
	missed(61, 62, "")
	w.archive(63)
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(63)))
	source = w.open
	missed(30, 60, "comes again from sequence 61 on")
	missed(30, 50, "")
	missed(61, 62, "")
}

// TestFewMessagesAreReadFromTheLeader: a replica that lags does not have them yet, and nobody removed them.
func TestFewMessagesAreReadFromTheLeader(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	w.publish("outbox.a", true)
	for range 58 {
		w.publish("outbox.b", true)
	}
	w.publish("outbox.a", true)
	src, sum, n := w.source(&Selection{Filter: "outbox.a"}), &Summary{}, 0
	must(t, src.summarize(t.Context(), 0, sum, nil))
	src.stream = behind{src.stream}
	must(t, src.each(t.Context(), 0, sum, func(m *Message) error {
		if n++; string(m.Data) != "{}" || m.Header.Get(outbox.HeaderName) != header(m.Seq) {
			t.Errorf("%+v", m)
		}
		return nil
	}))
	if n != 2 {
		t.Errorf("%d of 2 events", n)
	}
}

// behind is a stream whose messages a replica is asked for that has none yet.
type behind struct{ jetstream.Stream }

func (behind) GetMsg(context.Context, uint64, ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	return nil, jetstream.ErrMsgNotFound
}

// TestRetentionPassesTheStreamBeforeItIsRead: messages that go after it was looked whether all are there are
// not left out without a word.
func TestRetentionPassesTheStreamBeforeItIsRead(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	purged, twenty := uint64(2), uint64(20) // below 11 at first, then below 20
	for _, c := range []struct {
		sel  Selection
		code string
	}{
		{Selection{}, "replay_removed"},
		{Selection{Seq: Range[uint64]{From: &twenty}}, ""}, // what goes lies before it
	} {
		r := &replay{stream: w.source(&c.sel), o: Options{DryRun: true, Selection: c.sel}}
		chosen, err := r.choose(t.Context())
		if !chosen.whole {
			t.Fatal(chosen, err)
		}
		purged += 9
		must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(purged)))
		rep, err := r.execute(t.Context(), chosen)
		code := ""
		if f := outbox.FaultOf(err); f != nil {
			code = f.Code
		}
		if code != c.code || (err == nil) != (c.code == "") {
			t.Errorf("%+v: %v", rep, err)
		}
	}
}

// TestAnArchiveOfOtherMessagesIsRefused: the broker lost what was archived, and others came in its place.
func TestAnArchiveOfOtherMessagesIsRefused(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 40 {
		w.publish("outbox.a", true)
	}
	w.archive(40, func(m *archive.Message) { m.Data = []byte("lost") })
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(21)))
	err := w.source(&Selection{}).openPast(t.Context(), w.api, w.url)
	if f := outbox.FaultOf(err); f == nil || f.Code != archive.CodeDiffers {
		t.Errorf("%v", err)
	}
}

// TestAnArchivedMessageThatNoFilterSelectsIsPassedOver: as the stream's own consumer passes it over.
func TestAnArchivedMessageThatNoFilterSelectsIsPassedOver(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	w.publish("outbox.a", true)
	w.publish("other.x", false) // somebody else's
	for range 58 {
		w.publish("outbox.a", true)
	}
	w.archive(40)
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(21)))
	sum := &Summary{}
	must(t, w.open(&Selection{Filter: "outbox.a"}).summarize(t.Context(), 0, sum, nil))
	if sum.Events != 59 {
		t.Errorf("%d of 59 events", sum.Events)
	}
}

// TestAReplayReadsAllThatTheLeaderHas: a consumer may be on a replica that lags, and behind each message that
// it brings it has no more yet. The newest messages are of other subjects, or were stored before the time
// from which the replay is.
func TestAReplayReadsAllThatTheLeaderHas(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 10 {
		w.publish("outbox.a", true)
	}
	w.publish("other.x", false)
	replica, err := w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "BEHIND",
		Subjects: []string{"behind.>"}, SubjectTransform: &jetstream.SubjectTransformConfig{
			Source: "behind.>", Destination: "outbox.>"}})
	must(t, err)
	n := uint64(0)
	more := func() {
		if n++; n > 10 {
			return
		}
		_, err := w.js.PublishMsg(t.Context(), &nats.Msg{Subject: "behind.a", Data: []byte("{}"),
			Header: nats.Header{outbox.HeaderName: {header(n)}}})
		must(t, err)
	}
	more()
	src := w.source(&Selection{Filter: "outbox.a"})
	lags := natstest.Lagging{JetStream: w.js, Behind: "BEHIND", More: more}
	src.js = lags
	sum := &Summary{}
	must(t, src.summarize(t.Context(), 0, sum, nil))
	if sum.Events != 10 {
		t.Errorf("%d of 10 events", sum.Events)
	}
	must(t, replica.Purge(t.Context()))
	later := time.Now().Add(time.Hour)
	src = w.source(&Selection{Time: Range[time.Time]{From: &later}})
	src.js, src.firstAt, sum = lags, time.Time{}, &Summary{}
	must(t, src.summarize(t.Context(), 0, sum, nil))
	if sum.Events != 0 {
		t.Errorf("%d events of the future", sum.Events)
	}
}

// TestWhatWasErasedBetweenArchiveAndStreamIsNotMissed: the archive ends before it, and the stream begins
// behind it.
func TestWhatWasErasedBetweenArchiveAndStreamIsNotMissed(t *testing.T) {
	t.Parallel()
	w := newSeam(t)
	for range 60 {
		w.publish("outbox.a", true)
	}
	w.archive(40)
	cfg := w.s.CachedInfo().Config
	cfg.Metadata = map[string]string{outbox.MetadataErased: "41+1"}
	_, err := w.js.UpdateStream(t.Context(), cfg)
	must(t, err)
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(43)))
	sum := &Summary{}
	must(t, w.open(&Selection{}).summarize(t.Context(), 0, sum, nil))
	if sum.Events != 58 {
		t.Errorf("%d of 58 events", sum.Events)
	}
	must(t, w.s.Purge(t.Context(), jetstream.WithPurgeSequence(44))) // and one that was not
	src := w.source(&Selection{})
	must(t, src.openPast(t.Context(), w.api, w.url))
	if src.past != nil {
		t.Error("a message between archive and stream is not missed")
	}
}
