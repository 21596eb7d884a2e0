package sink

import (
	"context"
	"slices"
	"sync"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
)

// What is read of the stream at a time: messages at first, while nobody knows how large they are; then so many bytes, so many messages.
const (
	readFirst = 4
	readBytes = 4 << 20
	readMost  = 256
)

// Stored reads, through the leader, the messages of sequences above one and up to another, but only the last of them: as many as can
// have been in flight beside the one at upTo. If a message of ours was refused for a stranger's and those behind it were stored, his is
// among them. What can't be read is left out. The answer is in ascending order.
func (c *Conn) Stored(ctx context.Context, above, upTo uint64) ([]relay.Stored, error) {
	var all []relay.Stored // descending
	bytes, at := 0, readFirst
	for seq := upTo; seq > above && upTo-seq < maxInFlight && bytes < maxInFlightBytes; {
		n := min(uint64(at), seq-above, maxInFlight-(upTo-seq))
		found, err := c.messages(ctx, seq-n+1, seq)
		if err != nil {
			return nil, err
		}
		largest := 1
		for _, m := range slices.Backward(found) {
			if m != nil {
				bytes += len(m.Data) // without what a batch adds to it
				largest = max(largest, len(m.Header)+len(m.Data))
				all = append(all, relay.Stored{Seq: m.Seq, Header: packedHeader(m.Header)})
			}
		}
		seq -= n
		at = min(max(readBytes/largest, 1), readMost)
	}
	slices.Reverse(all)
	return all, nil
}

// messages asks for all messages of the sequences at the same time. Those that can't be read are nil.
func (c *Conn) messages(ctx context.Context, first, last uint64) ([]*jsapi.Message, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found := make([]*jsapi.Message, last-first+1)
	var asked sync.WaitGroup
	for i := range found {
		asked.Add(1)
		go func() {
			defer asked.Done()
			m, err := c.api.Message(ctx, c.cfg.Stream, jsapi.MessageRequest{Seq: first + uint64(i)})
			if err != nil {
				cancel(err) // the first one counts
			}
			found[i] = m
		}()
	}
	asked.Wait()
	return found, context.Cause(ctx)
}
