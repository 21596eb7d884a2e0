package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// An event that comes again, since the consumer was rewound, is not parked twice.
func TestAParkedEventThatComesAgainIsNotParkedTwice(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a")
	w.next = 1
	w.come("a", "a", "a")
	w.want("", "a1 poison 3, a2 behind 0, a3 behind 0")
}

// A replayed event at or behind the first parked one of its document is what waits there: released, each has
// its effect once. One before it has its effect again, and if it fails, it and what follows in the replay go
// before what was parked.
func TestAReplayDoesNotRepeatWhatIsParked(t *testing.T) {
	t.Parallel()
	for _, fromTable := range []bool{false, true} {
		w := newWard(t)
		w.come("a", "b", "a")
		w.fail("a")
		w.come("b", "a", "a") // 4 is poison, 6 and 7 are behind it
		w.effects = nil
		w.replayed("a", fromTable, 1, 3, 4, 6, 7)
		w.replayed("b", fromTable, 2, 5)
		w.want("a1 a3 b2 b5", "a4 poison 3, a6 behind 0, a7 behind 0")
		w.restart()
		w.word("a", releaseRetry)
		w.out()
		w.want("a1 a3 b2 b5 a4 a6 a7", "")
	}

	w := newWard(t)
	w.come("a", "a", "a")
	w.fail("a")
	w.come("a")
	w.effects = nil
	w.refuse = func(e *Event) error {
		if e.Replayed && e.Sequence == 2 {
			return errors.New("no good")
		}
		return nil
	}
	w.replayed("a", false, 1, 2, 3, 4, 5)
	const rows = "a4 poison 3, a5 behind 0, a2 poison 1, a3 behind 0"
	w.want("a1", rows)
	w.replayed("a", false, 1, 2, 3, 4, 5) // again
	w.want("a1 a1", rows)
	w.refuse = nil
	w.word("a", releaseRetry)
	w.out()
	w.want("a1 a1 a2 a3 a4 a5", "")
}

// TestAReplayRepeatsWhatWasPublishedAgainBeforeWhatIsParked: the broker lost both, the one that had its
// effect and the one that is parked, whose row has the sequence that was lost.
func TestAReplayRepeatsWhatWasPublishedAgainBeforeWhatIsParked(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.come("a", "a")
	w.fail("a")
	w.come("a")
	_, err := w.pool.Exec(t.Context(), "UPDATE outflow_parked SET seq = seq - 2")
	must.Succeed(t, err)
	w.effects = nil
	w.replayed("a", false, 1, 2, 3, 4)
	w.want("a1 a2", "a1 poison 3, a2 behind 0")
	_, err = w.pool.Exec(t.Context(), "UPDATE outflow_parked SET position = '0/FF-0'") // repaired
	must.Succeed(t, err)
	w.replayed("a", false, 3, 4)
	w.want("a1 a2", "a1 poison 3, a2 behind 0")
}

// What memory says too much the table corrects.
func TestTheTableCorrectsWhatMemoryTakesForParked(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.full = true
	w.come("a", "a")
	w.fail("b")
	w.come("b", "a")
	w.want("a1 a2 a5", "b3 poison 3, b4 behind 0")

	w.restart()
	w.add("c") // as would another document of the same hash
	w.add("c")
	if w.drop("c"); !w.may("c") {
		t.Error("a document is let go that is parked")
	}
}

// The metrics are of the instance's own partitions: documents of others are released by others, and it would
// show those for ever.
func TestParkedDocumentsAreCountedWhereTheyAreReleased(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	shows := func(documents int, least, most time.Duration) {
		t.Helper()
		w.out() // nothing: it looks what is to be released
		got := gather(t, w.reg)
		n, since := got["outflow_consumer_parked_documents consumer=orders"],
			got["outflow_consumer_oldest_parked_seconds consumer=orders"]
		if n != float64(documents) || since < least.Seconds() || since > most.Seconds() {
			t.Errorf("%v documents, for %v s; want %d, for %v to %v", n, since, documents, least, most)
		}
	}
	shows(0, 0, 0)
	own := int(w.event("a").hash % 1000)
	w.fail("a")
	w.come("a")
	w.fail("b")
	shows(2, 0, time.Hour)
	for document, at := range map[string]string{"a": "3 hours", "b": "5 hours"} {
		if _, err := w.pool.Exec(t.Context(), "UPDATE outflow_parked SET parked_at = now() - $2::interval "+
			"WHERE document = $1", document, at); err != nil {
			t.Fatal(err)
		}
	}
	w.restart()
	shows(2, 5*time.Hour, 6*time.Hour)
	w.restartWith(1000, own) // not the partition of b
	if !w.may("b") {
		t.Error("what is parked elsewhere is not known")
	}
	shows(1, 3*time.Hour, 4*time.Hour)
	w.fail("c")
	shows(2, 3*time.Hour, 4*time.Hour)
	w.drop("b") // which was never counted
	shows(2, 3*time.Hour, 4*time.Hour)
	w.word("a", releaseSkip)
	w.out()
	shows(1, 0, time.Hour)
	w.word("c", releaseSkip)
	w.out()
	shows(0, 0, 0)
}

// Names, headers and errors that PostgreSQL can't hold are parked all the same, and come out as they were.
func TestBytesThatPostgreSQLCannotHoldAreParkedUnchanged(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	documents := []string{"", "\xff", "a\x00b", strings.Repeat("é", 30), "=FF "}
	for _, document := range documents {
		w.fail(document)
		w.come(document)
		w.restart()
		if !w.may(document) {
			t.Errorf("%q is not kept", document)
		}
		w.word(storable(document), "retry")
	}
	var events []*Event
	w.refuse = func(e *Event) error { events = append(events, e); return nil }
	var wanted []parkedDocument
	w.tx(func(ctx context.Context, tx pgx.Tx) (err error) {
		wanted, err = w.toRelease(ctx, tx, maxReleases, 1, []int64{0})
		return err
	})
	for i, d := range wanted {
		if want := partitionHash(documents[i]); d.hash != want {
			t.Errorf("%q is looked for in the partition of hash %d, not %d", documents[i], d.hash, want)
		}
	}
	w.out()
	if len(events) != 2*len(documents) || w.rows() != "" {
		t.Fatalf("%d events; parked are %s", len(events), w.rows())
	}
	for i, e := range events {
		if e.Document != documents[i/2] || !slices.Equal(e.Header["Bad"], []string{"\xff\x00", "a"}) ||
			string(e.Data) != `{"a": 1}` || e.ID != fmt.Sprint("id ", e.seq) {
			t.Errorf("%+v", e)
		}
	}
}

func FuzzHeaderText(f *testing.F) {
	f.Add("Name", "a", "\xff\x00")
	f.Add("", "", "{}")
	f.Fuzz(func(t *testing.T, name, a, b string) {
		h := nats.Header{strings.ToValidUTF8(name, "?"): {a, b}}
		all := headerText(h)
		for _, values := range all {
			for _, v := range values {
				if s, ok := v.(string); ok && (strings.Contains(s, "\x00") || !utf8.ValidString(s)) {
					t.Errorf("PostgreSQL can't take %q", s)
				}
			}
		}
		text, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseHeaderText(text)
		if err != nil || !reflect.DeepEqual(back, h) {
			t.Errorf("%q came back as %q, %v", h, back, err)
		}
	})
}
