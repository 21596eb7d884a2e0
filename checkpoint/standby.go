package checkpoint

import (
	"context"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// standbyKey is the key of what a cluster keeps of a home, in the bucket of the home's stream. It has a token
// more than a slot's name can have.
func standbyKey(cluster int) string { return fmt.Sprintf("standby.%d", cluster) }

// Standbys returns the numbers of the clusters that keep a record of their own beside that of the home.
func (s *Store) Standbys(ctx context.Context) (clusters []int, err error) {
	keys, err := s.keys(ctx)
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		var n int
		if _, err := fmt.Sscanf(key, "standby.%d", &n); err != nil || key != standbyKey(n) {
			continue
		}
		rec, _, err := NewStore(s.api, StoreConfig{Stream: s.cfg.Stream, Slot: s.cfg.Slot, Cluster: n,
			Standby: true}).Load(ctx)
		switch {
		case err != nil && outbox.FaultOf(err) == nil:
			return nil, err
		case rec != nil || err != nil:
			clusters = append(clusters, n)
		}
	}
	return clusters, nil
}

// WithoutStream returns the record as whoever does not make the stream has it: its checkpoints are places in
// the WAL that is read, and say nothing of messages. It is what another cluster than the home keeps for
// itself, to read the home's record by ([Record.Elsewhere]).
func (r *Record) WithoutStream() *Record {
	c := *r
	c.Owner, c.Epoch, c.Confirmed, c.Cuts = 0, 0, 0, nil
	c.Base, c.Holes, c.Stopped, c.Checkpoints, c.home = 0, nil, "", nil, nil
	for _, p := range r.Checkpoints {
		p.Seq, p.Remembered, p.PublishedAhead = 0, 0, nil
		// on both sides of a cut there may be one at the same place
		if n := len(c.Checkpoints); n == 0 || p.Due != c.Checkpoints[n-1].Due ||
			p.Start() != c.Checkpoints[n-1].Start() {
			c.Checkpoints = append(c.Checkpoints, p)
		}
	}
	return &c
}

// AtHome is the inverse of [Record.Elsewhere]: the home's record with what became of it here. A checkpoint
// made here names the newest timeline of the home that it has recorded or said. Its age is its own: where the
// broker has lost messages, one is made again at the same place.
func (r *Record) AtHome() *Record {
	if r.home == nil {
		return r
	}
	c := *r.home
	c.Owner, c.Epoch, c.Confirmed, c.Cuts = r.Owner, r.Epoch, r.Confirmed, r.Cuts
	c.Stopped, c.Holes, c.Checkpoints = r.Stopped, r.Holes, nil
	timeline := r.home.Checkpoints[len(r.home.Checkpoints)-1].Timeline
	for _, p := range r.Checkpoints {
		same := func(q StoredCheckpoint) bool { return q.Same(p.Checkpoint) }
		// while the home is silent, those made here differ in where its rows are read alone
		if n := len(c.Checkpoints); n > 0 && same(c.Checkpoints[n-1]) {
			continue
		}
		p.Timeline = max(timeline, p.Home.Timeline)
		if known := slices.IndexFunc(r.home.Checkpoints, same); known >= 0 {
			p.Timeline = r.home.Checkpoints[known].Timeline
		}
		p.Read, p.Home = 0, relay.Confirmed{}
		c.Checkpoints = append(c.Checkpoints, p)
	}
	return &c
}
