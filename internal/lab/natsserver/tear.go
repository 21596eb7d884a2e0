package natsserver

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Form is what a server makes of a stream whose unsynced end is gone.
type Form int

// The forms. In both, messages are gone that the server had acknowledged.
const (
	// Back: the last sequence goes back, and what is stored next gets the lost numbers. So it is when the
	// server died with its disk.
	Back Form = iota
	// Hole: the last sequence stays, and the lost numbers are missing. So it is when the server's index is
	// newer than its messages: it stopped cleanly, and then the disk lost what was not synced.
	Hole
)

func (f Form) String() string {
	if f == Hole {
		return "hole"
	}
	return "back"
}

// Torn is what Tear took.
type Torn struct {
	First    uint64 // the first message lost, 0 if none was
	Last     uint64 // the stream's last sequence before
	Messages int    // how many messages are lost, removed ones included
}

func (t Torn) String() string {
	return fmt.Sprintf("%d messages lost, from %d of %d", t.Messages, t.First, t.Last)
}

// Tear cuts the end of a stream's files as a crash of the machine does that comes before fsync: the first
// message for which keep is false and everything that was written after it. A key-value bucket is the stream
// "KV_" and its name. keep gets each message's sequence and the time when it was stored, oldest first; what
// is to be lost by age ("the last 3 s") and what by number is said so.
//
// The file ends at a message, in the middle of one, or goes on with zeros: which of the three, the first lost
// sequence decides (modulo 3), so the same call does the same again.
//
// The server must not run. Dir is its Options.Dir. For Hole it is started for a moment and stopped cleanly,
// without a way in, so that it writes its index. Only streams without replicas: the end of a replicated one
// is also in the Raft logs.
func Tear(dir, stream string, form Form, keep func(seq uint64, stored time.Time) bool) (Torn, error) {
	torn, err := tear(dir, stream, form, keep)
	if err != nil {
		return Torn{}, fmt.Errorf("tear the end off stream %s in %s: %w", stream, dir, err)
	}
	return torn, nil
}

func tear(dir, stream string, form Form, keep func(uint64, time.Time) bool) (torn Torn, err error) {
	store, err := storeOf(dir, stream)
	if err != nil {
		return torn, err
	}
	index := filepath.Join(store, "msgs", "index.db")
	if form == Hole {
		if err := writeIndexes(dir); err != nil {
			return torn, err
		}
	}
	blocks, err := readBlocks(filepath.Join(store, "msgs"))
	if err != nil {
		return torn, err
	}
	gone := -1 // the block in which the loss begins
	for i, b := range blocks {
		for _, r := range b.records {
			torn.Last = max(torn.Last, r.seq)
			if gone < 0 && !keep(r.seq, r.stored) {
				gone, torn.First = i, r.seq
				err = b.cut(r)
			}
			if gone >= 0 && r.message {
				torn.Messages++
			}
		}
	}
	if gone < 0 {
		return torn, nil
	}
	for _, b := range blocks[gone+1:] {
		err = errors.Join(err, os.Remove(b.path))
	}
	if form == Back {
		if rmErr := os.Remove(index); !errors.Is(rmErr, fs.ErrNotExist) {
			err = errors.Join(err, rmErr)
		}
	}
	return torn, err
}

// storeOf finds a stream's folder, whatever its account.
func storeOf(dir, stream string) (string, error) {
	found, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams", stream))
	if err != nil {
		return "", err
	}
	if len(found) != 1 {
		return "", fmt.Errorf("%d folders for it, want one", len(found))
	}
	meta, err := os.ReadFile(filepath.Join(found[0], "meta.inf"))
	if err != nil {
		return "", err
	}
	var config struct {
		Replicas    int    `json:"num_replicas"`
		Compression string `json:"compression"`
	}
	if err := json.Unmarshal(meta, &config); err != nil {
		return "", fmt.Errorf("meta.inf: %w", err)
	}
	if config.Replicas > 1 || config.Compression == "s2" {
		return "", errors.New("it is replicated or compressed")
	}
	return found[0], nil
}

// writeIndexes lets the server itself write the newest index of all its streams.
func writeIndexes(dir string) error {
	s, err := Start(Options{Dir: dir})
	if err != nil {
		return err
	}
	s.Shutdown()
	return nil
}

// block is one of the files, <n>.blk, that a stream's messages are appended to.
type block struct {
	path    string
	size    int64
	records []record
}

// record is an entry of a block: a message, or a note that an earlier one was removed.
type record struct {
	at, size int64 // in the file, bytes
	seq      uint64
	stored   time.Time
	message  bool
}

// The layout of a record: length with a bit for headers, sequence with two marks, time, length of the
// subject; subject, headers, data; checksum.
const (
	recordHeader  = 22
	recordMinimum = recordHeader + 8
	withHeaders   = 1 << 31
	erased        = 1 << 63
	tombstone     = 1 << 62
)

func readBlocks(dir string) ([]*block, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.blk"))
	if err != nil {
		return nil, err
	}
	number := func(path string) (n int) {
		_, _ = fmt.Sscanf(filepath.Base(path), "%d.blk", &n) // the server's names are numbers
		return n
	}
	slices.SortFunc(paths, func(a, b string) int { return number(a) - number(b) })
	var all []*block
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		all = append(all, &block{path: path, size: int64(len(content)), records: readRecords(content)})
	}
	return all, nil
}

// readRecords reads up to the first record that is not whole: what a killed server did not finish, it cuts
// off itself.
func readRecords(content []byte) (all []record) {
	for at := 0; len(content)-at >= recordMinimum; {
		rest := content[at:]
		size := int(binary.LittleEndian.Uint32(rest) &^ withHeaders)
		if size < recordMinimum || size > len(rest) {
			break
		}
		seq := binary.LittleEndian.Uint64(rest[4:])
		all = append(all, record{
			at: int64(at), size: int64(size), seq: seq &^ (erased | tombstone),
			message: seq&(erased|tombstone) == 0,
			stored:  time.Unix(0, int64(binary.LittleEndian.Uint64(rest[12:]))),
		})
		at += size
	}
	return all
}

// cut takes a record and all that follows it from the file.
func (b *block) cut(r record) error {
	switch r.seq % 3 {
	case 0:
		return os.Truncate(b.path, r.at)
	case 1:
		return os.Truncate(b.path, r.at+r.size/2)
	}
	return errors.Join(os.Truncate(b.path, r.at), os.Truncate(b.path, b.size)) // the file grows with zeros
}
