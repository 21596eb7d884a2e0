package checkpoint

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestARecordIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	full := record(at(0x1000, 5, time.Minute), at(0x2000, 9, 0))
	full.Checkpoints[1].PublishedAhead = []outbox.Position{{LSN: 0x2001}, {LSN: 0x2001, Index: 4},
		{LSN: 0x2100}}
	full.Holes = []Range{{6, 7}, {9, 9}}
	creating := record()
	creating.Creating = true
	begun, repairing, repaired := record(), record(at(0x1000, 5, 0)), record(at(0x1000, 7, 0))
	begun.Repairing, begun.Base = "slot_missing", 5
	repairing.Repairing, repairing.Base = "slot_missing", 5
	repaired.Base = 7
	messages, both := record(at(0x1000, 5, 0)), record(at(0x1000, 5, 0))
	messages.Mapping.Source, messages.Mapping.Table, messages.Publication.PublicationIdentity =
		relay.FromMessage, "", relay.PublicationIdentity{}
	both.Mapping.Source = relay.FromBoth
	shard := record(at(0x1000, 5, 0))
	shard.Mapping.Shard = relay.Shard{Index: 1, Of: 4}
	unnamed := func(r *Record) *Record { // as an outflow wrote it that did not know the table's OID
		c := *r
		c.Publication.TableOID = 0
		return &c
	}
	older, olderBoth, olderShard := unnamed(full), unnamed(both), unnamed(shard)
	rewritten := record(at(0x1000, 5, 0))
	rewritten.Publication.Path, rewritten.Publication.Rewritten = "731,740", "0123456789abcdef"
	own := unnamed(messages)
	own.Mapping.OwnOnly = true
	gap, gapSilent := record(at(0x1000, 5, 0), holding(at(0x2000, 9, 0), 0x1800, 3)),
		record(holding(at(0x2000, 9, 0), 0, 0))
	gap.Checkpoints[1].Holds = append(gap.Checkpoints[1].Holds,
		relay.Hold{Sequence: 2, Cold: true, Oldest: outbox.Position{LSN: 0x1820, Index: 1}})
	gap.Checkpoints[1].Remembered = 4
	for _, want := range []*Record{full, creating, begun, repairing, repaired, messages, both, shard, older,
		olderBoth, olderShard, rewritten, own, gap, gapSilent} {
		doc, err := want.Encode()
		must.Succeed(t, err)
		got, err := Decode(doc)
		must.Succeed(t, err)
		want.Version = tableVersion
		switch want { // an older outflow would take it for another mapping
		case older:
			want.Version = repairVersion
		case gap, gapSilent:
			want.Version = gapVersion
		case messages, olderBoth:
			want.Version = sourceVersion
		case olderShard:
			want.Version = shardVersion
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
}

func TestTheRecordHasItsDocumentedForm(t *testing.T) {
	t.Parallel()
	r := record(at(0x1000, 5, time.Minute))
	r.Checkpoints[0].PublishedAhead = []outbox.Position{{LSN: 0x1001, Index: 4}}
	r.Holes = []Range{{6, 7}}
	doc, err := r.Encode()
	must.Succeed(t, err)
	const want = `{"v":5,"slot":"outflow","database":"app","system_id":"7361530121234511111",` +
		`"publication":{"oid":16401,"xmin":730,"rel_oid":16402,"rel_xmin":730,"table_oid":16385,"seen":"0/3000"},` +
		`"mapping":{"table":"public.outbox","doc_id":"doc_id","actor_id":"actor_id","counter":"counter","seq_key":"seq_key","payload":"payload"},` +
		`"stream":"OUTBOX","stream_created":"2026-03-01T11:00:00Z",` +
		`"places":[{"due":"0/1000","seq":5,"taken":["0/1001-4"],"settings":{"horizon":"20ms","sort":"seq_key","max_events":65536,"max_bytes":67108864},` +
		`"timeline":1,"since":"2026-03-01T11:59:00Z"}],"holes":[{"from":6,"to":7}]}`
	if string(doc) != want {
		t.Errorf("got  %s\nwant %s", doc, want)
	}
}

func TestARecordThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	doc, err := record(at(0x1000, 5, time.Minute), at(0x2000, 9, 0)).Encode()
	must.Succeed(t, err)
	good := string(doc)
	unnamed := strings.Replace(good, `"table_oid":16385,`, "", 1)
	for name, c := range map[string]struct{ doc, code string }{
		"empty":           {"", "record_corrupt"},
		"cut":             {good[:len(good)/2], "record_corrupt"},
		"no version":      {strings.Replace(good, `"v":5,`, "", 1), "record_corrupt"},
		"newer":           {strings.Replace(good, `"v":5,`, `"v":12,"new":true,`, 1), "record_version"},
		"table too early": {strings.Replace(good, `"v":5`, `"v":4`, 1), "record_corrupt"},
		"path, no table":  {strings.Replace(good, `"table_oid":16385`, `"path":"731"`, 1), "record_corrupt"},
		"own too early": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":2`, 1),
			`"payload":"payload"`, `"payload":"payload","own_only":true`, 1), "record_corrupt"},
		"older":            {strings.Replace(good, `"v":5`, `"v":0`, 1), "record_corrupt"},
		"unknown field":    {strings.Replace(good, `"v":5`, `"v":5,"new":true`, 1), "record_corrupt"},
		"something behind": {good + " {}", "record_corrupt"},
		"unknown source": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":3`, 1), `"mapping":{`,
			`"mapping":{"source":"file",`, 1), "record_corrupt"},
		"source too early": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":2`, 1), `"mapping":{`,
			`"mapping":{"source":"both",`, 1), "record_corrupt"},
		"unknown shard": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":4`, 1), `"mapping":{`,
			`"mapping":{"shard":"4/4",`, 1), "record_corrupt"},
		"shard too early": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":3`, 1), `"mapping":{`,
			`"mapping":{"shard":"1/4",`, 1), "record_corrupt"},
		"shard of messages": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":4`, 1), `"mapping":{`,
			`"mapping":{"source":"both","shard":"1/4",`, 1), "record_corrupt"},
		"no table": {strings.Replace(good, `"table":"public.outbox"`, `"table":""`, 1), "record_corrupt"},
		"table, no rows": {strings.Replace(strings.Replace(unnamed, `"v":5`, `"v":3`, 1), `"mapping":{`,
			`"mapping":{"source":"message",`, 1), "record_corrupt"},
		"no slot": {strings.Replace(good, `"slot":"outflow"`, `"slot":""`, 1), "record_corrupt"},
		"no system": {strings.Replace(good, `"system_id":"7361530121234511111"`, `"system_id":""`, 1),
			"record_corrupt"},
		"no stream": {strings.Replace(good, `"stream":"OUTBOX"`, `"stream":""`, 1), "record_corrupt"},
		"creating, repairs": {good[:strings.Index(good, `"places"`)] +
			`"creating":true,"repairing":"slot_missing","places":[]}`, "record_corrupt"},
		"no places": {good[:strings.Index(good, `"places"`)] + `"places":[]}`, "record_corrupt"},
		"creating, placed": {strings.Replace(good, `"places"`, `"creating":true,"places"`, 1),
			"record_corrupt"},
		"due not rising": {strings.Replace(good, `"0/2000"`, `"0/1000"`, 1), "record_corrupt"},
		"seqs falling":   {strings.Replace(good, `"seq":9`, `"seq":4`, 1), "record_corrupt"},
		"no time": {strings.Replace(good, `"since":"2026-03-01T12:00:00Z"`,
			`"since":"0001-01-01T00:00:00Z"`, 1), "record_corrupt"},
		"bad settings": {strings.Replace(good, `"max_events":65536`, `"max_events":0`, 1), "record_corrupt"},
		"taken below due": {strings.Replace(good, `"seq":9,`, `"seq":9,"taken":["0/2000-1"],`, 1),
			"record_corrupt"},
		"taken unordered": {strings.Replace(good, `"seq":9,`, `"seq":9,"taken":["0/2002-1","0/2001-1"],`,
			1), "record_corrupt"},
		"too many taken": {strings.Replace(good, `"seq":9,`, `"seq":9,"taken":[`+
			strings.Repeat(`"0/2002-1",`, 512)+`"0/2002-1"],`, 1), "record_corrupt"},
		"hole upside down": {strings.TrimSuffix(good, "}") + `,"holes":[{"from":9,"to":8}]}`,
			"record_corrupt"},
		"holes overlapping": {strings.TrimSuffix(good, "}") +
			`,"holes":[{"from":6,"to":8},{"from":8,"to":9}]}`, "record_corrupt"},
		"hole at 0": {strings.TrimSuffix(good, "}") + `,"holes":[{"from":0,"to":8}]}`, "record_corrupt"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.doc == good {
				t.Fatal("the document was not changed")
			}
			class := outbox.Gap
			if c.code == "record_version" {
				class = outbox.Fatal
			}
			_, err := Decode([]byte(c.doc))
			refused(t, err, c.code, class, "", nil)
		})
	}
	if _, err := record().Encode(); err == nil {
		t.Error("Encode wrote a record without checkpoints")
	}
}

// What a checkpoint of gap mode may not say.
func TestRecordRefusesACheckpointThatGapModeCannotHaveMade(t *testing.T) {
	t.Parallel()
	good := func() *Record {
		p := holding(at(0x2000, 9, 0), 0x1800, 3)
		p.Holds = append(p.Holds, relay.Hold{Sequence: 2, Oldest: outbox.Position{LSN: 0x1810, Index: 1}})
		return record(at(0x1000, 5, 0), p)
	}
	for name, change := range map[string]func(r *Record, p *StoredCheckpoint){
		"":                      func(*Record, *StoredCheckpoint) {},
		"holds in horizon mode": func(_ *Record, p *StoredCheckpoint) { p.Settings = settings },
		"a start in horizon mode": func(_ *Record, p *StoredCheckpoint) {
			p.Settings, p.Holds, p.Remembered = settings, nil, 0
		},
		"memory in horizon mode": func(_ *Record, p *StoredCheckpoint) {
			p.Settings, p.Holds, p.From = settings, nil, 0
		},
		"taken events": func(_ *Record, p *StoredCheckpoint) {
			p.PublishedAhead = []outbox.Position{{LSN: 0x2001}}
		},
		"holds out of order": func(_ *Record, p *StoredCheckpoint) {
			p.Holds[0].Oldest, p.Holds[1].Oldest = p.Holds[1].Oldest, p.Holds[0].Oldest
		},
		"two holds of one event": func(_ *Record, p *StoredCheckpoint) {
			p.Holds[1].Oldest = p.Holds[0].Oldest
		},
		"two holds of one sequence": func(_ *Record, p *StoredCheckpoint) {
			p.Holds[1].Sequence = p.Holds[0].Sequence
		},
		"a held event beyond due":   func(_ *Record, p *StoredCheckpoint) { p.Holds[1].Oldest.LSN = 0x2001 },
		"no start":                  func(_ *Record, p *StoredCheckpoint) { p.From = 0 },
		"a start behind the oldest": func(_ *Record, p *StoredCheckpoint) { p.From = p.Holds[0].Oldest.LSN },
		"a start without holds":     func(_ *Record, p *StoredCheckpoint) { p.Holds = nil },
		"a start that goes back":    func(_ *Record, p *StoredCheckpoint) { p.From = 0xFFF },
		"more remembered than memory": func(_ *Record, p *StoredCheckpoint) {
			p.Settings.Gap.Memory, p.Remembered = 3, 4
		},
		"more remembered than messages": func(_ *Record, p *StoredCheckpoint) { p.Remembered = 10 },
		"less than nothing remembered":  func(_ *Record, p *StoredCheckpoint) { p.Remembered = -1 },
		"too many holds": func(_ *Record, p *StoredCheckpoint) {
			for i := range relay.MaxHolds {
				p.Holds = append(p.Holds, relay.Hold{Sequence: uint64(i + 3),
					Oldest: outbox.Position{LSN: 0x1900, Index: uint32(i)}})
			}
		},
	} {
		r := good()
		change(r, &r.Checkpoints[1])
		if _, err := r.Encode(); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
	// An older program wrote none of it.
	doc, err := good().Encode()
	must.Succeed(t, err)
	_, err = Decode(bytes.Replace(doc, []byte(`"v":6`), []byte(`"v":5`), 1))
	refused(t, err, "record_corrupt", outbox.Gap, "", nil)
}

// As many events may be taken as the buffer's limit allows, and no more.
func TestRecordTakesSoManyEvents(t *testing.T) {
	t.Parallel()
	r := record(at(0x1000, 5, 0))
	for i := range relay.MaxPublishedAhead {
		r.Checkpoints[0].PublishedAhead = append(r.Checkpoints[0].PublishedAhead,
			outbox.Position{LSN: 0x1001, Index: uint32(i)})
	}
	if _, err := r.Encode(); err != nil {
		t.Error(err)
	}
	r.Checkpoints[0].PublishedAhead = append(r.Checkpoints[0].PublishedAhead, outbox.Position{LSN: 0x1002})
	if _, err := r.Encode(); err == nil {
		t.Error("Encode wrote one more")
	}
}

func TestAnUpdateMakesANewRecordAndKeepsTheOld(t *testing.T) {
	t.Parallel()
	r := record()
	r.Creating, r.Holes = true, []Range{{1, 2}}
	s := Update{Checkpoints: []StoredCheckpoint{at(0x1000, 5, 0)}, Holes: []Range{{6, 7}}}
	now := publication
	now.Rewritten = "0123456789abcdef"
	later, earlier := r.With(s, now, 0x4000), r.With(s, now, 0x2000)
	if later.Creating || !reflect.DeepEqual(later.Checkpoints, s.Checkpoints) ||
		!reflect.DeepEqual(later.Holes, s.Holes) {
		t.Errorf("got %+v", later)
	}
	if later.Publication.PublicationIdentity != now || later.Publication.Seen != 0x4000 ||
		earlier.Publication.Seen != 0x3000 {
		t.Errorf("seen up to %v and %v", later.Publication.Seen, earlier.Publication.Seen)
	}
	if !r.Creating || len(r.Checkpoints) > 0 {
		t.Error("it was changed")
	}
}

func TestAFirstCheckpointThatWasLostIsKnown(t *testing.T) {
	t.Parallel()
	slot, stream := readings().Slot, readings().Stream
	creating, other := record(), stream
	creating.Creating = true
	other.Created = epoch
	for name, c := range map[string]struct {
		got, want bool
	}{
		"it is":               {creating.LostFirstCheckpoint(slot, stream), true},
		"the slot isn't made": {creating.LostFirstCheckpoint(relay.SlotState{}, stream), false},
		"another stream":      {creating.LostFirstCheckpoint(slot, other), false},
		"one is there":        {record(at(0x1000, 5, 0)).LostFirstCheckpoint(slot, stream), false},
	} {
		if c.got != c.want {
			t.Errorf("%s: %t", name, c.got)
		}
	}
}

// An older outflow's record is read, and is of this version when it is stored again.
func TestDecodeReadsTheOlderVersion(t *testing.T) {
	t.Parallel()
	older := record(at(0x1000, 5, time.Minute))
	older.Publication.TableOID = 0
	doc, err := older.Encode()
	must.Succeed(t, err)
	r, err := Decode(bytes.Replace(doc, []byte(`"v":2`), []byte(`"v":1`), 1))
	must.Succeed(t, err)
	if again, err := r.Encode(); err != nil || !bytes.Equal(again, doc) {
		t.Errorf("%s, %v", again, err)
	}
}

func FuzzDecode(f *testing.F) {
	doc, err := record(at(0x1000, 5, time.Minute), at(0x2000, 9, 0)).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(doc)
	f.Fuzz(func(t *testing.T, doc []byte) {
		r, err := Decode(doc)
		if err != nil {
			return
		}
		if _, err := r.Encode(); err != nil {
			t.Fatalf("decoded, but: %v", err)
		}
	})
}

// What a revision added can't be older than the revision's own time, however long it was on its way.
func TestACheckpointIsNoOlderThanItsRevision(t *testing.T) {
	t.Parallel()
	r := record(at(0x1000, 5, time.Minute), at(0x2000, 9, 10*time.Second), at(0x3000, 9, 10*time.Second))
	r.StoredAt(epoch)
	for i, want := range []time.Duration{time.Minute, 0, 0} {
		if got := epoch.Sub(r.Checkpoints[i].Since); got != want {
			t.Errorf("checkpoint %d: age %v, want %v", i, got, want)
		}
	}
	r.StoredAt(epoch.Add(-time.Hour)) // another clock
	if !r.Checkpoints[2].Since.Equal(epoch) {
		t.Error("a time was set back")
	}
	// Who wrote the first checkpoint had a clock that was ahead: what was added last counts from when it was
	// stored all the same.
	r = record(at(0x1000, 5, -time.Hour), at(0x2000, 9, 10*time.Second))
	r.StoredAt(epoch)
	if age := epoch.Sub(r.Checkpoints[1].Since); age != 0 {
		t.Errorf("the newest checkpoint: age %v, want 0", age)
	}
	// The broker's own clock is the same one.
	r = record(at(0x1000, 5, time.Minute), at(0x2000, 9, 10*time.Second))
	r.Checkpoints[1].Broker = epoch.Add(-5 * time.Second)
	r.StoredAt(epoch)
	if p := r.Checkpoints[1]; !p.Broker.Equal(epoch) || !r.Checkpoints[0].Broker.IsZero() {
		t.Errorf("by the broker's clock: %v, and what was not known: %v", p.Broker, r.Checkpoints[0].Broker)
	}
	r.StoredAt(epoch.Add(-time.Hour))
	if p := r.Checkpoints[1]; !p.Broker.Equal(epoch) {
		t.Errorf("the broker's time was set back to %v", p.Broker)
	}
	r = record(at(0x1000, 5, 10*time.Second))
	if r.StoredAt(epoch); !r.Checkpoints[0].Broker.IsZero() {
		t.Errorf("the broker's time was not known, and is %v", r.Checkpoints[0].Broker)
	}
	record().StoredAt(epoch) // there is none yet
}

func TestRangesOfHolesAreCountedAndFound(t *testing.T) {
	t.Parallel()
	holes := []Range{{3, 5}, {8, 8}, {10, 20}}
	for _, c := range []struct {
		got, want any
	}{
		{upTo(holes, 4), []Range{{3, 4}}},
		{upTo(holes, 2), []Range(nil)},
		{above(holes, 4), []Range{{5, 5}, {8, 8}, {10, 20}}},
		{above(holes, 20), []Range(nil)},
		{add(holes, Range{6, 7}), []Range{{3, 8}, {10, 20}}},
		{add(holes, Range{11, 12}), holes},
		{add(holes, Range{15, 30}), []Range{{3, 5}, {8, 8}, {10, 30}}},
		{add(holes, Range{1, 1}), []Range{{1, 1}, {3, 5}, {8, 8}, {10, 20}}},
		{add(nil, Range{1, 1}), []Range{{1, 1}}},
		{below(holes, 30, 0), uint64(30)},
		{below(holes, 30, 10), uint64(20)},
		{below(holes, 30, 11), uint64(8)}, // 21 to 30, and 9
		{below(holes, 30, 12), uint64(6)},
		{below(holes, 15, 1), uint64(8)},
		{below(holes, 20, 0), uint64(20)},
		{below(holes, 30, 14), uint64(1)},
		{below(holes, 30, 15), uint64(0)},
		{below(nil, 30, 12), uint64(18)},
		{count(holes, 0, 30), uint64(30 - 3 - 1 - 11)},
		{count(holes, 4, 10), uint64(6 - 1 - 1 - 1)},
		{count(holes, 9, 9), uint64(0)},
		{count(holes, 9, 5), uint64(0)},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("got %v, want %v", c.got, c.want)
		}
	}
	if !reflect.DeepEqual(holes, []Range{{3, 5}, {8, 8}, {10, 20}}) {
		t.Error("the holes were changed")
	}
}

func TestARecordSaysWhatARepairHasBegun(t *testing.T) {
	t.Parallel()
	begun := func() *Record {
		r := record(at(0x1000, 5, time.Hour))
		r.Repairing = "slot_missing"
		r.Begun = &Begun{Durable: 3, Attempts: []Attempt{{Seq: 5, Sum: math.MaxUint64, At: epoch},
			{Seq: 9, Where: "id > 7", Found: &Found{Sequences: 9}, At: epoch}}}
		return r
	}
	doc, err := begun().Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Version != 11 ||
		!reflect.DeepEqual(got.Begun, begun().Begun) {
		t.Fatalf("%+v, %v", got, err)
	}
	older := bytes.Replace(doc, []byte(`"v":11`), []byte(`"v":10`), 1)
	if got, err := Decode(older); err != nil || !reflect.DeepEqual(got.Begun, begun().Begun) {
		t.Fatalf("%+v, %v", got, err)
	}
	r := begun()
	r.Begun.Attempts[1].Found = nil
	doc, err = r.Encode()
	must.Succeed(t, err)
	if got, err := Decode(doc); err != nil || got.Version != 10 {
		t.Fatalf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*Record){
		"no repair":    func(r *Record) { r.Repairing = "" },
		"a snapshot":   func(r *Record) { r.Repairing = ForSnapshot },
		"out of order": func(r *Record) { r.Begun.Attempts[1].Seq = 5 },
		"at no time":   func(r *Record) { r.Begun.Attempts[0].At = time.Time{} },
	} {
		r := begun()
		change(r)
		if _, err := r.Encode(); err == nil {
			t.Error(name)
		}
	}
}
