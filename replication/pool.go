package replication

import "sync"

const (
	queued = 4 // batches that wait for the consumer
	// One more is being filled, one is in the consumer's hands.
	maxBatches = queued + 2
	// largeRoom bounds the bytes of messages that need memory of their own. One alone may exceed it.
	largeRoom = 16 << 20
)

// pool lends out batches and bounds how many there are, and how many bytes the large messages among them
// hold.
type pool struct {
	size  int           // of a buffer
	free  chan *batch   // holds every batch at most
	drain chan struct{} // closed: nobody takes batches any more, so nothing needs to be waited for
	quit  chan struct{} // closed: the stream has ended
	made  int           // the reader's

	mu    sync.Mutex
	large int           // bytes
	room  chan struct{} // capacity 1: large has become smaller
}

func newPool(size int, drain, quit chan struct{}) *pool {
	return &pool{size: size, free: make(chan *batch, maxBatches), drain: drain, quit: quit,
		room: make(chan struct{}, 1)}
}

// get waits for an empty batch. Only the reader calls it.
func (p *pool) get() (*batch, error) {
	var b *batch
	select {
	case b = <-p.free:
	default:
		if p.made < maxBatches {
			p.made++
			b = &batch{buf: make([]byte, p.size)}
			b.Free = b.putBack
			break
		}
		select {
		case b = <-p.free:
		case <-p.drain:
			return &batch{buf: make([]byte, p.size)}, nil
		case <-p.quit:
			return nil, ErrClosed
		}
	}
	b.home = p
	return b, nil
}

// put takes a batch back.
func (p *pool) put(b *batch) {
	p.unreserve(b)
	clear(b.Messages)
	b.Messages = b.Messages[:0]
	p.free <- b
}

// reserve waits until b may hold a large message of n bytes. Only the reader calls it.
func (p *pool) reserve(b *batch, n int) error {
	for {
		p.mu.Lock()
		if p.large == 0 || p.large+n <= largeRoom || closed(p.drain) {
			p.large += n
			p.mu.Unlock()
			b.reserved = n
			return nil
		}
		p.mu.Unlock()
		select {
		case <-p.room:
		case <-p.drain:
		case <-p.quit:
			return ErrClosed
		}
	}
}

// unreserve forgets b's large message.
func (p *pool) unreserve(b *batch) {
	if b.reserved == 0 {
		return
	}
	p.mu.Lock()
	p.large -= b.reserved
	p.mu.Unlock()
	b.large, b.reserved = nil, 0
	signal(p.room)
}
