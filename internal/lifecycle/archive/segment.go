package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	seekable "github.com/SaveTheRbtz/zstd-seekable-format-go/pkg"
	"github.com/klauspost/compress/zstd"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// frameSize is how much text a frame has at least, but for the last one.
const frameSize = 1 << 20

// Segment is a segment that is being made. It keeps the object in memory. One goroutine uses it.
type Segment struct {
	m      Manifest
	next   uint64
	frame  bytes.Buffer
	object bytes.Buffer
	enc    *zstd.Encoder
	out    *seekable.Writer
	tree   merkle
	docs   map[string]bool
}

// newSegment begins a segment that the manifest's first fields describe.
func newSegment(m Manifest) (*Segment, error) {
	s := &Segment{m: m, next: m.First, docs: map[string]bool{}}
	var err error
	// of recorded editing sessions it makes less than the next level does, in half of the time
	s.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	s.out, err = seekable.NewWriter(&s.object, s.enc)
	return s, err
}

// Comes says of which cluster, and on which timeline, the LSNs of its events are.
func (s *Segment) Comes(system string, timeline uint32) { s.m.System, s.m.Timeline = system, timeline }

// Empty reports whether there is no message in it.
func (s *Segment) Empty() bool { return s.m.Count == 0 }

// Size is how many bytes the object has up to now, without what is not compressed yet.
func (s *Segment) Size() int64 { return int64(s.object.Len()) }

// First is when its first message was stored.
func (s *Segment) First() time.Time { return s.m.From }

// Next is the sequence behind the last one that it knows of.
func (s *Segment) Next() uint64 { return s.next }

// Gap notes that sequences have no message: they were lost before they could be archived, or were erased. A
// message has to follow, or Skip.
func (s *Segment) Gap(lost, erased outbox.Sequences) {
	s.m.Gaps = append(s.m.Gaps, lost...)
	for _, r := range erased {
		s.noteErased(r)
	}
}

// noteErased notes that messages were erased. They usually lie behind all others, of which there may be very
// many.
func (s *Segment) noteErased(r Range) {
	switch n := len(s.m.Erased); {
	case n > 0 && r.From <= s.m.Erased[n-1].To:
		s.m.Erased = s.m.Erased.With(r)
	case n > 0 && r.From == s.m.Erased[n-1].To+1:
		s.m.Erased[n-1].To = r.To
	default:
		s.m.Erased = append(s.m.Erased, r)
	}
}

// Skip ends the segment with sequences that have no message.
func (s *Segment) Skip(to uint64) {
	s.missing(to)
	s.m.Version, s.m.Last = versionSkip, to
}

func (s *Segment) missing(to uint64) {
	s.m.Missing = append(s.m.Missing, Range{From: s.next, To: to})
	s.next = to + 1
}

// Full reports whether it must end: its manifest, or its text, would get larger than what is read back.
func (s *Segment) Full() bool {
	return len(s.docs) >= maxDocs || len(s.m.Missing)+len(s.m.Gaps) >= maxMissing ||
		s.m.Raw >= maxRaw-maxLine
}

// holds returns the messages of a set that are in it.
func (s *Segment) holds(set outbox.Sequences) (all outbox.Sequences) {
	for _, r := range set.Within(s.m.First, s.m.Last) {
		all = append(all, outbox.Sequences(s.m.Missing).Lacking(r.From, r.To)...)
	}
	return all
}

// Agrees makes sure that the stream has its newest message, as far as it has one of that sequence.
func (s *Segment) Agrees(ctx context.Context, api *jsapi.Client) error {
	return SameAs(ctx, api, s.m.Stream, s.m.Last, s.m.End)
}

// Add appends a message. Sequences that were passed over are missing.
func (s *Segment) Add(msg *Message) error {
	err := s.append(msg.Seq, msg.Time.UTC(), func() (Hash, error) {
		return appendLine(&s.frame, msg, s.m.Version)
	})
	if err != nil {
		return err
	}
	s.docs[SubjectHash(msg.Subject)] = true
	if head, err := outbox.ParseHeader(msg.Header.Get(outbox.HeaderName)); err == nil {
		if s.m.Least == nil || head.Pos.Compare(*s.m.Least) < 0 {
			s.m.Least = &head.Pos
		}
		if s.m.Greatest == nil || head.Pos.Compare(*s.m.Greatest) > 0 {
			s.m.Greatest = &head.Pos
		}
	}
	return nil
}

// addErased appends the line of a message that was erased.
func (s *Segment) addErased(seq uint64, h Hash, request string) error {
	s.noteErased(Range{From: seq, To: seq})
	return s.append(seq, s.m.To, func() (Hash, error) {
		return h, encodeLine(&s.frame, &erasedLine{Seq: seq, Erased: request, MessageHash: h})
	})
}

// append appends the line that write makes.
func (s *Segment) append(seq uint64, at time.Time, write func() (Hash, error)) error {
	if seq < s.next {
		return fmt.Errorf("message %d behind %d", seq, s.next-1)
	}
	if seq > s.next {
		s.missing(seq - 1)
	}
	before := s.frame.Len()
	h, err := write()
	if err != nil {
		return err
	}
	s.m.Raw += int64(s.frame.Len() - before)
	s.tree.add(h)
	s.next, s.m.Last, s.m.End, s.m.To = seq+1, seq, h, at
	if s.m.Count++; s.m.Count == 1 {
		s.m.From = s.m.To
	}
	if s.frame.Len() < frameSize {
		return nil
	}
	return s.flush()
}

// SubjectHash stands for a subject in a manifest's list of documents.
func SubjectHash(subject string) string {
	sum := sha256.Sum256([]byte(subject))
	return hex.EncodeToString(sum[:8])
}

func (s *Segment) flush() error {
	if s.frame.Len() == 0 {
		return nil
	}
	_, err := s.out.Write(s.frame.Bytes())
	s.frame.Reset()
	return err
}

// finish ends the segment and returns its manifest and object.
func (s *Segment) finish() (*Manifest, []byte, error) {
	err := s.flush()
	err = cmp.Or(err, s.out.Close())
	err = cmp.Or(err, s.enc.Close())
	if err != nil {
		return nil, nil, fmt.Errorf("archive: compress: %w", err)
	}
	s.m.Root, s.m.Docs, s.m.Erasure = s.tree.root(), slices.Sorted(maps.Keys(s.docs)), []string{}
	sum := sumOf(s.m.Docs)
	s.m.DocsSum = &sum
	s.m.Bytes, s.m.Object = int64(s.object.Len()), sha256.Sum256(s.object.Bytes())
	s.m.Chain, err = s.m.chained()
	return &s.m, s.object.Bytes(), err
}
