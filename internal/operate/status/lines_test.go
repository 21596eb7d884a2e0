package status

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/relay"
)

// JetStream takes almost any name for a consumer, and a terminal obeys escape sequences.
func TestAConsumersNameSendsNothingToTheTerminal(t *testing.T) {
	t.Parallel()
	r := Report{Report: &overview.Report{}}
	r.Consumers = []watch.Consumer{{Name: "a\x1b[2Jb\u009b"}}
	r.Stream.DurablesAffected = []string{"c\x1b[2Jd"}
	var b strings.Builder
	if err := r.Print(&b, Style{}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); strings.ContainsAny(got, "\x1b\u009b") || !strings.Contains(got, "a?[2Jb?:") ||
		!strings.Contains(got, "c?[2Jd") {
		t.Errorf("%q", got)
	}
}

// The clocks of the process, of NATS and of this host may differ by any amount: a fault is held while NATS
// was told of it a moment ago.
func TestAHeldFaultIsAsOldAsNATSSays(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, of := range []struct {
		process, broker, ago time.Duration // clocks against this host's; since the last attempt
		held                 bool
	}{
		{0, 0, time.Minute, true},
		{0, 0, time.Hour, false},
		{24 * time.Hour, time.Hour, time.Hour, false}, // killed, and its clock is ahead
		{-24 * time.Hour, time.Hour, time.Minute, true},
	} {
		at := now.Add(of.process - of.ago)
		r := &Report{broker: now.Add(of.broker), LastEnd: &checkpoint.End{Code: "x", Held: true, At: at,
			Since: at.Add(-time.Minute), Stored: now.Add(of.broker - of.ago)}}
		f, since := r.held(now)
		if (f != nil) != of.held || of.held && since != of.ago+time.Minute {
			t.Errorf("%+v: %v for %v", of, f, since)
		}
	}
	r := &Report{LastEnd: &checkpoint.End{Held: true, At: now.Add(-time.Minute)}} // NATS's clock is not known
	if f, since := r.held(now); f == nil || since != time.Minute {
		t.Errorf("%v for %v", f, since)
	}
	r = &Report{pause: 20 * time.Minute, LastEnd: &checkpoint.End{Held: true, At: now.Add(-time.Hour)}}
	if f, _ := r.held(now); f == nil {
		t.Error("a home that tries again every 20 minutes is taken to be gone after an hour")
	}
}

func TestTheSequencesThatWaitAreCounted(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "", 1: "1 sequence waits for missing counters",
		1200: "1,200 sequences wait for missing counters"} {
		r := Report{Report: &overview.Report{}, Recorded: &time.Time{},
			Checkpoint: &relay.Checkpoint{Holds: make([]relay.Hold, n)}}
		var b strings.Builder
		if err := r.Print(&b, Style{}); err != nil {
			t.Fatal(err)
		}
		if got := b.String(); !strings.Contains(got, want) || n == 0 && strings.Contains(got, "counters") {
			t.Errorf("%d: %s", n, got)
		}
	}
}

func TestTheLongestNameOfAPartIsNotItsValue(t *testing.T) {
	t.Parallel()
	maintained := &watch.Maintained{Kept: &watch.Kept{}}
	r := report(config.Config{Slot: "slot", Stream: "STREAM"}, watch.Reading{
		Maintenance: watch.Maintenance{Read: watch.Read{At: time.Now()}, Maintained: maintained}}, &start{})
	var b strings.Builder
	if err := r.Print(&b, Style{}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, "\nstream retention ") {
		t.Error(got)
	}
}

// With --watch, where the output is no terminal, each report is a line: time, shape, health, and each part in
// a word with the first of its figures.
func TestAWatchedReportIsALine(t *testing.T) {
	t.Parallel()
	now := time.Now()
	read := watch.Reading{
		Postgres: watch.Postgres{Read: watch.Read{At: now}},
		Slot: watch.Slot{Read: watch.Read{At: now}, Exists: true, Active: true, Retained: 3 << 20,
			WALStatus: "reserved"},
		Stream:     watch.Stream{Read: watch.Read{Error: "refused\nagain", FailingSince: now}},
		Partitions: watch.Partitions{Read: watch.Read{At: now}, Managed: true, Ranges: true, Ahead: 4},
	}
	line := report(config.Config{Slot: "slot", Stream: "STREAM"}, read, &start{}).Line()
	stamp, rest, _ := strings.Cut(line, " ")
	if _, err := time.Parse(time.RFC3339, stamp); err != nil || strings.Contains(line, "\n") {
		t.Errorf("%v in %q", err, line)
	}
	const want = "✔ ok · PostgreSQL reachable, WAL written not known yet · Slot held, WAL kept 3.0 MiB · " +
		"Stream not reachable · Consumers not read yet · Partitions enough ahead, ahead 4"
	if rest != want {
		t.Errorf("%q\nwant %q", rest, want)
	}
}

// What was stored may be older than the checkpoint, or somebody else's: only what the checkpoint waits for is
// named.
func TestTheOldestGapsAreNamed(t *testing.T) {
	t.Parallel()
	hold := relay.Hold{Sequence: 0xab}
	stored := []byte(`[{"doc_id":"n\u001b[2J","actor_id":"alice","sequence":"00000000000000ab",` +
		`"missing":"7 to 9","since":"2026-01-02T03:04:05Z","waiting":1200},` +
		`{"doc_id":"closed","sequence":"00000000000000ac","missing":"1","waiting":1}]`)
	r := Report{Report: &overview.Report{}, Recorded: &time.Time{},
		Checkpoint: &relay.Checkpoint{Holds: []relay.Hold{hold}}, Gaps: openGaps(stored, []relay.Hold{hold})}
	var b strings.Builder
	if err := r.Print(&b, Style{}); err != nil {
		t.Fatal(err)
	}
	got := b.String()
	if !strings.Contains(got, "document n?[2J, actor alice: 7 to 9 missing, 1,200 events wait, for ") ||
		!strings.Contains(got, "since 2026-01-02T03:04:05Z") || strings.Contains(got, "closed") {
		t.Errorf("%q", got)
	}
	doc, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(doc), `"gaps":[{"doc_id":"n\u001b[2J","actor_id":"alice"`) {
		t.Errorf("%s, %v", doc, err)
	}
	if gaps := openGaps(nil, []relay.Hold{hold}); gaps != nil {
		t.Errorf("%+v", gaps)
	}
}
