package alerts

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// phase is a part of a recording, from one mark to the next.
type phase struct {
	begin string // the mark
	// the alerts that fire at its end, each perhaps with labels, and how long after its begin at the latest
	fires in
	// those that may fire on the way, as the ones of the last phase may; at its end they don't
	passing []string
}

const minute = time.Minute

// in is what fires in a phase, each with a time.
type in map[string]time.Duration

// outages are the recordings and what fires in them.
var outages = map[string][]phase{
	"calm": {{begin: "nothing happens"}},
	"nats_killed": {
		{begin: "all is well"},
		{begin: "NATS is killed", fires: in{
			"OutflowNATSDown": 2 * minute, "OutflowLag": 4 * minute,
			// the session waits for 30 s before it ends, which are 7.5 minutes here
			"OutflowNobodyActive": 13 * minute,
		}},
		{begin: "NATS is back"},
	},
	"postgres_killed": {
		{begin: "all is well"},
		{begin: "PostgreSQL is killed", fires: in{
			"OutflowPostgresDown": 3 * minute, "OutflowNobodyActive": 5 * minute, "OutflowLag": 4 * minute,
			"OutflowConsumerDown": 5 * minute,
		}},
		{begin: "PostgreSQL is back"},
	},
	"instances_killed": {
		{begin: "all is well"},
		{begin: "the active instance is killed", fires: in{"OutflowNoStandby": 16 * minute},
			passing: []string{"OutflowLag"}}, // until the other one has taken over
		{begin: "the other one is killed", fires: in{"OutflowDown": 3 * minute},
			passing: []string{"OutflowLag"}}, // for as long as it is known when everything was published
		{begin: "both are back"},
	},
	"crash_loop": {
		{begin: "all is well"},
		{begin: "somebody has dropped the slot", fires: in{
			"OutflowNobodyActive": 5 * minute, "OutflowLag": 4 * minute, "OutflowRestarts": 8 * minute,
		}},
	},
	"misconfigured": {
		{begin: "all is well"},
		{begin: "the publication's name is wrong", fires: in{"OutflowDown": 5 * minute},
			passing: []string{"OutflowLag"}}, // as above
		{begin: "the name is right"},
	},
	"slot_lost": {
		{begin: "all is well"},
		{begin: "NATS is killed, and WAL is written", fires: in{
			"OutflowNATSDown": 2 * minute, "OutflowLag": 4 * minute, "OutflowNobodyActive": 13 * minute,
			"OutflowSlotLossSoon": 25 * minute,
		}},
		{begin: "no more WAL is written", fires: in{
			"OutflowNATSDown": 0, "OutflowLag": 0, "OutflowNobodyActive": 0, "OutflowSlotLossSoon": 0,
			"OutflowSlotHeadroom": 10 * minute,
		}},
		{begin: "the limit is passed", fires: in{
			"OutflowNATSDown": 0, "OutflowLag": 0, "OutflowNobodyActive": 0,
			"OutflowSlotLossSoon": 0, "OutflowSlotHeadroom": 0,
			`OutflowSlotLost{status="unreserved"}`: minute,
		}},
		{begin: "a checkpoint removes the WAL", fires: in{
			"OutflowNATSDown": 0, "OutflowLag": 0, "OutflowNobodyActive": 0,
			`OutflowSlotLost{status="lost"}`: minute,
		}},
		{begin: "NATS is back", fires: in{
			"OutflowLag": 0, "OutflowNobodyActive": 0, `OutflowSlotLost{status="lost"}`: 0,
			`OutflowFault{code="slot_invalidated"}`: 5 * minute,
		}},
	},
	"storage_full": {
		{begin: "all is well"},
		{begin: "large events come", fires: in{
			"OutflowStorageFull": 15 * minute, "OutflowLag": 15 * minute, "OutflowFailures": 20 * minute,
		}},
		{begin: "the account has room"},
	},
	"fault_held": {
		{begin: "all is well"},
		{begin: "an event is too large", fires: in{
			`OutflowFault{code="too_large"}`: minute, "OutflowNobodyActive": 5 * minute,
			"OutflowLag": 4 * minute,
		}},
		{begin: "dead letters are allowed", fires: in{`OutflowDeadLetters{reason="too_large"}`: minute}},
		{begin: "one was written"},
	},
	"rows": {
		{begin: "all is well"},
		{begin: "an event is too large", fires: in{`OutflowDeadLetters{reason="too_large"}`: minute}},
		{begin: "that is over"},
		{begin: "a message comes, where the table is the source",
			fires: in{`OutflowIgnored{what="message"}`: minute}},
		{begin: "that is over, too"},
		{begin: "an event is late", fires: in{"OutflowLateEvents": minute}},
	},
	"gaps": {
		{begin: "all is well"},
		{begin: "a counter is missing", fires: in{`OutflowGapsGivenUp{reason="bound"}`: 2 * minute}},
		{begin: "that is over"},
	},
	"gaps_wait": {
		{begin: "all is well"},
		{begin: "a counter is missing in each of 600 documents", fires: in{
			"OutflowBufferFull": 12 * minute, "OutflowNoCheckpoint": 7 * minute, "OutflowLag": 4 * minute,
			"OutflowGapOldest": 9 * minute,
		}},
		{begin: "the counters come"},
	},
	"slow": {
		{begin: "events wait for 1.2 s", fires: in{"OutflowLatency": 12 * minute},
			// that and the time between two looks at the end of the WAL are 48 s here
			passing: []string{"OutflowLag"}},
	},
	"write_url_away": {
		{begin: "all is well"},
		{begin: "no connection to write_url", fires: in{
			"OutflowTickErrors": 8 * minute,
			"OutflowLatency":    13 * minute, // the last events wait for whatever is written next
		}},
		{begin: "there is one"},
	},
	"replica_away": {
		{begin: "all is well"},
		{begin: "a follower is killed", fires: in{"OutflowReplicaBehind": 15 * minute},
			passing: []string{"OutflowNATSDown", "OutflowLag"}}, // whose connections it had
		{begin: "it is back"},
	},
	"maintain_killed": {
		{begin: "all is well"},
		{begin: "outflow maintain is killed", fires: in{"OutflowMaintainAbsent": 18 * minute}},
		{begin: "one partition is left ahead", fires: in{
			"OutflowMaintainAbsent": 0, "OutflowPartitionsAhead": 9 * minute,
		}},
		{begin: "outflow maintain is back"},
	},
	"rows_blocked": {
		{begin: "all is well"},
		{begin: "nobody reads another slot", fires: in{"OutflowRowsBlocked": 65 * minute}},
		{begin: "it is dropped"},
	},
	"archive_gap": {
		{begin: "all is well"},
		{begin: "messages were removed that are not archived", fires: in{
			`OutflowMaintainFailing{part="archive"}`: 18 * minute,
			"OutflowArchiveBehind":                   42 * minute,
		}},
	},
	"consumer_idle": {
		{begin: "all is well"},
		{begin: "nobody reads", fires: in{`OutflowStreamConsumerBehind{consumer="billing"}`: 20 * minute}},
	},
	"consumer_replaced": {
		{begin: "all is well"},
		{begin: "the consumer has ended"},
		{begin: "another one begins, and messages are missing", fires: in{"OutflowConsumerGap": minute}},
	},
	"handler_hangs": {
		{begin: "all is well"},
		{begin: "a handler hangs", fires: in{"OutflowConsumerHandlerHangs": 8 * minute}},
		{begin: "it has returned"},
	},
	"consumer_fails": {
		{begin: "all is well"},
		{begin: "one event of three fails", fires: in{
			"OutflowConsumerFailing": 12 * minute, "OutflowConsumerParked": 12 * minute,
		}},
		{begin: "all is well again"},
		{begin: "the handler hangs", fires: in{"OutflowConsumerStuck": 16 * minute}},
		{begin: "it goes on, and messages are missing", fires: in{"OutflowConsumerGap": minute}},
	},
}

// byHand are series for alerts whose outage can't be recorded, and why.
var byHand = map[string]struct {
	why    string
	series []Series
}{
	"OutflowSlotRetained": {"it takes 10 GiB of WAL", []Series{
		{`outflow_slot_retained_bytes{slot="s"}`, "0+1073741824x60"},
	}},
	"OutflowHomeSilent": {"it takes two clusters and half an hour", []Series{
		{`outflow_cluster_kept_since_timestamp_seconds{slot="s"}`, "-400x60"},
	}},
	"OutflowClusterAway": {"it takes two clusters", []Series{
		{`outflow_cluster_awaited{slot="s",cluster="2"}`, "1x60"},
	}},
	"OutflowPublishesForHome": {"it takes two clusters", []Series{
		{`outflow_cluster_publishes{slot="s"}`, "1x60"},
		{`outflow_cluster_publishes{slot="t"}`, "0x60"},
	}},
	"OutflowOwnerChanges": {"it takes two clusters", []Series{
		{`outflow_cluster_epoch{slot="s"}`, "1+1x5 6x55"},
		{`outflow_cluster_epoch{slot="t"}`, "1+1x4 5x56"},
	}},
	"OutflowClusterSlot": {"it takes 10 GiB of WAL", []Series{
		{`outflow_cluster_slot_retained_bytes{slot="s",by="to_2"}`, "0+1073741824x60"},
		{`outflow_cluster_slot_retained_bytes{slot="s",by="to_3"}`, "0x60"},
		{`outflow_cluster_slot_lost{slot="s",by="to_2"}`, "0x60"},
		{`outflow_cluster_slot_lost{slot="s",by="to_3"}`, "0x60"},
	}},
	"OutflowFiguresOld": {"only a defect of Outflow makes it", []Series{
		{`outflow_slot_read_timestamp_seconds{slot="s"}`, "-3x60"},
		{`outflow_postgres_up{slot="s"}`, "1x60"},
	}},
	"OutflowCertificate": {"it takes months, and servers with TLS", []Series{
		{`outflow_certificate_expiry_timestamp_seconds{slot="s",peer="nats",side="server"}`, "1000000x60"},
		{`outflow_certificate_expiry_timestamp_seconds{slot="s",peer="postgres",side="server"}`, "9000000x60"},
	}},
	"OutflowSpillFull": {"it takes a transaction of gigabytes", []Series{
		{`outflow_spill_bytes{slot="s"}`, "0+1000000000x60"},
		{`outflow_spill_limit_bytes{slot="s"}`, "70000000000x60"},
	}},
	"OutflowMemory": {"only a defect of Outflow makes it, or a GOMEMLIMIT that is too low", []Series{
		{`outflow_build_info{job="o",instance="a",slot="s"}`, "1x80"},
		{`process_resident_memory_bytes{job="o",instance="a"}`, "300000000x80"},
		{`go_gc_gomemlimit_bytes{job="o",instance="a"}`, "200000000x80"},
		{`process_resident_memory_bytes{job="other",instance="a"}`, "900000000x80"},
		{`go_gc_gomemlimit_bytes{job="other",instance="a"}`, "200000000x80"},
	}},
	"OutflowConsumerParkedLong": {"it takes a day", []Series{
		{`outflow_consumer_oldest_parked_seconds{consumer="c",instance="a"}`, "86000+15x60"},
		{`outflow_consumer_oldest_parked_seconds{consumer="c",instance="b"}`, "0x60"},
	}},
	"OutflowForeignSettings": {"it takes somebody who writes such messages for minutes", []Series{
		{`outflow_foreign_settings_total{slot="s"}`, "0+1x60"},
		{`outflow_malformed_settings_total{slot="s"}`, "0x60"},
	}},
	"OutflowSpansDropped": {"it takes a collector that is away", []Series{
		{`outflow_spans_dropped_total{slot="s",reason="export_failed"}`, "0+1x60"},
		{`outflow_spans_dropped_total{slot="s",reason="queue_full"}`, "0x60"},
	}},
}

type sample struct {
	Labels string  `json:"labels"`
	Value  float64 `json:"value"`
}

// check is an expression that promtool evaluates.
type check struct {
	Expr    string   `json:"expr"`
	At      string   `json:"eval_time"`
	Samples []sample `json:"exp_samples"`
}

// fires checks that an alert fires at a time.
func fires(alert string, at time.Duration) check {
	name, labels, _ := strings.Cut(strings.TrimSuffix(alert, "}"), "{")
	return check{fmt.Sprintf(`group(ALERTS{alertstate="firing",alertname=%q,%s})`, name, labels), at.String(),
		[]sample{{"{}", 1}}}
}

// noOther checks that no other alert fires at a time.
func noOther(at time.Duration, alerts ...string) check {
	names := make([]string, len(alerts))
	for i, a := range alerts {
		names[i], _, _ = strings.Cut(a, "{")
	}
	return check{fmt.Sprintf(`ALERTS{alertstate="firing",alertname!~%q}`, strings.Join(names, "|")),
		at.String(), []sample{}}
}

// play plays series under the rules, at the end of which promtool makes the checks.
func play(t *testing.T, series []Series, checks []check) {
	t.Helper()
	file, err := filepath.Abs(filepath.Join(root, RulesFile))
	must.Succeed(t, err)
	content, err := json.Marshal(map[string]any{ // which is YAML
		"rule_files": []string{file}, "evaluation_interval": (2 * Step).String(),
		"tests": []any{map[string]any{
			"interval": Step.String(), "input_series": series, "promql_expr_test": checks,
		}},
	})
	must.Succeed(t, err)
	promtool(t, "test", "rules", write(t, "outage.yaml", string(content)))
}

// names are the alerts of a phase without how long they take.
func (p *phase) names() (all []string) {
	for name := range p.fires {
		all = append(all, name)
	}
	return all
}

// TestOutagesFireTheirAlertsAndNoOther plays what the binary said of itself in real outages: each alert of an
// outage fires in time and for as long as it lasts, and no other one does.
func TestOutagesFireTheirAlertsAndNoOther(t *testing.T) {
	t.Parallel()
	for name, phases := range outages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := Read(filepath.Join("testdata", name+".yaml"))
			must.Succeed(t, err)
			var checks []check
			var last phase
			for i, p := range phases {
				if i+1 >= len(r.Marks) || r.Marks[i].What != p.begin {
					t.Fatalf("there is no phase %q: %v", p.begin, r.Marks)
				}
				begin, end := r.Marks[i].At, r.Marks[i+1].At-Step
				some := slices.Concat(p.names(), last.names(), p.passing)
				for at := begin; at < end; at += minute {
					checks = append(checks, noOther(at, some...))
				}
				checks = append(checks, noOther(end, p.names()...))
				for alert, latest := range p.fires {
					for at := begin + latest; at < end; at += minute {
						checks = append(checks, fires(alert, at))
					}
					checks = append(checks, fires(alert, end))
				}
				last = p
			}
			if len(r.Marks) != len(phases)+1 {
				t.Errorf("there are further phases: %v", r.Marks)
			}
			play(t, r.Series, checks)
		})
	}
}

func TestAlertsFireOnSeriesByHand(t *testing.T) {
	t.Parallel()
	for name, o := range byHand {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			play(t, o.series, []check{fires(name, 60*Step), noOther(60*Step, name, "OutflowDown")})
		})
	}
}

// TestWhoMaintainsHourlyIsNotBehind: what was a little too young at one run waits for the next one. Before
// the second run nobody knows when that is.
func TestWhoMaintainsHourlyIsNotBehind(t *testing.T) {
	t.Parallel()
	series := []Series{
		{`outflow_archive_oldest_waiting_timestamp_seconds{slot="s"}`, "-7000x60"},
		{`outflow_archive_segment_age_seconds{slot="s"}`, "3600x60"},
		{`outflow_maintain_reported_timestamp_seconds{slot="s"}`, "-3500x60"},
	}
	hourly := Series{`outflow_maintain_interval_seconds{slot="s"}`, "3600x60"}
	play(t, append(series[:3:3], hourly), []check{noOther(60*Step, "OutflowDown")})
	play(t, series, []check{fires("OutflowArchiveBehind", 60*Step)})
}

// TestPartitionsThatCanNotBeReadAnyMoreEnd: how many are ahead is what it was at the last reading, and time
// goes on.
func TestPartitionsThatCanNotBeReadAnyMoreEnd(t *testing.T) {
	t.Parallel()
	read := Series{`outflow_partitions_ahead{slot="s"}`, "4x60"}
	play(t, []Series{read, {`outflow_partitions_end_timestamp_seconds{slot="s"}`, "1200x60"}},
		[]check{noOther(60*Step, "OutflowDown")})
	play(t, []Series{read, {`outflow_partitions_end_timestamp_seconds{slot="s"}`, "300x60"}},
		[]check{fires("OutflowPartitionsAhead", 60*Step),
			noOther(60*Step, "OutflowPartitionsAhead", "OutflowDown")})
	play(t, []Series{read, // one of two can read them
		{`outflow_partitions_end_timestamp_seconds{slot="s",instance="a"}`, "300x60"},
		{`outflow_partitions_end_timestamp_seconds{slot="s",instance="b"}`, "300+60x60"}},
		[]check{noOther(60*Step, "OutflowDown")})
}

// TestAPartThatFailsInTurnsFails: with another code each time, as while servers come and go.
func TestAPartThatFailsInTurnsFails(t *testing.T) {
	t.Parallel()
	series := func(code, values string) Series {
		return Series{`outflow_maintain_part_fault{slot="s",part="archive",code="` + code + `"}`, values}
	}
	play(t, []Series{series("nats_connect", strings.Repeat("1 1 stale _ ", 18)),
		series("", strings.Repeat("stale _ 1 1 ", 18))},
		[]check{fires(`OutflowMaintainFailing{part="archive"}`, 68*Step)})
}

// TestEachAlertFiresInAnOutage: no alert is untried, and no recording is left over.
func TestEachAlertFiresInAnOutage(t *testing.T) {
	t.Parallel()
	fired := map[string]bool{}
	for name := range byHand {
		fired[name] = true
	}
	for _, phases := range outages {
		for _, p := range phases {
			for _, alert := range p.names() {
				name, _, _ := strings.Cut(alert, "{")
				fired[name] = true
			}
		}
	}
	for _, r := range rules(t) {
		if !fired[r.Alert] {
			t.Errorf("%s fires in no outage", r.Alert)
		}
	}
	files, err := os.ReadDir("testdata")
	must.Succeed(t, err)
	for _, f := range files {
		if _, ok := outages[strings.TrimSuffix(f.Name(), ".yaml")]; !ok {
			t.Errorf("testdata/%s is played by no test", f.Name())
		}
	}
}
