package archive

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/outbox"
)

// The codes of what can be wrong with an archive.
const (
	CodeGap     = "archive_gap"     // messages were gone before they were archived
	CodeDamaged = "archive_damaged" // an object is lost or is not what was written
	CodeDiffers = "archive_differs" // the stream has another message than the archive
)

// root is the folder of everything; its name is the version of the layout.
const root = "v1/"

const createdLayout = "20060102T150405.000000000Z"

var folderName = lazyregexp.New(`^([A-Za-z0-9_-]+)-(\d{8}T\d{6}\.\d{9}Z)$`)

// FolderOf returns the name of a stream's folder. Names that Outflow's settings accept need no quoting.
func FolderOf(stream string, created time.Time) string {
	return stream + "-" + created.UTC().Format(createdLayout)
}

// StreamOf reads the name of a stream's folder: which stream it is of, and when that was made.
func StreamOf(folder string) (stream string, created time.Time, ok bool) {
	parts := folderName().FindStringSubmatch(folder)
	if parts == nil {
		return "", created, false
	}
	created, err := time.Parse(createdLayout, parts[2])
	return parts[1], created, err == nil
}

// Archive is the archive of one stream: its segments, as far as they form a chain. One goroutine uses it.
type Archive struct {
	Segments []*Manifest // ascending

	// Erased returns the stream's sequences whose messages were erased. No segment comes into being that has
	// one of them. nil: there are none.
	Erased func(ctx context.Context) (outbox.Sequences, error)

	store   Store
	folder  string // with a slash at its end
	stream  string
	created time.Time
	hit     func(point string)
	brief   bool   // without what is known of documents
	known   *Known // nil: nothing is remembered
}

// Folders lists the names of the folders of a stream, oldest first. A stream that was made again has a
// folder of its own.
func Folders(ctx context.Context, store Store, stream string) ([]string, error) {
	names, err := store.List(ctx, root, "")
	var found []string
	for _, n := range names {
		n, isFolder := strings.CutSuffix(n, "/")
		if of, _, ok := StreamOf(n); isFolder && ok && of == stream {
			found = append(found, n)
		}
	}
	return found, err
}

// Load reads the manifests of a folder and checks their chain. hit is called at points where tests kill the
// process, and may be nil.
func Load(ctx context.Context, store Store, folder string, hit func(point string)) (*Archive, error) {
	a, err := prepare(store, folder, hit)
	if err != nil {
		return nil, err
	}
	return a, a.Refresh(ctx)
}

func prepare(store Store, folder string, hit func(point string)) (*Archive, error) {
	stream, created, ok := StreamOf(folder)
	if !ok {
		return nil, fmt.Errorf("archive: %q is no folder of a stream", folder)
	}
	if hit == nil {
		hit = func(string) {}
	}
	return &Archive{store: store, folder: root + folder + "/", stream: stream, created: created,
		hit: hit}, nil
}

// LoadBrief is Load for a process that only reads and runs on: the manifests do not have the hashes of their
// documents, which are most of them.
func LoadBrief(ctx context.Context, store Store, folder string) (*Archive, error) {
	a, err := prepare(store, folder, nil)
	if err != nil {
		return nil, err
	}
	a.brief = true
	return a, a.Refresh(ctx)
}

// Refresh reads the manifests that have come since.
func (a *Archive) Refresh(ctx context.Context) error {
	defer progress.Wait(ctx, "reading the manifests of the archive of stream "+a.stream)()
	names, err := a.from(ctx, a.Next())
	if err != nil {
		return err
	}
	for all := a.readAhead(names); ; {
		m, err := all.manifest(ctx, a.Next())
		if errors.Is(err, ErrMissing) {
			break
		}
		if err != nil {
			return err
		}
		if err := a.follows(m); err != nil {
			return a.damaged(a.manifestName(a.Next()), err)
		}
		if a.known != nil {
			a.abridge(m)
		}
		a.Segments = append(a.Segments, m)
	}
	// A manifest behind the end of the chain means that one before it is lost.
	for _, n := range names {
		if strings.HasSuffix(n, ".json") && n > fmt.Sprintf("%020d.json", a.Next()) {
			return a.damaged(a.manifestName(a.Next()), errors.New("it is lost: there are later ones"))
		}
	}
	a.known.keep(a)
	return nil
}

// from lists the objects from a sequence on.
func (a *Archive) from(ctx context.Context, first uint64) ([]string, error) {
	return a.store.List(ctx, a.folder, fmt.Sprintf("%020d", first))
}

// follows checks that a manifest goes on where the chain ends.
func (a *Archive) follows(m *Manifest) error {
	var prev Hash
	if n := len(a.Segments); n > 0 {
		prev = a.Segments[n-1].Chain
	}
	switch {
	case m.Stream != a.stream || !m.Created.Equal(a.created):
		return fmt.Errorf("it is of stream %s, made at %v", m.Stream, m.Created)
	case m.First != a.Next():
		return fmt.Errorf("it begins at %d", m.First)
	case m.Prev != prev:
		return errors.New("it does not have the hash of the one before it")
	}
	return nil
}

// Created is when the stream was made.
func (a *Archive) Created() time.Time { return a.created }

// Next is the first sequence that is not archived.
func (a *Archive) Next() uint64 {
	if n := len(a.Segments); n > 0 {
		return a.Segments[n-1].Last + 1
	}
	return 1
}

func (a *Archive) manifestName(first uint64) string {
	return fmt.Sprintf("%s%020d.json", a.folder, first)
}

// ObjectName is the name of a segment's messages in the store.
func (a *Archive) ObjectName(m *Manifest) string {
	return fmt.Sprintf("%s%020d-%020d%s.jsonl.zst", a.folder, m.First, m.Last, suffix(m.Generation))
}

// Unfinished returns where a segment behind the chain ends whose messages were written and whose manifest was
// not: a run was killed there, and the next one makes the same segment. 0: there is none.
func (a *Archive) Unfinished(ctx context.Context) (last uint64, err error) {
	all, err := a.behind(ctx)
	for _, o := range all {
		if o.first == a.Next() && o.generation == 0 && last == 0 {
			last = o.last
		}
	}
	return last, err
}

// Leftovers returns the names of the objects behind the chain. In the folder of a stream that is gone nothing
// names them any more, and nothing overwrites them.
func (a *Archive) Leftovers(ctx context.Context) (names []string, err error) {
	all, err := a.behind(ctx)
	for _, o := range all {
		names = append(names, a.folder+o.name)
	}
	return names, err
}

// ReadBehind calls f with the messages of the objects behind the chain, until it returns an error, which is
// returned. Nobody has checked them.
func (a *Archive) ReadBehind(ctx context.Context, f func(name string, m *Message) error) error {
	all, err := a.behind(ctx)
	if err != nil {
		return err
	}
	for _, o := range all {
		name := a.folder + o.name
		object, err := a.store.Read(ctx, name, maxObject)
		if err != nil {
			return err
		}
		if _, err := scan(ctx, object, maxRaw, func(text []byte) error {
			msg, _, err := parseLine(text)
			if err != nil || msg.erased != "" {
				return err
			}
			return f(name, msg)
		}); err != nil {
			return fmt.Errorf("archive: read %s, which no manifest names: %w", name, err)
		}
	}
	return nil
}

// behind lists the objects behind the chain.
func (a *Archive) behind(ctx context.Context) (all []object, err error) {
	names, err := a.from(ctx, a.Next())
	for _, name := range names {
		if o, ok := parseObject(name); ok {
			all = append(all, o)
		}
	}
	return all, err
}

func (a *Archive) damaged(name string, err error) error {
	return &outbox.Fault{Class: outbox.Gap, Code: CodeDamaged,
		Message: fmt.Sprintf("archive: %s: %v", name, err)}
}

// Agrees compares the archive's last message with the stream's, if that still has it.
func (a *Archive) Agrees(ctx context.Context, api *jsapi.Client) error {
	n := len(a.Segments)
	if n == 0 {
		return nil
	}
	return SameAs(ctx, api, a.stream, a.Segments[n-1].Last, a.Segments[n-1].End)
}

// NewSegment begins the segment behind the last one.
func (a *Archive) NewSegment() (*Segment, error) {
	m := Manifest{Version: version, Stream: a.stream, Created: a.created, First: a.Next(), Prev: a.chain()}
	if n := len(a.Segments); n > 0 {
		m.From, m.To = a.Segments[n-1].To, a.Segments[n-1].To
	}
	return newSegment(m)
}

// chain is the hash of the newest manifest.
func (a *Archive) chain() (h Hash) {
	if n := len(a.Segments); n > 0 {
		h = a.Segments[n-1].Chain
	}
	return h
}

// maxOthers is how many objects with other messages than a segment's are passed over: a store that gives back
// something else than was written would get another one with each run.
const maxOthers = 5

// ErrOvertaken: another archiver has created the manifest of this segment.
var ErrOvertaken = errors.New("another archiver was here first")

// Append ends the segment, writes it, reads it back, and creates its manifest, which it returns. complete is
// the manifest's. A run that was killed before, or another archiver, may have left the same messages: then
// those are checked and kept.
func (a *Archive) Append(ctx context.Context, s *Segment, complete outbox.LSN) (*Manifest, error) {
	s.m.Complete = complete
	m, object, err := s.finish()
	if err != nil {
		return nil, err
	}
	a.hit("archive.begin")
	if err := a.unerased(ctx, s); err != nil {
		return nil, err
	}
	if err := a.create(ctx, m, object); err != nil {
		return nil, err
	}
	a.hit("archive.written")
	if err := a.Verify(ctx, m, nil); err != nil {
		// Where another archiver was first, an erasure or that one may have emptied it.
		return nil, cmp.Or(a.undecided(ctx, m), err)
	}
	a.hit("archive.verified")
	if err := a.unerased(ctx, s); err != nil {
		return nil, errors.Join(err, a.withdraw(ctx, m))
	}
	text, err := m.text()
	if err != nil {
		return nil, err
	}
	err = a.store.Create(ctx, a.manifestName(m.First), text)
	a.hit("archive.manifest")
	if errors.Is(err, ErrExists) {
		return nil, ErrOvertaken
	}
	if err != nil {
		return nil, err
	}
	err = a.Refresh(ctx) // what is stored counts
	// What was passed over no manifest will name, and it may have messages that are erased everywhere else.
	for old := *m; err == nil && old.Generation > 0; {
		old.Generation--
		err = a.store.Replace(ctx, a.ObjectName(&old), emptyObject)
	}
	return m, err
}

// undecided returns ErrOvertaken if there is a manifest of this segment.
func (a *Archive) undecided(ctx context.Context, m *Manifest) error {
	_, err := a.current(ctx, m.First)
	switch {
	case err == nil:
		return ErrOvertaken
	case errors.Is(err, ErrMissing):
		return nil
	}
	return err
}

// withdraw empties an object that has messages which were erased, where another archiver's manifest names
// another one. Where there is no manifest yet, somebody may be about to name this object: the erasure waits
// for that, and replaces it.
func (a *Archive) withdraw(ctx context.Context, m *Manifest) error {
	now, err := a.current(ctx, m.First)
	switch {
	case errors.Is(err, ErrMissing):
		return nil
	case err != nil || now.Last == m.Last && now.Generation == m.Generation:
		return err
	}
	return a.store.Replace(ctx, a.ObjectName(m), emptyObject)
}

// create writes the object of a segment that has no manifest yet, or finds it. One that is there and has
// other messages, or is damaged, is passed over, as one that was emptied: the segment's object is the next
// generation then.
func (a *Archive) create(ctx context.Context, m *Manifest, object []byte) error {
	for others := 0; ; m.Generation++ {
		name := a.ObjectName(m)
		err := a.store.Create(ctx, name, object)
		if !errors.Is(err, ErrExists) {
			return err
		}
		there, err := a.store.Read(ctx, name, maxObject)
		if err != nil {
			return err
		}
		found := *m
		differs := found.matches(ctx, there)
		if differs == nil {
			*m = found
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		// What an erasure has made is nothing to pass over: this archiver may have read before it.
		if err := a.undecided(ctx, m); err != nil {
			return err
		}
		if !bytes.Equal(there, emptyObject) {
			others++
		}
		if others == maxOthers || m.Generation == maxGeneration {
			return a.damaged(name, differs)
		}
	}
}

// matches takes an object for that of the manifest, if it has the same messages: an older version may have
// written them as other lines, or compressed them to other bytes.
func (m *Manifest) matches(ctx context.Context, object []byte) (err error) {
	m.Bytes, m.Object = int64(len(object)), sha256.Sum256(object)
	// its hash in each line, and other ways to write a byte
	longest := min(maxRaw, 2*m.Raw+256*int64(m.Count))
	m.Raw, err = readLines(ctx, object, m, longest, func(*Message, Hash) error { return nil })
	return err
}

// Verify reads a segment whole and checks it against its manifest: the object's hash, each message's, their
// sequences and their Merkle root. It calls f, if that is not nil, with each message that was not erased;
// what f has seen is right so far as each line has its hash and the object its own. An error of f ends it and
// is returned. Without f it compares the manifest's documents as well.
func (a *Archive) Verify(ctx context.Context, m *Manifest, f func(*Message) error) error {
	if f == nil && !a.brief {
		return a.newest(ctx, m, func(m *Manifest) error { return a.verifyDocs(ctx, m) })
	}
	return a.read(ctx, m, func(msg *Message, _ Hash) error {
		if f == nil || msg.erased != "" {
			return nil
		}
		return f(msg)
	})
}

// verifyDocs reads a segment, and compares the documents of its messages with those of its manifest.
func (a *Archive) verifyDocs(ctx context.Context, m *Manifest) error {
	seen := make([]bool, len(m.Docs))
	var unlisted uint64 // a message of another document
	err := a.readAs(ctx, m, func(msg *Message, _ Hash) error {
		if msg.erased != "" {
			return nil
		}
		i, listed := slices.BinarySearch(m.Docs, SubjectHash(msg.Subject))
		if listed {
			seen[i] = true
		} else if unlisted == 0 {
			unlisted = msg.Seq
		}
		return nil
	})
	switch i := slices.Index(seen, false); {
	case err != nil:
		return err
	case unlisted > 0:
		err = fmt.Errorf("its documents lack that of message %d", unlisted)
	case i >= 0:
		err = fmt.Errorf("it has a document %s, and the segment no message of it", m.Docs[i])
	default:
		return nil
	}
	return a.damaged(a.generationName(m.First, m.named), err)
}

// read is Verify with all lines; f nil: the object's hash is enough. Where an erasure has replaced the object
// since the manifest was read, it reads the one that is there now.
func (a *Archive) read(ctx context.Context, m *Manifest, f func(*Message, Hash) error) error {
	return a.newest(ctx, m, func(m *Manifest) error { return a.readAs(ctx, m, f) })
}

// EventHeaders calls f with the value of the header [outbox.HeaderName] of each of a segment's messages that
// has one and was not erased. It checks the object's hash: the object was read message by message before its
// manifest was made. An error of f ends it and is returned.
func (a *Archive) EventHeaders(ctx context.Context, m *Manifest, f func(value string) error) error {
	return a.newest(ctx, m, func(m *Manifest) error {
		return a.object(ctx, m, func(object []byte) error {
			_, err := scan(ctx, object, m.Raw, func(text []byte) error {
				value, err := eventHeader(text)
				if value == "" || err != nil {
					return err
				}
				return stop(f(value))
			})
			return err
		})
	})
}

// newest reads a segment, as it is now.
func (a *Archive) newest(ctx context.Context, m *Manifest, read func(*Manifest) error) (err error) {
	if m.abridged {
		if m, err = a.again(ctx, m); err != nil {
			return err
		}
	}
	for {
		err := read(m)
		if err == nil || !a.overtaken(ctx, m, err) {
			return err
		}
		if m, err = a.current(ctx, m.First); err != nil {
			return err
		}
	}
}

// readAs reads the object that the manifest says.
func (a *Archive) readAs(ctx context.Context, m *Manifest, f func(*Message, Hash) error) error {
	return a.object(ctx, m, func(object []byte) error {
		if f == nil {
			return nil
		}
		return readObject(ctx, object, m, func(msg *Message, h Hash) error { return stop(f(msg, h)) })
	})
}

// stopped is an error of whoever reads, which says nothing of the object.
type stopped struct{ error }

func stop(err error) error {
	if err != nil {
		err = stopped{err}
	}
	return err
}

// object calls f with the object that the manifest says, which has its hash. What else f finds is damage.
func (a *Archive) object(ctx context.Context, m *Manifest, f func([]byte) error) error {
	name := a.ObjectName(m)
	object, err := a.store.Read(ctx, name, maxObject)
	switch {
	case errors.Is(err, ErrMissing):
		return a.damaged(name, errors.New("it is lost"))
	case err != nil:
		return err
	case int64(len(object)) != m.Bytes:
		return a.damaged(name, fmt.Errorf("it has %d bytes, not %d", len(object), m.Bytes))
	case sha256.Sum256(object) != m.Object:
		return a.damaged(name, errors.New("it does not have its hash: a bit was flipped, or it was replaced"))
	}
	err = f(object)
	if s, ok := errors.AsType[stopped](err); ok {
		return s.error
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return a.damaged(name, err)
}

func decompress(object []byte) (*zstd.Decoder, error) {
	return zstd.NewReader(bytes.NewReader(object), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(64<<20), zstd.WithDecoderMaxMemory(maxRaw))
}

// scan calls f with the lines of an object, until it returns an error, which is returned. It reads no more
// than limit bytes of lines, and returns how many these were.
func scan(ctx context.Context, object []byte, limit int64, f func(text []byte) error) (raw int64, err error) {
	dec, err := decompress(object)
	if err != nil {
		return 0, err
	}
	defer dec.Close()
	lines := bufio.NewScanner(untilDone{ctx, dec})
	lines.Buffer(make([]byte, 0, frameSize), int(min(maxLine, limit)))
	for lines.Scan() {
		if err := ctx.Err(); err != nil {
			return raw, err
		}
		if raw += int64(len(lines.Bytes())) + 1; raw > limit {
			return raw, fmt.Errorf("it has more than %d bytes of lines", limit)
		}
		if err := f(lines.Bytes()); err != nil {
			return raw, err
		}
	}
	return raw, lines.Err()
}

// untilDone is a Reader that ends with its context: a line may be long.
type untilDone struct {
	ctx context.Context
	io.Reader
}

func (r untilDone) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// readObject reads an object's messages and compares them, and the size of their lines, with the manifest.
func readObject(ctx context.Context, object []byte, m *Manifest, f func(*Message, Hash) error) error {
	raw, err := readLines(ctx, object, m, m.Raw, f)
	if err == nil && raw != m.Raw {
		err = fmt.Errorf("it has %d bytes of lines, not %d", raw, m.Raw)
	}
	return err
}

// readLines reads an object's messages, of no more than limit bytes, compares them with the manifest, and
// returns the size of their lines.
func readLines(
	ctx context.Context, object []byte, m *Manifest, limit int64, f func(*Message, Hash) error,
) (raw int64, err error) {
	var (
		tree    merkle
		next    = m.First
		missing = m.Missing
		last    Hash
	)
	raw, err = scan(ctx, object, limit, func(text []byte) error {
		msg, h, err := parseLine(text)
		if err != nil {
			return err
		}
		for len(missing) > 0 && missing[0].From == next {
			next, missing = missing[0].To+1, missing[1:]
		}
		if msg.Seq != next {
			return fmt.Errorf("message %d where %d was expected", msg.Seq, next)
		}
		if is := m.Erased.Has(msg.Seq); is != (msg.erased != "") {
			return fmt.Errorf("message %d: by the manifest it was erased: %v", msg.Seq, is)
		}
		tree.add(h)
		next, last = next+1, h
		return f(msg, h)
	})
	if err != nil {
		return raw, err
	}
	if len(missing) > 0 && missing[0].From == next {
		next, missing = missing[0].To+1, missing[1:]
	}
	switch {
	case tree.n != m.Count || next != m.Last+1 || len(missing) > 0:
		return raw, fmt.Errorf("it has %d messages up to %d, not %d up to %d", tree.n, next-1, m.Count,
			m.Last)
	case tree.root() != m.Root || last != m.End:
		return raw, errors.New("its messages do not have the root of the manifest")
	}
	return raw, nil
}

// ReadRange calls f with the archived messages from one sequence to below another, in order, until it returns
// an error, which is returned. See [Archive.Read].
func (a *Archive) ReadRange(ctx context.Context, from, below uint64, f func(*Message) error) error {
	err := a.Read(ctx, from, func(m *Message) error {
		if m.Seq >= below {
			return errEnough
		}
		return f(m)
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

var errEnough = errors.New("read enough")

// Read calls f with the archived messages from a sequence on, in order, until it returns an error, which is
// returned. It ends with a fault where a segment is lost or damaged, before f sees a message of it.
func (a *Archive) Read(ctx context.Context, from uint64, f func(*Message) error) error {
	for _, m := range a.Segments {
		if m.Last < from {
			continue
		}
		if err := a.Verify(ctx, m, func(msg *Message) error {
			if msg.Seq < from {
				return nil
			}
			return f(msg)
		}); err != nil {
			return err
		}
	}
	return nil
}
