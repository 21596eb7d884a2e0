package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// begin lets writers, readers and relays begin.
func (m *mesh) begin(ctx context.Context) error {
	if err := m.startRelays(ctx); err != nil {
		return err
	}
	if err := m.readAll(ctx); err != nil {
		return err
	}
	if err := m.write(ctx); err != nil {
		return err
	}
	m.story.say("people type at all three, from recorded sessions, into the same documents; for comparison " +
		"there is a naive relay at each")
	m.story.tellsOf(m.state)
	if m.mode == islands {
		if err := m.heard(ctx); err != nil {
			return err
		}
	}
	return m.more(ctx, 1, 2, 3)
}

// heard waits until all homes publish, and some signs of life more: nobody claims from a home that has never
// said what it has published.
func (m *mesh) heard(ctx context.Context) error {
	for range 3 {
		if err := m.more(ctx, 1, 2, 3); err != nil {
			return err
		}
		for _, c := range m.all {
			written := int(c.written.Load())
			if err := m.until(ctx, fmt.Sprint("events of home ", c.number), func(context.Context) error {
				if n := m.published(c.number); n < written {
					return fmt.Errorf("%d of %d are published", n, written)
				}
				return nil
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// state says how much is written and read.
func (m *mesh) state() string {
	var b strings.Builder
	b.WriteString("read of written:")
	for _, c := range m.all {
		fmt.Fprintf(&b, "  home %d %d/%d", c.number, m.published(c.number), c.written.Load())
	}
	return b.String()
}

// published is how many events of a home have come to all readers; in the mode islands, to those of all
// streams together.
func (m *mesh) published(home int) int {
	if m.mode == islands {
		return m.together(home).published
	}
	least := m.all[0].streams[home-1].of(home).events
	for _, c := range m.all[1:] {
		least = min(least, c.streams[home-1].of(home).events)
	}
	return least
}

// tellPublished says how much of a home's events has come.
func (m *mesh) tellPublished(home int) {
	m.story.say("        of home %d, %d events are published, of %d that it has committed", home,
		m.published(home), m.all[home-1].written.Load())
}

// more waits until more events are written at these clusters.
func (m *mesh) more(ctx context.Context, at ...int) error {
	want := map[int]int64{}
	for _, n := range at {
		want[n] = m.all[n-1].written.Load() + int64(m.events)
	}
	return m.until(ctx, "events are written", func(context.Context) error {
		for n, least := range want {
			if is := m.all[n-1].written.Load(); is < least {
				return fmt.Errorf("%d of %d at cluster %d", is, least, n)
			}
		}
		return nil
	})
}

// cutLink parts two clusters for a while. Each is reached by its people, and reaches NATS.
func (m *mesh) cutLink(ctx context.Context) error {
	for _, way := range [][2]int{{1, 2}, {2, 1}} {
		m.links[way].Refuse(true)
		m.links[way].Cut()
	}
	m.story.say("CUT     the link between clusters 1 and 2: no rows go from one to the other")
	if err := m.more(ctx, 1, 2); err != nil {
		return err
	}
	there, err := m.all[1].rows(ctx, 1)
	if err != nil {
		return err
	}
	read := m.published(1)
	here, err := m.all[0].rows(ctx, 1)
	if err != nil {
		return err
	}
	m.story.say("        cluster 2 lacks %d rows of home 1, but all readers have %d of its %d events",
		here-there, read, here)
	for _, way := range [][2]int{{1, 2}, {2, 1}} {
		m.links[way].Heal()
	}
	if err := m.until(ctx, "the missing rows come", func(ctx context.Context) error {
		if there, err = m.all[1].rows(ctx, 1); err == nil && there < here {
			err = fmt.Errorf("%d of %d rows", there, here)
		}
		return err
	}); err != nil {
		return err
	}
	m.story.say("HEALED  cluster 2 has them")
	return nil
}

// rows is how many rows of a home a cluster has.
func (c *cluster) rows(ctx context.Context, home int) (n int, err error) {
	err = c.query(ctx, &n, "SELECT count(*) FROM outbox WHERE actor_id LIKE $1", actorAt("%", home))
	return n, err
}

// kill kills all of a cluster.
func (c *cluster) kill() error {
	for _, o := range c.homes {
		o.kill()
	}
	return errors.Join(c.pg.Kill(), c.nats.Kill())
}

// startAgain starts all of a cluster that was killed.
func (c *cluster) startAgain(ctx context.Context) error {
	if err := errors.Join(c.nats.Start(), c.pg.Start(ctx)); err != nil {
		return err
	}
	return c.startOutflows()
}

// killCluster kills one whole cluster. Another one goes on with its stream, until it is back.
func (m *mesh) killCluster(ctx context.Context) error {
	const dies = 3
	c := m.all[dies-1]
	_, epoch, err := m.owner(ctx, dies, 0, dies)
	if err != nil {
		return err
	}
	if err := c.kill(); err != nil {
		return err
	}
	killed := time.Now()
	m.story.say("KILL    cluster 3: its PostgreSQL, its NATS server and its three outflows")
	by, epoch, err := m.owner(ctx, dies, epoch, 1, 2)
	if err != nil {
		return err
	}
	m.story.say("        cluster %d goes on with the stream of home 3 after %.1f s (maximum_delay %v), "+
		"epoch %d", by, time.Since(killed).Seconds(), m.delay, epoch)
	if err := m.more(ctx, 1, 2); err != nil {
		return err
	}
	m.tellPublished(dies)
	if err := c.startAgain(ctx); err != nil {
		return err
	}
	m.story.say("START   cluster 3 again")
	if _, epoch, err = m.owner(ctx, dies, epoch, dies); err != nil {
		return err
	}
	m.story.say("BACK    home 3 makes its stream itself, epoch %d", epoch)
	return m.more(ctx, 1, 2, 3)
}

// sleep lets a home's Outflow sleep, so that others take it for dead. It wakes up with messages on their way.
func (m *mesh) sleep(ctx context.Context) error {
	const sleeps = 1
	o := m.all[sleeps-1].home()
	_, epoch, err := m.owner(ctx, sleeps, 0, sleeps)
	if err != nil {
		return err
	}
	if err := o.child.Pause(); err != nil {
		return err
	}
	begun := time.Now()
	m.story.say("SLEEP   the outflow of home 1 stands still (SIGSTOP); its PostgreSQL goes on")
	by, epoch, err := m.owner(ctx, sleeps, epoch, 2, 3)
	if err != nil {
		return err
	}
	m.story.say("        cluster %d goes on with its stream after %.1f s, epoch %d", by,
		time.Since(begun).Seconds(), epoch)
	if err := m.more(ctx, sleeps); err != nil {
		return err
	}
	if err := o.child.Resume(); err != nil {
		return err
	}
	m.story.say("WAKE    it goes on where it stood, and believes that the stream is its own")
	if _, epoch, err = m.owner(ctx, sleeps, epoch, sleeps); err != nil {
		return err
	}
	m.story.say("BACK    it has seen that another one went on, and makes its stream again, epoch %d",
		epoch)
	return m.more(ctx, 1, 2, 3)
}
