package sink

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// streamInfo is what we read of the answer to STREAM.INFO.
type streamInfo struct {
	jsapi.Answer
	Config  streamConfig `json:"config"`
	Created time.Time    `json:"created"`
	Now     time.Time    `json:"ts"`
	State   struct {
		Messages  uint64 `json:"messages"`
		FirstSeq  uint64 `json:"first_seq"`
		LastSeq   uint64 `json:"last_seq"`
		Consumers int    `json:"consumer_count"`
	} `json:"state"`
	Cluster *struct {
		Leader string `json:"leader"`
	} `json:"cluster"`
}

// streamInfo asks for the stream; nil if there is none. An answer that names no leader comes from a follower, which may lag: it
// does not count.
func (c *Conn) streamInfo(ctx context.Context) (*streamInfo, error) {
	var info streamInfo
	err := c.api.Ask(ctx, "STREAM.INFO."+c.cfg.Stream, nil, &info)
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	case info.Cluster != nil && info.Cluster.Leader == "":
		return nil, transient("no_leader", fmt.Sprintf("stream %s has no leader", c.cfg.Stream), nil)
	}
	return &info, nil
}

// State reads the stream's state and its newest message, through the leader. An error, unless it says otherwise, means that the
// state is not known now.
func (c *Conn) State(ctx context.Context) (relay.StreamState, error) {
	s, consumers, err := c.state(ctx)
	if err == nil && consumers > 0 {
		listCtx, cancel := context.WithTimeout(ctx, listTimeout)
		defer cancel()
		last := s.LastSeq
		if s.NewestSeq > 0 {
			last = s.NewestSeq // the end may be missing without the sequence having gone back
		}
		var listErr error
		if s.Durables, listErr = c.durablesAt(listCtx, last); listErr != nil {
			c.cfg.Logger.Debug("the stream's consumers can't be listed now", "err", listErr)
		}
	}
	return s, err
}

// Tail is State without the list of consumers, which costs the server much where there are many. Messages may be published
// meanwhile: where the newest one was replaced before it could be read (max_msgs_per_subject, a low max_msgs), that is a fault of
// class Transient with code relay.CodeStreamMoved.
func (c *Conn) Tail(ctx context.Context) (relay.StreamState, error) {
	s, _, err := c.state(ctx)
	return s, err
}

func (c *Conn) state(ctx context.Context) (s relay.StreamState, consumers int, err error) {
	info, err := c.streamInfo(ctx)
	if err != nil || info == nil {
		return s, 0, err
	}
	newest, err := c.newest(ctx, info)
	if err != nil {
		return s, 0, err
	}
	s = relay.StreamState{
		Exists: true, Created: info.Created, LastSeq: info.State.LastSeq, Messages: info.State.Messages,
		Replicated: info.Config.Replicas > 1, Now: info.Now,
	}
	if newest != nil {
		s.NewestSeq, s.Newest = newest.Seq, packedHeader(newest.Header)
	}
	return s, info.State.Consumers, nil
}

// listTimeout is how long the list of consumers may take. It is for messages only, and the server asks each consumer's leader for it:
// seconds while one is away. No start waits for that.
const listTimeout = 250 * time.Millisecond

// newest finds the newest message that can be read; nil if none can. Mostly it is the one at the last sequence. Where that one is
// missing although there are messages, a broker has lost the end of its file and kept the count, or somebody deleted it.
func (c *Conn) newest(ctx context.Context, info *streamInfo) (*jsapi.Message, error) {
	s := &info.State
	if s.LastSeq == 0 {
		return nil, c.confirmEmpty(ctx, 1)
	}
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: s.LastSeq})
	if m != nil || err != nil {
		return m, err
	}
	if s.Messages == 0 {
		return nil, c.confirmEmpty(ctx, s.FirstSeq)
	}
	if m, err = c.newestBelow(ctx, s.FirstSeq, s.LastSeq); err != nil {
		return nil, err
	}
	// Retention may have taken the messages while we looked.
	again, err := c.streamInfo(ctx)
	switch {
	case err != nil:
		return nil, err
	case again == nil || again.Created != info.Created || again.State.LastSeq != s.LastSeq || again.State.Messages == 0 || m == nil && again.State.FirstSeq != s.FirstSeq:
		return nil, transient(relay.CodeStreamMoved, fmt.Sprintf("stream %s changed while it was read", c.cfg.Stream), nil)
	}
	return m, nil
}

// newestBelow searches by halves: "is there a message at or above this sequence" is what next_by_subj answers, and it is found by
// walking the messages themselves. (last_by_subj ">" goes by the last sequence and finds nothing here.)
func (c *Conn) newestBelow(ctx context.Context, first, last uint64) (*jsapi.Message, error) {
	var found *jsapi.Message
	for first < last {
		mid := first + (last-first)/2
		m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: mid, Next: ">"})
		switch {
		case err != nil:
			return nil, err
		case m == nil:
			last = mid
		default:
			found, first = m, m.Seq+1
		}
	}
	return found, nil
}

// confirmEmpty takes "empty" from the leader only: an answer to STREAM.INFO may be stale.
func (c *Conn) confirmEmpty(ctx context.Context, first uint64) error {
	m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: max(first, 1), Next: ">"})
	if err == nil && m != nil {
		return transient(relay.CodeStreamMoved, fmt.Sprintf("stream %s says that it is empty, but has a message at %d", c.cfg.Stream, m.Seq), nil)
	}
	return err
}

// durablesAt lists the durable consumers that have come to the newest message, or beyond it. If the stream lost its end, they are those
// that may have had what is lost: a server that starts with the shortened stream sets them back to its end. Without the permission
// to list consumers there is no such list.
func (c *Conn) durablesAt(ctx context.Context, last uint64) ([]string, error) {
	c.mu.Lock()
	skip := c.noListed
	c.mu.Unlock()
	if skip {
		return nil, nil
	}
	var names []string
	for offset := 0; ; {
		var page struct {
			jsapi.Answer
			Total     int `json:"total"`
			Consumers []struct {
				Name   string `json:"name"`
				Config struct {
					Durable string `json:"durable_name"`
				} `json:"config"`
				Delivered seqs `json:"delivered"`
				AckFloor  seqs `json:"ack_floor"`
			} `json:"consumers"`
		}
		err := c.api.Ask(ctx, "CONSUMER.LIST."+c.cfg.Stream, map[string]int{"offset": offset}, &page)
		if f := outbox.FaultOf(err); f != nil && f.Code == "nats_permission" {
			c.mu.Lock()
			c.noListed = true
			c.mu.Unlock()
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for _, k := range page.Consumers {
			if k.Config.Durable != "" && max(k.AckFloor.Stream, k.Delivered.Stream) >= last {
				names = append(names, k.Name)
			}
		}
		if offset += len(page.Consumers); len(page.Consumers) == 0 || offset >= page.Total {
			slices.Sort(names)
			return names, nil
		}
	}
}

type seqs struct {
	Stream uint64 `json:"stream_seq"`
}
