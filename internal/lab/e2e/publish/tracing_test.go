package publish

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/outflowhq/outflow/internal/app/tracing"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/traceparent"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/producer"
)

// receiver is an OTLP collector that keeps what it gets.
type receiver struct {
	*httptest.Server
	mu       sync.Mutex
	resource map[string]string
	spans    []*otlp.Span
	problem  error
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{resource: map[string]string{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		err := r.take(req)
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return // the client was killed while it sent this
		}
		if err != nil {
			r.mu.Lock()
			r.problem = err
			r.mu.Unlock()
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) take(req *http.Request) error {
	if req.URL.Path != "/v1/traces" || req.Header.Get("authorization") != "Bearer s3cret" {
		return fmt.Errorf("%s with %q", req.URL.Path, req.Header.Get("authorization"))
	}
	body, err := gzip.NewReader(req.Body)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	var got collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(b, &got); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rs := range got.ResourceSpans {
		for _, a := range rs.Resource.Attributes {
			r.resource[a.Key] = a.Value.GetStringValue()
		}
		for _, ss := range rs.ScopeSpans {
			r.spans = append(r.spans, ss.Spans...)
		}
	}
	return nil
}

// await waits for spans that a condition holds for.
func (r *receiver) await(t *testing.T, what string, n int, which func(*otlp.Span) bool) (found []*otlp.Span) {
	t.Helper()
	harness.Eventually(t, what, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.problem != nil {
			t.Fatal(r.problem)
		}
		found = nil
		for _, s := range r.spans {
			if which(s) {
				found = append(found, s)
			}
		}
		if len(found) < n {
			return fmt.Errorf("%d of %d spans, %d in all", len(found), n, len(r.spans))
		}
		return nil
	})
	return found
}

// attribute is a span's attribute as text; "" if it has none.
func attribute(s *otlp.Span, key string) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			return strings.Trim(strings.SplitN(a.Value.String(), ":", 2)[1], `"`)
		}
	}
	return ""
}

// exportTo turns the export of spans on.
func exportTo(o *harness.Outflow, endpoint string) {
	o.Env = append(o.Env, "OTEL_EXPORTER_OTLP_ENDPOINT="+endpoint, "OTEL_BSP_SCHEDULE_DELAY=20",
		"OTEL_EXPORTER_OTLP_COMPRESSION=gzip", "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20s3cret",
		"OTEL_SERVICE_NAME=relay", "OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=test")
}

const traceHeaders = "HEADERS=traceparent=traceparent,tracestate=tracestate"

// TestEachMessageOfASampledTraceHasASpan: the span is a child of the writer's and says where the message is;
// the message carries the writer's context and is the same, byte for byte, as that of a twin without tracing.
// After a kill -9 the messages that are made again report the same spans.
func TestEachMessageOfASampledTraceHasASpan(t *testing.T) {
	t.Parallel()
	ns, twinNATS := natstest.Server(t), natstest.Server(t)
	collector := newReceiver(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "traced", traceHeaders)
	twin := harness.New(t, url, twinNATS.URL(), o.Slot+"twin", traceHeaders)
	twin.UseStream(o.Stream)
	exportTo(o, collector.URL)
	o.Init() // makes the columns of the headers too
	twin.Init()
	o.Start()
	twin.Start()

	begun := time.Now()
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	n, sampled := 0, 0
	write := func(parent any, isSampled bool) {
		n++
		if isSampled {
			sampled++
		}
		harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, traceparent, tracestate)
			VALUES ('note ' || $1::int % 3, 'ann', $1, '{"n": 1}', $2, 'vendor=a,other=b')`, n, parent)
	}
	for i := range 20 {
		write(fmt.Sprintf("00-%s-%016x-01", traceID, i+1), true)
		write(fmt.Sprintf("00-%s-%016x-00", traceID, i+1), false)
		write("00-"+traceID+"-nonsense", false)
		write(nil, false)
	}
	js := harness.JetStream(t, ns.URL())
	harness.AwaitMessages(t, js, o.Stream, n)
	each := func(*otlp.Span) bool { return true }
	spans := collector.await(t, "a span for each sampled message", sampled, each)
	want := map[string]*oracle.Message{} // by the id that the span must have
	expect := func() {
		t.Helper()
		for _, m := range harness.Messages(t, js, o.Stream) {
			if c, ok := traceparent.Parse(m.Header.Get("traceparent")); ok && c.Sampled() {
				var pos outbox.Position
				harness.Must(t, pos.UnmarshalText([]byte(m.Outflow.Pos.String())))
				want[tracing.SpanID(c.TraceID, o.Slot, o.Stream, pos).String()] = m
			}
		}
		if len(want) != sampled {
			t.Fatalf("%d messages are of sampled traces, want %d", len(want), sampled)
		}
	}
	expect()
	mustBe := func(s *otlp.Span) {
		t.Helper()
		m := want[hex.EncodeToString(s.SpanId)]
		if m == nil {
			t.Fatalf("no message has the span %v", s)
		}
		parent := strings.Split(m.Header.Get("traceparent"), "-")
		start, end := time.Unix(0, int64(s.StartTimeUnixNano)), time.Unix(0, int64(s.EndTimeUnixNano))
		for what, pair := range map[string][2]string{
			"trace": {hex.EncodeToString(s.TraceId), parent[1]}, "state": {s.TraceState, "vendor=a,other=b"},
			"parent": {hex.EncodeToString(s.ParentSpanId), parent[2]},
			"name":   {s.Name, "publish outbox.{doc_id}"}, "kind": {s.Kind.String(), "SPAN_KIND_CLIENT"},
			"system":    {attribute(s, "messaging.system"), "nats"},
			"operation": {attribute(s, "messaging.operation.type"), "send"},
			"subject":   {attribute(s, "messaging.destination.name"), m.Subject},
			"id":        {attribute(s, "messaging.message.id"), m.Outflow.ID},
			"position":  {attribute(s, "outflow.position"), m.Outflow.Pos.String()},
			"sequence":  {attribute(s, "outflow.stream.sequence"), fmt.Sprint(m.Seq)},
			"slot":      {attribute(s, "outflow.slot"), o.Slot},
			"stream":    {attribute(s, "outflow.stream"), o.Stream},
		} {
			if pair[0] != pair[1] {
				t.Errorf("message %d: %s %q, want %q", m.Seq, what, pair[0], pair[1])
			}
		}
		if start.Before(begun) || end.Before(start) || end.After(time.Now()) {
			t.Errorf("message %d: from %v to %v, written after %v", m.Seq, start, end, begun)
		}
	}
	waited := 0
	for _, s := range spans {
		mustBe(s)
		if attribute(s, "outflow.buffer.wait") != "" {
			waited++
		}
	}
	if waited != sampled {
		t.Errorf("%d of %d spans say how long the event waited", waited, sampled)
	}
	if r := collector.resource; r["service.name"] != "relay" || r["deployment.environment.name"] != "test" {
		t.Errorf("resource %v", r)
	}
	harness.Eventually(t, "spans that are exported, and those that cannot be, are counted", func() error {
		exported := harness.Metric(t, o, "outflow_spans_exported_total")
		invalid := harness.Metric(t, o, `outflow_spans_dropped_total{reason="invalid_traceparent"}`)
		if exported != float64(sampled) || invalid != 20 {
			return fmt.Errorf("%v, want %d, and %v invalid", exported, sampled, invalid)
		}
		return nil
	})

	// What is in the record already is not made again: on a slow machine that may be everything.
	var again []*otlp.Span
	for i := 0; len(again) == 0; i++ {
		if i == 100 {
			t.Fatal("no sampled message was made again")
		}
		write(fmt.Sprintf("00-%s-%016x-01", traceID, 100+2*i), true)
		harness.AwaitMessages(t, js, o.Stream, n)
		o.Kill()
		o.Start()
		write(fmt.Sprintf("00-%s-%016x-01", traceID, 101+2*i), true)
		newest := fmt.Sprint(n)
		collector.await(t, "the span of the newest message", 1, func(s *otlp.Span) bool {
			return attribute(s, "outflow.stream.sequence") == newest
		})
		again = collector.await(t, "what was made again", 0, func(s *otlp.Span) bool {
			return attribute(s, "outflow.made_again") != ""
		})
	}
	expect()
	for _, s := range again {
		mustBe(s)
	}
	harness.AwaitMessages(t, js, o.Stream, n)
	twinJS := harness.JetStream(t, twinNATS.URL())
	harness.AwaitMessages(t, twinJS, o.Stream, n)
	all, others := harness.Messages(t, js, o.Stream), harness.Messages(t, twinJS, o.Stream)
	for i, m := range all {
		if other := others[i]; m.Subject != other.Subject || !reflect.DeepEqual(m.Header, other.Header) ||
			!bytes.Equal(m.Data, other.Data) {
			t.Fatalf("message %d is\n%v\nwithout tracing\n%v", i+1, m, other)
		}
	}
	if o.Stop() != 0 || twin.Stop() != 0 {
		t.Error("the stop was not clean")
	}
	if said := o.Log.String(); strings.Contains(said, "s3cret") ||
		strings.Count(said, "a traceparent is not valid") == 0 {
		t.Errorf("log:\n%s", said)
	}
}

// TestACollectorThatDoesNotAnswerChangesNothing: one that refuses connections, and one that takes them and is
// silent. Everything is published and confirmed, what is dropped is counted, the log says so once, and the
// stop is clean.
func TestACollectorThatDoesNotAnswerChangesNothing(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer silent.Close() //nolint:errcheck // the test is over
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	harness.Must(t, closed.Close())
	ns, pg := natstest.Server(t), pgtest.Server(t)
	for _, c := range []struct{ name, endpoint, dropped string }{
		{"refused", closed.Addr().String(), "export_failed"},
		{"silent", silent.Addr().String(), "queue_full"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, conn, _ := harness.Install(t, pg, ns.URL(), c.name, traceHeaders)
			exportTo(o, "http://"+c.endpoint)
			o.Init()
			o.Start()
			const n = 10_000
			harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, traceparent)
				SELECT 'note', 'ann', n, '{}', '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
				FROM generate_series(1, $1) n`, n)
			end := harness.WALEnd(t, conn)
			harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
			awaitMetric(o, `outflow_spans_dropped_total{reason="`+c.dropped+`"}`, 1)
			o.AwaitConfirmed(conn, end)
			o.MustBeComplete(conn, ns.URL())
			if code := o.Stop(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if got := strings.Count(o.Log.String(), "spans can't be exported"); got > 1 ||
				got == 0 && c.name == "refused" {
				t.Errorf("said %d times", got)
			}
		})
	}
}

// TestWritersSetTheTraceContext: package producer takes it from the context of the call by OpenTelemetry's
// own propagator, outflow.enqueue from its argument; what is not valid stops nobody.
func TestWritersSetTheTraceContext(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := harness.Install(t, pgtest.Server(t), ns.URL(), "writers", traceHeaders, "SOURCE=both",
		"REORDER_HORIZON=0s", "REORDER_SORT=commit")
	o.MustRun("init", "--sql-api")
	o.Start()

	cfg := producer.Config{
		Headers: map[string]string{"traceparent": "traceparent", "tracestate": "tracestate"},
		Inject: func(ctx context.Context, to map[string]string) {
			propagation.TraceContext{}.Inject(ctx, propagation.MapCarrier(to))
		},
	}
	rows, err := producer.New(cfg)
	harness.Must(t, err)
	messages, err := producer.Message(cfg)
	harness.Must(t, err)
	state, err := trace.ParseTraceState("vendor=a")
	harness.Must(t, err)
	inSpan := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled,
		TraceState: state}))
	n := int64(0)
	enqueue := func(ctx context.Context, to *producer.Outbox) {
		t.Helper()
		tx, err := conn.Begin(ctx)
		harness.Must(t, err)
		n++
		_, err = to.Enqueue(ctx, tx,
			producer.Event{Document: "d", Actor: "a", Counter: n, Payload: []byte("{}")})
		harness.Must(t, err)
		harness.Must(t, tx.Commit(ctx))
	}
	const written = "00-01000000000000000000000000000000-0200000000000000-01"
	call := func(columns string) {
		t.Helper()
		n++
		harness.Exec(t, conn, "SELECT outflow.enqueue('d', 'a', $1, '{}', $2)", n, columns)
	}
	enqueue(inSpan, rows)
	enqueue(inSpan, messages)
	enqueue(t.Context(), rows)
	enqueue(t.Context(), messages)
	call(`{"traceparent": "` + written + `", "tracestate": "vendor=a"}`)
	call(`{"traceparent": "no such thing\nX: y"}`)
	call(`{}`)
	both, none := [2]string{written, "vendor=a"}, [2]string{}
	want := [][2]string{both, both, none, none, both, {"no such thing X: y", ""}, none}
	js := harness.JetStream(t, ns.URL())
	harness.AwaitMessages(t, js, o.Stream, len(want))
	for i, m := range harness.Messages(t, js, o.Stream) {
		if got := [2]string{m.Header.Get("traceparent"), m.Header.Get("tracestate")}; got != want[i] {
			t.Errorf("message %d has %q, want %q", i+1, got, want[i])
		}
	}
}
