package archive

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Known is what a process that runs on remembers of an archive from one look at it to the next, so that it
// reads each manifest once: of each some 500 bytes, whatever its segment holds. So that it reads each message
// once, it has the segment that it has begun as well. Its zero value knows nothing. One goroutine uses it.
//
// What is remembered says where segments lie, and how far the archive is; it never stands for the segment
// itself. [Archive.Verify] and what is built on it read the manifest again, and the object whole.
type Known struct {
	folder   string
	segments []*Manifest
	had      uint64    // that archive had messages up to this one; 0: it had none
	begun    *Segment  // nil: none
	listed   time.Time // when all of their names were last looked for
	part     *Manifest // of the segment of which only a part has gone from the stream; nil: of none
	parted   time.Time // when that was
}

// relist is how long the manifest of an old segment may be lost before that is noticed, where nothing needs
// it.
const relist = time.Hour

// parts is how long the rest of a segment waits, of which a part has gone from the stream: it is read whole
// for each of them.
const parts = time.Hour

// waits reports whether others of a segment, of which messages up to a sequence may go, have gone a short
// time ago. All of it may go at once.
func (k *Known) waits(m *Manifest, to uint64) bool {
	return k != nil && to < m.Last && k.part == m && time.Since(k.parted) < parts
}

// Load is [Load], but for what is known. The manifests of the archive have no holes, erasures and documents.
// If k is nil nothing is known, and they are whole.
func (k *Known) Load(ctx context.Context, store Store, folder string, hit func(point string)) (*Archive,
	error) {
	if k == nil {
		return Load(ctx, store, folder, hit)
	}
	a, err := prepare(store, folder, hit)
	if err != nil {
		return nil, err
	}
	a.known = k
	k.of(a)
	if len(k.segments) > 0 {
		there, err := k.there(ctx, a)
		if err != nil {
			return nil, err
		}
		if there {
			a.Segments = k.segments[:len(k.segments):len(k.segments)]
		}
	}
	if len(a.Segments) == 0 {
		k.segments, k.listed = nil, time.Now() // Refresh reads all
	}
	if err := a.Refresh(ctx); err != nil || len(a.Segments) > 0 || k.had == 0 {
		return a, err
	}
	// It is said at each look until it is back: otherwise the next one would begin a second archive.
	return nil, &outbox.Fault{Class: outbox.Fatal, Code: CodeEmpty,
		Message: fmt.Sprintf("the archive of stream %s had messages up to %d, and has none any more",
			a.stream, k.had),
		Hint: "Is its volume mounted? If somebody removed it, start this process again: it begins a new one"}
}

// there reports whether the newest manifest that is known is still there, and now and then whether all are.
// Otherwise somebody has put an older copy in place of the archive, or lost a part of it, and nothing that is
// known counts.
func (k *Known) there(ctx context.Context, a *Archive) (bool, error) {
	looked := k.segments[len(k.segments)-1:]
	now := time.Now()
	all := now.Sub(k.listed) >= relist
	if all {
		looked = k.segments
	}
	names, err := a.from(ctx, looked[0].First)
	if err != nil {
		return false, err
	}
	generations := map[uint64]int{}
	for _, n := range names {
		if first, gen, ok := parseName(n); ok {
			generations[first] = max(gen, generations[first])
		}
	}
	for _, m := range looked {
		if gen, ok := generations[m.First]; !ok || gen < m.named {
			return false, nil
		}
	}
	if all {
		k.listed = now
	}
	return true, nil
}

// Begun returns the segment that a run of this process has left, if it is the one behind the archive's last;
// nil: there is none. Whoever takes it leaves it again, or nothing is left.
func (a *Archive) Begun() *Segment {
	if a.known == nil {
		return nil
	}
	s := a.known.begun
	a.known.begun = nil
	if s == nil || s.m.Stream != a.stream || !s.m.Created.Equal(a.created) || s.m.First != a.Next() ||
		s.m.Prev != a.chain() {
		return nil
	}
	return s
}

// Leave leaves a segment that is not complete to the next run of this process.
func (a *Archive) Leave(s *Segment) {
	if a.known != nil {
		a.known.begun = s
	}
}

// of forgets what is known of another archive.
func (k *Known) of(a *Archive) {
	if k.folder != a.folder {
		k.folder, k.segments, k.had = a.folder, nil, 0
	}
}

// keep remembers the segments of an archive.
func (k *Known) keep(a *Archive) {
	if k == nil {
		return
	}
	k.of(a)
	k.segments = a.Segments
	if n := len(k.segments); n > 0 {
		k.had = k.segments[n-1].Last
	}
}

// abridge leaves out of a manifest what is only needed to read its segment.
func (a *Archive) abridge(m *Manifest) {
	m.abridged = true
	m.Missing, m.Least, m.Greatest, m.Docs, m.DocsSum = nil, nil, nil, nil, nil
	m.Erasure, m.Erased = nil, nil
	m.Gaps = slices.Clone(m.Gaps[:min(len(m.Gaps), 1)]) // whether there are any
	m.Stream = a.stream
	if n := len(a.Segments); n > 0 && a.Segments[n-1].System == m.System {
		m.System = a.Segments[n-1].System // one string for all
	}
}

// again reads a manifest of which something was left out: it has to be there still, and to say the same.
func (a *Archive) again(ctx context.Context, m *Manifest) (*Manifest, error) {
	now, err := a.manifest(ctx, []string{a.generationName(m.First, m.named)[len(a.folder):]}, m.First)
	switch {
	case errors.Is(err, ErrMissing):
		return nil, a.damaged(a.generationName(m.First, m.named), errors.New("it is lost"))
	case err != nil:
		return nil, err
	case now.Chain != m.Chain:
		return nil, a.damaged(a.generationName(m.First, m.named), errors.New("it is another one now"))
	}
	return now, nil
}
