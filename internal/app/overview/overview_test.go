package overview

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// healthy is an installation that publishes.
func healthy() (pipeline.Status, watch.Reading) {
	fresh, safe := watch.Read{At: now.Add(-time.Second)}, int64(900<<20)
	return pipeline.Status{State: pipeline.StateRunning, Since: now.Add(-time.Hour), CaughtUp: now,
			ReadyChanged: now.Add(-time.Hour), HeldLimit: 10, HeldLimitBytes: 10},
		watch.Reading{
			Postgres: watch.Postgres{Read: fresh, WALEnd: 2000, WALRate: 1 << 20},
			Slot: watch.Slot{Read: fresh, Exists: true, Active: true, Holder: "outflow/s/a",
				Retained: 100 << 20,
				Safe:     &safe, WALStatus: "reserved"},
			NATS: watch.NATS{Read: fresh}, Stream: watch.Stream{Read: fresh, Exists: true},
			ConsumerList: fresh,
		}
}

func levels(r *Report) string {
	var all []string
	for _, p := range r.Parts() {
		all = append(all, string(p.Level))
	}
	return strings.Join(all, " ")
}

func TestTheVerdictSaysWhatIsWrongAndWhatIsAtRisk(t *testing.T) {
	t.Parallel()
	down := watch.Read{At: now.Add(-time.Minute), Error: "refused", FailingSince: now.Add(-time.Minute)}
	for name, c := range map[string]struct {
		change        func(s *pipeline.Status, r *watch.Reading)
		level         Level
		code          string
		effect, never string
		parts         string
	}{
		"all is well": {func(*pipeline.Status, *watch.Reading) {}, Good, "",
			"Nothing is lost. PostgreSQL keeps 100 MiB of WAL for the slot; if publishing stopped now, the " +
				"slot " +
				"would be lost in about 15 min", "", "good good good good good idle"},
		"NATS is away": {func(s *pipeline.Status, r *watch.Reading) {
			s.State, s.ReadyChanged = pipeline.StateAway, now.Add(-time.Minute)
			r.NATS.Read, r.Stream.Read, r.ConsumerList = down, down, down
		}, Bad, "nats_connect", "the slot is lost in about 15 min, when 900 MiB more are written", "would",
			"good good good warning bad unknown"},
		"NATS is there, and refuses": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State, s.Code, s.Error = pipeline.StateAway, "no_storage", "the server has no room"
		}, Bad, "no_storage", "the slot is lost in about 15 min", "would", "good good good warning bad idle"},
		"between two sessions": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State, s.Code, s.Error = pipeline.StateWaiting, "no_storage", "the server has no room"
		}, Bad, "no_storage", "the slot is lost in about 15 min", "would", "good good idle idle good idle"},
		"PostgreSQL is away": {func(s *pipeline.Status, r *watch.Reading) {
			s.State = pipeline.StateWaiting
			r.Postgres.Read, r.Slot.Read = down, down
		}, Bad, "postgres_connect", "(read 1 min ago)", "", "bad unknown idle idle good idle"},
		"a gap": {func(s *pipeline.Status, r *watch.Reading) {
			s.State, s.Fault = pipeline.StateFault, &pipeline.Fault{Code: "stream_shortened", Message: "m",
				Hint: "h"}
			r.Slot.Active = false
		}, Bad, "stream_shortened", "Events may be missing", "Nothing is lost",
			"good warning idle idle good idle"},
		"a set-up that may leave rows out": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State, s.Fault = pipeline.StateFault, &pipeline.Fault{Code: "publication_insert", Message: "m"}
		}, Bad, "publication_insert", "Events may be missing from the stream. PostgreSQL keeps",
			"Nothing is lost", "good good idle idle good idle"},
		"a login that is refused": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State, s.Fault = pipeline.StateFault, &pipeline.Fault{Code: "nats_auth", Message: "m"}
		}, Bad, "nats_auth", "Nothing is lost. PostgreSQL keeps", "", "good good idle idle good idle"},
		"a row": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State, s.Fault = pipeline.StateFault, &pipeline.Fault{Code: "too_large", Message: "m",
				Hint: "h"}
		}, Bad, "too_large", "Nothing is lost", "", "good good idle idle good idle"},
		"a standby": {func(s *pipeline.Status, _ *watch.Reading) { s.State = pipeline.StateStandby }, Idle,
			"",
			"Another outflow publishes", "", "good good idle idle good idle"},
		"it waits for the other clusters": {func(s *pipeline.Status, _ *watch.Reading) {
			s.State = pipeline.StateEchoes
		}, Warning, "", "Nothing is lost", "", "good good good warning good idle"},
		"it is behind": {func(s *pipeline.Status, _ *watch.Reading) {
			s.CaughtUp = now.Add(-time.Minute)
		}, Warning, "", "Nothing is lost", "", "good good good good good idle"},
		"the slot has little room": {func(_ *pipeline.Status, r *watch.Reading) { *r.Slot.Safe = 20 << 20 },
			Warning, "", "in about 20 s", "", "good warning good good good idle"},
		"the slot has no limit": {func(_ *pipeline.Status, r *watch.Reading) { r.Slot.Safe = nil },
			Good, "", "max_slot_wal_keep_size is not set", "", "good good good good good idle"},
		"the slot is lost": {func(s *pipeline.Status, r *watch.Reading) {
			s.State, r.Slot.WALStatus = pipeline.StateWaiting, "lost"
		}, Bad, "", "Events are missing", "Nothing is lost", "good bad idle idle good idle"},
		"nobody reads a consumer": {func(_ *pipeline.Status, r *watch.Reading) {
			r.Consumers = []watch.Consumer{{Name: "a", Pending: 3}}
		}, Good, "", "Nothing is lost", "", "good good good good good warning"},
		"the stream is nearly full, and refuses then": {func(_ *pipeline.Status, r *watch.Reading) {
			r.Stream.Bytes, r.Stream.MaxBytes, r.Stream.Refuses = 95, 100, true
		}, Warning, "", "Nothing is lost", "", "good good good good warning idle"},
		"the stream is nearly full, and removes its oldest messages": {
			func(_ *pipeline.Status, r *watch.Reading) { r.Stream.Bytes, r.Stream.MaxBytes = 95, 100 },
			Good, "", "Nothing is lost", "", "good good good good good idle"},
		"the account is nearly full": {func(_ *pipeline.Status, r *watch.Reading) {
			r.NATS.Storage, r.NATS.StorageLimit = 95, 100
		}, Warning, "", "Nothing is lost", "", "good good good good warning idle"},
		"nothing was read yet": {func(s *pipeline.Status, r *watch.Reading) {
			*s, *r = pipeline.Status{State: pipeline.StateConnecting}, watch.Reading{}
		}, Unknown, "", "not known", "Nothing is lost", "unknown unknown idle idle unknown unknown"},
	} {
		s, r := healthy()
		c.change(&s, &r)
		rep := New(&Info{InFlightLimit: 10}, &s, &r, now)
		v := rep.Verdict
		if v.Level != c.level || v.Code != c.code || !strings.Contains(v.Effect, c.effect) ||
			c.never != "" && strings.Contains(v.Effect, c.never) || v.Do == "" {
			t.Errorf("%s: %+v", name, v)
		}
		if got := levels(rep); got != c.parts {
			t.Errorf("%s: parts %s, want %s", name, got, c.parts)
		}
	}
}

// A standby lists consumers and partitions every 25 s: only what is older than that is old.
func TestListsAreNotOldBetweenReadings(t *testing.T) {
	t.Parallel()
	for age, old := range map[time.Duration]string{30 * time.Second: "", time.Minute: "read 1 min ago"} {
		s, r := healthy()
		r.ConsumerList.At = now.Add(-age)
		r.Partitions = watch.Partitions{Read: r.ConsumerList, Managed: true}
		parts := New(&Info{InFlightLimit: 10}, &s, &r, now).Parts()
		for _, got := range parts[len(parts)-2:] {
			if got.Old != old {
				t.Errorf("%s: %+v, want %q", age, got, old)
			}
		}
	}
}

// Whoever reads both servers says the same without a process to ask, and an error's hint once.
func TestTheVerdictOfAStart(t *testing.T) {
	t.Parallel()
	_, r := healthy()
	rep := Of(config.Config{Slot: "slot", Stream: "STREAM"}, &r, now)
	rep.OfHealth(nil, true, nil, nil)
	if rep.Verdict.Level != Good || levels(rep) != "good good good idle" {
		t.Errorf("%+v, %s", rep.Verdict, levels(rep))
	}
	rep.OfHealth(nil, false, nil, nil)
	if rep.Verdict.Level != Warning {
		t.Errorf("nobody holds the slot: %+v", rep.Verdict)
	}
	rep.OfHealth(nil, false, nil, &checkpoint.End{Code: "null_key", Class: "poison", Hint: "Set a limit."})
	if v := rep.Verdict; v.Level != Bad || v.Do != "Set a limit. Then start `outflow run`" {
		t.Errorf("the last one ended at a row: %+v", v)
	}
	rep.OfHealth(nil, false, &pipeline.Fault{Code: "too_large", Message: "m", Since: now}, nil)
	if v := rep.Verdict; v.Level != Bad || v.Code != "too_large" || v.Since != now || v.Do == "" {
		t.Errorf("one holds a fault: %+v", v)
	}
	rep.Slot.WaitsAt = "no_storage"
	rep.OfHealth(nil, true, nil, nil)
	if v := rep.Verdict; v.Level != Bad || v.Code != "no_storage" || v.State != "Not publishing" ||
		strings.Contains(v.Effect, "if publishing stopped") {
		t.Errorf("one waits at a full disk: %+v", v)
	}
	rep.OfHealth(&outbox.Fault{Code: "nats_connect", Message: "m", Hint: "Do it. `x` follows",
		Err: errors.New("refused")}, true, nil, nil)
	if v := rep.Verdict; v.Level != Bad || v.Detail != "m: refused" || v.Do != "Do it. `x` follows" {
		t.Errorf("%+v", v)
	}
}

// Retention has parts where it is in use, each with what is wrong.
func TestRetentionIsShownWhereItIsInUse(t *testing.T) {
	t.Parallel()
	read := watch.Read{At: now}
	all := func() (watch.Partitions, *watch.Maintained) {
		return watch.Partitions{Read: read, Managed: true, Ranges: true, Ahead: 4},
			&watch.Maintained{At: now, Interval: time.Minute,
				Parts:   []watch.MaintainPart{{Name: "archive"}, {Name: "partition"}, {Name: "stream"}},
				Archive: &watch.Archived{SegmentAge: time.Hour}, Kept: &watch.Kept{}}
	}
	for name, c := range map[string]struct {
		change func(p *watch.Partitions, m *watch.Maintained)
		parts  string
		says   string
	}{
		"all is well": {func(*watch.Partitions, *watch.Maintained) {}, "good good good", "enough ahead"},
		"none was made": {func(p *watch.Partitions, _ *watch.Maintained) { p.Ahead = 0 }, "bad good good",
			"none ahead"},
		"one is left": {func(p *watch.Partitions, _ *watch.Maintained) { p.Ahead = 1 }, "warning good good",
			"few ahead"},
		"a slot is behind": {func(p *watch.Partitions, _ *watch.Maintained) {
			p.Blocked = []watch.Blocked{{Slot: "debezium", Since: now.Add(-2 * time.Hour)}}
		}, "warning good good", "debezium, 2 h"},
		"rows of a plain table": {func(p *watch.Partitions, _ *watch.Maintained) {
			p.Ranges, p.Ahead = false, 0
		}, "good good good", "Old rows"},
		"the archive is behind": {func(_ *watch.Partitions, m *watch.Maintained) {
			m.Archive.Oldest = now.Add(-2 * time.Hour)
		}, "good warning good", "behind"},
		"a part fails": {func(_ *watch.Partitions, m *watch.Maintained) {
			m.Parts[2].Fail(&outbox.Fault{Code: "stream_recreated"}, now.Add(-time.Minute))
		}, "good good warning", "stream_recreated, 1 min"},
		"a consumer needs messages": {func(_ *watch.Partitions, m *watch.Maintained) {
			*m.Kept = watch.Kept{Messages: 7, By: "consumer search"}
		}, "good good good", "consumer search"},
		"nobody maintains": {func(_ *watch.Partitions, m *watch.Maintained) { m.At = now.Add(-time.Hour) },
			"warning warning warning", "nobody maintains"},
	} {
		s, r := healthy()
		p, m := all()
		c.change(&p, m)
		r.Partitions, r.Maintenance = p, watch.Maintenance{Read: read, Maintained: m}
		var got []string
		says := ""
		rep := New(&Info{InFlightLimit: 10}, &s, &r, now)
		for _, part := range rep.Parts()[6:] {
			got = append(got, string(part.Level))
			says += fmt.Sprintln(part)
		}
		if strings.Join(got, " ") != c.parts || !strings.Contains(says, c.says) {
			t.Errorf("%s: %v, want %s\n%s", name, got, c.parts, says)
		}
		if good := c.parts == "good good good"; good != (rep.Verdict.Do == nothingToDo) ||
			!good && !strings.Contains(rep.Verdict.Do, "outflow doctor") {
			t.Errorf("%s: to do: %s", name, rep.Verdict.Do)
		}
	}
}

func TestOldFiguresAreMarked(t *testing.T) {
	t.Parallel()
	s, r := healthy()
	r.Slot.At = now.Add(-11 * time.Second)
	parts := New(&Info{}, &s, &r, now).Parts()
	if parts[0].Old != "" || parts[1].Old != "read 11 s ago" {
		t.Errorf("%q, %q", parts[0].Old, parts[1].Old)
	}
}

// Of several active databases each says which one it is, how it compares with its home, and for whom it keeps
// WAL.
func TestAClusterIsShown(t *testing.T) {
	t.Parallel()
	said := relay.Said{At: now.Add(-12 * time.Second), LSN: 0x100, Events: 1240}
	for name, c := range map[string]struct {
		cfg   config.Cluster
		knows func(s *pipeline.Status, r *watch.Reading)
		level Level
		word  string
		says  []string
	}{
		"home": {config.Cluster{ID: 1, Count: 3}, func(s *pipeline.Status, r *watch.Reading) {
			s.Said, s.Tally = said, relay.Tally{Since: 1, Events: 1300}
			r.Subscribers = []watch.Subscriber{{Slot: "to_2", Active: true, Retained: 5000}, {Slot: "to_3"}}
		}, Good, "home", []string{"number 1 of 3", "watermark 12 s ago", "confirmed at home 0/100",
			"events counted 1,240", "kept for to_2 4.9 KiB", "kept for to_3 0 B, nobody reads"}},
		"no control table": {config.Cluster{ID: 1}, func(*pipeline.Status, *watch.Reading) {}, Good, "home",
			[]string{"number 1"}},
		"reader": {config.Cluster{ID: 2, Subscription: "from_1"}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Said, s.Tally = said, relay.Tally{Since: 1, Events: 1230}
			s.Kept = checkpoint.Kept{Bytes: 3 << 20, Since: now.Add(-time.Minute)}
		}, Good, "reads from_1", []string{"events at home 1,240", "here 1,230", "behind 10",
			"kept for the home 3.0 MiB, 1 min"}},
		"ahead": {config.Cluster{ID: 2, Subscription: "from_1"}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Said, s.Tally = said, relay.Tally{Since: 1, Events: 1250}
		}, Good, "reads from_1", []string{"behind 0"}},
		"nothing published yet": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(s *pipeline.Status, _ *watch.Reading) {
				s.Said, s.Tally = said, relay.Tally{Since: 1}
			}, Good, "reads from_1", []string{"here 0", "behind 1,240"}},
		"nothing came": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(*pipeline.Status, *watch.Reading) {}, Good, "reads from_1", []string{"watermark none yet"}},
		"not compared": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(s *pipeline.Status, _ *watch.Reading) { s.Said = said }, Good, "reads from_1",
			[]string{"here not compared yet"}},
		"silent": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(s *pipeline.Status, _ *watch.Reading) {
				s.Said, s.Kept = said, checkpoint.Kept{Bytes: 1, Since: now.Add(-15 * time.Minute)}
			}, Warning, "the home is not heard", []string{"kept for the home 1 B, 15 min"}},
		"waits": {config.Cluster{ID: 1}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Agreed = &pipeline.Agreement{Hello: 4, WaitsFor: []int{2, 3}}
		}, Warning, "waits for clusters", []string{"waits for 2 3"}},
		"yielded": {config.Cluster{ID: 1}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Agreed = &pipeline.Agreement{Hello: 4, Yielded: true}
		}, Warning, "others publish", []string{"hello 4, yielded: others publish"}},
		"yielded for one": {config.Cluster{ID: 1, Count: 3}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Agreed = &pipeline.Agreement{Hello: 4, Yielded: true, WaitsFor: []int{3}}
		}, Warning, "others publish", []string{"hello 4, yielded: others publish", "waits for 3"}},
		"yielded to nobody": {config.Cluster{ID: 1, Count: 2}, func(s *pipeline.Status, _ *watch.Reading) {
			s.Agreed = &pipeline.Agreement{Hello: 4, Yielded: true, WaitsFor: []int{2}}
		}, Warning, "waits for clusters", []string{"hello 4, yielded, and no other cluster has answered"}},
		"yielded, one is gone": {config.Cluster{ID: 1, Count: 3, Mode: config.ModeIslands, Gone: "3"},
			func(s *pipeline.Status, _ *watch.Reading) {
				s.Agreed = &pipeline.Agreement{Hello: 4, Yielded: true, WaitsFor: []int{2}}
			}, Warning, "waits for clusters", nil},
		"in step": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(s *pipeline.Status, _ *watch.Reading) {
				s.Agreed = &pipeline.Agreement{Hello: 4, Heard: now.Add(-time.Second), Unsettled: 2048}
			}, Good, "reads from_1", []string{"home heard 1 s ago", "neither said nor claimed 2.0 KiB"}},
		"publishes": {config.Cluster{ID: 2, Subscription: "from_1"},
			func(s *pipeline.Status, _ *watch.Reading) {
				s.Agreed = &pipeline.Agreement{Hello: 4, Publishes: true}
			}, Warning, "publishes for its home", nil},
		"lost": {config.Cluster{ID: 1}, func(_ *pipeline.Status, r *watch.Reading) {
			r.Subscribers = []watch.Subscriber{{Slot: "a"}, {Slot: "b"}, {Slot: "c"}, {Slot: "d", Lost: true}}
		}, Warning, "a slot of others is lost", []string{"and for others 1"}},
	} {
		s, r := healthy()
		c.knows(&s, &r)
		parts := New(&Info{InFlightLimit: 10, Cluster: c.cfg}, &s, &r, now).Chain()
		p := parts[len(parts)-1]
		says := ""
		for _, f := range p.Figures {
			says += f.Name + " " + f.Value + "\n"
		}
		if p.Name != "Cluster" || p.Level != c.level || p.Word != c.word {
			t.Errorf("%s: %+v", name, p)
		}
		for _, want := range c.says {
			if !strings.Contains(says, want+"\n") {
				t.Errorf("%s: %q is not in\n%s", name, want, says)
			}
		}
	}
}

// What clusters that share nothing have said to one another is shown as the record has it.
func TestWhatClustersHaveAgreedIsShown(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rec  checkpoint.Record
		says []string
	}{
		{checkpoint.Record{Hello: 3, Left: make([]relay.Left, 2)},
			[]string{"hello 3", "ranges left to others 2"}},
		{checkpoint.Record{Hello: 3, Heard: &relay.HomeState{Waits: true}},
			[]string{"hello 3, waits for the others' answers"}},
		{checkpoint.Record{Hello: 3, Heard: &relay.HomeState{Waits: true, Yielded: true}},
			[]string{"hello 3, yielded: others publish"}},
		{checkpoint.Record{Claimed: make([]relay.Claimed, 1)}, []string{"ranges claimed here 1"}},
	} {
		r := &Report{Cluster: &Cluster{ID: 1}, now: now}
		r.Cluster.Agrees(&c.rec)
		p := r.cluster()
		var said []string
		for _, f := range p.Figures {
			said = append(said, f.Name+" "+f.Value)
		}
		for _, want := range c.says {
			if !slices.Contains(said, want) {
				t.Errorf("%q does not say %q", said, want)
			}
		}
	}
}
