package stream

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

type streamInfo = jsapi.StreamInfo[Config]

// info asks for the stream; nil if there is none. An answer that names no leader comes from a follower, which
// may lag: it does not count.
func (s *Stream) info(ctx context.Context) (*streamInfo, error) {
	info, err := jsapi.Stream[Config](ctx, s.api, s.name)
	if err == nil && info != nil && !info.Led() {
		return nil, transient("no_leader", fmt.Sprintf("stream %s has no leader", s.name))
	}
	return info, err
}

// State reads the stream's state and its newest message, through the leader. An error, unless it says
// otherwise, means that the state is not known now.
func (s *Stream) State(ctx context.Context) (relay.StreamState, error) {
	st, consumers, err := s.state(ctx)
	if err == nil && consumers > 0 {
		listCtx, cancel := context.WithTimeout(ctx, listTimeout)
		defer cancel()
		last := st.LastSeq
		if st.NewestSeq > 0 {
			last = st.NewestSeq // the end may be missing without the sequence having gone back
		}
		var listErr error
		if st.Durables, listErr = s.durablesAt(listCtx, last); listErr != nil {
			s.log.Debug("the stream's consumers can't be listed now", "err", listErr)
		}
	}
	return st, err
}

// Tail is State without the list of consumers, which costs the server much where there are many. Messages may
// be published meanwhile: where the newest one was replaced before it could be read (max_msgs_per_subject, a
// low max_msgs), that is a fault of class Transient with code relay.CodeStreamMoved. Beside an error the
// state says Open alone, if that is known.
func (s *Stream) Tail(ctx context.Context) (relay.StreamState, error) {
	st, _, err := s.state(ctx)
	return st, err
}

func (s *Stream) state(ctx context.Context) (st relay.StreamState, consumers int, err error) {
	info, err := s.info(ctx)
	switch {
	case err != nil:
		return st, 0, err
	case info == nil: // nobody says how many replicas it had
		return relay.StreamState{Replicated: s.api.Clustered()}, 0, nil
	}
	if f := outbox.FaultOf(info.Config.check()); f != nil && slices.Contains(opens, f.Code) {
		st.Open = f.Message
	}
	newest, err := s.newest(ctx, info)
	if err != nil {
		return st, 0, err
	}
	st = relay.StreamState{
		Open:   st.Open,
		Exists: true, Created: info.Created, LastSeq: info.State.Last, LastTime: info.State.LastTime,
		FirstSeq: info.State.First, Messages: info.State.Messages,
		Replicated: info.Config.Replicas > 1, Now: info.Now,
		Restoring: info.Config.Metadata[MetadataRestoring], Restored: info.Config.Metadata[MetadataRestored],
	}
	// What can't be read explains nothing: then the messages are missing.
	st.Erased, _ = outbox.ParseSequences(info.Config.Metadata[outbox.MetadataErased])
	if newest != nil {
		st.NewestSeq, st.Newest, st.Cut = newest.Seq, HeaderOf(newest.Header), CutOf(newest)
	}
	return st, info.State.Consumers, nil
}

// Cuts counts the cuts that are in the stream.
func (s *Stream) Cuts(ctx context.Context) (int, error) {
	var info struct {
		jsapi.Answer
		State struct {
			Subjects map[string]int `json:"subjects"`
		} `json:"state"`
		Cluster *jsapi.Cluster `json:"cluster"`
	}
	request := map[string]string{"subjects_filter": outbox.CutSubject}
	err := s.api.Ask(ctx, "STREAM.INFO."+s.name, request, &info)
	if err == nil && info.Cluster != nil && info.Cluster.Leader == "" {
		err = transient("no_leader", fmt.Sprintf("stream %s has no leader", s.name))
	}
	return info.State.Subjects[outbox.CutSubject], err
}

// listTimeout is how long the list of consumers may take. It is for messages only, and the server asks each
// consumer's leader for it: seconds while one is away. No start waits for that.
const listTimeout = 250 * time.Millisecond

// newest finds the newest message that can be read; nil if none can. Mostly it is the one at the last
// sequence. Where that one is missing although there are messages, a broker has lost the end of its file and
// kept the count, or somebody deleted it.
func (s *Stream) newest(ctx context.Context, info *streamInfo) (*jsapi.Message, error) {
	st := &info.State
	if st.Last == 0 {
		return nil, s.confirmEmpty(ctx, 1)
	}
	m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: st.Last})
	if m != nil || err != nil {
		return m, err
	}
	if st.Messages == 0 {
		return nil, s.confirmEmpty(ctx, st.First)
	}
	if m, err = s.newestBelow(ctx, st.First, st.Last); err != nil {
		return nil, err
	}
	// Retention may have taken the messages while we looked.
	again, err := s.info(ctx)
	switch {
	case err != nil:
		return nil, err
	case again == nil || again.Created != info.Created || again.State.Last != st.Last ||
		again.State.Messages == 0 || m == nil && again.State.First != st.First:
		return nil, transient(relay.CodeStreamMoved, fmt.Sprintf("stream %s changed while it was read",
			s.name))
	}
	return m, nil
}

// newestBelow finds the newest message from first on and below last; nil if there is none. It searches by
// halves: "is there a message at or above this sequence" is what next_by_subj answers, and the server answers
// that from the messages themselves. (last_by_subj ">" goes by the last sequence and finds nothing here.)
func (s *Stream) newestBelow(ctx context.Context, first, last uint64) (*jsapi.Message, error) {
	var found *jsapi.Message
	for first < last {
		mid := first + (last-first)/2
		m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: mid, Next: ">"})
		switch {
		case err != nil:
			return nil, err
		case m == nil || m.Seq >= last:
			last = mid
		default:
			found, first = m, m.Seq+1
		}
	}
	return found, nil
}

// confirmEmpty takes "empty" from the leader only: an answer to STREAM.INFO may be stale.
func (s *Stream) confirmEmpty(ctx context.Context, first uint64) error {
	m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: max(first, 1), Next: ">"})
	if err == nil && m != nil {
		return transient(relay.CodeStreamMoved,
			fmt.Sprintf("stream %s says that it is empty, but has a message at %d", s.name, m.Seq))
	}
	return err
}

// durablesAt lists the durable consumers that have come to the newest message, or beyond it. If the stream
// lost its end, they are those that may have had what is lost: a server that starts with the shortened stream
// sets them back to its end. Without the permission to list consumers there is no such list.
func (s *Stream) durablesAt(ctx context.Context, last uint64) ([]string, error) {
	if s.noList.Load() {
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
		err := s.api.Ask(ctx, "CONSUMER.LIST."+s.name, map[string]int{"offset": offset}, &page)
		if f := outbox.FaultOf(err); f != nil && f.Code == "nats_permission" {
			s.noList.Store(true)
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
