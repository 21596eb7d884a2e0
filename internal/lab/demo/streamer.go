package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/freeport"
	"github.com/outflowhq/outflow/internal/lab/process"
)

// streamer is `outflow run` as a process of its own, so that it can be killed.
type streamer struct {
	d      *demo
	mode   *mode
	slot   string
	listen string
	log    string // file
	child  *process.Process
}

func newStreamer(d *demo, m *mode, i int) *streamer {
	s := &streamer{d: d, mode: m, slot: d.slot(strconv.Itoa(i)),
		log: filepath.Join(d.dir, fmt.Sprintf("outflow%d.log", i))}
	if port, err := freeport.Port(); err == nil {
		s.listen = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	}
	return s
}

// command is the streamer's binary with the demo's settings. Nothing of the caller's own settings gets in.
func (s *streamer) command(ctx context.Context, name string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, s.d.Binary, name)
	for _, v := range os.Environ() {
		if len(v) < 8 || v[:8] != "OUTFLOW_" {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env,
		"OUTFLOW_POSTGRES_URL="+s.d.pgURL, "OUTFLOW_NATS_URL="+s.mode.nats.URL(), "OUTFLOW_SLOT="+s.slot,
		"OUTFLOW_STREAM="+stream,
		"OUTFLOW_TABLE="+table, "OUTFLOW_LISTEN="+s.listen, "OUTFLOW_SINK_DURABLE_AFTER=2s")
	if s.d.Spans {
		cmd.Env = append(cmd.Env, "OUTFLOW_COLUMNS_SPAN="+span)
	}
	cmd.Env = append(cmd.Env, s.mode.environ...)
	return cmd
}

func (s *streamer) start() error {
	out, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close() // the child has its own handle
	cmd := s.command(context.Background(), "run")
	cmd.Stdout, cmd.Stderr = out, out
	if s.child, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		return fmt.Errorf("start outflow: %w", err)
	}
	return nil
}

func (s *streamer) pid() int    { return s.child.PID() }
func (s *streamer) kill() error { return s.child.Kill() }

// stop ends the streamer cleanly, and hard if that takes too long.
func (s *streamer) stop() error {
	if s.child == nil || !s.child.Running() {
		return nil
	}
	if err := s.child.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-s.child.Done():
		return nil
	case <-time.After(stopTimeout):
		return s.child.Kill()
	}
}

// failure says what the streamer's log ends with, if it ended by itself.
func (s *streamer) failure() error {
	if s.child.Running() {
		return nil
	}
	f, err := os.Open(s.log)
	if err != nil {
		return err
	}
	defer f.Close()
	const tail = 2048
	if info, err := f.Stat(); err == nil && info.Size() > tail {
		if _, err := f.Seek(-tail, io.SeekEnd); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	return fmt.Errorf("outflow ended; its log ends with:\n%s", b)
}
