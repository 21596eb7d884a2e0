package bench

import (
	"context"
	"errors"
	"fmt"
)

// shards are several outflows, each for its part of the table.
type shards struct{ parts []*streamer }

func newShards(w *world, b Build, n int) *shards {
	s := &shards{}
	for k := range n {
		s.parts = append(s.parts, &streamer{w: w, build: b, shard: fmt.Sprintf("%d/%d", k, n)})
	}
	return s
}

func (s *shards) name() string { return s.parts[0].name() }

func (s *shards) prepare(ctx context.Context, c *Case) error {
	for _, p := range s.parts {
		if err := p.prepare(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func (s *shards) drain(ctx context.Context, c *Case, b backlog) (sample, error) {
	return s.parts[0].w.drainStreamers(ctx, c, b, s.parts...)
}

func (s *shards) cleanUp(ctx context.Context) (err error) {
	for _, p := range s.parts {
		err = errors.Join(err, p.cleanUp(ctx))
	}
	return err
}
