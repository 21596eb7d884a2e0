package archive

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestAnArchiveOfVersion1GoesOn: testdata/version1 was written when each line had a hash, and doc2 was erased
// from it then. It is read, more is archived, more is erased, and its segments keep their form, which those
// who wrote them read.
func TestAnArchiveOfVersion1GoesOn(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	must.Succeed(t, os.CopyFS(dir, os.DirFS("testdata/version1")))
	a := load(t, store, nil)
	raw := message(5)
	raw.Header, raw.Data = nats.Header{"By": {"anna", "b\xff"}}, []byte("\xfe raw")
	mustHave := func(want ...*Message) {
		t.Helper()
		if got := read(t, load(t, store, nil)); !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	mustHave(message(1), message(3), raw, message(6))
	must.Succeed(t, add(t, a, 12))
	_, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	mustHave(message(1), raw, message(6), message(11), message(12))
	for _, m := range load(t, store, nil).Segments {
		want := int(m.Erased.Count())
		if m.Version == 1 {
			want = int(m.Count)
		}
		if got := strings.Count(lines(t, store, a.ObjectName(m)), `,"h":"`); got != want {
			t.Errorf("version %d: %d of %d lines have a hash", m.Version, got, m.Count)
		}
	}
}

func lines(t *testing.T, store Store, name string) string {
	t.Helper()
	object, err := store.Read(t.Context(), name, maxObject)
	must.Succeed(t, err)
	dec, err := zstd.NewReader(nil)
	must.Succeed(t, err)
	defer dec.Close()
	text, err := dec.DecodeAll(object, nil)
	must.Succeed(t, err)
	return string(text)
}

// TestWhatARunOfVersion1LeftIsKept: one that was killed before it created the manifest.
func TestWhatARunOfVersion1LeftIsKept(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	a := load(t, store, nil)
	s, err := newSegment(Manifest{Version: 1, First: 1})
	must.Succeed(t, err)
	for seq := uint64(1); seq <= 5; seq++ {
		must.Succeed(t, s.Add(message(seq)))
	}
	m, object, err := s.finish()
	must.Succeed(t, err)
	must.Succeed(t, store.Create(t.Context(), a.ObjectName(m), object))
	must.Succeed(t, add(t, a, 5))
	if got := read(t, load(t, store, nil)); len(got) != 5 {
		t.Errorf("%d messages", len(got))
	}
}
