package consumeradmin

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// marks is how far each consumer of kept is.
func (w *world) marks() string {
	w.t.Helper()
	kv, err := openBucket(w.t.Context(), w.JS, w.Stream)
	must(w.t, err)
	doc, err := kv.load(w.t.Context(), "boxed")
	must(w.t, err)
	c, err := w.live.Consumer(w.t.Context(), "plain")
	must(w.t, err)
	return fmt.Sprint(w.text("SELECT m::text FROM outflow_mark m ORDER BY source, partition"), doc.offsets,
		c.CachedInfo().Created, c.CachedInfo().Delivered.Stream)
}

// kept is a stream with a consumer of each kind: texts, boxed and plain. All of them have come up to 18.
func kept(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	kv, err := w.JS.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: consumer.Bucket(w.Stream)})
	must(t, err)
	_, err = kv.Create(t.Context(), "boxed", fmt.Appendf(nil, `{"v": %d, "stream": "OUTBOX", "filters": [">"],
		"layout": {"keying": "outbox.{doc_id}", "partitions": 1},
		"marks": {"live": {"0": {"seq": 18, "due": "0/10", "n": 18, "pos": "0/20-0"}}}}`, documentVersion))
	must(t, err)
	_, err = w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "plain",
		AckPolicy: jetstream.AckExplicitPolicy})
	must(t, err)
	w.reads(16, true)
	w.reads(2, false)
	return w
}

// reads lets plain read some messages, and acknowledge them.
func (w *world) reads(n int, acks bool) {
	w.t.Helper()
	c, err := w.live.Consumer(w.t.Context(), "plain")
	must(w.t, err)
	batch, err := c.Fetch(n)
	must(w.t, err)
	for m := range batch.Messages() {
		if acks {
			must(w.t, m.DoubleAck(w.t.Context()))
		}
	}
}

// TestARewindDoesWhatItAskedAbout: while somebody thinks, messages of the stream are removed, or the consumer
// is set back or has processed more. Then nothing is done.
func TestARewindDoesWhatItAskedAbout(t *testing.T) {
	t.Parallel()
	erase := func(w *world) { must(w.t, w.live.DeleteMsg(w.t.Context(), 14)) }
	purge := func(w *world) { must(w.t, w.live.Purge(w.t.Context(), jetstream.WithPurgeSequence(14))) }
	for _, c := range []struct {
		name, what, code string
		meanwhile        func(w *world)
	}{
		{"texts", "nothing", "", func(*world) {}},
		{"texts", "a message is erased", "rewind_changed", erase},
		{"texts", "the stream's front is removed", "rewind_removed", purge},
		{"texts", "it has processed more", "rewind_changed", func(w *world) {
			w.exec("UPDATE outflow_mark SET seq = 19 WHERE source = 'live' AND partition = 3")
		}},
		{"texts", "it was set back", "rewind_changed", func(w *world) {
			w.exec("UPDATE outflow_mark SET seq = 13 WHERE source = 'live' AND seq > 13")
		}},
		{"texts", "an event is parked", "rewind_changed", func(w *world) { w.park("d3", 19) }},
		{"boxed", "nothing", "", func(*world) {}},
		{"boxed", "a message is erased", "rewind_changed", erase},
		{"plain", "nothing", "", func(*world) {}},
		{"plain", "a message is erased", "rewind_changed", erase},
		{"plain", "it was deleted", "consumer_missing", func(w *world) {
			must(w.t, w.live.DeleteConsumer(w.t.Context(), "plain"))
		}},
	} {
		t.Run(c.name+", "+c.what, func(t *testing.T) {
			t.Parallel()
			w := kept(t)
			var before string
			err := w.Rewind(t.Context(), Rewind{Name: c.name, To: "seq:13", Confirm: func(*Plan) error {
				if c.meanwhile(w); c.code != "consumer_missing" {
					before = w.marks()
				}
				return nil
			}})
			if c.code == "" {
				must(t, err)
			} else {
				wantFault(t, err, c.code)
			}
			if before != "" && (before == w.marks()) != (c.code != "") {
				t.Errorf("the marks were\n%s\nand are\n%s", before, w.marks())
			}
		})
	}
}

// TestAConsumerThatWasSetBackIsNoNewOne: a new one may begin behind what the stream does not have any more.
func TestAConsumerThatWasSetBackIsNoNewOne(t *testing.T) {
	t.Parallel()
	w := kept(t)
	kv, err := openBucket(t.Context(), w.JS, w.Stream)
	must(t, err)
	value, _, err := kv.get(t.Context(), "boxed")
	must(t, err)
	_, err = kv.kv.Put(t.Context(), "boxed", bytes.Replace(value, []byte("{"), []byte(`{"anew": true, `), 1))
	must(t, err)
	must(t, w.Rewind(t.Context(), Rewind{Name: "boxed", To: "seq:13", Confirm: func(*Plan) error {
		return nil
	}}))
	doc, err := kv.load(t.Context(), "boxed")
	must(t, err)
	if doc.fields["anew"] != nil || doc.furthest() != 12 {
		t.Errorf("up to %d: %s", doc.furthest(), doc.fields)
	}
}

// TestARewindToWhereTheConsumerIsDoesNothing, and says so, even if it has not acknowledged all of that.
func TestARewindToWhereTheConsumerIsDoesNothing(t *testing.T) {
	t.Parallel()
	w := kept(t)
	before := w.marks()
	for _, name := range []string{"texts", "boxed", "plain"} {
		err := w.Rewind(t.Context(), Rewind{Name: name, To: "seq:19", Confirm: func(p *Plan) error {
			t.Errorf("it asks whether %v", p.Lines())
			return nil
		}})
		wantFault(t, err, "rewind_ahead", "is there already")
	}
	if now := w.marks(); now != before {
		t.Errorf("the marks were\n%s\nand are\n%s", before, now)
	}
}

// TestARewindGoesBackWhileTheStreamsFrontIsRemoved, of which the archive has all: what comes again is the
// same. It is not where a message is gone, and a consumer that did not need the archive may have none.
func TestARewindGoesBackWhileTheStreamsFrontIsRemoved(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		to, code  string
		meanwhile func(w *world)
	}{
		{"start", "", func(*world) {}},
		{"seq:4", "", func(*world) {}},
		{"seq:4", "rewind_changed", func(w *world) { must(w.t, w.live.DeleteMsg(w.t.Context(), 16)) }},
		{"seq:9", "rewind_changed", func(*world) {}},
	} {
		w := newWorld(t)
		w.archived(12, 7)
		err := w.Rewind(t.Context(), Rewind{Name: "texts", To: c.to, Confirm: func(*Plan) error {
			c.meanwhile(w)
			must(t, w.live.Purge(t.Context(), jetstream.WithPurgeSequence(11)))
			return nil
		}})
		if c.code == "" {
			must(t, err)
		} else {
			wantFault(t, err, c.code)
		}
	}
}

// TestARewindKeepsWhatIsParkedOfAnotherStream: the stream was made anew, and has another event's message
// where that of a parked one was. That one does not come again.
func TestARewindKeepsWhatIsParkedOfAnotherStream(t *testing.T) {
	t.Parallel()
	w := kept(t)
	w.exec(`DELETE FROM outflow_parked`)
	w.park("d1", 14)
	w.park("d2", 15)
	w.exec(`UPDATE outflow_parked SET position = '0/FFF-0' WHERE seq = 15`)
	w.park("d3", 15)
	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:13", Confirm: func(p *Plan) error {
		if p.Parked != 2 {
			t.Errorf("%d are taken out, want 2", p.Parked)
		}
		return nil
	}}))
	if got := w.text("SELECT document FROM outflow_parked"); got != "d2" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindKeepsWhatTheArchiveHasAnotherEventOf: the messages of the stream that was made anew are in the
// archive alone by now.
func TestARewindKeepsWhatTheArchiveHasAnotherEventOf(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.archived(12, 10)
	w.park("d1", 4)
	w.park("d2", 9)
	w.exec(`UPDATE outflow_parked SET position = '0/FFF-0' WHERE seq = 9`)
	w.park("d3", 9)
	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:3", Confirm: func(p *Plan) error {
		if p.Parked != 2 {
			t.Errorf("%d are taken out, want 2", p.Parked)
		}
		return nil
	}}))
	if got := w.text("SELECT document FROM outflow_parked"); got != "d2" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindTakesOutWhatWasPublishedAgain: what the broker lost of the stream's end has another sequence. An
// event that only has the position or the subject in common is another one.
func TestARewindTakesOutWhatWasPublishedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for seq, document := range map[int]string{13: "d2", 14: "d3", 15: "d4"} {
		w.park(document, seq)
		must(t, w.live.DeleteMsg(t.Context(), uint64(seq)))
	}
	w.publish(w.JS, "outbox.d3", 13)
	w.publish(w.JS, "outbox.d2", 13)
	w.publish(w.JS, "outbox.d3", 15)
	w.publish(w.JS, "outbox.d4", 15)
	w.exec(`UPDATE outflow_parked SET event_id = 'other' WHERE document = 'd4'`)
	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:12", Confirm: func(p *Plan) error {
		if p.Parked != 1 {
			t.Errorf("%d are taken out, want 1", p.Parked)
		}
		return nil
	}}))
	if got := w.text("SELECT document FROM outflow_parked ORDER BY document"); got != "d3 d4" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindSaysWhatIsNotRecognizedAnyMore: what the broker lost and is published again. A partition that
// keeps its offset recognizes it.
func TestARewindSaysWhatIsNotRecognizedAnyMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t) // it has lost what partitions 0 and 2 name
	for to, want := range map[string]string{"seq:9": "of partitions 0, 2: ", "seq:13": "of partitions 2: "} {
		if p, err := w.planned(to); err != nil || !strings.Contains(strings.Join(p.Lines(), "; "), want) {
			t.Errorf("%s: %+v, %v", to, p, err)
		}
	}
	w.exec(`UPDATE outflow_mark SET holed = false`)
	if p, err := w.planned("seq:9"); err != nil || strings.Contains(strings.Join(p.Lines(), "; "), "lost") {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestARewindTakesOutWhatWasPublishedAgainBehindIt: the sequences that the broker lost lie before the place.
// It does not come again in a partition that keeps its offset.
func TestARewindTakesOutWhatWasPublishedAgainBehindIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for partition, seq := range []int{11, 13, 14} {
		document := fmt.Sprintf("d%d", seq%5)
		w.park(document, seq)
		w.exec(`UPDATE outflow_parked SET hash = $1 WHERE seq = $2`, partition, seq)
		if seq > 11 { // 11 is there still, and nothing of it comes again
			must(t, w.live.DeleteMsg(t.Context(), uint64(seq)))
			w.publish(w.JS, "outbox."+document, seq)
		}
	}
	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:15", Confirm: func(p *Plan) error {
		if p.Parked != 1 {
			t.Errorf("%d are taken out, want 1", p.Parked)
		}
		return nil
	}}))
	if got := w.text("SELECT seq::text FROM outflow_parked ORDER BY seq"); got != "11 13" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindTakesOutWhatComesAgainInAPartitionThatRuns: it had not come to the place when it was asked
// about, and is set back all the same.
func TestARewindTakesOutWhatComesAgainInAPartitionThatRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.park("d3", 13) // of partition 0
	must(t, w.live.DeleteMsg(t.Context(), 13))
	w.publish(w.JS, "outbox.d3", 13)
	running := w.connect()
	moved := make(chan error, 1)
	asked := func(p *Plan) error {
		if p.Parked != 0 {
			t.Errorf("%d are taken out, want 0", p.Parked)
		}
		tx, err := running.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), "UPDATE outflow_mark SET seq = 20 WHERE name = 'texts' "+
			"AND partition = 0")
		must(t, err)
		go func() {
			for waits := false; err == nil && !waits; {
				err = tx.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted "+
					"AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))").Scan(&waits)
			}
			moved <- cmp.Or(err, tx.Commit(t.Context()))
		}()
		return nil
	}
	must(t, w.Rewind(t.Context(), Rewind{Name: "texts", To: "seq:15", Running: true, Confirm: asked}))
	must(t, <-moved)
	if got := w.text("SELECT seq::text FROM outflow_parked"); got != "" {
		t.Errorf("parked %s", got)
	}
}

// TestARewindTakesOutWhatTheArchiveHasAgain: retention has taken the message under which it was published
// again, and the consumer reads that from the archive.
func TestARewindTakesOutWhatTheArchiveHasAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.park("d2", 13)
	w.exec(`UPDATE outflow_parked SET hash = 2`)
	must(t, w.live.DeleteMsg(t.Context(), 13))
	w.publish(w.JS, "outbox.d2", 13)
	w.archived(21, 21)
	for _, to := range []string{"seq:10", "seq:15"} {
		if p, err := w.planned(to); err != nil || p.Parked != 1 {
			t.Errorf("%s: %+v, %v: want 1 that is taken out", to, p, err)
		}
	}
}

// TestARewindReadsAllThatTheLeaderHas: a consumer may be on a replica that lags, which does not have yet what
// was published again.
func TestARewindReadsAllThatTheLeaderHas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.park("d3", 14)
	must(t, w.live.DeleteMsg(t.Context(), 14))
	w.publish(w.JS, "outbox.d3", 14)
	_, err := w.JS.CreateStream(t.Context(), jetstream.StreamConfig{Name: "BEHIND",
		Subjects: []string{"behind.>"}, SubjectTransform: &jetstream.SubjectTransformConfig{
			Source: "behind.>", Destination: "outbox.>"}})
	must(t, err)
	js := w.JS
	more := sync.OnceFunc(func() { w.publish(js, "behind.d3", 14) })
	for range 18 {
		w.publish(js, "behind.d0", 1)
	}
	w.publish(js, "behind.d3", 19)
	w.JS = natstest.Lagging{JetStream: js, Behind: "BEHIND", More: more}
	if p, err := w.planned("seq:11"); err != nil || p.Parked != 1 {
		t.Errorf("%+v, %v: want 1 that is taken out", p, err)
	}
}

// TestMuchThatIsParkedIsComparedAtOnce: a transaction waits meanwhile that keeps all instances waiting.
func TestMuchThatIsParkedIsComparedAtOnce(t *testing.T) {
	t.Parallel()
	all := make([]parkedEvent, 1_000_000) // in the square of their number that takes hours
	for i := range all {
		all[i].ord = int64(i)
	}
	if rest := without(slices.Clone(all), all[1:]); len(rest) != 1 {
		t.Errorf("%d are left", len(rest))
	}
}
