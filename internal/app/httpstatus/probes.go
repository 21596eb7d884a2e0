package httpstatus

import (
	"encoding/json"
	"io"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Probe says whether something holds, and what there is to say of it.
type Probe func() (ok bool, says string)

// Probes are the pages of a process that has no status page.
type Probes struct {
	Alive, Ready Probe
	Status       func() any // the JSON of /status.json
	Metrics      prometheus.Gatherer
}

// ServeProbes serves /metrics, /healthz, /readyz and /status.json on l, which it owns from now on, as [Serve]
// does.
func ServeProbes(l net.Listener, hosts string, from Probes) *Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics",
		promhttp.HandlerFor(from.Metrics, promhttp.HandlerOpts{DisableCompression: true}))
	probe := func(p Probe) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			ok, says := p()
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if !ok {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			_, _ = io.WriteString(w, says) // it only fails if the client has gone
		}
	}
	mux.HandleFunc("GET /healthz", probe(from.Alive))
	mux.HandleFunc("GET /readyz", probe(from.Ready))
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(from.Status()) // as above
	})
	return serve(l, guarded(hosts, mux), usual)
}
