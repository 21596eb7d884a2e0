package archive

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/outflowhq/outflow/outbox"
)

// Store is where objects are kept. It may be used from any goroutine. Names are paths with slashes.
type Store interface {
	// Create makes the object if there is none of that name, whole or not at all. When it returns nil the
	// object is durable; [ErrExists]: there is one. After any other error it may exist.
	Create(ctx context.Context, name string, data []byte) error
	// Replace puts the object in place of the one of that name, whole or not at all. When it returns nil the
	// object is durable.
	Replace(ctx context.Context, name string, data []byte) error
	// Read returns the object, [ErrMissing] if there is none, or an error if it has more than limit bytes.
	Read(ctx context.Context, name string, limit int64) ([]byte, error)
	// List returns the names directly below a folder that come after another one (""), sorted, those of
	// folders with a slash at their end. What they name is durable, whoever has just made it.
	List(ctx context.Context, folder, after string) ([]string, error)
	// Tidy removes what a killed process has left in a folder of an object that it was making, and returns
	// the names of those that somebody is making.
	Tidy(ctx context.Context, folder string) (busy []string, err error)
	// Close lets it go.
	Close() error
}

// What a store says of an object.
var (
	ErrExists  = errors.New("the object exists")
	ErrMissing = errors.New("there is no such object")
)

// Open opens the store with a URL: file:///path, or that of a bucket, such as
// s3://name?region=eu-central-1&prefix=outflow/, gs://name or azblob://name. A folder that does not exist has
// nothing, and is not made: most commands only read. Whether a bucket is there shows when it is used.
func Open(ctx context.Context, at string) (Store, error) {
	return openAt(ctx, at, func(dir string) (Store, error) {
		f, err := openFolder(dir, (*os.File).Sync)
		if errors.Is(err, fs.ErrNotExist) {
			return absent(dir), nil
		}
		return f, err
	})
}

// Make is Open for who writes the archive: a folder that does not exist is made.
func Make(ctx context.Context, at string) (Store, error) {
	return openAt(ctx, at, func(dir string) (Store, error) { return makeFolder(dir, (*os.File).Sync) })
}

func openAt(ctx context.Context, at string, local func(dir string) (Store, error)) (Store, error) {
	u, err := url.Parse(at)
	if err == nil && tags[u.Scheme] != "" {
		return openBucket(ctx, u)
	}
	if err != nil || u.Scheme != "file" || u.Host != "" || !path.IsAbs(u.Path) {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "archive_url",
			Message: "archive.url is neither file:///path/of/a/folder nor a bucket's: " +
				"s3://, gs:// or azblob://"}
	}
	if u.RawQuery != "" || u.ForceQuery || strings.Contains(at, "#") { // it would not be a part of the path
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "archive_url",
			Message: "archive.url is a folder, which has no parameters: a ? or # in its name is written " +
				"%3F or %23"}
	}
	store, err := local(path.Clean(u.Path))
	if err != nil {
		return nil, denied(fmt.Errorf("archive.url %s: %w", at, err))
	}
	return store, nil
}

// absent is the Store of a folder that does not exist.
type absent string

// OpenThere is Open for what must not take an archive that is away for one of nothing.
func OpenThere(ctx context.Context, at string) (Store, error) {
	store, err := Open(ctx, at)
	if dir, away := store.(absent); away {
		return nil, &outbox.Fault{Class: outbox.Fatal, Code: CodeEmpty,
			Message: fmt.Sprintf("there is no archive: folder %s does not exist", string(dir)),
			Hint: "If nothing was archived yet, archiving makes the folder. If something was: is its " +
				"volume mounted, and archive.url that of whoever archives?"}
	}
	return store, err
}

func (a absent) Create(context.Context, string, []byte) error {
	return fmt.Errorf("archive: folder %s does not exist", string(a))
}

func (a absent) Replace(ctx context.Context, name string, data []byte) error {
	return a.Create(ctx, name, data)
}

func (absent) Read(context.Context, string, int64) ([]byte, error)     { return nil, ErrMissing }
func (absent) List(context.Context, string, string) ([]string, error)  { return nil, nil }
func (absent) Tidy(context.Context, string) (busy []string, err error) { return nil, nil }
func (absent) Close() error                                            { return nil }

// folder is a Store in a local folder. Nothing outside of it can be reached, by names or by links.
type folder struct {
	root  *os.Root
	flush func(dir *os.File) error // makes durable what names there are in a folder
}

func openFolder(at string, flush func(*os.File) error) (*folder, error) {
	root, err := os.OpenRoot(at)
	return &folder{root, flush}, err
}

// makeFolder opens a folder. It makes those of its path that do not exist, each of them durable.
func makeFolder(at string, flush func(*os.File) error) (*folder, error) {
	f, err := openFolder(at, flush)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	above, err := makeFolder(path.Dir(at), flush)
	if err != nil {
		return nil, err
	}
	defer func() { _ = above.Close() }()
	if err := above.makeDir(path.Base(at)); err != nil {
		return nil, err
	}
	return openFolder(at, flush)
}

func (f *folder) Close() error { return f.root.Close() }

// failed says of an error whose names are below which folder they are.
func (f *folder) failed(err error) error {
	return denied(fmt.Errorf("archive in %s: %w", f.root.Name(), err))
}

// denied is the fault of an error that does not end by itself: somebody has to give a right, or room.
func denied(err error) error {
	if outbox.FaultOf(err) != nil {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &outbox.Fault{Code: "archive_full", Message: "there is no room left for the archive", Err: err}
	}
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, syscall.EROFS) {
		return err
	}
	return refused(err, "the user of this process may not read or write there")
}

func refused(err error, message string) error {
	return &outbox.Fault{Code: "archive_denied", Message: message, Err: err}
}

// temporary is how the names of hidden files begin. Whoever makes one holds a lock on it, from before it has
// a byte until it is gone: one with content and without the lock was left by a process that was killed.
const temporary = ".new-"

// Create writes a hidden file and links it to its name: a link is made only where there is no file, by one
// call, also between processes and on NFS.
func (f *folder) Create(ctx context.Context, name string, data []byte) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, err := f.root.Lstat(name); err == nil {
		return ErrExists // and nothing of the data is written
	}
	dir := path.Dir(name)
	if err := f.makeDir(dir); err != nil {
		return f.failed(err)
	}
	return f.write(dir, data, func(temp string) error {
		return errors.Join(linked(f.root.Link(temp, name)), f.root.Remove(temp))
	})
}

// linked says what it means that a link could not be made, in a folder where a file just was.
func linked(err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		return ErrExists
	case errors.Is(err, syscall.EPERM), errors.Is(err, errors.ErrUnsupported):
		return &outbox.Fault{Class: outbox.Usage, Code: "archive_url", Err: err,
			Message: "the file system of archive.url has no hard links, by which a file gets its name",
			Hint: "Set archive.url to a folder of a file system that has them, such as ext4, XFS, ZFS or " +
				"NFS, or to a bucket"}
	}
	return err
}

// Replace writes a hidden file and gives it the name. In place of a link it would leave what that leads to.
func (f *folder) Replace(ctx context.Context, name string, data []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if info, err := f.root.Lstat(name); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("archive: %s is a link or no file: it can't be replaced", name)
	}
	return f.write(path.Dir(name), data, func(temp string) error {
		err := f.root.Rename(temp, name)
		if err != nil {
			err = errors.Join(err, f.root.Remove(temp))
		}
		return err
	})
}

// write writes a hidden file, which take gives its name, or removes.
func (f *folder) write(dir string, data []byte, take func(temp string) error) (err error) {
	temp := path.Join(dir, temporary+rand.Text())
	file, err := f.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return f.failed(err)
	}
	defer func() { err = errors.Join(err, file.Close()) }() // and lets the lock go
	hold(file)
	if _, err = file.Write(data); err == nil {
		err = file.Sync()
	}
	if err != nil {
		return errors.Join(f.failed(err), f.root.Remove(temp))
	}
	if err := take(temp); err != nil {
		if errors.Is(err, ErrExists) {
			return err
		}
		return f.failed(err)
	}
	return f.sync(dir)
}

// Tidy removes hidden files that nobody holds. An empty one has nothing in it, and may be held in a moment.
func (f *folder) Tidy(ctx context.Context, dir string) (busy []string, err error) {
	d, err := f.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, f.failed(err)
	}
	defer func() { _ = d.Close() }()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, f.failed(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), temporary) || !e.Type().IsRegular() {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		name := path.Join(dir, e.Name())
		switch held, err := f.tidy(name); {
		case err != nil:
			return nil, f.failed(err)
		case held:
			busy = append(busy, name)
		}
	}
	return busy, f.sync(dir)
}

func (f *folder) tidy(name string) (held bool, err error) {
	file, err := f.root.OpenFile(name, os.O_RDWR, 0) // NFS locks nothing that is only read
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // it has its name now
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = file.Close() }()
	if isHeld(file) {
		return true, nil
	}
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	if err = f.root.Remove(name); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return false, err
}

// makeDir makes a folder and those above it, each of them durable, also where another process has just made
// it.
func (f *folder) makeDir(dir string) error {
	if dir == "." {
		return nil
	}
	if err := f.makeDir(path.Dir(dir)); err != nil {
		return err
	}
	if err := f.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return f.sync(path.Dir(dir))
}

func (f *folder) sync(dir string) error {
	d, err := f.root.Open(dir)
	if err != nil {
		return f.failed(err)
	}
	return errors.Join(f.flush(d), d.Close())
}

func (f *folder) Read(ctx context.Context, name string, limit int64) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	file, err := f.root.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrMissing
	}
	if err != nil {
		return nil, f.failed(err)
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, f.failed(err)
	case !info.Mode().IsRegular():
		return nil, f.failed(fmt.Errorf("%s is no file", name))
	case info.Size() > limit:
		return nil, f.failed(fmt.Errorf("%s has %d bytes, more than %d", name, info.Size(), limit))
	}
	data := make([]byte, info.Size())
	if _, err := io.ReadFull(file, data); err != nil {
		return nil, f.failed(fmt.Errorf("read %s: %w", name, err))
	}
	return data, nil
}

func (f *folder) isDir(name string) bool {
	info, err := f.root.Stat(name)
	return err == nil && info.IsDir()
}

func (f *folder) List(ctx context.Context, dir, after string) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d, err := f.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, f.failed(err)
	}
	defer func() { _ = d.Close() }()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, f.failed(err)
	}
	// A file system that only reads, such as that of an image, may have no way to flush.
	if err := f.flush(d); err != nil && !errors.Is(err, syscall.EINVAL) {
		return nil, f.failed(err)
	}
	var names []string
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), "."), e.Name() <= after:
		case e.IsDir(), e.Type()&fs.ModeSymlink != 0 && f.isDir(path.Join(dir, e.Name())):
			names = append(names, e.Name()+"/")
		default:
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}
