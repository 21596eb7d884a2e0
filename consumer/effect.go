package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// calls are the calls of one handler.
type calls struct {
	handler     Handler // within the middleware, as is deadLetters; nil: there is none
	deadLetters Handler
	cfg         *Config
	met         *metrics
	track       *tracker        // keeps those that hang
	ended       <-chan struct{} // the end of Run
}

// newCalls wraps the handler: Config.Use outermost, then the upcasters.
func newCalls(h Handler, of *Consumer, ended <-chan struct{}) *calls {
	cfg := &of.cfg
	c := &calls{cfg: cfg, met: of.met, track: of.state, ended: ended,
		handler: wrapped(cfg.Schema.before(h), cfg.Use)}
	if cfg.DeadLetters != nil {
		c.deadLetters = wrapped(cfg.DeadLetters, cfg.Use)
	}
	return c
}

// invoke calls the handler once. It returns a panic of the handler as an error, as well as anything that the
// handler must not do with its transaction.
func (c *calls) invoke(ctx context.Context, tx pgx.Tx, e *Event) (err error) {
	h := c.handler
	if e.DeadLetter != "" {
		if h = c.deadLetters; h == nil {
			return Poison(&DeadLetterError{Reason: e.DeadLetter})
		}
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	err = c.call(ctx, e, func(e *Event) error {
		switch t := tx.(type) {
		case nil:
			return h(ctx, nil, e)
		case *sqlTx:
			e.sqlTx = t.tx
			return h(ctx, nil, e)
		}
		return h(ctx, handlerTx{tx}, e)
	})
	if err != nil || tx == nil {
		return err
	}
	if t, ok := tx.(*sqlTx); ok {
		return t.left(ctx)
	}
	switch conn := tx.Conn().PgConn(); {
	case conn.IsClosed():
		return errors.New("the connection broke while the handler ran")
	case conn.TxStatus() == 'E':
		return errSwallowed
	case conn.TxStatus() != 'T':
		return errEnded
	case conn.IsBusy():
		return errRows
	}
	return nil
}

// call runs the application's code on a goroutine of its own, so that code that ends its goroutine, or
// doesn't return when ctx has ended, fails like any other. The event is the code's own as well: it may change
// it, and keep it.
func (c *calls) call(ctx context.Context, e *Event, code func(e *Event) error) error {
	own := *e
	own.Data = bytes.Clone(e.raw.Data)
	returned := apart(func() error { return readable(code(&own)) })
	since, err := awaitReturn(ctx, returned, c.cfg.hang)
	if since.IsZero() {
		return err
	}
	hung := &hangError{document: e.Document, hash: e.hash, seq: e.seq, since: since,
		returned: make(chan struct{})}
	c.track.hangs(hung)
	c.met.hangs(1)
	c.cfg.Log.Error("a handler hangs: this instance leaves its partition to others until it has returned",
		"err", hung)
	go c.watch(hung, returned)
	return hung
}

// apart runs the application's code on a goroutine of its own.
func apart(code func() error) <-chan error {
	returned := make(chan error, 1)
	go func() {
		err := errExited
		defer func() { returned <- err }()
		defer recovered(&err)
		err = code()
	}()
	return returned
}

// awaitReturn waits until code has returned, until so long after the end of its context. If it has not by
// then, since is when that was.
func awaitReturn(ctx context.Context, returned <-chan error, hang time.Duration) (since time.Time,
	err error) {
	select {
	case err := <-returned:
		return time.Time{}, err
	case <-ctx.Done():
	}
	since = time.Now()
	late := time.NewTimer(hang)
	defer late.Stop()
	select {
	case err := <-returned:
		return time.Time{}, err
	case <-late.C:
		return since, nil
	}
}

// watch waits until a call that hangs has returned. From then on its partition may be claimed again.
func (c *calls) watch(h *hangError, returned <-chan error) {
	remind := time.NewTicker(remindEvery)
	defer remind.Stop()
	for waiting := true; waiting; {
		select {
		case <-returned:
			waiting = false
		case <-remind.C:
			c.log("still waiting for a handler to return", h)
		}
	}
	c.log("a handler that hung has returned", h)
	c.track.returned(h)
	c.met.hangs(-1)
	close(h.returned)
}

// log logs what becomes of a call that hangs, until Run ends.
func (c *calls) log(what string, h *hangError) {
	select {
	case <-c.ended:
	default:
		c.cfg.Log.Error(what, "err", h)
	}
}

// avoids returns the partitions of a layout that this instance must not claim: a call for one of their
// documents hangs, and the next one has to wait for that.
func (c *calls) avoids(l layout) map[int]bool {
	avoid := map[int]bool{}
	for _, h := range c.track.hanging() {
		if l.Partitions > 0 {
			avoid[partitionOf(h.hash, l.Partitions)] = true
		}
	}
	return avoid
}

// awaitHung waits until the calls that hang have returned, or ctx ends.
func (c *calls) awaitHung(ctx context.Context) {
	for _, h := range c.track.hanging() {
		select {
		case <-h.returned:
		case <-ctx.Done():
			return
		}
	}
}

// leftBehind returns an error if a call still hangs when Run ends.
func (c *calls) leftBehind() error {
	for _, h := range c.track.hanging() {
		return fault(ErrHandler, h, "Let it return when its context ends", "it was left behind")
	}
	return nil
}

const remindEvery = 30 * time.Second

// readable panics if err can't be read, such as a nil pointer returned as an error.
func readable(err error) error {
	if err != nil {
		_ = err.Error()
		_ = errors.Is(err, errExited)
	}
	return err
}

// hangAfter is how long a handler may take to return after its context has ended.
const hangAfter = 5 * time.Second

// errExited: such as t.FailNow or log.Fatal's kin in a handler.
var errExited = errors.New("the handler ended its goroutine (runtime.Goexit, as t.FailNow does) instead of " +
	"returning")

// hangError says that a handler did not return. It may still use its transaction, so nobody else may.
type hangError struct {
	document string
	hash     uint32 // of the document
	seq      uint64
	since    time.Time // when its context ended
	returned chan struct{}
}

func (h *hangError) Error() string {
	return fmt.Sprintf("the handler has not returned %v after its context ended (document %q, sequence %d)",
		time.Since(h.since).Round(time.Second), h.document, h.seq)
}

func hanging(err error) *hangError {
	var h *hangError
	errors.As(err, &h)
	return h
}

// DeadLetterError is why a dead letter fails without [Config.DeadLetters].
type DeadLetterError struct {
	Reason string // why Outflow could not publish the row
}

// Error implements error.
func (e *DeadLetterError) Error() string {
	return "it is a dead letter, which the handler is not given (see Config.DeadLetters): " + e.Reason
}

// errSwallowed: the handler ignored an error of a statement. PostgreSQL would roll back at the commit.
var errSwallowed = errors.New("the handler returned nil, but a statement of its transaction failed: return " +
	"that error, or run what may fail in a savepoint (tx.Begin)")

// errRows: the next statement, and the commit, would find the connection busy.
var errRows = errors.New("the handler returned nil, but has not read all rows of a query: read them to the " +
	"end, or close them")

// errEnded: the handler ended the transaction itself. What was in it may be committed.
var errEnded = errors.New("the handler ended the transaction that it was given, or tried to, with an SQL " +
	"command of its own: it must not")

const hintEnded = "Leave the end of the transaction to the consumer: return nil or an error"

// handlerTx is the transaction as a handler gets it: only the consumer may end it, together with the offset.
type handlerTx struct{ pgx.Tx }

// Commit implements [pgx.Tx]. It only returns an error.
func (handlerTx) Commit(context.Context) error {
	return errors.New("the consumer commits the transaction of a handler, not the handler")
}

// Rollback implements [pgx.Tx]. It only returns an error.
func (handlerTx) Rollback(context.Context) error {
	return errors.New("the consumer rolls back the transaction of a handler if that returns an error, not " +
		"the handler")
}

// pause is how long to wait after the n-th failed attempt, from 1.
func (b Backoff) pause(n int) time.Duration {
	pause := b.First
	for ; n > 1 && pause < b.Max; n-- {
		pause *= 2
	}
	pause = min(pause, b.Max)
	return pause + time.Duration((rand.Float64()-0.5)*0.4*float64(pause))
}

// pauseFor waits before the next attempt, or until ctx ends.
func pauseFor(ctx context.Context, pause time.Duration) error {
	if sleep(ctx, pause) != nil {
		return fmt.Errorf("while waiting for the next attempt: %w", context.Cause(ctx))
	}
	return nil
}
