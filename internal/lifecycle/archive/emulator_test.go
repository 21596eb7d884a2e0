//go:build gcs || azure

package archive

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// emulator starts the server of a cloud's protocol that a variable names, behind a proxy that shows its
// requests, and returns the proxy's address.
func emulator(t *testing.T, thing, variable string, args func(port, address string) []string,
	see func(*http.Request)) string {
	t.Helper()
	program := os.Getenv(variable)
	if program == "" {
		tier.Missing(t, thing, "%s names no %s", variable, thing)
	}
	n, err := freeport.Port()
	must.Succeed(t, err)
	port := strconv.Itoa(n)
	at := &url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", port)}
	proxy := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		see(r.Out)
		r.SetURL(at)
		r.Out.Host = r.In.Host
	}})
	t.Cleanup(proxy.Close)
	address := proxy.Listener.Addr().String()
	cmd := exec.Command(program, args(port, address)...)
	child, err := process.Start(cmd, syscall.SIGKILL)
	must.Succeed(t, err)
	t.Cleanup(func() {
		_ = child.Kill() // it may have ended
		_ = child.Wait()
	})
	await.Until(t, "it answers", func() error {
		conn, err := net.Dial("tcp", at.Host)
		if err != nil {
			used, _, _, _ := process.CPU(child.PID())
			return fmt.Errorf("%w, and it has used %v", err, used) // while that grows it is starting
		}
		return conn.Close()
	}, func() error {
		if !child.Running() {
			return errors.New("it has ended")
		}
		return nil
	})
	return address
}
