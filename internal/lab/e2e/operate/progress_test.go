package operate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"

	"github.com/outflowhq/outflow/internal/lab/await"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/process"
)

const columns = 60 // of the terminal

// terminal is a program on a terminal of its own.
type terminal struct {
	t     *testing.T
	child *process.Process
	log   harness.Log // all that it wrote
	keys  io.Writer
	read  chan struct{} // closed when all of it was read
}

func onTerminal(t *testing.T, o *harness.Outflow, args ...string) *terminal {
	t.Helper()
	master, slave, err := pty.Open()
	harness.Must(t, err)
	harness.Must(t, pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: columns}))
	cmd := exec.Command(harness.Program(o.Env), args...)
	cmd.Env = append(slices.Clone(o.Env), "TERM=xterm")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	p := &terminal{t: t, keys: master, read: make(chan struct{})}
	p.child, err = process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	harness.Must(t, slave.Close())
	t.Cleanup(func() {
		if p.child.Running() {
			_ = p.child.Kill() // it may just have ended
		}
		_ = master.Close()
		<-p.read
	})
	go func() {
		defer close(p.read)
		_, _ = io.Copy(&p.log, master) // it ends with an error when nobody has the other side any more
	}()
	return p
}

// ends waits for the end, and returns the exit code and what stands on the terminal then.
func (p *terminal) ends() (code int, stands string) {
	p.t.Helper()
	harness.Eventually(p.t, "it ends", func() error {
		if p.child.Running() {
			return errors.New(p.log.String())
		}
		return nil
	})
	<-p.read
	var exit *exec.ExitError
	if err := p.child.Wait(); errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	return code, visible(p.log.String())
}

func (p *terminal) says(what string) {
	p.t.Helper()
	harness.Eventually(p.t, what, func() error {
		if !strings.Contains(p.log.String(), what) {
			return errors.New(p.log.String())
		}
		return nil
	}, p.child)
}

// visible is what stands on a terminal after all that was written to it.
func visible(written string) string {
	lines, column := []string{""}, 0
	for written != "" {
		line := &lines[len(lines)-1]
		switch {
		case written[0] == '\r':
			column, written = 0, written[1:]
		case written[0] == '\n':
			lines, column, written = append(lines, ""), 0, written[1:]
		case strings.HasPrefix(written, "\x1b[K"):
			*line, written = (*line)[:column], written[3:]
		default:
			*line = (*line)[:column] + written[:1] + (*line)[min(column+1, len(*line)):]
			column, written = column+1, written[1:]
		}
	}
	return strings.Join(lines, "\n")
}

// drawn finds the texts that were rewritten in place.
var drawn = regexp.MustCompile(`\r([^\r\n\x1b]+)\x1b\[K`)

// shows runs a command on a terminal, where it must succeed, show a line that moves, and leave it to the
// result alone.
func shows(t *testing.T, o *harness.Outflow, line, result string, args ...string) {
	t.Helper()
	p := onTerminal(t, o, args...)
	code, stands := p.ends()
	all := drawn.FindAllStringSubmatch(p.log.String(), -1)
	moved := map[string]bool{}
	for _, d := range all {
		if len(d[1]) >= columns {
			t.Errorf("%v: %q is wider than the terminal", args, d[1])
		}
		if strings.Contains(d[1], line) {
			moved[d[1]] = true
		}
	}
	// a machine that stands still for as long as the command waits shows one of them
	silent := len(moved) < 2 && !await.StoodStill(harness.Patience)
	if code != 0 || silent || strings.Contains(stands, line) || strings.Contains(stands, "\x1b") ||
		!strings.Contains(stands, result) || !strings.HasSuffix(stands, "\n") {
		t.Errorf("%v: exit code %d; the line %q was seen in %d forms; at the end there stands\n%s", args,
			code, line, len(moved), stands[max(0, len(stands)-2000):])
	}
}

// prints runs a command where there is no terminal: it must succeed, with the result alone on standard output
// and progress in plain lines.
func prints(t *testing.T, o *harness.Outflow, line, result string, args ...string) {
	t.Helper()
	stdout, stderr, code := o.Run(args...)
	lines := strings.Count(stderr, "\n")
	silent := !strings.Contains(stderr, line) && !await.StoodStill(harness.Patience)
	if code != 0 || silent || strings.ContainsAny(stdout+stderr, "\r\x1b") ||
		strings.Contains(stdout, line) || !strings.Contains(stdout, result) || lines > 60 {
		t.Errorf("%v: exit code %d, %d lines of progress, want %q\n%s\n%s", args, code, lines, line,
			stdout[max(0, len(stdout)-500):], stderr)
	}
}

// TestCommandsShowTheirProgress: on a terminal one line that moves and vanishes, elsewhere plain lines, and
// results on standard output only.
func TestCommandsShowTheirProgress(t *testing.T) {
	t.Parallel()
	ns, pg := natstest.Server(t), pgtest.Server(t)
	harness.RunAtOnce(t, []bool{true, false}, func(onTerminal bool) string {
		return fmt.Sprintf("terminal=%v", onTerminal)
	}, func(t *testing.T, _ int, onTerminal bool) {
		f := harness.NewInstallation(t, pg, ns.URL(), "progress", "SINK_DURABLE_AFTER=3s")
		harness.Exec(t, f.Conn, harness.GeneratedKey)
		insert := func(actor string) {
			harness.Exec(t, f.Conn, `INSERT INTO outbox (doc_id, actor_id, counter, payload)
				SELECT 'd' || n % 9, $1, n, '{}' FROM generate_series(1, 300) n`, actor)
		}
		run := prints
		if onTerminal {
			run = shows
		}
		insert("snapshot")
		run(t, f.Outflow, "until it is durable", "snapshot finished: 300 rows", "init", "--snapshot")
		run(t, f.Outflow, "replaying: ", `"sequence":300`, "replay", "--rate", "100")
		insert("drained")
		run(t, f.Outflow, "until it is durable", "drained: everything up to", "drain")
		harness.AwaitSlotFree(t, f.Conn, f.Slot)
		harness.Exec(t, f.Conn, "SELECT pg_drop_replication_slot($1)", f.Slot)
		insert("missing")
		run(t, f.Outflow, "until it is durable", "300", "repair", "--accept", "slot_missing")
	})
}

// TestCtrlCLeavesTheTerminalClean: what was shown is gone, and why it ended stands on a line of its own.
func TestCtrlCLeavesTheTerminalClean(t *testing.T) {
	t.Parallel()
	o, conn, _ := harness.Install(t, pgtest.Server(t), natstest.Server(t).URL(), "ctrlc",
		"SINK_DURABLE_AFTER=60s")
	o.Init()
	harness.Insert(t, conn, "doc", 1, "{}")
	p := onTerminal(t, o, "drain", "--timeout", "0")
	p.says("until it is durable")
	_, err := io.WriteString(p.keys, "\x03")
	harness.Must(t, err)
	code, stands := p.ends()
	if code != 1 || strings.Contains(stands, "until it is durable") || !strings.HasSuffix(stands, "\n") ||
		!strings.Contains(stands, "\noutflow: stopped by a signal (interrupt)\n") {
		t.Errorf("exit code %d, there stands\n%q", code, stands)
	}
}

// deaf listens, accepts and never answers.
func deaf(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
		for _, c := range conns {
			_ = c.Close()
		}
	})
	return l.Addr().String()
}

// command finds the commands in a help text.
var command = regexp.MustCompile(`(?m)^  ([a-z]+) +[A-Z]`)

func commands(help string) (all []string) {
	_, list, _ := strings.Cut(help, "Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for _, found := range command.FindAllStringSubmatch(list, -1) {
		all = append(all, found[1])
	}
	return all
}

// offline are the commands that ask no server, or none before the archive, which is empty here.
var offline = []string{"config", "explain", "version", "help", "completion", "archive list", "archive verify",
	"archive rows"}

// arguments are what a command can't do without.
var arguments = map[string][]string{
	"parked show":          {"orders", "doc"},
	"parked retry":         {"orders", "doc"},
	"parked skip":          {"orders", "doc"},
	"consumer rewind":      {"orders", "--to", "start"},
	"consumer delete":      {"orders", "--yes"},
	"consumer repartition": {"orders", "--partitions", "3", "--yes"},
	"erase":                {"--doc", "doc", "--request", "request"},
}

// TestNoCommandWaitsInSilence: whatever server does not answer, each command says which one it waits for
// before it gives up.
func TestNoCommandWaitsInSilence(t *testing.T) {
	t.Parallel()
	o := harness.New(t, "postgres://anna:hush@"+deaf(t)+"/app?sslmode=disable", "nats://anna:hush@"+deaf(t),
		"deaf")
	o.Set("LISTEN="+deaf(t), "ARCHIVE_URL=file://"+t.TempDir())
	var all [][]string
	for _, name := range commands(o.MustRun("help")) {
		if slices.Contains(offline, name) {
			continue
		}
		subs := commands(o.MustRun("help", name))
		for _, sub := range subs {
			if slices.Contains(offline, name+" "+sub) {
				continue
			}
			all = append(all, append([]string{name, sub}, arguments[name+" "+sub]...))
		}
		if len(subs) == 0 {
			all = append(all, append([]string{name}, arguments[name]...))
		}
	}
	all = append(all, []string{"init", "--snapshot", "--json"}, []string{"init", "--print"},
		[]string{"status", "--watch"}, []string{"repair", "--json"}, []string{"drain", "--json"})
	if len(all) < 20 {
		t.Fatalf("only %v", all)
	}
	harness.AtOnce(t, len(all), func(i int) {
		args := all[i]
		if args[0] == "run" { // it listens itself
			args = append(args, "--listen", "")
		}
		for try := 1; ; try++ {
			said := untilItWaits(t, o, args)
			if strings.Contains(said, "waiting for ") && strings.Contains(said, "127.0.0.1:") {
				if strings.Contains(said, "hush") {
					t.Errorf("%v tells the password:\n%s", args, said)
				}
				return
			}
			if try == harness.Tries || !await.StoodStill(harness.Patience) {
				t.Errorf("%v ended, and did not say what it waited for:\n%s", args, said)
				return
			}
		}
	})
}

// untilItWaits runs a command until it says what it waits for, or ends, and returns what it said.
func untilItWaits(t *testing.T, o *harness.Outflow, args []string) string {
	t.Helper()
	var log harness.Log
	cmd := exec.Command(harness.Program(o.Env), args...)
	cmd.Dir = t.TempDir() // where one that is killed may leave its file
	cmd.Env, cmd.Stdout, cmd.Stderr = o.Env, &log, &log
	child, err := process.Start(cmd, syscall.SIGKILL)
	harness.Must(t, err)
	harness.Eventually(t, fmt.Sprint(args), func() error {
		if child.Running() && !strings.Contains(log.String(), "waiting for ") {
			return errors.New(log.String())
		}
		return nil
	})
	if child.Running() {
		_ = child.Kill() // it may just have ended
	}
	_ = child.Wait()
	return log.String()
}

// TestWaitingForATransactionIsNamed: what somebody else's open transaction holds up is neither a hang nor
// PostgreSQL's fault.
func TestWaitingForATransactionIsNamed(t *testing.T) {
	t.Parallel()
	ns, pg := natstest.Server(t), pgtest.Server(t)
	for _, c := range []struct{ name, do, says string }{
		{"a lock", "LOCK TABLE outbox", "or a lock on table public.outbox"},
		{"a writer", "INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', 1, '{}')",
			"the server waits for the transactions that write now"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := harness.NewInstallation(t, pg, ns.URL(), "locked")
			harness.Exec(t, f.Conn, harness.GeneratedKey)
			tx, err := f.Conn.Begin(t.Context())
			harness.Must(t, err)
			_, err = tx.Exec(t.Context(), c.do)
			harness.Must(t, err)
			var out bytes.Buffer
			var log harness.Log
			cmd := exec.Command(harness.Program(f.Env), "init")
			cmd.Env, cmd.Stdout, cmd.Stderr = f.Env, &out, &log
			child, err := process.Start(cmd, syscall.SIGKILL)
			harness.Must(t, err)
			harness.Eventually(t, c.says, func() error {
				if !strings.Contains(log.String(), c.says) {
					return errors.New(log.String())
				}
				return nil
			}, child)
			harness.Must(t, tx.Rollback(t.Context()))
			if err := child.Wait(); err != nil || strings.Contains(out.String(), "waits") {
				t.Errorf("%v\n%s%s", err, out.String(), log.String())
			}
		})
	}
}
