package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"time"

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
	CodeEmpty   = "archive_empty"   // there is nothing that is looked for
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
	// one of them, or if it fails, as it does where the stream is another one. nil: there are none.
	Erased func(ctx context.Context) (outbox.Sequences, error)

	store   Store
	folder  string // with a slash at its end
	stream  string
	created time.Time
	hit     func(point string)
	docs    []string // the documents whose hashes the manifests keep
	known   *Known   // nil: nothing is remembered
}

// Folders lists the names of the folders of a stream, oldest first. A stream that was made again has a
// folder of its own.
func Folders(ctx context.Context, store Store, stream string) ([]string, error) {
	names, err := store.List(ctx, root, "")
	var found []string
	for _, n := range names {
		n, isFolder := strings.CutSuffix(n, "/")
		of, _, ok := StreamOf(n)
		switch {
		case !ok || of != stream:
		case !isFolder:
			return nil, fmt.Errorf("archive: %s%s is no folder, or a link that leads out of the archive",
				root, n)
		default:
			found = append(found, n)
		}
	}
	return found, err
}

// Load reads the manifests of a folder and checks their chain. Of the hashes of documents, which are most of
// what it reads, they keep these only. hit is called at points where tests kill the process, and may be nil.
func Load(ctx context.Context, store Store, folder string, hit func(point string), docs ...string) (*Archive,
	error) {
	a, err := prepare(store, folder, hit)
	if err != nil {
		return nil, err
	}
	a.docs = docs
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

// Refresh reads the manifests that have come since.
func (a *Archive) Refresh(ctx context.Context) error {
	defer progress.Wait(ctx, "reading the manifests of the archive of stream "+a.stream)()
	names, err := a.from(ctx, a.Next())
	if err != nil {
		return err
	}
	all := a.readAhead(names)
	for {
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
	if all.late { // only what was listed is durable
		if _, err := a.from(ctx, a.Next()); err != nil {
			return err
		}
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

// IsDamaged reports whether an error says that an object is lost or damaged.
func IsDamaged(err error) bool {
	f := outbox.FaultOf(err)
	return f != nil && f.Code == CodeDamaged
}

// damaged is the fault of a segment's object, or of a manifest, which more depends on.
func (a *Archive) damaged(name string, err error) error {
	hint := "Bring the segment's object back from a copy or an older version of it, and run `outflow " +
		"archive verify`. What lies before and behind it can be read without it: `outflow archive " +
		"restore` and `rows` have --from, `rows` also --to"
	if strings.HasSuffix(name, ".json") {
		hint = "Bring the manifest back from a copy or an older version of it, and run `outflow archive " +
			"verify`. Until then nothing is archived"
	}
	return &outbox.Fault{Class: outbox.Gap, Code: CodeDamaged,
		Message: fmt.Sprintf("archive: %s: %v", name, err), Hint: hint}
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
// something else than was written would get another one with each run. Those with a message that the segment
// lacks are not counted: an erasure that goes on may take one after each object that was written.
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
		return nil, errors.Join(ErrOvertaken, a.withdraw(ctx, m))
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

// withdraw empties an object where another archiver's manifest names another one: nobody will ever name it,
// and it may have messages which are erased later, or were. What is not withdrawn, as after a kill, the next
// erasure empties. Where there is no manifest yet, somebody may be about to name this object.
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
		if !bytes.Equal(there, emptyObject) && !errors.Is(differs, errLacks) {
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
	// its hash in each line, and other ways to write a byte; and one message that the manifest lacks
	longest := min(maxRaw, 2*m.Raw+256*int64(m.Count)+16<<20)
	m.Raw, err = readLines(ctx, object, m, longest, func(*Message, Hash) error { return nil })
	return err
}
