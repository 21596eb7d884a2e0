package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/internal/traceparent"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

const sampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// The ids are part of what people see in their traces: another rule would give a message that is made again
// by a newer version another span.
func TestASpanIDIsAHashOfTraceAndPosition(t *testing.T) {
	t.Parallel()
	c, _ := traceparent.Parse(sampled)
	pos := outbox.Position{LSN: 0x16B3748, Index: 3}
	if got := SpanID(c.TraceID, "outflow", "OUTBOX", pos).String(); got != "9ff9e6b48f67ef5e" {
		t.Errorf("span id %s", got)
	}
	other := c.TraceID
	other[0]++
	seen := map[trace.SpanID]bool{}
	for _, id := range []trace.SpanID{
		SpanID(c.TraceID, "outflow", "OUTBOX", pos), SpanID(other, "outflow", "OUTBOX", pos),
		SpanID(c.TraceID, "second", "OUTBOX", pos), SpanID(c.TraceID, "outflow", "SECOND", pos),
		SpanID(c.TraceID, "outflow", "OUTBOX", outbox.Position{LSN: pos.LSN, Index: 4}),
		SpanID(c.TraceID, "outflow", "OUTBOX", outbox.Position{LSN: pos.LSN + 1, Index: 3}),
	} {
		if seen[id] || !id.IsValid() {
			t.Errorf("%s is there twice, or is no id", id)
		}
		seen[id] = true
	}
}

// What is a valid traceparent is what OpenTelemetry's own reader takes, but for two things in version 00: it
// takes a - at the end, which the specification does not, and no flags but those that it knows, which the
// specification wants to be ignored.
func FuzzTraceparentAsOpenTelemetryReadsIt(f *testing.F) {
	for _, seed := range []string{
		sampled, "", "cc" + sampled[2:] + "-more", "ff" + sampled[2:], sampled + "-",
		strings.ToUpper(sampled), sampled[:53] + "ff", "00-" + strings.Repeat("0", 32) + sampled[35:],
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		const flags = 53
		if strings.HasPrefix(text, "00") && len(text) > flags+1 &&
			(len(text) > flags+2 || text[flags] != '0' || text[flags+1] > '3') {
			return
		}
		want := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(),
			propagation.MapCarrier{"traceparent": text}))
		got, ok := traceparent.Parse(text)
		if ok != want.IsValid() || ok && (got.TraceID != want.TraceID() || got.SpanID != want.SpanID() ||
			got.Sampled() != want.IsSampled()) {
			t.Errorf("%q: %v %t, OpenTelemetry reads %v", text, got, ok, want)
		}
	})
}

func TestTheEnvironmentTurnsItOn(t *testing.T) {
	t.Parallel()
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318"
	for env, want := range map[string]struct {
		on  bool
		why string
	}{
		"":       {},
		endpoint: {on: true},
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://collector/v1/traces": {on: true},
		"OTEL_TRACES_EXPORTER=otlp":                                     {on: true},
		"OTEL_SERVICE_NAME=relay":                                       {},
		endpoint + " OTEL_TRACES_EXPORTER=otlp":                         {on: true},
		endpoint + " OTEL_TRACES_EXPORTER=none":                         {},
		endpoint + " OTEL_TRACES_EXPORTER=console":                      {why: `"console"`},
		endpoint + " OTEL_SDK_DISABLED=TRUE":                            {},
		endpoint + " OTEL_SDK_DISABLED=no":                              {on: true},
		endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf":         {on: true},
		endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=grpc":                  {why: "OTEL_EXPORTER_OTLP_PROTOCOL"},
		endpoint + " OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc":           {why: "4318"},
		endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=grpc OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json": {
			on: true},
	} {
		vars := map[string]string{}
		for pair := range strings.FieldsSeq(env) {
			name, value, _ := strings.Cut(pair, "=")
			vars[name] = value
		}
		on, why := enabled(func(name string) string { return vars[name] })
		if on != want.on || (why == "") != (want.why == "") || !strings.Contains(why, want.why) {
			t.Errorf("%s: %t, %q", env, on, why)
		}
	}
}

// tracer is one whose queue nobody empties.
func tracer(t *testing.T, room int) (*Tracer, *observer) {
	t.Helper()

	tr := &Tracer{
		cfg: Config{Slot: "outflow", Stream: "OUTBOX", Template: "outbox.{doc_id}",
			Logger: slog.New(slog.DiscardHandler)},
		metrics: newMetrics(prometheus.NewRegistry()), queue: make(chan span, room),
	}
	o, err := tr.Observer(sink.Config{Stream: "OUTBOX",
		Headers: []sink.MappedHeader{{Name: "Traceparent", Column: "trace"},
			{Name: "tracestate", Column: "state"}},
		Resolve: func(name string) (sink.Field, bool) {
			switch name {
			case "trace":
				return 0, true
			case "state":
				return 1, true
			}
			return sink.RoleField(name)
		}})
	must.Succeed(t, err)
	return tr, o.(*observer)
}

func event(parent string) *relay.Event {
	return &relay.Event{Doc: "note", Extra: []string{parent, "a=1"}, Payload: []byte("{}"), PayloadSize: 2,
		ID: "one", Pos: outbox.Position{LSN: 0x10, Index: 1}, Time: 1000}
}

func TestOnlyWhatIsSampledHasASpan(t *testing.T) {
	t.Parallel()
	tr, o := tracer(t, 10)
	null := event(sampled)
	null.SetExtraNull(0)
	null.Extra[0] = ""
	all := []*relay.Event{event(" " + sampled + " "), event(strings.TrimSuffix(sampled, "1") + "0"),
		event("nonsense"), null, event(sampled)}
	received := time.Now()
	for i, e := range all {
		o.Sent(e, &outbox.Header{}, uint64(i+1), received)
	}
	o.Acked(4)
	if n := len(tr.queue); n != 1 {
		t.Fatalf("%d spans ended", n)
	}
	s := <-tr.queue
	if s.seq != 1 || s.subject != "outbox.note" || s.id != "one" || s.state != "a=1" || s.bytes != 2 ||
		s.pos != all[0].Pos || s.received != received || s.sent.Before(received) || s.end.Before(s.sent) ||
		!s.commit.Equal(relay.CommitTime(1000)) || s.parent.SpanID[0] != 0xB7 {
		t.Errorf("%+v", s)
	}
	o.Acked(5)
	if s := <-tr.queue; s.seq != 5 || len(o.inFlight) != 0 {
		t.Errorf("%+v; %d in flight", s, len(o.inFlight))
	}
	if n := testutil.ToFloat64(tr.metrics.invalid); n != 1 {
		t.Errorf("%v invalid", n)
	}
}

// A queue that nobody empties takes what it has room for; the rest is counted. The loop never waits.
func TestAFullQueueDrops(t *testing.T) {
	t.Parallel()
	tr, o := tracer(t, 3)
	for seq := range uint64(10_000) {
		o.Sent(event(sampled), &outbox.Header{}, seq+1, time.Time{})
		if seq%2000 == 1999 {
			o.Acked(seq + 1)
		}
	}
	if got := testutil.ToFloat64(tr.metrics.queueFull); got != 9997 || cap(o.inFlight) > 2*sink.MaxInFlight {
		t.Errorf("%v dropped; room for %d in flight", got, cap(o.inFlight))
	}
}

// The spans of a message that was made again are one: what the stream says of its time ends it.
func TestWhatIsFoundEndsWhenItWasStored(t *testing.T) {
	t.Parallel()
	tr, o := tracer(t, 10)
	stored := time.Now().Add(-time.Hour)
	o.Found(event(sampled), &outbox.Header{}, 7, time.Now(), time.Time{})
	o.Found(event(sampled), &outbox.Header{}, 8, time.Now(), stored)
	if s := <-tr.queue; s.seq != 8 || s.end != stored || len(tr.queue) != 0 {
		t.Errorf("%+v", s)
	}
}

// What is counted are the allocations of all goroutines. Those of the exporter, which has nothing to do, come
// now and then: an attempt without them is enough.
func TestEventsWithoutASpanAllocateNothing(t *testing.T) {
	_, o := tracer(t, 1)
	var h outbox.Header
	for _, parent := range []string{"", strings.TrimSuffix(sampled, "1") + "0"} {
		e, n := event(parent), 1.0
		for attempts := 0; n > 0 && attempts < 20; attempts++ {
			n = testing.AllocsPerRun(100, func() {
				o.Sent(e, &h, 1, time.Time{})
				o.Acked(1)
			})
		}
		if n != 0 {
			t.Errorf("traceparent %q: %v allocations", parent, n)
		}
	}
}

func TestNoHeaderNoObserver(t *testing.T) {
	t.Parallel()
	var said strings.Builder
	tr := &Tracer{cfg: Config{Logger: slog.New(slog.NewTextHandler(&said, nil))}}
	for range 2 {
		o, err := tr.Observer(sink.Config{Stream: "OUTBOX"})
		if o != nil || err != nil {
			t.Error(o, err)
		}
	}
	if n := strings.Count(said.String(), "no header traceparent is mapped"); n != 1 {
		t.Errorf("said %d times:\n%s", n, said.String())
	}
}

// What the libraries say goes to the log without the values of variables, and once.
func TestTheLibrariesSayNoSecret(t *testing.T) {
	t.Parallel()
	var said strings.Builder
	s := &logSink{log: slog.New(slog.NewTextHandler(&said, nil))}
	for range 3 {
		s.Error(fmt.Errorf("missing '='"), "parse headers", "input", "Bearer hunter2")
	}
	if got := said.String(); strings.Contains(got, "hunter2") || strings.Count(got, "parse headers") != 1 {
		t.Error(got)
	}
}
