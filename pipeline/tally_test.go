package pipeline

import (
	"log/slog"
	"testing"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// counts makes a tally that has read commits with one event each.
func counts(m relay.Mapping, newest relay.Checkpoint, commits ...outbox.LSN) *homeTally {
	t := newTally(checkpoint.Config{Mapping: m}, slog.New(slog.DiscardHandler), newest)
	for _, lsn := range commits {
		t.commit(&relay.Commit{Kind: relay.Events, LSN: lsn, Events: 1})
	}
	return t
}

// TestATallyIsTheSameFromWhereverItIsCounted: at home and elsewhere, in one session or in several.
func TestATallyIsTheSameFromWhereverItIsCounted(t *testing.T) {
	t.Parallel()
	all := []outbox.LSN{110, 120, 130, 140}
	home := homeDecoder().Mapping
	first := counts(home, relay.Checkpoint{Due: 100}, all...)
	at120, at140 := first.at(125), first.at(140)
	if at120.Since != 100 || at120.Events != 2 || at140.Events != 4 {
		t.Fatalf("%+v, %+v", at120, at140)
	}
	if again := counts(home, relay.Checkpoint{Due: 125, Tally: at120}, all...).at(140); again != at140 {
		t.Errorf("in two sessions %+v, in one %+v", again, at140)
	}

	away := awayDecoder().Mapping
	w := func(at outbox.LSN, t relay.Tally) *relay.Watermark {
		return &relay.Watermark{Confirmed: relay.Confirmed{LSN: 1, Timeline: 1}, At: at, Tally: t}
	}
	reader := counts(away, relay.Checkpoint{Due: 1}, all[1:]...) // its slot was made after the first commit
	for _, early := range []*relay.Watermark{w(110, relay.Tally{Since: 100, Events: 1, Sum: 7}),
		w(125, relay.Tally{})} { // what came before its first commit it has not read
		if err := reader.compare(early); err != nil || reader.known {
			t.Fatalf("%+v: %v, known %t", early, err, reader.known)
		}
	}
	if err := reader.compare(w(125, at120)); err != nil || reader.at(120) != at120 {
		t.Errorf("%+v, %v", reader.at(120), err)
	}
	if err := reader.compare(w(140, at140)); err != nil || reader.at(140) != at140 {
		t.Errorf("%+v, %v", reader.at(140), err)
	}
	late := counts(away, relay.Checkpoint{Due: 125, Tally: at120}, all...)
	if err := late.compare(w(140, at140)); err != nil || late.at(130) == (relay.Tally{}) {
		t.Errorf("what a checkpoint still lies below is not remembered: %v", err)
	}
	less := at140
	less.Events--
	if f := outbox.FaultOf(late.compare(w(140, less))); f == nil || f.Code != checkpoint.CodeHome ||
		!f.Observed || f.From != 140 {
		t.Errorf("%v", f)
	}
	anew := relay.Tally{Since: 130, Events: 1, Sum: 99}
	if err := late.compare(w(140, anew)); err != nil || late.at(140) != anew {
		t.Errorf("the home counts anew: %+v, %v", late.at(140), err)
	}
}

// TestATallyIsBounded: what is further back is not known, which is no other number.
func TestATallyIsBounded(t *testing.T) {
	t.Parallel()
	c := counts(homeDecoder().Mapping, relay.Checkpoint{Due: 1})
	for i := range outbox.LSN(2 * maxMarks) {
		c.commit(&relay.Commit{Kind: relay.Events, LSN: 2 + i, Events: 1})
	}
	if len(c.marks) > maxMarks {
		t.Errorf("%d marks", len(c.marks))
	}
	if early := c.at(maxMarks); early != (relay.Tally{}) {
		t.Errorf("%+v", early)
	}
	if last := c.at(1 + 2*maxMarks); last.Events != 2*maxMarks {
		t.Errorf("%+v", last)
	}
}
