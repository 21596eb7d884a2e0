package archive

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Range is a range of sequences, both ends included.
type Range = outbox.SequenceRange

// Manifest says what a segment holds. It is written once, after the segment was read back whole. An erasure
// writes another one, of a greater generation, which takes its place.
type Manifest struct {
	Version int       `json:"v"`
	Stream  string    `json:"stream"`
	Created time.Time `json:"created"` // the stream

	// the sequences that the segment is about; First is directly behind the segment before it
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
	Count uint64 `json:"count"` // messages
	// Missing are the sequences without a message, ascending. Those of Gaps were lost before they could be
	// archived; the others were erased, or are ends that the broker lost and that came again.
	Missing []Range `json:"missing,omitempty"`
	Gaps    []Range `json:"gaps,omitempty"`

	From time.Time `json:"from"` // when its first message was stored
	To   time.Time `json:"to"`   // when its last message was stored
	// the least and the greatest position of its events; absent: it has none
	Least    *outbox.Position `json:"least,omitempty"`
	Greatest *outbox.Position `json:"greatest,omitempty"`
	// Complete: the archive has, with this segment, all events below it. 0: the segment does not end at a
	// checkpoint.
	Complete outbox.LSN `json:"complete,omitempty"`
	// the cluster and the timeline that Complete lies on
	System   string `json:"system,omitempty"`
	Timeline uint32 `json:"timeline,omitempty"`

	Root Hash `json:"root"` // Merkle root of the hashes of its messages, in order
	End  Hash `json:"end"`  // the hash of the last message
	Prev Hash `json:"prev"` // Chain of the manifest before it; zero: it is the first
	// Chain is the hash of all of the above. What is below may change with an erasure.
	Chain Hash `json:"chain"`

	Bytes  int64    `json:"bytes"`  // of the object
	Raw    int64    `json:"raw"`    // of its lines
	Object Hash     `json:"sha256"` // of the object
	Docs   []string `json:"documents"`
	// DocsSum is the hash of Docs; nil: an earlier build has written it. By Docs an erasure passes segments
	// over, and nothing else would show that a bit of it was flipped.
	DocsSum *Hash    `json:"documents_sha256,omitempty"`
	Erasure []string `json:"erasures"` // the requests by which something of it was erased
	// Erased are the sequences whose messages were erased: lines without content and, of the missing ones,
	// those that were erased before they could be archived.
	Erased outbox.Sequences `json:"erased,omitempty"`
	// Generation is that of the object, by which it is named; 0: the first one.
	Generation int `json:"generation,omitempty"`
	// Replaced: this manifest has nothing, one of a greater generation took its place.
	Replaced bool `json:"replaced,omitempty"`

	named    int  // the generation in its name: an object may have to be of a later one, see Archive.create
	brief    bool // not with all documents, see Load
	abridged bool // without what is only needed to read the segment, see Known
}

// Holes are the sequences of the segment that there is nothing to read of.
func (m *Manifest) Holes() outbox.Sequences { return outbox.Sequences(m.Missing).With(m.Erased...) }

// Readable is how many messages can be read.
func (m *Manifest) Readable() uint64 { return m.Last - m.First + 1 - m.Holes().Count() }

// version is that of new segments. In those of version 1 each line has the hash of its message, which is half
// of what is left of a short message when it is compressed, and which its other fields give as well.
const version = 2

// versionSkip is that of a segment that ends with sequences that have no message, or has no message at all.
const versionSkip = 3

// Bounds on what is read.
const (
	maxManifest = 64 << 20
	maxObject   = 1 << 30
	maxRaw      = 64 << 30

	maxGeneration = 999_999
)

// A segment ends at so many documents, or ranges without a message. Its manifest stays below 16 MiB then.
const (
	maxDocs    = 1 << 18
	maxMissing = 1 << 17
)

// chained is the hash of what no erasure changes.
func (m *Manifest) chained() (Hash, error) {
	c := *m
	c.Chain, c.Bytes, c.Raw, c.Object, c.Docs, c.Erasure = Hash{}, 0, 0, Hash{}, nil, nil
	c.DocsSum, c.Erased, c.Generation, c.Replaced = nil, nil, 0, false
	text, err := json.Marshal(&c)
	return sha256.Sum256(text), err
}

// maxListed is how many ranges of erased messages a manifest lists one by one. More of them are text, as in a
// stream's metadata, which takes a tenth of the room; earlier builds do not read that.
const maxListed = 1 << 18

// text is what is written. One that could not be read back, or whose object could not be, is refused.
func (m *Manifest) text() ([]byte, error) {
	var what any = m
	if len(m.Erased) > maxListed {
		what = struct {
			*Manifest
			Erased string `json:"erased"`
		}{m, m.Erased.String()}
	}
	text, err := json.Marshal(what)
	which, has, most := "manifest", int64(len(text)), int64(maxManifest)
	if m.Bytes > maxObject {
		which, has, most = "object", m.Bytes, maxObject
	}
	if err == nil && has > most {
		err = fmt.Errorf("archive: the %s of messages %d to %d would have %d bytes, and %d are read back: "+
			"those of segments of a smaller archive.segment_size do not get so large", which, m.First, m.Last,
			has, most)
	}
	return text, err
}

// decode reads a manifest as text has written it.
func (m *Manifest) decode(text []byte) error {
	all := struct {
		*Manifest
		Erased json.RawMessage `json:"erased"`
	}{Manifest: m}
	if err := json.Unmarshal(text, &all); err != nil || len(all.Erased) == 0 {
		return err
	}
	if all.Erased[0] != '"' {
		return json.Unmarshal(all.Erased, &m.Erased)
	}
	var erased string
	err := json.Unmarshal(all.Erased, &erased)
	if err == nil {
		m.Erased, err = outbox.ParseSequences(erased)
	}
	return err
}

// sumOf is the hash of a list of documents.
func sumOf(docs []string) Hash { return sha256.Sum256([]byte(strings.Join(docs, " "))) }

// parseManifest reads a manifest and checks that it is whole: its chain hash, and that its numbers agree.
func parseManifest(text []byte) (*Manifest, error) {
	m := &Manifest{}
	if err := m.decode(text); err != nil {
		return nil, err
	}
	if m.Version < 1 || m.Version > versionSkip {
		return nil, fmt.Errorf("version %d is not known", m.Version)
	}
	if m.Replaced {
		return m, nil
	}
	sum, err := m.chained()
	switch {
	case err != nil:
		return nil, err
	case sum != m.Chain:
		return nil, fmt.Errorf("it does not have its own hash")
	case m.DocsSum != nil && *m.DocsSum != sumOf(m.Docs):
		return nil, fmt.Errorf("its documents do not have their hash")
	case m.First == 0 || m.Last < m.First || m.Count == 0 && m.Version != versionSkip:
		return nil, fmt.Errorf("sequences %d to %d with %d messages", m.First, m.Last, m.Count)
	case m.Bytes <= 0 || m.Bytes > maxObject || m.Raw < 0 || (m.Raw == 0) != (m.Count == 0) || m.Raw > maxRaw:
		return nil, fmt.Errorf("%d bytes of %d", m.Bytes, m.Raw)
	}
	missing, next, end := uint64(0), m.First, m.Last-1 // the last one is a message
	if m.Version == versionSkip {
		end = m.Last
	}
	for _, r := range m.Missing {
		if r.From < next || r.To < r.From || r.To > end {
			return nil, fmt.Errorf("missing are %d to %d of %d to %d", r.From, r.To, m.First, m.Last)
		}
		missing += r.To - r.From + 1
		next = r.To + 1
	}
	if m.Count != m.Last-m.First+1-missing {
		return nil, fmt.Errorf("%d messages in %d to %d, with %d missing", m.Count, m.First, m.Last, missing)
	}
	next = m.First
	for _, r := range m.Erased {
		if r.From < next || r.To < r.From || r.To > m.Last {
			return nil, fmt.Errorf("erased are %d to %d of %d to %d", r.From, r.To, m.First, m.Last)
		}
		next = r.To + 2
	}
	if m.Generation < 0 || m.Generation > maxGeneration {
		return nil, fmt.Errorf("generation %d", m.Generation)
	}
	return m, nil
}
