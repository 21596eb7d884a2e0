package replay

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// Options say what to read again, and where to put it.
type Options struct {
	Selection  Selection
	From       string  // stream or table; "": whichever has it
	To         string  // stdout, subject:S, stream:S or consumer:N
	ID         string  // of the replay; "": a new one
	Rate       float64 // events per second at most; 0: no limit
	DryRun     bool
	TimeColumn string // of the table; "": one of the usual names

	Out io.Writer

	Hit func(point string) // called at points where tests stop the process; may be nil

	// Filters returns the subject filters of a consumer that is replayed to; none: it reads everything.
	Filters func(ctx context.Context, js jetstream.JetStream, api *jsapi.Client, name string) ([]string,
		error)
}

// Report is what was done. The JSON names are stable.
type Report struct {
	Summary
	ID     string `json:"replay_id,omitempty"`
	To     string `json:"to"`
	Before uint64 `json:"before"` // events that earlier runs of this replay had published
	Done   uint64 `json:"done"`
}

// replay is one run.
type replay struct {
	cfg    config.Config
	log    *slog.Logger
	o      Options
	target *target

	layout    *wiring.Layout
	conn      *sink.Conn
	js        jetstream.JetStream
	extractor *extractor
	pub       *publisher
	guard     *erasure.Guard // nil: nothing is published
	resume    *resumePoint   // the last message of this replay that the target has

	match     *matcher
	streamErr error // why the stream's messages don't say what is selected
	stream    *streamSource
	table     *tableSource
	tableErr  error
}

var idForm = lazyregexp.New(`^[A-Za-z0-9_.:-]{1,64}$`)

// Run reads again what is selected.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (rep *Report, err error) {
	if o.Hit == nil {
		o.Hit = func(string) {}
	}
	r := &replay{cfg: cfg, log: log, o: o}
	defer r.close()
	if err := r.check(); err != nil {
		return nil, err
	}
	if !r.withoutNATS() {
		if err := r.connect(ctx); err != nil {
			return nil, err
		}
		var explain func(error) error
		ctx, explain = conns.WhileConnected(ctx, r.conn)
		defer func() { err = explain(err) }()
	}
	if err := r.keepErasuresAway(ctx); err != nil {
		return nil, err
	}
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	c, err := r.choose(ctx)
	if err != nil {
		return nil, err
	}
	return r.execute(ctx, c)
}

// connect reads the table's layout, and connects to NATS.
func (r *replay) connect(ctx context.Context) (err error) {
	if r.layout, err = wiring.ReadLayout(ctx, r.cfg); err != nil {
		return err
	}
	sc, err := wiring.Sink(r.cfg, r.layout, r.log)
	if err != nil {
		return err
	}
	if r.conn, err = wiring.Connect(ctx, r.cfg, sc); err != nil {
		return err
	}
	r.js, err = r.conn.API().JetStream()
	return err
}

// keepErasuresAway lets no erasure begin while messages are read that are published: their copies would be
// there when it has ended. Without a table there is none.
func (r *replay) keepErasuresAway(ctx context.Context) (err error) {
	if r.target.kind == toStdout || r.o.DryRun || !r.cfg.Source.Rows() {
		return nil
	}
	defer wiring.WaitPostgres(ctx, r.cfg)()
	r.guard, err = erasure.KeepAway(ctx, postgres.Target{URL: r.cfg.Postgres.URL, Slot: r.cfg.Slot,
		Command: r.cfg.Command}, r.layout.Table)
	return err
}

func (r *replay) check() (err error) {
	if r.target, err = parseTarget(r.o.To); err != nil {
		return err
	}
	switch {
	case r.o.From != "" && r.o.From != string(FromStream) && r.o.From != string(FromTable):
		return usage("replay_from", fmt.Sprintf("--from %q", r.o.From), "Write stream or table")
	case r.o.ID != "" && r.target.kind == toStdout:
		return usage("replay_id", "--replay-id: nothing on standard output says where a replay was",
			"Leave it out, or give --to subject, stream or consumer")
	case r.o.ID != "" && !idForm().MatchString(r.o.ID):
		return usage("replay_id", fmt.Sprintf("--replay-id %q", r.o.ID),
			"Use up to 64 letters, digits and . : _ -")
	case r.o.Rate < 0:
		return usage("replay_rate", fmt.Sprintf("--rate %v", r.o.Rate),
			"Give events per second; 0 is no limit")
	case r.target.kind == toConsumer && !consumerName().MatchString(r.target.name):
		return usage("replay_to", fmt.Sprintf("--to consumer:%s: no name of a consumer", r.target.name),
			"Names of consumers have letters, digits, _ and -")
	}
	return r.o.Selection.check()
}

var consumerName = lazyregexp.New(`^[A-Za-z0-9_-]{1,255}$`)

// withoutNATS reports whether the table alone is needed, which can be read while NATS is down.
func (r *replay) withoutNATS() bool {
	return r.o.From == string(FromTable) && r.target.kind == toStdout
}

// open connects, and looks at stream and target.
func (r *replay) open(ctx context.Context) (err error) {
	if r.layout == nil {
		if r.layout, err = wiring.ReadLayout(ctx, r.cfg); err != nil {
			return err
		}
	}
	generated := false
	if c, ok := r.layout.Table.Column(r.layout.Mapping.Key); ok {
		generated = c.Generated
	}
	if r.extractor, err = newExtractor(r.cfg, r.layout.Resolved, generated); err != nil {
		return err
	}
	var bounds [][]string
	if r.target.kind == toConsumer {
		filters, err := r.o.Filters(ctx, r.js, r.conn.API(), r.target.name)
		if err != nil {
			return err
		}
		if len(filters) > 0 {
			bounds = [][]string{filters}
		}
	}
	if r.match, r.streamErr = newMatcher(r.extractor, &r.o.Selection, bounds); r.streamErr != nil {
		r.match = &matcher{sel: &r.o.Selection, extractor: r.extractor, bounds: bounds}
		r.streamErr = fatal("replay_untold", r.streamErr.Error(),
			"Read from the table: --from table. For later events let the subject or a mapped header hold it")
	}
	if r.withoutNATS() {
		return nil
	}
	r.stream = &streamSource{js: r.js, api: r.conn.API(), name: r.cfg.Stream, match: r.match,
		extractor: r.extractor}
	if err := r.stream.open(ctx); err != nil {
		return err
	}
	if whole, _ := r.stream.holds(); !whole && r.o.From != string(FromTable) {
		if err := r.stream.openPast(ctx, r.conn.API(), r.cfg.Archive.URL); err != nil {
			return err
		}
	}
	if err := r.stream.widenFilters(ctx); err != nil {
		return err
	}
	return r.openTarget(ctx)
}

// openTarget opens the target and finds this replay's last message in it.
func (r *replay) openTarget(ctx context.Context) error {
	if r.target.kind == toStdout {
		return nil
	}
	r.target.live = append([]string{r.extractor.template.Filter(func(string) (string, bool) {
		return "", false
	})}, r.stream.subjects()...)
	if r.extractor.deadLetters != "" {
		r.target.live = append(r.target.live, r.extractor.deadLetters)
	}
	err := r.target.resolve(ctx, r.conn.API(), r.js, r.cfg, r.o.DryRun)
	if err != nil || r.target.stream == nil {
		return err
	}
	known := r.o.ID != ""
	if sc := r.target.stream.CachedInfo().Config; known && sc.Retention != jetstream.LimitsPolicy {
		return fatal("replay_id", fmt.Sprintf("--replay-id: stream %s drops what is consumed (retention "+
			"%v): where a replay was can't be found in it", sc.Name, sc.Retention),
			"Leave --replay-id out, or publish to a stream of limits retention")
	}
	if !known {
		token := make([]byte, 6)
		if _, err := rand.Read(token); err != nil {
			return err
		}
		r.o.ID = hex.EncodeToString(token)
	}
	r.pub = &publisher{
		js: r.js, api: r.conn.API(), target: r.target, id: r.o.ID, timeout: publishTimeout,
		guard: r.guard,
	}
	if r.resume, err = r.pub.begin(ctx, known); err != nil || r.resume == nil {
		return err
	}
	if r.resume.hash != r.hash() {
		return usage("replay_id", fmt.Sprintf("--replay-id %s: that replay was begun with another selection",
			r.o.ID), "Give the same options again, or another id")
	}
	if r.resume.from == FromStream {
		r.stream.end = min(r.resume.end, r.stream.end)
	}
	return nil
}

// hash is the hash of everything that decides which messages are replayed, and in which order.
func (r *replay) hash() string { return r.o.Selection.hash(r.cfg.Stream, r.o.TimeColumn) }

// openTable opens the table, once. It returns an error if there is no table.
func (r *replay) openTable(ctx context.Context) error {
	if r.tableErr == nil {
		r.tableErr = wiring.NeedTable(r.cfg, "--from table")
	}
	if r.table == nil && r.tableErr == nil {
		r.table, r.tableErr = openTable(ctx, r.cfg, r.log, r.layout, r.match, r.o.TimeColumn)
	}
	return r.tableErr
}

// needTable is nil if the selection can be read from the table.
func (r *replay) needTable(ctx context.Context) error {
	if err := r.openTable(ctx); err != nil {
		return err
	}
	return r.table.check()
}

// execute reads from the chosen source.
func (r *replay) execute(ctx context.Context, c choice) (*Report, error) {
	rep := &Report{To: r.o.To, ID: r.o.ID}
	var after uint64
	var behind *rowKey
	if r.resume != nil {
		rep.Before, after, behind = r.resume.n, r.resume.seq, &r.resume.row
	}
	if c.source == FromTable {
		if err := r.needTable(ctx); err != nil {
			return nil, err
		}
		if err := r.warn(ctx); err != nil {
			return nil, err
		}
		if behind != nil {
			if err := r.table.checkResumable(ctx, r.o.ID, *behind); err != nil {
				return nil, err
			}
		}
		c.why += r.table.note()
		if r.o.Selection.Time.Given() {
			c.why += fmt.Sprintf("; --time goes by column %s", r.table.column)
		}
	} else if r.o.Selection.Time.Given() {
		c.why += "; --time goes by when a message was stored"
	}
	if c.sum == nil {
		c.sum = &Summary{}
		var err error
		if c.source == FromTable {
			err = r.table.summarize(ctx, behind, c.sum)
		} else {
			err = r.stream.summarize(ctx, after, c.sum, nil)
		}
		if err == nil && c.whole {
			err = r.stream.stillHolds(ctx, after)
		}
		if err != nil {
			return nil, err
		}
	}
	c.sum.Source, c.sum.Why = c.source, c.why
	rep.Summary = *c.sum
	if c.sum.Events == 0 && r.resume == nil {
		return nil, r.nothingThere(ctx, fmt.Sprintf("no event of the %s is selected (%s)", c.source, c.why))
	}
	if err := r.allIDs(c.sum); err != nil {
		return nil, err
	}
	if r.o.DryRun {
		return rep, nil
	}
	progress.Step(ctx, "from %s: %s", c.source, c.why)
	if r.resume != nil {
		progress.Step(ctx, "replay %s goes on behind its first %s", r.o.ID, units.Of(rep.Before, "event"))
	} else if r.pub != nil {
		progress.Step(ctx,
			"replay %s: %s to %s (if it is interrupted, --replay-id %s goes on with it)",
			r.o.ID, units.Of(c.sum.Events, "event"), r.o.To, r.o.ID)
	}
	write, finish := r.writer(ctx, rep)
	var err error
	if c.source == FromTable {
		err = r.table.each(ctx, behind, rep.Before, rep.Before+c.sum.Events, write)
	} else {
		err = r.stream.each(ctx, after, c.sum, write)
	}
	if err == nil {
		err = r.guard.End(ctx)
	}
	return rep, errors.Join(err, finish())
}

// warn says that the table is not read with what has left it. With an archive it is not asked for, unless the
// archive's messages do not say what is selected, as the stream's do not.
func (r *replay) warn(ctx context.Context) error {
	why := "archive.url is not set"
	if r.cfg.Archive.URL != "" {
		why = "the archive's messages do not say what is selected"
	}
	if r.cfg.Archive.URL != "" && (r.streamErr == nil || r.o.From != "") {
		return nil
	}
	left, err := r.table.left(ctx)
	if left != "" {
		progress.Step(ctx, "warning: %s, and %s: what was in there is not replayed", left, why)
	}
	return err
}

// allIDs makes sure that every id of a list was found.
func (r *replay) allIDs(sum *Summary) error {
	n := uint64(len(r.o.Selection.IDs))
	s := &r.o.Selection
	narrowed := len(s.Docs)+len(s.Actors) > 0 || s.Filter != "" || s.Key.Given() || s.Position.Given() ||
		s.Time.Given() || s.Seq.Given()
	if n == 0 || narrowed || r.resume != nil || sum.Events >= n {
		return nil
	}
	return fatal("replay_ids", fmt.Sprintf("the %s has %d of the %d events with these ids", sum.Source,
		sum.Events, n), "Look with --dry-run --json which there are, and leave out the others")
}

// writer returns a function that takes each message, and one to call after the last.
func (r *replay) writer(ctx context.Context, rep *Report) (write func(*Message) error, finish func() error) {
	begun := time.Now()
	task := progress.Count(ctx, "replaying", "events", int64(rep.Events))
	hash := r.hash()
	var out *bufio.Writer
	var b []byte
	if r.pub == nil {
		out = bufio.NewWriterSize(r.o.Out, 64<<10)
	}
	pace := newLimiter(r.o.Rate)
	write = func(m *Message) error {
		if err := pace.wait(ctx, func() error {
			if out != nil {
				return out.Flush()
			}
			return nil
		}); err != nil {
			return err
		}
		if r.pub != nil {
			m.resume.n, m.resume.hash = rep.Before+rep.Done+1, hash
			if err := r.pub.publish(ctx, m); err != nil {
				return err
			}
			r.o.Hit("replay.published")
		} else {
			var err error
			m.Header = eventHeaders(m.Header)
			if b, err = m.appendLine(b[:0]); err != nil {
				return err
			}
			if _, err := out.Write(b); err != nil {
				return err
			}
		}
		rep.Done++
		task.Set(int64(rep.Done))
		return nil
	}
	return write, func() error {
		var err error
		if out != nil {
			err = out.Flush()
		}
		task.End()
		progress.Step(ctx, "%d of %d events in %v", rep.Done, rep.Events,
			time.Since(begun).Round(time.Millisecond))
		return err
	}
}

func (r *replay) close() {
	r.table.close()
	r.guard.Close()
	if r.stream != nil && r.stream.closePast != nil {
		_ = r.stream.closePast() // it was read only
	}
	if r.conn != nil {
		r.conn.Close()
	}
}

// subjects are the live stream's own.
func (s *streamSource) subjects() []string {
	if s.info == nil {
		return nil
	}
	return s.info.Config.Subjects
}
