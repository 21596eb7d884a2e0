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
