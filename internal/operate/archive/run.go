// Package archive is `outflow archive`: it writes the cold part of the stream to the archive, and says what
// is there. What an archive is, is in internal/lifecycle/archive; this package tells it what the checkpoint
// record and the stream say.
//
// It is internal to Outflow: its API may change at any time.
package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
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

// Report says what was archived. The JSON names are stable.
type Report struct {
	Folder   string    `json:"folder"`
	Segments []Segment `json:"segments"`  // that this run has written
	Archived uint64    `json:"archived"`  // the sequence up to which all is archived
	Stands   uint64    `json:"confirmed"` // the newest message that may be archived
	// when the oldest message was stored that may be archived and is not; zero: there is none
	Waits time.Time `json:"waits_since,omitzero"`
}

// Segment is a segment of the archive. The JSON names are stable.
type Segment struct {
	First    uint64          `json:"first"`
	Last     uint64          `json:"last"`
	Messages uint64          `json:"messages"`
	Missing  uint64          `json:"missing"`
	Erased   uint64          `json:"erased,omitempty"` // of these sequences
	Gaps     []archive.Range `json:"gaps,omitempty"`   // lost before they could be archived
	From     time.Time       `json:"from"`
	To       time.Time       `json:"to"`
	Bytes    int64           `json:"bytes"`
	Raw      int64           `json:"raw_bytes"`
	Object   string          `json:"object"`
}

func segmentOf(a *archive.Archive, m *archive.Manifest) Segment {
	return Segment{
		First: m.First, Last: m.Last, Messages: m.Count, Missing: m.Last - m.First + 1 - m.Count,
		Gaps: m.Gaps, Erased: m.Erased.Count(),
		From: m.From, To: m.To, Bytes: m.Bytes, Raw: m.Raw, Object: a.ObjectName(m),
	}
}

func (s Segment) String() string {
	text := fmt.Sprintf("%d to %d: %d messages", s.First, s.Last, s.Messages)
	if s.Missing > 0 {
		text += fmt.Sprintf(", %d missing", s.Missing)
	}
	if s.Erased > 0 {
		text += fmt.Sprintf(", %d erased", s.Erased)
	}
	for _, g := range s.Gaps[:min(len(s.Gaps), maxNamed)] {
		text += fmt.Sprintf(", gap %d-%d", g.From, g.To)
	}
	if n := len(s.Gaps) - maxNamed; n > 0 {
		text += fmt.Sprintf(" and %d others", n)
	}
	if s.Messages == 0 {
		return text
	}
	return text + fmt.Sprintf(", %v to %v, %d bytes of %d", s.From.Format(time.RFC3339),
		s.To.Format(time.RFC3339), s.Bytes, s.Raw)
}

// inactive is how long the consumer of a run that was killed stays, and holds the front of the stream. A run
// that takes longer to write a segment gets another one: retention takes nothing that is not archived.
const inactive = 30 * time.Second

// What a run has read when it is stopped makes a segment if it is at least that part of archive.segment_size:
// so a process that is stopped again and again gets on, and makes so many times as many segments at most. All
// else is read again by the next run. It has this long to write one.
const (
	stopShare = 16
	stopTime  = 20 * time.Second
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
	sc, err := wiring.Broker(cfg, log)
	if err != nil {
		return nil, err
	}
	conn, err := wiring.Connect(ctx, cfg, sc)
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
		return unready("stream %s does not exist", c.cfg.Stream)
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

// first returns the first message of the stream from a sequence on, as the leader has it; nil: there is none.
func (c *command) first(ctx context.Context, from uint64) (*jsapi.Message, error) {
	return c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: from, Next: ">"})
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

// lost returns those of the sequences without a message that nothing explains: they were not erased, and the
// header of the message behind them, if there is one, does not say that the broker had lost them, and that
// what they were comes again.
func (c *command) lost(ctx context.Context, from, to uint64, behind nats.Header) (outbox.Sequences, error) {
	if seq, err := strconv.ParseUint(behind.Get(outbox.HeaderLost), 10, 64); err == nil && seq <= to {
		to = max(seq, from) - 1
	}
	if len(c.erased.Lacking(from, to)) == 0 {
		return nil, nil
	}
	var err error
	c.erased, err = c.erasedNow(ctx)
	return c.erased.Lacking(from, to), err
}

// lostBefore is lost, with the header of a message that was read from the leader; nil: there is none.
func (c *command) lostBefore(ctx context.Context, from, to uint64, m *jsapi.Message) (outbox.Sequences,
	error) {
	var behind nats.Header
	if m != nil && len(m.Header) > 0 {
		var err error
		if behind, err = nats.DecodeHeadersMsg(m.Header); err != nil {
			return nil, fmt.Errorf("message %d of stream %s: %w", m.Seq, c.cfg.Stream, err)
		}
	}
	return c.lost(ctx, from, to, behind)
}

// allLost returns what is lost if no message from next on is left to be archived, and the front of the stream
// has come beyond it. It fails if that is not accepted.
func (c *command) allLost(ctx context.Context, next uint64) (outbox.Sequences, error) {
	m, err := c.first(ctx, 1)
	if err != nil || m != nil && m.Seq <= max(next, c.to) {
		return nil, err
	}
	to := c.upTo
	if m != nil {
		to = min(m.Seq-1, c.upTo)
	}
	lost, err := c.lostBefore(ctx, next, to, m)
	if err == nil && len(lost) > 0 && !c.accepts(lost) {
		err = c.gap(ctx, lost)
	}
	return lost, err
}

func (c *command) accepts(lost outbox.Sequences) bool {
	return lost[0].From >= c.o.AcceptGap.From && lost[len(lost)-1].To <= c.o.AcceptGap.To
}

// skip makes a segment without a message, where all that is confirmed is lost, and that is accepted.
func (c *command) skip(ctx context.Context, lost outbox.Sequences) error {
	s, err := c.a.NewSegment()
	if err != nil {
		return err
	}
	s.Gap(lost, c.erased.Within(s.Next(), c.upTo))
	s.Skip(c.upTo)
	return c.end(ctx, s, c.to)
}

// end ends a segment. last is the newest message that it may have.
func (c *command) end(ctx context.Context, s *archive.Segment, last uint64) error {
	var complete outbox.LSN
	if last == c.to {
		if err := c.tail(ctx, s); err != nil {
			return err
		}
		complete = c.complete
		s.Comes(c.system, c.timeline)
	}
	m, err := c.a.Append(ctx, s, complete)
	if err != nil {
		return err
	}
	c.report.Segments = append(c.report.Segments, segmentOf(c.a, m))
	return nil
}

// tail notes what is lost behind the newest confirmed message, up to the confirmed checkpoint: the segment
// says that it has all events below that.
func (c *command) tail(ctx context.Context, s *archive.Segment) error {
	if s.Next() > c.upTo {
		return nil
	}
	behind, err := c.first(ctx, s.Next())
	if err != nil {
		return err
	}
	lost, err := c.lostBefore(ctx, s.Next(), c.upTo, behind)
	if err == nil && len(lost) > 0 {
		s.Gap(lost, c.erased.Within(s.Next(), c.upTo))
		s.Skip(c.upTo)
	}
	return err
}

// hole notes that there is no message up to a sequence. behind is the header of the message behind them.
// Where the stream's front has come beyond them, they were taken before they could be archived: it fails if
// that is not accepted. What was taken from within, by a limit for each subject or by somebody, is only
// noted.
func (c *command) hole(ctx context.Context, s *archive.Segment, to uint64, behind nats.Header) error {
	from := s.Next()
	lost, err := c.lost(ctx, from, to, behind)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		there, err := c.first(ctx, from)
		switch {
		case err != nil:
			return err
		case there != nil && there.Seq <= to:
			return fmt.Errorf("stream %s: the server that it was read from lacks message %d, which the "+
				"leader has: run it again", c.cfg.Stream, there.Seq)
		}
		front, err := c.first(ctx, 1)
		if err != nil {
			return err
		}
		if front == nil || front.Seq > from {
			if !c.accepts(lost) {
				return c.gap(ctx, lost)
			}
			c.o.Now = true // the next run does not know of it, unless a segment says so
		}
	}
	s.Gap(lost, c.erased.Within(from, to))
	return nil
}

// gap refuses that messages are lost, unless another run has archived some meanwhile: then they may go.
func (c *command) gap(ctx context.Context, lost outbox.Sequences) error {
	next := c.a.Next()
	if err := c.a.Refresh(ctx); err != nil {
		return err
	}
	if c.a.Next() > next {
		return archive.ErrOvertaken
	}
	from, to := lost[0].From, lost[len(lost)-1].To
	look := ""
	if len(c.a.Segments) == 0 { // accepting would begin an archive beside the one that has them
		look = "The archive has nothing of this stream: see first that archive.url is where it was before, " +
			"and mounted. "
	}
	return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeGap,
		Message: fmt.Sprintf("stream %s has removed messages %d to %d, which are not archived", c.cfg.Stream,
			from, to),
		Hint: fmt.Sprintf("%sIf that is accepted: `outflow archive run --accept-gap %d-%d`. Then set the "+
			"stream's limits to none, or archive more often.", look, from, to)}
}

// begin returns the segment behind the last one, as this process has left it, or a new one. until is where it
// ends if a run was killed that had written it; 0: there was none.
func (c *command) begin(ctx context.Context) (s *archive.Segment, until uint64, err error) {
	if until, err = c.a.Unfinished(ctx); err != nil {
		return nil, 0, err
	}
	if s = c.a.Begun(); s != nil && s.Next() <= c.to+1 && (until == 0 || until >= s.Next()) {
		err := s.Agrees(ctx, c.api)
		if f := outbox.FaultOf(err); f == nil || f.Code != archive.CodeDiffers {
			return s, until, err
		}
	}
	s, err = c.a.NewSegment()
	return s, until, err
}

// pass makes segments, from the first sequence that is not archived.
func (c *command) pass(ctx context.Context) error {
	s, until, err := c.begin(ctx)
	if err != nil {
		return err
	}
	end := func(ctx context.Context, last uint64) error {
		err := c.end(ctx, s, last)
		if err == nil {
			s, err = c.a.NewSegment()
		}
		return err
	}
	add := func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		seq := meta.Sequence.Stream
		if seq < s.Next() {
			return nil // a replica that lags begins below it
		}
		if seq > c.to {
			return c.removed()
		}
		if until >= s.Next() && until < seq && !s.Empty() { // a segment that ends without a message
			if err := c.hole(ctx, s, until, m.Headers()); err != nil {
				return err
			}
			s.Skip(until)
			if err := end(ctx, until); err != nil {
				return err
			}
		}
		if seq > s.Next() {
			err := c.hole(ctx, s, seq-1, m.Headers())
			if f := outbox.FaultOf(err); f != nil && f.Code == archive.CodeGap && !s.Empty() {
				err = cmp.Or(end(ctx, s.Next()-1), err)
			}
			if err != nil {
				return err
			}
		}
		err := s.Add(&archive.Message{
			Seq: seq, Time: meta.Timestamp, Subject: m.Subject(), Header: m.Headers(), Data: m.Data(),
		})
		if err == nil && (s.Size() >= c.cfg.Archive.SegmentSize || s.Full() || seq == until) {
			err = end(ctx, seq)
		}
		if c.o.Hit != nil {
			c.o.Hit("archive.message")
		}
		if err = cmp.Or(err, ctx.Err()); err == nil && !c.until.IsZero() && time.Now().After(c.until) {
			err = jsapi.ErrStop
		}
		return err
	}
	err = c.read(ctx, s.Next(), add)
	if err != nil && c.stopped() && s.Size() >= c.cfg.Archive.SegmentSize/stopShare {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
		defer cancel()
		defer progress.Wait(limited, "writing what was read to the archive")()
		if failed := end(limited, s.Next()-1); failed != nil {
			return errors.Join(err, failed)
		}
	}
	if err != nil || s.Empty() {
		return err
	}
	if s.Next() <= c.to { // its turn is over
		c.a.Leave(s)
		return nil
	}
	if c.o.Now || c.isOld(s.First()) {
		return end(ctx, c.to)
	}
	c.a.Leave(s)
	return nil
}

// isOld reports whether a segment ends whose first message was stored then. One that was stored as far ahead
// counts too: the broker's clock has gone back, and may not get there for a year.
func (c *command) isOld(first time.Time) bool {
	return c.now.Sub(first).Abs() >= c.cfg.Archive.SegmentAge
}

// read calls add with each message from a sequence on that may be archived.
func (c *command) read(ctx context.Context, first uint64,
	add func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	if first > c.to {
		return nil
	}
	js, err := c.api.JetStream()
	if err != nil {
		return err
	}
	if lost, err := c.allLost(ctx, first); err != nil {
		return err
	} else if len(lost) > 0 {
		return c.removed()
	}
	task := progress.Count(ctx, "archiving stream "+c.cfg.Stream, "messages", int64(c.to-first+1))
	defer task.End()
	due, each := time.Now(), min(c.o.Over/time.Duration(c.to-first+1), slowest)
	return jsapi.ReadStream(ctx, js, c.cfg.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first,
		InactiveThreshold: inactive,
		Metadata:          map[string]string{jsapi.MetadataReader: "outflow archive run"},
	}, c.to, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if seq := meta.Sequence.Stream; seq >= first && seq <= c.to {
			task.Set(int64(seq - first + 1))
		}
		if due = due.Add(each); time.Until(due) >= nap {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Until(due)):
			}
		}
		return add(m, meta)
	})
}

// slowest is how long each message may take where reading is spread over a time: the server deletes a
// consumer that does not ask for more. nap is the shortest time that it sleeps for.
const (
	slowest = time.Millisecond
	nap     = 2 * time.Millisecond
)

func (c *command) removed() error {
	return fmt.Errorf("message %d of stream %s was removed while it was read: run it again", c.to,
		c.cfg.Stream)
}

func (c *command) stopped() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}
