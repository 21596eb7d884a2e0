package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Options say what to measure.
type Options struct {
	Cases       []string       // names of cases; none: Default
	Full        bool           // all of them
	Rows        int            // of a backlog
	Payload     int            // bytes of a payload, about
	Repetitions int            // turns of each case
	Horizon     *time.Duration // of all outflows; nil: each case's own
	Builds      []Build        // further builds of outflow
	Settings    []Setting      // of the outflows
	PostgresURL string         // "": a server for the moment
	NATSURL     string         // "": the same
	PGMajor     int            // of our own PostgreSQL; 0: the best that is here
	Keep        bool           // leave logs and the servers' files

	Binary  string // this program
	Version string
	Out     io.Writer // progress and tables
}

// Build is another build of outflow.
type Build struct{ Name, Path string }

// Setting is one of outflow's settings: its path and value.
type Setting struct {
	Build string // "": of all
	Path  string
	Value string
}

// The defaults.
const (
	DefaultRows        = 150_000
	DefaultRepetitions = 5
	DefaultPayload     = 200
)

const itself = "outflow" // the name of this build among the contenders

// Run measures and returns the report, of what was done also with an error.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	cases, err := o.plan()
	if err != nil {
		return nil, err
	}
	w, err := newHarness(o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	r = newReport(&o)
	err = w.run(ctx, r, cases)
	if err != nil && ctx.Err() != nil {
		return r, ctx.Err() // whatever broke off because of it
	}
	return r, err
}

// run measures what is to be measured.
func (w *harness) run(ctx context.Context, r *Report, cases []*Case) error {
	if err := w.startPostgres(ctx); err != nil {
		return err
	}
	if w.o.NATSURL != "" { // our own are started as the cases need them
		if err := w.useBroker(ctx, &Case{}); err != nil {
			return err
		}
	}
	w.describe(r)
	for _, c := range cases {
		if why := w.cannot(c); why != "" {
			r.Left = append(r.Left, fmt.Sprintf("%s: %s", c.title(), why))
			w.line("\n%s: left out, %s", c.title(), why)
			continue
		}
		done, err := w.measure(ctx, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.title(), err)
		}
		r.Cases = append(r.Cases, done)
		w.line("\n%s", done.table())
	}
	return nil
}

// check refuses what cannot be meant.
func (o *Options) check() error {
	wrong := func(what, hint string) error {
		return &outbox.Fault{Class: outbox.Usage, Code: "bench", Message: what, Hint: hint}
	}
	if o.Rows < 100 || o.Repetitions < 1 || o.Payload < minPayload || o.Payload > maxPayload {
		return wrong(fmt.Sprintf("--rows %d --repetitions %d --payload %d is not possible", o.Rows,
			o.Repetitions, o.Payload),
			fmt.Sprintf("Give 100 rows or more, a repetition or more, a payload of %d to %d bytes",
				minPayload, maxPayload))
	}
	names := []string{itself, recvLogicalName, publisherName, relayName}
	for _, b := range o.Builds {
		if !safeName(b.Name) || slices.Contains(names, b.Name) {
			return wrong(fmt.Sprintf("--outflow %s=%s: the name is taken, or is not made of a-z, 0-9 and _",
				b.Name, b.Path), "Give another name")
		}
		if info, err := os.Stat(b.Path); err != nil || info.Mode()&0o111 == 0 {
			return wrong(fmt.Sprintf("--outflow %s=%s: there is no such program", b.Name, b.Path),
				"Build it first")
		}
		names = append(names, b.Name)
	}
	for _, s := range o.Settings {
		if s.Build != "" && s.Build != itself &&
			!slices.ContainsFunc(o.Builds, func(b Build) bool { return b.Name == s.Build }) {
			return wrong(fmt.Sprintf("--settings %s:%s=%s: there is no such build", s.Build, s.Path, s.Value),
				"Name it with --outflow")
		}
	}
	return nil
}

// ParseBuild reads name=path.
func ParseBuild(text string) (Build, error) {
	name, path, ok := strings.Cut(text, "=")
	if !ok || path == "" {
		return Build{}, fmt.Errorf("%q: want name=path", text)
	}
	return Build{name, path}, nil
}

// ParseSetting reads path=value or build:path=value.
func ParseSetting(text string) (Setting, error) {
	path, value, ok := strings.Cut(text, "=")
	if !ok {
		return Setting{}, fmt.Errorf("%q: want setting=value or build:setting=value", text)
	}
	build, of, ok := strings.Cut(path, ":")
	if !ok {
		return Setting{Path: path, Value: value}, nil
	}
	return Setting{build, of, value}, nil
}

// safeName tells whether a name can be a part of those of slots and streams.
func safeName(name string) bool {
	return name != "" && len(name) <= 20 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}
