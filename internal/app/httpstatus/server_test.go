package httpstatus

import (
	"bufio"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/pipeline"
)

func pages(hosts string) http.Handler {
	return guarded(hosts, handler(&Source{
		Status:  func() pipeline.Status { return pipeline.Status{} },
		Reading: func() watch.Reading { return watch.Reading{} },
		Metrics: prometheus.NewRegistry(),
	}, new(history)))
}

func ask(h http.Handler, host, path string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = host
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestAProbeSaysForHowLongItIsNotReady: attempts to start follow each other within a second.
func TestAProbeSaysForHowLongItIsNotReady(t *testing.T) {
	now := time.Now()
	h := handler(&Source{
		Status: func() pipeline.Status {
			return pipeline.Status{State: pipeline.StateWaiting, Since: now,
				ReadyChanged: now.Add(-time.Hour)}
		},
		Metrics: prometheus.NewRegistry(),
	}, new(history))
	if w := ask(h, "localhost", "/readyz"); w.Code != http.StatusServiceUnavailable ||
		!strings.HasPrefix(w.Body.String(), "waiting, not ready for 1h0m") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestOnlyOwnNamesAreAnswered(t *testing.T) {
	h := pages("outflow, Status.example.org,")
	for host, want := range map[string]int{
		"localhost:7422": 200, "LOCALHOST": 200, "localhost.": 200, "127.0.0.1:7422": 200,
		"10.1.2.3:7422": 200, "[::1]:7422": 200, "[fe80::1]": 200,
		"outflow:7422": 200, "status.example.org": 200, "": 200,
		"evil.example": 421, "evil.example:7422": 421, "localhost.evil.example": 421,
		"127.0.0.1.evil.example": 421, "x.outflow": 421,
	} {
		for _, path := range []string{"/", "/metrics", "/status.json"} {
			w := ask(h, host, path)
			if w.Code != want {
				t.Errorf("host %q, %s: %d, want %d", host, path, w.Code, want)
			}
			if want != 200 && !strings.Contains(w.Body.String(), "listen_hosts") {
				t.Errorf("host %q: %q does not name the setting", host, w.Body)
			}
		}
	}
}

func TestPagesMayNotBeFramedNorRunAnything(t *testing.T) {
	for _, host := range []string{"localhost", "evil.example"} {
		w := ask(pages(""), host, "/")
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Access-Control-Allow-Origin": "",
		} {
			if got := w.Header().Get(name); got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		policy := w.Header().Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "frame-ancestors 'none'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("policy %q, want %s", policy, want)
			}
		}
		if host != "localhost" {
			continue
		}
		// What the policy allows is what is sent.
		for _, element := range []string{"style", "script"} {
			sent := regexp.MustCompile(`(?s)<` + element + `>(.*)</` + element +
				`>`).FindStringSubmatch(w.Body.String())
			if sent == nil {
				t.Fatalf("no %s", element)
			}
			sum := sha256.Sum256([]byte(sent[1]))
			if want := base64.StdEncoding.EncodeToString(sum[:]); !strings.Contains(policy, want) {
				t.Errorf("policy %q, want the hash of the %s, %s", policy, element, want)
			}
		}
	}
}

// TestClientsThatDoNotReadKeepNobodyOut: many ask again and again and read nothing. So many as are allowed
// are served at the same time, their connections are closed, and somebody who reads is answered.
func TestClientsThatDoNotReadKeepNobodyOut(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const most = 8
	var open, highest atomic.Int64
	page := strings.Repeat("x", 1<<20) // more than the buffers of a socket that is not read
	s := serve(countedListener{l, &open, &highest},
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, page) }),
		limits{connections: most, header: time.Minute, write: 100 * time.Millisecond, idle: time.Minute})
	defer s.Close()
	const clients = 64
	for range clients {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, strings.Repeat("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 50)); err != nil {
			t.Fatal(err)
		}
	}
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	answered := false
	for !answered { // also a reader is cut off where the machine stands still
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err == nil {
			if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil {
				body, err := io.ReadAll(resp.Body)
				answered = err == nil && len(body) == len(page)
			}
		}
		if !answered {
			if c, err = net.Dial("tcp", l.Addr().String()); err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
	}
	if n := highest.Load(); n > most {
		t.Errorf("%d connections at the same time, want %d", n, most)
	}
}

// countedListener counts the connections that are accepted and not closed.
type countedListener struct {
	net.Listener
	open, highest *atomic.Int64
}

func (l countedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if n := l.open.Add(1); n > l.highest.Load() {
		l.highest.Store(n)
	}
	return &countedConn{Conn: c, open: l.open}, nil
}

type countedConn struct {
	net.Conn
	open   *atomic.Int64
	closed atomic.Bool
}

func (c *countedConn) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		defer c.open.Add(-1)
	}
	return c.Conn.Close()
}
