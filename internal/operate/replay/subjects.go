package replay

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// countTries is how often counting is tried while new messages come in.
const countTries = 5

// everything is the filter that lets all subjects through.
var everything = []string{">"}

// widenFilters drops the filters if the stream has messages whose subjects the configured template does not
// make: the template used to be another one, or dead letters went elsewhere. No filter can tell whether those
// belong to the selection; each has to be read.
func (s *streamSource) widenFilters(ctx context.Context) error {
	sel := s.match.sel
	if s.stream == nil || len(s.match.filters) == 0 || slices.Equal(s.match.filters, everything) ||
		len(sel.Docs)+len(sel.Actors) == 0 {
		return nil
	}
	known := []string{s.extractor.template.Filter(func(string) (string, bool) { return "", false })}
	if s.extractor.deadLetters != "" && !overlap(s.extractor.deadLetters, known[0]) {
		known = append(known, s.extractor.deadLetters)
	}
	if !overlap(outbox.CutSubject, known[0]) && !overlap(outbox.CutSubject, known[len(known)-1]) {
		known = append(known, outbox.CutSubject) // of no event
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
