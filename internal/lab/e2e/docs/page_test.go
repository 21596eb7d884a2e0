package docs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/docpage"
	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/process"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// pageRun is a reader at work on a page: a folder that is a Go module of its own, a shell, a database and a
// NATS server.
type pageRun struct {
	t       *testing.T
	page    string
	base    string // everything of the page is in it: bin is in PATH
	dir     string // where the reader works
	state   string // a script that restores what the blocks before exported
	pgURL   string
	natsURL string
	listen  string
	as      []string // addresses of the page, each followed by the one that is free
	env     []string
	jobs    []*pageJob
}

// pageJob is a command in the background.
type pageJob struct {
	command string
	out     *harness.Log
	child   *process.Process
	ended   bool // by the page
}

func newPageRun(t *testing.T, page, pgURL, natsURL string) *pageRun {
	t.Helper()
	p := &pageRun{t: t, page: page, pgURL: pgURL, natsURL: natsURL}
	port, err := freeport.Port()
	harness.Must(t, err)
	p.listen = fmt.Sprintf("127.0.0.1:%d", port)
	p.base = t.TempDir()
	bin := filepath.Join(p.base, "bin")
	p.dir, p.state = filepath.Join(p.base, "work"), filepath.Join(p.base, "state")
	for _, dir := range []string{bin, p.dir} {
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // nothing secret
			t.Fatal(err)
		}
	}
	p.write(p.state, "", 0o600)
	for name, target := range map[string]string{"outflow": harness.Binary, "psql": psql(t)} {
		harness.Must(t, os.Symlink(target, filepath.Join(bin, name)))
	}
	p.module()
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OUTFLOW_") && !strings.HasPrefix(v, "PG") &&
			!strings.HasPrefix(v, "PATH=") {
			p.env = append(p.env, v)
		}
	}
	p.env = append(p.env, "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "TMPDIR="+p.base,
		"LC_ALL=C.UTF-8", "PSQLRC="+os.DevNull,
		"PAGER=", "GOWORK=off",
		"GOFLAGS=-ldflags=-w -vet=off", // quicker, and nothing that a page shows
		"DATABASE_URL="+p.pgURL, "NATS_URL="+p.natsURL, "OUTFLOW_LISTEN="+p.listen,
		"OUTFLOW_SINK_DURABLE_AFTER=1s")
	t.Cleanup(p.kill)
	return p
}

// psql returns the path of a psql, of the newest installation that has one.
func psql(t *testing.T) string {
	t.Helper()
	if path, err := exec.LookPath("psql"); err == nil {
		return path
	}
	all := pgserver.Installations()
	for i := len(all) - 1; i >= 0; i-- {
		if path, ok := all[i].Tool("psql"); ok {
			return path
		}
	}
	tier.Missing(t, "psql", "psql is not here: the pages need it")
	return ""
}

// module makes the reader's folder a Go module that requires this one and its examples, as they are in the
// tree.
func (p *pageRun) module() {
	p.t.Helper()
	root := harness.Path()
	var sums []byte
	for _, dir := range []string{".", "examples"} {
		sum, err := os.ReadFile(filepath.Join(root, dir, "go.sum"))
		harness.Must(p.t, err)
		sums = append(sums, sum...)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	harness.Must(p.t, err)
	const self = "github.com/outflowhq/outflow"
	text := strings.Replace(string(mod), "module "+self, "module example", 1)
	for _, part := range []string{"", "/examples"} {
		text += fmt.Sprintf("\nrequire %s v0.0.0\n\nreplace %s => %s\n", self+part, self+part, root+part)
	}
	p.write(filepath.Join(p.dir, "go.mod"), text, 0o600)
	p.write(filepath.Join(p.dir, "go.sum"), string(sums), 0o600)
}

// service is a program of the reader's that the page starts and stops with systemctl.
type service struct {
	p      *pageRun
	wanted string // file: what systemctl was told last, start or stop
	state  string // file: what the program is
}

// service makes the systemctl that a page calls for a unit.
func (p *pageRun) service(unit, wanted string) *service {
	p.t.Helper()
	s := &service{p, filepath.Join(p.base, unit+".wanted"), filepath.Join(p.base, unit+".is")}
	p.write(s.wanted, wanted, 0o600)
	s.is("stop")
	p.write(filepath.Join(p.base, "bin", "systemctl"), fmt.Sprintf(`#!/usr/bin/env bash
set -eu
[ "$2" = %[3]s ]
printf %%s "$1" >%[1]q
until [ "$(cat %[2]q)" = "$1" ]; do
  [ "$(cat %[2]q)" != failed ]
  sleep 0.05
done
`, s.wanted, s.state, unit), 0o700)
	return s
}

// told is what the page wants it to do: start or stop.
func (s *service) told() string {
	b, err := os.ReadFile(s.wanted)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// is says what it does: start, stop, or failed.
func (s *service) is(what string) { s.p.write(s.state, what, 0o600) }

func (p *pageRun) write(path, text string, mode os.FileMode) {
	p.t.Helper()
	harness.Must(p.t, os.WriteFile(path, []byte(text), mode))
}

// play does what the page says, or one section of it.
func (p *pageRun) play(section string) {
	p.t.Helper()
	text, err := os.ReadFile(harness.Path("docs", p.page+".md"))
	harness.Must(p.t, err)
	page := strings.NewReplacer(p.as...).Replace(string(text))
	if section != "" {
		page, err = docpage.Section(page, section)
		harness.Must(p.t, err)
	}
	blocks, err := docpage.Parse(page)
	if err != nil {
		p.t.Fatalf("docs/%s.md: %v", p.page, err)
	}
	if len(blocks) == 0 {
		p.t.Fatalf("docs/%s.md has no block that is run", p.page)
	}
	for _, b := range blocks {
		p.do(b)
	}
}

// do does what a block says.
func (p *pageRun) do(b docpage.Block) {
	p.t.Helper()
	where := fmt.Sprintf("docs/%s.md, line %d", p.page, b.Line)
	var err error
	switch b.Kind {
	case docpage.File:
		path := filepath.Join(p.dir, filepath.FromSlash(b.Name))
		if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil { //nolint:gosec // nothing secret
			p.write(path, b.Body, 0o700)
		}
	case docpage.Kill:
		if b.Job > len(p.jobs) {
			err = fmt.Errorf("%d commands were started in the background", len(p.jobs))
			break
		}
		err = p.jobs[b.Job-1].end()
	case docpage.Background:
		err = p.start(b)
	default:
		err = p.run(b)
	}
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", where, err, p.logs())
	}
}

// run runs a block to its end, and again if the page says so.
func (p *pageRun) run(b docpage.Block) error {
	deadline := time.Now().Add(harness.Patience)
	for {
		out, code, err := p.execute(b)
		if err != nil {
			return err
		}
		switch {
		case code != b.Exit:
			err = fmt.Errorf("exit code %d, want %d:\n%s", code, b.Exit, out)
		case b.Checked:
			err = docpage.Match(b.Want, out)
		}
		again := b.Eventually || (code == 1 || code == 3) && code != b.Exit &&
			harness.Unanswered(p.t, b.Body, out)
		if err == nil || !again || time.Now().After(deadline) {
			return err
		}
		select {
		case <-p.t.Context().Done():
			return p.t.Context().Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (p *pageRun) execute(b docpage.Block) (out string, code int, err error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*harness.Patience)
	defer cancel()
	var cmd *exec.Cmd
	if b.Lang == "sql" {
		cmd = exec.CommandContext(ctx, "bash", "-c",
			`. "$1" && exec psql -X -v ON_ERROR_STOP=1 "$DATABASE_URL"`, "bash", p.state)
		cmd.Stdin = strings.NewReader(b.Body)
	} else {
		cmd = p.bash(ctx, b.Body)
	}
	cmd.Dir, cmd.Env = p.dir, p.env
	var both bytes.Buffer
	cmd.Stdout, cmd.Stderr = &both, &both
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", 0, fmt.Errorf("it did not end:\n%s", both.String())
	case err != nil && !errors.As(err, &exit):
		return "", 0, err
	}
	return slow.ReplaceAllString(both.String(), ""), cmd.ProcessState.ExitCode(), nil
}

// slow finds what commands print of their progress where a machine is slow. Pages show the quick ones.
var slow = regexp.MustCompile(`(?m)^(.* \([0-9a-z ]+ s\)|.*: [0-9a-z ]+ s until .*|` +
	`.*: [0-9,]+ of [0-9,]+ .* \([0-9]+ %\)|(publishing|replaying|reading .*): [0-9.,]+ .*)\n`)

// bash runs a script where the block before it ended, and notes where it ends itself.
func (p *pageRun) bash(ctx context.Context, script string) *exec.Cmd {
	const around = `. "$1"
trap '{ export -p; printf "cd %q\n" "$PWD"; } >"$1"' EXIT
set -eo pipefail
`
	return exec.CommandContext(ctx, "bash", "-c", around+script, "bash", p.state)
}

var (
	goRun      = regexp.MustCompile(`^go run (\S+)`)
	outflowRun = regexp.MustCompile(`^outflow run\b`)
	listenFlag = regexp.MustCompile(`--listen[= ](\S+)`)
)

// start starts a command in the background, again if it gave up because a server did not answer.
func (p *pageRun) start(b docpage.Block) error {
	command := b.Command
	prepare := b.Body
	if m := goRun.FindStringSubmatch(command); m != nil {
		// go run would not hand on the signal that ends the program.
		program := filepath.Join(p.t.TempDir(), "program")
		prepare += fmt.Sprintf("go build -o %s %s\n", program, m[1])
		command = program + strings.TrimPrefix(command, m[0])
	}
	if prepare != "" {
		if out, code, err := p.execute(docpage.Block{Lang: "sh", Body: prepare}); err != nil || code != 0 {
			return fmt.Errorf("exit code %d, %w:\n%s", code, err, out)
		}
	}
	for try := 1; ; try++ {
		job, err := p.background(b, command)
		if err == nil || try == harness.Tries || job == nil || job.child.Running() ||
			!harness.Unanswered(p.t, b.Command, job.out.String()) {
			return err
		}
		p.jobs = p.jobs[:len(p.jobs)-1]
	}
}

// background starts a command and waits until it is ready, or has printed what the page has behind it.
func (p *pageRun) background(b docpage.Block, command string) (*pageJob, error) {
	cmd := exec.Command("bash", "-c", ". \"$1\" && exec "+command, "bash", p.state)
	job := &pageJob{command: b.Command, out: &harness.Log{}}
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = p.dir, p.env, job.out, job.out
	var err error
	if job.child, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		return nil, err
	}
	p.jobs = append(p.jobs, job)
	if outflowRun.MatchString(b.Command) {
		listen := p.listen
		if m := listenFlag.FindStringSubmatch(b.Command); m != nil {
			listen = m[1]
		}
		if err := p.await(job, func() error { return ready(listen) }); err != nil {
			return job, err
		}
	}
	if b.Checked {
		return job, p.await(job, func() error { return docpage.MatchBegin(b.Want, job.out.String()) })
	}
	return job, nil
}

// ready asks an outflow whether it is.
func ready(listen string) error {
	resp, err := http.Get("http://" + listen + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

// await waits for a condition while a command runs.
func (p *pageRun) await(job *pageJob, check func() error) error {
	deadline := time.After(harness.Patience)
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-p.t.Context().Done():
			return p.t.Context().Err()
		case <-deadline:
			return err
		case <-job.child.Done():
			if check() == nil {
				return nil
			}
			return fmt.Errorf("%s ended, %v: %w", job.command, job.child.Wait(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// end asks a command to stop, which it must do with exit code 0.
func (j *pageJob) end() error {
	if j.ended {
		return fmt.Errorf("%s was stopped before", j.command)
	}
	j.ended = true
	if err := j.child.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-j.child.Done():
	case <-time.After(harness.Patience):
		return fmt.Errorf("%s does not stop", j.command)
	}
	if err := j.child.Wait(); err != nil {
		return fmt.Errorf("%s: %w", j.command, err)
	}
	return nil
}

// stop ends what still runs, the last first.
func (p *pageRun) stop() {
	p.t.Helper()
	for i := len(p.jobs) - 1; i >= 0; i-- {
		if j := p.jobs[i]; !j.ended {
			if err := j.end(); err != nil {
				p.t.Errorf("docs/%s.md, at its end: %v\n%s", p.page, err, p.logs())
			}
		}
	}
}

// kill leaves nothing running, whatever happened.
func (p *pageRun) kill() {
	for _, j := range p.jobs {
		if j.child.Running() {
			_ = j.child.Kill() // it may just have ended
		}
	}
}

func (p *pageRun) logs() string {
	var b strings.Builder
	for i, j := range p.jobs {
		fmt.Fprintf(&b, "--- %%%d: %s\n%s\n", i+1, j.command, j.out.Tail(4000))
	}
	return b.String()
}
