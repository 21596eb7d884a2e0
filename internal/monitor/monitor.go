// Package monitor serves what operators and probes ask of a running outflow: /metrics, /healthz, /readyz, /status.json and a status
// page on /. It only reads.
package monitor

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

//go:embed page.html
var pageHTML string

var page = template.Must(template.New("page").Parse(pageHTML))

// Server serves the pages. Its methods are for one goroutine.
type Server struct {
	listener net.Listener
	http     *http.Server
	served   chan error
}

// Info is what the pages say beside the pipeline's state.
type Info struct {
	Version string `json:"version"`
	Slot    string `json:"slot"`
	Stream  string `json:"stream"`
	Source  string `json:"source"`
	Table   string `json:"table"` // "" where there is none
	Shard   string `json:"shard,omitempty"`
}

// Listen takes the address. One that is in use is a fault of class Usage that names the setting.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, &outbox.Fault{
			Class: outbox.Usage, Code: "listen", Err: err,
			What: fmt.Sprintf("listen: %s cannot be used", addr),
			Cure: `Set listen (OUTFLOW_LISTEN, --listen) to a free address, or to "" to switch the pages off`,
		}
	}
	return l, nil
}

// Serve starts to serve on l, which it owns from now on.
func Serve(l net.Listener, info Info, snapshot func() pipeline.Snapshot, metrics prometheus.Gatherer) *Server {
	s := &Server{listener: l, served: make(chan error, 1)}
	s.http = &http.Server{Handler: Handler(info, snapshot, metrics), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	go func() { s.served <- s.http.Serve(l) }()
	return s
}

// Close ends the server; requests under way get a second.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		_ = s.http.Close() // the slow ones are cut off
	}
	if err := <-s.served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Handler returns the pages.
func Handler(info Info, snapshot func() pipeline.Snapshot, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	probe := func(ok func(*pipeline.Snapshot) bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			snap := snapshot()
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if !ok(&snap) {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			fmt.Fprintf(w, "%s for %v\n", snap.State, time.Since(snap.Since).Round(time.Second))
			if snap.Error != "" {
				fmt.Fprintln(w, snap.Error)
			}
		}
	}
	mux.HandleFunc("GET /healthz", probe(func(s *pipeline.Snapshot) bool { return s.Alive(time.Now()) }))
	mux.HandleFunc("GET /readyz", probe((*pipeline.Snapshot).Ready))
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(struct { // a reader that went away is no failure of ours
			Info
			pipeline.Snapshot
		}{info, snapshot()})
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		snap := snapshot()
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = page.Execute(w, view(info, &snap, time.Now()))
	})
	return mux
}

// pageView is what the page shows, ready to print.
type pageView struct {
	Info
	State, Error, Since, Age, Lag          string
	Good                                   bool
	Held, InFlight, Sessions               int
	Received, Published, Confirmed, WALEnd outbox.LSN
	Seq                                    uint64
	Retained                               string
}

func view(info Info, s *pipeline.Snapshot, now time.Time) pageView {
	return pageView{
		Info: info, State: string(s.State), Error: s.Error, Good: s.Ready(),
		Since: now.Sub(s.Since).Round(time.Second).String(),
		Age:   s.Age(now).Round(time.Millisecond).String(), Lag: s.Lag(now).Round(time.Second).String(),
		Held: s.Held, InFlight: s.InFlight, Sessions: s.Sessions,
		Received: s.Received, Published: s.Published, Confirmed: s.Confirmed, WALEnd: s.WALEnd, Seq: s.Seq,
		Retained: size(s.Retained),
	}
}

// size prints bytes with a binary unit.
func size(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/1024, 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[u])
}
