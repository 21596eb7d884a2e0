package stream

import (
	"context"
	"slices"
	"sync"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
)

// How much is read at a time: a few messages at first, while their size is unknown; then about so many bytes,
// at most so many messages.
const (
	readFirst = 4
	readBytes = 4 << 20
	readMost  = 256
)

// Last reads, through the leader, the last messages of the sequences above one and up to another: at most
// maxMessages, and no more once they have maxBytes. What can't be read is left out. The answer is in
// ascending order.
func (s *Stream) Last(ctx context.Context, above, upTo, maxMessages uint64, maxBytes int) ([]relay.Stored,
	error) {
	var all []relay.Stored // descending
	bytes, at := 0, readFirst
	for seq := upTo; seq > above && upTo-seq < maxMessages && bytes < maxBytes; {
		n := min(uint64(at), seq-above, maxMessages-(upTo-seq))
		found, err := s.messages(ctx, seq-n+1, seq)
		if err != nil {
			return nil, err
		}
		largest := 1
		for _, m := range slices.Backward(found) {
			if m != nil {
				bytes += len(m.Data) // without what a batch adds to it
				largest = max(largest, len(m.Header)+len(m.Data))
				all = append(all, relay.Stored{Seq: m.Seq, Header: HeaderOf(m.Header), Cut: CutOf(m),
					Time: m.Time})
			}
		}
		seq -= n
		at = min(max(readBytes/largest, 1), readMost)
	}
	slices.Reverse(all)
	return all, nil
}

// messages asks for all messages of the sequences at once. Those that can't be read are nil.
func (s *Stream) messages(ctx context.Context, first, last uint64) ([]*jsapi.Message, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found := make([]*jsapi.Message, last-first+1)
	var asked sync.WaitGroup
	for i := range found {
		asked.Add(1)
		go func() {
			defer crash.Guard()
			defer asked.Done()
			m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Seq: first + uint64(i)})
			if err != nil {
				cancel(err) // the first one counts
			}
			found[i] = m
		}()
	}
	asked.Wait()
	return found, context.Cause(ctx)
}
