package consumertest

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nuid"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// Kit is a test of a handler. Handler or Start, Pool, Events and Effects are required.
type Kit struct {
	Handler consumer.Handler
	// Start makes the handler, instead of Handler. It is called again after each crash, as a new process
	// would.
	Start func() consumer.Handler

	Pool    *pgxpool.Pool // database of the handler's effects and the offsets
	SQL     *sql.DB       // the same database, for a handler that uses Event.SQLTx; otherwise nil
	Events  []Event
	Effects Effects

	// Config is that of the consumer: Subject, Schema, Partitions, Isolation, ... Name and Stream may be
	// empty. The kit sets DatabaseSchema.
	Config consumer.Config
	// Parks says that the handler refuses some events for good, and which are parked is compared as well.
	// Otherwise a parked event is an error.
	Parks bool

	MaxCrashes int           // in a run; if there are more points, some are left out. Default 200
	Timeout    time.Duration // of a run from one crash to the next. Default 30 s
}

// ExactlyOnce tests that each event takes effect exactly once: that the effects are the same with crashes and
// failures as without.
func ExactlyOnce(t testing.TB, pool *pgxpool.Pool, h consumer.Handler, events []Event, effects Effects) {
	t.Helper()
	k := Kit{Handler: h, Pool: pool, Events: events, Effects: effects}
	if err := k.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// Difference says that the effects of a run differ from those of the undisturbed one.
type Difference struct {
	Run       string // what happened in it
	Want, Got string // the effects of the undisturbed run, and of this one
}

// Error implements error. It shows the lines that differ.
func (d *Difference) Error() string {
	return fmt.Sprintf("%s: the effects are not those of the undisturbed run (- expected, + found):\n%s",
		d.Run, diff(d.Want, d.Got))
}

// Check runs the handler undisturbed, with each event in a transaction of its own and with many in one; with
// a crash at every point; and with a failure of each first attempt. It returns a [*Difference] for the first
// run whose effects differ.
func (k Kit) Check(ctx context.Context) error {
	if k.Start == nil {
		h := k.Handler
		k.Start = func() consumer.Handler { return h }
	}
	if k.Pool == nil || k.Effects.Reset == nil || k.Effects.Snapshot == nil || len(k.Events) == 0 ||
		k.Start() == nil {
		return errors.New("consumertest: a kit needs Pool, Effects, Events, and Handler or Start")
	}
	k.Config.Name, k.Config.Stream = cmp.Or(k.Config.Name, "consumertest"), cmp.Or(k.Config.Stream,
		"CONSUMERTEST")
	k.Config.Partitions, k.Config.Batch = cmp.Or(k.Config.Partitions, 4), cmp.Or(k.Config.Batch, 16)
	k.MaxCrashes, k.Timeout = cmp.Or(k.MaxCrashes, 200), cmp.Or(k.Timeout, 30*time.Second)
	if k.Config.Backoff == (consumer.Backoff{}) {
		k.Config.Backoff = consumer.Backoff{First: time.Millisecond, Max: 10 * time.Millisecond}
	}
	k.Config.DatabaseSchema = "consumertest_" + strings.ToLower(nuid.Next())
	schema := pgx.Identifier{k.Config.DatabaseSchema}.Sanitize()
	defer k.Pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+schema+
		" CASCADE") //nolint:errcheck // a left-over does no harm

	want, err := k.run(ctx, script{name: "undisturbed, one event in a transaction", batch: 1})
	if err != nil {
		return err
	}
	every := max(1, (4*len(k.Events)+k.MaxCrashes-1)/k.MaxCrashes)
	for _, s := range []script{
		{name: "undisturbed, many events in a transaction", batch: k.Config.Batch},
		{name: "each event fails after the handler at the first attempt", batch: 1, fail: map[uint64]bool{}},
		{name: "a crash at every point, one event in a transaction", batch: 1,
			crash: (&everywhere{every: every, seen: map[moment]bool{}}).at},
		{name: "a crash at every point, many events in a transaction", batch: k.Config.Batch,
			crash: (&everywhere{every: every, seen: map[moment]bool{}}).at},
	} {
		got, err := k.run(ctx, s)
		if err != nil {
			return err
		}
		if got == want {
			continue
		}
		if spot, also, err := k.locate(ctx, s, want); err != nil {
			return err
		} else if also != "" {
			s.name, got = "a crash "+spot, also
		}
		return &Difference{Run: s.name, Want: want, Got: got}
	}
	return nil
}

// locate looks among the first events for a single crash that makes the difference.
func (k Kit) locate(ctx context.Context, s script, want string) (where, got string, err error) {
	const events = 10
	if s.crash == nil {
		return "", "", nil
	}
	for seq := range min(events, len(k.Events)) {
		for point := AtBegin; point <= AtDone; point++ {
			at := moment{point, uint64(seq) + 1}
			one := script{name: "a crash " + at.String(), batch: 1,
				crash: (&Crash{Point: point, Sequence: at.sequence}).at}
			if got, err := k.run(ctx, one); err != nil || got != want {
				return at.String(), got, err
			}
		}
	}
	return "", "", nil
}

// script is what happens in a run.
type script struct {
	name  string
	batch int
	crash func(stream.Point, uint64) error
	fail  map[uint64]bool // not nil: each first attempt fails; the sequences that have failed
}

// run runs the handler over all events and returns its effects.
func (k Kit) run(ctx context.Context, s script) (snapshot string, err error) {
	wrong := func(err error) (string, error) { return "", fmt.Errorf("consumertest: %s: %w", s.name, err) }
	if err := k.Effects.Reset(ctx); err != nil {
		return wrong(fmt.Errorf("Effects.Reset: %w", err))
	}
	schema := pgx.Identifier{k.Config.DatabaseSchema}.Sanitize()
	if _, err := k.Pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE; CREATE SCHEMA "+
		schema); err != nil {
		return wrong(err)
	}
	events := NewStream()
	events.Add(k.Events...)
	for done := false; !done; {
		if done, err = k.process(ctx, s, events); err != nil {
			return wrong(err)
		}
	}
	if snapshot, err = k.Effects.Snapshot(ctx); err != nil {
		return wrong(fmt.Errorf("Effects.Snapshot: %w", err))
	}
	parked, cause, err := k.parked(ctx)
	switch {
	case err != nil:
		return wrong(err)
	case parked != "" && !k.Parks:
		return wrong(fmt.Errorf("the handler refuses an event for good (set Kit.Parks if it is to): %s",
			cause))
	case parked != "":
		snapshot += "parked:\n" + parked
	}
	return snapshot, nil
}

// process runs the consumer until it crashes or all events are done.
func (k Kit) process(ctx context.Context, s script, events *Stream) (done bool, err error) {
	cfg := k.Config
	cfg.Batch = s.batch
	offsets := consumer.Postgres(k.Pool)
	if k.SQL != nil {
		offsets = consumer.PostgresSQL(k.SQL)
	}
	c, err := newConsumer(events, s.crash, offsets, cfg)
	if err != nil {
		return false, err
	}
	last, err := lastOf(c, events)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	var mu sync.Mutex
	handler := k.Start()
	go func() {
		ended <- c.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
			err := handler(ctx, tx, e)
			mu.Lock()
			defer mu.Unlock()
			if err == nil && s.fail != nil && !s.fail[e.Sequence] {
				s.fail[e.Sequence] = true
				err = errFirst
			}
			return err
		})
	}()
	timeout := time.NewTimer(k.Timeout)
	defer timeout.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case err := <-ended:
			if !errors.Is(err, ErrCrash) {
				return false, cmp.Or(err, context.Cause(ctx), errors.New("the consumer ended by itself"))
			}
			// It has not given its lease back. Don't wait until that runs out.
			_, err = k.Pool.Exec(ctx, "UPDATE "+k.table("outflow_member")+" SET expires = now()")
			return false, err
		case <-look.C:
			all, at, err := k.done(ctx, last)
			if err == nil && !all {
				select {
				case <-timeout.C:
					err = fmt.Errorf("not done after %v: %s", k.Timeout, at)
				default:
					continue
				}
			}
			cancel()
			// a crash after the last offset has moved changes nothing
			if end := <-ended; end != nil && !errors.Is(end, ErrCrash) {
				err = errors.Join(err, end)
			}
			return true, err
		}
	}
}

// errFirst is how a first attempt fails.
var errFirst = errors.New("the first attempt fails, as the test wants")

func (k Kit) table(name string) string {
	return pgx.Identifier{k.Config.DatabaseSchema, name}.Sanitize()
}

// lastOf returns the sequence of the last event of each partition that has one.
func lastOf(c *consumer.Consumer, s *Stream) (map[int]int64, error) {
	last := map[int]int64{}
	for i := range s.messages {
		p, err := stream.Partition(c, &s.messages[i])
		if err != nil {
			return nil, err
		}
		last[p] = int64(s.messages[i].Sequence)
	}
	return last, nil
}

// done reports whether the offsets are at the last events.
func (k Kit) done(ctx context.Context, last map[int]int64) (all bool, at string, err error) {
	offsets := map[int]int64{}
	var partition int
	var seq int64
	rows, err := k.Pool.Query(ctx, "SELECT partition, seq FROM "+k.table("outflow_mark")+
		" WHERE source = 'live'")
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&partition, &seq}, func() error {
			offsets[partition] = seq
			return nil
		})
	}
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && refused.Code == "42P01" {
		return false, "the consumer has not made its tables", nil
	}
	if err != nil {
		return false, "", err
	}
	for p, seq := range last {
		if offsets[p] < seq {
			return false, fmt.Sprintf("partition %d is at sequence %d of %d", p, offsets[p], seq), nil
		}
	}
	return true, "", nil
}

// parked lists the parked events, and says why the first one is.
func (k Kit) parked(ctx context.Context) (list, cause string, err error) {
	rows, err := k.Pool.Query(ctx, "SELECT format(E'event %s %s\n', seq, cause), format('event %s of "+
		"document %s: %s', seq, document, error)"+
		" FROM "+k.table("outflow_parked")+" ORDER BY seq")
	if err != nil {
		return "", "", err
	}
	var line, why string
	_, err = pgx.ForEachRow(rows, []any{&line, &why}, func() error {
		list += line
		if cause == "" {
			cause = why
		}
		return nil
	})
	return list, cause, err
}

// diff shows the first lines that are in one text only.
func diff(want, got string) string {
	const most = 40
	count := map[string]int{}
	for line := range strings.Lines(got) {
		count[line]++
	}
	var b strings.Builder
	n := 0
	show := func(sign, line string) {
		if n++; n <= most {
			fmt.Fprintf(&b, "  %s %.300s\n", sign, strings.TrimRight(line, "\n"))
		}
	}
	for line := range strings.Lines(want) {
		if count[line]--; count[line] < 0 {
			show("-", line)
		}
	}
	for line := range strings.Lines(got) {
		if count[line] > 0 {
			count[line]--
			show("+", line)
		}
	}
	switch {
	case n == 0:
		return "  the same lines, in another order"
	case n > most:
		fmt.Fprintf(&b, "  and %d more lines\n", n-most)
	}
	return strings.TrimRight(b.String(), "\n")
}
