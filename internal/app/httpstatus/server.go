// Package httpstatus serves /metrics, /healthz, /readyz, /status.json, /explain and a status page on / for
// operators and probes. It only reads.
package httpstatus

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"github.com/outflowhq/outflow/internal/app/overview"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// Server serves the pages. Its methods are for one goroutine.
type Server struct {
	http   *http.Server
	served chan error

	end      context.CancelFunc // of the sampling
	sampling sync.WaitGroup
}

// Source is what the pages show.
type Source struct {
	Info    overview.Info
	Status  func() pipeline.Status
	Reading func() watch.Reading // of both servers
	Events  *Events              // the last ones of the log; nil: none are shown
	Metrics prometheus.Gatherer
}

// Listen listens on the address. If that is in use, the error is a fault of class Usage that names the
// setting.
func Listen(ctx context.Context, setting, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, &outbox.Fault{
			Class: outbox.Usage, Code: "listen", Err: err,
			Message: fmt.Sprintf("%s: %s cannot be used", setting, addr),
			Hint: fmt.Sprintf(`Set %s (OUTFLOW_%s, --%[1]s) to a free address, or to "" to switch the pages `+
				`off`, setting, strings.ToUpper(strings.ReplaceAll(setting, ".", "_"))),
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
func Serve(l net.Listener, hosts string, from Source) *Server {
	past := new(history)
	ctx, cancel := context.WithCancel(context.Background())
	s := serve(l, guarded(hosts, handler(&from, past)), usual)
	s.end = cancel
	s.sampling.Go(func() {
		defer crash.Guard()
		past.run(ctx, &from)
	})
	return s
}

func serve(l net.Listener, handler http.Handler, limits limits) *Server {
	s := &Server{served: make(chan error, 1), end: func() {}}
	s.http = &http.Server{
		Handler: handler, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: limits.header,
		ReadTimeout:  limits.header,
		WriteTimeout: limits.write, IdleTimeout: limits.idle,
	}
	go func() {
		defer crash.Guard()
		s.served <- s.http.Serve(netutil.LimitListener(l, limits.connections))
	}()
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

// policy allows the page its own style sheet, its own script, and to ask for itself again. Nothing else.
var policy = "default-src 'none'; style-src " + hashOf("style") + "; script-src " + hashOf("script") +
	"; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// hashOf is the hash of the one element of that name in the page.
func hashOf(element string) string {
	_, text, _ := strings.Cut(pageHTML, "<"+element+">")
	text, _, _ = strings.Cut(text, "</"+element+">")
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// Close ends the server; requests under way get a second.
func (s *Server) Close() error {
	s.end()
	s.sampling.Wait()
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

// handler returns the pages.
func handler(from *Source, past *history) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics",
		promhttp.HandlerFor(from.Metrics, promhttp.HandlerOpts{DisableCompression: true}))
	probe := func(ok func(*pipeline.Status) bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			snap := from.Status()
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if !ok(&snap) {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			state, since := string(snap.State), snap.Since
			if !snap.Ready() { // each attempt to start goes through several states
				state, since = state+", not ready", snap.ReadyChanged
			}
			fmt.Fprintf(w, "%s for %v\n", state, time.Since(since).Round(time.Second))
			if snap.Error != "" {
				fmt.Fprintln(w, from.Info.Repeat.In(snap.Error))
			}
		}
	}
	report := func(now time.Time) *overview.Report {
		snap, r := from.Status(), from.Reading()
		return overview.New(&from.Info, &snap, &r, now)
	}
	mux.HandleFunc("GET /healthz", probe(func(s *pipeline.Status) bool { return s.Alive(time.Now()) }))
	mux.HandleFunc("GET /readyz", probe((*pipeline.Status).Ready))
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(report(time.Now())) // it only fails if the client has gone
	})
	mux.HandleFunc("GET /explain/{code}", func(w http.ResponseWriter, r *http.Request) {
		f, ok := finding.Of(r.PathValue("code"))
		if !ok {
			http.Error(w, "there is no such code", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "%s (%v): %s\n\n%s", f.Code, f.Severity, f.Title,
			from.Info.Repeat.In(f.Text()))
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		// A page that asks again every two seconds would otherwise hold a connection for as long as it is
		// open, and a few of them would keep the probes out.
		w.Header().Set("Connection", "close")
		now := time.Now()
		_ = page().Execute(w, view(report(now), past, from.Events, now))
	})
	return mux
}
