package replication

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/outbox"
)

// backlog is what lies before the stream's start, read by SQL out of a temporary copy of the slot, in chunks of whole transactions.
type backlog struct {
	why  *CatchUp
	log  *slog.Logger
	slot string // the copy's name
	upTo outbox.LSN

	rowsPerTx float64 // of the sample
	noticed   bool    // the server had something to say
	options   string  // of pgoutput, as arguments

	pg   *pgconn.PgConn // asks questions until it is taken over, then only for the query to be cancelled
	from *handover      // what pg reads through
	wire *wire
	conn net.Conn // once it is taken over

	passed chan struct{} // closed when all of it was delivered
	over   chan struct{} // closed when nothing more of it is delivered
	clean  bool          // nothing is under way on the connection
	closes sync.Once
	slow   atomic.Bool // the first row of a chunk took too long

	// The reader's own.
	frames  frames
	handle  func(b *batch, typ byte, body []byte) error
	size    chunkSize
	pos     outbox.LSN // up to here everything was delivered
	restart outbox.LSN // where the next chunk's reading begins
	chunk   chunk
	seam    seam
}

// chunk is what is known of the chunk that is being read.
type chunk struct {
	asked time.Time
	timer *time.Timer   // runs until the first row
	took  time.Duration // to the first row
	parts int           // answers that have ended: the changes, the copy's state
	rows  int
	bytes int
	state [2]outbox.LSN // confirmed_flush_lsn and restart_lsn of the copy behind it
}

// takeOver makes the connection the reader's: from here on it is read in the same way as the stream.
func (b *backlog) takeOver() error {
	h, err := b.pg.Hijack()
	if err != nil {
		return fmt.Errorf("take the connection over: %w", err)
	}
	b.conn, b.clean = h.Conn, true
	rest, err := b.from.take()
	if err == nil && (len(rest) != 0 || h.Frontend.ReadBufferLen() != 0) {
		err = errors.New("there is more to read than was asked for")
	}
	if err == nil {
		err = b.wire.unpoll()
	}
	if err != nil {
		return fmt.Errorf("take the connection over: %w", err)
	}
	b.wire.behind = func() bool { return true }
	b.frames.src = b.from.src
	return nil
}

// follow puts the stream behind a backlog.
func (s *stream) follow(b *backlog) {
	s.backlog = b
	b.frames.pool = newPool(bufferSize, s.drain, s.quit)
	b.handle = func(to *batch, typ byte, body []byte) error { return b.message(s, to, typ, body) }
}

// readBacklog is the goroutine that delivers the backlog. What fails in it ends the session, and the next one streams: whatever there is
// to be said of this part of the WAL, it is the stream that says it.
func (s *stream) readBacklog() {
	b := s.backlog
	defer close(b.over)
	begun, from, read := time.Now(), b.pos, 0
	for b.pos < b.upTo {
		err := b.next(s)
		if closed(s.drain) || closed(s.quit) {
			return
		}
		if err == nil {
			err = b.size.next(&b.chunk, b.pos, b.restart)
		}
		if b.slow.Load() {
			err = fmt.Errorf("the server did not answer within %v: a large transaction?", b.size.patience)
		}
		if err != nil {
			if sqlState(err) != codeAdminShutdown {
				b.why.failed(b.upTo)
			}
			s.fail(fmt.Errorf("read the backlog by SQL, at %v of %v, which is streamed from now on: %w", b.pos, b.upTo, err))
			return
		}
		read += b.chunk.bytes
	}
	b.seam.given = b.pos
	b.clean = true
	s.log.Info("the backlog was read by SQL; streaming", "from", from, "up_to", b.pos, "bytes", read, "took", time.Since(begun).Round(time.Millisecond))
	close(b.passed)
}

// endBacklog is the goroutine that ends the reading when the session ends.
func (s *stream) endBacklog() {
	select {
	case <-s.backlog.over:
	case <-s.drain:
	case <-s.quit:
	}
	s.backlog.hangUp()
}

// cancelTimeout is how long it may take to tell the server that nobody wants to know any more.
const cancelTimeout = time.Second

// hangUp closes the connection, which ends the copy of the slot, at once: also where the server is in the middle of a chunk.
func (b *backlog) hangUp() {
	b.closes.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cancelTimeout)
		defer cancel()
		switch {
		case b.conn == nil:
			b.pg.Close(ctx) //nolint:errcheck // it is closed whatever this says
		case closed(b.over) && b.clean:
			b.send((&pgproto3.Terminate{}).Encode(nil)) //nolint:errcheck // closing says the same
			b.conn.Close()                              //nolint:errcheck // it is closed whatever this says
		default:
			b.conn.Close()          //nolint:errcheck // it is closed whatever this says
			b.pg.CancelRequest(ctx) //nolint:errcheck // then the server notices when it sends
		}
	})
}

func (b *backlog) send(request []byte, err error) error {
	if err != nil {
		return err
	}
	if err := b.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err = b.conn.Write(request)
	return err
}

// errChunk ends a chunk that is complete.
var errChunk = errors.New("end of the chunk")

// next reads and delivers a chunk.
func (b *backlog) next(s *stream) error {
	c := &b.chunk
	*c = chunk{asked: time.Now()}
	c.timer = time.AfterFunc(b.size.patience, func() {
		b.slow.Store(true)
		b.hangUp()
	})
	defer c.timer.Stop()
	b.clean = false
	if err := b.send(b.request()); err != nil {
		return err
	}
	if b.why.reading != nil {
		b.why.reading()
	}
	for {
		got, err := b.frames.next(b.handle)
		if got != nil {
			if len(got.Messages) > 0 && (err == nil || err == errChunk) {
				s.hand(got)
			} else {
				got.Release()
			}
		}
		if err == errChunk {
			break
		}
		if err != nil {
			return err
		}
	}
	if c.parts != 2 || c.state[0] <= b.pos || c.state[1] == 0 {
		return fmt.Errorf("%d answers, the copy of the slot went from %v to %v and needs the WAL from %v", c.parts, b.pos, c.state[0], c.state[1])
	}
	b.pos, b.restart = c.state[0], c.state[1]
	return nil
}

// request asks for a chunk, and for how far the copy is then: only that says whether all of it was read.
func (b *backlog) request() ([]byte, error) {
	upTo := min(b.upTo, b.pos+outbox.LSN(b.size.window))
	var request []byte
	for _, query := range []string{
		"SELECT lsn, data FROM pg_logical_slot_get_binary_changes" + b.arguments(upTo, b.size.rows),
		"SELECT confirmed_flush_lsn, restart_lsn FROM pg_replication_slots WHERE slot_name = " + literal(b.slot),
	} {
		for _, m := range []pgproto3.FrontendMessage{
			&pgproto3.Parse{Query: query}, &pgproto3.Bind{ResultFormatCodes: []int16{pgproto3.BinaryFormat}}, &pgproto3.Execute{},
		} {
			var err error
			if request, err = m.Encode(request); err != nil {
				return nil, err
			}
		}
	}
	return (&pgproto3.Sync{}).Encode(request)
}

// arguments are those of a function that reads the copy: up to where, and after how many messages no further transaction is begun.
func (b *backlog) arguments(upTo outbox.LSN, messages int) string {
	return fmt.Sprintf("(%s, '%v', %d%s)", literal(b.slot), upTo, min(messages, math.MaxInt32), b.options)
}

// message takes one protocol message.
func (b *backlog) message(s *stream, to *batch, typ byte, body []byte) error {
	switch typ {
	case 'D':
		return b.row(to, body)
	case 'C':
		b.chunk.parts++
		return nil
	case 'Z':
		return errChunk
	case 'N':
		return unfaulted(s.notice(body))
	case 'E':
		return unfaulted(s.serverError(body))
	case '1', '2', 'S', 'A': // parsed, bound, a changed parameter, a notification
		return nil
	}
	return fmt.Errorf("unexpected message of type %q", typ)
}

// unfaulted leaves it to the stream to come to the same thing.
func unfaulted(err error) error {
	if f := outbox.FaultOf(err); f != nil {
		return fmt.Errorf("%s: %w", f.What, f.Err)
	}
	return err
}

// row takes a row of two columns, the first of which is an LSN: a change, or, in the second answer, the copy's state.
func (b *backlog) row(to *batch, body []byte) error {
	const head = 2 + 4 + 8 + 4 // number of columns, length, LSN, length
	c := &b.chunk
	if len(body) < head || binary.BigEndian.Uint16(body) != 2 || binary.BigEndian.Uint32(body[2:]) != 8 ||
		int(int32(binary.BigEndian.Uint32(body[14:]))) != len(body)-head {
		return errors.New("a row of another form than was asked for")
	}
	if c.took == 0 {
		c.timer.Stop()
		c.took = time.Since(c.asked)
	}
	lsn := outbox.LSN(binary.BigEndian.Uint64(body[6:]))
	if c.parts == 0 {
		c.rows++
		c.bytes += len(body) - head
		to.Messages = append(to.Messages, Message{WALEnd: lsn, Data: body[head:]})
		return nil
	}
	if len(body) != head+8 {
		return errors.New("a row of another form than was asked for")
	}
	c.state = [2]outbox.LSN{lsn, outbox.LSN(binary.BigEndian.Uint64(body[head:]))}
	// As a keepalive of the stream would say: what ends here or before was delivered.
	to.Messages = append(to.Messages, Message{Keepalive: true, WALEnd: lsn})
	return nil
}
