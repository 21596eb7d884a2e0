// Package archive reads what retention has taken from the stream: the archive that `outflow archive run`
// writes. A consumer with [consumer.Config].Archive reads it first, and then the stream behind it, in one
// order and under the same sequences. So a new consumer begins at the first event of a stream that keeps a
// day, and one that was down for longer than that goes on where it was.
//
// A program that imports it gets gocloud.dev/blob and a zstd decoder. Package consumer has neither.
package archive

import (
	"context"
	"errors"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// Archive is an archive of any number of streams. Consumers may share it.
type Archive struct{ store archive.Store }

var _ consumer.Archive = (*Archive)(nil)

// Open opens the archive with the URL that `outflow` has as archive.url: file:///path/of/a/folder, or
// that of a bucket in a program that imports its driver: gocloud.dev/blob/s3blob, gcsblob or azureblob. It is
// only read.
func Open(ctx context.Context, at string) (*Archive, error) {
	if u, err := url.Parse(at); err == nil && u.Scheme == "file" && u.Host == "" {
		if _, err := os.Stat(u.Path); err != nil { // the store would have nothing
			return nil, &outbox.Fault{Class: outbox.Fatal, Code: "consumer_archive",
				Message: "there is no archive", Err: err,
				Hint: "Give the folder that archive.url of Outflow's configuration names"}
		}
	}
	store, err := archive.Open(ctx, at)
	if err != nil {
		if f := outbox.FaultOf(err); f != nil && f.Hint != "" {
			f.Hint = "Import its driver, such as _ \"gocloud.dev/blob/s3blob\", or name a folder"
		}
		return nil, err
	}
	return &Archive{store}, nil
}

// Close lets it go, once no consumer uses it any more.
func (a *Archive) Close() error { return a.store.Close() }

// Past implements [consumer.Archive].
func (a *Archive) Past(ctx context.Context, name string, created time.Time) (stream.Past, error) {
	of, err := archive.Load(ctx, a.store, archive.FolderOf(name, created), nil)
	if err != nil {
		return nil, err
	}
	return &past{archive: of}, nil
}

// past is the archive of one stream.
type past struct {
	mu      sync.Mutex // of what has been read of the manifests
	archive *archive.Archive
}

func (p *past) Next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.archive.Next()
}

func (p *past) Refresh(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.archive.Refresh(ctx)
}

// segments are those that are known now.
func (p *past) segments() []*archive.Manifest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.archive.Segments
}

var errEnough = errors.New("read enough")

func (p *past) find(ctx context.Context, seq uint64) (found *archive.Message, err error) {
	for _, segment := range p.segments() {
		if seq < segment.First || seq > segment.Last {
			continue
		}
		err = p.archive.Verify(ctx, segment, func(m *archive.Message) error {
			if m.Seq < seq {
				return nil
			}
			if m.Seq == seq {
				found = m
			}
			return errEnough
		})
		if errors.Is(err, errEnough) {
			err = nil
		}
	}
	return found, err
}

func (p *past) Get(ctx context.Context, seq uint64) (*stream.Message, error) {
	m, err := p.find(ctx, seq)
	if m == nil || err != nil {
		return nil, err
	}
	return message(m), nil
}

func message(m *archive.Message) *stream.Message {
	return &stream.Message{Subject: m.Subject, Header: m.Header, Data: m.Data, Sequence: m.Seq, Time: m.Time}
}

// Same compares hashes. That of a segment's last message is in its manifest.
func (p *past) Same(ctx context.Context, m *stream.Message) (bool, error) {
	mine := archive.Message{Seq: m.Sequence, Time: m.Time, Subject: m.Subject, Header: m.Header, Data: m.Data}
	for _, segment := range p.segments() {
		if segment.Last == m.Sequence {
			return segment.End == mine.Hash(), nil
		}
	}
	other, err := p.find(ctx, m.Sequence)
	return other != nil && other.Hash() == mine.Hash(), err
}

// Read has one segment at a time in memory.
func (p *past) Read(ctx context.Context, from, below uint64, f func(*stream.Message) error,
	lost func(*stream.Gap) error) error {
	for _, segment := range p.segments() {
		if segment.Last < from {
			continue
		}
		gaps := segment.Gaps
		tell := func(before uint64) error {
			for ; len(gaps) > 0 && gaps[0].From < min(before, below); gaps = gaps[1:] {
				if gaps[0].To < from {
					continue
				}
				g := stream.Gap{From: max(gaps[0].From, from), To: min(gaps[0].To, below-1)}
				if err := lost(&g); err != nil {
					return err
				}
			}
			return nil
		}
		err := p.archive.Verify(ctx, segment, func(m *archive.Message) error {
			if err := tell(m.Seq); err != nil {
				return err
			}
			switch {
			case m.Seq < from:
				return nil
			case m.Seq >= below:
				return errEnough
			}
			return f(message(m))
		})
		if errors.Is(err, errEnough) {
			return nil
		}
		if err == nil { // it may end with messages that were lost
			err = tell(below)
		}
		if err != nil {
			return err
		}
		if segment.Last >= below-1 {
			return nil
		}
	}
	return nil
}
