package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

// Args are settings from the command line, by path, and the file under "config". See [AddFlags] and
// [AddFile].
type Args map[string]string

// Check is a rule that another package knows. Of gets a complete configuration; its error is best an
// [outbox.Fault], whose What may begin with the name of the setting.
type Check struct {
	// the settings that it reads: it is asked only if each is possible by itself. The first is blamed
	Paths []string
	Of    func(Config) error
}

// Load reads the settings from args, environ (as of [os.Environ]), the file that one of them names, and the
// defaults, in this order of precedence, and checks them. All that is wrong is reported at once, in an
// [outbox.Fault] of class Usage.
func Load(args Args, environ []string, checks ...Check) (Config, error) {
	l := newLoader(environ)
	name, from := args[fileArg], origin{fromFlag, "--" + fileArg}
	if name == "" {
		name, from = l.environ[fileEnv], origin{fromEnv, fileEnv}
	}
	if name != "" {
		data, err := readFile(name)
		if err != nil {
			l.problem(fmt.Sprintf("%s (%v): %v", fileArg, from, err), "Name a file that can be read")
		}
		l.file(name, data)
	}
	c, err := l.load(args, checks)
	c.Repeat = args.Repeat(environ)
	return c, err
}

// Repeat returns what a command has to repeat of a command line and its environment, which need not be right,
// to be about the same installation: the file and the settings that were given, secrets hidden, but for those
// of the log. The other variables of the environment are left out.
func (a Args) Repeat(environ []string) (all finding.Options) {
	if file := cmp.Or(a[fileArg], newLoader(environ).environ[fileEnv]); file != "" {
		all = append(all, "--"+fileArg+" "+finding.Word(file))
	}
	for i := range settings {
		s := &settings[i]
		if text, ok := a[s.path]; ok && !strings.HasPrefix(s.path, "log.") {
			// with =, which flags need that can be without a value
			all = append(all, "--"+s.path+"="+finding.Word(s.secret.show(text)))
		}
	}
	return all
}

// maxFile is the greatest size of a file, in bytes: far above any that makes sense.
const maxFile = 64 << 10

// readTimeout is how long a pipe may take to bring a file: a shell makes one for what a command prints.
var readTimeout = 10 * time.Second

// readFile never waits for a pipe that nobody writes to: a process that runs reads its files again.
func readFile(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	regular := info.Mode().IsRegular()
	if !regular {
		_ = f.SetReadDeadline(time.Now().Add(readTimeout)) // what has none does not wait
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) == 0 && !regular {
		return nil, fmt.Errorf("%s: no regular file, and nothing is written to it", name)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: larger than %s", name, formatSize(maxFile))
	}
	return data, nil
}

// source is where a value may come from, the weakest first.
type source uint8

const (
	fromDefault  source = iota
	fromFallback        // an environment variable that is not ours
	fromFile
	fromEnv
	fromFlag
)

// origin is where a value came from.
type origin struct {
	source source
	name   string // of the variable or flag, file:line, or what the default follows
}

func (o origin) String() string {
	switch {
	case o.source == fromFlag:
		return "flag " + o.name
	case o.source == fromEnv, o.source == fromFallback:
		return "environment " + o.name
	case o.source == fromFile:
		return "file " + o.name
	case o.name != "":
		return "default: " + o.name
	}
	return "default"
}

// given is a value as it was found.
type given struct {
	text    string
	headers []Header // instead of text, for a mapping
	from    origin
}

type problem struct{ message, hint string }

// loader collects the values, each from the strongest source, and what is wrong.
type loader struct {
	environ  map[string]string
	given    map[string]given
	bad      map[string]bool // paths without a possible value
	problems []problem
}

func newLoader(environ []string) *loader {
	l := &loader{environ: map[string]string{}, given: map[string]given{}, bad: map[string]bool{}}
	for _, v := range environ {
		if name, value, ok := strings.Cut(v, "="); ok {
			l.environ[name] = value
		}
	}
	return l
}

// problem notes what is wrong, and a hint, whose full stop may be left out.
func (l *loader) problem(message, hint string) {
	if hint != "" && !strings.HasSuffix(hint, ".") {
		hint += "."
	}
	l.problems = append(l.problems, problem{message, hint})
}

// give takes a value unless a stronger source has given one.
func (l *loader) give(path string, g given) {
	if old, ok := l.given[path]; !ok || old.from.source <= g.from.source {
		l.given[path] = g
	}
}

func (l *loader) load(args Args, checks []Check) (Config, error) {
	l.readEnviron()
	for path, text := range args {
		if path != fileArg {
			l.give(path, given{text: text, from: origin{fromFlag, "--" + path}})
		}
	}
	c := Config{from: map[string]origin{}}
	for i := range settings {
		l.apply(&c, &settings[i])
	}
	c.Replication.Explicit = c.explicit("replication.origin") || c.Cluster.ID > 0
	l.complete(&c)
	for _, check := range append(rules[:len(rules):len(rules)], checks...) {
		l.check(c, check)
	}
	if err := l.fault(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// apply sets a setting to its default and then to what is given. An impossible value leaves the default, so
// that the rest can still be checked.
func (l *loader) apply(c *Config, s *setting) {
	v := s.bind(c)
	if s.def != "" {
		if err := v.set(s.def); err != nil {
			panic(fmt.Sprintf("default of %s: %v", s.path, err))
		}
	}
	g, ok := l.given[s.path]
	if !ok {
		return
	}
	var err error
	if h, isHeaders := v.(headersValue); isHeaders && g.headers != nil {
		err = h.setHeaders(g.headers)
	} else {
		err = v.set(g.text)
	}
	if err != nil {
		l.bad[s.path] = true
		message := fmt.Sprintf("%s = %q (%v) is not possible", s.path, s.secret.show(g.text), g.from)
		if g.headers != nil {
			message = fmt.Sprintf("%s (%v) is not possible", s.path, g.from)
		}
		if !errors.Is(err, errWant) {
			message += ": " + err.Error()
		}
		l.problem(message, "Give "+s.want)
		return
	}
	c.from[s.path] = g.from
	if col, ok := v.(columnValue); ok {
		col.p.Explicit = true
	}
}

// complete fills in what follows from other settings or from the environment.
func (l *loader) complete(c *Config) {
	if !strings.Contains(c.Table, ".") {
		c.Table = "public." + c.Table
	}
	if c.Postgres.URL == "" {
		c.from["postgres.url"] = l.libpq()
	}
	if c.Postgres.WriteURL == "" {
		c.Postgres.WriteURL = c.Postgres.URL
		c.from["postgres.write_url"] = origin{name: "postgres.url"}
	}
	if c.NATS.Context != "" && !c.explicit("nats.url") {
		c.NATS.URL = ""
		c.from["nats.url"] = origin{name: "nats.context"}
	}
	if c.Reorder.SpillDir == "" {
		c.Reorder.SpillDir = os.TempDir()
	}
	if c.Sink.DeadLetterSubject == "" {
		c.Sink.DeadLetterSubject = c.Stream + ".dead_letter"
		c.from["sink.dead_letter_subject"] = origin{name: "<stream>.dead_letter"}
	}
}

func (l *loader) check(c Config, check Check) {
	for _, path := range check.Paths {
		if l.bad[path] {
			return
		}
	}
	err := check.Of(c)
	if err == nil {
		return
	}
	path := check.Paths[0]
	l.bad[path] = true
	message, hint := err.Error(), ""
	if f := outbox.FaultOf(err); f != nil {
		message, hint = f.Message, f.Hint
	}
	if strings.HasPrefix(message, path) {
		message += fmt.Sprintf(" (%v)", c.from[path])
	} else {
		message = c.describe(path) + ": " + message
	}
	l.problem(message, hint)
}

// fault returns what is wrong as one error, nil if nothing is.
func (l *loader) fault() error {
	f := &outbox.Fault{Class: outbox.Usage, Code: "config"}
	switch len(l.problems) {
	case 0:
		return nil
	case 1:
		f.Message, f.Hint = l.problems[0].message, l.problems[0].hint
		return f
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d problems in the configuration:", len(l.problems))
	for _, p := range l.problems {
		b.WriteString("\n  " + (&outbox.Fault{Message: p.message, Hint: p.hint}).Error())
	}
	f.Message = b.String()
	return f
}

// explicit reports whether a setting was given by name, not by default or by a variable that other programs
// share.
func (c *Config) explicit(path string) bool { return c.from[path].source >= fromFile }

// describe names a setting, its value and where that came from; a section by its path alone.
func (c *Config) describe(path string) string {
	s := byPath[path]
	if s == nil {
		return path
	}
	return fmt.Sprintf("%s = %q (%v)", path, s.secret.show(s.bind(c).text()), c.from[path])
}
