package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// In the mode islands each cluster has a NATS of its own, and publishes for a silent home into a stream
// there. Who wants all events of a home reads the streams of all clusters.

// together is what the streams of all clusters have of one home's events.
type together struct {
	by        [clusters]int // events that each cluster has published
	published int           // different ones
	twice     int           // events that the home had published before another cluster did
	strange   int           // copies beside those, which there should not be
	late      int           // events behind a later one of their sequence, in one stream
	missing   int
}

// together compares the streams with each other.
func (m *mesh) together(home int) together { return m.against(nil, home) }

// against compares them also with what the home has committed.
func (m *mesh) against(own map[sequence]int, home int) (f together) {
	lengths := map[sequence]int{}
	for at, c := range m.all {
		t := c.streams[home-1]
		t.mu.Lock()
		defer t.mu.Unlock()
		f.by[at], f.late = t.count[home].events, f.late+t.count[home].late
		for of, all := range t.events {
			lengths[of] = max(lengths[of], len(all))
		}
	}
	for of, n := range own {
		lengths[of] = max(lengths[of], n)
	}
	for of, n := range lengths {
		for i := range n {
			first, others := m.all[home-1].streams[home-1].copies(of, i), 0
			all := first.n
			for at, c := range m.all {
				if t := c.streams[home-1]; at != home-1 && t.copies(of, i).n > 0 {
					all += t.copies(of, i).n
					if others++; first.n > 0 && t.copies(of, i).first.Before(first.first) {
						f.strange++
					}
				}
			}
			switch {
			case all > 0:
				f.published++
			case i < own[of]:
				f.missing++
			}
			if first.n > 0 && others > 0 {
				f.twice++
			}
			f.strange += max(0, first.n-1) + max(0, all-first.n-1)
		}
	}
	return f
}

// unions is the verdict of the mode islands.
type unions struct {
	committed [clusters]int
	outflow   [clusters]together
	relays    [clusters]found
	strange   []error
}

func (v *unions) good() error {
	errs := v.strange
	for home, f := range v.outflow {
		if f.missing+f.strange+f.late > 0 || v.committed[home] == 0 {
			errs = append(errs, fmt.Errorf("home %d: %+v of %d events", home+1, f, v.committed[home]))
		}
	}
	return errors.Join(errs...)
}

func (v *unions) String() string {
	var b strings.Builder
	b.WriteString("\nverdict: each home's events in the streams of all clusters together\n\n")
	fmt.Fprintf(&b, "%-16s%9s", "", "committed")
	for at := range clusters {
		fmt.Fprintf(&b, "%6s", fmt.Sprint("by ", at+1))
	}
	fmt.Fprintf(&b, "%10s%8s%14s\n", "missing", "twice", "out of order")
	for home, f := range v.outflow {
		fmt.Fprintf(&b, "Outflow  home %d %9d", home+1, v.committed[home])
		for _, n := range f.by {
			fmt.Fprintf(&b, "%6d", n)
		}
		fmt.Fprintf(&b, "%10d%8d%14d\n", f.missing, f.twice, f.late)
	}
	for home, f := range v.relays {
		fmt.Fprintf(&b, "relays   home %d %9d%18s%10d%8d%14d\n", home+1, v.committed[home], "", f.missing,
			f.twice, f.late)
	}
	strange := 0
	for _, f := range v.outflow {
		strange += f.strange
	}
	fmt.Fprintf(&b, "\nTwice: its home had published it, and fell silent before it could say so. Otherwise "+
		"twice: %d.\n", strange)
	return b.String()
}

// judgeTogether compares what was read with the homes' own tables.
func (m *mesh) judgeTogether(ctx context.Context) (verdict, error) {
	v := &unions{}
	for i, home := range m.all {
		own, n, err := home.own(ctx)
		if err != nil {
			v.strange = append(v.strange, err)
		}
		v.committed[i], v.outflow[i] = n, m.against(own, i+1)
		for _, c := range m.all {
			relayed := c.relayed.against(own, i+1) // each has all rows
			v.relays[i].missing += relayed.missing
			v.relays[i].twice += relayed.events + relayed.twice
			v.relays[i].late += relayed.late
			v.strange = append(v.strange, c.streams[i].strangers(i+1)...)
		}
		v.relays[i].twice -= n
	}
	return v, ctx.Err()
}

// others is how many messages all other clusters have published for a home.
func (m *mesh) others(home int) (n uint64) {
	for _, c := range m.all {
		if c.number != home {
			n += c.streams[home-1].last()
		}
	}
	return n
}

// last is the newest message that was read.
func (t *tally) last() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.read
}

// silent tells what becomes of a home's events while it does not publish.
func (m *mesh) silent(ctx context.Context, home int) error {
	begun, before := time.Now(), m.others(home)
	if err := m.until(ctx, fmt.Sprint("others publish for home ", home), func(context.Context) error {
		if m.others(home) == before {
			return errors.New("nobody does")
		}
		return nil
	}); err != nil {
		return err
	}
	m.story.say("        another cluster publishes events of home %d after %.1f s (maximum_delay %v)", home,
		time.Since(begun).Seconds(), m.delay)
	return m.more(ctx, home%clusters+1)
}

// back waits until a home publishes itself again.
func (m *mesh) back(ctx context.Context, home int) error {
	before := m.all[home-1].streams[home-1].last()
	if err := m.until(ctx, fmt.Sprintf("home %d publishes", home), func(context.Context) error {
		if m.all[home-1].streams[home-1].last() == before {
			return errors.New("it does not")
		}
		return nil
	}); err != nil {
		return err
	}
	m.story.say("BACK    home %d publishes again, behind what others have claimed", home)
	return m.more(ctx, 1, 2, 3)
}

// killNATS kills the NATS of a home that goes on taking writes.
func (m *mesh) killNATS(ctx context.Context) error {
	nats := m.all[0].nats
	return m.dies(ctx, 1, "the NATS of cluster 1", "; its PostgreSQL goes on", nats.Kill,
		func(context.Context) error { return nats.Start() })
}

// killIsland kills one whole cluster.
func (m *mesh) killIsland(ctx context.Context) error {
	c := m.all[2]
	return m.dies(ctx, 3, "cluster 3", ": its PostgreSQL, its NATS and its three outflows", c.kill,
		c.startAgain)
}

// dies kills what a home needs, tells what becomes of its events, and starts it again.
func (m *mesh) dies(ctx context.Context, home int, what, how string, kill func() error,
	start func(context.Context) error) error {
	if err := kill(); err != nil {
		return err
	}
	m.story.say("KILL    %s%s", what, how)
	if err := m.silent(ctx, home); err != nil {
		return err
	}
	m.tellPublished(home)
	if err := start(ctx); err != nil {
		return err
	}
	m.story.say("START   %s again", what)
	return m.back(ctx, home)
}

// sleepAlone lets a home's Outflow sleep, so that others take it for dead. It wakes up with messages on their
// way.
func (m *mesh) sleepAlone(ctx context.Context) error {
	const sleeps = 1
	o := m.all[sleeps-1].home()
	if err := o.child.Pause(); err != nil {
		return err
	}
	m.story.say("SLEEP   the outflow of home 1 stands still (SIGSTOP); its PostgreSQL goes on")
	if err := m.silent(ctx, sleeps); err != nil {
		return err
	}
	if err := o.child.Resume(); err != nil {
		return err
	}
	m.story.say("WAKE    it goes on where it stood, and believes that nobody publishes for it")
	return m.back(ctx, sleeps)
}
