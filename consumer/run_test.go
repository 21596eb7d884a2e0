package consumer

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

func TestRunProcessesEachEventOnce(t *testing.T) {
	t.Parallel()
	w, s, src := newHarness(t), &publisher{}, newMemoryStream()
	all := s.events(500, 20)
	src.publish(all[:300]...)
	r := w.start(w.consumer(w.config(src)), handler)
	w.await(all[:300])
	src.publish(all[300:]...)
	w.await(all)
	// while it runs: an end writes them as well, if the server does not stand still meanwhile
	w.awaitOffsets(500)
	r.stopped()
	w.exactly(all)

	// The next one has nothing to do.
	r = w.start(w.consumer(w.config(src)), handler)
	more := s.events(10, 3)
	src.publish(more...)
	all = append(all, more...)
	w.await(all)
	r.stopped()
	w.exactly(all)
}

func TestRunProcessesEachEventOfAJetStreamOnce(t *testing.T) {
	t.Parallel()
	w, s := newHarness(t), &publisher{}
	js, _ := realStream(t, jetstream.StreamConfig{})
	all := s.events(500, 20)
	publish(t, js, all...)
	c, err := New(js, Postgres(w.pool), w.config(nil))
	if err != nil {
		t.Fatal(err)
	}
	r := w.start(c, handler)
	w.await(all)
	r.stopped()
	w.exactly(all)
}
