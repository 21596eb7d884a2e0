package doctor

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/pipeline"
)

// Host is what this machine says, which is that of `outflow run` only if doctor is run there.
type Host struct {
	SpillDir    string   // the folder, or the nearest above it that exists
	SpillError  string   // why it can't be written to
	SpillMemory bool     // it is in memory
	SpillFree   uint64   // bytes
	MemoryLimit int64    // of the control group; 0: none, or not known
	Open        []string // files with secrets that every user of the machine may read
}

// Process is what answers at the address of the setting listen.
type Process struct {
	Listens bool
	Outflow bool // it is one, and this is what it says

	Self *struct {
		Version string `json:"version"`
		Host    string `json:"host"`
	} `json:"outflow"`
	Slot    named `json:"slot"`
	Stream  named `json:"stream"`
	Verdict struct {
		State string `json:"state"`
		Cause string `json:"cause"`
		Code  string `json:"code"`
	} `json:"verdict"`
	Pipeline struct {
		Agreed *pipeline.Agreement `json:"agreement"`
	} `json:"pipeline"`
	Ready bool `json:"-"`
}

type named struct {
	Name string `json:"name"`
}

func (r *reader) readHost() error {
	h, cfg := &r.f.Host, r.f.Config
	h.SpillDir = cfg.Reorder.SpillDir
	for { // run makes a missing folder
		if _, err := os.Stat(h.SpillDir); err == nil || filepath.Dir(h.SpillDir) == h.SpillDir {
			break
		}
		h.SpillDir = filepath.Dir(h.SpillDir)
	}
	if err := unix.Access(h.SpillDir, unix.W_OK|unix.X_OK); err != nil {
		h.SpillError = err.Error()
	}
	h.SpillFree, h.SpillMemory = space(h.SpillDir)
	h.MemoryLimit = memoryLimit()
	for _, path := range secretFiles(cfg) {
		if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o004 != 0 {
			h.Open = append(h.Open, path)
		}
	}
	return nil
}

// secretFiles are those that the settings name.
func secretFiles(cfg config.Config) (all []string) {
	for _, path := range []string{cfg.NATS.Creds, cfg.NATS.NKey, cfg.NATS.PasswordFile, cfg.NATS.TokenFile,
		cfg.NATS.TLS.Key} {
		if path != "" {
			all = append(all, path)
		}
	}
	return all
}

// memoryLimit is the control group's, of version 2 or 1; 0: none.
func memoryLimit() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.max",
		"/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if text, err := os.ReadFile(path); err == nil {
			n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			if err == nil && n < 1<<60 { // version 1 says "none" by a very large number
				return n
			}
		}
	}
	return 0
}

// maxPage is how much of a page is read.
const maxPage = 1 << 20

// readProcess asks the process that serves the pages, if there is one.
func (r *reader) readProcess(ctx context.Context) error {
	if r.f.Config.Listen == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(r.f.Config.Listen)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	get := func(path string) (int, []byte, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet,
			"http://"+net.JoinHostPort(host, port)+path, nil)
		if err != nil {
			return 0, nil, err
		}
		// no proxy of the environment: it is this host that is asked
		answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
		if err != nil {
			return 0, nil, err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(io.LimitReader(answer.Body, maxPage))
		return answer.StatusCode, body, err
	}
	p := &r.f.Process
	status, body, err := get("/status.json")
	var failed *net.OpError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case errors.As(err, &failed) && failed.Op == "dial", ctx.Err() != nil:
		return err
	case err != nil: // something that speaks no HTTP
		p.Listens = true
		return nil
	}
	p.Listens = true
	if status != http.StatusOK || json.Unmarshal(body, p) != nil || p.Self == nil {
		return nil
	}
	p.Outflow = true
	status, _, err = get("/readyz")
	p.Ready = err == nil && status == http.StatusOK
	return nil
}

// decode reads a part of a JWT.
func decode(part string, into any) error {
	text, err := base64.RawURLEncoding.DecodeString(part)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}
