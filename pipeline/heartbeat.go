package pipeline

import (
	"context"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// writePause is how long nothing is written into the WAL after a failure, and no other change of settings
// after one: if somebody changes the settings all the time, this session must not write as much.
const writePause = time.Second

// heartbeatWriter writes heartbeats, changes of ordering settings and watermarks into the WAL. They have an
// effect when they are read there. It belongs to the loop; the writing itself is a job of its worker.
type heartbeatWriter struct {
	worker  *worker
	writer  Writer         // nil: nothing is written
	enabled bool           // heartbeats are to be written
	want    relay.Settings // to be in force
	log     *slog.Logger
	notices *notices
	metrics *metrics

	outstanding bool      // a change was written and not read yet
	changeAt    time.Time // no other change is written before then
	last        time.Time // when the last heartbeat was asked for
	notBefore   time.Time // after a failure: when to try again

	said   relay.Watermark // the last one that was written; zero: none in this session
	saidAt time.Time       // when one was last asked for
}

func (h *heartbeatWriter) free(now time.Time) bool {
	return h.writer != nil && !h.worker.busy && !now.Before(h.notBefore)
}

// write starts a job. done is called by the loop after the write has succeeded. A failure is no reason to
// drop the session: what is held stays held until something else closes it. Whether the message was written
// nevertheless is unknown; a second one does no harm.
func (h *heartbeatWriter) write(change bool, write func(context.Context) error, done func()) {
	h.worker.start(func(ctx context.Context) func() error {
		ctx, cancel := context.WithTimeout(ctx, writeTimeout)
		defer cancel()
		err := write(ctx)
		return func() error {
			if err == nil {
				done()
				return nil
			}
			h.notBefore = time.Now().Add(writePause)
			h.outstanding = false
			h.metrics.tickErrors.Inc()
			h.log.Warn("writing into the WAL failed; trying again",
				append(reason(err), "change", change, "in", writePause)...)
			return nil
		}
	})
}

// offerChange writes a change if the settings in force are not the wanted ones and no change is outstanding.
func (h *heartbeatWriter) offerChange(now time.Time, inForce relay.Settings) {
	if inForce == h.want || h.outstanding || now.Before(h.changeAt) || !h.free(now) {
		return
	}
	h.outstanding, h.changeAt = true, now.Add(writePause)
	h.write(true, func(ctx context.Context) error { return h.writer.Change(ctx, h.want) }, func() {
		h.notices.wroteChanges.say(h.log, slog.LevelInfo, "wrote a change of ordering settings into the WAL",
			"settings", h.want)
	})
}

// changed takes note of a change that was read. Somebody else's may have been written before the one that is
// outstanding.
func (h *heartbeatWriter) changed(s relay.Settings) {
	if s == h.want {
		h.outstanding = false
	}
}

// offerHeartbeat writes one if it is due.
func (h *heartbeatWriter) offerHeartbeat(now, due time.Time) {
	if !now.Before(due) && h.free(now) {
		h.last = now
		h.write(false, h.writer.Heartbeat, h.metrics.ticks.Inc)
	}
}

// watermarkPause is the least time between two watermarks.
const watermarkPause = time.Second

// offerWatermark writes one if it says more than the last one about inputs up to newest, or if none was
// written in this session. done is called by the loop after it was written.
func (h *heartbeatWriter) offerWatermark(now time.Time, w relay.Watermark, newest outbox.LSN, done func()) {
	news := h.said.LSN == 0 || w.LSN > h.said.LSN && newest > h.said.LSN ||
		w.At > h.said.At && newest > h.said.At
	if !news || w.LSN == 0 || now.Sub(h.saidAt) < watermarkPause || !h.free(now) {
		return
	}
	h.saidAt = now
	h.write(false, func(ctx context.Context) error { return h.writer.Watermark(ctx, w) },
		func() {
			h.said = w
			done()
		})
}

// gapPause is the least time between two heartbeats in gap mode.
const gapPause = 10 * time.Millisecond

// dueFor returns when a heartbeat is due in gap mode that lets a wait end that ends at a time: then, and not
// sooner than gapPause after the last one, or writePause while that one has not been read: the server may be
// busy with a large transaction, and another heartbeat would wait behind it too.
func (h *heartbeatWriter) dueFor(end, lastInput time.Time) time.Time {
	at, pause := end.Add(granularity), gapPause
	if h.last.After(lastInput) {
		pause = writePause
	}
	for _, t := range []time.Time{h.last.Add(pause), h.notBefore} {
		if t.After(at) {
			at = t
		}
	}
	return at
}

// due returns when a heartbeat is due: one horizon after the oldest held event came in, half a horizon after
// the last part of an input (anything else closes no window, however much of it comes), and one horizon after
// the last heartbeat.
func (h *heartbeatWriter) due(horizon time.Duration, oldest, lastInput time.Time) time.Time {
	at := oldest.Add(horizon + granularity)
	for _, t := range []time.Time{lastInput.Add(horizon / 2), h.last.Add(horizon), h.notBefore} {
		if t.After(at) {
			at = t
		}
	}
	return at
}
