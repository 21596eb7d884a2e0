package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/process"
)

// streamer is a build of outflow.
type streamer struct {
	w       *harness
	build   Build
	label   string // "": the build's name
	horizon *time.Duration
	child   *process.Process
	log     *tail
}

func (s *streamer) name() string {
	if s.label != "" {
		return s.label
	}
	return s.build.Name
}

// id is the name of slot, publication and, in upper case, stream.
func (s *streamer) id() string {
	id := s.w.name + "_" + s.build.Name
	if s.horizon != nil {
		id += strings.NewReplacer(".", "_", "µ", "u").Replace("_" + s.horizon.String())
	}
	return id
}

func (s *streamer) stream() string  { return strings.ToUpper(s.id()) }
func (s *streamer) subject() string { return s.id() }
func (s *streamer) pid() int        { return s.child.PID() }

// environ holds the settings: as few as can be, because another build may not know more, and all others at
// their defaults.
func (s *streamer) environ(c *Case) []string {
	horizon := c.Horizon
	if s.horizon != nil {
		horizon = *s.horizon
	}
	env := append(environ(),
		"OUTFLOW_POSTGRES_URL="+s.w.pgURL, "OUTFLOW_NATS_URL="+s.w.broker.url, "OUTFLOW_SLOT="+s.id(),
		"OUTFLOW_PUBLICATION="+s.id(),
		"OUTFLOW_STREAM="+s.stream(), "OUTFLOW_SUBJECT="+s.subject()+".{doc_id}", "OUTFLOW_LISTEN=",
		"OUTFLOW_REORDER_HORIZON="+horizon.String(), fmt.Sprintf("OUTFLOW_INIT_REPLICAS=%d", c.Replicas))
	if c.Sync {
		env = append(env, "OUTFLOW_SINK_DURABLE_AFTER=0s")
	}
	for _, o := range s.w.o.Settings {
		if o.Build == "" || o.Build == s.build.Name {
			env = append(env, "OUTFLOW_"+strings.ToUpper(strings.ReplaceAll(o.Path, ".", "_"))+"="+o.Value)
		}
	}
	return env
}

// prepare runs outflow init.
func (s *streamer) prepare(ctx context.Context, c *Case) error {
	out, err := process.Again(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, s.build.Path, "init")
		cmd.Env = s.environ(c)
		return cmd
	})
	if err != nil {
		return fmt.Errorf("%s init: %w\n%s", s.build.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (s *streamer) run(c *Case) error {
	cmd := exec.Command(s.build.Path, "run")
	s.log = &tail{}
	cmd.Env, cmd.Stdout, cmd.Stderr = s.environ(c), s.log, s.log
	if s.w.o.Keep {
		file, err := os.OpenFile(s.w.file(s.id()+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		cmd.Stdout, cmd.Stderr = file, file
	}
	var err error
	s.child, err = process.Start(cmd, syscall.SIGKILL)
	return err
}

func (s *streamer) died() error {
	if s.child.Running() {
		return nil
	}
	return fmt.Errorf("%s ended: %w\n%s", s.build.Name, s.child.Wait(), s.log)
}

// drain measures from the start of the process, as with all that have no messages ready in memory.
func (s *streamer) drain(ctx context.Context, c *Case, b backlog) (sample, error) {
	costs, err := s.w.costs(ctx)
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	if err := s.run(c); err != nil {
		return nil, err
	}
	ended, err := s.w.awaitMessages(ctx, b.rows, s.died, s.stream())
	if err != nil {
		return nil, errors.Join(err, fmt.Errorf("the log of %s ends with:\n%s", s.build.Name, s.log))
	}
	got := sample{}
	program{pid: s.child.PID()}.measured(b.rows, got)
	got.rate(b.rows, begun, ended)
	if err := costs.end(ctx, b.rows, got); err != nil {
		return nil, err
	}
	if err := s.stop(ctx); err != nil {
		return nil, err
	}
	return got, s.w.verify(ctx, b.rows, s.stream())
}

// restart measures from kill -9 to the first new message, which somebody writes meanwhile. It kills once the
// record ends with the backlog: before that, gap mode has less to remember. What was published before stays:
// each repetition has its own backlog, and each build a row more.
func (s *streamer) restart(ctx context.Context, c *Case) (sample, error) {
	rows, err := s.w.rows(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.run(c); err != nil {
		return nil, err
	}
	if _, err := s.w.awaitMessages(ctx, rows, s.died, s.stream()); err != nil {
		return nil, errors.Join(err, fmt.Errorf("the log of %s ends with:\n%s", s.build.Name, s.log))
	}
	if err := s.awaitRecord(ctx, rows); err != nil {
		return nil, err
	}
	begun := time.Now()
	if err := s.child.Kill(); err != nil {
		return nil, err
	}
	if err := s.w.exec(ctx, fmt.Sprintf("CALL fill(%d, 1, 1, %d, %d, %d)", rows, c.Documents, c.Actors,
		c.Payload)); err != nil {
		return nil, err
	}
	if err := s.run(c); err != nil {
		return nil, err
	}
	ended, err := s.w.awaitMessages(ctx, rows+1, s.died, s.stream())
	if err != nil {
		return nil, errors.Join(err, fmt.Errorf("the log of %s ends with:\n%s", s.build.Name, s.log))
	}
	if err := s.stop(ctx); err != nil {
		return nil, err
	}
	return sample{restartTime: milliseconds(ended.Sub(begun))}, s.w.verify(ctx, rows+1, s.stream())
}

// awaitRecord waits until the newest checkpoint of the record is behind message n and, in gap mode, remembers
// as many messages as it may.
func (s *streamer) awaitRecord(ctx context.Context, n int) error {
	for begun := time.Now(); ; {
		kv, err := s.w.broker.js.KeyValue(ctx, "outflow-"+s.stream())
		if err != nil {
			return err
		}
		entry, err := kv.Get(ctx, s.id())
		if err != nil {
			return err
		}
		full, err := recorded(entry.Value(), n)
		if full || err != nil {
			return err
		}
		if err := s.died(); err != nil {
			return err
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("after %v %s has not recorded that %d messages are published", patience,
				s.name(), n)
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// recorded reads of a record, also another build's, whether its newest checkpoint is behind message n.
func recorded(doc []byte, n int) (bool, error) {
	var r struct {
		Places []struct {
			Seq        int
			Remembered int
			Settings   struct{ Gap struct{ Memory int } }
		}
	}
	if err := json.Unmarshal(doc, &r); err != nil {
		return false, fmt.Errorf("the checkpoint record: %w", err)
	}
	if len(r.Places) == 0 {
		return false, nil
	}
	p := r.Places[len(r.Places)-1]
	return p.Seq >= n && p.Remembered >= min(p.Settings.Gap.Memory, n), nil
}

func (s *streamer) start(_ context.Context, c *Case) (string, error) { return outboxName, s.run(c) }

// stop ends it cleanly.
func (s *streamer) stop(ctx context.Context) error {
	if err := s.child.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-s.child.Done():
	case <-time.After(patience):
		return fmt.Errorf("%s does not end within %v of SIGTERM", s.build.Name, patience)
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := s.child.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", s.build.Name, err, s.log)
	}
	return nil
}

func (s *streamer) cleanUp(ctx context.Context) error {
	if s.child != nil && s.child.Running() {
		_ = s.child.Kill() // it may just have ended
	}
	errs := []error{s.w.dropSlot(ctx, s.id()), s.w.dropStream(ctx, s.stream())}
	return errors.Join(append(errs, persist(ctx, func(ctx context.Context) error {
		err := s.w.broker.js.DeleteKeyValue(ctx, "outflow-"+s.stream())
		if errors.Is(err, jetstream.ErrBucketNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil
		}
		return err
	}))...)
}
