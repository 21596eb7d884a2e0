package consumer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// streamSource is a JetStream stream. Each session reads it by itself, through an ephemeral pull consumer
// that acknowledges nothing: what is done is in the offsets.
type streamSource struct {
	js       jetstream.JetStream
	stream   string
	filters  []string          // {">"}: everything
	name     string            // the beginning of the ephemeral consumers' names
	metadata map[string]string // of those, for `outflow consumer`
	replay   bool
	created  time.Time // the stream, as its state was first read; zero: it was not
}

// readerLives is how long the server keeps the ephemeral consumer of an instance that is gone, or that does
// not read because its workers are busy: that one makes another.
const readerLives = 30 * time.Second

// apiTimeout bounds each request to JetStream's API.
const apiTimeout = 5 * time.Second

// apiPrefix is what the subjects of JetStream's API begin with.
func apiPrefix(js jetstream.JetStream) string {
	o := js.Options()
	if o.Domain != "" {
		return "$JS." + o.Domain + ".API."
	} else if o.APIPrefix != "" {
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	}
	return jetstream.DefaultAPIPrefix
}

// ask sends a request to JetStream's API.
func (s *streamSource) ask(ctx context.Context, method string, request, answer any) error {
	var body []byte
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	m, err := s.js.Conn().RequestWithContext(ctx, apiPrefix(s.js)+method, body)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	if err := json.Unmarshal(m.Data, answer); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}

// errNoLeader: a server other than the leader answered, which may not know the end of the stream.
var errNoLeader = errors.New("the stream has no leader")

func (s *streamSource) State(ctx context.Context) (stream.State, error) {
	var a struct {
		Error   *jetstream.APIError    `json:"error"`
		Created time.Time              `json:"created"`
		State   jetstream.StreamState  `json:"state"`
		Cluster *jetstream.ClusterInfo `json:"cluster"`
		Config  struct {
			Metadata map[string]string `json:"metadata"`
		} `json:"config"`
	}
	if err := s.ask(ctx, "STREAM.INFO."+s.stream, nil, &a); err != nil {
		return stream.State{}, err
	}
	switch {
	case a.Error != nil && a.Error.ErrorCode == jetstream.JSErrCodeStreamNotFound:
		return stream.State{}, jetstream.ErrStreamNotFound
	case a.Error != nil:
		return stream.State{}, fmt.Errorf("stream %s: %w", s.stream, a.Error)
	case a.Cluster != nil && a.Cluster.Leader == "":
		return stream.State{}, fmt.Errorf("stream %s: %w", s.stream, errNoLeader)
	}
	st := stream.State{Created: a.Created, First: a.State.FirstSeq, Last: a.State.LastSeq}
	if a.State.Msgs == 0 {
		st.First = a.State.LastSeq + 1
	}
	if s.created.IsZero() {
		s.created = a.Created
	}
	var err error
	if st.Erased, err = outbox.ParseSequences(a.Config.Metadata[outbox.MetadataErased]); err != nil {
		return stream.State{}, fmt.Errorf("stream %s: metadata %s: %w", s.stream, outbox.MetadataErased, err)
	}
	return st, nil
}

// stored asks the stream's leader for a message: a lagging replica might not have it.
func (s *streamSource) stored(ctx context.Context, request any) (*stream.Message, error) {
	var a struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := s.ask(ctx, "STREAM.MSG.GET."+s.stream, request, &a); err != nil {
		return nil, err
	}
	switch {
	case a.Error != nil && a.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, nil
	case a.Error != nil:
		return nil, fmt.Errorf("stream %s: %w", s.stream, a.Error)
	case a.Message == nil:
		return nil, fmt.Errorf("stream %s: an answer without a message", s.stream)
	}
	m := &stream.Message{Subject: a.Message.Subject, Sequence: a.Message.Seq, Data: a.Message.Data,
		Time: a.Message.Time}
	var err error
	if m.Header, err = nats.DecodeHeadersMsg(a.Message.Header); err != nil && len(a.Message.Header) > 0 {
		return nil, fmt.Errorf("stream %s, sequence %d: headers: %w", s.stream, m.Sequence, err)
	}
	return m, nil
}

func (s *streamSource) Get(ctx context.Context, seq uint64) (*stream.Message, error) {
	return s.stored(ctx, map[string]any{"seq": seq})
}

func (s *streamSource) Next(ctx context.Context, seq uint64) (uint64, error) {
	next := uint64(0)
	for _, filter := range s.filters {
		m, err := s.stored(ctx, map[string]any{"seq": seq, "next_by_subj": filter})
		if err != nil {
			return 0, err
		}
		if m != nil && (next == 0 || m.Sequence < next) {
			next = m.Sequence
		}
	}
	return next, nil
}

// last returns the sequence of the newest message that matches the one filter; 0 if there is none.
func (s *streamSource) last(ctx context.Context) (uint64, error) {
	m, err := s.stored(ctx, map[string]any{"last_by_subj": s.filters[0]})
	if m == nil {
		return 0, err
	}
	return m.Sequence, nil
}

func (s *streamSource) Open(ctx context.Context, after uint64) (stream.Reader, error) {
	r := &streamReader{source: s, last: after}
	r.open, r.close = context.WithCancel(context.Background())
	if err := r.make(ctx); err != nil {
		r.close()
		return nil, err
	}
	r.status = s.js.Conn().StatusChanged(nats.RECONNECTING, nats.CLOSED)
	return r, nil
}

// make makes a consumer that begins behind what was read, in the stream whose state was read.
func (r *streamReader) make(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	s := r.source
	config := jetstream.ConsumerConfig{
		Name: s.name + "-" + nuid.Next(), Description: "an instance of an Outflow consumer reads with it",
		Metadata:      s.metadata,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.last + 1,
		AckPolicy: jetstream.AckNonePolicy, InactiveThreshold: readerLives, MemoryStorage: true, Replicas: 1,
	}
	if len(s.filters) > 1 || s.filters[0] != ">" {
		config.FilterSubjects = s.filters
	}
	cons, err := s.js.CreateConsumer(ctx, s.stream, config)
	if err != nil {
		return fmt.Errorf("stream %s: make a consumer to read with: %w", s.stream, err)
	}
	r.cons, r.name, r.gone, r.delivered, r.overdue, r.handed = cons, config.Name, false, 0, 0, 0
	r.remade++
	if st, err := s.State(ctx); err != nil || !st.Created.Equal(s.created) {
		// The next session finds out why: in another stream nobody has read what lies before.
		return cmp.Or(err, fmt.Errorf("stream %s was made anew", s.stream))
	}
	return nil
}

// A pull asks for this many messages or bytes, whichever is reached first; the largest message always fits.
const (
	pullMessages  = 500
	pullBytes     = 8 << 20
	pullHeartbeat = 5 * time.Second
)

// pull asks for the next messages. Only one pull is outstanding at a time, and the client has room for all
// that it may bring: the client silently drops messages for which it has no room.
func (r *streamReader) pull() error {
	if r.gone {
		if err := r.make(r.open); err != nil {
			return err
		}
	}
	most := max(pullBytes, int(r.source.js.Conn().MaxPayload())+64<<10)
	pulled, err := r.cons.Fetch(pullMessages, jetstream.FetchMaxBytes(most),
		jetstream.FetchHeartbeat(pullHeartbeat), jetstream.FetchContext(r.open))
	if err != nil {
		return r.failed(err)
	}
	r.pulled = pulled
	return nil
}

// isGone reports whether an error says that a consumer is gone, or may be.
func isGone(err error) bool {
	return errors.Is(err, jetstream.ErrConsumerDeleted) || errors.Is(err, jetstream.ErrConsumerNotFound) ||
		errors.Is(err, jetstream.ErrNoHeartbeat) || errors.Is(err, nats.ErrNoResponders)
}

// failed says which stream could not be read.
func (r *streamReader) failed(err error) error {
	return fmt.Errorf("stream %s: read: %w", r.source.stream, err)
}

// streamReader reads with an ephemeral consumer, whose own sequence shows whether every message came here: it
// rises by one with each delivery.
type streamReader struct {
	source *streamSource
	name   string
	cons   jetstream.Consumer
	open   context.Context // until Close
	close  context.CancelFunc
	status chan nats.Status // reports a lost connection: the messages that were asked for never come

	pulled jetstream.MessageBatch // nil: no pull is outstanding

	last      uint64    // stream sequence of the newest message read
	gone      bool      // the consumer is: the next pull needs another one
	remade    int       // times, since the last message
	delivered uint64    // of the consumer's messages, those that were read
	overdue   uint64    // the delivery that Check last found handed out but not read; 0: none
	noticed   time.Time // when it first did
	handed    uint64    // the newest stream sequence that Check found handed out; 0: none yet
}

// next waits for the next message of the outstanding pull, and pulls again when that has ended.
func (r *streamReader) next(ctx context.Context) (jetstream.Msg, error) {
	for {
		if r.pulled == nil {
			if err := r.pull(); err != nil {
				return nil, err
			}
		}
		select {
		case msg, ok := <-r.pulled.Messages():
			if ok {
				return msg, nil
			}
			err := r.pulled.Error()
			r.pulled = nil
			silent := errors.Is(err, jetstream.ErrNoHeartbeat) && r.remade > 1 // a second consumer, too
			if r.gone = r.gone || isGone(err); err != nil && (!r.gone || silent) {
				return nil, r.failed(err)
			}
		case status := <-r.status:
			return nil, r.failed(fmt.Errorf("the connection to NATS is %v", status))
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (r *streamReader) Read(ctx context.Context) (*stream.Message, error) {
	msg, err := r.next(ctx)
	if err != nil {
		return nil, err
	}
	meta, err := msg.Metadata()
	switch {
	case err != nil:
		return nil, err
	case meta.Sequence.Consumer != r.delivered+1:
		return nil, r.failed(
			fmt.Errorf("delivery %d came where %d was due", meta.Sequence.Consumer, r.delivered+1),
		)
	case meta.Sequence.Stream <= r.last:
		return nil, r.failed(fmt.Errorf("sequence %d came after %d", meta.Sequence.Stream, r.last))
	}
	r.delivered++
	r.remade = 0
	r.last = meta.Sequence.Stream
	return &stream.Message{
		Subject: msg.Subject(), Header: msg.Headers(), Data: msg.Data(), Sequence: r.last,
		Time: meta.Timestamp, Replay: r.source.replay,
	}, nil
}

// Check asks the server what it has delivered. A message that is still on its way has a second, and until the
// next call.
func (r *streamReader) Check(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	var info *jetstream.ConsumerInfo
	var err error
	if !r.gone {
		info, err = r.cons.Info(ctx)
		r.gone = errors.Is(err, jetstream.ErrConsumerNotFound)
	}
	if r.gone {
		return max(r.last, r.handed), nil // what it had handed out is here
	}
	if err != nil {
		return 0, r.failed(err)
	}
	if info.Delivered.Consumer <= r.delivered || r.come() > 0 {
		r.overdue = 0
	} else if r.overdue != r.delivered+1 {
		r.overdue, r.noticed = r.delivered+1, time.Now()
	} else if time.Since(r.noticed) >= time.Second {
		return 0, r.failed(fmt.Errorf("delivery %d never came", r.overdue))
	}
	r.handed = info.Delivered.Stream
	return r.handed, nil
}

func (r *streamReader) Buffered() int {
	if n := r.come(); n > 0 || r.overdue <= r.delivered {
		return n
	}
	return 1 // it is on its way
}

// come is how many messages are here that Read has not returned.
func (r *streamReader) come() int {
	if r.pulled == nil {
		return 0
	}
	return len(r.pulled.Messages())
}

// Close lets the server remove the consumer. If it is not asked, it does that by itself after a while.
func (r *streamReader) Close() {
	r.close()
	r.source.js.Conn().RemoveStatusListener(r.status)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = r.source.js.DeleteConsumer(ctx, r.source.stream, r.name)
}

// replayStream is the stream into which events of a stream are replayed.
func replayStream(stream string) string { return stream + "_replay" }

// replayPrefix precedes the public subject of an event that is replayed to a consumer.
func replayPrefix(stream, consumer string) string {
	return "_outflow_replay." + stream + "." + consumer + "."
}
