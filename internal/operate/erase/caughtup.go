package erase

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
)

// heard is how much later than it was asked for a copy is to have heard of its origin, to have all: it gets a
// heartbeat each second.
const heard = 2 * time.Second

// inWhole finds what goes from a copy that has all that its origins had when this began: what was read there
// before it was erased comes later, and is not there yet. If the copy does not have all in time, the rest is
// waited for.
func (c *command) inWhole(ctx context.Context, name string, until time.Time) (all []found, err error) {
	began := time.Now()
	var want []uint64 // by origin
	origins := c.erasedFrom(name)
	last, err := c.lastErased(ctx)
	if err != nil {
		return nil, err
	}
	behind := map[string]bool{} // origins of which something was erased behind what is left
	for _, o := range origins {
		newest, err := c.newest(ctx, o)
		if err != nil {
			return nil, err
		}
		want = append(want, newest)
		if c.mirrored(o.Name) == c.cfg.Stream {
			behind[o.Name] = behind[o.Name] || last > newest
		} else {
			behind[o.Name] = c.rec.Copies[o.Name] > 0
		}
	}
	defer progress.Wait(ctx, "waiting until stream "+name+" has all that it copies")()
	for {
		var state copyState
		if all, state, err = c.inCopy(ctx, name); err != nil {
			return nil, err
		}
		var lacks []string
		soon := true
		for i, o := range origins {
			has, unheard := c.caughtUp(name, &state, o, want[i], behind[o.Name], began)
			if !has {
				lacks = append(lacks, fmt.Sprintf("%s up to %d", o.Name, want[i]))
			}
			soon = soon && (has || unheard)
		}
		if len(lacks) == 0 {
			return all, nil
		}
		if least := began.Add(2 * heard); soon && until.Before(least) {
			until = least // or no run would ever hear of it, whose time is over by then
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("stream %s does not have all yet of stream "+
				"%s: messages of the document may still come there", name, strings.Join(lacks, ", ")))
			return all, err
		}
	}
}

// erasedFrom are the origins of a copy that messages are erased from.
func (c *command) erasedFrom(name string) (all []origin) {
	for _, o := range c.info(name).origins {
		if o.Name == c.cfg.Stream || c.rep.copy(o.Name) {
			all = append(all, o)
		}
	}
	return all
}

// mirrored is the stream whose sequences one has that mirrors it, over others too; itself if it does not.
func (c *command) mirrored(name string) string {
	for range c.list {
		s := c.info(name)
		if s == nil || s.mirror == "" {
			break
		}
		name = s.mirror
	}
	return name
}

// newest is the sequence of the newest message of an origin that is copied; 0: there is none.
func (c *command) newest(ctx context.Context, o origin) (seq uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for _, subject := range o.subjects() {
		m, err := c.l.NATS.API().Message(ctx, o.Name, jsapi.MessageRequest{Last: subject})
		if err != nil {
			return 0, fmt.Errorf("stream %s: %w", o.Name, err)
		}
		if m != nil && m.Seq >= o.FromSeq && !m.Time.Before(o.FromTime) {
			seq = max(seq, m.Seq)
		}
	}
	return seq, nil
}

// copyState is how far a copy is, at least.
type copyState struct {
	jsapi.Answer
	asked time.Time
	State struct {
		Last uint64 `json:"last_seq"`
	} `json:"state"`
	Sources []sourceState `json:"sources"`
	Mirror  *sourceState  `json:"mirror"`
}

// sourceState is what a server says of what a stream copies from another one.
type sourceState struct {
	Name   string        `json:"name"`
	Lag    uint64        `json:"lag"`
	Active time.Duration `json:"active"` // since it was heard; less than 0: never
}

// caughtUp reports whether a copy that was just read has what an origin had up to a sequence. A mirror has
// the sequences of its origin. What was sourced says where it was; if nothing from there is left, because the
// copy does not keep all, the server says whether something is to come, once it has heard of the origin.
//
// behind: something was erased behind that sequence, and may be on its way. What the origin sends later comes
// after that, so it is enough that it was heard; what it said of a lag may be about what was erased. unheard:
// that is all that is missing.
func (c *command) caughtUp(name string, state *copyState, o origin, seq uint64, behind bool,
	began time.Time) (has, unheard bool) {
	mirrors := c.info(name).mirror == o.Name
	if has = state.State.Last >= seq; seq > 0 && !mirrors {
		has = c.reached[[2]string{o.Name, strings.Join(o.subjects(), "\f")}] >= seq
	}
	if has && !behind || mirrors && !has {
		return has, false
	}
	all := state.Sources
	if state.Mirror != nil {
		all = append(all, *state.Mirror)
	}
	for _, s := range all {
		switch {
		case s.Name != o.Name:
		case s.Lag > 0 && !has || s.Active < 0:
			return false, false
		case !state.asked.Add(-s.Active).After(began.Add(heard)):
			unheard = true
		}
	}
	return !unheard, unheard && behind
}
