package maintenance

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestALongDeleteKeepsNobodyWaiting: while the rows of a large plain table go, others are archived, and
// messages leave the stream.
func TestALongDeleteKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	const large = 24000 // twelve seconds
	f := newPublishing(t, pgtest.Own(t, 0, "wal_level=logical"), natstest.Server(t).URL(), "turns",
		"ARCHIVE_URL=file://"+t.TempDir(), "ARCHIVE_SEGMENT_AGE=0s", "RETAIN_TABLE_METHOD=delete",
		"RETAIN_STREAM_MESSAGES=1", "MAINTAIN_EVERY=1s")
	r := &retained{Installation: f, t: t}
	harness.Exec(t, f.Conn, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'doc' || n % 3, "+
		"'a', n, '{}' FROM generate_series(1, $1::int) n", large)
	harness.AwaitMessages(t, f.JS, f.Stream, large)
	rows := func() int {
		t.Helper()
		return harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id <> 'now'")
	}
	harness.Eventually(t, "they are counted, so that they go slowly", func() error {
		n := harness.Value[int](t, f.Conn, "SELECT pg_stat_get_tuples_inserted('outbox'::regclass)")
		if n < large {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	m := r.maintain()
	harness.Eventually(t, "rows go", func() error {
		r.beat()
		if rows() == large {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	rounds := func() int { return strings.Count(m.log.String(), "removed from the stream") }
	before := rounds()
	harness.Eventually(t, "a round later", func() error {
		r.beat()
		if n := rounds(); n == before {
			return errors.New(m.log.String())
		}
		return nil
	}, m.child)
	if n := rows(); n == 0 {
		t.Errorf("all rows had to go before\n%s", m.log.String())
	}
	harness.Eventually(t, "all rows go", func() error {
		if n := rows(); n > 0 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	}, m.child)
	r.MustStop(t)
}
