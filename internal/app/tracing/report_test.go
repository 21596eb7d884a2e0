package tracing

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/traceparent"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// A dead letter's span is an error and names the reason; clocks that differ make no span that ends before it
// begins; a tracestate that nobody can read costs itself alone.
func TestTheSpanOfADeadLetter(t *testing.T) {
	t.Parallel()
	tr, _ := tracer(t, 1)
	to := tracetest.NewInMemoryExporter()
	tr.ids = new(derivedIDs)
	tr.sdk = sdktrace.NewTracerProvider(sdktrace.WithIDGenerator(tr.ids), sdktrace.WithSyncer(to))
	tr.tracer = tr.sdk.Tracer("test")
	now := time.Now()
	c, _ := traceparent.Parse(sampled)
	tr.report(&span{parent: c, state: "not=a,,state=\n", seq: 1, subject: "OUTBOX.dead_letter",
		dead: sink.TooLarge, commit: now.Add(time.Hour), sent: now, end: now})
	got := to.GetSpans()
	if len(got) != 1 {
		t.Fatalf("%d spans", len(got))
	}
	s := got[0]
	if s.Name != "publish OUTBOX.dead_letter" || s.Status.Code != codes.Error ||
		!strings.Contains(s.Status.Description, string(sink.TooLarge)) || !s.StartTime.Equal(s.EndTime) ||
		s.Parent.TraceState().Len() != 0 || !s.Parent.IsRemote() || s.SpanContext.SpanID() != tr.ids.next {
		t.Errorf("%+v", s)
	}
}

// started is a tracer as the environment makes it, for a collector.
func started(t *testing.T, collector http.HandlerFunc) (*Tracer, *observer) {
	t.Helper()
	srv := httptest.NewServer(collector)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	tr := Start(Config{Slot: "outflow", Stream: "OUTBOX", Template: "outbox.{doc_id}",
		Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler)})
	_, o := tracer(t, 1)
	o.t = tr
	return tr, o
}

// A stop exports what is left.
func TestAStopExportsTheRest(t *testing.T) {
	var bytes atomic.Int64
	tr, o := started(t, func(_ http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body) // an error shows in the metric
		bytes.Add(n)
	})
	const n = 1000
	for seq := range uint64(n) {
		o.Sent(event(sampled), &outbox.Header{}, seq+1, time.Time{})
	}
	o.Acked(n)
	tr.Stop()
	if got := testutil.ToFloat64(tr.metrics.exported); got != n || bytes.Load() == 0 {
		t.Errorf("%v spans exported in %d bytes, want %d", got, bytes.Load(), n)
	}
}

// No value of an event costs other events their spans, or keeps much memory.
func TestAHostileEventCostsNoOtherSpan(t *testing.T) {
	tr, o := started(t, func(http.ResponseWriter, *http.Request) {})
	large := strings.Repeat("x", 1<<20)
	for i, e := range []struct{ id, state string }{
		{"\xff\x00", "a=1"}, {large, large}, {"two", "a=\xff\r\nb"}, {"three", strings.Repeat("a=1,", 100)},
	} {
		of := event(sampled)
		of.ID, of.Extra[1] = e.id, e.state
		o.Sent(of, &outbox.Header{}, uint64(i+1), time.Time{})
		if s := o.inFlight[i]; len(s.id) > maxID || len(s.state) > traceparent.MaxState {
			t.Errorf("%d bytes of id, %d of tracestate", len(s.id), len(s.state))
		}
	}
	o.Acked(4)
	tr.Stop()
	if got := testutil.ToFloat64(tr.metrics.exported); got != 4 {
		t.Errorf("%v spans exported", got)
	}
}

// A collector's answer is not the log's to keep.
func TestALongAnswerIsLoggedInPart(t *testing.T) {
	tr, o := started(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, strings.Repeat("no\r\n", 1<<18), http.StatusBadRequest)
	})
	var said strings.Builder
	tr.cfg.Logger = slog.New(slog.NewTextHandler(&said, nil))
	o.Sent(event(sampled), &outbox.Header{}, 1, time.Time{})
	o.Acked(1)
	tr.Stop()
	if n := said.Len(); n < maxError || n > 3*maxError || strings.Count(said.String(), "\n") != 1 {
		t.Errorf("%d bytes: %.200s", n, said.String())
	}
}

// What the SDK would panic at, or never rest with, is no reason not to publish.
func TestImpossibleSettingsOfTheSDK(t *testing.T) {
	for _, value := range []string{"-1", "9000000000000000000"} {
		for _, name := range []string{"MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE", "SCHEDULE_DELAY",
			"EXPORT_TIMEOUT"} {
			t.Setenv("OTEL_BSP_"+name, value)
		}
		tr, o := started(t, func(http.ResponseWriter, *http.Request) {})
		o.Sent(event(sampled), &outbox.Header{}, 1, time.Time{})
		o.Acked(1)
		tr.Stop()
		if got := testutil.ToFloat64(tr.metrics.exported); got != 1 {
			t.Errorf("%s: %v spans exported", value, got)
		}
	}
	var o sdktrace.BatchSpanProcessorOptions
	if possible(&o); o.BatchTimeout <= 0 || o.ExportTimeout <= 0 || o.MaxQueueSize < o.MaxExportBatchSize {
		t.Errorf("%+v", o)
	}
}

// A stop gives up on a collector that never answers.
func TestAStopDoesNotWaitForASilentCollector(t *testing.T) {
	asked := make(chan struct{}, 100)
	tr, o := started(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		asked <- struct{}{}
		<-r.Context().Done()
	})
	for seq := uint64(1); ; seq++ {
		o.Sent(event(sampled), &outbox.Header{}, seq, time.Time{})
		o.Acked(seq)
		if testutil.ToFloat64(tr.metrics.queueFull) > 0 {
			break
		}
	}
	<-asked
	tr.Stop()
	if testutil.ToFloat64(tr.metrics.exported) != 0 {
		t.Error("something was exported")
	}
}

func TestNothingIsStartedWithoutAnEndpoint(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	tr := Start(Config{Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler)})
	if tr != nil {
		t.Error("started")
	}
	tr.Stop()
}

// BenchmarkSpan is what a sampled event costs the loop.
func BenchmarkSpan(b *testing.B) {
	tr := &Tracer{cfg: Config{Logger: slog.New(slog.DiscardHandler)}, queue: make(chan span),
		metrics: newMetrics(prometheus.NewRegistry())}
	observed, err := tr.Observer(sink.Config{Stream: "OUTBOX",
		Headers: []sink.MappedHeader{{Name: "traceparent", Column: "trace"}},
		Resolve: func(name string) (sink.Field, bool) {
			if name == "trace" {
				return 0, true
			}
			return sink.RoleField(name)
		}})
	must.Succeed(b, err)
	e, h := event(sampled), &outbox.Header{}
	b.ReportAllocs()
	for seq := uint64(1); b.Loop(); seq++ {
		observed.Sent(e, h, seq, time.Time{})
		observed.Acked(seq)
	}
}
