package security

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestACollectorOfSpansIsVerified: spans go over TLS to the collector that the given authority vouches for,
// with the client's certificate where it asks for one, and to no other. What can't be exported stops nothing.
func TestACollectorOfSpansIsVerified(t *testing.T) {
	t.Parallel()
	ca, other := newAuthority(t, "collectors"), newAuthority(t, "others")
	certFile, keyFile := ca.issue("collector", "127.0.0.1")
	clientCert, clientKey := ca.issue("outflow")
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	harness.Must(t, err)
	trusted := x509.NewCertPool()
	pem, err := os.ReadFile(ca.file)
	harness.Must(t, err)
	trusted.AppendCertsFromPEM(pem)

	client := slices.Clip([]string{"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE=" + clientCert,
		"OTEL_EXPORTER_OTLP_CLIENT_KEY=" + clientKey})
	ns, pg := natstest.Server(t), pgtest.Server(t)
	for _, c := range []struct {
		name    string
		env     []string
		arrives bool
	}{
		{"client_known", append(client, "OTEL_EXPORTER_OTLP_CERTIFICATE="+ca.file), true},
		{"no_client", []string{"OTEL_EXPORTER_OTLP_CERTIFICATE=" + ca.file}, false},
		{"other_ca", append(client, "OTEL_EXPORTER_OTLP_CERTIFICATE="+other.file), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var requests atomic.Int64
			collector := httptest.NewUnstartedServer(
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
					requests.Add(1)
				}),
			)
			collector.Config.ErrorLog = log.New(io.Discard, "", 0)
			collector.TLS = &tls.Config{Certificates: []tls.Certificate{cert},
				ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: trusted}
			collector.StartTLS()
			defer collector.Close()

			o, conn, _ := harness.Install(t, pg, ns.URL(), "spans_"+c.name, "HEADERS=traceparent=traceparent")
			o.Env = append(
				append(o.Env, "OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_BSP_SCHEDULE_DELAY=20"),
				c.env...)
			o.Init()
			o.Start()
			harness.Exec(t, conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload, traceparent)
				VALUES ('note', 'ann', 1, '{}', '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01')`)
			metric := "outflow_spans_exported_total"
			if !c.arrives {
				metric = `outflow_spans_dropped_total{reason="export_failed"}`
			}
			harness.Eventually(t, metric, func() error {
				if got := harness.Metric(t, o, metric); got < 1 {
					return fmt.Errorf("%v, want 1", got)
				}
				return nil
			})
			if n := requests.Load(); (n > 0) != c.arrives {
				t.Errorf("the collector had %d requests", n)
			}
			o.MustBeComplete(conn, ns.URL())
			if code := o.Stop(); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}
