package replication

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func frame(typ byte, body []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{typ}, uint32(4+len(body)))
	return append(b, body...)
}

// chunks reads the sizes given, in turn, so that messages are cut everywhere.
type chunks struct {
	r     io.Reader
	sizes []byte
	i     int
}

func (c *chunks) Read(p []byte) (int, error) {
	if len(c.sizes) > 0 {
		n := 1 + int(c.sizes[c.i%len(c.sizes)])
		c.i++
		p = p[:min(n, len(p))]
	}
	return c.r.Read(p)
}

// cutAll reads a stream to its end with buffers of that size, and returns the messages' types and bodies.
func cutAll(src io.Reader, rest []byte, size int) (types []byte, bodies [][]byte, err error) {
	f := splitter{src: src, carry: rest, pool: newPool(size, make(chan struct{}), make(chan struct{}))}
	for {
		b, err := f.next(func(b *batch, typ byte, body []byte) error {
			types = append(types, typ)
			b.Messages = append(b.Messages, Message{Data: body})
			return nil
		})
		if b != nil {
			for _, m := range b.Messages {
				bodies = append(bodies, bytes.Clone(m.Data))
			}
			b.Release()
		}
		if err != nil {
			return types, bodies, err
		}
	}
}

func TestFramesAreCutAnywhere(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		size := 16 + random.IntN(200)
		var stream, types []byte
		var bodies [][]byte
		for range 1 + random.IntN(40) {
			body := make([]byte, random.IntN(3*size))
			for i := range body {
				body[i] = byte(random.Uint32())
			}
			types, bodies = append(types, byte('a'+random.IntN(26))), append(bodies, body)
			stream = append(stream, frame(types[len(types)-1], body)...)
		}
		sizes := make([]byte, random.IntN(5))
		for i := range sizes {
			sizes[i] = byte(random.IntN(size))
		}
		taken := random.IntN(min(len(stream), size) + 1)
		gotTypes, gotBodies, err := cutAll(&chunks{r: bytes.NewReader(stream[taken:]), sizes: sizes},
			stream[:taken], size)
		if !errors.Is(err, io.EOF) || !bytes.Equal(gotTypes, types) || len(gotBodies) != len(bodies) {
			t.Fatalf("round %d: %q, %d messages, %v; want %q", round, gotTypes, len(gotBodies), err, types)
		}
		for i := range bodies {
			if !bytes.Equal(gotBodies[i], bodies[i]) {
				t.Fatalf("round %d: message %d of %d bytes differs", round, i, len(bodies[i]))
			}
		}
	}
}

func TestFramesThatCannotBeAreErrors(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string][]byte{
		"length 3":  {'d', 0, 0, 0, 3, 0},
		"length -1": {'d', 0xFF, 0xFF, 0xFF, 0xFF, 0},
		"too long":  {'d', 0x40, 0, 0, 0, 0},
	} {
		types, _, err := cutAll(bytes.NewReader(append(frame('k', []byte("x")), stream...)), nil, 64)
		if string(types) != "k" || err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: types %q, %v", name, types, err)
		}
	}
}

func TestEndInsideAMessageIsUnexpected(t *testing.T) {
	t.Parallel()
	whole := frame('d', bytes.Repeat([]byte("y"), 100))
	for _, size := range []int{16, 50, 400} {
		for n := 1; n < len(whole); n++ {
			if _, _, err := cutAll(bytes.NewReader(whole[:n]), nil, size); !errors.Is(err,
				io.ErrUnexpectedEOF) {
				t.Fatalf("end after %d bytes, buffer %d: %v", n, size, err)
			}
		}
		if _, _, err := cutAll(bytes.NewReader(whole), nil, size); !errors.Is(err, io.EOF) {
			t.Errorf("end after the message: %v", err)
		}
	}
}

func TestAReadThatBringsDataAndAnErrorLosesNothing(t *testing.T) {
	t.Parallel()
	stream := append(frame('d', []byte("one")), frame('d', []byte("two"))...)
	types, _, err := cutAll(iotest.DataErrReader(bytes.NewReader(stream)), nil, 64)
	if string(types) != "dd" || !errors.Is(err, io.EOF) {
		t.Errorf("types %q, %v", types, err)
	}
}

// The memory of a stream is bounded by batches that are out, however little is in each.
func TestReadingWaitsForReleasedBatches(t *testing.T) {
	t.Parallel()
	quit := make(chan struct{})
	src := bytes.NewReader(bytes.Repeat(frame('d', make([]byte, 40)), 100))
	f := splitter{src: src, pool: newPool(50, make(chan struct{}), quit)}
	keep := func(b *batch, _ byte, body []byte) error {
		b.Messages = append(b.Messages, Message{Data: body})
		return nil
	}
	var out []*batch
	for range maxBatches {
		b, err := f.next(keep)
		must.Succeed(t, err)
		out = append(out, b)
	}
	close(quit)
	if _, err := f.next(keep); !errors.Is(err, ErrClosed) {
		t.Fatalf("a batch beyond the bound: %v", err)
	}
	out[0].Release()
	out[0].Release() // once is enough, twice does no harm
	if _, err := f.next(keep); err != nil {
		t.Fatalf("after a release: %v", err)
	}
	if _, err := f.next(keep); !errors.Is(err, ErrClosed) {
		t.Fatalf("one release gave two batches: %v", err)
	}
}

func TestAReleaseWakesTheReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPool(8, make(chan struct{}), make(chan struct{}))
		var out []*batch
		for range maxBatches {
			b, err := p.get()
			must.Succeed(t, err)
			out = append(out, b)
		}
		must.Succeed(t, p.reserve(out[0], largeRoom))
		got := make(chan error)
		go func() {
			b, err := p.get()
			if err == nil {
				err = p.reserve(b, largeRoom)
			}
			got <- err
		}()
		synctest.Wait() // it waits for a batch
		out[1].Release()
		synctest.Wait() // it waits for room
		out[0].Release()
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
}

func TestLargeMessagesWaitForRoom(t *testing.T) {
	t.Parallel()
	quit := make(chan struct{})
	p := newPool(8, make(chan struct{}), quit)
	a, b := &batch{home: p}, &batch{home: p}
	if err := p.reserve(a, 2*largeRoom); err != nil {
		t.Fatalf("one alone may exceed the room: %v", err)
	}
	close(quit)
	if err := p.reserve(b, 1); !errors.Is(err, ErrClosed) {
		t.Fatalf("no room is left: %v", err)
	}
	a.putBack()
	if err := p.reserve(b, largeRoom); err != nil {
		t.Fatalf("after a release: %v", err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(append(frame('d', []byte("w")), frame('E', nil)...), []byte{3, 0}, uint8(0))
	f.Add(frame('d', bytes.Repeat([]byte("z"), 90)), []byte{7}, uint8(6))
	f.Add([]byte{'d', 0x3F, 0xFF, 0xFF, 0xFF, 1}, []byte{}, uint8(0))
	f.Fuzz(func(t *testing.T, stream, sizes []byte, taken uint8) {
		const size = 32
		n := min(int(taken), size, len(stream))
		types, bodies, err := cutAll(&chunks{r: bytes.NewReader(stream[n:]), sizes: sizes},
			bytes.Clone(stream[:n]), size)
		if err == nil || len(types) != len(bodies) {
			t.Fatalf("%d types, %d bodies, %v", len(types), len(bodies), err)
		}
		// What came out is the beginning of what went in.
		var again []byte
		for i := range types {
			again = append(again, frame(types[i], bodies[i])...)
		}
		if !bytes.HasPrefix(stream, again) {
			t.Fatalf("%x came out of %x", again, stream)
		}
		if errors.Is(err, io.EOF) && len(again) != len(stream) {
			t.Fatalf("a clean end after %d of %d bytes", len(again), len(stream))
		}
	})
}

func FuzzFrameReader(f *testing.F) {
	f.Add(append(frame('W', []byte{0, 0, 0}), frame('d', []byte("read ahead"))...), []byte{200}, uint16(3))
	f.Fuzz(func(t *testing.T, stream, sizes []byte, want uint16) {
		h := newFrameReader(&chunks{r: bytes.NewReader(stream), sizes: sizes})
		var out []byte
		p := make([]byte, 64)
		for range want {
			n, err := h.Read(p)
			out = append(out, p[:n]...)
			if err != nil {
				break
			}
			if h.left > 0 {
				continue
			}
			// At a message boundary what was handed out and what is left are what was read.
			rest, err := h.detach()
			if err != nil || !bytes.HasPrefix(stream, append(bytes.Clone(out), rest...)) {
				t.Fatalf("%x, rest %x (%v) of %x", out, rest, err, stream)
			}
		}
		if h.left > 0 {
			if _, err := h.detach(); err == nil {
				t.Fatal("taken over in the middle of a message")
			}
		}
	})
}
