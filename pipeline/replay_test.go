package pipeline

import (
	"fmt"
	"io"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// replay makes the stream that an undisturbed process makes of a WAL, in one go, without the loop.
func replay(wal []*transaction, first relay.Settings, maxPublishedAhead int, cfg decoder.Config) ([]line,
	error) {
	d := decoder.New(cfg)
	b := reorder.New(reorder.Config{Settings: first, MaxPublishedAhead: maxPublishedAhead, Scratch: memory{}})
	defer b.Discard()
	var (
		out []line
		r   decoder.Result
		e   relay.Event
	)
	for i, x := range wal {
		for _, m := range x.messages(i == 0 || out == nil, oidText, false) {
			if err := d.Decode(m.Data, &r); err != nil {
				return nil, err
			}
			switch r.Kind {
			case decoder.Event:
				if err := b.Append(&r.Event); err != nil {
					return nil, err
				}
			case decoder.Commit:
				if err := b.Commit(r.Commit); err != nil {
					return nil, err
				}
				w, err := b.Close()
				if err != nil {
					return nil, err
				}
				for n := 0; w != nil; n++ {
					if more, err := w.Next(&e); err != nil {
						return nil, err
					} else if !more {
						break
					}
					out = append(out, lineOf(&e, &outbox.Header{
						Pos: e.Pos, N: n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
						Timeline: timeline, Sort: w.Sort, ID: e.ID, Key: e.Key, Counter: e.Counter,
					}))
				}
			}
		}
	}
	if held, _ := b.Held(); held > 0 {
		return nil, fmt.Errorf("%d events are held at the end of the WAL", held)
	}
	return out, nil
}

// memory keeps scratch files in memory.
type memory struct{}

func (memory) Create() (reorder.ScratchFile, error) { return new(memoryFile), nil }

type memoryFile struct{ b []byte }

func (f *memoryFile) Write(p []byte) (int, error) {
	f.b = append(f.b, p...)
	return len(p), nil
}

func (f *memoryFile) ReadAt(p []byte, off int64) (int, error) {
	if n := copy(p, f.b[off:]); n < len(p) {
		return n, io.EOF
	}
	return len(p), nil
}

func (f *memoryFile) Close() error { return nil }
