package archive

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

var made = time.Date(2026, 3, 1, 10, 0, 0, 123456789, time.UTC)

func folderOf(t *testing.T) (Store, string) {
	t.Helper()
	dir := t.TempDir()
	store, err := Open(t.Context(), "file://"+dir)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	return store, dir
}

func load(t *testing.T, store Store, hit func(string), docs ...string) *Archive {
	t.Helper()
	var hashes []string
	for _, doc := range docs {
		hashes = append(hashes, SubjectHash("outbox."+doc))
	}
	a, err := Load(t.Context(), store, FolderOf("S", made), hit, hashes...)
	must.Succeed(t, err)
	return a
}

func message(seq uint64) *Message {
	return &Message{
		Seq: seq, Time: made.Add(time.Duration(seq)), Subject: fmt.Sprintf("outbox.doc%d", seq%7),
		Header: nats.Header{"By": {"anna"}},
		Data:   fmt.Appendf(nil, `{"n": %d, "big": 9007199254740993.10}`, seq),
	}
}

// add appends the messages of a segment.
func add(t *testing.T, a *Archive, to uint64) error {
	t.Helper()
	s, err := a.NewSegment()
	must.Succeed(t, err)
	for seq := a.Next(); seq <= to; seq++ {
		must.Succeed(t, s.Add(message(seq)))
	}
	_, err = a.Append(t.Context(), s, outbox.LSN(to))
	return err
}

func read(t *testing.T, a *Archive) (all []*Message) {
	t.Helper()
	must.Succeed(t, a.Read(t.Context(), 1, func(m *Message) error {
		all = append(all, m)
		return nil
	}))
	return all
}

func wantFault(t *testing.T, err error, code string, says ...string) {
	t.Helper()
	f := outbox.FaultOf(err)
	if f == nil || f.Code != code {
		t.Fatalf("got %v, want code %s", err, code)
	}
	for _, s := range says {
		if !strings.Contains(f.Message, s) {
			t.Errorf("%q does not say %q", f.Message, s)
		}
	}
}

// TestMessagesComeBackAsTheyWere: any bytes, holes, headers in any number, across frames and segments.
func TestMessagesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	for seed := range uint64(tier.Size(20)) {
		rnd := rand.New(rand.NewPCG(seed, 17))
		store, _ := folderOf(t)
		a := load(t, store, nil)
		var want []*Message
		seq := uint64(0)
		for range 3 {
			s, err := a.NewSegment()
			must.Succeed(t, err)
			for range 1 + rnd.IntN(200) {
				seq += 1 + uint64(rnd.IntN(10)/9*rnd.IntN(50))
				m := message(seq)
				m.Data = text(rnd, rnd.IntN(20_000))
				m.Header = nats.Header{}
				for range rnd.IntN(4) {
					name := fmt.Sprintf("H-%d", rnd.IntN(5))
					v := strings.NewReplacer("\r", "", "\n", "", " ", "").Replace(string(text(rnd, 9)))
					m.Header[name] = append(m.Header[name], v)
				}
				want = append(want, m)
				must.Succeed(t, s.Add(m))
			}
			_, err = a.Append(t.Context(), s, 0)
			must.Succeed(t, err)
		}
		got := read(t, load(t, store, nil))
		if len(got) != len(want) {
			t.Fatalf("seed %d: %d messages of %d", seed, len(got), len(want))
		}
		for i, m := range got {
			w := want[i]
			if m.Seq != w.Seq || !m.Time.Equal(w.Time) || m.Subject != w.Subject ||
				!bytes.Equal(m.Data, w.Data) ||
				len(m.Header)+len(w.Header) > 0 && !reflect.DeepEqual(m.Header, w.Header) {
				t.Fatalf("seed %d: got %+v, want %+v", seed, m, w)
			}
		}
	}
}

// text is UTF-8, or not.
func text(rnd *rand.Rand, n int) []byte {
	b := make([]byte, 0, n)
	for len(b) < n {
		if rnd.IntN(2000) == 0 {
			b = append(b, byte(rnd.IntN(256)))
			continue
		}
		b = append(b, "a\"\\\n\t<>&é漢\u2028\x00 "[rnd.IntN(8)])
	}
	return b
}

func objects(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must.Succeed(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		content, err := os.ReadFile(path)
		all[d.Name()] = string(content)
		return err
	}))
	return all
}

// TestAKillAtAnyStepLeavesTheSameObjects: killed at each point and run again, the archive is the one of a
// run that was not killed.
func TestAKillAtAnyStepLeavesTheSameObjects(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 100))
	must.Succeed(t, add(t, a, 250))
	want := objects(t, dir)
	for _, point := range []string{"archive.begin", "archive.written", "archive.verified",
		"archive.manifest"} {
		store, dir := folderOf(t)
		must.Succeed(t, add(t, load(t, store, nil), 100))
		killed := false
		func() {
			defer func() { killed = recover() != nil }()
			a := load(t, store, func(p string) {
				if p == point {
					panic("killed")
				}
			})
			_ = add(t, a, 250)
		}()
		if !killed {
			t.Fatalf("%s was not reached", point)
		}
		a := load(t, store, nil)
		if a.Next() <= 250 {
			last, err := a.Unfinished(t.Context())
			must.Succeed(t, err)
			if point != "archive.begin" && last != 250 {
				t.Errorf("%s: unfinished up to %d, not 250", point, last)
			}
			must.Succeed(t, add(t, a, 250))
		}
		if got := objects(t, dir); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: other objects than without a kill", point)
		}
	}
}

// TestOfTwoArchiversOneDecides: one sleeps before it creates the manifest, and the other one makes a longer
// segment meanwhile.
func TestOfTwoArchiversOneDecides(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	slept := false
	slow := load(t, store, func(p string) {
		if p == "archive.verified" && !slept {
			slept = true
			must.Succeed(t, add(t, load(t, store, nil), 150))
		}
	})
	if err := add(t, slow, 100); !errors.Is(err, ErrOvertaken) {
		t.Fatalf("got %v", err)
	}
	must.Succeed(t, slow.Refresh(t.Context()))
	must.Succeed(t, add(t, slow, 300))
	if got := read(t, load(t, store, nil)); len(got) != 300 {
		t.Fatalf("%d messages", len(got))
	}
}

func TestAnObjectIsCreatedOnce(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	var wg sync.WaitGroup
	results := make([]error, 16)
	for i := range results {
		wg.Go(func() { results[i] = store.Create(context.Background(), "v1/a/b", []byte{byte(i)}) })
	}
	wg.Wait()
	winner := -1
	for i, err := range results {
		switch {
		case err == nil && winner < 0:
			winner = i
		case !errors.Is(err, ErrExists):
			t.Fatalf("%d: %v", i, err)
		}
	}
	got, err := store.Read(t.Context(), "v1/a/b", 10)
	must.Succeed(t, err)
	if !bytes.Equal(got, []byte{byte(winner)}) {
		t.Errorf("%v was written by another than %d", got, winner)
	}
	if _, err := store.Read(t.Context(), "../a", 10); err == nil || errors.Is(err, ErrMissing) {
		t.Errorf("a name outside of the folder: %v", err)
	}
	must.Succeed(t, store.Create(t.Context(), "large", make([]byte, 11)))
	if _, err := store.Read(t.Context(), "large", 10); err == nil {
		t.Error("more was read than allowed")
	}
}

// TestLostAndFlippedObjectsAreNamed: each object in turn is lost, shortened, and has a bit flipped.
func TestLostAndFlippedObjectsAreNamed(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	for _, to := range []uint64{100, 250, 300} {
		must.Succeed(t, add(t, load(t, store, nil), to))
	}
	whole := func() error {
		a, err := Load(t.Context(), store, FolderOf("S", made), nil)
		if err != nil {
			return err
		}
		return a.Read(t.Context(), 1, func(*Message) error { return nil })
	}
	must.Succeed(t, whole())
	rnd := rand.New(rand.NewPCG(1, 2))
	for name, content := range objects(t, dir) {
		path := filepath.Join(dir, "v1", FolderOf("S", made), name)
		newest := strings.HasSuffix(name, "0251.json") // nothing shows that it was there
		must.Succeed(t, os.Remove(path))
		if !newest {
			wantFault(t, whole(), CodeDamaged, name)
		}
		must.Succeed(t, os.WriteFile(path, []byte(content[:len(content)-1]), 0o600))
		wantFault(t, whole(), CodeDamaged)
		for range 40 {
			flipped := []byte(content)
			flipped[rnd.IntN(len(flipped))] ^= 1 << rnd.IntN(8)
			must.Succeed(t, os.WriteFile(path, flipped, 0o600))
			if err := whole(); err != nil {
				wantFault(t, err, CodeDamaged, name[:20])
			} else if strings.HasSuffix(name, ".zst") {
				t.Errorf("%s: nobody sees a flipped bit", name)
			}
		}
		must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
	}
	must.Succeed(t, whole())
}

// TestARangeNeedsNoSegmentBehindIt: what is before a lost object can be read, also right before it.
func TestARangeNeedsNoSegmentBehindIt(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	for _, to := range []uint64{100, 250} {
		must.Succeed(t, add(t, load(t, store, nil), to))
	}
	a := load(t, store, nil)
	must.Succeed(t, os.Remove(filepath.Join(dir, a.ObjectName(a.Segments[1]))))
	for _, r := range []Range{{From: 1, To: 100}, {From: 40, To: 60}, {From: 100, To: 100}} {
		next := r.From
		must.Succeed(t, a.ReadRange(t.Context(), r.From, r.To+1, func(m *Message) error {
			if m.Seq != next {
				t.Errorf("%d, not %d", m.Seq, next)
			}
			next++
			return nil
		}))
		if next != r.To+1 {
			t.Errorf("it ends before %d, not behind %d", next, r.To)
		}
	}
	wantFault(t, a.ReadRange(t.Context(), 1, 102, func(*Message) error { return nil }), CodeDamaged)
}

func TestTheFenceIsReachedWhereASegmentEndsAtACheckpoint(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	a := load(t, store, nil)
	from := func(system string, timeline uint32, to uint64, gap bool) {
		t.Helper()
		s, err := a.NewSegment()
		must.Succeed(t, err)
		s.Comes(system, timeline)
		begin := s.Next()
		if gap {
			s.Gap(outbox.Sequences{{From: s.Next(), To: s.Next()}}, nil)
			begin++
		}
		for seq := begin; seq <= to; seq++ {
			must.Succeed(t, s.Add(message(seq)))
		}
		_, err = a.Append(t.Context(), s, outbox.LSN(to))
		must.Succeed(t, err)
	}
	want := func(what string, last uint64, complete, whole outbox.LSN) {
		t.Helper()
		got := load(t, store, nil).Reach(func(system string, timeline uint32, lsn outbox.LSN) bool {
			return system == "b" && (timeline == 2 || lsn <= 250)
		})
		if got != (Reach{Last: last, Complete: complete, Whole: whole}) {
			t.Errorf("%s: %+v", what, got)
		}
	}
	want("nothing", 0, 0, 0)
	from("a", 1, 100, false)
	want("another cluster", 100, 0, 0)
	from("b", 1, 200, false)
	want("the cluster", 200, 200, 200)
	from("b", 1, 300, false)
	want("a timeline that was left before", 300, 200, 200)
	from("b", 2, 400, true)
	want("an accepted gap", 400, 400, 200)
	from("b", 2, 500, false)
	want("behind it", 500, 500, 200)
}

// TestTheRootIsThatOfRFC6962 compares with the definition, which is recursive.
func TestTheRootIsThatOfRFC6962(t *testing.T) {
	t.Parallel()
	var define func(leaves []Hash) Hash
	define = func(leaves []Hash) Hash {
		if len(leaves) == 1 {
			var one merkle
			one.add(leaves[0])
			return one.roots[0]
		}
		k := 1
		for 2*k < len(leaves) {
			k *= 2
		}
		return node(define(leaves[:k]), define(leaves[k:]))
	}
	var tree merkle
	var leaves []Hash
	for i := range 70 {
		leaf := Hash{byte(i)}
		leaves = append(leaves, leaf)
		tree.add(leaf)
		if tree.root() != define(leaves) {
			t.Fatalf("%d leaves", i+1)
		}
	}
}

// FuzzObject: whatever lies where an object should, reading ends with an error and not with a panic.
func FuzzObject(f *testing.F) {
	var b bytes.Buffer
	for seq := uint64(1); seq < 4; seq++ {
		_, err := appendLine(&b, message(seq), 1+int(seq)%2)
		must.Succeed(f, err)
	}
	enc, err := zstd.NewWriter(nil)
	must.Succeed(f, err)
	f.Add(b.Bytes(), true)
	f.Add(enc.EncodeAll(b.Bytes(), nil), false)
	f.Fuzz(func(t *testing.T, object []byte, compress bool) {
		if compress {
			object = enc.EncodeAll(object, nil)
		}
		m := &Manifest{First: 1, Last: 3, Count: 3, Raw: 1 << 20}
		if err := readObject(t.Context(), object, m, func(*Message, Hash) error { return nil }); err == nil {
			t.Error("without the root of its messages")
		}
		_, _ = parseManifest(object)
	})
}

// TestASegmentEndsBeforeItGetsTooLarge: whatever is in it, its manifest can be read back, and is written in
// one request.
func TestASegmentEndsBeforeItGetsTooLarge(t *testing.T) {
	t.Parallel()
	const first = 1 << 62 // as many digits as there are
	s, err := newSegment(Manifest{Version: version, Stream: "S", First: first})
	must.Succeed(t, err)
	for n := range maxDocs - 1 {
		s.docs[fmt.Sprintf("%016x", n)] = true
	}
	for s.next < first+2*(maxMissing-1) { // a message behind each
		s.missing(s.next)
		s.next, s.m.Count, s.m.Raw = s.next+1, s.m.Count+1, s.m.Raw+100
	}
	if s.Full() {
		t.Error("another message would fit")
	}
	must.Succeed(t, s.Add(&Message{Seq: s.next + 1, Subject: "outbox.last"}))
	m, _, err := s.finish()
	must.Succeed(t, err)
	text, err := json.Marshal(m)
	must.Succeed(t, err)
	if _, err := parseManifest(text); err != nil || !s.Full() || len(text) >= 16<<20 {
		t.Errorf("it is full: %v, with a manifest of %d bytes: %v", s.Full(), len(text), err)
	}
	s, err = newSegment(Manifest{First: 1})
	must.Succeed(t, err)
	if s.m.Raw = maxRaw - maxLine; !s.Full() {
		t.Error("another message, and its text would be too large to be read back")
	}
}
