package reorder

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math"
	"unsafe"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// A record in a scratch file is the length of its body, a CRC-32C of the body (4 bytes each, little endian),
// and the body: the event's position, the place that it is sorted to, its time, counter and values; numbers
// as varints, strings with their length before them. It is read by the process that wrote it, so it has no
// version.
const recordHead = 8

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	errDamaged = errors.New("a record is damaged")
	errLong    = errors.New("an event of 4 GiB or more")
)

func appendRecord(b []byte, it *item) ([]byte, error) {
	start := len(b)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	e := it.e
	b = appendPosition(appendPosition(b, e.Pos), it.place)
	b = binary.AppendVarint(b, e.Time)
	b = appendCounter(b, e.Counter)
	for _, v := range [...]string{e.Doc, e.Actor, e.Key, e.ID, e.Bad} {
		b = append(binary.AppendUvarint(b, uint64(len(v))), v...)
	}
	b = binary.AppendUvarint(b, uint64(e.PayloadSize))
	b = binary.AppendUvarint(b, uint64(e.Null))
	if e.Payload == nil { // 0 is nil, else one more than the length
		b = append(b, 0)
	} else {
		b = append(binary.AppendUvarint(b, uint64(len(e.Payload))+1), e.Payload...)
	}
	if e.Extra == nil {
		b = append(b, 0)
	} else {
		b = binary.AppendUvarint(b, uint64(len(e.Extra))+1)
		for _, v := range e.Extra {
			b = append(binary.AppendUvarint(b, uint64(len(v))), v...)
		}
	}
	body := b[start+recordHead:]
	if uint64(len(body)) > math.MaxUint32 {
		return b, errLong
	}
	binary.LittleEndian.PutUint32(b[start:], uint32(len(body)))
	binary.LittleEndian.PutUint32(b[start+4:], crc32.Checksum(body, castagnoli))
	return b, nil
}

// appendCounter writes 0 for an event without a counter: most have none.
func appendCounter(b []byte, c outbox.Counter) []byte {
	b = binary.AppendUvarint(b, uint64(c.Span))
	if c.Span == 0 {
		return b
	}
	late := uint64(0)
	if c.Late {
		late = 1
	}
	b = binary.AppendVarint(binary.AppendUvarint(b, late), c.First)
	return binary.AppendUvarint(b, c.Sequence)
}

func appendPosition(b []byte, p outbox.Position) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(p.LSN)), uint64(p.Index))
}

// body reads the fields of a record's body; bad is set where there are fewer bytes than they say.
type body struct {
	b   []byte
	bad bool
}

func (r *body) number() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *body) signed() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *body) position() outbox.Position {
	lsn := r.number()
	return outbox.Position{LSN: outbox.LSN(lsn), Index: uint32(r.number())}
}

func (r *body) counter() (c outbox.Counter) {
	if c.Span = uint32(r.number()); c.Span > 0 {
		c.Late = r.number() == 1
		c.First = r.signed()
		c.Sequence = r.number()
	}
	return c
}

func (r *body) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// text returns a string that shares the record's bytes: a block is never written again once it has been read.
func (r *body) text() string {
	v := r.bytes(r.number())
	return unsafe.String(unsafe.SliceData(v), len(v))
}

// decodeRecord reads what appendRecord wrote. The event shares the record's bytes.
func decodeRecord(record []byte, e *relay.Event) (place outbox.Position, err error) {
	b := record[recordHead:]
	if crc32.Checksum(b, castagnoli) != binary.LittleEndian.Uint32(record[4:]) {
		return place, errDamaged
	}
	r := body{b: b}
	*e = relay.Event{Pos: r.position()}
	place = r.position()
	e.Time = r.signed()
	e.Counter = r.counter()
	for _, v := range [...]*string{&e.Doc, &e.Actor, &e.Key, &e.ID, &e.Bad} {
		*v = r.text()
	}
	e.PayloadSize = int(r.number())
	e.Null = relay.Nulls(r.number())
	if n := r.number(); n > 0 {
		e.Payload = r.bytes(n - 1)
	}
	if n := r.number(); n > 0 && n-1 <= relay.MaxExtra {
		e.Extra = make([]string, n-1)
		for i := range e.Extra {
			e.Extra[i] = r.text()
		}
	}
	if r.bad || len(r.b) > 0 {
		return place, errDamaged
	}
	return place, nil
}

// reader reads the records of a run one after the other, a block at a time. Each block is allocated anew and
// left to the garbage collector, because the events that were read share it.
type reader struct {
	file     *file
	off, end int64 // of the run: what has not been read into a block
	block    []byte
	size     int // of a block, unless a record is larger
}

// next returns the next whole record; nil at the end.
func (r *reader) next() ([]byte, error) {
	if len(r.block) == 0 && r.off == r.end {
		return nil, nil
	}
	if err := r.fill(recordHead); err != nil {
		return nil, err
	}
	n := recordHead + int(binary.LittleEndian.Uint32(r.block))
	if err := r.fill(n); err != nil {
		return nil, err
	}
	record := r.block[:n:n]
	r.block = r.block[n:]
	return record, nil
}

// fill makes sure that the block holds n bytes.
func (r *reader) fill(n int) error {
	have := len(r.block)
	if have >= n {
		return nil
	}
	if int64(n-have) > r.end-r.off {
		return &ioError{"read", errDamaged}
	}
	if stop := r.file.disk.stop; stop != nil { // all that takes long reads scratch files
		if err := stop(); err != nil {
			return err
		}
	}
	block := make([]byte, have+int(min(r.end-r.off, int64(max(n, r.size)-have))))
	copy(block, r.block)
	got, err := r.file.ReadAt(block[have:], r.off)
	if got < len(block)-have {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return &ioError{"read", err}
	}
	r.off += int64(got)
	r.block = block
	return nil
}
