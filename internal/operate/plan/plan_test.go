package plan

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/relay"
)

const mib = 1 << 20

func figure(t *testing.T, all []Figure, name string) Figure {
	t.Helper()
	for _, f := range all {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("there is no figure %q", name)
	return Figure{}
}

// TestFiguresFollowFromWhatIsMeasured: the arithmetic, on numbers that can be checked by hand.
func TestFiguresFollowFromWhatIsMeasured(t *testing.T) {
	t.Parallel()
	cfg := config.Config{}
	cfg.Init.Replicas = 3
	cfg.Reorder = config.Reorder{MaxEvents: 65536, MaxBytes: 64 * mib}
	cfg.Sink.MaxPayload = mib
	cfg.Sink.DurableAfter = 100 * time.Second
	cfg.Source = relay.FromTable
	cfg.Retain.Table = config.RetainTable{Method: config.RetainPartition, Keep: 10 * time.Hour,
		Every: 4 * time.Hour, Ahead: 4}
	o := Options{Outages: []time.Duration{900 * time.Second}, Days: 1}
	m := Measured{
		Seconds: 10, WALBytes: 80 * mib, WALAverage: 4 * mib, WALSince: time.Hour,
		Inserted: 500, Published: 400, TableBytes: 3000 * 1024, TableRows: 3000, Partitions: 5,
		KeepSize: 1024 * mib, MaxWAL: 512 * mib, Slots: 3, MaxSlots: 10, Senders: 2, MaxSenders: 10,
		Stream: true, Messages: 1000, StreamBytes: 2048 * 1000, MaxBytes: 1024 * mib, Replicas: 3,
		Consumers: 2,
	}
	all := Derive(m, cfg, o)
	for name, want := range map[string]float64{
		"WAL of the whole server":           8 * mib,
		"events":                            50,
		"an event in the stream":            2048,
		"max_slot_wal_keep_size for 15 min": 1.25 * 8 * mib * 1000,
		"disk of pg_wal for 15 min":         1.25*8*mib*1000 + 512*mib,
		"max_bytes of the stream for 1 day": 1.2 * 50 * 2048 * 86400,
		"disk of NATS, all replicas":        3 * 1.2 * 50 * 2048 * 86400,
		"disk of the table for 10 h":        1.2 * 50 * 1024 * 36000,
		"partitions of the table":           3 + 4,
		"network of NATS":                   50 * 2048 * (1 + 2 + 2),
		"max_replication_slots":             4,
		"max_wal_senders":                   4,
		"memory of outflow run":             (64*mib+65536*376)*9/8 + 36*mib,
	} {
		if got := figure(t, all, name).Value; math.Abs(got-want) > want/1000 {
			t.Errorf("%s: %.0f, want %.0f", name, got, want)
		}
	}
	f := figure(t, all, "max_slot_wal_keep_size for 15 min")
	if f.Now != "1.0 GiB: holds 2 min 8 s at this rate" {
		t.Errorf("now %q", f.Now)
	}
	f = figure(t, all, "max_bytes of the stream for 1 day")
	if !strings.Contains(f.Now, "holds 2 h 54 min") {
		t.Errorf("now %q", f.Now)
	}
}

// TestNothingMeasuredIsSaidToBeAssumed: without messages and rows, without a limit, without NATS.
func TestNothingMeasuredIsSaidToBeAssumed(t *testing.T) {
	t.Parallel()
	all := Derive(Measured{Seconds: 10, KeepSize: -1, NATS: "no servers"}, config.Config{},
		Options{Outages: []time.Duration{time.Hour}, Days: 7})
	if f := figure(t, all, "an event in the stream"); f.From != FromAssumed || f.Value != rowSize+perMessage {
		t.Errorf("%+v", f)
	}
	if f := figure(t, all, "max_slot_wal_keep_size for 1 h"); !strings.Contains(f.Now, "no limit") {
		t.Errorf("now %q", f.Now)
	}
	if f := figure(t, all, "max_bytes of the stream for 7 days"); !strings.Contains(f.Now, "no servers") ||
		f.Text() != "not known" || !strings.Contains(f.How, "--measure") {
		t.Errorf("now %q, %q: %s", f.Now, f.Text(), f.How)
	}
	sampled := Derive(Measured{Seconds: 10, SampledRows: 5, MeanRow: 700, Inserted: 1},
		config.Config{}, Options{Days: 7})
	f := figure(t, sampled, "an event in the stream")
	if f.From != FromMeasured || f.Value != 700+perMessage {
		t.Errorf("%+v", f)
	}
}
