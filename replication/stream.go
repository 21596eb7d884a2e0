package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// stream is a replication connection after START_REPLICATION, with its two goroutines.
type stream struct {
	conn        net.Conn
	log         *slog.Logger
	publication string
	noTable     bool          // events are messages only
	timeout     time.Duration // wal_sender_timeout, 0: off
	verify      func() error  // of what was read, before it is handed out; nil: it needs none

	batches        chan *relay.Batch
	received       atomic.Uint64 // highest LSN that the stream has reached; only the reader raises it
	confirmed      atomic.Uint64 // what may be confirmed: never lowered, and may be beyond received
	statusWanted   chan struct{} // capacity 1: the server wants a status
	confirmedMoved chan struct{} // capacity 1: confirmed has grown
	drain          chan struct{} // closed by stop: a last status, then nothing but the end is waited for
	quit           chan struct{} // closed when the stream has failed or was closed
	tasks          sync.WaitGroup
	stopOnce       sync.Once

	mu  sync.Mutex
	err error // why it ended; nil while quit is open

	// The reader's own.
	splitter splitter
	high     outbox.LSN // highest LSN of a keepalive
}

// newStream takes a connection over: src reads from it, rest was read already. The goroutines start with run.
func newStream(conn net.Conn, src io.Reader, rest []byte, from outbox.LSN, timeout time.Duration) *stream {
	s := &stream{
		conn: conn, timeout: timeout, log: slog.New(slog.DiscardHandler),
		batches:      make(chan *relay.Batch, queued),
		statusWanted: make(chan struct{}, 1), confirmedMoved: make(chan struct{}, 1),
		drain: make(chan struct{}), quit: make(chan struct{}),
	}
	s.received.Store(uint64(from))
	s.splitter = splitter{src: src, pool: newPool(bufferSize, s.drain, s.quit), carry: rest}
	return s
}

func (s *stream) run() {
	s.tasks.Go(s.read)
	s.tasks.Go(s.writeStatuses)
}

// errEnd says that the server has ended the stream because we asked it to.
var errEnd = errors.New("end of the stream")

// read is the reader goroutine: it takes what the server sends off the socket until the stream ends.
func (s *stream) read() {
	defer crash.Guard()
	defer close(s.batches)
	for {
		b, err := s.splitter.next(s.handle)
		s.received.Store(max(s.received.Load(), uint64(s.reached(b))))
		if b != nil && len(b.Messages) > 0 {
			s.deliver(b)
		}
		if err != nil {
			s.fail(s.explain(err))
			return
		}
	}
}

// reached returns the highest LSN in a batch.
func (s *stream) reached(b *batch) (lsn outbox.LSN) {
	if b != nil {
		for i := range b.Messages {
			lsn = max(lsn, b.Messages[i].WALEnd)
		}
	}
	return lsn
}

// deliver hands a batch to the consumer. It waits as long as the consumer likes.
func (s *stream) deliver(b *batch) {
	if closed(s.drain) || closed(s.quit) {
		b.Release()
		return
	}
	if s.verify != nil {
		if err := s.verify(); err != nil {
			b.Release()
			s.fail(err)
			return
		}
	}
	select {
	case s.batches <- &b.Batch:
	case <-s.drain:
		b.Release()
	case <-s.quit:
		b.Release()
	}
}

// explain turns what ended the reader into what Err says.
func (s *stream) explain(err error) error {
	switch {
	case errors.Is(err, errEnd), errors.Is(err, io.EOF) && closed(s.drain):
		return ErrClosed
	case errors.Is(err, io.EOF):
		return fmt.Errorf("replication stream: %w", io.ErrUnexpectedEOF)
	case outbox.FaultOf(err) != nil:
		return err
	}
	return fmt.Errorf("replication stream: %w", err)
}

// fail ends the stream; the first reason counts.
func (s *stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	close(s.quit)
	s.conn.Close() //nolint:errcheck // it is closed whatever this says
}

func (s *stream) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// confirm raises the LSN that the next status carries.
func (s *stream) confirm(lsn outbox.LSN) {
	for {
		old := s.confirmed.Load()
		if uint64(lsn) <= old {
			return
		}
		if s.confirmed.CompareAndSwap(old, uint64(lsn)) {
			signal(s.confirmedMoved)
			return
		}
	}
}

// stop ends the stream cleanly, and at the end of ctx by force.
func (s *stream) stop(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.drain) })
	done := make(chan struct{})
	go func() {
		defer crash.Guard()
		s.tasks.Wait()
		close(done)
	}()
	var err error
	select {
	case <-done:
		if err = s.failure(); errors.Is(err, ErrClosed) {
			err = nil
		}
	case <-ctx.Done():
		err = fmt.Errorf("wait for the end of the replication stream: %w", ctx.Err())
		s.fail(ErrClosed)
	}
	<-done
	return err
}

// close ends the stream at once and waits for its goroutines.
func (s *stream) close() {
	s.fail(ErrClosed)
	s.tasks.Wait()
}

// signal sets a flag that is a channel of capacity 1.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
