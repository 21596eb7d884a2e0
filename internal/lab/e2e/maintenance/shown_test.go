package maintenance

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// pages is what an outflow maintain serves.
func (r *retained) pages(settings ...string) (*maintainer, *harness.Outflow) {
	r.t.Helper()
	port, err := freeport.Port()
	harness.Must(r.t, err)
	listen := fmt.Sprint("127.0.0.1:", port)
	return r.maintain(append(settings, "OUTFLOW_MAINTAIN_LISTEN="+listen)...),
		&harness.Outflow{T: r.t, Listen: listen}
}

// shows waits for lines of a page, which are regular expressions, while rows come.
func (r *retained) shows(from *harness.Outflow, path string, code int, lines ...string) {
	r.t.Helper()
	r.showsAfter(r.beat, from, path, code, lines...)
}

func (r *retained) showsAfter(each func(), from *harness.Outflow, path string, code int, lines ...string) {
	r.t.Helper()
	harness.Eventually(r.t, fmt.Sprint(path, " shows ", lines), func() error {
		each()
		got, page := from.Get(path)
		for _, line := range lines {
			if got != code || !regexp.MustCompile("(?m)^"+line).MatchString(page) {
				return fmt.Errorf("%d, not %q in\n%s", got, line, page)
			}
		}
		return nil
	})
}

// TestMaintainShowsItself: by its own pages, and by those of outflow run, which asks neither the archive nor
// outflow maintain. Both say what is ahead, which slot is waited for, how far the archive is, and what fails.
func TestMaintainShowsItself(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "shown", "RETAIN_STREAM_MESSAGES=1")
	harness.Exec(t, r.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", r.Slot+"_other")
	harness.Exec(t, r.Conn, "CREATE TABLE day_9 PARTITION OF outbox FOR VALUES FROM ('2024-05-09') TO "+
		"('2024-05-10')")
	_, first := r.pages()
	both := []string{
		`outflow_partitions_ahead{slot="` + r.Slot + `"} [345]$`,
		`outflow_rows_blocked_since_timestamp_seconds{by="` + r.Slot + `_other",slot="` + r.Slot + `"} \d`,
		`outflow_archive_sequence{slot="` + r.Slot + `"} [1-9]`,
		`outflow_archive_segment_age_seconds{slot="` + r.Slot + `"} 0`,
		`outflow_maintain_reported_timestamp_seconds{.*} \d`,
		`outflow_maintain_interval_seconds{.*} 1$`,
		`outflow_maintain_part_success_timestamp_seconds{part="archive",.*} \d`,
		`outflow_maintain_part_success_timestamp_seconds{part="partition",.*} \d`,
		`outflow_stream_kept_messages{by="\w+",.*} \d`,
	}
	r.shows(first, "/metrics", 200, append(both, `outflow_maintain_active{.*} 1$`)...)
	r.shows(r.Outflow, "/metrics", 200, both...)
	r.shows(first, "/healthz", 200, "active")
	r.shows(first, "/readyz", 200, "active")
	if _, page := first.Get("/metrics"); strings.Contains(page, "outflow_build_info") {
		t.Error("it looks like one that publishes")
	}

	m, second := r.pages()
	r.shows(second, "/metrics", 200, `outflow_maintain_active{.*} 0$`)
	r.shows(second, "/readyz", 200, "standing by")
	if _, page := second.Get("/metrics"); strings.Contains(page, "outflow_archive_") {
		t.Error("what it does not know is shown")
	}
	harness.Must(t, m.child.Kill())

	status := r.MustRun("status")
	r.MustContain("status", status, "partitions", "enough ahead", "wait for slot "+r.Slot+"_other", "archive",
		"stream retention")
	var report struct {
		Partitions  struct{ Ahead int }
		Maintenance struct{ Archive struct{ Sequence int } }
	}
	if err := json.Unmarshal([]byte(r.MustRun("status", "--json")), &report); err != nil ||
		report.Partitions.Ahead < 3 || report.Maintenance.Archive.Sequence == 0 {
		t.Errorf("%v, %+v", err, report)
	}
	r.shows(r.Outflow, "/", 200, "<.*<h3>Partitions</h3>", "<.*<h3>Archive</h3>")

	// a part fails, and says so everywhere
	stream, err := r.JS.Stream(t.Context(), r.Stream)
	harness.Must(t, err)
	harness.Eventually(t, "the archive has a gap", func() error {
		harness.Must(t, stream.Purge(t.Context()))
		r.beat()
		if _, page := first.Get("/metrics"); !strings.Contains(page, `code="archive_gap"`) {
			return fmt.Errorf("%s", page)
		}
		return nil
	})
	fails := []string{
		`outflow_maintain_part_fault{code="archive_gap",part="archive",slot="` + r.Slot + `"} 1$`,
		`outflow_maintain_part_failing_since_timestamp_seconds{part="archive",.*} \d`}
	r.shows(first, "/metrics", 200, fails...)
	r.shows(r.Outflow, "/metrics", 200, fails...)
	r.shows(first, "/readyz", 503, "archive fails since .*removed messages")
	r.shows(first, "/healthz", 200, "active")
	r.MustContain("status", r.MustRun("status"), "archive_gap")
	harness.Exec(t, r.Conn, "SELECT pg_drop_replication_slot($1)", r.Slot+"_other")
	r.MustStop(t)
}

// TestThePageOfRunDependsOnNoneOfIt: a partition that somebody has locked, and a report that nobody can read,
// cost their own rows alone.
func TestThePageOfRunDependsOnNoneOfIt(t *testing.T) {
	t.Parallel()
	// a server of its own: a transaction that is open keeps others from making slots
	r := newMaintainedAt(t, pgtest.Own(t, 0), "unread")
	r.shows(r.Outflow, "/metrics", 200, `outflow_partitions_ahead{.*} [345]$`)
	store := checkpoint.NewStore(jsapi.New(r.JS.Conn(), ""),
		checkpoint.StoreConfig{Stream: r.Stream, Slot: r.Slot})
	harness.Must(t, store.SaveMaintained(t.Context(), []byte(`{"parts": 7}`)))
	r.shows(r.Outflow, "/status.json", 200, `.*"maintenance":{[^}]*"error":"what outflow maintain has left`)
	lock := harness.Connect(t, r.URL)
	harness.Exec(t, lock, "BEGIN")
	harness.Exec(t, lock, "LOCK TABLE outflow_partitions IN ACCESS EXCLUSIVE MODE")
	harness.Eventually(t, "the partitions can't be read", func() error {
		_, page := r.Get("/status.json")
		if !regexp.MustCompile(`"partitions":{[^}]*"error":"read table[^}]*lock timeout`).MatchString(page) {
			return fmt.Errorf("%s", page)
		}
		return nil
	})
	r.showsAfter(func() {}, r.Outflow, "/metrics", 200, `outflow_postgres_up{slot="`+r.Slot+`"} 1$`)
	harness.Exec(t, lock, "ROLLBACK")
	r.shows(r.Outflow, "/status.json", 200, `.*"partitions":{"read_at":"[^"]*","managed":true`)
	r.MustStop(t)
}

// TestMaintainOnceIsSeenByRun: from cron, where nobody can scrape it.
func TestMaintainOnceIsSeenByRun(t *testing.T) {
	t.Parallel()
	r := newMaintained(t, "cron")
	r.beat()
	r.MustRun("maintain", "--once")
	r.shows(r.Outflow, "/metrics", 200, `outflow_maintain_reported_timestamp_seconds{.*} \d`)
	if _, page := r.Get("/metrics"); strings.Contains(page, "outflow_maintain_interval_seconds{") {
		t.Error("how often it runs is said after the first time")
	}
	at := harness.Metric(t, r.Outflow, "outflow_maintain_reported_timestamp_seconds")
	harness.Eventually(t, "the interval is known", func() error {
		r.MustRun("maintain", "--once")
		if _, known := r.Series("outflow_maintain_interval_seconds"); !known {
			return fmt.Errorf("after %v", time.Unix(int64(at), 0))
		}
		return nil
	})
	r.MustStop(t)
}
