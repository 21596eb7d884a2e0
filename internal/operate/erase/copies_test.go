package erase

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// copied is an account with a stream OUTBOX, and an erasure of its document.
type copied struct {
	*command
	t  *testing.T
	js jetstream.JetStream
}

// connected returns a connection to a server of its own.
func connected(t *testing.T) (*sink.Conn, jetstream.JetStream) {
	t.Helper()
	conn, err := sink.Connect(t.Context(), sink.Config{URL: natstest.Server(t).URL(), Table: "public.outbox",
		Stream: "OUTBOX"})
	must.Succeed(t, err)
	t.Cleanup(conn.Close)
	js, err := conn.API().JetStream()
	must.Succeed(t, err)
	return conn, js
}

func newCopied(t *testing.T) *copied {
	t.Helper()
	conn, js := connected(t)
	cfg := config.Config{Stream: "OUTBOX", Subject: "outbox.{doc_id}"}
	doc, err := erasure.NewDocument(cfg, config.Resolved{Uses: map[string]config.Use{
		"doc_id": {Role: config.InDoc}}}, "gone")
	must.Succeed(t, err)
	c := &copied{t: t, js: js, command: &command{log: slog.New(slog.DiscardHandler), cfg: cfg, doc: doc,
		stays: map[string][]uint64{}, untold: map[string]uint64{}, rep: &Report{},
		l: &backfill.Conns{Conns: &conns.Conns{NATS: conn}}}}
	c.add(jetstream.StreamConfig{Name: "KV_outflow-OUTBOX"})
	c.make()
	c.rec = &erasure.Record{Created: micro(c.rd.Stream.Created), Cut: 0x1000, CutSeq: 3}
	return c
}

// make makes the stream.
func (c *copied) make() {
	c.t.Helper()
	c.add(jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"_outflow.1.>"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "_outflow.*.>", Destination: ">"}})
	st, err := c.l.NATS.State(c.t.Context())
	must.Succeed(c.t, err)
	c.rd.Stream = st
}

func (c *copied) add(config jetstream.StreamConfig) {
	c.t.Helper()
	_, err := c.js.CreateStream(c.t.Context(), config)
	must.Succeed(c.t, err)
}

// publish publishes an event with a position.
func (c *copied) publish(ingress, doc string, lsn outbox.LSN) {
	c.t.Helper()
	head := outbox.Header{Pos: outbox.Position{LSN: lsn}, ID: doc}
	_, err := c.js.PublishMsg(c.t.Context(), &nats.Msg{Subject: ingress + "outbox." + doc,
		Header: nats.Header{outbox.HeaderName: {head.String()}}})
	must.Succeed(c.t, err)
}

// has waits until a copy has so many messages.
func (c *copied) has(name string, n uint64) {
	c.t.Helper()
	await.Until(c.t, fmt.Sprintf("%s has %d messages", name, n), func() error {
		s, err := c.js.Stream(c.t.Context(), name)
		if err == nil && s.CachedInfo().State.Msgs != n {
			err = fmt.Errorf("it has %d", s.CachedInfo().State.Msgs)
		}
		return err
	})
}

// messagesThatGo is which messages go from a copy.
func (c *copied) messagesThatGo(name string) (all []uint64) {
	c.t.Helper()
	found, _, err := c.inCopy(c.t.Context(), name)
	must.Succeed(c.t, err)
	for _, f := range found {
		all = append(all, f.seq)
	}
	return all
}

func sourced(names ...string) (all []*jetstream.StreamSource) {
	for _, n := range names {
		all = append(all, &jetstream.StreamSource{Name: n})
	}
	return all
}

// TestACopyIsErasedUpToTheCut, also of what was written by an earlier database cluster, whose positions lie
// behind it: sequences tell, wherever a message has those of the stream. Where it has not it is named.
func TestACopyIsErasedUpToTheCut(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	const ingress = "_outflow.1."
	c.publish(ingress, "gone", 0x9000) // 1: of the earlier cluster
	c.publish(ingress, "other", 0x9001)
	c.publish(ingress, "gone", 0x100)
	c.publish(ingress, "gone", 0x1100) // 4: behind the cut
	c.add(jetstream.StreamConfig{Name: "ANOTHER", Subjects: []string{"another.>"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "another.>", Destination: ">"}})
	c.publish("another.", "gone", 0x200)
	c.add(jetstream.StreamConfig{Name: "LIVE", Subjects: []string{"_outflow.2.>"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "_outflow.*.>", Destination: ">"}})
	c.add(jetstream.StreamConfig{Name: "KV_outflow-LIVE"})
	c.publish("_outflow.2.", "gone", 0x300)

	c.add(jetstream.StreamConfig{Name: "M_MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("M_MIRROR", 4)
	c.add(jetstream.StreamConfig{Name: "KV_MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("KV_MIRROR", 4)
	c.add(jetstream.StreamConfig{Name: "L_AGGREGATE", Sources: sourced("M_MIRROR")})
	c.has("L_AGGREGATE", 4)
	c.add(jetstream.StreamConfig{Name: "K_FURTHER", Sources: sourced("L_AGGREGATE")})
	c.has("K_FURTHER", 4)
	c.add(jetstream.StreamConfig{Name: "B_MIXED", Sources: sourced("LIVE")})
	c.has("B_MIXED", 1)
	_, err := c.js.UpdateStream(t.Context(), jetstream.StreamConfig{Name: "B_MIXED",
		Sources: sourced("LIVE", "OUTBOX")})
	must.Succeed(t, err)
	c.has("B_MIXED", 5)
	renames := sourced("OUTBOX")
	renames[0].SubjectTransforms = []jetstream.SubjectTransformConfig{{Source: "outbox.>",
		Destination: "renamed.>"}}
	c.add(jetstream.StreamConfig{Name: "C_RENAMED", Sources: renames})
	c.has("C_RENAMED", 4)
	restored := archive.FolderOf("OUTBOX", c.rd.Stream.Created)
	c.add(jetstream.StreamConfig{Name: "A_RESTORED", Subjects: []string{"_outflow.3.>"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "_outflow.*.>", Destination: ">"},
		Metadata:         map[string]string{stream.MetadataRestored: restored}})
	c.publish("_outflow.3.", "gone", 0x9000)
	c.publish("_outflow.3.", "other", 0x9001)
	c.publish("_outflow.3.", "gone", 0x100)
	c.publish("_outflow.3.", "gone", 0x1100)
	c.add(jetstream.StreamConfig{Name: "IN_USE", Subjects: []string{"_outflow.4.>"},
		Metadata: map[string]string{stream.MetadataRestored: restored}})
	c.add(jetstream.StreamConfig{Name: "KV_outflow-IN_USE"})

	c.add(jetstream.StreamConfig{Name: "HALF", Metadata: map[string]string{
		stream.MetadataRestoring: restored}})

	must.Succeed(t, c.copies(t.Context()))
	c.restoring()
	if got := fmt.Sprint(c.rep.Waiting); got != "[stream HALF is being restored from the archive]" {
		t.Errorf("waiting for %s", got)
	}
	var names []string
	for _, k := range c.rep.Copies {
		names = append(names, k.Stream)
	}
	if got := strings.Join(names, " "); got != "A_RESTORED B_MIXED C_RENAMED KV_MIRROR M_MIRROR "+
		"L_AGGREGATE K_FURTHER" {
		t.Errorf("copies in this order: %s", got)
	}
	for name, want := range map[string][]uint64{"A_RESTORED": {1, 3}, "M_MIRROR": {1, 3}, "B_MIXED": {2, 4},
		"C_RENAMED": {1, 3}, "KV_MIRROR": {1, 3},
		"L_AGGREGATE": {1, 3}, "K_FURTHER": {3}} {
		if got := c.messagesThatGo(name); !slices.Equal(got, want) {
			t.Errorf("from %s go %v, want %v", name, got, want)
		}
	}
	c.limits()
	said := strings.Join(c.rep.NotReached, "\n")
	for _, want := range []string{"2 messages of the document in stream K_FURTHER, from 1 on",
		"stream ANOTHER of the account", "stream IN_USE, which was restored"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not said: %s", want, said)
		}
	}
	for _, never := range []string{"M_MIRROR", "B_MIXED", "LIVE", "OUTBOX"} {
		if strings.Contains(said, never) {
			t.Errorf("%s is named: %s", never, said)
		}
	}
}

// TestWhatACopyHasOfAnEarlierStreamGoes: the stream was deleted and made anew, and its copies have kept what
// they had of the former one, under sequences that lie behind the cut.
func TestWhatACopyHasOfAnEarlierStreamGoes(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	const ingress = "_outflow.1."
	for range 4 {
		c.publish(ingress, "other", 0x9000)
	}
	c.publish(ingress, "gone", 0x9000)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 5)
	c.add(jetstream.StreamConfig{Name: "AGGREGATE", Sources: sourced("OUTBOX")})
	c.has("AGGREGATE", 5)
	must.Succeed(t, c.js.DeleteStream(t.Context(), "OUTBOX"))
	c.make()
	c.rec.Created = micro(c.rd.Stream.Created)
	must.Succeed(t, c.copies(t.Context()))
	for _, name := range []string{"MIRROR", "AGGREGATE"} {
		if got := c.messagesThatGo(name); !slices.Equal(got, []uint64{5}) {
			t.Errorf("from %s go %v", name, got)
		}
	}
}

// TestAStreamThatIsMadeAnewByAClockThatWentBackIsNoEarlierOne: what was written after the erasure stays.
func TestAStreamThatIsMadeAnewByAClockThatWentBackIsNoEarlierOne(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.rec.Created = c.rec.Created.Add(time.Hour)
	c.publish("_outflow.1.", "gone", 0x100)
	c.publish("_outflow.1.", "gone", 0x1100)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 2)
	must.Succeed(t, c.copies(t.Context()))
	if got := c.messagesThatGo("MIRROR"); !slices.Equal(got, []uint64{1}) {
		t.Errorf("from the mirror go %v", got)
	}
}

// TestWhatWasStoredByAClockThatWentBackIsOfNoEarlierStream: the stream was made before that, so its messages
// are older than it is. What was written after the erasure stays, and is named: it may be of an earlier one.
func TestWhatWasStoredByAClockThatWentBackIsOfNoEarlierStream(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	const ingress = "_outflow.1."
	c.publish(ingress, "gone", 0x9000) // 1: of an earlier cluster
	c.publish(ingress, "gone", 0x100)
	c.publish(ingress, "other", 0x101)
	c.publish(ingress, "gone", 0x1100) // 4: behind the cut
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 4)
	c.add(jetstream.StreamConfig{Name: "AGGREGATE", Sources: sourced("OUTBOX")})
	c.has("AGGREGATE", 4)
	st, err := c.l.NATS.State(t.Context())
	must.Succeed(t, err)
	st.Created = st.Created.Add(time.Hour)
	c.rd.Stream, c.rec.Created = st, micro(st.Created)
	must.Succeed(t, c.copies(t.Context()))
	for _, name := range []string{"MIRROR", "AGGREGATE"} {
		if got := c.messagesThatGo(name); !slices.Equal(got, []uint64{1, 2}) ||
			!slices.Equal(c.stays[name], []uint64{4}) {
			t.Errorf("from %s go %v, and %v stay", name, got, c.stays[name])
		}
	}
}

// TestWhatWasStoredWhileTheClockWasBackIsOfNoEarlierStream: by now the clock is right again, and the stream's
// newest message is younger than the stream. Others are older.
func TestWhatWasStoredWhileTheClockWasBackIsOfNoEarlierStream(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	for _, lsn := range []outbox.LSN{0x100, 0x101, 0x102, 0x1100} { // the last one is behind the cut
		c.publish("_outflow.1.", "gone", lsn)
	}
	st, err := c.l.NATS.State(t.Context())
	must.Succeed(t, err)
	made := st.LastTime.Add(2 * time.Microsecond)
	c.publish("_outflow.1.", "other", 0x1101)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 5)
	c.rd.Stream, err = c.l.NATS.State(t.Context())
	must.Succeed(t, err)
	c.rd.Stream.Created, c.rec.Created = made, micro(made)
	must.Succeed(t, c.copies(t.Context()))
	_, err = c.find(t.Context(), "OUTBOX", 5, asItIs, c.inStream)
	must.Succeed(t, err)
	if got := c.messagesThatGo("MIRROR"); !slices.Equal(got, []uint64{1, 2, 3}) ||
		!slices.Equal(c.stays["MIRROR"], []uint64{4}) {
		t.Errorf("from the mirror go %v, and %v stay", got, c.stays["MIRROR"])
	}
}

// TestWhatAStreamThatWasMadeAnewKeepsIsNamed: it may have been restored, with events of an earlier database
// cluster, whose positions say nothing. So have its archive, what copies it, and what consumers parked of it.
func TestWhatAStreamThatWasMadeAnewKeepsIsNamed(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.stream = stream.New(c.l.NATS.API(), "OUTBOX", c.log)
	c.publish("_outflow.1.", "other", 0x9000)
	c.publish("_outflow.1.", "gone", 0x9000)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 2)
	must.Succeed(t, c.copies(t.Context()))
	var err error
	c.store, err = archive.Make(t.Context(), "file://"+t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, c.store.Close()) })
	folder := archive.FolderOf("OUTBOX", c.rd.Stream.Created)
	a, err := archive.Load(t.Context(), c.store, folder, nil)
	must.Succeed(t, err)
	seg, err := a.NewSegment()
	must.Succeed(t, err)
	head := outbox.Header{Pos: outbox.Position{LSN: 0x9000}, ID: "gone"}
	m := &archive.Message{Seq: 2, Time: time.Now(), Subject: "outbox.gone",
		Header: nats.Header{outbox.HeaderName: {head.String()}}}
	must.Succeed(t, seg.Add(m))
	_, err = a.Append(t.Context(), seg, 0)
	must.Succeed(t, err)
	parked := erasure.Parked{Stream: "OUTBOX", Created: c.rd.Stream.Created, Sequence: 2, Subject: m.Subject,
		Header: m.Header}
	replayed := erasure.Parked{Stream: "OUTBOX", Subject: m.Subject, Header: m.Header}
	c.o.Parked = func(_ context.Context, _ *jsapi.Client, _ []string, _ bool, is func(*erasure.Parked) bool,
		_ func()) (n erasure.FoundParked, err error) {
		for _, p := range []*erasure.Parked{&parked, &replayed} {
			if is(p) {
				n.Events++
			}
		}
		return n, nil
	}
	for _, begun := range []time.Duration{0, -time.Hour} {
		c.rec.Created = c.rec.Created.Add(begun)
		found, err := c.find(t.Context(), "OUTBOX", 2, asItIs, c.inStream)
		must.Succeed(t, err)
		n := len(found) + len(c.messagesThatGo("MIRROR"))
		c.rep.Folders = nil
		must.Succeed(t, c.eachFolder(t.Context(), func(a *archive.Archive,
			is func(*archive.Message) (bool, error)) error {
			for range 2 { // somebody else has written its segment anew meanwhile
				must.Succeed(t, a.Read(t.Context(), 1, func(m *archive.Message) error {
					goes, err := is(m)
					if goes {
						n++
					}
					return err
				}))
			}
			return nil
		}))
		must.Succeed(t, c.eraseParked(t.Context(), false))
		n += int(c.rep.Parked)
		c.limits()
		said := strings.Join(c.rep.NotReached, "\n")
		says := []string{"1 event of the document that consumers have parked"} // it was replayed
		if begun != 0 {
			says = []string{
				"1 message of the document in stream OUTBOX, which was made anew since, from 2 on",
				"1 message of the document in stream MIRROR, from 2 on", "1 message of the document in " +
					"archive " + folder + " of stream OUTBOX, which was made anew since, from 2 on",
				"2 events of the document that consumers have parked"}
		}
		if got := strings.Count(said, " of the document "); got != len(says) || (begun == 0) != (n == 5) ||
			(begun != 0) != (n == 0) {
			t.Errorf("begun %v: %d go, not reached: %q", begun, n, c.rep.NotReached)
		}
		for _, want := range says {
			if !strings.Contains(said, want) {
				t.Errorf("begun %v: %q is not said: %q", begun, want, c.rep.NotReached)
			}
		}
	}
}

// TestAnErasureWaitsForWhatItErasedFromThisStream: the request was begun on a longer one, of which the
// archive of this one will have no message for long.
func TestAnErasureWaitsForWhatItErasedFromThisStream(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.stream = stream.New(c.l.NATS.API(), "OUTBOX", c.log)
	c.rec.Erased = outbox.Sequences{{From: 2, To: 2}, {From: 1000, To: 1000}}
	last := func() uint64 {
		t.Helper()
		seq, err := c.lastErased(t.Context())
		must.Succeed(t, err)
		return seq
	}
	if got := last(); got != 1000 {
		t.Errorf("of the same stream: %d", got)
	}
	c.rec.Created = c.rec.Created.Add(-time.Hour)
	if got := last(); got != 0 {
		t.Errorf("nothing was erased from this one: %d", got)
	}
	must.Succeed(t, c.stream.NoteErased(t.Context(), outbox.Sequences{{From: 2, To: 3}}))
	if got := last(); got != 2 {
		t.Errorf("2 was: %d", got)
	}
}

// TestANoteThatSomebodyElseTookAwayIsThereAgain: the lock of an erasure is in its database, and not all that
// changes a stream's metadata takes it. Consumers read what was restored as well.
func TestANoteThatSomebodyElseTookAwayIsThereAgain(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.add(jetstream.StreamConfig{Name: "RESTORED", Subjects: []string{"_outflow.2.>"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "_outflow.*.>", Destination: ">"},
		Metadata: map[string]string{stream.MetadataRestored: archive.FolderOf("OUTBOX",
			c.rd.Stream.Created)}})
	must.Succeed(t, c.listStreams(t.Context()))
	for name, of := range map[string]struct{ ingress, point string }{
		"OUTBOX": {"_outflow.1.", "erase.noted"}, "RESTORED": {"_outflow.2.", "erase.copy"}} {
		for range 3 {
			c.publish(of.ingress, "gone", 0x100)
		}
		found, err := c.find(t.Context(), name, 3, asItIs, c.inStream)
		must.Succeed(t, err)
		s, err := c.js.Stream(t.Context(), name)
		must.Succeed(t, err)
		config := s.CachedInfo().Config
		config.Metadata[outbox.MetadataErased] = "3"
		c.o.Hit = func(at string) {
			if at == of.point {
				_, err := c.js.UpdateStream(t.Context(), config)
				must.Succeed(t, err)
			}
		}
		must.Succeed(t, c.deleteNoted(t.Context(), name, found[:2], "erase.copy", func() {}))
		noted, _, err := stream.New(c.l.NATS.API(), name, c.log).Erased(t.Context())
		must.Succeed(t, err)
		if noted.String() != "1+2" {
			t.Errorf("in stream %s noted is %q", name, noted)
		}
		c.has(name, 1)
	}
}

// TestWhatAKilledRunHasErasedIsNotedAgain: somebody else has taken its note away before it could look. What
// is in the stream, or behind its end, is not noted: it goes later, or comes in place of what was lost.
func TestWhatAKilledRunHasErasedIsNotedAgain(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	for range 4 {
		c.publish("_outflow.1.", "gone", 0x100)
	}
	s, err := c.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	must.Succeed(t, s.SecureDeleteMsg(t.Context(), 1))
	must.Succeed(t, s.SecureDeleteMsg(t.Context(), 2))
	c.rec.Erased, c.rd.Stream.LastSeq = outbox.Sequences{{From: 1, To: 3}, {From: 9, To: 9}}, 4
	for _, at := range []struct {
		created time.Time
		want    string
	}{{c.rec.Created.Add(-time.Hour), ""}, {c.rec.Created, "1+1"}} {
		c.rec.Created = at.created
		_, err = c.find(t.Context(), "OUTBOX", 4, asItIs, c.inStream)
		must.Succeed(t, err)
		must.Succeed(t, c.noteAgain(t.Context()))
		noted, _, err := stream.New(c.l.NATS.API(), "OUTBOX", c.log).Erased(t.Context())
		must.Succeed(t, err)
		if noted.String() != at.want {
			t.Errorf("noted is %q, not %q", noted, at.want)
		}
	}
}

// TestACopyThatDoesNotHaveAllIsWaitedFor: what it is to have still comes after it was looked through.
func TestACopyThatDoesNotHaveAllIsWaitedFor(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	const ingress = "_outflow.1."
	c.publish(ingress, "gone", 0x100)
	c.publish(ingress, "gone", 0x101)
	c.publish(ingress, "other", 0x102)
	full := func(config jetstream.StreamConfig) jetstream.StreamConfig {
		config.MaxMsgs, config.Discard = 1, jetstream.DiscardNew
		return config
	}
	filtered := sourced("OUTBOX")
	filtered[0].FilterSubject = "outbox.gone"
	all := []jetstream.StreamConfig{
		{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]},
		{Name: "AGGREGATE", Sources: sourced("OUTBOX")},
		{Name: "FILTERED", Sources: filtered},
	}
	for _, config := range all {
		c.add(full(config))
		c.has(config.Name, 1)
	}
	must.Succeed(t, c.copies(t.Context()))
	for _, config := range all {
		c.rep.Waiting = nil
		_, err := c.inWhole(t.Context(), config.Name, time.Now())
		must.Succeed(t, err)
		want := "stream " + config.Name + " does not have all yet of stream OUTBOX up to "
		if got := fmt.Sprint(c.rep.Waiting); !strings.Contains(got, want) {
			t.Errorf("%s: waiting for %s", config.Name, got)
		}
		must.Succeed(t, c.js.DeleteStream(t.Context(), config.Name)) // a mirror does not go on by itself
		c.add(config)
		c.rep.Waiting = nil
		found, err := c.inWhole(t.Context(), config.Name, time.Now().Add(3*time.Minute))
		must.Succeed(t, err)
		if len(found) != 2 || len(c.rep.Waiting) > 0 {
			t.Errorf("%s: %d messages go, waiting for %v", config.Name, len(found), c.rep.Waiting)
		}
	}
}

// TestWhatWasErasedBehindWhatIsLeftMayBeOnItsWay: what an origin has yet does not say that a copy has all, if
// messages behind it were erased. So it has to have heard of the origin since.
func TestWhatWasErasedBehindWhatIsLeftMayBeOnItsWay(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.publish("_outflow.1.", "gone", 0x100)
	c.publish("_outflow.1.", "gone", 0x101)
	c.publish("_outflow.1.", "other", 0x102)
	of := func(name string) *jetstream.StreamSource {
		return &jetstream.StreamSource{Name: name, FilterSubject: "outbox.gone"}
	}
	all := []jetstream.StreamConfig{{Name: "MIRROR", Mirror: of("OUTBOX")},
		{Name: "FILTERED", Sources: []*jetstream.StreamSource{of("OUTBOX")}},
		{Name: "FURTHER", Sources: sourced("FILTERED")},
		{Name: "WHOLE", Sources: sourced("ALL")},
		{Name: "ALL", Mirror: sourced("OUTBOX")[0]}}
	for _, config := range all {
		c.add(config)
	}
	for name, n := range map[string]uint64{"MIRROR": 2, "FILTERED": 2, "FURTHER": 2, "ALL": 3, "WHOLE": 3} {
		c.has(name, n)
	}
	must.Succeed(t, c.copies(t.Context()))
	for _, name := range []string{"OUTBOX", "FILTERED", "ALL"} { // was erased from
		s, err := c.js.Stream(t.Context(), name)
		must.Succeed(t, err)
		must.Succeed(t, s.DeleteMsg(t.Context(), 2))
	}
	c.rec.Erased = outbox.Sequences{{From: 2, To: 2}}
	c.rec.Copies = map[string]uint64{"FILTERED": 1, "ALL": 1}
	for _, config := range all {
		began := time.Now()
		found, err := c.inWhole(t.Context(), config.Name, began) // no time is left
		must.Succeed(t, err)
		after, known := time.Since(began), slices.Contains([]string{"ALL", "WHOLE"}, config.Name)
		if after < heard != known || len(c.rep.Waiting) > 0 {
			t.Errorf("%s: %d messages go after %v, waiting for %v", config.Name, len(found), after,
				c.rep.Waiting)
		}
	}
}

// TestACopyThatDoesNotKeepAllIsNotWaitedForLong: nothing in it says that it had the newest message.
func TestACopyThatDoesNotKeepAllIsNotWaitedForLong(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.publish("_outflow.1.", "gone", 0x100)
	c.publish("_outflow.1.", "of.another.subject", 0x101)
	c.publish("_outflow.1.", "other", 0x102)
	c.add(jetstream.StreamConfig{Name: "AGGREGATE", Sources: sourced("OUTBOX")})
	c.has("AGGREGATE", 3)
	s, err := c.js.Stream(t.Context(), "AGGREGATE")
	must.Succeed(t, err)
	must.Succeed(t, s.DeleteMsg(t.Context(), 3))
	must.Succeed(t, c.copies(t.Context()))
	found, err := c.inWhole(t.Context(), "AGGREGATE", time.Now().Add(3*time.Minute))
	must.Succeed(t, err)
	if len(found) != 1 || c.unsaid() != 1 || len(c.rep.Waiting) > 0 {
		t.Errorf("%d messages go, %d do not say, waiting for %v", len(found), c.unsaid(), c.rep.Waiting)
	}
}

// TestAnEventOfACopyIsKnownBehindSeveralTransforms, of which the header has a list.
func TestAnEventOfACopyIsKnownBehindSeveralTransforms(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.publish("_outflow.1.", "gone", 0x100)
	renames := sourced("OUTBOX")
	renames[0].SubjectTransforms = []jetstream.SubjectTransformConfig{
		{Source: "other.>", Destination: "a.>"}, {Source: "outbox.>", Destination: "b.>"}}
	c.add(jetstream.StreamConfig{Name: "RENAMED", Sources: renames})
	c.has("RENAMED", 1)
	must.Succeed(t, c.copies(t.Context()))
	if got := c.messagesThatGo("RENAMED"); !slices.Equal(got, []uint64{1}) {
		t.Errorf("from it go %v", got)
	}
}

// TestWhatDoesNotSayItsDocumentCountsOnce, however often it is read: a copy that was made anew is read again,
// and those behind it, and parked events are counted before they are erased.
func TestWhatDoesNotSayItsDocumentCountsOnce(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.publish("_outflow.1.", "of.another.subject", 0x100)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0]})
	c.has("MIRROR", 1)
	must.Succeed(t, c.copies(t.Context()))
	c.o.Parked = func(_ context.Context, _ *jsapi.Client, _ []string, _ bool, is func(*erasure.Parked) bool,
		_ func()) (erasure.FoundParked, error) {
		is(&erasure.Parked{Stream: "OUTBOX", Subject: "of.another.subject"})
		return erasure.FoundParked{}, nil
	}
	for range 2 {
		c.messagesThatGo("MIRROR")
		must.Succeed(t, c.eraseParked(t.Context(), false))
	}
	if n := c.unsaid(); n != 2 {
		t.Errorf("%d messages do not say their document, want 2", n)
	}
}

// TestNothingIsErasedWhereNobodyMayDelete: the server refuses it for ever. So nothing is begun, nor noted as
// erased.
func TestNothingIsErasedWhereNobodyMayDelete(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.stream = stream.New(c.l.NATS.API(), "OUTBOX", c.log)
	c.publish("_outflow.1.", "gone", 0x100)
	c.publish("_outflow.1.", "other", 0x101)
	later := sourced("OUTBOX")
	later[0].OptStartSeq = 2
	c.add(jetstream.StreamConfig{Name: "LATER", Sources: later, DenyDelete: true})
	c.has("LATER", 1)
	must.Succeed(t, c.copies(t.Context()))
	must.Succeed(t, c.deletable(t.Context()))
	refused := func(err error, words string) {
		t.Helper()
		if f := outbox.FaultOf(err); f == nil || f.Code != "erase_denied" ||
			!strings.Contains(f.Message, words) {
			t.Errorf("%v; want %q", err, words)
		}
	}
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0], DenyDelete: true})
	c.has("MIRROR", 2)
	must.Succeed(t, c.copies(t.Context()))
	refused(c.deletable(t.Context()), "stream MIRROR has messages of the document, and deny_delete")
	refused(c.eraseCopy(t.Context(), "MIRROR", time.Now()), "stream MIRROR")
	must.Succeed(t, c.js.DeleteStream(t.Context(), "MIRROR"))
	s, err := c.js.Stream(t.Context(), "OUTBOX")
	must.Succeed(t, err)
	config := s.CachedInfo().Config
	config.Sealed = true
	_, err = c.js.UpdateStream(t.Context(), config)
	must.Succeed(t, err)
	must.Succeed(t, c.copies(t.Context()))
	rec := *c.rec
	c.rec.Cut = 0 // it has not begun
	c.rd.Server.WALEnd, c.rd.Stream.LastSeq = rec.Cut, rec.CutSeq
	refused(c.deletable(t.Context()), "stream OUTBOX has messages of the document, and sealed")
	*c.rec = rec
	refused(c.messages(t.Context(), time.Now()), "stream OUTBOX")
}

// TestTheLastEventKeepsNoErasureFromGoingOn: a run has written it, and ended before it had a cut. It stays,
// and nobody has to be able to delete it.
func TestTheLastEventKeepsNoErasureFromGoingOn(t *testing.T) {
	t.Parallel()
	c := newCopied(t)
	c.publish("_outflow.1.", "gone", 0x100)
	c.add(jetstream.StreamConfig{Name: "MIRROR", Mirror: sourced("OUTBOX")[0], DenyDelete: true})
	c.has("MIRROR", 1)
	must.Succeed(t, c.copies(t.Context()))
	c.rec.Cut, c.rd.Server.WALEnd, c.rd.Stream.LastSeq = 0, 0x1000, 1
	for notified, refused := range map[string]bool{"": true, "gone": false} {
		c.rec.Notified = notified
		if err := c.deletable(t.Context()); (err != nil) != refused {
			t.Errorf("the last event is %q: %v", notified, err)
		}
	}
}
