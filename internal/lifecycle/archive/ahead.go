package archive

import (
	"context"
	"slices"
	"sync"

	"github.com/outflowhq/outflow/internal/crash"
)

// readers is how many manifests are read at once: a store may be far away, and have thousands.
const readers = 8

// ahead reads the manifests that were listed, several at once, for one that takes them in order.
type ahead struct {
	a      *Archive
	names  []string
	listed []uint64 // the first sequences of those that were not read yet
	ready  []result // those of the segments before them
	late   bool     // a manifest was read that was not listed
}

// result is the manifest of a segment, or why there is none.
type result struct {
	first uint64
	m     *Manifest
	err   error
}

func (a *Archive) readAhead(names []string) *ahead {
	h := &ahead{a: a, names: names}
	for _, n := range names {
		if first, _, ok := parseName(n); ok {
			h.listed = append(h.listed, first)
		}
	}
	slices.Sort(h.listed)
	h.listed = slices.Compact(h.listed)
	return h
}

// manifest returns the manifest of a segment. One that was not listed may have come since.
func (h *ahead) manifest(ctx context.Context, first uint64) (*Manifest, error) {
	if len(h.ready) == 0 && len(h.listed) > 0 && h.listed[0] == first {
		h.readNext(ctx)
	}
	if len(h.ready) == 0 || h.ready[0].first != first {
		m, err := h.read(ctx, first)
		h.late = h.late || m != nil
		return m, err
	}
	r := h.ready[0]
	h.ready = h.ready[1:]
	return r.m, r.err
}

func (h *ahead) read(ctx context.Context, first uint64) (*Manifest, error) {
	m, err := h.a.manifest(ctx, h.names, first)
	if m != nil {
		h.a.keepDocs(m)
	}
	return m, err
}

// keepDocs leaves out of a manifest what is not needed of its documents.
func (a *Archive) keepDocs(m *Manifest) {
	var kept []string
	for _, d := range a.docs {
		if _, has := slices.BinarySearch(m.Docs, d); has {
			kept = append(kept, d)
		}
	}
	m.Docs, m.brief = kept, true
}

func (h *ahead) readNext(ctx context.Context) {
	n := min(len(h.listed), readers)
	h.ready = make([]result, n)
	var all sync.WaitGroup
	for i, first := range h.listed[:n] {
		all.Go(func() {
			defer crash.Guard()
			m, err := h.read(ctx, first)
			h.ready[i] = result{first, m, err}
		})
	}
	all.Wait()
	h.listed = h.listed[n:]
}
