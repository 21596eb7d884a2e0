// Package archive is `outflow archive`: it writes the cold part of the stream to the archive, and says what
// is there. What an archive is, is in internal/lifecycle/archive; this package tells it what the checkpoint
// record and the stream say.
package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// Options say what to do.
type Options struct {
	Now       bool          // also archive what is younger than a segment has to be
	AcceptGap archive.Range // sequences whose messages may be lost

	// Over is how long a run takes to read what has come, at least, unless that would be less than a thousand
	// messages a second: so others notice less of it. 0: it reads as fast as it can.
	Over time.Duration

	// Turn is how long it reads at most, because others wait for it; 0: it reads all that there is. What it
	// has read is left in Known, and the next run goes on there.
	Turn time.Duration

	Known *archive.Known // what is known of the archive from the run before; may be nil

	Hit func(point string) // called at points where tests kill the process; may be nil

	pause time.Duration // 0: erasePause
}

// So often a segment is tried that has messages which the stream notes as erased, with pauses of twice that,
// four times and so on in between. An erasure deletes what it has noted within seconds, but one that was
// interrupted deletes nothing until somebody runs it again.
const (
	eraseTries = 5
	erasePause = 500 * time.Millisecond
)

// open opens the store of the settings, with archive.OpenThere for what only reads it, or with archive.Make.
func open(ctx context.Context, cfg config.Config,
	with func(ctx context.Context, at string) (archive.Store, error)) (archive.Store, error) {
	if cfg.Archive.URL == "" {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "archive_url", Message: "archive.url is not set"}
	}
	return with(ctx, cfg.Archive.URL)
}

// command is one run.
type command struct {
	cfg      config.Config
	o        Options
	api      *jsapi.Client
	a        *archive.Archive
	stream   *stream.Stream
	upTo     uint64           // the confirmed sequence
	to       uint64           // the newest message that may be archived
	now      time.Time        // by the broker's clock
	complete outbox.LSN       // all events below it are at or below to
	system   string           // of complete
	timeline uint32           // of complete
	erased   outbox.Sequences // as it was last read
	until    time.Time        // when its turn is over; zero: never
	report   *Report
	stop     <-chan struct{} // the run is to end
}

// Run archives what is confirmed. The report is nil only where nothing could be found out.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	store, err := open(ctx, cfg, archive.Make)
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close() }()
	if err := archive.CheckCreate(ctx, store); err != nil {
		return nil, err
	}
	conn, err := wiring.ConnectBroker(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := &command{cfg: cfg, o: o, api: conn.API(), stop: ctx.Done()}
	ctx, lost := conns.WhileConnected(ctx, conn)
	err = c.run(ctx, store, conn, log)
	if waits := c.waits(ctx); err == nil {
		err = waits
	}
	return c.report, lost(err)
}

func (c *command) run(ctx context.Context, store archive.Store, conn *sink.Conn, log *slog.Logger) error {
	c.stream = stream.New(c.api, c.cfg.Stream, log)
	_, made, err := c.stream.Erased(ctx)
	if err != nil {
		return err
	}
	// Others work on: what is read earlier may be older than the rest, and never says more than that has. The
	// archive ends at or below what the record says is confirmed, and that is in the stream.
	folder := archive.FolderOf(c.cfg.Stream, made)
	if c.a, err = c.o.Known.Load(ctx, store, folder, c.o.Hit); err != nil {
		return err
	}
	// One that is killed again and again, as where it has no memory for a segment, would fill the disk.
	if _, err := c.a.Tidy(ctx); err != nil {
		return err
	}
	c.a.Erased = c.erasedNow
	rec, _, err := wiring.Store(c.cfg, conn).Load(ctx)
	if err != nil {
		return err
	}
	st, err := conn.State(ctx)
	if err != nil {
		return err
	}
	unready := func(format string, args ...any) error {
		return &outbox.Fault{Class: outbox.Fatal, Code: "archive_record",
			Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case !st.Exists:
		return &outbox.Fault{Class: outbox.Fatal, Code: "stream_missing",
			Message: fmt.Sprintf("stream %s does not exist", c.cfg.Stream),
			Hint: "Was it deleted? `outflow archive restore` makes it again from the archive, then do what " +
				"`outflow status` says. If there was none yet, run `outflow init`"}
	case rec == nil:
		return unready("slot %s has no checkpoint record: nothing is confirmed", c.cfg.Slot)
	case !rec.Created.Equal(st.Created):
		return unready("the checkpoint record of slot %s is of another stream %s, made at %v and not at %v",
			c.cfg.Slot, c.cfg.Stream, rec.Created, st.Created)
	case rec.Repairing != "":
		return unready("a repair or a snapshot of slot %s has not finished", c.cfg.Slot)
	case rec.Stopped != "":
		return unready("outflow run has stopped with %s", rec.Stopped)
	}
	if !st.Created.Equal(made) {
		return c.anew(st.Created)
	}
	c.report = &Report{Folder: folder, Segments: []Segment{}, Archived: c.a.Next() - 1}
	if len(rec.Checkpoints) == 0 || rec.Checkpoints[0].Seq == 0 && c.a.Next() == 1 {
		return nil // nothing is confirmed yet
	}
	// Only the oldest checkpoint is confirmed: what is behind it may come again under the same sequences.
	confirmed := rec.Checkpoints[0]
	if st.LastSeq < confirmed.Seq {
		return unready("stream %s ends at %d, before the confirmed %d: it has lost its end", c.cfg.Stream,
			st.LastSeq, confirmed.Seq)
	}
	if c.a.Next() > confirmed.Seq+1 {
		return differs(fmt.Sprintf("the archive ends at %d, behind the confirmed %d", c.a.Next()-1,
			confirmed.Seq))
	}
	c.upTo, c.complete, c.now = confirmed.Seq, confirmed.Start(), st.Now
	c.system, c.timeline = rec.SystemID, confirmed.Timeline
	if c.to, err = c.stream.AtOrBelow(ctx, confirmed.Seq); err != nil {
		return err
	}
	c.report.Stands = c.to
	if err := c.a.Agrees(ctx, c.api); err != nil {
		return err
	}
	if next := c.a.Next(); next > c.to && next <= c.upTo {
		// There is no message to archive. Were they deleted, or did the limits take all?
		lost, err := c.allLost(ctx, next)
		if err == nil && len(lost) > 0 {
			err = c.skip(ctx, lost)
		}
		if errors.Is(err, archive.ErrOvertaken) {
			err = c.a.Refresh(ctx)
		}
		if err != nil {
			return err
		}
	}
	if c.o.Turn > 0 {
		c.until = time.Now().Add(c.o.Turn)
	}
	for tries, pause := 0, cmp.Or(c.o.pause, erasePause); c.a.Next() <= c.to; {
		next := c.a.Next()
		var err error
		if tries > 0 { // nothing is read again in vain
			err = c.held(ctx)
		}
		if err == nil {
			err = c.pass(ctx)
		}
		erased := errors.Is(err, archive.ErrErased)
		if !erased && !errors.Is(err, archive.ErrOvertaken) {
			return err
		}
		if err := c.a.Refresh(ctx); err != nil {
			return err
		}
		if c.a.Next() > next || !erased {
			tries = 0
			continue
		}
		if tries++; tries == eraseTries {
			return &outbox.Fault{Class: outbox.Transient, Code: "erase_busy",
				Message: fmt.Sprintf("stream %s can't be archived from %d on: an erasure is at work, or was "+
					"interrupted: %v", c.cfg.Stream, next, err),
				Hint: "Let it finish. One that was interrupted goes on when it is run again, as `outflow " +
					"erase --doc ID --request NAME --yes`: table outflow_erasures names the requests that " +
					"have no finished_at. Then archive again. If none lacks it, the broker had lost these " +
					"messages after they were erased, and others came under their sequences: take those " +
					"out of the stream's metadata " + outbox.MetadataErased + "."}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause << tries):
		}
	}
	return nil
}

// waits says in the report how far the archive is, whoever has brought it there, and since when messages
// wait.
func (c *command) waits(ctx context.Context) error {
	if c.report == nil {
		return nil
	}
	c.report.Archived = c.a.Next() - 1
	c.report.Stands = max(c.report.Stands, c.report.Archived)
	if c.a.Next() > c.to {
		return nil
	}
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: c.a.Next(), Next: ">"})
	if m != nil && m.Seq <= c.to {
		c.report.Waits = m.Time
	}
	return err
}

func differs(message string) error {
	return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeDiffers, Message: message}
}

// erasedNow reads what was erased from the stream. It fails if that is another one than was archived up to
// now: whoever reads a stream goes on in one of the same name that is made in its place.
func (c *command) erasedNow(ctx context.Context) (outbox.Sequences, error) {
	all, made, err := c.stream.Erased(ctx)
	if err == nil && !made.Equal(c.a.Created()) {
		err = c.anew(made)
	}
	return all, err
}

// held fails where the stream still has a message that it notes as erased, and that is not archived yet.
func (c *command) held(ctx context.Context) error {
	erased, err := c.erasedNow(ctx)
	if err != nil {
		return err
	}
	for _, r := range erased.Within(c.a.Next(), c.to) {
		switch m, err := c.first(ctx, r.From); {
		case err != nil:
			return err
		case m != nil && m.Seq <= r.To:
			return fmt.Errorf("%w: the stream still has %d", archive.ErrErased, m.Seq)
		}
	}
	return nil
}

func (c *command) anew(made time.Time) error {
	now := "it does not exist any more"
	if !made.IsZero() {
		now = "it was made anew at " + made.UTC().Format(time.RFC3339Nano)
	}
	return &outbox.Fault{Class: outbox.Gap, Code: "stream_recreated",
		Message: fmt.Sprintf("stream %s is not the one of %v any more, that was being archived: %s",
			c.cfg.Stream, c.a.Created().Format(time.RFC3339Nano), now)}
}
