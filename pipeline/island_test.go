package pipeline

import (
	"context"
	"time"

	"github.com/outflowhq/outflow/internal/claim"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// rowFaults say what becomes of cluster rows that a server is to write: by chance they are refused, come
// later, of which their writer hears nothing, or come twice.
type rowFaults struct {
	lost, late, twice float64
	written           []relay.ClusterRow
}

// ClusterRow writes a row, if all goes well. What is late comes by its time, also when its writer has died.
func (w *writer) ClusterRow(ctx context.Context, row relay.ClusterRow, until time.Time) error {
	pg := w.pr.pg
	take := pg.writeDelay
	commit := func() {
		pg.rows.written = append(pg.rows.written, row)
		pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: row.Content()})
	}
	lost, late, twice := false, false, false
	pg.w.with(func() {
		chance := pg.rnd.Float64()
		lost = chance < pg.rows.lost
		late = !lost && chance < pg.rows.lost+pg.rows.late
		twice = pg.rnd.Float64() < pg.rows.twice
		if left := time.Until(until); late && left > 0 {
			time.AfterFunc(time.Duration(pg.rnd.Int64N(int64(left))), func() {
				pg.w.with(func() {
					if !time.Now().Before(pg.down) {
						commit()
					}
				})
			})
		}
	})
	select {
	case <-time.After(take):
	case <-ctx.Done():
		return ctx.Err()
	}
	if late {
		<-ctx.Done()
		return ctx.Err()
	}
	pg.w.mu.Lock()
	defer pg.w.mu.Unlock()
	if lost || w.pr.dead || time.Now().Before(pg.down) || time.Now().After(until) {
		return errDown
	}
	commit()
	if twice {
		commit()
	}
	return nil
}

// others are the readers of a cluster: one for the rows of each other home. They stand for processes that
// keep what they have read, and publish what they are given.
type others struct {
	*harness
	id      int
	readers map[int]*otherReader // by home
	run     bool                 // they do
	nats    bool                 // theirs can be reached
	begun   time.Time
}

type otherReader struct {
	claim.Reader
	next      int // transaction of the WAL
	busy      bool
	commits   []outbox.LSN // of the home
	published []outbox.LSN // of these, by this cluster
	todo      []outbox.LSN
	claims    int
}

func newOthers(w *harness, cfg claim.Config) *others {
	o := &others{harness: w, id: cfg.Self, readers: map[int]*otherReader{}, nats: true, begun: time.Now()}
	for h := 1; h <= cfg.Count; h++ {
		if h != cfg.Self {
			o.readers[h] = &otherReader{Reader: claim.NewReader(cfg, h)}
		}
	}
	return o
}

// start starts the processes.
func (o *others) start() {
	o.run = true
	for h := range len(o.readers) + 1 {
		if r := o.readers[h+1]; r != nil {
			r.Start(time.Since(o.begun))
			r.busy = false
		}
	}
}

// step reads what there is, publishes, and writes a row if one is to be written. The lock is held.
func (o *others) step(delay time.Duration) {
	now := time.Since(o.begun)
	for h := 1; h <= len(o.readers)+1; h++ {
		r := o.readers[h]
		if r == nil || !o.run || time.Now().Before(o.pg.down) {
			continue
		}
		for ; r.next < len(o.pg.wal); r.next++ {
			o.read(h, r, o.pg.wal[r.next], now)
		}
		if o.nats {
			r.published = append(r.published, r.todo...)
			r.todo = nil
			r.End(now)
		}
		if !r.busy {
			o.write(r, r.Next(now), delay)
		}
	}
}

func (o *others) read(h int, r *otherReader, x *transaction, now time.Duration) {
	if x.origin == clusterOrigin(h) && len(x.rows) > 0 {
		r.Commit(x.home)
		r.commits = append(r.commits, x.home)
	}
	for _, m := range x.logical {
		if m.prefix != relay.ClusterPrefix {
			continue
		}
		row, err := relay.ParseClusterRow(m.content)
		if err != nil {
			o.broken = err
			return
		}
		given := r.Row(now, &row)
		for _, lsn := range r.commits {
			if given != (claim.Range{}) && lsn > given.From && lsn <= given.To {
				r.todo = append(r.todo, lsn)
			}
		}
	}
}

func (o *others) write(r *otherReader, row relay.ClusterRow, delay time.Duration) {
	if row.Kind == 0 {
		return
	}
	if row.Kind == relay.Claim {
		r.claims++
	}
	r.busy = true
	until, late := time.Now().Add(delay/4), 300*time.Microsecond
	if o.pg.rnd.Float64() < o.pg.rows.late {
		late = time.Duration(o.pg.rnd.Int64N(int64(delay / 4)))
	}
	lost := o.pg.rnd.Float64() < o.pg.rows.lost
	time.AfterFunc(late, func() {
		o.with(func() {
			r.busy = false
			if !lost && !time.Now().Before(o.pg.down) && time.Now().Before(until) {
				o.pg.rows.written = append(o.pg.rows.written, row)
				o.pg.commit(nil, logical{prefix: relay.ClusterPrefix, content: row.Content()})
			}
		})
	})
}
