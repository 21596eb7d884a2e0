package pipeline

import (
	"fmt"
	"io"
	"math"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/reorder"
)

// replay makes the stream that an undisturbed process makes of a WAL, in one go, without the loop.
func replay(wal []*transaction, first relay.Settings, maxPublishedAhead int, cfg decoder.Config) ([]line,
	error) {
	out, held, err := replayCut(wal, nil, first, maxPublishedAhead, cfg)
	if err == nil && held > 0 {
		err = fmt.Errorf("%d events are held at the end of the WAL", held)
	}
	return out, err
}

// replayCut makes it of a WAL and cuts, each of which is a line of its own, and says how many events are held
// at the end. A cut may lie behind all inputs, at the due of a keepalive.
func replayCut(wal []*transaction, cuts []outbox.LSN, first relay.Settings, maxPublishedAhead int,
	cfg decoder.Config) (out []line, held int, err error) {
	d := decoder.New(cfg)
	b := reorder.New(reorder.Config{Settings: first, MaxPublishedAhead: maxPublishedAhead, Scratch: memory{}})
	defer b.Discard()
	var (
		r decoder.Result
		e relay.Event
	)
	window := func(w *reorder.Window, err error) error {
		for n := 0; w != nil && err == nil; n++ {
			var more bool
			if more, err = w.Next(&e); !more {
				break
			}
			out = append(out, lineOf(&e, &outbox.Header{
				Pos: e.Pos, N: n, Of: w.Of, Due: w.Due, Thru: w.Thru, Pull: w.Pull,
				Timeline: timeline, Sort: w.Sort, ID: e.ID, Key: e.Key, Counter: e.Counter,
			}))
		}
		return err
	}
	cut := func(upTo outbox.LSN) error {
		for ; len(cuts) > 0 && cuts[0] <= upTo; cuts = cuts[1:] {
			out = append(out, cutLine(cuts[0]))
			if err := window(b.Cut(cuts[0])); err != nil {
				return err
			}
		}
		return nil
	}
	described := false
	for _, x := range wal {
		lsn := x.end
		if cfg.Mapping.Away() {
			lsn = x.home
		}
		if err := cut(lsn - 1); err != nil {
			return nil, 0, err
		}
		for _, m := range x.messages(!described, oidText, false) {
			if err := d.Decode(m.Data, &r); err != nil {
				return nil, 0, err
			}
			switch r.Kind {
			case decoder.Event:
				if err := b.Append(&r.Event); err != nil {
					return nil, 0, err
				}
			case decoder.Commit:
				if err := b.Commit(r.Commit); err != nil {
					return nil, 0, err
				}
				if err := window(b.Close()); err != nil {
					return nil, 0, err
				}
			}
		}
		described = described || len(x.rows) > 0
	}
	err = cut(math.MaxUint64)
	held, _ = b.Held()
	return out, held, err
}

// cutLine stands for a cut.
func cutLine(lsn outbox.LSN) line { return line{doc: "cut", payload: lsn.String()} }

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
