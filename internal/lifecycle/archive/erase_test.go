package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// docOf erases a document of message.
func docOf(doc string) Erasing {
	return Erasing{Request: "request-" + doc,
		Is: func(m *Message) (bool, error) { return m.Subject == "outbox."+doc, nil }}
}

// everything is what the files of an archive hold, decompressed.
func everything(t *testing.T, dir string) (text string) {
	t.Helper()
	dec, err := zstd.NewReader(nil)
	must.Succeed(t, err)
	defer dec.Close()
	must.Succeed(t, filepath.WalkDir(dir, func(name string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		if strings.HasSuffix(name, ".zst") && err == nil {
			data, err = dec.DecodeAll(data, nil)
		}
		text += string(data)
		return err
	}))
	return text
}

// TestAManifestThatCannotBeReadBackIsNotWritten, nor one of such an object: the segment stays as it is.
func TestAManifestThatCannotBeReadBackIsNotWritten(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 10))
	before := everything(t, dir)
	manifest, object := *a.Segments[0], *a.Segments[0]
	manifest.Docs = []string{strings.Repeat("a", maxManifest)}
	object.Bytes = maxObject + 1
	for what, m := range map[string]*Manifest{"manifest": &manifest, "object": &object} {
		m.Generation++
		if again, err := a.replace(t.Context(), a.Segments[0], m, emptyObject); again || err == nil ||
			!strings.Contains(err.Error(), "the "+what+" of messages 1 to 10 would have") {
			t.Errorf("%s: again %v, %v", what, again, err)
		}
	}
	if everything(t, dir) != before {
		t.Error("something was written")
	}
}

// TestAManifestHasRoomForVeryManyErasedMessages: each of them alone. Fewer are written as ever.
func TestAManifestHasRoomForVeryManyErasedMessages(t *testing.T) {
	t.Parallel()
	for n, as := range map[uint64]string{2: `"erased":[{"from":1000000001,`, maxListed: `"erased":[{`,
		maxListed + 1: `"erased":"1000000001,2,2`, 2_000_000: `"erased":"1000000001,2,2`} {
		m := Manifest{Version: version, First: 1_000_000_000, Count: 2*n + 1, Bytes: 1, Raw: 1}
		m.Last = m.First + m.Count - 1
		for i := range n {
			m.Erased = append(m.Erased, Range{From: m.First + 1 + 2*i, To: m.First + 1 + 2*i})
		}
		var err error
		m.Chain, err = m.chained()
		must.Succeed(t, err)
		text, err := m.text()
		must.Succeed(t, err)
		if !bytes.Contains(text, []byte(as)) {
			t.Errorf("%d: %s", n, text[:min(len(text), 1500)])
		}
		got, err := parseManifest(text)
		must.Succeed(t, err)
		if !slices.Equal(got.Erased, m.Erased) {
			t.Errorf("%d: read back are %d", n, len(got.Erased))
		}
	}
}

// mustBeErased checks an archive of up to last messages without those documents.
func mustBeErased(t *testing.T, store Store, dir string, last uint64, docs ...string) {
	t.Helper()
	a := load(t, store, nil)
	want := []uint64{}
	for seq := uint64(1); seq <= last; seq++ {
		if !slices.Contains(docs, strings.TrimPrefix(message(seq).Subject, "outbox.")) {
			want = append(want, seq)
		}
	}
	got := []uint64{}
	for _, m := range read(t, a) {
		got = append(got, m.Seq)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("messages %v, want %v", got, want)
	}
	n, holes := uint64(0), outbox.Sequences{}
	for _, m := range a.Segments {
		n, holes = n+m.Readable(), holes.With(m.Holes()...)
	}
	if n != uint64(len(want)) || holes.Count() != last-n {
		t.Errorf("the manifests say %d messages, holes %v", n, holes)
	}
	all := everything(t, dir)
	for _, doc := range docs {
		for _, forbidden := range []string{`"outbox.` + doc + `"`, SubjectHash("outbox." + doc)} {
			if strings.Contains(all, forbidden) {
				t.Errorf("%q is still there", forbidden)
			}
		}
		for seq := uint64(1); seq <= last; seq++ {
			if m := message(seq); m.Subject == "outbox."+doc &&
				strings.Contains(all, fmt.Sprintf(`{\"n\": %d,`, seq)) {
				t.Errorf("the data of message %d is still there", seq)
			}
		}
	}
}

// TestWhatIsErasedIsInNoFileAndTheChainHolds: the manifests keep their hashes, whoever loaded the archive
// before goes on reading, what is archived afterwards continues the chain, and a second document follows.
func TestWhatIsErasedIsInNoFileAndTheChainHolds(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	before := load(t, store, nil)
	must.Succeed(t, add(t, before, 20))
	must.Succeed(t, add(t, before, 23)) // without doc3
	must.Succeed(t, add(t, before, 50))
	a := load(t, store, nil, "doc3")
	for i, m := range a.Segments {
		if lacks := a.Lacks(m); lacks != (i == 1) {
			t.Errorf("segment %d lacks the document: %v", i, lacks)
		}
	}
	done, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	if done.Messages != 7 || done.Segments != 2 || done.Replaced != 4 || done.Passed != 1 {
		t.Errorf("%+v", done)
	}
	for _, m := range a.Segments {
		if len(m.Docs) > 0 {
			t.Errorf("segment %d: it keeps documents %v in memory", m.First, m.Docs)
		}
	}
	mustBeErased(t, store, dir, 50, "doc3")
	for i, m := range load(t, store, nil).Segments {
		if m.Chain != before.Segments[i].Chain || m.Root != before.Segments[i].Root ||
			(m.Generation > 0) != (i != 1) {
			t.Errorf("segment %d is %+v", i, m)
		}
	}
	if n := len(read(t, before)); n != 43 {
		t.Errorf("by manifests of before there are %d messages", n)
	}
	if done, err = a.Erase(t.Context(), docOf("doc3")); err != nil || done != (Erased{Passed: 1}) {
		t.Errorf("again: %+v, %v", done, err)
	}
	must.Succeed(t, add(t, before, 60))
	done, err = load(t, store, nil).Erase(t.Context(), docOf("doc5"))
	must.Succeed(t, err)
	if done.Messages != 8 || done.Segments != 3 {
		t.Errorf("%+v", done)
	}
	if _, err := load(t, store, nil).Erase(t.Context(), docOf("doc3")); err != nil {
		t.Fatal(err)
	}
	mustBeErased(t, store, dir, 60, "doc3", "doc5")
	for _, m := range load(t, store, nil).Segments[2:] {
		if got := fmt.Sprint(m.Erasure); !strings.Contains(got, "request-doc3") {
			t.Errorf("segment %d: erasures %s", m.First, got)
		}
	}
}

// TestEventHeadersAreOfTheSegmentAsItIs: also by manifests of before an erasure, abridged or not. What stops
// the reading is no damage, and nothing of a damaged object is handed out.
func TestEventHeadersAreOfTheSegmentAsItIs(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	known := &Known{}
	abridged, err := known.Load(t.Context(), store, FolderOf("S", made), nil)
	must.Succeed(t, err)
	s, err := abridged.NewSegment()
	must.Succeed(t, err)
	for seq := uint64(1); seq <= 6; seq++ {
		m := message(seq)
		if seq != 4 {
			m.Header[outbox.HeaderName] = []string{fmt.Sprint(seq)}
		}
		must.Succeed(t, s.Add(m))
	}
	_, err = abridged.Append(t.Context(), s, 0)
	must.Succeed(t, err)
	before := load(t, store, nil)
	_, err = load(t, store, nil).Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var got []string
	headers := func(a *Archive, f func(string) error) error {
		got = nil
		return a.EventHeaders(ctx, a.Segments[0], func(value string) error {
			got = append(got, value)
			return f(value)
		})
	}
	for _, a := range []*Archive{before, abridged, load(t, store, nil)} {
		must.Succeed(t, headers(a, func(string) error { return nil }))
		if !slices.Equal(got, []string{"1", "2", "5", "6"}) {
			t.Errorf("got %q", got)
		}
		err := headers(a, func(value string) error {
			if value == "2" {
				return errKilled
			}
			return nil
		})
		if !errors.Is(err, errKilled) || outbox.FaultOf(err) != nil || len(got) != 2 {
			t.Errorf("stopped: %v, behind %q", err, got)
		}
	}
	object := filepath.Join(dir, filepath.FromSlash(before.ObjectName(load(t, store, nil).Segments[0])))
	content, err := os.ReadFile(object)
	must.Succeed(t, err)
	content[len(content)/2] ^= 1
	must.Succeed(t, os.WriteFile(object, content, 0o600))
	err = headers(before, func(string) error { return nil })
	wantFault(t, err, CodeDamaged, ".e000001.jsonl.zst", "its hash")
	if len(got) > 0 {
		t.Errorf("of a damaged object: %q", got)
	}
	content[len(content)/2] ^= 1
	must.Succeed(t, os.WriteFile(object, content, 0o600))
	err = headers(before, func(string) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) || outbox.FaultOf(err) != nil || len(got) != 1 {
		t.Errorf("canceled: %v, behind %q", err, got)
	}
}

var errKilled = errors.New("killed")

// TestAKillAtAnyStepOfAnErasureIsFoundAgain: by the same request, or by another one.
func TestAKillAtAnyStepOfAnErasureIsFoundAgain(t *testing.T) {
	t.Parallel()
	for _, next := range []string{"doc3", "doc4"} {
		for n := 1; n <= 8; n++ {
			store, dir := folderOf(t)
			a := load(t, store, nil)
			must.Succeed(t, add(t, a, 20))
			must.Succeed(t, add(t, a, 40))
			seen := 0
			a = load(t, store, func(string) {
				if seen++; seen == n {
					panic(errKilled)
				}
			})
			func() {
				defer func() { _ = recover() }()
				_, err := a.Erase(t.Context(), docOf("doc3"))
				t.Fatalf("there are only %d points: %v", seen, err)
			}()
			for _, doc := range []string{next, "doc3"} {
				_, err := load(t, store, nil).Erase(t.Context(), docOf(doc))
				must.Succeed(t, err)
			}
			mustBeErased(t, store, dir, 40, slices.Compact([]string{"doc3", next})...)
		}
	}
}

// TestAnErasureThatSleptUndoesNothing: it stands still at each of its points while another one goes through,
// which knows nothing of it.
func TestAnErasureThatSleptUndoesNothing(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 8; n++ {
		store, dir := folderOf(t)
		a := load(t, store, nil)
		must.Succeed(t, add(t, a, 20))
		must.Succeed(t, add(t, a, 40))
		seen, slept := 0, false
		first := load(t, store, func(string) {
			if seen++; seen == n {
				slept = true
				_, err := load(t, store, nil).Erase(t.Context(), docOf("doc4"))
				must.Succeed(t, err)
			}
		})
		_, err := first.Erase(t.Context(), docOf("doc3"))
		must.Succeed(t, err)
		if !slept {
			t.Fatalf("there are only %d points", seen)
		}
		mustBeErased(t, store, dir, 40, "doc3", "doc4")
	}
}

// TestErasuresAtOnce: none of them undoes what another one did, and all are done.
func TestErasuresAtOnce(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	for to := uint64(20); to <= 80; to += 20 {
		must.Succeed(t, add(t, a, to))
	}
	docs := []string{"doc0", "doc2", "doc3", "doc6"}
	var all sync.WaitGroup
	errs := make([]error, len(docs))
	for i, doc := range docs {
		a := load(t, store, nil)
		all.Go(func() { _, errs[i] = a.Erase(t.Context(), docOf(doc)) })
	}
	all.Wait()
	must.Succeed(t, errors.Join(errs...))
	_, err := load(t, store, nil).Erase(t.Context(), docOf("doc0")) // what they left of one another
	must.Succeed(t, err)
	mustBeErased(t, store, dir, 80, docs...)
}

// TestNoSegmentIsMadeOfWhatWasErasedMeanwhile: wherever the archiver is when the messages go.
func TestNoSegmentIsMadeOfWhatWasErasedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"archive.begin", "archive.written", "archive.verified"} {
		store, dir := folderOf(t)
		var erased outbox.Sequences
		is := func(context.Context) (outbox.Sequences, error) { return erased, nil }
		a := load(t, store, func(at string) {
			if at == point {
				erased = outbox.Sequences{{From: 3, To: 3}, {From: 10, To: 10}}
			}
		})
		a.Erased = is
		if err := add(t, a, 12); !errors.Is(err, ErrErased) || len(a.Segments) != 0 {
			t.Fatalf("%s: %v", point, err)
		}
		s, err := a.NewSegment()
		must.Succeed(t, err)
		for seq := uint64(1); seq <= 12; seq++ {
			if erased.Has(seq) {
				s.Gap(nil, outbox.Sequences{{From: seq, To: seq}})
			} else {
				must.Succeed(t, s.Add(message(seq)))
			}
		}
		_, err = a.Append(t.Context(), s, 0)
		must.Succeed(t, err)
		must.Succeed(t, add(t, a, 15))
		mustBeErased(t, store, dir, 15, "doc3")
		m := load(t, store, nil).Segments[0]
		if m.Erased.String() != "3,7" || outbox.Sequences(m.Missing).String() != "3,7" {
			t.Errorf("%s: %+v", point, m)
		}
		_, err = load(t, store, nil).Erase(t.Context(), docOf("doc4"))
		must.Succeed(t, err)
		mustBeErased(t, store, dir, 15, "doc3", "doc4")
	}
}

// TestWhatARunHasLeftIsNotNeeded: it ended between an object and its manifest, and before the next run a
// message of the object goes, or the object is damaged. That run makes another object, and nothing of an
// erased document stays.
func TestWhatARunHasLeftIsNotNeeded(t *testing.T) {
	t.Parallel()
	third := outbox.Sequences{{From: 3, To: 3}}
	for how, of := range map[string]struct{ gone, lost, erased outbox.Sequences }{
		"erased":  {gone: third, erased: third},
		"deleted": {gone: third},
		"lost":    {gone: outbox.Sequences{{From: 1, To: 3}}, lost: outbox.Sequences{{From: 1, To: 3}}},
		"damaged": {},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			store, dir := folderOf(t)
			killedBehindObject(t, store)
			a := load(t, store, nil)
			if how == "damaged" {
				name := a.ObjectName(&Manifest{First: 1, Last: 12})
				must.Succeed(t, store.Replace(t.Context(), name, []byte("damaged")))
			}
			if of.erased != nil {
				_, err := a.Erase(t.Context(), docOf("doc3"))
				must.Succeed(t, err)
			}
			a.Erased = func(context.Context) (outbox.Sequences, error) { return of.erased, nil }
			s, err := a.NewSegment()
			must.Succeed(t, err)
			noted := len(of.gone) == 0
			for seq := uint64(1); seq <= 12; seq++ {
				if of.gone.Has(seq) {
					continue
				}
				if seq > 3 && !noted {
					s.Gap(of.lost, of.erased)
					noted = true
				}
				must.Succeed(t, s.Add(message(seq)))
			}
			_, err = a.Append(t.Context(), s, 0)
			must.Succeed(t, err)
			must.Succeed(t, load(t, store, nil).Verify(t.Context(), a.Segments[0], nil))
			if of.erased != nil {
				_, err := load(t, store, nil).Erase(t.Context(), docOf("doc3"))
				must.Succeed(t, err)
				if strings.Contains(everything(t, dir), "outbox.doc3") {
					t.Error("what was erased is in a file of the archive")
				}
			}
		})
	}
}

// TestDocumentsThatAreNotThoseOfTheLines: a bit of a manifest's list was flipped, by which an erasure would
// pass its segment over. An earlier build has noted no hash of the list: then the segment is read.
func TestDocumentsThatAreNotThoseOfTheLines(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 20))
	must.Succeed(t, a.Verify(t.Context(), a.Segments[0], nil))
	name := filepath.Join(dir, filepath.FromSlash(a.manifestName(1)))
	text, err := os.ReadFile(name)
	must.Succeed(t, err)
	hash := SubjectHash("outbox.doc3")
	flipped := bytes.Replace(text, []byte(hash), []byte("0000"+hash[4:]), 1)
	write := func(text []byte) {
		t.Helper()
		must.Succeed(t, os.WriteFile(name, text, 0o600))
	}
	write(flipped)
	_, err = Load(t.Context(), store, FolderOf("S", made), nil)
	wantFault(t, err, CodeDamaged, a.manifestName(1), "its documents")

	sum := fmt.Sprintf(`"documents_sha256":"%v",`, a.Segments[0].DocsSum)
	write(bytes.Replace(flipped, []byte(sum), nil, 1))
	a = load(t, store, nil, "doc3")
	if a.Segments[0].DocsSum != nil {
		t.Fatalf("it still has %v", a.Segments[0].DocsSum)
	}
	wantFault(t, a.Verify(t.Context(), a.Segments[0], nil), CodeDamaged, a.manifestName(1), "message 3")
	done, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	if done.Messages != 3 || done.Passed != 0 {
		t.Errorf("%+v", done)
	}
	mustBeErased(t, store, dir, 20, "doc3")
	a = load(t, store, nil)
	must.Succeed(t, a.Verify(t.Context(), a.Segments[0], nil))

	name = filepath.Join(dir, filepath.FromSlash(a.generationName(1, 1)))
	text, err = os.ReadFile(name)
	must.Succeed(t, err)
	all, err := a.current(t.Context(), 1)
	must.Succeed(t, err)
	more := append(all.Docs, "ffffffffffffffff")
	text = bytes.Replace(text, []byte(`"],"documents_sha256"`),
		[]byte(`","ffffffffffffffff"],"documents_sha256"`), 1)
	write(bytes.Replace(text, []byte(a.Segments[0].DocsSum.String()), []byte(sumOf(more).String()), 1))
	a = load(t, store, nil)
	wantFault(t, a.Verify(t.Context(), a.Segments[0], nil), CodeDamaged, "e000001.json", "ffffffffffffffff")
}

// TestAnErasedLineThatTheManifestDoesNotKnow, and the other way round, is damage.
func TestAnErasedLineThatTheManifestDoesNotKnow(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 20))
	_, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	names, err := filepath.Glob(filepath.Join(dir, "v1", "*", "*.e*.json"))
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	text, err := os.ReadFile(names[0])
	must.Succeed(t, err)
	other := bytes.Replace(text, []byte(`{"from":10,"to":10}`), []byte(`{"from":11,"to":11}`), 1)
	if bytes.Equal(text, other) {
		t.Fatalf("%s", text)
	}
	must.Succeed(t, os.WriteFile(names[0], other, 0o600))
	b := load(t, store, nil)
	wantFault(t, b.Verify(t.Context(), b.Segments[0], nil), CodeDamaged, "message 10")

	must.Succeed(t, os.Remove(names[0]))
	_, err = Load(t.Context(), store, FolderOf("S", made), nil)
	wantFault(t, err, CodeDamaged, "the one that replaced it is lost")
}

// TestAnErasureListsTheArchiveOnce, not for each segment that it writes anew. What another one does meanwhile
// is found.
func TestAnErasureListsTheArchiveOnce(t *testing.T) {
	t.Parallel()
	const segments = 8
	lists := func(meanwhile func(Store)) (n int) {
		store, dir := folderOf(t)
		a := load(t, store, nil)
		for to := uint64(1); to <= segments; to++ {
			must.Succeed(t, add(t, a, 7*to))
		}
		a = load(t, listed{store, func() {
			if n++; n == 2 { // the first one was to load it
				meanwhile(store)
			}
		}}, nil)
		done, err := a.Erase(t.Context(), docOf("doc1"))
		must.Succeed(t, err)
		if done.Messages != segments || done.Segments != segments {
			t.Errorf("%+v", done)
		}
		if text := everything(t, dir); strings.Contains(text, "outbox.doc1") {
			t.Error("it is still there")
		}
		return n
	}
	if n := lists(func(Store) {}); n > 5 {
		t.Errorf("%d lists of %d segments", n, segments)
	}
	lists(func(store Store) {
		_, err := load(t, store, nil).Erase(t.Context(), docOf("doc2"))
		must.Succeed(t, err)
	})
}

// TestTheNamesOfASegmentAreFound among those of all others, which are in order.
func TestTheNamesOfASegmentAreFound(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	a := load(t, store, nil)
	for _, to := range []uint64{9, 99, 100, 1000} {
		must.Succeed(t, add(t, a, to))
	}
	_, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	names, err := a.from(t.Context(), 1)
	must.Succeed(t, err)
	found := 0
	for _, m := range a.Segments {
		for _, n := range of(names, m.First) {
			if found++; n[:20] != fmt.Sprintf("%020d", m.First) {
				t.Errorf("of the segment from %d on is %s", m.First, n)
			}
		}
	}
	if found != len(names) {
		t.Errorf("%d of %v were found", found, names)
	}
	for _, none := range []uint64{0, 2, 5000} {
		if n := of(names, none); len(n) > 0 {
			t.Errorf("from %d on there are %v", none, n)
		}
	}
}

// tight is a store in which there is only so much room.
type tight struct {
	Store
	dir  string
	room int
}

func (s tight) Create(ctx context.Context, name string, data []byte) error {
	used := 0
	if err := filepath.WalkDir(s.dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		used += int(info.Size())
		return err
	}); err != nil {
		return err
	}
	if used+len(data) > s.room {
		return syscall.ENOSPC
	}
	return s.Store.Create(ctx, name, data)
}

// TestAnErasureNeedsNoRoomForAllSegmentsTwice: what was before goes as soon as its segment was written anew.
// On a volume that is nearly full no erasure of a document of many segments would ever end.
func TestAnErasureNeedsNoRoomForAllSegmentsTwice(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	for to := uint64(1); to <= 20; to++ {
		must.Succeed(t, add(t, a, 20*to))
	}
	room := 0
	for _, m := range a.Segments {
		text, err := m.text()
		must.Succeed(t, err)
		room += 3 * (int(m.Bytes) + len(text)) / 2
	}
	_, err := load(t, tight{store, dir, room}, nil).Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	mustBeErased(t, store, dir, 400, "doc3")
}

// locked is a store that overwrites nothing, as a bucket with a retention policy.
type locked struct{ Store }

func (locked) Replace(context.Context, string, []byte) error { return errors.New("it is retained") }

// TestWhatCannotBeOverwrittenYetIsReadByNobody: each segment is written anew without the document, the error
// says that something of it is left, and a later run overwrites that.
func TestWhatCannotBeOverwrittenYetIsReadByNobody(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	for to := uint64(1); to <= 3; to++ {
		must.Succeed(t, add(t, a, 20*to))
	}
	if _, err := load(t, locked{store}, nil).Erase(t.Context(), docOf("doc3")); err == nil ||
		!strings.Contains(err.Error(), "it is retained") {
		t.Error(err)
	}
	for _, m := range read(t, load(t, store, nil)) {
		if m.Subject == "outbox.doc3" {
			t.Errorf("message %d is read", m.Seq)
		}
	}
	_, err := load(t, store, nil).Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	mustBeErased(t, store, dir, 60, "doc3")
}

// TestNoSegmentWaitsForOneThatIsLost: it may take long until that is back, or it never is.
func TestNoSegmentWaitsForOneThatIsLost(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	for to := uint64(1); to <= 3; to++ {
		must.Succeed(t, add(t, a, 20*to))
	}
	lost := filepath.Join(dir, a.ObjectName(a.Segments[1]))
	must.Succeed(t, os.Rename(lost, lost+".away"))
	looked := 0
	erasing := docOf("doc3")
	erasing.Done = func() { looked++ }
	done, err := load(t, store, nil).Erase(t.Context(), erasing)
	wantFault(t, err, CodeDamaged, a.ObjectName(a.Segments[1]))
	if done.Segments != 2 || looked != 3 {
		t.Errorf("%+v, %d looked at", done, looked)
	}
	if strings.Contains(everything(t, dir), `"outbox.doc3"`) {
		t.Error("the document is still there")
	}
	must.Succeed(t, os.Rename(lost+".away", lost))
	done, err = load(t, store, nil).Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	if done.Segments != 1 {
		t.Errorf("%+v", done)
	}
	mustBeErased(t, store, dir, 60, "doc3")
}
