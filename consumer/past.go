package consumer

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Archive has the messages that retention has taken from streams, as `outflow archive` has written them.
// Package consumer/archive opens one. Several consumers may use it at the same time.
type Archive interface{ stream.Archive }

// pasts keeps what was opened of the archive from one session to the next.
type pasts struct {
	of   time.Time // when the stream was made
	past stream.Past
}

// joined is a stream with its archive before it, as one source. The archive is read for what the stream does
// not have any more, and for nothing else: what it has from there on, the broker may have lost since.
//
// The archive is not touched while the stream has all that is to be read.
type joined struct {
	stream.Source // the stream
	cfg           *Config
	pasts         *pasts
	wait          context.Context // ends when nothing more is to be read; nil: not known yet

	past   stream.Past // nil: not needed yet
	kept   uint64      // sequence of the stream's first message, when it was last looked at
	floor  uint64      // what lies up to here was read, or need not be
	told   uint64      // up to here the archive was read: what it did not have is nobody's loss, or was told
	reader *joinedReader
}

// skip says that there is nothing to read up to a sequence.
func (j *joined) skip(to uint64) {
	j.floor = max(j.floor, to)
	if j.reader != nil {
		j.reader.last = max(j.reader.last, to)
	}
}

// until bounds a context by the end of reading.
func (j *joined) until(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	if j.wait == nil {
		return ctx, cancel
	}
	stop := context.AfterFunc(j.wait, cancel)
	return ctx, func() { stop(); cancel() }
}

// open makes sure that the archive has been read as far as it has come by now, for a stream that does not
// have what is next.
func (j *joined) open(ctx context.Context, st stream.State) error {
	ctx, cancel := j.until(ctx)
	defer cancel()
	if j.pasts.past == nil || !j.pasts.of.Equal(st.Created) {
		p, err := j.cfg.Archive.Past(ctx, j.cfg.Stream, st.Created)
		if err != nil {
			return j.failed(err)
		}
		*j.pasts, j.past = pasts{st.Created, p}, nil
	}
	p := j.pasts.past
	if j.past != nil && p.Next() >= st.First {
		return nil
	}
	if p.Next() < st.First {
		if err := p.Refresh(ctx); err != nil {
			return j.failed(err)
		}
	}
	if err := j.compare(ctx, p, st); err != nil {
		return err
	}
	j.past = p
	return nil
}

// compare compares the newest message that both have: a stream that was put back from a backup and went on
// otherwise differs there.
func (j *joined) compare(ctx context.Context, p stream.Past, st stream.State) error {
	seq := min(p.Next()-1, st.Last)
	if seq < st.First {
		return nil
	}
	m, err := j.Source.Get(ctx, seq)
	if err != nil || m == nil {
		return err
	}
	same, err := p.Same(ctx, m)
	if err == nil && !same {
		err = fault(ErrArchive, nil, hintStream(j.cfg), "stream %s, consumer %s: the archive has another "+
			"message at sequence %d", j.cfg.Stream, j.cfg.Name, seq)
	}
	return j.failed(err)
}

// failed says that the archive could not be read. What is lost or damaged stays so.
func (j *joined) failed(err error) error {
	f := outbox.FaultOf(err)
	switch {
	case err == nil:
		return nil
	case f == nil || f.Class == outbox.Transient:
		return fmt.Errorf("the archive of stream %s: %w", j.cfg.Stream, err)
	case f.Code == outbox.FaultOf(ErrArchive).Code:
		return err
	}
	return fault(ErrArchive, err, "Look at it with `outflow archive verify`; docs/archive.md says how an "+
		"object that is lost or damaged is brought back", "stream %s, consumer %s: the archive can't be read",
		j.cfg.Stream, j.cfg.Name)
}

func (j *joined) State(ctx context.Context) (stream.State, error) {
	st, err := j.Source.State(ctx)
	if err != nil {
		return st, err
	}
	st.Kept, j.kept = st.First, st.First
	next := j.next()
	if st.First <= next {
		return st, nil
	}
	if err := j.open(ctx, st); err != nil {
		return st, err
	}
	if j.past.Next() > next {
		st.First = 1
	}
	if j.reader != nil {
		j.reader.behind = true
	}
	return st, nil
}

// next is the sequence that is to be read next.
func (j *joined) next() uint64 {
	if j.reader != nil {
		return j.reader.last + 1
	}
	return j.floor + 1
}

func (j *joined) Get(ctx context.Context, seq uint64) (*stream.Message, error) {
	m, err := j.Source.Get(ctx, seq)
	if m != nil || err != nil || j.past == nil || seq >= min(j.kept, j.past.Next()) {
		return m, err
	}
	ctx, cancel := j.until(ctx)
	defer cancel()
	m, err = j.past.Get(ctx, seq)
	return m, j.failed(err)
}

// Next says that there may be something right behind what was read while that is in the archive: to know
// would be to read it. Otherwise the stream is asked first, and then whether it still had everything.
func (j *joined) Next(ctx context.Context, seq uint64) (uint64, error) {
	next, err := j.Source.Next(ctx, seq)
	if err != nil {
		return 0, err
	}
	if _, err := j.State(ctx); err != nil {
		return 0, err
	}
	if r := j.reader; r != nil && (r.live == nil || r.behind) {
		return max(seq, r.last+1), nil
	}
	return next, nil
}

func (j *joined) Open(_ context.Context, after uint64) (stream.Reader, error) {
	j.reader = &joinedReader{joined: j, last: max(after, j.floor)}
	return j.reader, nil
}

// joinedReader reads the archive while the stream lacks what is next, and then the stream.
type joinedReader struct {
	joined *joined
	last   uint64 // the newest sequence that was read, or need not be

	// One of these reads; none: it is to be decided.
	archived *archiveReading
	live     stream.Reader

	pending *stream.Message // from the stream, not compared with what was read before
	covered int             // so many of the stream's next messages had all before them in the stream
	behind  bool            // the stream does not have any more what is next
}

// Read notices when retention overtakes it: where the stream leaves out sequences it has to have the first of
// them, or had it when the messages that have come since were handed out. Otherwise the archive has it.
func (r *joinedReader) Read(ctx context.Context) (*stream.Message, error) {
	for {
		switch {
		case r.archived != nil:
			m, ended, err := r.readArchive(ctx)
			if !ended {
				return m, err
			}
		case r.live == nil:
			if err := r.choose(); err != nil {
				return nil, err
			}
		default:
			m, err := r.readLive(ctx)
			if m != nil || err != nil {
				return m, err
			}
		}
	}
}

// waits is what requests are bounded by that an interval of reading is too short for.
func (r *joinedReader) waits() context.Context {
	if r.joined.wait != nil {
		return r.joined.wait
	}
	return context.Background()
}

// choose begins to read what has the next sequence. A gap is where nobody has it, it was not erased, and does
// not come again.
func (r *joinedReader) choose() error {
	j, ctx, next := r.joined, r.waits(), r.last+1
	st, err := j.Source.State(ctx)
	if err != nil {
		return err
	}
	j.kept, r.behind = st.First, false
	if st.First <= next {
		r.live, err = j.Source.Open(ctx, r.last)
		r.covered = 0
		return err
	}
	if err := j.open(ctx, st); err != nil {
		return err
	}
	if below := min(st.First, j.past.Next()); below > next {
		r.archived = readArchive(j.past, next, below, j.cfg.Filters)
		return nil
	}
	first, err := j.Source.Get(ctx, st.First)
	switch {
	case err != nil:
		return err
	case first == nil && st.First <= st.Last:
		return nil // it was removed since
	}
	r.last = st.First - 1
	if gone := st.Erased.Lacking(next, lostBefore(first, st.First)-1); len(gone) > 0 {
		return &stream.Gap{From: gone[0].From, To: gone[len(gone)-1].To}
	}
	return nil
}

// readArchive returns the next message of the archive; ended: there is none any more.
func (r *joinedReader) readArchive(ctx context.Context) (m *stream.Message, ended bool, err error) {
	select {
	case a, ok := <-r.archived.out:
		switch {
		case !ok:
			err, below := r.archived.err, r.archived.below
			if r.archived = nil; err != nil {
				return nil, false, r.joined.failed(err)
			}
			r.last = max(r.last, below-1)
			r.joined.told = r.last
			return nil, true, nil
		case a.gap != nil:
			r.last = a.gap.To
			return nil, false, a.gap
		}
		r.last = a.message.Sequence
		r.joined.told = r.last
		return a.message, false, nil
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
}

// readLive returns the next message of the stream; nil if something before it has to be read from the
// archive.
func (r *joinedReader) readLive(ctx context.Context) (*stream.Message, error) {
	if r.behind {
		r.leave()
		return nil, nil
	}
	if r.pending == nil {
		m, err := r.live.Read(ctx)
		if err != nil {
			return nil, err
		}
		r.pending = m
	}
	if r.pending.Sequence != r.last+1 && r.covered == 0 {
		come := r.live.Buffered()
		st, err := r.joined.Source.State(r.waits())
		if err != nil {
			return nil, err
		}
		if st.First > r.last+1 {
			r.leave()
			return nil, nil
		}
		r.covered = come + 1
	}
	m := r.pending
	r.pending, r.last, r.covered = nil, m.Sequence, max(r.covered-1, 0)
	return m, nil
}

// leave ends reading the stream. What had come of it comes again.
func (r *joinedReader) leave() {
	r.live.Close()
	r.live, r.pending, r.behind = nil, nil, false
}

func (r *joinedReader) Check(ctx context.Context) (uint64, error) {
	if r.live == nil {
		return r.last, nil
	}
	return r.live.Check(ctx)
}

func (r *joinedReader) Buffered() int {
	if r.live == nil {
		return 0
	}
	n := r.live.Buffered()
	if r.pending != nil {
		n++
	}
	return n
}

func (r *joinedReader) Close() {
	if r.archived != nil {
		r.archived.close()
	}
	if r.live != nil {
		r.live.Close()
	}
}

// archiveReading reads the archive in a goroutine of its own, which has one message in its hands.
type archiveReading struct {
	below uint64
	out   chan archivedItem // closed at the end
	end   context.CancelFunc
	err   error // once out is closed
}

// archivedItem is a message, or a gap.
type archivedItem struct {
	message *stream.Message
	gap     *stream.Gap
}

func readArchive(past stream.Past, from, below uint64, filters []string) *archiveReading {
	ctx, cancel := context.WithCancel(context.Background())
	a := &archiveReading{below: below, out: make(chan archivedItem), end: cancel}
	hand := func(i archivedItem) error {
		select {
		case a.out <- i:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	go func() {
		defer close(a.out)
		a.err = past.Read(ctx, from, below, func(m *stream.Message) error {
			if !slices.ContainsFunc(filters, func(f string) bool { return overlap(f, m.Subject) }) {
				return nil
			}
			return hand(archivedItem{message: m})
		}, func(g *stream.Gap) error { return hand(archivedItem{gap: g}) })
	}()
	return a
}

// close ends it, and waits until it has.
func (a *archiveReading) close() {
	a.end()
	for range a.out { //nolint:revive // what it has in its hands
	}
}
