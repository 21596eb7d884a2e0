package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

func connect(t *testing.T, url string, options ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, append(options, nats.NoReconnect(), nats.Timeout(time.Minute))...)
	must.Succeed(t, err)
	t.Cleanup(nc.Close)
	return nc
}

func bucket(t *testing.T) (context.Context, *nats.Conn, *Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	nc := connect(t, natstest.Server(t).URL())
	s := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	return ctx, nc, s
}

func ensure(ctx context.Context, t *testing.T, s *Store) {
	t.Helper()
	must.Succeed(t, s.EnsureBucket(ctx, 1, jetstream.FileStorage))
}

func save(ctx context.Context, t *testing.T, s *Store, r *Record, last uint64) uint64 {
	t.Helper()
	rev, err := s.Save(ctx, r, last)
	must.Succeed(t, err)
	return rev
}

func load(ctx context.Context, t *testing.T, s *Store) (*Record, uint64) {
	t.Helper()
	r, rev, err := s.Load(ctx)
	must.Succeed(t, err)
	return r, rev
}

func TestARecordIsWrittenOnlyOverTheOneThatWasRead(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	if r, rev := load(ctx, t, s); r != nil || rev != 0 {
		t.Fatalf("without a bucket: %v at %d", r, rev)
	}
	if _, err := s.Save(ctx, record(at(0x1000, 0, 0)), 0); err == nil || errors.Is(err, ErrUnknown) ||
		errors.Is(err, ErrConflict) {
		t.Fatalf("without a bucket: %v", err)
	}
	ensure(ctx, t, s)
	ensure(ctx, t, s) // as it is
	if r, rev := load(ctx, t, s); r != nil || rev != 0 {
		t.Fatalf("without a record: %v at %d", r, rev)
	}
	first := save(ctx, t, s, record(at(0x1000, 0, 0)), 0)
	second := save(ctx, t, s, record(at(0x2000, 3, 0)), first)
	if r, rev := load(ctx, t, s); rev != second || r.Checkpoints[0].Due != 0x2000 {
		t.Fatalf("loaded %+v at %d", r, rev)
	}
	for _, last := range []uint64{0, first, second + 1} {
		if _, err := s.Save(ctx, record(at(0x3000, 5, 0)), last); !errors.Is(err, ErrConflict) ||
			outbox.ClassOf(err) != outbox.Transient {
			t.Errorf("saved on top of %d, the record is at %d: %v", last, second, err)
		}
	}

	// Another slot's record does not move this one's revision.
	other := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow_2"})
	r := record(at(0x1000, 0, 0))
	r.Slot = "outflow_2"
	save(ctx, t, other, r, 0)
	third := save(ctx, t, s, record(at(0x3000, 5, 0)), second)

	kv := keyValue(ctx, t, nc)
	must.Succeed(t, kv.Delete(ctx, "outflow"))
	gone, rev := load(ctx, t, s)
	if gone != nil || rev <= third {
		t.Fatalf("after a deletion: %v at %d", gone, rev)
	}
	if _, err := s.Save(ctx, record(at(0x1000, 0, 0)), third); !errors.Is(err, ErrConflict) {
		t.Errorf("saved on top of a deletion: %v", err)
	}
	save(ctx, t, s, record(at(0x1000, 0, 0)), rev)
	must.Succeed(t, kv.Purge(ctx, "outflow"))
	if gone, rev := load(ctx, t, s); gone != nil || rev == 0 {
		t.Fatalf("after a purge: %v at %d", gone, rev)
	}
}

func keyValue(ctx context.Context, t *testing.T, nc *nats.Conn) jetstream.KeyValue {
	t.Helper()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
	must.Succeed(t, err)
	kv, err := js.KeyValue(ctx, Bucket("OUTBOX"))
	must.Succeed(t, err)
	return kv
}

func TestStoreKeeps64Revisions(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	var last uint64
	for i := range 70 {
		last = save(ctx, t, s, record(at(outbox.LSN(0x1000+i), 0, 0)), last)
	}
	revisions, err := keyValue(ctx, t, nc).History(ctx, "outflow")
	if err != nil || len(revisions) != 64 {
		t.Fatalf("%d revisions, %v", len(revisions), err)
	}
	r, err := Decode(revisions[0].Value())
	if err != nil || r.Checkpoints[0].Due != 0x1006 {
		t.Fatalf("the oldest: %+v, %v", r, err)
	}
}

func TestStoreRefusesWhatItCantRead(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	kv := keyValue(ctx, t, nc)
	another := record(at(0x1000, 0, 0))
	another.Slot = "outflow_2"
	doc, err := another.Encode()
	must.Succeed(t, err)
	for value, code := range map[string]string{"{": "record_corrupt", `{"v":12}`: "record_version",
		string(doc): "record_corrupt"} {
		if _, err := kv.PutString(ctx, "outflow", value); err != nil {
			t.Fatal(err)
		}
		_, _, err := s.Load(ctx)
		class := outbox.Gap
		if code == "record_version" {
			class = outbox.Fatal
		}
		refused(t, err, code, class, "", []string{"bucket outflow-OUTBOX, key outflow, revision"})
	}
}

func TestEnsureBucketRefusesOneThatForgets(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]jetstream.KeyValueConfig{
		"history": {History: 10},
		"age":     {History: 64, TTL: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, nc, s := bucket(t)
			js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(20*time.Second))
			must.Succeed(t, err)
			c.Bucket = Bucket("OUTBOX")
			if _, err := js.CreateKeyValue(ctx, c); err != nil {
				t.Fatal(err)
			}
			refused(t, s.EnsureBucket(ctx, 1, jetstream.FileStorage), "bucket_config", outbox.Fatal, "",
				[]string{"outflow-OUTBOX", "nats stream edit KV_outflow-OUTBOX --max-msgs-per-subject=64"})
		})
	}
}

// A record that took long to reach the store counts from when it did.
func TestLoadCountsFromTheStore(t *testing.T) {
	t.Parallel()
	ctx, _, s := bucket(t)
	ensure(ctx, t, s)
	before := time.Now().Add(-time.Second)
	p := at(0x1000, 0, 0)
	p.Since = time.Now().Add(-time.Hour).UTC()
	save(ctx, t, s, record(p), 0)
	if r, _ := load(ctx, t, s); r.Checkpoints[0].Since.Before(before) {
		t.Errorf("the checkpoint is of %v, before it was sent", r.Checkpoints[0].Since)
	}
}

// The record is asked for with STREAM.MSG.GET, which only the leader answers, and never with a direct get,
// which anybody does.
func TestLoadAsksTheLeader(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	save(ctx, t, s, record(at(0x1000, 0, 0)), 0)
	asked, err := nc.SubscribeSync("$JS.API.>")
	must.Succeed(t, err)
	load(ctx, t, s)
	m, err := asked.NextMsgWithContext(ctx)
	if err != nil || m.Subject != "$JS.API.STREAM.MSG.GET.KV_outflow-OUTBOX" {
		t.Fatalf("asked %v, %v", m, err)
	}
	if n, _, _ := asked.Pending(); n != 0 {
		t.Errorf("%d more questions", n)
	}
}

func TestStoreInADomain(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	srv := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) { o.JetStreamDomain = "hub" }})
	s := NewStore(jsapi.New(connect(t, srv.URL()), "$JS.hub.API."),
		StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	ensure(ctx, t, s)
	last := save(ctx, t, s, record(at(0x1000, 0, 0)), 0)
	if r, rev := load(ctx, t, s); r == nil || rev != last {
		t.Fatalf("loaded %v at %d, want %d", r, rev, last)
	}
	if _, err := s.Save(ctx, record(at(0x1000, 0, 0)), last+1); !errors.Is(err, ErrConflict) {
		t.Errorf("got %v, want ErrConflict", err)
	}
}

// A time-out does not say whether the record was written; here it was.
func TestNoAnswerIsUnknown(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	// Whoever saves hears nothing: a service that takes the request and does not answer stands before the
	// stream.
	requests := make(chan *nats.Msg, 1)
	silent := NewStore(jsapi.New(nc, "silent.API"), StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	if _, err := nc.ChanSubscribe("silent.API.>", requests); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		_, err := silent.Save(short, record(at(0x1000, 0, 0)), 0)
		done <- err
	}()
	late := <-requests
	cancel()
	err := <-done
	if !errors.Is(err, ErrUnknown) || !errors.Is(err, context.Canceled) ||
		outbox.ClassOf(err) != outbox.Transient {
		t.Fatalf("got %v, want ErrUnknown and the cause", err)
	}
	if late.Subject != "silent.API.$KV.outflow-OUTBOX.outflow" {
		t.Fatalf("published to %s", late.Subject)
	}
	late.Subject, late.Reply = "$KV.outflow-OUTBOX.outflow", ""
	if _, err := nc.RequestMsgWithContext(ctx, late); err != nil { // and now it arrives
		t.Fatal(err)
	}
	if _, err := s.Save(ctx, record(at(0x1000, 0, 0)), 0); !errors.Is(err, ErrConflict) {
		t.Fatalf("the next writer: %v, want ErrConflict", err)
	}
	if r, rev := load(ctx, t, s); r == nil || rev == 0 {
		t.Fatal("it was not written")
	}
}

// Every answer that is no record, and no check of one, is told apart: what nobody can know is unknown, what
// was refused was not written.
func TestAnswersOfTheStoreAreToldApart(t *testing.T) {
	t.Parallel()
	ctx, nc, _ := bucket(t)
	s := NewStore(jsapi.New(nc, "fake.API"), StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	var answer string
	var expected nats.Header
	if _, err := nc.Subscribe("fake.API.>", func(m *nats.Msg) {
		expected = m.Header
		_ = m.Respond([]byte(answer))
	}); err != nil {
		t.Fatal(err)
	}
	stored := func(change func(r *Record), header string) string {
		r := record(at(0x1000, 0, 0))
		change(r)
		doc, err := r.Encode()
		must.Succeed(t, err)
		m, err := json.Marshal(map[string]any{"message": map[string]any{"seq": 7, "hdrs": []byte(header),
			"data": doc, "time": epoch}})
		must.Succeed(t, err)
		return string(m)
	}
	same := func(*Record) {}
	for name, c := range map[string]struct {
		answer string
		want   string // "record", "none", "error", or a fault's code
	}{
		"a record":           {stored(same, ""), "record"},
		"with a header":      {stored(same, "NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n"), "record"},
		"deleted":            {stored(same, "NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"), "none"},
		"purged":             {stored(same, "NATS/1.0\r\nKV-Operation: PURGE\r\n\r\n"), "none"},
		"removed by its age": {stored(same, "NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n"), "none"},
		"a broken header":    {stored(same, "X"), "error"},
		"another slot's":     {stored(func(r *Record) { r.Slot = "other" }, ""), "record_corrupt"},
		"another stream's":   {stored(func(r *Record) { r.Stream = "OTHER" }, ""), "record_corrupt"},
		"no key": {`{"error":{"code":404,"err_code":10037,"description":"no message found"}}`,
			"none"},
		"no bucket": {`{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`,
			"none"},
		"another error": {`{"error":{"code":503,"err_code":10008,"description":"no leader"}}`,
			"error"},
		"an error and a message": {strings.Replace(stored(same, ""), "{",
			`{"error":{"code":503,"err_code":10008},`, 1), "error"},
		"nothing": {`{}`, "error"},
		"no JSON": {`+OK`, "error"},
	} {
		answer = c.answer
		r, revision, err := s.Load(ctx)
		got := "none"
		switch f := outbox.FaultOf(err); {
		case f != nil:
			got = f.Code
		case err != nil:
			got = "error"
		case r != nil:
			got = "record"
		}
		if got != c.want || got == "record" && revision != 7 {
			t.Errorf("%s: %s at %d, %v", name, got, revision, err)
		}
	}
	for name, c := range map[string]struct {
		answer string
		want   error // nil: the record is stored, at revision 8
	}{
		"stored":                    {`{"stream":"KV_outflow-OUTBOX","seq":8}`, nil},
		"somebody was faster":       {`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 8"}}`, ErrConflict},
		"somebody is about to be":   {`{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}`, ErrConflict},
		"refused":                   {`{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}`, errors.ErrUnsupported},
		"a revision that was there": {`{"stream":"KV_outflow-OUTBOX","seq":7}`, ErrUnknown},
		"no JSON":                   {`+OK`, ErrUnknown},
	} {
		answer = c.answer
		revision, err := s.Save(ctx, record(at(0x1000, 0, 0)), 7)
		if unknown, conflict := errors.Is(err, ErrUnknown), errors.Is(err,
			ErrConflict); unknown != (c.want == ErrUnknown) ||
			conflict != (c.want == ErrConflict) || (err == nil) != (c.want == nil) || err == nil &&
			revision != 8 {
			t.Errorf("%s: revision %d, %v", name, revision, err)
		}
		if expected.Get("Nats-Expected-Stream") != "KV_outflow-OUTBOX" ||
			expected.Get("Nats-Expected-Last-Subject-Sequence") != "7" {
			t.Errorf("%s: asked with %v", name, expected)
		}
	}
	if _, err := s.Save(ctx, record(), 7); err == nil || errors.Is(err, ErrUnknown) {
		t.Errorf("a record without checkpoints: %v", err)
	}
}

// Where the bucket can't be had, that is an error, and none of a record.
func TestStoreWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	if err := s.EnsureBucket(ctx, 3, jetstream.FileStorage); err == nil {
		t.Error("one server keeps three replicas")
	}
	if err := NewStore(jsapi.New(nc, "no prefix.>"), StoreConfig{Stream: "OUTBOX",
		Slot: "outflow"}).EnsureBucket(ctx, 1, jetstream.FileStorage); err == nil {
		t.Error("a prefix with a space is taken")
	}
	// as by default
	named := NewStore(jsapi.New(nc, "$JS.API"), StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	ensure(ctx, t, named)
	save(ctx, t, named, record(at(0x1000, 0, 0)), 0)
	nc.Close()
	if err := s.EnsureBucket(ctx, 1, jetstream.FileStorage); err == nil {
		t.Error("a bucket on a closed connection")
	}
	if _, _, err := s.Load(ctx); err == nil {
		t.Error("a record on a closed connection")
	}
}

func TestOfManyWritersToAReplicatedRecordOneWins(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves out what needs three servers")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	nc := connect(t, natstest.Cluster(t, 3).URLs())
	s := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "outflow"})
	must.Succeed(t, s.EnsureBucket(ctx, 3, jetstream.FileStorage))
	if st, err := keyValue(ctx, t, nc).Status(ctx); err != nil ||
		st.(*jetstream.KeyValueBucketStatus).StreamInfo().Config.Replicas != 3 {
		t.Fatalf("replicas: %+v, %v", st, err)
	}
	first := save(ctx, t, s, record(at(0x1000, 0, 0)), 0)

	// Of many writers at one revision one wins.
	results := make(chan error)
	for i := range 20 {
		go func() {
			_, err := s.Save(ctx, record(at(outbox.LSN(0x2000+i), 1, 0)), first)
			results <- err
		}()
	}
	won := 0
	for range 20 {
		switch err := <-results; {
		case err == nil:
			won++
		case !errors.Is(err, ErrConflict):
			t.Errorf("got %v, want ErrConflict", err)
		}
	}
	if r, rev := load(ctx, t, s); won != 1 || rev != first+1 || r.Checkpoints[0].Due < 0x2000 {
		t.Fatalf("%d writers won, the record is %+v at %d", won, r, rev)
	}
}

// Two outflows must not publish to one stream.
func TestTwoOutflowsDoNotShareAStream(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	if err := s.CheckAlone(ctx); err != nil {
		t.Fatalf("without a bucket: %v", err)
	}
	ensure(ctx, t, s)
	rev := save(ctx, t, s, record(at(0x1000, 0, 0)), 0)
	if err := s.CheckAlone(ctx); err != nil {
		t.Fatalf("with its own record: %v", err)
	}
	other := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: s.cfg.Stream, Slot: "other"})
	err := other.CheckAlone(ctx)
	if f := outbox.FaultOf(err); f == nil || f.Class != outbox.Fatal || f.Code != "other_slot" ||
		!strings.Contains(f.Error(), s.cfg.Slot) {
		t.Fatalf("beside another slot's record: %v", err)
	}
	must.Succeed(t, keyValue(ctx, t, nc).Delete(ctx, s.cfg.Slot, jetstream.LastRevision(rev)))
	if err := other.CheckAlone(ctx); err != nil {
		t.Fatalf("beside one that was removed: %v", err)
	}
}

// TestARemovedRecordLeavesNothing: the record and what is stored beside it are gone, unless somebody else
// wrote it.
func TestARemovedRecordLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx, _, s := bucket(t)
	must.Succeed(t, s.Remove(ctx, 0)) // there is no bucket
	ensure(ctx, t, s)
	rev := save(ctx, t, s, record(at(0x1000, 5, time.Minute)), 0)
	must.Succeed(t, s.SaveEnd(ctx, End{Code: "divergence"}))
	must.Succeed(t, s.SaveGaps(ctx, []byte("one")))
	must.Succeed(t, s.SaveGaps(ctx, []byte("two"))) // and of the first nothing is left
	if n := revisions(ctx, t, s, gapsKey("outflow")); n != 1 {
		t.Errorf("%d revisions of the gaps' names", n)
	}
	if err := s.Remove(ctx, rev+7); !errors.Is(err, ErrConflict) {
		t.Errorf("at another revision: %v", err)
	}
	must.Succeed(t, s.Remove(ctx, rev))
	if r, _ := load(ctx, t, s); r != nil {
		t.Errorf("%+v is left", r)
	}
	if end, err := s.LastEnd(ctx); end != nil || err != nil {
		t.Errorf("%+v, %v is left", end, err)
	}
	if gaps, err := s.Gaps(ctx); gaps != nil || err != nil {
		t.Errorf("%s, %v is left", gaps, err)
	}
}

func revisions(ctx context.Context, t *testing.T, s *Store, key string) uint64 {
	t.Helper()
	js, err := s.api.JetStream()
	must.Succeed(t, err)
	st, err := js.Stream(ctx, s.stream)
	must.Succeed(t, err)
	info, err := st.Info(ctx, jetstream.WithSubjectFilter(s.beside(key)))
	must.Succeed(t, err)
	return info.State.Subjects[s.beside(key)]
}

// TestRecordsOfOtherSlotsAreFound: the records of other slots, those of other streams among them.
func TestRecordsOfOtherSlotsAreFound(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	save(ctx, t, s, record(at(0x1000, 5, time.Minute)), 0)
	for _, c := range []StoreConfig{{Stream: "OUTBOX", Slot: "second"}, {Stream: "OTHER", Slot: "outflow"}} {
		o := NewStore(jsapi.New(nc, ""), c)
		ensure(ctx, t, o)
		r := record(at(0x1000, 5, time.Minute))
		r.Slot, r.Stream = c.Slot, c.Stream
		save(ctx, t, o, r, 0)
	}
	all, err := s.Others(ctx)
	must.Succeed(t, err)
	if len(all) != 2 || all[0].Slot != "second" || all[1].Stream != "OTHER" || all[1].Record == nil {
		t.Errorf("others: %+v", all)
	}
}
