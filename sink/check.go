package sink

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/sink/stream"
)

// EnsureStream creates the stream unless it exists, and checks it in any case: see [stream.Stream.Ensure] and
// [Conn.CheckStream]. It allows atomic batches if Config.Batches is set and the server has them.
func (c *Conn) EnsureStream(ctx context.Context, o stream.Options) error {
	o.Atomic = c.cfg.Batches != nil && c.level >= batchLevel
	if c.cfg.Fence {
		o.Atomic, o.InTurns = c.level >= atomicLevel, o.Replicas > 1
	}
	if err := c.Ensure(ctx, o); err != nil {
		return err
	}
	return c.CheckStream(ctx)
}

// CheckStream is [stream.Stream.Check]. It learns the ingress.
func (c *Conn) CheckStream(ctx context.Context) error {
	config, err := c.Check(ctx, c.cfg.MaxPayload)
	if err != nil {
		return err
	}
	if err := c.checkFence(config); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.config = config
	return nil
}

// Ingress returns the subject prefix that CheckStream learned, with its last dot; "" before, and if there is
// no stream.
func (c *Conn) Ingress() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.config == nil {
		return ""
	}
	return c.config.Ingress()
}

// CheckMaxAge is [stream.Config.CheckMaxAge] of the stream that CheckStream saw last.
func (c *Conn) CheckMaxAge(durableAfter time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.config == nil {
		return nil
	}
	return c.config.CheckMaxAge(durableAfter)
}

// Stored reads, through the leader, the messages of sequences above one and up to another, but only the last
// of them: as many as can have been in flight beside the one at upTo. If a message of ours was refused
// because of a foreign one, and those behind it were stored, the foreign one is among them. What can't be
// read is left out. The answer is in ascending order. With more it has what came before those as well, unless
// that is more than 131,072 messages or 64 MiB, or takes more than ten seconds to read.
func (c *Conn) Stored(ctx context.Context, above, upTo uint64, more bool) ([]relay.Stored, error) {
	all, err := c.Last(ctx, above, upTo, MaxInFlight, MaxInFlightBytes)
	if err != nil || !more || len(all) == 0 {
		return all, err
	}
	limited, cancel := context.WithTimeout(ctx, moreTimeout)
	defer cancel()
	before, err := c.Last(limited, above, all[0].Seq-1, 1<<17, 64<<20)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return all, nil
	}
	return append(before, all...), err
}

const moreTimeout = 10 * time.Second
