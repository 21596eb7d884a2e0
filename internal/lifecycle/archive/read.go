package archive

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/outflowhq/outflow/outbox"
)

// Verify reads a segment whole and checks it against its manifest: the object's hash, each message's, their
// sequences and their Merkle root. It calls f, if that is not nil, with each message that was not erased;
// what f has seen is right so far as each line has its hash and the object its own. An error of f ends it and
// is returned. Without f it compares the manifest's documents as well.
func (a *Archive) Verify(ctx context.Context, m *Manifest, f func(*Message) error) error {
	if f == nil {
		return a.newest(ctx, m, func(m *Manifest) error { return a.verifyDocs(ctx, m) })
	}
	return a.read(ctx, m, func(msg *Message, _ Hash) error {
		if msg.erased != "" {
			return nil
		}
		return f(msg)
	})
}

// verifyDocs reads a segment, and compares the documents of its messages with those of its manifest.
func (a *Archive) verifyDocs(ctx context.Context, m *Manifest) (err error) {
	if m.brief {
		if m, err = a.again(ctx, m); err != nil {
			return err
		}
	}
	seen := make([]bool, len(m.Docs))
	var unlisted uint64 // a message of another document
	err = a.readAs(ctx, m, func(msg *Message, _ Hash) error {
		if msg.erased != "" {
			return nil
		}
		i, listed := slices.BinarySearch(m.Docs, SubjectHash(msg.Subject))
		if listed {
			seen[i] = true
		} else if unlisted == 0 {
			unlisted = msg.Seq
		}
		return nil
	})
	switch i := slices.Index(seen, false); {
	case err != nil:
		return err
	case unlisted > 0:
		err = fmt.Errorf("its documents lack that of message %d", unlisted)
	case i >= 0:
		err = fmt.Errorf("it has a document %s, and the segment no message of it", m.Docs[i])
	default:
		return nil
	}
	return a.damaged(a.generationName(m.First, m.named), err)
}

// read is Verify with all lines; f nil: the object's hash is enough. Where an erasure has replaced the object
// since the manifest was read, it reads the one that is there now.
func (a *Archive) read(ctx context.Context, m *Manifest, f func(*Message, Hash) error) error {
	return a.newest(ctx, m, func(m *Manifest) error { return a.readAs(ctx, m, f) })
}

// AtOnce is how many segments a command reads at once. Each is in memory, up to archive.segment_size, so more
// processors than that would cost more than the time that they save.
func AtOnce() int { return min(runtime.GOMAXPROCS(0), 4) }

// EventHeaders calls f with the value of the header [outbox.HeaderName] of each of a segment's messages that
// has one and was not erased. It checks the object's hash: the object was read message by message before its
// manifest was made. An error of f ends it and is returned.
func (a *Archive) EventHeaders(ctx context.Context, m *Manifest, f func(value string) error) error {
	return a.newest(ctx, m, func(m *Manifest) error {
		return a.object(ctx, m, func(object []byte) error {
			_, err := scan(ctx, object, m.Raw, func(text []byte) error {
				value, err := eventHeader(text)
				if value == "" || err != nil {
					return err
				}
				return stop(f(value))
			})
			return err
		})
	})
}

// newest reads a segment, as it is now.
func (a *Archive) newest(ctx context.Context, m *Manifest, read func(*Manifest) error) (err error) {
	if m.abridged {
		if m, err = a.again(ctx, m); err != nil {
			return err
		}
	}
	for {
		err := read(m)
		if err == nil || !a.overtaken(ctx, m, err) {
			return err
		}
		if m, err = a.current(ctx, m.First); err != nil {
			return err
		}
	}
}

// readAs reads the object that the manifest says.
func (a *Archive) readAs(ctx context.Context, m *Manifest, f func(*Message, Hash) error) error {
	return a.object(ctx, m, func(object []byte) error {
		if f == nil {
			return nil
		}
		return readObject(ctx, object, m, func(msg *Message, h Hash) error { return stop(f(msg, h)) })
	})
}

// stopped is an error of whoever reads, which says nothing of the object.
type stopped struct{ error }

func stop(err error) error {
	if err != nil {
		err = stopped{err}
	}
	return err
}

// object calls f with the object that the manifest says, which has its hash. What else f finds is damage.
func (a *Archive) object(ctx context.Context, m *Manifest, f func([]byte) error) error {
	name := a.ObjectName(m)
	object, err := a.store.Read(ctx, name, maxObject)
	switch {
	case errors.Is(err, ErrMissing):
		return a.damaged(name, errors.New("it is lost"))
	case err != nil:
		return err
	case int64(len(object)) != m.Bytes:
		return a.damaged(name, fmt.Errorf("it has %d bytes, not %d", len(object), m.Bytes))
	case sha256.Sum256(object) != m.Object:
		return a.damaged(name, errors.New("it does not have its hash: a bit was flipped, or it was replaced"))
	}
	err = f(object)
	if s, ok := errors.AsType[stopped](err); ok {
		return s.error
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return a.damaged(name, err)
}

func decompress(object []byte) (*zstd.Decoder, error) {
	return zstd.NewReader(bytes.NewReader(object), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(64<<20), zstd.WithDecoderMaxMemory(maxRaw))
}

// scan calls f with the lines of an object, until it returns an error, which is returned. It reads no more
// than limit bytes of lines, and returns how many these were.
func scan(ctx context.Context, object []byte, limit int64, f func(text []byte) error) (raw int64, err error) {
	dec, err := decompress(object)
	if err != nil {
		return 0, err
	}
	defer dec.Close()
	lines := bufio.NewScanner(untilDone{ctx, dec})
	lines.Buffer(make([]byte, 0, frameSize), int(min(maxLine, limit)))
	for lines.Scan() {
		if err := ctx.Err(); err != nil {
			return raw, err
		}
		if raw += int64(len(lines.Bytes())) + 1; raw > limit {
			return raw, fmt.Errorf("it has more than %d bytes of lines", limit)
		}
		if err := f(lines.Bytes()); err != nil {
			return raw, err
		}
	}
	return raw, lines.Err()
}

// untilDone is a Reader that ends with its context: a line may be long.
type untilDone struct {
	ctx context.Context
	io.Reader
}

func (r untilDone) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// readObject reads an object's messages and compares them, and the size of their lines, with the manifest.
func readObject(ctx context.Context, object []byte, m *Manifest, f func(*Message, Hash) error) error {
	raw, err := readLines(ctx, object, m, m.Raw, f)
	if err == nil && raw != m.Raw {
		err = fmt.Errorf("it has %d bytes of lines, not %d", raw, m.Raw)
	}
	return err
}

// errLacks: an object has a message that is missing by the manifest.
var errLacks = errors.New("by the manifest there is none")

// readLines reads an object's messages, of no more than limit bytes, compares them with the manifest, and
// returns the size of their lines.
func readLines(
	ctx context.Context, object []byte, m *Manifest, limit int64, f func(*Message, Hash) error,
) (raw int64, err error) {
	var (
		tree    merkle
		next    = m.First
		missing = m.Missing
		last    Hash
	)
	raw, err = scan(ctx, object, limit, func(text []byte) error {
		msg, h, err := parseLine(text)
		if err != nil {
			return err
		}
		for len(missing) > 0 && missing[0].From == next {
			next, missing = missing[0].To+1, missing[1:]
		}
		if msg.Seq != next {
			err := fmt.Errorf("message %d where %d was expected", msg.Seq, next)
			if outbox.Sequences(m.Missing).Has(msg.Seq) {
				err = fmt.Errorf("%w: %w", err, errLacks)
			}
			return err
		}
		if is := m.Erased.Has(msg.Seq); is != (msg.erased != "") {
			return fmt.Errorf("message %d: by the manifest it was erased: %v", msg.Seq, is)
		}
		tree.add(h)
		next, last = next+1, h
		return f(msg, h)
	})
	if err != nil {
		return raw, err
	}
	if len(missing) > 0 && missing[0].From == next {
		next, missing = missing[0].To+1, missing[1:]
	}
	switch {
	case tree.n != m.Count || next != m.Last+1 || len(missing) > 0:
		return raw, fmt.Errorf("it has %d messages up to %d, not %d up to %d", tree.n, next-1, m.Count,
			m.Last)
	case tree.root() != m.Root || last != m.End:
		return raw, errors.New("its messages do not have the root of the manifest")
	}
	return raw, nil
}

// Read calls f with the archived messages from a sequence on, in order, until it returns an error, which is
// returned. It ends with a fault where a segment is lost or damaged, before f sees a message of it.
func (a *Archive) Read(ctx context.Context, from uint64, f func(*Message) error) error {
	return a.ReadRange(ctx, from, math.MaxUint64, f)
}

// ReadRange is [Archive.Read] up to below a sequence. No segment behind it is read.
func (a *Archive) ReadRange(ctx context.Context, from, below uint64, f func(*Message) error) error {
	for _, m := range a.Segments {
		if m.Last < from {
			continue
		}
		if m.First >= below {
			break
		}
		err := a.Verify(ctx, m, func(msg *Message) error {
			switch {
			case msg.Seq < from:
				return nil
			case msg.Seq >= below:
				return errEnough
			}
			return f(msg)
		})
		if errors.Is(err, errEnough) {
			break
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errEnough = errors.New("read enough")
