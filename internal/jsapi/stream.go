package jsapi

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// StreamInfo is what JetStream says of a stream; C is what the caller reads of its configuration. It may come
// from a follower: see Led.
type StreamInfo[C any] struct {
	Answer
	Config  C           `json:"config"`
	Created time.Time   `json:"created"`
	Now     time.Time   `json:"ts"` // by the clock of the server that answered; zero if it does not say
	State   StreamState `json:"state"`
	Cluster *Cluster    `json:"cluster"` // nil: the server does not say
}

// StreamState is what a stream holds.
type StreamState struct {
	Messages  uint64    `json:"messages"`
	Bytes     uint64    `json:"bytes"`
	First     uint64    `json:"first_seq"`
	Last      uint64    `json:"last_seq"` // of an empty stream: the sequence of the message it last had
	LastTime  time.Time `json:"last_ts"`  // when the last message was stored; not zero in an empty stream
	Deleted   uint64    `json:"num_deleted"`
	Subjects  uint64    `json:"num_subjects"`
	Consumers int       `json:"consumer_count"`
}

// Cluster is where a stream's replicas are; Replicas are those beside the leader.
type Cluster struct {
	Leader   string    `json:"leader"`
	Replicas []Replica `json:"replicas"`
}

// Replica is a follower of a stream's leader.
type Replica struct {
	Name    string        `json:"name"`
	Current bool          `json:"current"`
	Offline bool          `json:"offline"`
	Lag     uint64        `json:"lag"`    // operations
	Active  time.Duration `json:"active"` // since the leader last heard of it
}

// Led reports whether the answer is that of the stream's leader, as far as it says. Without a leader another
// server answers, which may lag: nobody may conclude from it that messages are missing.
func (s *StreamInfo[C]) Led() bool { return s.Cluster == nil || s.Cluster.Leader != "" }

// Stream asks for a stream; nil if there is none.
func Stream[C any](ctx context.Context, c *Client, name string) (*StreamInfo[C], error) {
	var info StreamInfo[C]
	err := c.Ask(ctx, "STREAM.INFO."+name, nil, &info)
	if Refused(err, jetstream.JSErrCodeStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &info, nil
}

// listTries is how often a list is begun while streams come and go.
const listTries = 10

// Streams lists the streams that take a subject, or a part of it.
func (c *Client) Streams(ctx context.Context, subject string) (names []string, err error) {
	for tries := 0; ; {
		var page struct {
			Answer
			Total   int      `json:"total"`
			Streams []string `json:"streams"`
		}
		request := map[string]any{"subject": subject, "offset": max(len(names)-1, 0)}
		if err := c.Ask(ctx, "STREAM.NAMES", request, &page); err != nil {
			return nil, err
		}
		if n := len(names); n > 0 {
			// Each page begins with the last stream of the one before, or one was deleted and all moved up.
			if len(page.Streams) < 2 || page.Streams[0] != names[n-1] {
				if tries++; tries == listTries {
					return nil, errors.New("list the account's streams: they change all the time: " +
						"run it again")
				}
				names = nil
				continue
			}
			page.Streams = page.Streams[1:]
		}
		names = append(names, page.Streams...)
		if len(page.Streams) == 0 || len(names) >= page.Total {
			return names, nil
		}
	}
}
