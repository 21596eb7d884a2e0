package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// streamSource is a JetStream stream, read through a durable pull consumer.
type streamSource struct {
	js       jetstream.JetStream
	stream   string
	filters  []string // {">"}: everything
	durable  string
	window   int               // most unacknowledged messages
	metadata map[string]string // of the durable, for `outflow consumer`
	replay   bool
}

// ackWait is long because a session never relies on redelivery: the next session reads from the offset. A
// message that is not done in that time is redelivered, which ends the session.
const ackWait = 12 * time.Hour

// apiTimeout bounds each request to JetStream's API.
const apiTimeout = 5 * time.Second

// ask sends a request to JetStream's API.
func (s *streamSource) ask(ctx context.Context, method string, request, answer any) error {
	o := s.js.Options()
	prefix := jetstream.DefaultAPIPrefix
	if o.Domain != "" {
		prefix = "$JS." + o.Domain + ".API."
	} else if o.APIPrefix != "" {
		prefix = strings.TrimSuffix(o.APIPrefix, ".") + "."
	}
	var body []byte
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	m, err := s.js.Conn().RequestWithContext(ctx, prefix+method, body)
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
	st := stream.State{Created: a.Created.Truncate(time.Microsecond), First: a.State.FirstSeq,
		Last: a.State.LastSeq}
	if a.State.Msgs == 0 {
		st.First = a.State.LastSeq + 1
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

// Open deletes the durable and creates it anew, which cuts off any earlier reader.
func (s *streamSource) Open(ctx context.Context, after uint64) (stream.Reader, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*apiTimeout)
	defer cancel()
	if err := s.js.DeleteConsumer(ctx, s.stream, s.durable); err != nil &&
		!errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil, fmt.Errorf("durable %s: delete: %w", s.durable, err)
	}
	config := jetstream.ConsumerConfig{
		Durable: s.durable, Description: "Outflow consumer: made anew by it at each start",
		Metadata:      s.metadata,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1,
		AckPolicy: jetstream.AckAllPolicy, AckWait: ackWait, MaxAckPending: s.window,
	}
	if len(s.filters) > 1 || s.filters[0] != ">" {
		config.FilterSubjects = s.filters
	}
	cons, err := s.js.CreateConsumer(ctx, s.stream, config)
	if err != nil {
		return nil, fmt.Errorf("durable %s: %w", s.durable, err)
	}
	r := &streamReader{source: s, cons: cons, last: after,
		status: s.js.Conn().StatusChanged(nats.RECONNECTING, nats.CLOSED)}
	r.open, r.close = context.WithCancel(context.Background())
	return r, nil
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
	most := max(pullBytes, int(r.source.js.Conn().MaxPayload())+64<<10)
	pulled, err := r.cons.Fetch(min(pullMessages, r.source.window), jetstream.FetchMaxBytes(most),
		jetstream.FetchHeartbeat(pullHeartbeat), jetstream.FetchContext(r.open))
	if err != nil {
		return fmt.Errorf("durable %s: %w", r.source.durable, err)
	}
	r.pulled = pulled
	return nil
}

// streamReader reads from a durable. The durable's own sequence shows whether every message came here: it
// rises by one with each delivery, whoever the receiver is.
type streamReader struct {
	source *streamSource
	cons   jetstream.Consumer
	open   context.Context // until Close
	close  context.CancelFunc
	status chan nats.Status // reports a lost connection: the messages that were asked for never come

	pulled jetstream.MessageBatch // nil: no pull is outstanding

	last      uint64 // stream sequence of the newest message read
	delivered atomic.Uint64
	waiting   atomic.Bool   // Read is waiting
	overdue   atomic.Uint64 // the delivery that Check last found handed out but not read; 0: none

	mu      sync.Mutex
	replies []reply // of unacknowledged messages
}

type reply struct {
	seq     uint64
	subject string
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
			if r.pulled = nil; err != nil {
				return nil, fmt.Errorf("durable %s: %w", r.source.durable, err)
			}
		case status := <-r.status:
			return nil, fmt.Errorf("durable %s: the connection to NATS is %v", r.source.durable, status)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (r *streamReader) Read(ctx context.Context) (*stream.Message, error) {
	r.waiting.Store(true)
	msg, err := r.next(ctx)
	r.waiting.Store(false)
	if err != nil {
		return nil, err
	}
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	want := r.delivered.Load() + 1
	switch {
	case meta.Sequence.Consumer != want:
		return nil, fmt.Errorf("durable %s: delivery %d where %d was due: something else reads from it",
			r.source.durable, meta.Sequence.Consumer, want)
	case meta.NumDelivered != 1:
		return nil, fmt.Errorf("durable %s: sequence %d was delivered %d times", r.source.durable,
			meta.Sequence.Stream, meta.NumDelivered)
	case meta.Sequence.Stream <= r.last:
		return nil, fmt.Errorf("durable %s: sequence %d after %d", r.source.durable, meta.Sequence.Stream,
			r.last)
	}
	r.delivered.Store(want)
	r.last = meta.Sequence.Stream
	r.mu.Lock()
	r.replies = append(r.replies, reply{r.last, msg.Reply()})
	r.mu.Unlock()
	return &stream.Message{
		Subject: msg.Subject(), Header: msg.Headers(), Data: msg.Data(), Sequence: r.last,
		Time: meta.Timestamp, Replay: r.source.replay,
	}, nil
}

func (r *streamReader) Ack(seq uint64) error {
	r.mu.Lock()
	n := 0
	for n < len(r.replies) && r.replies[n].seq <= seq {
		n++
	}
	if n == 0 {
		r.mu.Unlock()
		return nil
	}
	subject := r.replies[n-1].subject
	r.replies = append(r.replies[:0], r.replies[n:]...)
	r.mu.Unlock()
	return r.source.js.Conn().Publish(subject, []byte("+ACK"))
}

// Check asks the durable what it has delivered. A message that is still on its way has until the next call.
func (r *streamReader) Check(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	before := r.delivered.Load()
	info, err := r.cons.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("durable %s: %w", r.source.durable, err)
	}
	if !r.waiting.Load() || info.Delivered.Consumer <= before {
		r.overdue.Store(0)
	} else if r.overdue.Swap(before+1) == before+1 && r.delivered.Load() == before {
		return 0, fmt.Errorf("durable %s: delivery %d never came: something else reads from it",
			r.source.durable, before+1)
	}
	return info.Delivered.Stream, nil
}

func (r *streamReader) Close() {
	r.close()
	r.source.js.Conn().RemoveStatusListener(r.status)
}

// replayStream is the stream into which events of a stream are replayed.
func replayStream(stream string) string { return stream + "_replay" }

// replayPrefix precedes the public subject of an event that is replayed to a consumer.
func replayPrefix(stream, consumer string) string {
	return "_outflow_replay." + stream + "." + consumer + "."
}
