package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	rebuildLimit = 3 * time.Minute
	rebuildPoll  = 100 * time.Millisecond
)

var errRebuilding = errors.New("a rebuild is under way: wait for its verdict")

// judge rebuilds the projections from nothing beside the live ones, and compares.
type judge struct {
	url string
	js  jetstream.JetStream
	log *slog.Logger

	mu      sync.Mutex
	verdict *Verdict // the last one
}

func newJudge(url string, js jetstream.JetStream, log *slog.Logger) *judge {
	return &judge{url: url, js: js, log: log}
}

func (j *judge) last() *Verdict {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.verdict
}

// rebuild drops what was rebuilt before, reads the stream from its beginning with consumers of other names
// until they have caught up with the live ones, and compares at that moment.
func (j *judge) rebuild(ctx context.Context) (v Verdict, err error) {
	ctx, cancel := context.WithTimeout(ctx, rebuildLimit)
	defer cancel()
	begun := time.Now()
	alone, err := j.begin(ctx)
	if err != nil {
		return v, err
	}
	defer alone.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it gives the lock back, however it ends
	pool, err := open(ctx, j.url, rebuilt)
	if err != nil {
		return v, err
	}
	defer pool.Close()

	reading, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- project(reading, j.js, pool, rebuilt, j.log) }()
	v, err = j.caughtUp(ctx, pool, ended)
	stop()
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return v, fmt.Errorf("rebuild: %w", err)
	}
	v.Took = time.Since(begun)
	j.mu.Lock()
	j.verdict = &v
	j.mu.Unlock()
	return v, nil
}

// begin removes what an earlier rebuild has made, with its marks. The connection holds a lock: somebody else
// may want a verdict, too.
func (j *judge) begin(ctx context.Context) (alone *pgx.Conn, err error) {
	// Made here, should nobody have looked at them before.
	for _, schema := range []string{live, relayed} {
		pool, err := open(ctx, j.url, schema)
		if err != nil {
			return nil, err
		}
		pool.Close()
	}
	if alone, err = pgx.Connect(ctx, j.url); err != nil {
		return nil, err
	}
	var locked bool
	err = alone.QueryRow(ctx, "SELECT pg_try_advisory_lock(hashtext('examples/crdt rebuild'))").Scan(&locked)
	if err == nil && !locked {
		err = errRebuilding
	}
	if err == nil {
		_, err = alone.Exec(ctx, "DROP SCHEMA IF EXISTS "+rebuilt+" CASCADE")
	}
	if err != nil {
		return nil, errors.Join(err, alone.Close(context.WithoutCancel(ctx)))
	}
	return alone, nil
}

// caughtUp waits for a moment at which both have had the same events. People may be typing all the time.
func (j *judge) caughtUp(ctx context.Context, pool *pgxpool.Pool, ended <-chan error) (Verdict, error) {
	for {
		v, ok, err := levelled(ctx, pool)
		if ok || err != nil && ctx.Err() == nil {
			return v, err
		}
		select {
		case err := <-ended:
			return v, fmt.Errorf("a consumer ended: %w", err)
		case <-ctx.Done():
			return v, fmt.Errorf("the rebuilt projections have not caught up with the live ones: %w",
				ctx.Err())
		case <-time.After(rebuildPoll):
		}
	}
}

// levelled returns the verdict if live and rebuilt projections have had equally many events, all in one
// snapshot.
func levelled(ctx context.Context, pool *pgxpool.Pool) (v Verdict, ok bool, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly},
		func(tx pgx.Tx) error {
			for _, p := range projections {
				var had [2]int64
				for i, schema := range []string{live, rebuilt} {
					if had[i], err = p.eventsIn(ctx, tx, schema); err != nil {
						return err
					}
				}
				if had[0] != had[1] {
					return nil
				}
			}
			ok = true
			v, err = compare(ctx, tx)
			return err
		})
	return v, ok && err == nil, err
}
