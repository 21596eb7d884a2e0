package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestParkedDocumentIsReleasedInOrder(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("b", "a", "b", "a")
	w.want("b2 b4", "a1 poison 3, a3 behind 0, a5 behind 0")
	w.out() // nobody asked
	w.restart()
	w.come("a", "b")
	w.want("b2 b4 b7", "a1 poison 3, a3 behind 0, a5 behind 0, a6 behind 0")
	w.word("a", "retry")
	w.out()
	w.come("a")
	w.want("b2 b4 b7 a1 a3 a5 a6 a8", "")
	if len(w.count) != 0 || w.may("a") {
		t.Errorf("%v is still kept", w.count)
	}
	if want := "a1/4"; !slices.Contains(w.tried, want) {
		t.Errorf("attempts %v, want %s", w.tried, want)
	}
}

func TestSkippedEventHasNoEffect(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.fail("b")
	w.come("a", "a")
	w.word("a", "skip")
	w.word("b", "skip")
	w.out()
	w.come("a", "b")
	w.want("a3 a4 a5 b6", "")
}

// A retry that fails parks the document again, with the attempts of before and those of now; what was behind
// stays behind.
func TestARetryThatFailsParksTheDocumentAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a", "a", "a")
	w.refuse = func(e *Event) error {
		if e.seq == 1 || e.seq == 3 {
			return errors.New("still not")
		}
		return nil
	}
	w.word("a", "retry")
	w.out()
	w.want("", "a1 poison 6, a2 behind 0, a3 behind 0, a4 behind 0")
	if got, want := strings.Join(w.tried, " "), "a1/4 a1/5 a1/6"; got != want {
		t.Errorf("attempts %s, want %s", got, want)
	}
	w.refuse = func(e *Event) error {
		if e.seq == 3 {
			return Poison(errors.New("never"))
		}
		return nil
	}
	w.word("a", "retry")
	w.out()
	w.want("a1 a2", "a3 poison 1, a4 behind 0")
	w.refuse = nil
	w.come("a")
	w.word("a", "retry")
	w.out()
	w.want("a1 a2 a3 a4 a5", "")
}

// While a document with many events is released, in batches, new ones come: they go behind the others.
func TestEventsThatComeDuringAReleaseGoBehind(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	var want []string
	for i := range 3 * releaseEvents {
		w.come("a")
		want = append(want, fmt.Sprintf("a%d", i+1))
	}
	w.word("a", "retry")
	steps := 0
	for again := true; again; steps++ {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, w.handle); err != nil {
			t.Fatal(err)
		}
		if steps == 0 {
			if n := len(w.effects); n != releaseEvents {
				t.Errorf("%d events in one transaction, want %d", n, releaseEvents)
			}
			w.come("a", "b")
			w.restart() // the word is handed on: another session goes on
			w.out()
			again = false
		}
	}
	w.come("a")
	n := 3*releaseEvents + 1
	got := slices.DeleteFunc(slices.Clone(w.effects), func(s string) bool { return s[0] == 'b' })
	want = append(want, fmt.Sprintf("a%d", n), fmt.Sprintf("a%d", n+1), fmt.Sprintf("a%d", n+3))
	if !slices.Equal(got, want) {
		t.Errorf("effects\n%v, want\n%v", got, want)
	}
	w.effects = nil
	w.want("", "")
}

// What the commit refuses is the event's fault as well: the others of the transaction have their effect, it
// is parked again.
func TestAnEventThatTheCommitRefusesIsParkedAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	if _, err := w.pool.Exec(t.Context(), `CREATE TABLE effect (seq bigint UNIQUE DEFERRABLE INITIALLY
		DEFERRED);
		INSERT INTO effect VALUES (3)`); err != nil {
		t.Fatal(err)
	}
	w.fail("a")
	w.come("a", "a", "a")
	w.word("a", "retry")
	handle := func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if _, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1)`, e.seq); err != nil {
			return err
		}
		return w.handle(ctx, tx, e)
	}
	for again := true; again; {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, handle); err != nil {
			t.Fatal(err)
		}
	}
	w.want("a1 a2", "a3 poison 3, a4 behind 0")
}

// A release that a crash, a lost session or the end of its context cuts off leaves everything as it was.
func TestAReleaseThatIsCutOffChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a")
	w.word("a", "retry")
	lost := errors.New("session lost")
	late := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		return w.within(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := do(ctx, tx); err != nil {
				return err
			}
			return lost
		})
	}
	if _, _, err := w.release(t.Context(), t.Context(), "a", late, w.handle); !errors.Is(err, lost) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.cfg.Backoff = Backoff{First: time.Hour, Max: time.Hour} // nobody waits any more
	w.refuse = func(*Event) error { cancel(); return errors.New("it failed while everything stopped") }
	if _, _, err := w.release(ctx, t.Context(), "a", w.within, w.handle); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	w.refuse = func(*Event) error {
		cancel()
		return errors.New("it failed while the consumer was told to stop")
	}
	if left, again, err := w.release(t.Context(), ctx, "a", w.within, w.handle); !left || again ||
		err != nil {
		t.Error(left, again, err)
	}
	// the operator thinks again, in the middle of it
	w.refuse = func(*Event) error { w.word("a", "skip"); return nil }
	if _, _, err := w.release(t.Context(), t.Context(), "a", w.within, w.handle); err == nil ||
		!strings.Contains(err.Error(), "1 of 2 rows") {
		t.Error(err)
	}
	w.want("", "a1 poison 3 skip, a2 behind 0")
}

// TestAReleaseThatConflictsIsMadeAgain: not by its events, but by where it begins.
func TestAReleaseThatConflictsIsMadeAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.word("a", "retry")
	conflicts := 2
	within := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		if conflicts--; conflicts >= 0 {
			return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001"}
		}
		return w.within(ctx, do)
	}
	if _, _, err := w.release(t.Context(), t.Context(), "a", within, w.handle); err != nil {
		t.Error(err)
	}
	w.want("a1", "")
}

// TestParkingThatConflictsIsDoneAgain: of an event, and of a released one that has failed again.
func TestParkingThatConflictsIsDoneAgain(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	parks := 0
	within := func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error {
		if parks++; parks%2 == 0 {
			return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001"}
		}
		return w.within(ctx, do)
	}
	r := &run{cfg: w.cfg, met: w.met, parking: w.parking, fails: &failures{}, work: t.Context(),
		flow: newFlow(1, 1, 0), store: &conflicting{moving{}, within}}
	number, err := r.flow.add(t.Context(), 1, 1, time.Time{})
	must.Succeed(t, err)
	e := w.event("a")
	e.Attempt = 3
	parks = 1
	must.Succeed(t, newWorker(r, 0, offset{}).park(item{event: e, number: number}, errors.New("no")))
	w.want("", "a1 poison 3")

	w.word("a", "retry")
	w.refuse = func(*Event) error { return Poison(errors.New("no")) }
	parks = 0
	if _, _, err := w.release(t.Context(), t.Context(), "a", within, w.handle); err != nil {
		t.Error(err)
	}
	w.want("", "a1 poison 4")
}

// conflicting is a store in whose transactions something may happen.
type conflicting struct {
	moving
	within func(ctx context.Context, do func(ctx context.Context, tx pgx.Tx) error) error
}

func (c *conflicting) move(ctx context.Context, _ string, _ int, _, _ offset,
	do func(context.Context, pgx.Tx) error) error {
	return c.within(ctx, do)
}

func (c *conflicting) transactional() bool { return true }

// TestAStopEndsAReleaseThatIsMadeSmaller: each attempt may take as long as a transaction may.
func TestAStopEndsAReleaseThatIsMadeSmaller(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	w.come("a", "a", "a")
	w.word("a", "retry")
	stop, cancel := context.WithCancel(t.Context())
	ends := func(ctx context.Context, tx pgx.Tx, e *Event) error {
		if e.seq == 4 {
			cancel()
			must.Succeed(t, tx.Conn().Close(ctx))
		}
		return w.handle(ctx, tx, e)
	}
	left, again, err := w.release(t.Context(), stop, "a", w.within, ends)
	if !left || again || err != nil {
		t.Error(left, again, err)
	}
	if got := len(w.tried); got != 4 {
		t.Errorf("%d calls", got)
	}
}

// What one transaction releases is bounded in bytes too; an event that is larger than that goes alone.
func TestAReleaseIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.fail("a")
	for range 3 {
		e := w.event("a")
		e.raw.Data = make([]byte, releaseBytes/2+1)
		w.tx(func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.parkBehind(ctx, tx, []*Event{e})
			return err
		})
	}
	w.word("a", "retry")
	var steps []int
	for again := true; again; {
		var err error
		if _, again, err = w.release(t.Context(), t.Context(), "a", w.within, w.handle); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, len(w.effects))
	}
	if want := []int{2, 3, 4}; !slices.Equal(steps, want) {
		t.Errorf("after the steps %v effects, want %v", steps, want)
	}
}

// A replayed event is parked before those of its document that an operator has asked to release. What was
// said of them stays so.
func TestAReplayedEventIsParkedBeforeWhatIsToBeReleased(t *testing.T) {
	t.Parallel()
	for _, how := range []string{releaseRetry, releaseSkip} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			w := newWard(t)
			w.come("a")
			w.fail("a")
			w.come("a")
			w.word("a", how)
			refused := uint64(1)
			w.refuse = func(e *Event) error {
				if e.seq == refused {
					return errors.New("not now")
				}
				return nil
			}
			w.replayed("a", false, 1)
			w.want("a1", "a2 poison 3 "+how+", a3 behind 0, a1 poison 1")
			w.word("a", releaseRetry)
			w.restart()
			refused = 2
			w.out()
			if how == releaseSkip {
				w.want("a1 a1 a3", "")
				return
			}
			w.want("a1 a1", "a2 poison 6, a3 behind 0")
			w.come("a")
			w.want("a1 a1", "a2 poison 6, a3 behind 0, a4 behind 0")
		})
	}
}

// TestDocumentsThatAreNotToBeReleasedYetAreNotInTheWay: a word behind a row that has none, as of a replay, is
// no request. As many documents as are read at a time have one.
func TestDocumentsThatAreNotToBeReleasedYetAreNotInTheWay(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	for i := range maxReleases {
		w.fail(fmt.Sprintf("d%d", i))
		w.come(fmt.Sprintf("d%d", i))
	}
	_, err := w.pool.Exec(t.Context(), "UPDATE outflow_parked SET release = 'retry' WHERE cause = 'behind'")
	if err != nil {
		t.Fatal(err)
	}
	w.fail("z")
	w.word("z", releaseRetry)
	w.out()
	if got := strings.Join(w.effects, " "); got != fmt.Sprint("z", w.next-1) {
		t.Errorf("effects %q", got)
	}
}
