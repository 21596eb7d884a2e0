// Package support is `outflow support`: it puts what a bug report needs into one tar.gz, without secrets and
// without what rows hold. It works while servers are away, and changes nothing.
package support

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/outbox"
)

// Options say what is gathered, and where it goes.
type Options struct {
	Output    string        // the archive; "": outflow-support-<slot>-<time>.tar.gz in the working directory
	LogFile   string        // its last lines are taken along; "": none
	MaskHosts bool          // names and addresses of hosts are replaced
	Timeout   time.Duration // of each source

	Version string   // what this binary is
	Pages   string   // URL of the pages of the outflow that runs; "": they are not served
	Environ []string // of this process: what it holds of secrets is hidden
	Reports []Report // further sources, such as other commands

	Say func(format string, args ...any) // what is waited for
	Log *slog.Logger
}

// Report is a source that another command is. Its Read returns what is written as JSON, also where it returns
// an error as well: then not everything could be read.
type Report struct {
	Name string // of the file
	Read func(ctx context.Context) (any, error)
}

// How much is taken along.
const (
	maxFile = 2 << 20 // of each file
	maxLog  = 1 << 20 // the end of the log
)

// file is a file of the archive.
type file struct {
	Name  string `json:"name"`
	Bytes int    `json:"bytes"`
	Cut   bool   `json:"cut,omitempty"` // there is more of it

	text []byte
	rows bool // it may say what rows hold
}

// missing is something that could not be read.
type missing struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

// manifest says what is in the archive, as its first file.
type manifest struct {
	Created     time.Time `json:"created"`
	Version     string    `json:"version"`
	Slot        string    `json:"slot"`
	Stream      string    `json:"stream"`
	HostsMasked bool      `json:"hosts_masked"`
	Files       []file    `json:"files"`
	Missing     []missing `json:"missing"` // what could not be read, or not in full
}

// gathering collects files while sources are read beside one another.
type gathering struct {
	cfg config.Config
	o   Options

	mu      sync.Mutex
	files   []file
	missing []missing
	waiting []string // sources that are being read
}

// Run gathers everything and writes the archive. Only where that can't be written is it an error: what could
// not be read is said in it, and by what is printed.
func Run(ctx context.Context, cfg config.Config, o Options, out io.Writer) error {
	now := time.Now().UTC()
	name := cmp.Or(o.Output,
		fmt.Sprintf("outflow-support-%s-%s.tar.gz", cfg.Slot, now.Format("20060102T150405Z")))
	// a device or a pipe would be replaced by the file
	if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() {
		return unusable("--output "+name, errors.New("it is there, and is not a regular file"))
	}
	temp, err := os.CreateTemp(filepath.Dir(name), ".outflow-support-*") // mode 0600
	if err != nil {
		return unusable("--output "+name, err)
	}
	defer os.Remove(temp.Name())
	defer temp.Close()
	g := &gathering{cfg: cfg, o: o}
	if o.LogFile != "" {
		if err := g.readLog(); err != nil {
			return unusable("--log "+o.LogFile, err)
		}
	}
	g.gather(ctx)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	m := g.manifest(now)
	err = errors.Join(write(temp, m, now), temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), name)
	}
	if err != nil {
		return unusable("--output "+name, err)
	}
	return report(out, name, m)
}

func unusable(what string, err error) error {
	return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: what + " can't be used", Err: err,
		Hint: "Name a file that can be"}
}

// gather reads all sources beside one another, and says every two seconds which ones it waits for.
func (g *gathering) gather(ctx context.Context) {
	g.add("version.txt", []byte(g.o.Version), false, nil)
	g.add("config.yaml", g.cfg.YAML(), false, nil)
	var group sync.WaitGroup
	source := func(name string, read func()) {
		g.mu.Lock()
		g.waiting = append(g.waiting, name)
		g.mu.Unlock()
		group.Go(func() {
			defer crash.Guard()
			read()
			g.mu.Lock()
			defer g.mu.Unlock()
			g.waiting = slices.DeleteFunc(g.waiting, func(s string) bool { return s == name })
		})
	}
	for _, r := range g.o.Reports {
		source(r.Name, func() {
			g.timed(ctx, func(ctx context.Context) {
				value, err := r.Read(ctx)
				g.json(r.Name, value, err)
			})
		})
	}
	source("PostgreSQL", func() { g.readPostgres(ctx) })
	source("NATS", func() { g.readNATS(ctx) })
	source("the process at listen", func() { g.readPages(ctx) })
	done := make(chan struct{})
	go func() {
		defer crash.Guard()
		group.Wait()
		close(done)
	}()
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			g.mu.Lock()
			waiting := strings.Join(g.waiting, ", ")
			g.mu.Unlock()
			g.o.Say("reading %s", waiting)
		}
	}
}

func (g *gathering) timed(ctx context.Context, read func(ctx context.Context)) {
	ctx, cancel := context.WithTimeoutCause(ctx, g.o.Timeout, fmt.Errorf("no answer within %v", g.o.Timeout))
	defer cancel()
	read(ctx)
}

// add adds a file, and why it is not there or not complete.
func (g *gathering) add(name string, text []byte, rows bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		g.missing = append(g.missing, missing{name, err.Error()})
	}
	if len(text) == 0 {
		return
	}
	g.files = append(g.files, file{Name: name, text: text, rows: rows})
}

// json adds a value. A message in it may quote a row.
func (g *gathering) json(name string, value any, err error) {
	if value == nil {
		g.add(name, nil, true, err)
		return
	}
	text, failed := json.MarshalIndent(value, "", "  ")
	g.add(name, append(text, '\n'), true, cmp.Or(err, failed))
}

// cut leaves whole lines of a text that is longer than a file may be.
func cut(text []byte) (_ []byte, more bool) {
	if len(text) <= maxFile {
		return text, false
	}
	return text[:bytes.LastIndexByte(text[:maxFile], '\n')+1], true
}

// manifest redacts all that was read, and lists it.
func (g *gathering) manifest(now time.Time) *manifest {
	r := newRedactor(g.cfg, g.o.Environ)
	slices.SortFunc(g.files, func(a, b file) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(g.missing, func(a, b missing) int { return strings.Compare(a.Name, b.Name) })
	if g.o.MaskHosts {
		var texts []string
		for _, f := range g.files {
			texts = append(texts, string(f.text))
		}
		r.learn(g.cfg, texts)
	}
	clean := func(text string, rows bool) string {
		text = r.clean(text, rows)
		if g.o.MaskHosts {
			text = r.mask(text)
		}
		return text
	}
	for i := range g.files {
		f := &g.files[i]
		// cut only now: half a secret is not recognised
		f.text, f.Cut = cut([]byte(clean(string(f.text), f.rows)))
		f.Bytes = len(f.text)
	}
	for i := range g.missing {
		g.missing[i].Why = clean(g.missing[i].Why, true)
	}
	return &manifest{Created: now.Truncate(time.Second), Version: strings.SplitN(g.o.Version, "\n", 2)[0],
		Slot: g.cfg.Slot, Stream: g.cfg.Stream, HostsMasked: g.o.MaskHosts,
		Files: append([]file{}, g.files...), Missing: append([]missing{}, g.missing...)}
}

// write writes the archive.
func write(w io.Writer, m *manifest, now time.Time) error {
	list, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	for _, f := range append([]file{{Name: "manifest.json", text: append(list, '\n')}}, m.Files...) {
		err := archive.WriteHeader(&tar.Header{Name: "outflow-support/" + f.Name, Mode: 0o600,
			Size: int64(len(f.text)), ModTime: now.Truncate(time.Second), Format: tar.FormatPAX})
		if err != nil {
			return err
		}
		if _, err := archive.Write(f.text); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), zip.Close())
}

// report says what is in the archive.
func report(w io.Writer, name string, m *manifest) error {
	var b bytes.Buffer
	for _, f := range m.Files {
		fmt.Fprintf(&b, "%10s  %s", units.Size(uint64(f.Bytes)), f.Name)
		if f.Cut {
			b.WriteString(" (the first part)")
		}
		b.WriteByte('\n')
	}
	for _, gone := range m.Missing {
		fmt.Fprintf(&b, "not read: %s: %s\n", gone.Name, strings.Join(strings.Fields(gone.Why), " "))
	}
	fmt.Fprintf(&b, "%s is written. Look at what is in it before you send it: tar -xzf %[1]s\n", name)
	b.WriteString("Passwords, tokens, keys and the contents of rows are replaced by ***, as far as they " +
		"can be recognised.\n")
	if !m.HostsMasked {
		b.WriteString("Names of hosts, databases and roles are in it; --mask-hosts hides the hosts.\n")
	}
	_, err := w.Write(b.Bytes())
	return err
}
