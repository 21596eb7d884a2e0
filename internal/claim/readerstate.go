package claim

import (
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// ReaderFrom is the reader of the rows of cluster home of which state was kept.
func ReaderFrom(cfg Config, home int, s relay.ReaderState) Reader {
	r := Reader{cfg: cfg, home: home, first: s.First, newest: s.Newest, settled: s.Settled,
		hello: s.Hello, yielded: s.Yielded}
	copy(r.echoes[1:], s.Echoes)
	return r
}

// State is what has to be kept to go on from this point of the WAL; At and Timeline are the caller's to set.
// A process begins there with [Reader.Start].
func (r *Reader) State() relay.ReaderState {
	return relay.ReaderState{First: r.first, Newest: r.newest, Settled: r.settled, Hello: r.hello,
		Yielded: r.yielded, Echoes: slices.Clone(r.echoes[1 : r.cfg.Count+1])}
}

// Settled reports whether no commit up to lsn, of those that were read, may still have to be claimed.
func (r *Reader) Settled(lsn outbox.LSN) bool { return lsn <= r.settled || r.newest <= r.settled }
