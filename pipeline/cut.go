package pipeline

import (
	"context"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/relay"
)

// newestCut returns the sequence of the cut that each message of a session names, 0 if there is none: where
// clusters share the stream, the newest one at or below its end as it was read. A message that was made
// without knowing of another one is refused.
func newestCut(ctx context.Context, js JetStream, r checkpoint.Readings) (uint64, error) {
	if r.Record.Epoch == 0 {
		return 0, nil
	}
	cut, err := limited("newest cut", func(ctx context.Context) (*relay.Stored, error) {
		return js.NewestCut(ctx, r.Stream.LastSeq)
	})(ctx)
	if err != nil || cut == nil {
		return 0, err
	}
	return cut.Seq, nil
}
