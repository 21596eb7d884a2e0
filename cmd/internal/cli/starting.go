package cli

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

const (
	lookEvery = 200 * time.Millisecond
	// backlog is how much unpublished WAL a start shows the way through.
	backlog = 1 << 20
)

// showRun shows a start that takes its time, up to the end of the backlog that it finds, and a stop that
// does, until ctx ends. In between the log, the page and the metrics say how the outflow is.
func (a *App) showRun(ctx, stopped context.Context, log *slog.Logger, status func() pipeline.Status) {
	a.line.SetPrint(inLog(log))
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	s := start{ctx: ctx}
	for !s.over(status()) {
		select {
		case <-look.C:
		case <-stopped.Done():
			s.task.End()
			return
		case <-ctx.Done():
			s.task.End()
			a.showStop(ctx, stopped, status)
			return
		}
	}
	s.task.End()
	resume := a.line.Pause()
	select {
	case <-ctx.Done():
		resume()
		a.showStop(ctx, stopped, status)
	case <-stopped.Done():
	}
}

func (a *App) showStop(ctx, stopped context.Context, status func() pipeline.Status) {
	defer progress.Show(ctx, func(time.Time) string {
		if s := status(); s.InFlight > 0 {
			return "stopping: waiting for NATS to acknowledge " + units.Of(s.InFlight, "message")
		}
		return "stopping"
	}).End()
	<-stopped.Done()
}

// start is the start of a process as it is shown.
type start struct {
	ctx      context.Context
	state    pipeline.State
	from, to outbox.LSN // of the WAL that the task counts
	task     *progress.Task
}

// over takes note of the state at a moment, and reports whether the start is over.
func (s *start) over(now pipeline.Status) bool {
	changed := now.State != s.state
	s.state = now.State
	switch now.State {
	case pipeline.StateComparing:
		if changed || s.to == 0 && now.Received > 0 {
			s.count("starting: reading again what the stream has already", now.Received, now.WALEnd)
		}
		s.task.Set(int64(outbox.Distance(s.from, now.Received)))
		return false
	case pipeline.StateRunning:
		if n, known := now.Unpublished(); changed && known && n > backlog {
			s.count("publishing the backlog", now.Published, now.WALEnd)
		} else if changed {
			return true
		}
		s.task.Set(int64(outbox.Distance(s.from, now.Published)))
		return now.Published >= s.to
	case pipeline.StateConnecting, pipeline.StateWaiting:
		if changed {
			s.show(now)
		}
		return false
	}
	return true
}

// count shows how much of a range of WAL is done.
func (s *start) count(what string, from, to outbox.LSN) {
	s.task.End()
	s.from, s.to = from, max(from, to)
	if from == 0 { // nothing was read yet
		s.to = 0
	}
	s.task = progress.Count(s.ctx, what, progress.WAL, int64(outbox.Distance(s.from, s.to)))
}

// show shows the state, and why the last attempt failed.
func (s *start) show(now pipeline.Status) {
	s.task.End()
	text := fmt.Sprintf("starting: %s", now.State)
	if now.Error != "" {
		text += ", as the last attempt failed: " + now.Error
	}
	s.task = progress.Show(s.ctx, func(time.Time) string { return text })
}
