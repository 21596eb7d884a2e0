package checkpoint

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestAStartIsResolvedFromWhatWasRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		change      func(r *Readings)
		want        string // due seq there end last [holes] newest rewrite
		loss        string
		checkpoints int
	}{
		{"a message is left to compare", func(r *Readings) {}, "0/2000 9 3 12 12 [] true 0/3000 false", "",
			3},
		{"no checkpoint with one at or above confirmed", func(r *Readings) { r.Slot.Confirmed = 0x3000 },
			"0/3000 12 0 12 12 [] true 0/3000 false", "", 3},
		{"confirmed between two checkpoints", func(r *Readings) { r.Slot.Confirmed = 0x2001 },
			"0/3000 12 0 12 12 [] true 0/3000 false", "", 3},
		{"messages beyond the newest checkpoint", func(r *Readings) { newest(r, 15) },
			"0/3000 12 3 15 15 [] true 0/3000 false", "", 3},
		{"nothing published yet", func(r *Readings) {
			r.Record = record(at(0x1000, 0, time.Second))
			r.Stream = relay.StreamState{Exists: true, Created: r.Record.Created}
		}, "0/1000 0 0 0 0 [] false 0/0 false", "", 1},
		{"retention removed all", func(r *Readings) {
			r.Stream.Messages, r.Stream.NewestSeq,
				r.Stream.Newest = 0, 0, nil
		},
			"0/2000 9 3 12 12 [] false 0/0 false", "stream OUTBOX is empty, its last sequence was 12", 3},
		{"the tail went back", func(r *Readings) { r.Stream.LastSeq = 10; newest(r, 10) },
			"0/2000 9 1 10 10 [] true 0/3000 true",
			"stream OUTBOX ends at sequence 10, the newest checkpoint lies at 12", 2},
		{"the tail went back to a checkpoint", func(r *Readings) { r.Stream.LastSeq = 9; newest(r, 9) },
			"0/1000 5 4 9 9 [] true 0/3000 true",
			"stream OUTBOX ends at sequence 9, the newest checkpoint lies at 12", 2},
		{"the tail is missing", func(r *Readings) { r.Stream.NewestSeq = 10 },
			"0/2000 9 1 10 12 [{11 12}] true 0/3000 true",
			"messages 11 to 12 of stream OUTBOX are missing at its end; " +
				"stream OUTBOX ends at sequence 10, the newest checkpoint lies at 12", 2},
		{"a tail without one is missing", func(r *Readings) { newest(r, 15); r.Stream.NewestSeq = 13 },
			"0/3000 12 1 13 15 [{14 15}] true 0/3000 true",
			"messages 14 to 15 of stream OUTBOX are missing at its end", 3},
		{"the missing tail is noted", func(r *Readings) {
			r.Stream.NewestSeq = 10
			r.Record = record(r.Record.Checkpoints[:2]...)
			r.Record.Holes = []Range{{11, 12}}
		}, "0/2000 9 1 10 12 [{11 12}] true 0/3000 false", "", 2},
		{"what is missing at the end was confirmed", func(r *Readings) {
			r.Stream.NewestSeq, r.Slot.Confirmed = 7, 0x2000
		},
			"0/2000 9 0 9 12 [{10 12}] false 0/0 true",
			"messages 10 to 12 of stream OUTBOX are missing at its end; " +
				"stream OUTBOX ends at sequence 9, the newest checkpoint lies at 12", 2},
		{"what was confirmed is the whole stream", func(r *Readings) {
			r.Stream.LastSeq, r.Stream.NewestSeq,
				r.Slot.Confirmed = 9, 7, 0x2000
		},
			"0/2000 9 0 9 9 [] false 0/0 true",
			"stream OUTBOX ends at sequence 9, the newest checkpoint lies at 12", 2},
		{"old is not confirmed", func(r *Readings) { r.Stream.NewestSeq, r.Now = 7, epoch.Add(time.Hour) },
			"0/1000 5 2 7 12 [{8 12}] true 0/3000 true",
			"messages 8 to 12 of stream OUTBOX are missing at its end; " +
				"stream OUTBOX ends at sequence 7, the newest checkpoint lies at 12", 1},
		{"holes are not counted", func(r *Readings) {
			r.Record.Holes = []Range{{7, 8}, {10, 11}}
			newest(r, 14)
			r.Slot.Confirmed = 0
		},
			"0/3000 12 2 14 14 [{7 8} {10 11}] true 0/3000 false", "", 3},
		{"holes between checkpoint and end", func(r *Readings) { r.Record.Holes = []Range{{7, 8}, {10, 11}} },
			"0/2000 9 1 12 12 [{7 8} {10 11}] true 0/3000 false", "", 3},
		{"holes beyond the end", func(r *Readings) {
			r.Record.Holes = []Range{{10, 11}}
			r.Stream.LastSeq = 10
			newest(r, 10)
		},
			"0/2000 9 0 10 10 [{10 10}] true 0/3000 true",
			"stream OUTBOX ends at sequence 10, the newest checkpoint lies at 12", 2},
		{"holes below the oldest checkpoint", func(r *Readings) { r.Record.Holes = []Range{{3, 6}} },
			"0/2000 9 3 12 12 [{6 6}] true 0/3000 false", "", 3},
		{"a repair accepted a stranger's message", func(r *Readings) {
			r.Record = record(at(0x1000, 13, time.Second))
			r.Record.Base = 13
			newest(r, 13)
			r.Stream.Newest = nil
		}, "0/1000 13 0 13 13 [] false 0/0 false", "", 1},
		{"a repair accepted another WAL's messages", func(r *Readings) {
			r.Record = record(at(0x1000, 12, time.Second))
			r.Record.Base = 12
			r.Stream.Newest.Thru, r.Stream.Newest.Timeline = 0x9000, 7
		}, "0/1000 12 0 12 12 [] false 0/0 false", "", 1},
		{"a window after a repair", func(r *Readings) {
			r.Record = record(at(0x1000, 12, time.Second), at(0x3000, 15, time.Second))
			r.Record.Base = 12
			newest(r, 15)
		}, "0/1000 12 3 15 15 [] true 0/3000 false", "", 2},
		{"a standby that has everything", func(r *Readings) {
			r.Server.InRecovery, r.Server.WALEnd = true,
				0x3000
		},
			"0/2000 9 3 12 12 [] true 0/3000 false", "", 3},
		{"a renamed database", func(r *Readings) { r.Slot.Database, r.Server.Database = "shop", "shop" },
			"0/2000 9 3 12 12 [] true 0/3000 false", "", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := readings()
			r.Asked, r.Stream.Now = epoch.Add(-time.Second), epoch.Add(time.Hour)
			c.change(&r)
			before := fmt.Sprint(*r.Record)
			s, err := Resolve(config, r)
			must.Succeed(t, err)
			got := fmt.Sprintf("%v %d %d %d %d %v %t %v %t", s.Checkpoint.Due, s.Checkpoint.Seq,
				s.AlreadyStored, s.End, s.LastSeq, s.Holes, s.Newest != nil, s.Thru, s.Rewrite)
			if !s.Asked.Equal(r.Asked) || !s.Broker.Equal(r.Stream.Now) {
				t.Errorf("asked at %v, the broker said %v", s.Asked, s.Broker)
			}
			if got != c.want || s.Loss != c.loss || len(s.Checkpoints) != c.checkpoints ||
				s.Confirmed != r.Slot.Confirmed {
				t.Errorf("got  %s of %d\nwant %s of %d\nloss %q\nwant %q", got, len(s.Checkpoints),
					c.want, c.checkpoints, s.Loss, c.loss)
			}
			if again, _ := Resolve(config, r); !again.Same(s) || fmt.Sprint(*r.Record) != before {
				t.Error("the readings were changed")
			}
		})
	}
}

// newest makes seq the stream's last message, at the same LSNs.
func newest(r *Readings, seq uint64) {
	r.Stream.LastSeq, r.Stream.Messages, r.Stream.NewestSeq = seq, seq, seq
}

// none of the texts says more than these parts; together they are what an operator needs.
const (
	anewCure = "`outflow uninstall --with-stream`, `outflow init`; then "
	rowsCure = "insert the rows of that range, and what was committed until init made the new slot, into " +
		"public.outbox again, or accept the gap"
)

func TestAStartThatWouldLoseOrRepeatIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		change func(r *Readings)
		code   string
		class  outbox.Class
		rng    string // "" none
		parts  []string
	}{
		{func(r *Readings) { *r = Readings{Server: r.Server} }, "not_initialised", outbox.Fatal, "",
			[]string{"no slot outflow", "no stream OUTBOX", "outflow init"}},
		{func(r *Readings) { *r = Readings{Server: r.Server, Stream: relay.StreamState{Exists: true}} },
			"init_unfinished", outbox.Fatal, "",
			[]string{"stream OUTBOX is empty", "outflow init` again"}},
		{func(r *Readings) {
			r.Record, r.Slot, r.Stream = record(), relay.SlotState{}, relay.StreamState{Exists: true,
				Created: r.Record.Created}
			r.Record.Creating = true
		}, "init_unfinished", outbox.Fatal, "",
			[]string{"slot outflow is about to be made", "outflow init` again"}},
		{func(r *Readings) { uninstalled(r, 12) }, "not_initialised", outbox.Fatal, "",
			[]string{"outflow uninstall has removed slot outflow", "up to sequence 12", "outflow init"}},
		{func(r *Readings) { uninstalled(r, 11) }, "stream_not_empty", outbox.Gap, "0/0 to 0/5000",
			[]string{"last sequence is 12"}},
		{func(r *Readings) { uninstalled(r, 12); r.Stream.Created = r.Stream.Created.Add(1) },
			"stream_not_empty", outbox.Gap, "0/0 to 0/5000", []string{"last sequence is 12"}},
		{func(r *Readings) { r.Record = record(); r.Record.Creating = true; r.Slot = relay.SlotState{} },
			"stream_not_empty", outbox.Gap,
			"0/0 to 0/5000", []string{"last sequence is 12", "outflow repair --accept stream_not_empty"}},
		{func(r *Readings) { r.Record = record(); r.Record.Creating = true }, "init_unfinished", outbox.Fatal,
			"", []string{"outflow init` again"}},
		{func(r *Readings) { r.Record.Repairing = "slot_missing"; r.Server.SystemID = "1" },
			"repair_unfinished", outbox.Gap,
			"0/3000 to 0/5000", []string{"--accept slot_missing",
				"outflow repair --accept repair_unfinished"}},
		{func(r *Readings) { r.Record = record(); r.Record.Repairing = "slot_missing" }, "repair_unfinished",
			outbox.Gap, "0/0 to 0/5000", nil},
		{func(r *Readings) { r.Record = record(); r.Record.Repairing = ForSnapshot }, "snapshot_unfinished",
			outbox.Gap, "0/0 to 0/5000",
			[]string{"snapshot of table", "Run `outflow init --snapshot` again"}},
		{func(r *Readings) { r.Record.Repairing = ForSnapshot; r.Slot = relay.SlotState{} },
			"snapshot_unfinished", outbox.Gap, "0/0 to 0/5000", nil},
		{func(r *Readings) { r.Record.Stopped = "foreign_message" }, "foreign_message", outbox.Gap,
			"0/3000 to 0/5000",
			[]string{"somebody else published", "outflow repair --accept foreign_message",
				"keep everybody else out"}},
		{func(r *Readings) { r.Record.Stopped = "foreign_message"; r.Server.SystemID = "1" },
			"system_changed", outbox.Gap, "0/3000 to 0/5000", nil},
		{func(r *Readings) { r.Record.Mapping.Span = "length" }, "mapping_changed", outbox.Fatal, "",
			[]string{" counter=counter span=length seq_key="}},
		{func(r *Readings) { r.Record.Mapping.Key = "key" }, "mapping_changed", outbox.Fatal, "",
			[]string{"seq_key=key", "seq_key=seq_key", "public.outbox"}},
		{func(r *Readings) {
			r.Record.Mapping = relay.Mapping{Source: relay.FromMessage, Key: "key"}
		}, "mapping_changed", outbox.Fatal, "", []string{"has source=message origin=any, ordered by key"}},
		{func(r *Readings) { r.Record.Mapping = relay.Mapping{Source: relay.FromMessage} }, "mapping_changed",
			outbox.Fatal, "",
			[]string{"has source=message origin=any, in commit order"}},
		{func(r *Readings) { r.Record.Mapping.Shard = relay.Shard{Index: 1, Of: 4} }, "shard_changed",
			outbox.Fatal, "",
			[]string{"shard is not set", "slot outflow has 1/4", "docs/upgrades.md"}},
		{func(r *Readings) { r.Record = nil }, "record_missing", outbox.Gap, "0/3000 to 0/5000",
			[]string{"bucket outflow-OUTBOX", "nats kv revert outflow-OUTBOX outflow", anewCure,
				rowsCure}},
		{func(r *Readings) { r.Record = nil; r.Stream = relay.StreamState{} }, "record_missing", outbox.Gap,
			"0/1000 to 0/5000", []string{"run `outflow archive restore` before"}},
		{func(r *Readings) { r.Record = nil; r.Slot = relay.SlotState{} }, "record_missing", outbox.Gap,
			"0/3000 to 0/5000", []string{anewCure}},
		{func(r *Readings) { r.Server.SystemID = "7361530121234599999" }, "system_changed", outbox.Gap,
			"0/3000 to 0/5000",
			[]string{"7361530121234599999", "7361530121234511111", "postgres.url", anewCure,
				rowsCure}},
		{func(r *Readings) { r.Server.SystemID, r.Server.WALEnd = "7361530121234599999", 0x2000 },
			"system_changed", outbox.Gap, "0/2000 to 0/3000", nil},
		{func(r *Readings) { r.Slot = relay.SlotState{} }, "slot_missing", outbox.Gap, "0/3000 to 0/5000",
			[]string{"slot outflow does not exist", anewCure, rowsCure}},
		{func(r *Readings) { r.Slot = relay.SlotState{}; newest(r, 11) }, "slot_missing", outbox.Gap,
			"0/2000 to 0/5000", nil},
		{func(r *Readings) { r.Slot = relay.SlotState{}; r.Stream.Created = epoch }, "slot_missing",
			outbox.Gap, "0/0 to 0/5000", nil},
		{func(r *Readings) { r.Slot = relay.SlotState{}; r.Server.History = promoted(0x4000) },
			"slot_missing", outbox.Gap, "0/3000 to 0/5000", nil},
		{func(r *Readings) { r.Slot.Plugin = "wal2json" }, "slot_plugin", outbox.Gap, "0/3000 to 0/5000",
			[]string{`"wal2json"`, "whose it is", "slot_missing"}},
		{func(r *Readings) { r.Slot.Plugin, r.Slot.Database = "", "" }, "slot_plugin", outbox.Gap,
			"0/3000 to 0/5000", []string{"physical", "whose it is"}},
		{func(r *Readings) { r.Record = nil; r.Slot.Plugin, r.Slot.Database = "", "" }, "slot_plugin",
			outbox.Fatal, "", []string{"physical", "Set slot"}},
		{func(r *Readings) {
			r.Record, r.Slot.Plugin, r.Slot.Active, r.Slot.ActivePID, r.Slot.Holder =
				nil, "test_decoding", true, 77, "etl 10.0.0.7"
		}, "slot_plugin", outbox.Fatal, "", []string{`"test_decoding"`, "pid 77 (etl 10.0.0.7)", "Set slot"}},
		{func(r *Readings) { r.Record = nil; r.Slot.Database = "shop" }, "slot_database", outbox.Fatal, "",
			[]string{"database shop", "is to app", "nobody reads from it", "Set slot", "postgres.url"}},
		{func(r *Readings) { r.Record = record(); r.Record.Creating = true; r.Slot.Database = "shop" },
			"slot_database", outbox.Fatal, "", nil},
		{func(r *Readings) { r.Slot.Database = "shop" }, "slot_database", outbox.Gap, "0/3000 to 0/5000",
			[]string{"database shop", "is to app", "postgres.url"}},
		{func(r *Readings) { r.Slot.Invalidation = "wal_removed" }, "slot_invalidated", outbox.Gap,
			"0/3000 to 0/5000", []string{"wal_removed", anewCure, rowsCure}},
		{func(r *Readings) { r.Slot.WALStatus = "lost" }, "slot_invalidated", outbox.Gap, "0/3000 to 0/5000",
			[]string{"wal_status is lost"}},
		{func(r *Readings) { r.Slot.Confirmed = 0x3001 }, "slot_ahead", outbox.Gap, "0/3000 to 0/5000",
			[]string{"confirmed at 0/3001", anewCure, rowsCure}},
		{func(r *Readings) { r.Stream = relay.StreamState{} }, "stream_missing", outbox.Gap, "0/0 to 0/1000",
			[]string{"stream OUTBOX does not exist", "nats.url", "outflow archive restore",
				"nats stream restore", anewCure, rowsCure}},
		{func(r *Readings) { r.Stream.Created = epoch }, "stream_recreated", outbox.Gap, "0/0 to 0/1000",
			[]string{"2026-03-01T12:00:00Z", "2026-03-01T11:00:00Z", anewCure}},
		{func(r *Readings) { r.Stream = relay.StreamState{Exists: true, Created: epoch} }, "stream_recreated",
			outbox.Gap, "0/0 to 0/1000",
			[]string{"`nats stream rm OUTBOX` and run `outflow archive restore` before"}},
		{func(r *Readings) { r.Slot.Confirmed = 0x2000; newest(r, 8) }, "stream_shortened", outbox.Gap,
			"0/1000 to 0/2000",
			[]string{"ends at sequence 8", "0/2000", "2m30s", anewCure, rowsCure}},
		{func(r *Readings) {
			r.Record = record(at(0x1000, 12, time.Second))
			r.Record.Base = 12
			newest(r, 11)
		}, "stream_shortened", outbox.Gap, "0/0 to 0/1000", []string{"ends at sequence 11"}},
		{func(r *Readings) { r.Slot.Confirmed, r.Stream.LastSeq, r.Stream.NewestSeq = 0x2000, 8, 7 },
			"stream_shortened", outbox.Gap,
			"0/1000 to 0/2000", []string{"ends at sequence 7"}},
		{func(r *Readings) { newest(r, 4) }, "stream_shortened", outbox.Gap, "0/0 to 0/1000",
			[]string{"ends at sequence 4"}},
		{func(r *Readings) { r.Stream = relay.StreamState{Exists: true, Created: r.Record.Created} },
			"stream_shortened", outbox.Gap, "0/0 to 0/1000", nil},
		{func(r *Readings) { r.Stream.Newest = nil }, "foreign_message", outbox.Gap, "0/3000 to 0/5000",
			[]string{"sequence 12", "no Outflow header", "keep everybody else out",
				"nats stream view OUTBOX"}},
		{func(r *Readings) { r.Server.WALEnd = 0x2FFF }, "server_behind", outbox.Gap, "0/2FFF to 0/3000",
			[]string{"ends at 0/2FFF", "restored", anewCure}},
		{func(r *Readings) { r.Server.WALEnd, r.Stream.Newest.Thru = 0x2FFF, 0x2000 }, "server_behind",
			outbox.Gap, "0/2FFF to 0/3000", nil},
		{func(r *Readings) { r.Record, r.Stream.Restoring = nil, "OUTBOX-20260301T100000.123456789Z" },
			"restore_unfinished", outbox.Gap, "0/0 to 0/5000", []string{"restored from OUTBOX-2026",
				"outflow archive restore` again"}},
		{func(r *Readings) { r.Server.WALEnd, r.Stream.NewestSeq, r.Stream.Newest = 0x2FFF, 0, nil },
			"server_behind", outbox.Gap, "0/2FFF to 0/3000", nil},
		{func(r *Readings) { r.Stream.Newest.Thru = 0x5001 }, "server_behind", outbox.Gap, "0/5000 to 0/5001",
			[]string{"up to 0/5001"}},
		{func(r *Readings) { r.Publication.Xmin++ }, "publication_changed", outbox.Gap, "0/3000 to 0/5000",
			[]string{"publication outflow", "public.outbox", anewCure, rowsCure}},
		{func(r *Readings) { r.Publication.RelOID = 16500 }, "publication_changed", outbox.Gap,
			"0/3000 to 0/5000", nil},
		{func(r *Readings) { r.Publication.TableOID = 16500 }, "publication_changed", outbox.Gap,
			"0/3000 to 0/5000",
			[]string{"public.outbox has OID 16500", "OID 16385", rowsCure}},
		{func(r *Readings) { r.Publication.Path = "740" }, "publication_changed", outbox.Gap,
			"0/3000 to 0/5000", []string{"put back"}},
		{func(r *Readings) {
			r.Publication.Hidden = &outbox.Fault{Message: "part_3 is unlogged", Hint: "Make it logged"}
		}, "publication_changed",
			outbox.Gap, "0/3000 to 0/5000",
			[]string{"part_3 is unlogged", "Make it logged, before the repair"}},
		{func(r *Readings) { r.Record.Stopped = "publication_changed" }, "publication_changed", outbox.Gap,
			"0/3000 to 0/5000",
			[]string{"when outflow stopped", rowsCure}},
	} {
		r := readings()
		c.change(&r)
		t.Run(c.code, func(t *testing.T) {
			t.Parallel()
			_, err := Resolve(config, r)
			refused(t, err, c.code, c.class, c.rng, c.parts)
		})
	}
}

// What is no gap: rewritten partitions, and what an older record does not know. A standby's catalog may be an
// old one, so it is read twice.
func TestResolveOfWhatIsPublished(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(r *Readings){
		"rewritten": func(r *Readings) { r.Publication.Rewritten = "0123456789abcdef" },
		"older record": func(r *Readings) {
			r.Record.Publication.TableOID, r.Publication.Path, r.Publication.Rewritten =
				0, "740", "0123456789abcdef"
		},
	} {
		r := readings()
		change(&r)
		if _, err := Resolve(config, r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, standby := range []bool{false, true} {
		r := readings()
		r.Publication.TableOID, r.Server.InRecovery = 16500, standby
		_, err := Resolve(config, r)
		if f := outbox.FaultOf(err); f == nil || f.Observed == standby {
			t.Errorf("standby %t: %#v", standby, err)
		}
	}
	r := readings()
	r.Record.Publication.TableOID, r.Publication.Xmin = 0, 800
	if _, err := Resolve(config, r); outbox.ClassOf(err) != outbox.Gap {
		t.Errorf("another publication than an older record's: %v", err)
	}
}

func refused(t *testing.T, err error, code string, class outbox.Class, rng string, parts []string) {
	t.Helper()
	f := outbox.FaultOf(err)
	if f == nil || f.Code != code || f.Class != class || f.Hint == "" {
		t.Fatalf("got %#v, want code %s, class %v, a hint", err, code, class)
	}
	if has := strings.Contains(f.Error(), "LSN range "+rng); has != (rng != "") {
		t.Errorf("range %q: %s", rng, f)
	}
	for _, p := range parts {
		if !strings.Contains(f.Error(), p) {
			t.Errorf("%q is not in: %s", p, f)
		}
	}
	if class == outbox.Gap && code != "slot_database" && code != "slot_plugin" &&
		code != CodeSnapshotUnfinished && code != CodeRestoreUnfinished &&
		(!strings.HasPrefix(f.Hint, "Run `outflow repair`: ") ||
			!strings.Contains(f.Hint, "`outflow repair --accept "+code+"`")) {
		t.Errorf("the hint does not begin with the repair: %s", f.Hint)
	}
	if (code == "slot_plugin" || code == "slot_database") && strings.Contains(f.Error(), "drop") {
		t.Errorf("it advises to drop what is not ours: %s", f)
	}
	if strings.Contains(f.Error(), "%!") || strings.HasSuffix(f.Hint, ".") ||
		strings.Contains(f.Error(), "..") {
		t.Errorf("badly put: %s", f)
	}
}

func TestResolveWaitsForStandby(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(r *Readings){
		"no slot yet":          func(r *Readings) { r.Slot = relay.SlotState{} },
		"behind one":           func(r *Readings) { r.Server.WALEnd = 0x2FFF },
		"behind a thru":        func(r *Readings) { r.Stream.Newest.Thru = 0x5001 },
		"timeline to come":     func(r *Readings) { r.Record.Checkpoints[2].Timeline = 2 },
		"newest one's to come": func(r *Readings) { r.Stream.Newest.Timeline = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := readings()
			change(&r)
			if _, err := Resolve(config, r); outbox.ClassOf(err) != outbox.Gap {
				t.Fatalf("a primary: got %v, want a gap", err)
			}
			r.Server.InRecovery = true
			if _, err := Resolve(config, r); !errors.Is(err, ErrStandby) ||
				outbox.ClassOf(err) != outbox.Transient {
				t.Fatalf("got %v, want ErrStandby", err)
			}
		})
	}
}

func TestTwoReadingsAgreeOnAStart(t *testing.T) {
	t.Parallel()
	a, err := Resolve(config, readings())
	must.Succeed(t, err)
	for name, change := range map[string]func(r *Readings){
		"another one":    func(r *Readings) { r.Slot.Confirmed = 0x2001 },
		"more messages":  func(r *Readings) { newest(r, 13) },
		"lost meanwhile": func(r *Readings) { r.Stream.NewestSeq = 11 },
	} {
		r := readings()
		change(&r)
		if b, err := Resolve(config, r); err != nil || a.Same(b) {
			t.Errorf("%s: same, %v", name, err)
		}
	}
	if b, _ := Resolve(config, readings()); !reflect.DeepEqual(a, b) {
		t.Error("two readings, two starts")
	}
	for name, change := range map[string]func(s *Start){
		"due":       func(s *Start) { s.Checkpoint.Due++ },
		"last seq":  func(s *Start) { s.LastSeq++ },
		"end":       func(s *Start) { s.End++ },
		"stored":    func(s *Start) { s.AlreadyStored++ },
		"loss":      func(s *Start) { s.Loss = "stream OUTBOX is empty" },
		"":          func(s *Start) {},
		"confirmed": func(s *Start) { s.Confirmed++ }, // nobody need wait for the slot to stand still
	} {
		b := a
		if change(&b); a.Same(b) != (name == "" || name == "confirmed") {
			t.Errorf("another %s: same is %t", name, a.Same(b))
		}
	}
}

// A checkpoint that begins below the confirmed LSN is of no use, wherever its due lies: PostgreSQL does not
// send what it holds again.
func TestAStartNeverNeedsWhatIsConfirmed(t *testing.T) {
	t.Parallel()
	r := readings()
	r.Slot.Confirmed = 0x1900
	r.Record = record(holding(at(0x1000, 5, 300*time.Second), 0, 5),
		holding(at(0x2000, 9, 200*time.Second), 0x1800, 9),
		holding(at(0x3000, 12, 10*time.Second), 0x1A00, 12))
	got, err := Resolve(config, r)
	if err != nil || got.Checkpoint.Due != 0x3000 {
		t.Errorf("starts from %v: %v", got.Checkpoint.Due, err)
	}
}

// uninstalled makes them what outflow uninstall leaves, where the stream stays that ended at base.
func uninstalled(r *Readings, base uint64) {
	r.Record, r.Slot = record(), relay.SlotState{}
	r.Record.Creating, r.Record.Base = true, base
}
