package pipeline

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// rowsRead is what the drivers of package claim have in common: of a home, and of whoever reads the rows of
// another one. It outlives sessions, and belongs to the loop.
type rowsRead struct {
	cfg   claim.Config
	begun time.Time // claim's clock runs since then

	read     outbox.LSN // in the WAL that is read here: the rows up to there were taken
	timeline uint32     // that read lies on
	lost     bool       // NATS is away, or was not read since
	tries    int        // to reach it since it has stored something, or there was nothing to be stored

	revision uint64             // of the newest record that this process has read or written
	tried    *checkpoint.Record // may have been written since; nil: nothing
	// What the rows up to there have led to may be lacking in the record; 0: nothing is.
	lacks outbox.LSN
}

// isOwn reports whether a record that was read is the one that this process has left, as far as it knows.
func (r *rowsRead) isOwn(read *checkpoint.Readings) bool {
	return read.Revision == r.revision ||
		read.Revision > r.revision && r.tried != nil && r.tried.Is(read.Record)
}

// clock is claim's.
func (r *rowsRead) clock(now time.Time) time.Duration { return now.Sub(r.begun) }

// on says on which timeline the server is that is read now.
func (r *rowsRead) on(h *relay.History) {
	if end, left, _ := h.Left(r.timeline); left {
		r.read = min(r.read, end) // this server has other rows behind it
	}
	r.timeline = h.Timeline
}

// writeRow starts to write a row that was asked for at a time. done is called by the loop after it was
// written. What failed may be there all the same, or still be to come: what is not read is asked for again.
func (s *session) writeRow(row relay.ClusterRow, asked time.Time, done func()) {
	until := asked.Add(s.clusters.cfg.Delay / 4)
	s.heartbeats.worker.start(func(ctx context.Context) func() error {
		ctx, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		err := s.conns.Writer.ClusterRow(ctx, row, until)
		return func() error {
			if err == nil {
				done()
			} else {
				s.log.Warn("writing a cluster row failed", append(reason(err), "row", row.Content())...)
			}
			return nil
		}
	})
}

// free waits until no question is under way.
func (s *session) free(ctx context.Context) error {
	for s.questions.busy {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case result := <-s.questions.done:
			if err := s.questions.take(result); err != nil {
				return err
			}
		}
	}
	return nil
}
