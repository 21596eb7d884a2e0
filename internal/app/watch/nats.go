package watch

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

const (
	// MaxConsumers is how many consumers a reading has at most: those that are farthest behind.
	MaxConsumers = 100

	// A list of consumers makes the server ask the leader of each, so it is asked for less often, and of no
	// more than so many at a time: the next reading goes on from there, up to so many parts.
	listEvery = 5 // readings

	// ListInterval is how often that happens on a standby. Maintenance and partitions are read with it.
	ListInterval = listEvery * StandbyInterval

	partSize  = 1024
	mostParts = 64
)

// natsSide reads NATS. It belongs to one goroutine.
//
// Its connection is not the pipeline's: that one is closed while NATS is thought to be away, and a session's
// is opened and closed with the session.
type natsSide struct {
	w       *Watcher
	conn    *sink.Conn // nil: none is open
	reading int        // how many this connection has had
	noList  bool       // the user may not list consumers: not asked again over this connection
	once    bool       // there is one reading only: it takes every part of the list

	size  int             // of a part of the list of consumers; 0: partSize
	parts []consumersPart // as each was last read
	next  int             // the part to read
}

// consumersPart is what is kept of a part of the list: those that may be among the farthest behind of all.
type consumersPart struct {
	kept []Consumer
	over int // left out
}

func (n *natsSide) read(ctx context.Context) error {
	if n.conn == nil {
		sc, err := wiring.Broker(n.w.cfg.Config, n.w.cfg.Logger)
		if err != nil {
			return err
		}
		sc.Name += " watcher"
		conn, err := wiring.Connect(ctx, n.w.cfg.Config, sc)
		if err != nil {
			return err
		}
		n.conn, n.reading, n.noList, n.parts, n.next = conn, 0, false, nil, 0
	}
	if err := n.conn.Err(); err != nil {
		return err
	}
	server, err := n.account(ctx)
	if err != nil {
		return err
	}
	stream, err := n.stream(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	n.w.update(func(r *Reading) {
		r.NATS, r.Stream = *server, *stream
		r.NATS.fresh(now)
		r.Stream.fresh(now)
		if !stream.Exists { // and its consumers went with it
			r.Consumers, r.ConsumersLeftOut = nil, 0
			r.ConsumerList.fresh(now)
		}
	})
	n.reading++
	if n.reading%listEvery == 1 {
		n.maintained(ctx)
	}
	if stream.Exists && !n.noList && n.reading%listEvery == 1 {
		for n.consumers(ctx) && n.once && n.next > 0 {
		}
	}
	return nil
}

func (n *natsSide) failed(err error, now time.Time) {
	n.w.update(func(r *Reading) {
		r.NATS.failed(err, now)
		r.Stream.failed(err, now)
		r.ConsumerList.failed(err, now)
		r.Maintenance.failed(err, now)
	})
}

func (n *natsSide) close() {
	if n.conn != nil {
		n.conn.Close()
		n.conn = nil
	}
}

func (n *natsSide) account(ctx context.Context) (*NATS, error) {
	var answer struct {
		jsapi.Answer
		Storage uint64 `json:"storage"`
		Limits  struct {
			MaxStorage int64 `json:"max_storage"`
		} `json:"limits"`
	}
	asked := time.Now()
	if err := n.conn.API().Ask(ctx, "INFO", nil, &answer); err != nil {
		return nil, err
	}
	nc := n.conn.NATS()
	var certificates []Certificate
	if state, err := nc.TLSConnectionState(); err == nil { // else there is no TLS
		certificates = Certificates(state.PeerCertificates, nc.Opts.TLSConfig, nc.Opts.TLSCertCB)
	}
	return &NATS{
		Certificates: certificates,
		Server:       strings.TrimSpace(nc.ConnectedServerName() + " " + nc.ConnectedAddr()),
		Version:      nc.ConnectedServerVersion(), RoundTrip: time.Since(asked),
		Storage: answer.Storage, StorageLimit: uint64(max(answer.Limits.MaxStorage, 0)),
	}, nil
}

func (n *natsSide) stream(ctx context.Context) (*Stream, error) {
	name := n.w.cfg.Stream
	answer, err := jsapi.Stream[struct {
		MaxBytes int64  `json:"max_bytes"`
		Discard  string `json:"discard"`
	}](ctx, n.conn.API(), name)
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", name, err)
	}
	if answer == nil {
		return &Stream{}, nil
	}
	st := &answer.State
	s := &Stream{
		Exists: true, Messages: st.Messages, Bytes: st.Bytes,
		MaxBytes: uint64(max(answer.Config.MaxBytes, 0)), Refuses: answer.Config.Discard == "new",
		FirstSeq: st.First, LastSeq: st.Last,
	}
	if answer.Cluster != nil {
		s.Leader, s.Replicas = answer.Cluster.Leader, answer.Cluster.Replicas
	}
	if st.Last > 0 {
		s.LastTime = st.LastTime
	}
	slices.SortFunc(s.Replicas, func(a, b Replica) int { return cmp.Compare(a.Name, b.Name) })
	return s, nil
}

// consumers lists the stream's durable consumers and the readers of package consumer, of very many a part.
// Without that list everything else is still true, so an error is only said beside it; read is false then.
func (n *natsSide) consumers(ctx context.Context) (read bool) {
	var all []Consumer
	seen := map[string]bool{} // others may come between two pages, and move one to the next
	size, total := cmp.Or(n.size, partSize), 0
	end := (n.next + 1) * size
	for offset := n.next * size; ; {
		var page struct {
			jsapi.Answer
			Total     int            `json:"total"`
			Consumers []consumerInfo `json:"consumers"`
		}
		err := n.conn.API().Ask(ctx, "CONSUMER.LIST."+n.w.cfg.Stream, map[string]int{"offset": offset},
			&page)
		if err != nil {
			f := outbox.FaultOf(err)
			n.noList = f != nil && f.Code == "nats_permission"
			now := time.Now()
			n.w.update(func(r *Reading) { r.ConsumerList.failed(err, now) })
			return false
		}
		for i := range page.Consumers {
			c := &page.Consumers[i]
			if of := c.Config.Durable + c.Config.Metadata.Of; of != "" && !seen[c.Name] {
				all = append(all, c.consumer())
				seen[c.Name] = true
			}
		}
		offset, total = offset+len(page.Consumers), page.Total
		if len(page.Consumers) == 0 || offset >= min(total, end) {
			break
		}
	}
	all, left := n.merge(all)
	left += max(total-len(n.parts)*size, 0) // not read yet
	if n.next++; end >= total || n.next == mostParts {
		n.parts, n.next = n.parts[:n.next], 0
	}
	now := time.Now()
	n.w.update(func(r *Reading) {
		r.Consumers, r.ConsumersLeftOut = all, left
		r.ConsumerList.fresh(now)
	})
	return true
}

// merge returns the consumers that are farthest behind: of those in the part that was read now, and of those
// in the other parts, as they were last read; and how many it leaves out.
func (n *natsSide) merge(read []Consumer) (all []Consumer, left int) {
	kept, over := farthestBehind(read)
	if n.next == len(n.parts) {
		n.parts = append(n.parts, consumersPart{})
	}
	n.parts[n.next] = consumersPart{kept, over}
	all = slices.Clone(kept) // first: one that is in two parts counts as it was read now
	for i := range n.parts {
		left += n.parts[i].over
		if i != n.next {
			all = append(all, n.parts[i].kept...)
		}
	}
	all, over = farthestBehind(all)
	return all, left + over
}

// farthestBehind returns the consumers with the most pending messages, sorted by name, and how many it leaves
// out. One that two parts of a list have, because others came meanwhile, is one, and so are the readers of a
// consumer.
func farthestBehind(all []Consumer) (kept []Consumer, over int) {
	byName := func(a, b Consumer) int { return cmp.Compare(a.Name, b.Name) }
	slices.SortStableFunc(all, func(a, b Consumer) int { // a durable goes before readers of its name
		return cmp.Or(byName(a, b), cmp.Compare(min(a.Readers, 1), min(b.Readers, 1)))
	})
	for i := range all {
		if n := len(kept); n == 0 || kept[n-1].Name != all[i].Name {
			kept = append(kept, all[i])
		} else if kept[n-1].Readers > 0 && all[i].Readers > 0 {
			kept[n-1].join(&all[i])
		}
	}
	all = kept
	slices.SortStableFunc(all, func(a, b Consumer) int { return cmp.Compare(b.Pending, a.Pending) })
	if over = len(all) - MaxConsumers; over > 0 {
		all = all[:MaxConsumers]
	}
	slices.SortFunc(all, byName)
	return all, max(over, 0)
}

// consumerInfo is what is read of a consumer in the answer to CONSUMER.LIST.
type consumerInfo struct {
	Name   string `json:"name"`
	Config struct {
		Durable  string `json:"durable_name"`
		Metadata struct {
			Of string `json:"outflow.consumer"` // the consumer of package consumer that reads with it
		} `json:"metadata"`
	} `json:"config"`
	AckFloor struct {
		Seq  uint64    `json:"stream_seq"`
		Last time.Time `json:"last_active"`
	} `json:"ack_floor"`
	AckPending  int    `json:"num_ack_pending"`
	Redelivered int    `json:"num_redelivered"`
	Waiting     int    `json:"num_waiting"`
	Pending     uint64 `json:"num_pending"`
	Paused      bool   `json:"paused"`
}

func (c *consumerInfo) consumer() Consumer {
	made := Consumer{Name: c.Name, Pending: c.Pending, AckPending: c.AckPending, Redelivered: c.Redelivered,
		Waiting: c.Waiting, AckFloor: c.AckFloor.Seq, LastAck: c.AckFloor.Last, Paused: c.Paused}
	if c.Config.Durable == "" {
		made.Name, made.Readers = c.Config.Metadata.Of, 1
	}
	return made
}

// join adds another reader of the same consumer. It is as far as the one that is farthest behind.
func (c *Consumer) join(other *Consumer) {
	c.Readers += other.Readers
	c.Pending, c.AckFloor = max(c.Pending, other.Pending), min(c.AckFloor, other.AckFloor)
	c.AckPending, c.Waiting = c.AckPending+other.AckPending, c.Waiting+other.Waiting
	if other.LastAck.After(c.LastAck) {
		c.LastAck = other.LastAck
	}
}
