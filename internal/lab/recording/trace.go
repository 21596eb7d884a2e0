// Package recording holds recorded editing sessions of real documents, for the tests and for outflow-lab
// demo. data/README.md says where they come from and under which licence.
package recording

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"unicode/utf8"
)

//go:embed data
var data embed.FS

// Names of the traces. FriendsForever has two actors, the others one.
const (
	FriendsForever  = "friendsforever"
	SvelteComponent = "sveltecomponent"
	RustCode        = "rustcode"
)

// Op is one edit, an outbox row to be.
type Op struct {
	Doc     string
	Actor   string
	Counter int64  // 1, 2, 3 ... for each actor of a document, without gaps
	Clock   int64  // from 0, Span more with each operation, as in libraries that count characters
	T       int    // index in the order of arrival, from 0
	Payload []byte // JSON: a list of [position, deleted, inserted]
}

// Span returns how many characters the operation deletes and inserts: so many of the clock it takes.
func (op *Op) Span() (n int64, err error) {
	splices, err := readSplices(op.Payload)
	for _, s := range splices {
		n += int64(s.deleted + utf8.RuneCountInString(s.inserted))
	}
	return n, err
}

// Names returns the names that Load takes.
func Names() []string { return []string{FriendsForever, SvelteComponent, RustCode} }

var traces = func() map[string]func() ([]Op, error) {
	m := map[string]func() ([]Op, error){}
	for _, name := range Names() {
		m[name] = sync.OnceValues(func() ([]Op, error) { return load(name) })
	}
	return m
}()

// Load returns the operations of a trace in the order of arrival. All callers share them: they must not be
// changed.
func Load(name string) ([]Op, error) {
	get, ok := traces[name]
	if !ok {
		return nil, fmt.Errorf("no trace %q: want one of %q", name, Names())
	}
	return get()
}

// Final returns the text of the document at the end of the trace.
func Final(name string) (string, error) {
	b, err := unpack(name + ".final.txt.gz")
	return string(b), err
}

func load(name string) ([]Op, error) {
	b, err := unpack(name + ".ops.jsonl.gz")
	if err != nil {
		return nil, err
	}
	ops := make([]Op, 0, bytes.Count(b, []byte("\n")))
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, len(b))
	for lines.Scan() {
		var line struct {
			Doc     string          `json:"doc_id"`
			Actor   string          `json:"actor_id"`
			Counter int64           `json:"counter"`
			Clock   int64           `json:"clock"`
			T       int             `json:"t"`
			Op      json.RawMessage `json:"op"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("trace %s, line %d: %w", name, len(ops)+1, err)
		}
		ops = append(ops, Op{line.Doc, line.Actor, line.Counter, line.Clock, line.T, line.Op})
	}
	return ops, lines.Err()
}

func unpack(file string) ([]byte, error) {
	packed, err := data.Open("data/" + file)
	if err != nil {
		return nil, err
	}
	defer packed.Close()
	z, err := gzip.NewReader(packed)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}
