package bench

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
)

const (
	liveWarm    = time.Second
	liveFor     = 5 * time.Second
	liveWriters = 4 // of single rows; of transactions of 100 rows, 2 keep two cores busy
)

// keepUp measures whether a contender stays beside writers that are as fast as the machine lets them.
func (w *world) keepUp(ctx context.Context, c *Case, p follower) (sample, error) {
	writers := liveWriters
	if c.PerTx > 1 {
		writers = 2
	}
	return w.follow(ctx, c, p, task{Role: writersRole, Writers: writers, Warm: liveWarm, For: liveFor}, w.lag)
}

// follow lets a contender follow the writers, and after gives what their report says.
func (w *world) follow(ctx context.Context, c *Case, p follower, t task, lag func(context.Context, follower, *written, sample) error) (sample, error) {
	if err := w.emptyTables(ctx); err != nil {
		return nil, err
	}
	if err := p.prepare(ctx, c); err != nil {
		return nil, err
	}
	table, err := p.start(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := w.warm(ctx, p, table); err != nil {
		return nil, err
	}
	t.Table, t.PerTx, t.Docs, t.Payload = table, c.PerTx, c.Documents, c.Payload
	writers, err := w.startChild(ctx, t)
	if err != nil {
		return nil, err
	}
	defer writers.kill()
	costs, err := w.costs(ctx)
	if err != nil {
		return nil, err
	}
	self := program{pid: p.pid()}
	self.before, _, _, _ = process.CPU(self.pid)
	if err := writers.begin(); err != nil {
		return nil, err
	}
	var wrote written
	if err := writers.result(ctx, &wrote); err != nil {
		return nil, fmt.Errorf("%w%s", err, because(p.died()))
	}
	got := sample{commitRate: float64(wrote.Rows/c.PerTx) / wrote.Ended.Sub(wrote.Begun).Seconds()}
	got.rate(wrote.Rows, wrote.Begun, wrote.Ended)
	published, whole, err := w.published(ctx, p, &wrote, got, lag != nil)
	if err != nil {
		return nil, err
	}
	if whole || p.stream() == "" { // else what it has cost is not that of what it has done
		self.measured(published, got)
		if err := costs.end(ctx, published, got); err != nil {
			return nil, err
		}
	}
	if lag == nil {
		wrote.Delays.add(got)
	} else if err := lag(ctx, p, &wrote, got); err != nil {
		return nil, err
	}
	if err := p.stop(ctx); err != nil {
		return nil, err
	}
	if whole {
		if err := w.verify(ctx, published+1, p.stream()); err != nil {
			return nil, err
		}
	}
	return got, p.cleanUp(ctx) // nothing of it beside the next one
}

// published waits until all that was written is in the stream, and says how much that is. The relay, which may need minutes, is not
// waited for beside writers without a rate.
func (w *world) published(ctx context.Context, p follower, wrote *written, got sample, unlimited bool) (n int, whole bool, err error) {
	if p.stream() == "" {
		return wrote.Rows, false, nil
	}
	if _, slow := p.(*poller); slow && unlimited {
		s, err := w.state(ctx, p.stream())
		return max(1, int(s.LastSeq)-1), false, err
	}
	ended, err := w.awaitMessages(ctx, wrote.Rows+1, p.died, p.stream())
	if unlimited {
		got[catchUp] = max(0, ended.Sub(wrote.Ended.Round(0))).Seconds()
	}
	return wrote.Rows, true, err
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return "\n" + err.Error()
}

// warm waits until the contender publishes: until a first row is in its stream.
func (w *world) warm(ctx context.Context, p follower, table string) error {
	err := w.exec(ctx, "INSERT INTO "+table+` (id, doc_id, actor_id, counter, payload)
		VALUES ('00000000-0000-0000-0000-000000000001', 'warm', 'actor', -1, '{"n": -1, "op": ""}') ON CONFLICT DO NOTHING`)
	if err != nil || p.stream() == "" {
		return err
	}
	_, err = w.awaitMessages(ctx, 1, p.died, p.stream())
	return err
}

// lag says by how much of what was written the contender fell behind: between the first quarter, when everything is warm, and the end.
func (w *world) lag(ctx context.Context, p follower, wrote *written, got sample) error {
	if p.stream() == "" || len(wrote.Marks) == 0 {
		return nil
	}
	first, last := wrote.Marks[len(wrote.Marks)/4], wrote.Marks[len(wrote.Marks)-1]
	behind := func(m mark) (int, error) {
		n, err := w.storedBy(ctx, p.stream(), m.At)
		return max(0, m.Rows-(n-1)), err // 1 has warmed it
	}
	before, err := behind(first)
	if err != nil {
		return err
	}
	after, err := behind(last)
	got[lagGrowth] = 100 * float64(after-before) / float64(max(1, last.Rows-first.Rows))
	return err
}

// storedBy returns how many of a stream's messages were stored by a time.
func (w *world) storedBy(ctx context.Context, stream string, at time.Time) (int, error) {
	s, err := w.broker.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	found := sort.Search(int(s.CachedInfo().State.LastSeq), func(i int) bool {
		var stored time.Time
		if err == nil {
			err = persist(ctx, func(ctx context.Context) error {
				m, err := s.GetMsg(ctx, uint64(i+1))
				if err == nil {
					stored = m.Time
				}
				return err
			})
		}
		return stored.After(at.Round(0))
	})
	return found, err
}
