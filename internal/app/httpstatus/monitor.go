// Package httpstatus serves /metrics, /healthz, /readyz, /status.json and a status page on / for operators
// and probes. It only reads.
//
// It is internal to Outflow: its API may change at any time.
package httpstatus

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

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

// Info is what the pages say in addition to the pipeline's state.
type Info struct {
	Version string `json:"version"`
	Slot    string `json:"slot"`
	Stream  string `json:"stream"`
	Source  string `json:"source"`
	Table   string `json:"table"` // "" if there is none
	Shard   string `json:"shard,omitempty"`
}

// Listen listens on the address. If that is in use, the error is a fault of class Usage that names the
// setting.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, &outbox.Fault{
			Class: outbox.Usage, Code: "listen", Err: err,
			Message: fmt.Sprintf("listen: %s cannot be used", addr),
			Hint:    `Set listen (OUTFLOW_LISTEN, --listen) to a free address, or to "" to switch the pages off`,
		}
	}
	return l, nil
}

// limits bound what clients can use up: a connection holds at most one page, and one that doesn't read its
// answer is closed.
type limits struct {
	connections   int // more than that wait to be accepted
	header, write time.Duration
	idle          time.Duration
}

var usual = limits{connections: 32, header: 5 * time.Second, write: 10 * time.Second, idle: 30 * time.Second}

const maxHeader = 8 << 10 // bytes

// Serve starts to serve on l, which it owns from now on. hosts are the names that requests may use, separated
// by commas, in addition to localhost and IP addresses.
func Serve(l net.Listener, hosts string, info Info, snapshot func() pipeline.Status,
	metrics prometheus.Gatherer) *Server {
	return serve(l, guarded(hosts, Handler(info, snapshot, metrics)), usual)
}

func serve(l net.Listener, handler http.Handler, limits limits) *Server {
	s := &Server{listener: l, served: make(chan error, 1)}
	s.http = &http.Server{
		Handler: handler, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: limits.header,
		ReadTimeout:  limits.header,
		WriteTimeout: limits.write, IdleTimeout: limits.idle,
	}
	go func() { s.served <- s.http.Serve(netutil.LimitListener(l, limits.connections)) }()
	return s
}

// guarded keeps browsers from showing the pages to other sites. A request for a host that is not ours may
// come from a site whose name was made to resolve to this address (DNS rebinding). An IP address can't be
// used for that, so probes that use one need no setting.
func guarded(hosts string, next http.Handler) http.Handler {
	names := []string{"localhost"}
	for name := range strings.SplitSeq(hosts, ",") {
		// "" too: HTTP/1.0 sends no host, but browsers always do
		names = append(names, strings.ToLower(strings.TrimSpace(name)))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		host := r.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
		if _, err := netip.ParseAddr(host); err != nil && !slices.Contains(names, host) {
			http.Error(w, "not asked by a name of this outflow: add it to listen_hosts "+
				"(OUTFLOW_LISTEN_HOSTS, --listen_hosts), or ask by IP address",
				http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// policy allows the page its own style sheet and nothing else.
var policy = func() string {
	_, style, _ := strings.Cut(pageHTML, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// Close ends the server; requests under way get a second.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		_ = s.http.Close() // cuts off the slow ones
	}
	if err := <-s.served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Handler returns the pages.
func Handler(info Info, snapshot func() pipeline.Status, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{DisableCompression: true}))
	probe := func(ok func(*pipeline.Status) bool) http.HandlerFunc {
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
	mux.HandleFunc("GET /healthz", probe(func(s *pipeline.Status) bool { return s.Alive(time.Now()) }))
	mux.HandleFunc("GET /readyz", probe((*pipeline.Status).Ready))
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(struct { // it only fails if the client has gone
			Info
			pipeline.Status
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
	OpenGaps                               int
	Gaps                                   []gapView
}

// gapView is an open gap as the page shows it.
type gapView struct {
	pipeline.Gap
	For string // how long the oldest event has waited
}

func view(info Info, s *pipeline.Status, now time.Time) pageView {
	v := pageView{
		Info: info, State: string(s.State), Error: s.Error, Good: s.Ready(),
		Since: now.Sub(s.Since).Round(time.Second).String(),
		Age:   s.Age(now).Round(time.Millisecond).String(), Lag: s.Lag(now).Round(time.Second).String(),
		Held: s.Held, InFlight: s.InFlight, Sessions: s.Sessions,
		Received: s.Received, Published: s.Published, Confirmed: s.Confirmed, WALEnd: s.WALEnd, Seq: s.Seq,
		Retained: size(s.Retained), OpenGaps: s.OpenGaps,
	}
	for _, g := range s.Gaps {
		v.Gaps = append(v.Gaps, gapView{g, max(now.Sub(g.Since), 0).Round(100 * time.Millisecond).String()})
	}
	return v
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
