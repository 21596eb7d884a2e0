package archive

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestAFolderBehindALinkIsFound: somebody has moved the folder of a former stream to another disk. Nothing
// may pass it over, an erasure least of all: it is found within the archive, and refused outside of it.
func TestAFolderBehindALinkIsFound(t *testing.T) {
	t.Parallel()
	for _, outside := range []bool{false, true} {
		store, dir := folderOf(t)
		must.Succeed(t, add(t, load(t, store, nil), 20))
		here, cold := filepath.Join(dir, "v1", FolderOf("S", made)), filepath.Join(dir, "cold")
		link := filepath.Join("..", "cold")
		if outside {
			cold = filepath.Join(t.TempDir(), "cold")
			link = cold
		}
		must.Succeed(t, os.Rename(here, cold))
		must.Succeed(t, os.Symlink(link, here))
		folders, err := Folders(t.Context(), store, "S")
		if outside {
			if err == nil || !strings.Contains(err.Error(), "leads out of the archive") {
				t.Errorf("outside: %v, %v", folders, err)
			}
		} else if err != nil || len(folders) != 1 {
			t.Errorf("inside: %v, %v", folders, err)
		}
	}
}

// TestWhatALinkLeadsToIsNotLeft: an object was moved, and there is a link in its place. To replace that would
// erase nothing.
func TestWhatALinkLeadsToIsNotLeft(t *testing.T) {
	t.Parallel()
	store, dir := folderOf(t)
	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 20))
	name := filepath.Join(dir, a.ObjectName(a.Segments[0]))
	must.Succeed(t, os.Rename(name, filepath.Join(dir, "cold")))
	must.Succeed(t, os.Symlink(filepath.Join("..", "..", "cold"), name))
	done, err := a.Erase(t.Context(), docOf("doc3"))
	if err == nil || !strings.Contains(err.Error(), "is a link") {
		t.Errorf("%+v, %v", done, err)
	}
}

// TestAFolderHasNoParameters: of file:///past?prefix=orders/ the store would be /past, which others may have.
func TestAFolderHasNoParameters(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, more := range []string{"/past?prefix=orders/", "/past?", "/past#1"} {
		if _, err := Open(t.Context(), "file://"+dir+more); err == nil {
			t.Errorf("%s is opened", more)
		} else {
			wantFault(t, err, "archive_url", "%3F")
		}
	}
	store, err := Make(t.Context(), "file://"+dir+"/past%231")
	must.Succeed(t, err)
	must.Succeed(t, store.Close())
	if all, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(all) != 1 ||
		filepath.Base(all[0]) != "past#1" {
		t.Errorf("%v, %v", all, err)
	}
}
