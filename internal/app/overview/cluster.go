package overview

import (
	"fmt"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/pipeline"
)

// Cluster is what is known of several active databases, whose rows are replicated to each other.
type Cluster struct {
	ID           int    `json:"id"`
	Count        int    `json:"count,omitempty"`
	Subscription string `json:"subscription,omitempty"` // brings the home's rows here; "": this is the home
	// The newest watermark, which the home has written; nil: none is known, or there is no control table.
	Watermark *relay.Said `json:"watermark,omitempty"`
	// events up to what is published here, counted as the home counts; nil: they are not compared yet
	Counted *uint64 `json:"counted,omitempty"`
	// how many of those that the home's newest watermark counts are not published here yet
	Behind uint64 `json:"behind,omitempty"`
	// WAL that the slot keeps because the home has not confirmed its own
	Kept        checkpoint.Kept    `json:"kept_for_home,omitzero"`
	Subscribers []watch.Subscriber `json:"subscribers"`
	// where clusters share the stream: the cluster that makes it, and in which epoch; 0: not known
	Owner int    `json:"owner,omitempty"`
	Epoch uint64 `json:"epoch,omitempty"`
	// where clusters that share nothing publish for one another, by the record: a home's newest hello,
	// whether it waits for answers to that, or leaves all to others until it says one, and how many ranges
	// of its events others publish; at a reader those that are published here
	Hello   uint64 `json:"hello,omitempty"`
	Waits   bool   `json:"waits,omitempty"`
	Yielded bool   `json:"yielded,omitempty"`
	Left    int    `json:"left,omitempty"`
	Claimed int    `json:"claimed,omitempty"`
	// whose answers it waits for, by the process, or by the record as it was written last
	WaitsFor []int `json:"waits_for,omitempty"`
	// by the process that reads a home's rows: see [pipeline.Agreement]
	Heard     time.Time `json:"heard,omitzero"`
	Unsettled uint64    `json:"unsettled_bytes,omitempty"`
	Publishes bool      `json:"publishes,omitempty"`

	gone int // so many others are gone for good, by the settings
}

// ClusterOf returns what settings and watcher say; nil where there is one database.
func ClusterOf(cfg config.Cluster, r *watch.Reading) *Cluster {
	if cfg.ID == 0 {
		return nil
	}
	return &Cluster{ID: cfg.ID, Count: cfg.Count, Subscription: cfg.Subscription,
		gone:        len(cfg.GoneForGood()),
		Subscribers: append([]watch.Subscriber{}, r.Subscribers...)}
}

// Owns adds who makes the stream that clusters share, by its record.
func (c *Cluster) Owns(cluster int, epoch uint64) {
	if c != nil {
		c.Owner, c.Epoch = cluster, epoch
	}
}

// Agrees adds what a record says of clusters that publish for one another.
func (c *Cluster) Agrees(rec *checkpoint.Record) {
	if c == nil {
		return
	}
	c.Hello, c.Left, c.Claimed = rec.Hello, len(rec.Left), len(rec.Claimed)
	if h := rec.Heard; h != nil {
		c.Waits, c.Yielded, c.WaitsFor = h.Waits, h.Yielded, h.WaitsFor(c.ID)
	}
}

// Stands adds how a process stands with the others, where clusters publish for one another.
func (c *Cluster) Stands(a *pipeline.Agreement) {
	if c == nil || a == nil {
		return
	}
	c.Hello, c.Yielded, c.Waits, c.WaitsFor = a.Hello, a.Yielded, len(a.WaitsFor) > 0, a.WaitsFor
	c.Heard, c.Unsettled, c.Publishes = a.Heard, a.Unsettled, a.Publishes
}

// Knows adds what a process or its record knows.
func (c *Cluster) Knows(said relay.Said, counted relay.Tally, kept checkpoint.Kept) {
	if c == nil || said == (relay.Said{}) {
		return
	}
	c.Watermark, c.Kept = &said, kept
	if counted.Since == 0 {
		return
	}
	c.Counted = &counted.Events
	if c.Subscription != "" && said.Events > counted.Events {
		c.Behind = said.Events - counted.Events
	}
}

// alone reports whether a home has yielded, and waits for each other cluster that is not gone for good: maybe
// nobody publishes.
func (c *Cluster) alone() bool {
	n := len(c.WaitsFor)
	return c.Yielded && n > 0 && n == c.Count-1-c.gone
}

// mostSubscribers is how many are shown.
const mostSubscribers = 3

func (r *Report) cluster() Part {
	c := r.Cluster
	p := Part{Name: "Cluster", Level: Good, Word: "home"}
	if c.Subscription != "" {
		p.Word = "reads " + c.Subscription
	}
	number := fmt.Sprint(c.ID)
	if c.Count > 0 {
		number += fmt.Sprint(" of ", c.Count)
	}
	p.add("number", number)
	if c.Epoch > 0 {
		who := fmt.Sprintf("cluster %d", c.Owner)
		if c.Owner == c.ID {
			who = "this cluster"
		}
		p.add("stream made by", fmt.Sprintf("%s, epoch %d", who, c.Epoch))
	}
	if c.Hello > 0 {
		hello := fmt.Sprint(c.Hello)
		switch {
		case c.alone():
			hello += ", yielded, and no other cluster has answered"
		case c.Yielded:
			hello += ", yielded: others publish"
		case c.Waits:
			hello += ", waits for the others' answers"
		}
		p.add("hello", hello)
	}
	if n := len(c.WaitsFor); n > 0 {
		p.add("waits for", strings.Trim(fmt.Sprint(c.WaitsFor), "[]"))
	}
	switch {
	case c.Publishes:
		p.Level, p.Word = Warning, "publishes for its home"
	case c.Yielded && !c.alone():
		p.Level, p.Word = Warning, "others publish"
	case c.Waits:
		p.Level, p.Word = Warning, "waits for clusters"
	}
	if !c.Heard.IsZero() {
		p.add("home heard", units.Duration(max(r.now.Sub(c.Heard), 0))+" ago")
	}
	if c.Unsettled > 0 {
		p.add("neither said nor claimed", units.Size(c.Unsettled))
	}
	if c.Left > 0 {
		p.add("ranges left to others", units.Count(c.Left))
	}
	if c.Claimed > 0 {
		p.add("ranges claimed here", units.Count(c.Claimed))
	}
	if w := c.Watermark; w != nil {
		p.add("watermark", units.Duration(max(r.now.Sub(w.At), 0))+" ago")
		p.add("confirmed at home", w.LSN.String())
		switch {
		case c.Subscription == "":
			p.add("events counted", units.Count(w.Events))
		case c.Counted == nil:
			p.add("events at home", units.Count(w.Events))
			p.add("here", "not compared yet")
		default:
			p.add("events at home", units.Count(w.Events))
			p.add("here", units.Count(*c.Counted))
			p.add("behind", units.Count(c.Behind))
		}
	} else if c.Subscription != "" {
		p.add("watermark", "none yet")
	}
	if k := c.Kept; !k.Since.IsZero() {
		p.add("kept for the home", units.Size(k.Bytes)+", "+units.Duration(max(r.now.Sub(k.Since), 0)))
		if k.Long(r.now) {
			p.Level, p.Word = Warning, "the home is not heard"
		}
	}
	r.subscribers(&p, c.Subscribers)
	return p
}

// subscribers says what slots of others keep here.
func (r *Report) subscribers(p *Part, all []watch.Subscriber) {
	lost := 0
	for i, s := range all {
		if s.Lost {
			lost++
		}
		if i < mostSubscribers {
			value := units.Size(uint64(max(s.Retained, 0)))
			switch {
			case s.Lost:
				value = "lost"
			case !s.Active:
				value += ", nobody reads"
			}
			p.add("kept for "+s.Slot, value)
		}
	}
	if n := len(all) - mostSubscribers; n > 0 {
		p.add("and for others", units.Count(n))
	}
	if lost > 0 {
		p.Level, p.Word = Warning, "a slot of others is lost"
	}
}
