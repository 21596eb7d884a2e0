package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// verdict says what readers should have got, and what they got.
type verdict interface {
	fmt.Stringer
	good() error // nil: what the mode promises
}

// perReader is the verdict of the mode shared: each reader gets each event once.
type perReader struct {
	committed [clusters]int // events of each home
	outflow   [clusters][clusters]found
	relays    [clusters][clusters]found
	strange   []error
}

// found is what a reader got of a home's events.
type found struct {
	missing int
	figures
}

func (f found) exact() bool { return f.missing == 0 && f.twice == 0 && f.late == 0 }

// copies is how often an event came, in the mean.
func (f found) copies() float64 { return float64(f.events+f.twice) / float64(max(f.events, 1)) }

func (v *perReader) good() error {
	errs := v.strange
	for home, readers := range v.outflow {
		for at, f := range readers {
			if !f.exact() || v.committed[home] == 0 {
				errs = append(errs, fmt.Errorf("home %d, read at cluster %d: not each event once and in "+
					"order", home+1, at+1))
			}
		}
	}
	return errors.Join(errs...)
}

func (v *perReader) String() string {
	var b strings.Builder
	b.WriteString("\nverdict: missing / twice / out of order, of each home's events, as read at each " +
		"cluster\n\n")
	line := func(name, committed string, readers [clusters]found, cell func(found) string) {
		fmt.Fprintf(&b, "%-15s%10s", name, committed)
		for _, f := range readers {
			fmt.Fprintf(&b, "%16s", cell(f))
		}
		b.WriteString("\n")
	}
	counts := func(f found) string { return fmt.Sprintf("%d / %d / %d", f.missing, f.twice, f.late) }
	fmt.Fprintf(&b, "%-15s%10s", "", "committed")
	for at := range clusters {
		fmt.Fprintf(&b, "%16s", fmt.Sprint("cluster ", at+1))
	}
	b.WriteString("\n")
	for home, n := range v.committed {
		line(fmt.Sprint("Outflow  home ", home+1), fmt.Sprint(n), v.outflow[home], counts)
	}
	for home, n := range v.committed {
		line(fmt.Sprint("relays   home ", home+1), fmt.Sprint(n), v.relays[home], counts)
		line("         copies", "", v.relays[home], func(f found) string {
			return fmt.Sprintf("%.2f", f.copies())
		})
	}
	return b.String()
}

// end lets writers end, and waits until all that is committed has come everywhere.
func (m *mesh) end(ctx context.Context) error {
	m.story.say("ENOUGH  writers end; what is on its way arrives")
	close(m.enough)
	err := m.until(ctx, "everything has come", m.arrived)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		m.story.say("        %v", err) // the verdict says what is missing
		return nil
	}
	return err
}

// arrived returns nil when each cluster has all rows, and each reader all messages.
func (m *mesh) arrived(ctx context.Context) error {
	if n := m.typing.Load(); n > 0 {
		return fmt.Errorf("%d people type", n)
	}
	for _, c := range m.all {
		var waiting int
		if err := c.query(ctx, &waiting,
			"SELECT (SELECT count(*) FROM outbox) - (SELECT count(*) FROM relayed)"); err != nil {
			return err
		}
		if waiting > 0 {
			return fmt.Errorf("%d rows at cluster %d are not relayed", waiting, c.number)
		}
		for _, home := range m.all {
			written := int(home.written.Load())
			if n, err := c.rows(ctx, home.number); err != nil || n < written {
				return fmt.Errorf("cluster %d has %d of %d rows of home %d: %w", c.number, n, written,
					home.number, err)
			}
			if n := m.published(home.number); n < written {
				return fmt.Errorf("%d of %d events of home %d are read", n, written, home.number)
			}
			if err := c.atEnd(ctx, streamOf(home.number), c.streams[home.number-1]); err != nil {
				return err
			}
		}
		if err := c.atEnd(ctx, relayStream, c.relayed); err != nil {
			return err
		}
	}
	return nil
}

// atEnd returns nil if all messages of a stream were read.
func (c *cluster) atEnd(ctx context.Context, stream string, t *tally) error {
	s, err := c.js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if last := s.CachedInfo().State.LastSeq; t.read < last {
		return fmt.Errorf("message %d of %d of %s is read at cluster %d", t.read, last, stream, c.number)
	}
	return nil
}

// copies are those of an event, by its counter less one. The caller holds mu.
func (t *tally) copies(of sequence, i int) (c copies) {
	if known := t.events[of]; i < len(known) {
		c = known[i]
	}
	return c
}

// judge compares what was read with the homes' own tables.
func (m *mesh) judge(ctx context.Context) (verdict, error) {
	v := &perReader{}
	for i, home := range m.all {
		own, n, err := home.own(ctx)
		if err != nil {
			v.strange = append(v.strange, err)
		}
		v.committed[i] = n
		for k, c := range m.all {
			v.outflow[i][k] = c.streams[i].against(own, i+1)
			v.relays[i][k] = c.relayed.against(own, i+1)
			v.strange = append(v.strange, c.streams[i].strangers(i+1)...)
		}
	}
	return v, ctx.Err()
}

// own is how many events each sequence has that was written at this cluster, and how many they are together.
func (c *cluster) own(ctx context.Context) (own map[sequence]int, all int, err error) {
	conn, err := pgx.Connect(ctx, c.url)
	if err != nil {
		return nil, 0, err
	}
	defer conn.Close(ctx) //nolint:errcheck // what it was for is done
	rows, err := conn.Query(ctx, "SELECT doc_id, actor_id, count(*) FROM outbox WHERE actor_id LIKE $1 "+
		"GROUP BY doc_id, actor_id HAVING count(*) = max(counter)", actorAt("%", c.number))
	if err != nil {
		return nil, 0, err
	}
	own = map[sequence]int{}
	var of sequence
	var n int
	_, err = pgx.ForEachRow(rows, []any{&of.doc, &of.actor, &n}, func() error {
		own[of] = n
		all += n
		return nil
	})
	if written := int(c.written.Load()); err == nil && written != all {
		err = fmt.Errorf("home %d has %d rows, its writers have committed %d", c.number, all, written)
	}
	return own, all, err
}

// query reads one value.
func (c *cluster) query(ctx context.Context, into any, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, c.url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) //nolint:errcheck // what it was for is done
	return conn.QueryRow(ctx, sql, args...).Scan(into)
}

// against compares with what a home has committed.
func (t *tally) against(own map[sequence]int, home int) found {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := found{figures: t.count[home]}
	for of, n := range own {
		for i := range n {
			if t.copies(of, i).n == 0 {
				f.missing++
			}
		}
	}
	return f
}

// strangers says what should not be in the stream of a home.
func (t *tally) strangers(home int) (errs []error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		errs = append(errs, t.err)
	}
	for of, f := range t.count {
		if of != home && f.events > 0 {
			errs = append(errs, fmt.Errorf("the stream of home %d has %d events of home %d", home, f.events,
				of))
		}
	}
	return errs
}
