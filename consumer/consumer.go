package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer/internal/stream"
)

// Consumer reads a stream for one handler. Make it with [New]; [Consumer.Run] once at a time.
type Consumer struct {
	js      jetstream.JetStream
	offsets Offsets
	cfg     Config
	dec     *decoder
	met     *metrics
	state   *tracker

	running atomic.Bool
}

// New checks the settings. It does not connect to anything.
func New(js jetstream.JetStream, offsets Offsets, cfg Config) (*Consumer, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if offsets == nil {
		return nil, errors.New("consumer: no marks: want consumer.Postgres(pool), or consumer.JetStream() " +
			"for at-least-once")
	}
	if js == nil && cfg.hooks.Source == nil {
		return nil, errors.New("consumer: no JetStream context")
	}
	if cfg.Schema != nil {
		if err := cfg.Schema.Check(); err != nil {
			return nil, fmt.Errorf("consumer: %w", err)
		}
	}
	dec, err := newDecoder(&cfg)
	if err != nil {
		return nil, fmt.Errorf("consumer: %w", err)
	}
	met, err := newMetrics(cfg.Registerer, cfg.Name, cfg.Partitions)
	if err != nil {
		return nil, fmt.Errorf("consumer: metrics: %w", err)
	}
	return &Consumer{js: js, offsets: offsets, cfg: cfg, dec: dec, met: met, state: newTracker()}, nil
}

func init() {
	stream.Install = func(config any, h stream.Hooks) { config.(*Config).hooks = h }
	stream.Partition = func(consumer any, m *stream.Message) (int, error) {
		return consumer.(*Consumer).partition(m)
	}
}

// partition returns the partition of a message's document.
func (c *Consumer) partition(m *stream.Message) (int, error) {
	e, err := c.dec.event(m)
	if err != nil {
		return 0, err
	}
	return partitionOf(e.hash, c.cfg.Partitions), nil
}

// Run reads events and calls the handler until ctx ends, and then returns nil after a clean stop. Instances
// of the same name share the partitions, or one works and the others stand by: see [Postgres] and
// [JetStream]. It reconnects forever; an error means that somebody has to decide (see [ErrGap]).
func (c *Consumer) Run(ctx context.Context, h Handler) (err error) {
	if h == nil {
		return errors.New("consumer: no handler")
	}
	if !c.running.CompareAndSwap(false, true) {
		return errors.New("consumer: Run is running already: make another Consumer for another instance")
	}
	defer c.running.Store(false)
	c.state.set(Connecting, nil, errNotConnected)
	defer func() { c.state.set(Stopped, nil, cmp.Or(err, errReturned)) }()
	if p, ok := c.offsets.(postgresOffsets); ok {
		end, err := p.use()
		if err != nil {
			return err
		}
		defer end()
	}
	r := &runner{Consumer: c, calls: newCalls(h, c, ctx.Done()),
		limit: &parkLimit{most: c.cfg.ParkLimit},
		begun: c.cfg.Start == FromFirst && c.cfg.Archive == nil}
	return r.loop(ctx)
}
