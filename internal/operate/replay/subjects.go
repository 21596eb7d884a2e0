package replay

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"
)

// countTries is how often it is tried to count between two messages that come in.
const countTries = 5

// everything is the filter that lets all subjects through.
var everything = []string{">"}

// widen reads all subjects where the stream has messages that the subject's template, as it is configured, does not make: the template was
// another one, or dead letters went elsewhere. Whether they are of the selection is not known by a filter; who looks at them finds that
// they do not say it.
func (s *streamSource) widen(ctx context.Context) error {
	sel := s.match.sel
	if s.stream == nil || len(s.match.filters) == 0 || slices.Equal(s.match.filters, everything) || len(sel.Docs)+len(sel.Actors) == 0 {
		return nil
	}
	known := []string{s.lens.template.Filter(func(string) (string, bool) { return "", false })}
	if s.lens.dead != "" && !overlap(s.lens.dead, known[0]) {
		known = append(known, s.lens.dead)
	}
	for range countTries {
		before, err := s.stream.Info(ctx)
		if err != nil {
			return fmt.Errorf("stream %s: %w", s.name, err)
		}
		c, err := s.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
			DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubjects: known, HeadersOnly: true,
		})
		if err != nil {
			return fmt.Errorf("count the messages of stream %s: %w", s.name, err)
		}
		count := c.CachedInfo().NumPending
		if err := s.stream.DeleteConsumer(ctx, c.CachedInfo().Name); err != nil {
			return fmt.Errorf("count the messages of stream %s: %w", s.name, err)
		}
		after, err := s.stream.Info(ctx)
		if err != nil {
			return fmt.Errorf("stream %s: %w", s.name, err)
		}
		if before.State.LastSeq == after.State.LastSeq {
			if count == before.State.Msgs {
				return nil
			}
			break
		}
	}
	s.match.filters = everything
	return nil
}
