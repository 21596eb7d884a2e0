package archive

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// How a segment is written anew, although nothing of it is ever changed: the new object and the new manifest
// have names of the next generation, and the manifest of the greatest one counts. As with a new segment,
// whoever creates the manifest has decided. What was there before is then overwritten with nothing, under
// its name: so whoever slept meanwhile, with an old manifest in mind, still finds that the name is taken.
//
//	00000000000000000001-00000000000000065536.jsonl.zst          empty
//	00000000000000000001.json                                    {"v":1,"replaced":true}
//	00000000000000000001-00000000000000065536.e000001.jsonl.zst  the messages that are left
//	00000000000000000001.e000001.json                            its manifest

// emptyObject is a zstd frame of nothing.
var emptyObject = []byte{0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00}

// replacedManifest is that of a generation that is over.
var replacedManifest = []byte(`{"v":1,"replaced":true}`)

// ErrErased: a message of the segment was erased from the stream while the segment was made.
var ErrErased = errors.New("a message of the segment was erased meanwhile")

// suffix is that of a generation in a name.
func suffix(generation int) string {
	if generation == 0 {
		return ""
	}
	return fmt.Sprintf(".e%06d", generation)
}

// generation reads a suffix.
func generation(text string) (int, bool) {
	if text == "" {
		return 0, true
	}
	digits, is := strings.CutPrefix(text, ".e")
	n, err := strconv.Atoi(digits)
	return n, is && err == nil && suffix(n) == text
}

// object is what the name of an object says.
type object struct {
	name        string // within the folder
	first, last uint64
	generation  int
}

func parseObject(name string) (o object, ok bool) {
	text, is := strings.CutSuffix(name, ".jsonl.zst")
	if !is || len(text) < 41 || text[20] != '-' {
		return o, false
	}
	var err, other error
	o.name = name
	o.first, err = strconv.ParseUint(text[:20], 10, 64)
	o.last, other = strconv.ParseUint(text[21:41], 10, 64)
	o.generation, ok = generation(text[41:])
	return o, ok && err == nil && other == nil
}

// parseName reads the name of a manifest.
func parseName(name string) (first uint64, gen int, ok bool) {
	text, is := strings.CutSuffix(name, ".json")
	if !is || len(text) < 20 {
		return 0, 0, false
	}
	first, err := strconv.ParseUint(text[:20], 10, 64)
	gen, ok = generation(text[20:])
	return first, gen, ok && err == nil
}

func (a *Archive) generationName(first uint64, gen int) string {
	return fmt.Sprintf("%s%020d%s.json", a.folder, first, suffix(gen))
}

// looks is how often the manifests are listed: a manifest that says that it was replaced may be read after
// the list was made in which the newer one is missing.
const looks = 5

// manifest reads the manifest that counts: of the greatest generation, among these names.
func (a *Archive) manifest(ctx context.Context, names []string, first uint64) (*Manifest, error) {
	for n := 1; ; n++ {
		m, err := a.greatest(ctx, names, first)
		if err != nil || m != nil {
			return m, err
		}
		if n == looks {
			return nil, a.damaged(a.manifestName(first), errors.New("the one that replaced it is lost"))
		}
		if names, err = a.from(ctx, first); err != nil {
			return nil, err
		}
	}
}

// of returns those of the names, which are in order, that are of the segment with a first sequence.
func of(names []string, first uint64) []string {
	start, _ := slices.BinarySearch(names, fmt.Sprintf("%020d", first))
	end, _ := slices.BinarySearch(names[start:], fmt.Sprintf("%020d", first+1))
	return names[start : start+end]
}

// current reads the manifest that counts now.
func (a *Archive) current(ctx context.Context, first uint64) (*Manifest, error) {
	names, err := a.from(ctx, first)
	if err != nil {
		return nil, err
	}
	return a.manifest(ctx, names, first)
}

// greatest reads the manifests of a segment from the greatest generation down to the first that was not
// replaced; nil if all were.
func (a *Archive) greatest(ctx context.Context, names []string, first uint64) (*Manifest, error) {
	gens := []int{0}
	for _, n := range of(names, first) {
		if _, gen, ok := parseName(n); ok && gen > 0 {
			gens = append(gens, gen)
		}
	}
	slices.Sort(gens)
	for _, gen := range slices.Backward(gens) {
		name := a.generationName(first, gen)
		text, err := a.store.Read(ctx, name, maxManifest)
		if err != nil {
			return nil, err
		}
		m, err := parseManifest(text)
		if err == nil && gen > 0 && !m.Replaced && m.Generation != gen {
			err = fmt.Errorf("it is of generation %d", m.Generation)
		}
		if err != nil {
			return nil, a.damaged(name, err)
		}
		if !m.Replaced {
			m.named = gen
			return m, nil
		}
	}
	return nil, nil
}

// unerased fails where a message of the segment was erased from the stream since it was read.
func (a *Archive) unerased(ctx context.Context, s *Segment) error {
	if a.Erased == nil {
		return nil
	}
	erased, err := a.Erased(ctx)
	if held := s.holds(erased); err == nil && len(held) > 0 {
		err = fmt.Errorf("%w: of messages %d to %d some of %d to %d", ErrErased, s.m.First, s.m.Last,
			held[0].From, held[len(held)-1].To)
	}
	return err
}

// Erasing says what is erased.
type Erasing struct {
	Request string // stands in place of what a line had
	// Is reports whether a message is to be erased.
	Is func(*Message) (bool, error)
	// Before is called before a segment is written anew without messages of which Is said so; may be nil.
	Before func() error
	// Done is called after each segment that was looked at; may be nil.
	Done func()
}

// Erased is what became of an archive.
type Erased struct {
	Messages uint64 // that were erased by this call
	Segments int    // that were written anew by it
	Passed   int    // segments that were not read, as by their manifests no document of them is erased
	Replaced int    // objects and manifests that were overwritten
}

// Erase writes the segments with messages that are to be erased anew, without them, and overwrites what was
// there before. It may be killed at any point and run again, also for another request, and two at once do no
// harm. Root and chain stay as they are: each line keeps its hash.
//
// Segments that lack the documents that Load was given are passed over. The others do not wait for one that
// is lost or damaged, which is the error then.
func (a *Archive) Erase(ctx context.Context, e Erasing) (done Erased, err error) {
	var damaged error
	// A list for each segment would be of all those behind it.
	listed, err := a.from(ctx, 1)
	if err != nil {
		return done, err
	}
	for i, m := range a.Segments {
		// The manifest of one that this request has written anew says nothing of its document any more.
		if a.Lacks(m) && !slices.Contains(m.Erasure, e.Request) {
			done.Passed++
		} else {
			names := of(listed, m.First)
			for again := true; again && err == nil; {
				again, err = a.eraseFrom(ctx, i, names, e, &done)
				if again && err == nil {
					names, err = a.from(ctx, m.First)
				}
			}
			switch {
			case err == nil:
				// At once: where space is short, there may not be enough for all of them twice. What can't
				// be overwritten, as in a bucket with a retention policy, is tried again below, and keeps no
				// other segment from being written anew.
				_ = a.replaceOld(ctx, of(names, m.First), &done)
			case !IsDamaged(err):
				return done, err
			default:
				damaged, err = cmp.Or(damaged, err), nil
			}
		}
		if e.Done != nil {
			e.Done()
		}
	}
	if damaged != nil { // what is named, and what is not, is not certain
		return done, damaged
	}
	if listed, err = a.store.List(ctx, a.folder, ""); err != nil {
		return done, err
	}
	return done, a.replaceOld(ctx, listed, &done)
}

// Lacks reports whether Load was given documents, and a segment has no message of them: by its manifest, if
// that says whether it is right.
func (a *Archive) Lacks(m *Manifest) bool {
	return len(a.docs) > 0 && len(m.Docs) == 0 && m.DocsSum != nil
}

// Tidy removes what killed processes have left of objects that they were making, which may have messages that
// are erased. It returns the names of those that somebody is making.
func (a *Archive) Tidy(ctx context.Context) (busy []string, err error) {
	return a.store.Tidy(ctx, a.folder)
}

// ErasedBy reads back the segments that a request has written anew, and counts the messages that it erased.
func (a *Archive) ErasedBy(ctx context.Context, request string) (n int64, err error) {
	for _, m := range a.Segments {
		if !slices.Contains(m.Erasure, request) {
			continue
		}
		if err := a.read(ctx, m, func(msg *Message, _ Hash) error {
			if msg.erased == request {
				n++
			}
			return nil
		}); err != nil {
			return n, err
		}
	}
	return n, nil
}

// eraseFrom erases from one segment, of which there are these names. again: somebody else has written it anew
// since they were listed.
func (a *Archive) eraseFrom(ctx context.Context, i int, names []string, e Erasing, done *Erased) (again bool,
	err error) {
	old, err := a.manifest(ctx, names, a.Segments[i].First)
	if err != nil {
		return false, err
	}
	if old.Chain != a.Segments[i].Chain {
		return false, a.damaged(a.manifestName(old.First), errors.New("it is another one now"))
	}
	a.keepDocs(old)
	a.Segments[i] = old
	s, n, err := a.without(ctx, old, e)
	if err != nil && a.overtaken(ctx, old, err) {
		return true, nil
	}
	if err != nil || n == 0 {
		return false, err
	}
	if e.Before != nil {
		if err := e.Before(); err != nil {
			return false, err
		}
	}
	gen := old.Generation
	for _, name := range of(names, old.First) {
		if o, ok := parseObject(name); ok {
			gen = max(gen, o.generation)
		}
		if _, g, ok := parseName(name); ok {
			gen = max(gen, g)
		}
	}
	made, object, err := s.finish()
	if err != nil {
		return false, err
	}
	if made.Root != old.Root || made.Count != old.Count || made.End != old.End {
		return false, a.damaged(a.ObjectName(old), errors.New("written anew it has others"))
	}
	m := *old
	m.Bytes, m.Raw, m.Object, m.Docs, m.DocsSum = made.Bytes, made.Raw, made.Object, made.Docs, made.DocsSum
	m.Erased, m.Generation, m.named = made.Erased.With(old.Erased...), gen+1, gen+1
	if m.Erasure = slices.Clone(old.Erasure); !slices.Contains(m.Erasure, e.Request) {
		m.Erasure = append(m.Erasure, e.Request)
	}
	if again, err := a.replace(ctx, old, &m, object); err != nil || again {
		return again, err
	}
	a.keepDocs(&m)
	a.Segments[i] = &m
	done.Messages += n
	done.Segments++
	return false, nil
}

// overtaken reports whether an object is not what it was because somebody else has written the segment anew.
func (a *Archive) overtaken(ctx context.Context, m *Manifest, err error) bool {
	if !IsDamaged(err) {
		return false
	}
	now, err := a.current(ctx, m.First)
	return err == nil && now.named > m.named && now.Chain == m.Chain
}

// without makes a segment of those messages that are not erased, and says how many are.
func (a *Archive) without(ctx context.Context, old *Manifest, e Erasing) (s *Segment, n uint64, err error) {
	if s, err = newSegment(Manifest{Version: old.Version, First: old.First}); err != nil {
		return nil, 0, err
	}
	err = a.readAs(ctx, old, func(msg *Message, h Hash) error {
		if msg.erased != "" {
			return s.addErased(msg.Seq, h, msg.erased)
		}
		is, err := e.Is(msg)
		if err != nil {
			return err
		}
		if is {
			n++
			return s.addErased(msg.Seq, h, e.Request)
		}
		return s.Add(msg)
	})
	return s, n, err
}

// replace lets a manifest take the place of the one before it. again: somebody else was faster.
func (a *Archive) replace(ctx context.Context, old, m *Manifest, object []byte) (again bool, err error) {
	text, err := m.text()
	if err != nil {
		return false, err
	}
	taken := func(err error) bool { return errors.Is(err, ErrExists) }
	if err := a.store.Create(ctx, a.ObjectName(m), object); err != nil {
		if taken(err) {
			return true, nil
		}
		return false, err
	}
	a.hit("erase.object")
	if err := a.readAs(ctx, m, func(*Message, Hash) error { return nil }); err != nil {
		if a.overtaken(ctx, old, err) {
			return true, nil
		}
		return false, err
	}
	// Nobody may decide about a generation in between any more, which this one knows nothing of.
	for gen := old.Generation + 1; gen < m.Generation; gen++ {
		if claimed, err := a.claim(ctx, m.First, gen); err != nil || !claimed {
			return !claimed, err
		}
	}
	if err := a.store.Create(ctx, a.generationName(m.First, m.Generation), text); err != nil {
		if taken(err) {
			return true, nil
		}
		return false, err
	}
	a.hit("erase.manifest")
	return false, nil
}

// claim makes sure that a generation has no manifest, and will have none.
func (a *Archive) claim(ctx context.Context, first uint64, gen int) (bool, error) {
	name := a.generationName(first, gen)
	err := a.store.Create(ctx, name, replacedManifest)
	if !errors.Is(err, ErrExists) {
		return err == nil, err
	}
	text, err := a.store.Read(ctx, name, maxManifest)
	return bytes.Equal(text, replacedManifest), err
}

// replaceOld overwrites those of the names that no manifest has any more: what was before an erasure, what a
// run left that was killed, and the segments of archivers that were overtaken. Behind the end of the chain it
// leaves all as it is.
func (a *Archive) replaceOld(ctx context.Context, names []string, done *Erased) error {
	counts := func(first uint64) *Manifest {
		i, found := slices.BinarySearchFunc(a.Segments, first, func(m *Manifest, first uint64) int {
			return cmp.Compare(m.First, first)
		})
		if !found {
			return nil
		}
		return a.Segments[i]
	}
	overwrite := func(name string, with []byte) error {
		there, err := a.store.Read(ctx, a.folder+name, maxObject)
		if err != nil || bytes.Equal(there, with) {
			return err
		}
		if err := a.store.Replace(ctx, a.folder+name, with); err != nil {
			return err
		}
		done.Replaced++
		a.hit("erase.replaced")
		return nil
	}
	for _, name := range names {
		first, gen, ok := parseName(name)
		if m := counts(first); ok && m != nil && gen < m.named {
			if err := overwrite(name, replacedManifest); err != nil {
				return err
			}
		}
	}
	for _, name := range names {
		o, ok := parseObject(name)
		if !ok || o.first >= a.Next() {
			continue
		}
		if m := counts(o.first); m != nil && m.Last == o.last {
			if o.generation == m.Generation {
				continue
			}
			if o.generation > m.Generation {
				if claimed, err := a.claim(ctx, o.first, o.generation); err != nil || !claimed {
					if err != nil {
						return err
					}
					continue
				}
			}
		}
		if err := overwrite(name, emptyObject); err != nil {
			return err
		}
	}
	return nil
}
