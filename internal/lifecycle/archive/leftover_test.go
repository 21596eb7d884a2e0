package archive

import (
	"bytes"
	"context"
	"errors"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// TestWhatAnotherHasArchivedIsNotEmptied: an archiver stands still when it has read its object back. Another
// one makes the manifest that names it, and then the first one can't ask what was erased, or hears of an
// erasure.
func TestWhatAnotherHasArchivedIsNotEmptied(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"nats", "erased", "nats, generation 1"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			store, _ := folderOf(t)
			if strings.HasSuffix(how, "1") {
				a := load(t, store, nil)
				name := a.ObjectName(&Manifest{First: 1, Last: 12})
				must.Succeed(t, store.Create(t.Context(), name, []byte("damaged")))
			}
			asleep, asked := false, 0
			a := load(t, store, func(point string) {
				if point == "archive.verified" && !asleep {
					asleep = true
					must.Succeed(t, add(t, load(t, store, nil), 12)) // B
				}
			})
			a.Erased = func(context.Context) (outbox.Sequences, error) {
				if asked++; asked == 1 {
					return nil, nil
				}
				if how == "erased" {
					return outbox.Sequences{{From: 3, To: 3}}, nil
				}
				return nil, errors.New("nats: timeout")
			}
			_ = add(t, a, 12) // it has an error, and that is not what counts
			b := load(t, store, nil)
			if err := b.Verify(t.Context(), b.Segments[0], nil); err != nil {
				t.Error("what B has archived is gone:", err)
			}
		})
	}
}

// TestWhoIsOvertakenLeavesNoObject, unless it is the one that the manifest names: somebody else has made a
// longer segment, or found this object and named it.
func TestWhoIsOvertakenLeavesNoObject(t *testing.T) {
	t.Parallel()
	for _, to := range []uint64{150, 100} {
		store, dir := folderOf(t)
		asleep := false
		a := load(t, store, func(point string) {
			if point == "archive.verified" && !asleep {
				asleep = true
				must.Succeed(t, add(t, load(t, store, nil), to))
			}
		})
		if err := add(t, a, 100); !errors.Is(err, ErrOvertaken) {
			t.Fatalf("got %v", err)
		}
		b := load(t, store, nil)
		must.Succeed(t, b.Verify(t.Context(), b.Segments[0], nil))
		for name, content := range objects(t, dir) {
			named := path.Ext(name) == ".json" || name == path.Base(b.ObjectName(b.Segments[0]))
			if !named && content != string(emptyObject) {
				t.Errorf("up to %d: %s has %d bytes, and no manifest names it", to, name, len(content))
			}
		}
	}
}

// lying gives back something else than was written.
type lying struct{ Store }

func (l lying) Read(ctx context.Context, name string, limit int64) ([]byte, error) {
	data, err := l.Store.Read(ctx, name, limit)
	if path.Ext(name) == ".zst" && len(data) > 20 {
		data = bytes.Clone(data)
		data[len(data)/2] ^= 1
	}
	return data, err
}

// TestAStoreThatLiesGetsFewObjects: each run finds what the ones before have left, and none is right.
func TestAStoreThatLiesGetsFewObjects(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	for range 20 {
		wantFault(t, add(t, load(t, lying{store}, nil), 12), CodeDamaged)
	}
	names, err := store.List(t.Context(), root+FolderOf("S", made)+"/", "")
	must.Succeed(t, err)
	if len(names) > maxOthers {
		t.Errorf("objects of one segment: %q", names)
	}
}

// TestWhoReadBeforeAnErasureWritesNothingBehindIt: an archiver has read and asked before another one archives
// the same, and a document of it is erased. It is killed as soon as it has made an object.
func TestWhoReadBeforeAnErasureWritesNothingBehindIt(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	var erased outbox.Sequences
	slept := false
	a := load(t, store, func(point string) {
		if point == "archive.written" {
			panic("killed")
		}
	})
	a.Erased = func(context.Context) (outbox.Sequences, error) {
		was := erased
		if !slept {
			slept = true
			must.Succeed(t, add(t, load(t, store, nil), 12))
			_, err := load(t, store, nil).Erase(t.Context(), docOf("doc3"))
			must.Succeed(t, err)
			erased = outbox.Sequences{{From: 3, To: 3}, {From: 10, To: 10}}
		}
		return was, nil
	}
	func() {
		defer func() { _ = recover() }()
		_ = add(t, a, 12)
	}()
	mustBeErased(t, store, dir, 12, "doc3")
}

// TestWhoWasOvertakenFindsNoDamage: an erasure has emptied the object, as another archiver was first.
func TestWhoWasOvertakenFindsNoDamage(t *testing.T) {
	t.Parallel()
	store, _ := folderOf(t)
	a := load(t, store, func(point string) {
		if point == "archive.written" {
			must.Succeed(t, add(t, load(t, store, nil), 20))
			_, err := load(t, store, nil).Erase(t.Context(), docOf("doc3"))
			must.Succeed(t, err)
		}
	})
	if err := add(t, a, 12); !errors.Is(err, ErrOvertaken) {
		t.Errorf("got %v", err)
	}
}

// killedBehindObject is a run over twelve messages that is killed between its object and the manifest.
func killedBehindObject(t *testing.T, store Store) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Error("the run was not killed")
		}
	}()
	_ = add(t, load(t, store, func(point string) {
		if point == "archive.written" {
			panic("killed")
		}
	}), 12)
}

// TestWhatNobodyArchivesDoesNotStay: a run was killed behind its object, messages of a document leave the
// stream, and an erasure of the document finds nothing to wait for. The next run makes another object.
func TestWhatNobodyArchivesDoesNotStay(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	killedBehindObject(t, store)
	a := load(t, store, nil)
	_, err := a.Erase(t.Context(), docOf("doc3"))
	must.Succeed(t, err)
	s, err := a.NewSegment()
	must.Succeed(t, err)
	for seq := uint64(1); seq <= 12; seq++ {
		if seq%7 != 3 {
			must.Succeed(t, s.Add(message(seq)))
		}
	}
	_, err = a.Append(t.Context(), s, 0)
	must.Succeed(t, err)
	if strings.Contains(everything(t, dir), "outbox.doc3") {
		t.Error("it is still there")
	}
}

// TestAnObjectThatUnpacksToZerosIsPassedOver: two megabytes that stand for the most that an object may hold,
// in one line. The context ends long before all of it is unpacked.
func TestAnObjectThatUnpacksToZerosIsPassedOver(t *testing.T) {
	t.Parallel()
	const block = 128 << 10
	bomb := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38} // a frame with a window of 128 KiB
	for range maxRaw / block {
		bomb = append(bomb, byte(block<<3&0xff|1<<1), block<<3>>8&0xff, block<<3>>16, 0) // one byte, repeated
	}
	bomb = append(bomb, 1, 0, 0) // an empty block, the last one
	store, _ := folderOf(t)
	a := load(t, store, nil)
	name := a.ObjectName(&Manifest{First: 1, Last: 12})
	must.Succeed(t, store.Create(t.Context(), name, bomb))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := a.NewSegment()
	must.Succeed(t, err)
	for seq := uint64(1); seq <= 12; seq++ {
		must.Succeed(t, s.Add(message(seq)))
	}
	m, err := a.Append(ctx, s, 0)
	if err != nil || m.Generation != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
	there, err := store.Read(t.Context(), name, maxObject)
	if err != nil || !bytes.Equal(there, emptyObject) {
		t.Errorf("%d bytes, %v", len(there), err)
	}
}
