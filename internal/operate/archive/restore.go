package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// RestoreOptions say what is restored.
type RestoreOptions struct {
	Folder string // of the archive; "": the newest one with a segment
	To     string // the stream that is made; "": the one of the settings
	From   uint64 // the first sequence that is restored; 0: all are

	Hit func(point string) // called at points where tests kill the process; may be nil
}

// Restored says what was restored. The JSON names are stable.
type Restored struct {
	Folder   string `json:"folder"`
	Stream   string `json:"stream"`
	First    uint64 `json:"first"`
	Last     uint64 `json:"last"`
	Messages uint64 `json:"messages"`
	Missing  uint64 `json:"missing"` // sequences without a message, as in the archived stream
	Before   bool   `json:"before"`  // an earlier run has restored it: it was only compared
}

func (r *Restored) String() string {
	if r.Before {
		return fmt.Sprintf("stream %s was restored before, and agrees with the archive: %s, %d to %d",
			r.Stream, units.Of(r.Messages, "message"), r.First, r.Last)
	}
	text := fmt.Sprintf("stream %s: restored %s, %d to %d", r.Stream, units.Of(r.Messages, "message"),
		r.First, r.Last)
	if r.Missing > 0 {
		text += fmt.Sprintf(", without %d that were missing", r.Missing)
	}
	return text
}

// Bounds on what is published and not acknowledged yet.
const (
	maxUnacked      = 1024
	maxUnackedBytes = 32 << 20
)

// Bounds on waits: a leader that is lost leaves what it was asked without an answer.
const (
	ackTimeout = 20 * time.Second
	askTimeout = 30 * time.Second
)

// filler is the subject of messages that hold the sequences that the archived stream had no message at, until
// all is restored.
const filler = "outflow-restore-filler"

// restore is one run.
type restore struct {
	api     *jsapi.Client
	js      jetstream.JetStream
	s       *stream.Stream
	name    string
	a       *archive.Archive
	missing outbox.Sequences // all that there is no message of
	erased  outbox.Sequences // those of them that were erased
	ingress string
	unacked []unacked
	bytes   int
	hit     func(point string)
}

type unacked struct {
	seq    uint64
	bytes  int
	future jetstream.PubAckFuture
}

// Restore makes a stream with the messages of the archive: the same sequences, subjects, headers and data.
// While it is under way the stream's metadata say so, and nothing else works on it; a run that was killed is
// run again and goes on.
func Restore(ctx context.Context, cfg config.Config, log *slog.Logger, o RestoreOptions) (*Restored, error) {
	if o.To != "" && !config.StreamName(o.To) {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "flags",
			Message: fmt.Sprintf("--to %q: a stream can't have that name", o.To),
			Hint:    "Give letters, digits, _ and -"}
	}
	store, err := open(ctx, cfg, archive.OpenThere)
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close() }()
	conn, err := wiring.ConnectBroker(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	a, folder, err := find(ctx, cfg, store, o.Folder)
	if err != nil {
		return nil, err
	}
	ctx, lost := conns.WhileConnected(ctx, conn)
	r := &restore{api: conn.API(), name: cfg.Stream, a: a, hit: o.Hit}
	if o.To != "" {
		r.name = o.To
	}
	if r.hit == nil {
		r.hit = func(string) {}
	}
	r.s = stream.New(r.api, r.name, log)
	if r.js, err = r.api.JetStream(); err != nil {
		return nil, err
	}
	done := &Restored{Folder: folder, Stream: r.name, First: max(o.From, 1), Last: a.Next() - 1}
	if done.First > done.Last {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "flags",
			Message: fmt.Sprintf("--from %d: the archive ends at %d", o.From, done.Last),
			Hint:    "`outflow archive list` shows what it has"}
	}
	for _, m := range a.Segments {
		r.missing = append(r.missing, m.Holes()...)
	}
	r.missing = outbox.Sequences(nil).With(r.missing...).Within(done.First, done.Last)
	r.erased = a.WasErased().Within(done.First, done.Last)
	if len(r.missing) > 0 && r.missing[0].From == done.First {
		done.First, r.missing = r.missing[0].To+1, r.missing[1:] // the stream begins behind them
	}
	done.Messages = done.Last + 1 - done.First - r.missing.Count()
	done.Missing = done.Last - done.First + 1 - done.Messages
	if err := lost(r.run(ctx, cfg, done)); err != nil {
		return nil, err
	}
	return done, nil
}

// find loads the folder that is to be restored.
func find(ctx context.Context, cfg config.Config, store archive.Store, folder string) (*archive.Archive,
	string, error) {
	folders, err := archive.Folders(ctx, store, cfg.Stream)
	if err != nil {
		return nil, "", err
	}
	if folder != "" && !slices.Contains(folders, folder) {
		return nil, "", &outbox.Fault{Class: outbox.Usage, Code: "flags",
			Message: fmt.Sprintf("--folder %q: the archive has no such folder of stream %s", folder,
				cfg.Stream),
			Hint: "`outflow archive list` shows them"}
	}
	var newest *archive.Archive
	name := ""
	for _, f := range slices.Backward(folders) {
		if folder != "" && f != folder {
			continue
		}
		a, err := archive.Load(ctx, store, f, nil)
		switch {
		case err != nil:
			return nil, "", err
		case len(a.Segments) == 0:
		case newest == nil:
			newest, name = a, f
		case a.Next() > newest.Next():
			return nil, "", &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("the newest folder %s ends at %d, and %s at %d: of a stream that was "+
					"made anew, or restored and not archived again yet", name, newest.Next()-1, f,
					a.Next()-1),
				Hint: "Say which one with --folder"}
		case a.Segments[len(a.Segments)-1].To.After(newest.Created()):
			same, err := hasEnd(ctx, newest, a)
			if err != nil {
				return nil, "", err
			}
			if same {
				continue
			}
			return nil, "", &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("folder %s has messages that were stored after the stream of the "+
					"newest folder %s was made: two streams of this name, in two places, have one "+
					"archive, or the broker's clock was set back", f, name),
				Hint: "Say which one with --folder. If there are two, give each an archive.url of its own"}
		}
	}
	if newest != nil {
		return newest, name, nil
	}
	return nil, "", empty(cfg)
}

// hasEnd reports whether an archive has the messages of another one's last segment under the same sequences:
// then its stream was restored from that one, and went on, whatever the clock says of when that was. What is
// damaged tells nothing.
func hasEnd(ctx context.Context, a, of *archive.Archive) (bool, error) {
	last := of.Segments[len(of.Segments)-1]
	var sums [2][]byte
	for i, a := range []*archive.Archive{a, of} {
		sum := sha256.New()
		err := a.ReadRange(ctx, last.First, last.Last+1, func(m *archive.Message) error {
			addTo(sum, *m)
			return nil
		})
		if f := outbox.FaultOf(err); f != nil && f.Code == archive.CodeDamaged {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		sums[i] = sum.Sum(nil)
	}
	return last.Readable() > 0 && bytes.Equal(sums[0], sums[1]), nil
}

// addTo adds what a restore keeps of a message.
func addTo(sum hash.Hash, m archive.Message) {
	m.Header, m.Time = published(m.Header), time.Time{}
	h := m.Hash()
	sum.Write(h[:])
}

func empty(cfg config.Config) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: archive.CodeEmpty,
		Message: fmt.Sprintf("the archive has no segment of stream %s", cfg.Stream)}
}

func (r *restore) run(ctx context.Context, cfg config.Config, done *Restored) error {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err := r.s.Ensure(ask, stream.Options{Replicas: cfg.Init.Replicas, Storage: cfg.Init.Storage,
		Restoring: done.Folder, First: done.First, Erased: r.erased})
	if err != nil {
		return err
	}
	r.hit("restore.made")
	info, err := r.s.Check(ask, 0)
	if err != nil {
		return err
	}
	if info == nil {
		return fmt.Errorf("stream %s was deleted meanwhile", r.name)
	}
	r.ingress = info.Ingress()
	st, err := r.s.Tail(ask)
	switch {
	case err != nil:
		return err
	case st.Restoring == "":
		// a run may have been killed right before it could say that it is done
		if done.Before, err = r.whole(ctx, st, done); err != nil || done.Before {
			return err
		}
		return exists(r.name, fmt.Sprintf("stream %s exists: it is at sequence %d", r.name, st.LastSeq))
	case st.Restoring != done.Folder:
		return exists(r.name, fmt.Sprintf("stream %s is being restored from %s", r.name, st.Restoring))
	}
	to := max(st.LastSeq, done.First-1) // the archive may begin later than the stream
	if n := r.erasedSince(max(info.FirstSeq, 1), to, st.Erased); n > 0 {
		return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeDiffers,
			Message: fmt.Sprintf("stream %s is being restored: since then %d of its messages up to %d were "+
				"erased from the archive", r.name, n, to),
			Hint: fmt.Sprintf("`nats stream rm %s`, then restore again", r.name)}
	}
	if len(r.erased) > 0 { // some perhaps since a run before this one made the stream
		if err := r.s.NoteErased(ask, r.erased); err != nil {
			return err
		}
	}
	for {
		err := r.publish(ctx, st, done)
		if err == nil {
			break
		}
		if !errors.Is(err, errDuplicate) && !errors.Is(err, errMoved) {
			return err
		}
		// An id that the archive has twice, and by and by the server forgets the first one. Or messages that
		// a run had sent before it was killed, and that are stored now.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * stream.RestoreWindow):
		}
		now, asked := r.tail(ctx)
		if asked != nil {
			return asked
		}
		if errors.Is(err, errMoved) && (now.LastSeq <= st.LastSeq || now.LastSeq > done.Last) {
			return err
		}
		st = now
	}
	r.hit("restore.published")
	return r.finish(ctx, done)
}

// erasedSince is how many sequences from one to another were erased beside those that the stream's metadata
// have.
func (r *restore) erasedSince(from, to uint64, noted outbox.Sequences) uint64 {
	if from > to {
		return 0
	}
	noted = noted.Within(from, to)
	return noted.With(r.erased.Within(from, to)...).Count() - noted.Count()
}

func (r *restore) tail(ctx context.Context) (relay.StreamState, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return r.s.Tail(ctx)
}

// whole reports whether the stream is one that was made from the archive, and has each message of it and no
// other. It reads both.
func (r *restore) whole(ctx context.Context, st relay.StreamState, done *Restored) (bool, error) {
	if st.Created.Equal(r.a.Created()) || st.LastSeq != done.Last || st.Messages != done.Messages ||
		st.NewestSeq == 0 {
		return false, nil
	}
	task := progress.Count(ctx, "comparing stream "+r.name+" with the archive", "messages",
		2*int64(done.Messages))
	defer task.End()
	archived, stored := sha256.New(), sha256.New()
	add := func(to hash.Hash, m archive.Message) {
		task.Add(1)
		addTo(to, m)
	}
	if err := r.a.Read(ctx, done.First, func(m *archive.Message) error {
		add(archived, *m)
		return nil
	}); err != nil {
		return false, err
	}
	if err := jsapi.ReadStream(ctx, r.js, r.name, jetstream.OrderedConsumerConfig{}, st.NewestSeq,
		func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
			add(stored, archive.Message{Seq: meta.Sequence.Stream, Subject: m.Subject(), Header: m.Headers(),
				Data: m.Data()})
			return nil
		}); err != nil {
		return false, err
	}
	return bytes.Equal(archived.Sum(nil), stored.Sum(nil)), nil
}

func exists(name, message string) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: "restore_exists", Message: message,
		Hint: fmt.Sprintf("If nothing of it is needed: `nats stream rm %s`, then restore. To look at the "+
			"past only: --to another name", name)}
}

// publish publishes what the stream does not have yet, each message at its sequence.
func (r *restore) publish(ctx context.Context, st relay.StreamState, done *Restored) error {
	next := max(st.LastSeq+1, done.First)
	task := progress.Count(ctx, "restoring stream "+r.name, "messages", int64(done.Last-done.First+1))
	defer task.End()
	put := func(seq uint64, m *nats.Msg) error {
		if seq < next {
			return nil
		}
		task.Set(int64(seq - done.First + 1))
		next = seq + 1
		return r.put(ctx, seq, m)
	}
	from := done.First
	if next > done.First {
		from = next - 1 // the newest one is compared
	}
	holes := r.missing
	fill := func(below uint64) error {
		for len(holes) > 0 && holes[0].From < below {
			for seq := max(holes[0].From, next); seq <= holes[0].To; seq++ {
				if err := put(seq, &nats.Msg{Subject: filler}); err != nil {
					return err
				}
			}
			holes = holes[1:]
		}
		return nil
	}
	err := r.a.Read(ctx, from, func(m *archive.Message) error {
		if err := fill(m.Seq); err != nil {
			return err
		}
		if m.Seq == st.LastSeq {
			return r.compare(ctx, m)
		}
		return put(m.Seq, &nats.Msg{Subject: m.Subject, Header: published(m.Header), Data: m.Data})
	})
	if err == nil {
		err = fill(done.Last + 1) // the newest ones may be erased
	}
	for err == nil && len(r.unacked) > 0 {
		err = r.await(ctx)
	}
	if errors.Is(err, errDuplicate) || errors.Is(err, errMoved) {
		err = cmp.Or(r.settle(ctx), err)
	}
	return err
}

// compare makes sure that the stream's newest message is the archive's: somebody may have published to it.
func (r *restore) compare(ctx context.Context, m *archive.Message) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	there, err := r.api.Message(ctx, r.name, jsapi.MessageRequest{Seq: m.Seq})
	if err != nil {
		return err
	}
	if there != nil && there.Subject == m.Subject && bytes.Equal(there.Data, m.Data) {
		return nil
	}
	return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeDiffers,
		Message: fmt.Sprintf("stream %s, which is being restored, has another message at %d than the archive",
			r.name, m.Seq),
		Hint: fmt.Sprintf("Somebody published to it. `nats stream rm %s`, then restore again", r.name)}
}

// published is a message's header without what told the server how to store it.
func published(h nats.Header) nats.Header {
	h = maps.Clone(h)
	maps.DeleteFunc(h, func(name string, _ []string) bool {
		return strings.HasPrefix(name, "Nats-") && name != jetstream.MsgIDHeader
	})
	return h
}

// put publishes a message that must become the one at seq.
func (r *restore) put(ctx context.Context, seq uint64, m *nats.Msg) error {
	size := len(m.Data) + len(m.Subject)
	for len(r.unacked) > 0 && (len(r.unacked) >= maxUnacked || r.bytes+size > maxUnackedBytes) {
		if err := r.await(ctx); err != nil {
			return err
		}
	}
	if m.Header == nil {
		m.Header = nats.Header{}
	}
	m.Header.Set(jetstream.ExpectedLastSeqHeader, strconv.FormatUint(seq-1, 10))
	m.Subject = r.ingress + m.Subject
	future, err := r.js.PublishMsgAsync(m, jetstream.WithRetryAttempts(0))
	if err != nil {
		return fmt.Errorf("publish message %d: %w", seq, err)
	}
	r.unacked, r.bytes = append(r.unacked, unacked{seq, size, future}), r.bytes+size
	return nil
}

// errDuplicate: the server took a message for one that it has, by its Nats-Msg-Id. What was sent behind it is
// refused then.
var errDuplicate = errors.New("the server has a message with this id")

// errMoved: the stream has messages that it did not have when its end was read.
var errMoved = errors.New("somebody else has published to it")

// duplicateInProcess says so of a message that is not stored yet.
const duplicateInProcess jetstream.ErrorCode = 10158

// settle waits until the server has answered all that was sent, whatever it says.
func (r *restore) settle(ctx context.Context) error {
	late := time.NewTimer(ackTimeout)
	defer late.Stop()
	for _, u := range r.unacked {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-late.C:
			return fmt.Errorf("message %d of stream %s: no answer within %v: run it again", u.seq, r.name,
				ackTimeout)
		case <-u.future.Err():
		case <-u.future.Ok():
		}
	}
	r.unacked, r.bytes = nil, 0
	return nil
}

// await waits for the oldest acknowledgement.
func (r *restore) await(ctx context.Context) error {
	first := r.unacked[0]
	r.unacked, r.bytes = r.unacked[1:], r.bytes-first.bytes
	late := time.NewTimer(ackTimeout)
	defer late.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-late.C:
		return fmt.Errorf("message %d of stream %s: no acknowledgement within %v: run it again", first.seq,
			r.name, ackTimeout)
	case err := <-first.future.Err():
		var refused *jetstream.APIError
		if errors.As(err, &refused) && refused.ErrorCode == duplicateInProcess {
			return errDuplicate
		}
		if errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
			err = fmt.Errorf("%w: %w", errMoved, err)
		}
		return fmt.Errorf("message %d of stream %s: %w: run it again", first.seq, r.name, err)
	case ack := <-first.future.Ok():
		if ack.Duplicate && ack.Sequence < first.seq && ack.Stream == r.name {
			return errDuplicate
		}
		if ack.Sequence != first.seq || ack.Stream != r.name {
			return fmt.Errorf("message %d of stream %s was stored at %d of %s", first.seq, r.name,
				ack.Sequence, ack.Stream)
		}
	}
	r.hit("restore.message")
	return nil
}

// finish takes the fillers away and lets the stream be used.
func (r *restore) finish(ctx context.Context, done *Restored) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	purge := struct {
		Filter string `json:"filter"`
	}{filler}
	if err := r.api.Ask(ctx, "STREAM.PURGE."+r.name, purge, &jsapi.Answer{}); err != nil {
		return err
	}
	r.hit("restore.purged")
	st, err := r.s.Tail(ctx)
	if err != nil {
		return err
	}
	if st.Restoring == "" && st.Restored == done.Folder && st.LastSeq >= done.Last {
		return nil // another run has finished it, and somebody may use it by now
	}
	if st.LastSeq != done.Last || st.Messages != done.Messages {
		return &outbox.Fault{Class: outbox.Gap, Code: archive.CodeDiffers,
			Message: fmt.Sprintf("stream %s has %d messages up to %d, the archive %d up to %d", r.name,
				st.Messages, st.LastSeq, done.Messages, done.Last),
			Hint: fmt.Sprintf("Somebody worked on it meanwhile. `nats stream rm %s`, then restore again",
				r.name)}
	}
	return r.s.Restored(ctx)
}
