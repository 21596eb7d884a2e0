package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/decoder"
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
	pg.w.mu.Lock()
	take := pg.writeDelay
	pg.w.mu.Unlock()
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

// isleReader is the process of a cluster that reads the rows of another home: with a slot of its own at the
// cluster's server, which stands for itself with the same WAL, and a stream of its own.
type isleReader struct {
	*harness
	at    *isle
	home  int
	pr    *process
	write *process // whose writes go to the cluster's server
}

func newIsleReader(at *isle, seed uint64, home int) *isleReader {
	cfg := awayDecoder()
	cfg.Clusters, cfg.Origin = at.decoder.Clusters, clusterOrigin(home)
	r := &isleReader{harness: newHarnessOf(at.t, seed, at.first, at.durable, cfg), at: at, home: home}
	r.js.latency = at.js.latency
	at.pg.slots = append(at.pg.slots, r.pg)
	return r
}

func (r *isleReader) start() {
	r.write = &process{w: r.at.harness, pg: r.at.pg}
	r.pr = r.run(options{islands: &r.at.cfg, open: func(c *Conns) { c.Writer = &writer{r.write} }})
}

func (r *isleReader) kill() {
	r.at.with(func() { r.write.dead = true })
	r.pr.kill()
}

// ranges are what the rule lets the cluster publish, by the rows in its WAL.
func (r *isleReader) ranges() (all []relay.Claimed, err error) {
	rule, d := claim.NewReader(r.at.cfg, r.home), decoder.New(r.decoder)
	var result decoder.Result
	described := false
	for _, x := range r.pg.wal {
		for _, m := range x.messages(!described, oidText, false) {
			if err := d.Decode(m.Data, &result); err != nil {
				return nil, err
			}
			if result.Kind != decoder.Commit {
				continue
			}
			if result.Commit.Kind == relay.Events {
				rule.Commit(0, result.Commit.LSN)
			}
			for i := range result.ClusterRows {
				if own := rule.Row(0, &result.ClusterRows[i]); own != (claim.Range{}) {
					all = append(all, relay.Claimed{From: own.From, To: own.To})
				}
			}
		}
		described = described || len(x.rows) > 0
	}
	return all, nil
}

// check holds the reader's stream against the home's WAL and the ranges: each message of them once, in the
// order of the windows that the home's WAL makes.
func (r *isleReader) check() error {
	ranges, err := r.ranges()
	if err != nil {
		return err
	}
	var cuts []outbox.LSN
	for _, c := range ranges {
		cuts = append(cuts, c.To)
	}
	wal := slices.DeleteFunc(slices.Clone(r.pg.wal), func(x *transaction) bool {
		return x.origin != clusterOrigin(r.home)
	})
	all, _, err := replayCut(wal, cuts, r.first, r.maxPublishedAhead, r.decoder)
	if err != nil {
		return err
	}
	want := slices.DeleteFunc(all, func(l line) bool {
		return !slices.ContainsFunc(ranges, func(c relay.Claimed) bool { return c.Covers(l.header.Pos.LSN) })
	})
	got := r.stream()
	for i, l := range got {
		if i == len(want) || l != want[i] {
			return fmt.Errorf("message %d of the %d that cluster %d has of cluster %d is not the one of %d "+
				"that it has claimed in %+v:\n%s\n%v", i+1, len(got), r.at.cfg.Self, r.home, len(want),
				ranges, l, want[min(i, len(want)):min(i+1, len(want))])
		}
	}
	return errors.Join(r.broken, r.unexplained())
}
