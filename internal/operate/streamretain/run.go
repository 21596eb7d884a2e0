// Package streamretain is `outflow stream`: it says, or does, what leaves the front of the stream. What may
// go is decided in internal/lifecycle/streamretain; this package reads what that is decided from.
package streamretain

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// Options say what to do.
type Options struct {
	Apply bool // do it; otherwise only say what would be done

	// Readers returns everybody who reads the stream. Whom it does not know is not waited for.
	Readers func(context.Context, *jsapi.Client) ([]streamretain.Reader, error)
	Known   *archive.Known     // what is known of the archive from the run before; may be nil
	Hit     func(point string) // called at points where tests kill the process; may be nil

	// Turn is how long the archive is read at most, because others wait for it; 0: until all may go. The next
	// run goes on.
	Turn time.Duration

	now func() time.Time // nil: the machine's clock
}

// Report says what went, or would go, and what holds the rest. The JSON names are stable.
type Report struct {
	Stream  string `json:"stream"`
	Applied bool   `json:"applied"`

	// before anything went
	First    uint64 `json:"first"`
	Last     uint64 `json:"last"`
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`

	// All messages up to these sequences. Where no limit is set Wanted is 0.
	Wanted uint64 `json:"wanted"`  // are beyond age, size or number
	MayGo  uint64 `json:"may_go"`  // are needed by nobody
	GoesTo uint64 `json:"goes_to"` // go; 0: none

	Gone      uint64 `json:"gone"`       // so many messages go
	GoneBytes uint64 `json:"gone_bytes"` // about so many bytes

	Bounds []streamretain.Bound `json:"bounds"` // what each clause says, the one that holds the most first
	Notes  []string             `json:"notes,omitempty"`
}

// Lines is the report in words.
func (r *Report) Lines() []string {
	lines := []string{fmt.Sprintf("stream %s has %s, %d to %d, %s", r.Stream,
		units.Of(r.Messages, "message"), r.First, r.Last, units.Size(r.Bytes))}
	verb := "would go"
	if r.Applied {
		verb = "went"
	}
	if r.GoesTo > 0 {
		lines = append(lines, fmt.Sprintf("%d to %d %s: %s, about %s", r.First, r.GoesTo, verb,
			units.Of(r.Gone, "message"), units.Size(r.GoneBytes)))
	} else {
		lines = append(lines, "no message "+verb)
	}
	for _, b := range r.Bounds {
		held := ""
		if b.UpTo < r.Wanted {
			held = fmt.Sprintf("; %d to %d wait for it", max(b.UpTo+1, r.First), r.Wanted)
		}
		lines = append(lines, fmt.Sprintf("%v%s", b, held))
	}
	for _, note := range r.Notes {
		lines = append(lines, "note: "+note)
	}
	return lines
}

// command is one run.
type command struct {
	cfg     config.Config
	log     *slog.Logger
	rule    streamretain.Config
	o       Options
	conn    *sink.Conn
	js      jetstream.JetStream
	store   archive.Store // nil: there is no archive
	archive *archive.Archive
}

// askTimeout bounds each request that changes something, or that many others follow.
const askTimeout = 30 * time.Second

// Run plans or applies once. The report is nil only where nothing could be found out.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	r := cfg.Retain.Stream
	c := &command{cfg: cfg, log: log, o: o, rule: streamretain.Config{
		Archive: cfg.Archive.URL != "", Ignore: r.IgnoreConsumers}}
	if cfg.Reorder.Mode == config.ModeGap {
		c.rule.Memory = cfg.Reorder.Memory
	}
	if c.o.Hit == nil {
		c.o.Hit = func(string) {}
	}
	if c.o.now == nil {
		c.o.now = time.Now
	}
	var err error
	if c.rule.Archive {
		if c.store, err = archive.Open(ctx, cfg.Archive.URL); err != nil {
			return nil, err
		}
		defer func() { _ = c.store.Close() }()
	}
	if c.conn, err = wiring.ConnectBroker(ctx, cfg, log); err != nil {
		return nil, err
	}
	defer c.conn.Close()
	defer wiring.WaitNATS(ctx, cfg)()
	ctx, lost := conns.WhileConnected(ctx, c.conn)
	rep, err := c.run(ctx)
	return rep, lost(err)
}

func (c *command) run(ctx context.Context) (*Report, error) {
	var err error
	if c.js, err = c.conn.API().JetStream(); err != nil {
		return nil, err
	}
	s, f, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	r := &Report{Stream: c.cfg.Stream, First: s.State.First, Last: s.State.Last,
		Messages: s.State.Messages, Bytes: s.State.Bytes, Bounds: streamretain.Bounds(&c.rule, f)}
	r.MayGo = streamretain.MayGo(r.Bounds)
	r.Notes = c.notes(s, f)
	if r.Wanted, err = c.wanted(ctx, s, r.MayGo); err != nil {
		return r, err
	}
	to := min(r.Wanted, r.MayGo)
	if to < s.State.First || s.State.Messages == 0 {
		r.Applied = c.o.Apply
		return r, nil
	}
	if !c.o.Apply {
		r.goes(to, s.State.Messages-min(s.State.Messages, max(f.Newest, to)-to))
		return r, nil
	}
	return r, c.apply(ctx, r, s, to)
}

// goes notes that the messages up to a sequence go, so many.
func (r *Report) goes(to, messages uint64) {
	r.GoesTo, r.Gone = to, messages
	r.GoneBytes = uint64(float64(r.Bytes) / float64(max(r.Messages, 1)) * float64(messages))
}

// The facts may be so old when messages go; they are read so often before that is given up. A process may
// sleep between the two for as long as somebody stops it.
const (
	stale = time.Minute
	reads = 3
)

// since is how long ago something was: the longer of what two clocks say. While a machine is suspended one of
// them stands still, and somebody may set the other one.
func since(at, now time.Time) time.Duration { return max(now.Sub(at), now.Round(0).Sub(at.Round(0))) }

// apply lets the messages up to a sequence go, if the facts still say so right before.
func (c *command) apply(ctx context.Context, r *Report, before *stream, to uint64) error {
	if c.archive != nil {
		var err error
		if to, err = c.archive.Holds(ctx, c.conn.API(), archive.Range{From: before.State.First, To: to},
			c.o.Turn, c.filling(ctx, before),
			streams.New(c.conn.API(), c.cfg.Stream, c.log).AtOrBelow); err != nil {
			return err
		}
	}
	c.o.Hit("stream.verified")
	var s *stream
	for attempt := 1; ; attempt++ {
		read := c.o.now()
		var f *streamretain.Facts
		var err error
		if s, f, err = c.read(ctx); err != nil {
			return err
		}
		if !s.Created.Equal(before.Created) {
			return c.anew(before, s)
		}
		r.Bounds = streamretain.Bounds(&c.rule, f)
		r.MayGo = streamretain.MayGo(r.Bounds)
		if to = min(to, r.MayGo); to < s.State.First {
			r.Applied = true
			return nil
		}
		c.o.Hit("stream.checked")
		if took := since(read, c.o.now()); took <= stale {
			break
		} else if attempt == reads {
			return fmt.Errorf("what stream %s, its record, archive and consumers say was read %v ago, more "+
				"than %v: nothing was removed: run it again", c.cfg.Stream, took.Round(time.Second), stale)
		}
	}
	gone, err := c.purge(ctx, to)
	if err != nil {
		return fmt.Errorf("remove the messages of stream %s up to %d (where nobody answered, they may be "+
			"gone; run it again): %w", c.cfg.Stream, to, err)
	}
	c.o.Hit("stream.purged")
	if c.archive != nil {
		c.archive.Went(to)
	}
	r.Applied = true
	r.goes(to, gone)
	if s, err = c.stream(ctx); err == nil && !s.Created.Equal(before.Created) {
		err = c.anew(before, s)
	}
	return err
}

// filling reports whether a stream is near to limits of its own, or its account to one: beyond them it
// refuses messages, or removes some that may be needed.
func (c *command) filling(ctx context.Context, s *stream) bool {
	near := func(n uint64, limit int64) bool { return limit > 0 && n >= uint64(limit-limit/10) }
	if near(s.State.Bytes, s.Config.MaxBytes) || near(s.State.Messages, s.Config.MaxMsgs) {
		return true
	}
	type used struct {
		Storage uint64 `json:"storage"`
		Memory  uint64 `json:"memory"`
		Limits  struct {
			Storage int64 `json:"max_storage"`
			Memory  int64 `json:"max_memory"`
		} `json:"limits"`
	}
	var account struct {
		jsapi.Answer
		used
		Tiers map[string]used `json:"tiers"`
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	_ = c.conn.API().Ask(ctx, "INFO", nil, &account) // if this fails, what follows says why
	for _, u := range append(slices.Collect(maps.Values(account.Tiers)), account.used) {
		if near(u.Storage, u.Limits.Storage) || near(u.Memory, u.Limits.Memory) {
			return true
		}
	}
	return false
}

// purge removes the messages up to a sequence, and returns how many there were.
func (c *command) purge(ctx context.Context, upTo uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var answer struct {
		jsapi.Answer
		Purged uint64 `json:"purged"`
	}
	err := c.conn.API().Ask(ctx, "STREAM.PURGE."+c.cfg.Stream, map[string]uint64{"seq": upTo + 1}, &answer)
	return answer.Purged, err
}

func (c *command) anew(before, now *stream) error {
	return &outbox.Fault{Class: outbox.Gap, Code: "stream_recreated",
		Message: fmt.Sprintf("stream %s was made anew while this ran: at %v, and before at %v", c.cfg.Stream,
			now.Created.UTC().Format(time.RFC3339Nano), before.Created.UTC().Format(time.RFC3339Nano))}
}

// stream is what JetStream says of the stream.
type stream = jsapi.StreamInfo[streamretain.Limits]

// stream reads the stream's state from its leader.
func (c *command) stream(ctx context.Context) (*stream, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s, err := jsapi.Stream[streamretain.Limits](ctx, c.conn.API(), c.cfg.Stream)
	switch {
	case err != nil:
		return nil, err
	case s == nil:
		return nil, &outbox.Fault{Class: outbox.Fatal, Code: "stream_missing",
			Message: fmt.Sprintf("stream %s does not exist", c.cfg.Stream)}
	case !s.Led():
		return nil, &outbox.Fault{Class: outbox.Transient, Code: "no_leader",
			Message: fmt.Sprintf("stream %s has no leader", c.cfg.Stream)}
	}
	return s, nil
}

// read reads the facts. The stream comes last: at least what the record and the archive say is in it, and it
// is still the stream that they are about.
func (c *command) read(ctx context.Context) (*stream, *streamretain.Facts, error) {
	before, err := c.stream(ctx)
	if err != nil {
		return nil, nil, err
	}
	f := &streamretain.Facts{Created: before.Created}
	if c.store != nil {
		folder := archive.FolderOf(c.cfg.Stream, before.Created)
		if c.archive, err = c.o.Known.Load(ctx, c.store, folder, nil); err != nil {
			return nil, nil, err
		}
		f.Archived = c.archive.Next() - 1
	}
	if f.Readers, err = c.o.Readers(ctx, c.conn.API()); err != nil {
		return nil, nil, err
	}
	store := wiring.Store(c.cfg, c.conn)
	if f.Record, _, err = store.Load(ctx); err != nil {
		return nil, nil, err
	}
	if err := store.CheckAlone(ctx); err != nil {
		return nil, nil, err
	}
	s, err := c.stream(ctx)
	if err == nil && !s.Created.Equal(before.Created) {
		err = c.anew(before, s)
	}
	if err != nil {
		return nil, nil, err
	}
	f.First, f.Last, f.Denied = s.State.First, s.State.Last, s.Config.PurgeDenied()
	of := streams.New(c.conn.API(), c.cfg.Stream, c.log)
	if err := f.CountCuts(ctx, of); err != nil {
		return nil, nil, err
	}
	f.Newest, err = of.AtOrBelow(ctx, f.Last)
	return s, f, err
}

// notes says what is worth to be known beside the bounds.
func (c *command) notes(s *stream, f *streamretain.Facts) (all []string) {
	r := c.cfg.Retain.Stream
	if r.Age == 0 && r.Size == 0 && r.Messages == 0 {
		all = append(all, "none of retain.stream.age, size and messages is set: nothing goes")
	}
	for _, name := range r.IgnoreConsumers {
		is := func(reader streamretain.Reader) bool { return reader.Name == name }
		if i := slices.IndexFunc(f.Readers, is); i >= 0 {
			all = append(all, fmt.Sprintf("consumer %s is not waited for "+
				"(retain.stream.ignore_consumers): %s", name, f.Readers[i].Why))
		}
	}
	if limits := s.Config.String(); c.rule.Archive && limits != "" {
		all = append(all, fmt.Sprintf("the stream has %s: by that messages go that are not archived "+
			"(archive_limits)", limits))
	}
	return all
}
