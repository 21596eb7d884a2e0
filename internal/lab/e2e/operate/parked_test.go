package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	consume "github.com/outflowhq/outflow/consumer" // consumer is a helper of these tests
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// clinic is an outflow with a consumer that refuses payloads with the word bad in them, until it is mended.
type clinic struct {
	*harness.Outflow
	conn   *pgx.Conn
	pool   *pgxpool.Pool
	nats   string
	mended atomic.Bool
	next   int
}

func newClinic(t *testing.T, slot string) *clinic {
	t.Helper()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), slot, "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	o.AwaitReady()
	pool, err := pgxpool.New(t.Context(), url)
	harness.Must(t, err)
	t.Cleanup(pool.Close)
	harness.Exec(t, conn, `CREATE TABLE effect (at bigint GENERATED ALWAYS AS IDENTITY, doc text, key text)`)
	return &clinic{Outflow: o, conn: conn, pool: pool, nats: ns.URL()}
}

// consume runs the consumer until the function that it returns is called.
func (c *clinic) consume(t *testing.T) (stop func()) {
	t.Helper()
	con, err := consume.New(harness.JetStream(t, c.nats), consume.Postgres(c.pool), consume.Config{
		Name:        "orders",
		Stream:      c.Stream,
		MaxAttempts: 2,
		ParkAfter:   1,
		Backoff: consume.Backoff{First: time.Millisecond,
			Max: time.Millisecond},
	})
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- con.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *consume.Event) error {
			if strings.Contains(string(e.Data), "bad") && !c.mended.Load() {
				return errors.New("the payload is bad")
			}
			_, err := tx.Exec(ctx, `INSERT INTO effect (doc, key) VALUES ($1, $2)`, e.Document, e.Key)
			return err
		})
	}()
	var once atomic.Bool
	stop = func() {
		if cancel(); once.CompareAndSwap(false, true) {
			if err := <-ended; err != nil {
				t.Errorf("Run: %v", err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

// write writes events of documents, one after the other.
func (c *clinic) write(t *testing.T, payload string, documents ...string) {
	t.Helper()
	for _, document := range documents {
		c.next++
		harness.Insert(t, c.conn, document, c.next, payload)
	}
}

// effects waits for the effects of a document: the counters, in their order.
func (c *clinic) effects(t *testing.T, document, want string) {
	t.Helper()
	harness.Eventually(t, "effects of "+document, func() error {
		var got string
		err := c.pool.QueryRow(t.Context(), `SELECT coalesce(string_agg((split_part(key, ':', 2)::int)::text,
			' ' ORDER BY at), '') FROM effect
			WHERE doc = $1`, document).Scan(&got)
		if err == nil && got != want {
			err = fmt.Errorf("%q, want %q", got, want)
		}
		return err
	})
}

// parked waits until so many events of a document are parked.
func (c *clinic) parked(t *testing.T, document string, events int64) (d consume.ParkedDocument) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d parked events of %s", events, document), func() error {
		out, errOut, code := c.Run("parked", "list", "orders", "--json")
		var all []consume.ParkedDocument
		if code != 0 {
			return errors.New(errOut)
		}
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			return fmt.Errorf("%s: %w", out, err)
		}
		for _, d = range all {
			if d.Document == document && d.Events == events {
				return nil
			}
		}
		return errors.New(out)
	})
	return d
}

// says runs a command, which must end so and print each of the words.
func (c *clinic) says(t *testing.T, code int, args []string, words ...string) {
	t.Helper()
	out, errOut, got := c.Run(append([]string{"parked"}, args...)...)
	if got != code {
		t.Errorf("outflow parked %v: exit code %d, want %d\n%s%s", args, got, code, out, errOut)
	}
	for _, word := range words {
		if !strings.Contains(out+errOut, word) {
			t.Errorf("outflow parked %v: no %q in\n%s%s", args, word, out, errOut)
		}
	}
}

// TestParkedEventsAreRetriedAndSkippedInOrder: what a running consumer could not process is shown, retried
// and skipped, in the order of its document, while others go on.
func TestParkedEventsAreRetriedAndSkippedInOrder(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	c := newClinic(t, "parked")
	stop := c.consume(t)
	c.write(t, `{}`, "a", "b")
	c.write(t, `{"n": "bad"}`, "a")
	c.write(t, `{}`, "a", "b", "a")
	c.effects(t, "b", "2 5")
	c.effects(t, "a", "1")
	if d := c.parked(t, "a", 3); d.First.Error != "the payload is bad" || d.First.Attempts != 2 ||
		d.First.Cause != "poison" {
		t.Errorf("%+v", d)
	}
	c.says(t, 0, []string{"list"}, "orders", "a", "3", "the payload is bad")
	c.says(t, 0, []string{"show", "orders", "a"}, "poison", "behind", "the payload is bad", `{"n": "bad"}`,
		"outbox.a", "Outflow")
	c.says(t, 0, []string{"show", "orders", "a", "--json", "--limit", "1"}, `"attempts": 2`, `"n": "bad"`,
		`"events": 3`)

	c.says(t, 1, []string{"retry", "orders", "a", "--wait"}, "failed again", "3 events", "the payload is bad",
		"1 of 1")
	if d := c.parked(t, "a", 3); d.First.Attempts != 4 {
		t.Errorf("%d attempts, want 4", d.First.Attempts)
	}
	c.mended.Store(true)
	c.says(t, 0, []string{"retry", "orders", "a", "--wait"}, "a: released")
	c.write(t, `{}`, "a")
	c.effects(t, "a", "1 3 4 6 7")

	c.mended.Store(false)
	c.write(t, `"bad"`, "a", "b")
	c.write(t, `{}`, "a", "b")
	c.parked(t, "a", 2)
	c.parked(t, "b", 2)
	c.says(t, 0, []string{"skip", "orders", "a", "--wait"}, "a: released")
	c.effects(t, "a", "1 3 4 6 7 10")

	stop()
	c.mended.Store(true)
	c.says(t, 1, []string{"retry", "orders", "--all", "--wait", "--timeout", "10ms"}, "does not run",
		"b: still to be released, 2 events")
	c.says(t, 0, []string{"retry", "orders", "--all", "--json"}, `"state": "asked"`)
	c.consume(t)
	c.effects(t, "b", "2 5 9 11")
	c.says(t, 0, []string{"list"}, "nothing is parked")
	c.says(t, 0, []string{"retry", "orders", "--all"}, "nothing is parked")

	for _, wrong := range []struct {
		code  int
		args  []string
		words []string
	}{
		{2, []string{"list", "other"}, []string{`no consumer "other"`, "orders"}},
		{2, []string{"retry", "other", "a"}, []string{`no consumer "other"`}},
		{2, []string{"retry", "orders", "a", "--wait"},
			[]string{`document "a" of consumer orders is not parked`, "outflow parked list orders"}},
		{2, []string{"retry", "orders", "a", "--database", c.pool.Config().ConnString()},
			[]string{"`outflow parked list orders --database=" + finding.Word(c.pool.Config().ConnString())}},
		{2, []string{"show", "orders", "a"}, []string{"is not parked"}},
		{2, []string{"skip", "orders"}, []string{"--help"}},
		{2, []string{"retry", "orders"}, []string{"--all"}},
		{2, []string{"retry", "orders", "a", "--all"}, []string{"--all"}},
		{3, []string{"list", "--schema", "elsewhere"}, []string{"no tables of a consumer", "--schema"}},
		{3, []string{"list", "--database", pgtest.Database(t, pgtest.Server(t))},
			[]string{"no tables of a consumer", "--database"}},
		{3, []string{"list", "--database", "postgres://127.0.0.1:1/none"}, []string{"--database", "refused"}},
		{2, []string{"list", "--database", "postgres://%"}, []string{"--database", "postgres://user@host"}},
	} {
		c.says(t, wrong.code, wrong.args, wrong.words...)
	}
	c.Env = append(c.Env, "OUTFLOW_CONSUMER_DATABASE=postgres://127.0.0.1:1/none")
	c.says(t, 3, []string{"list"}, "OUTFLOW_CONSUMER_DATABASE", "refused")
}
