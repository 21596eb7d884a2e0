package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/finding"
)

const (
	manyPending = 10_000
	idleFor     = 30 * time.Second
	longParked  = time.Hour
	// rewindMark is on the durable that package consumeradmin keeps while it sets another one back.
	rewindMark = "outflow.rewind"
)

// eachConsumer makes a check of what is looked at of each durable consumer. Others come and go with a client.
func eachConsumer(name string, look func(f *Facts, r *reporter, c *Consumer)) check {
	return check{name: name, needs: []source{srcStream, srcConsumers},
		about: func(f *Facts) bool { return len(f.durables()) > 0 },
		run: func(f *Facts, r *reporter) {
			for _, c := range f.durables() {
				if _, rewinding := c.Config.Metadata[rewindMark]; !rewinding {
					look(f, r, c)
				}
			}
		}}
}

func (f *Facts) durables() (all []*Consumer) {
	for i := range f.Consumers {
		if f.Consumers[i].Config.Durable != "" {
			all = append(all, &f.Consumers[i])
		}
	}
	return all
}

// eachShared makes a check of what is looked at of each consumer that shares its partitions.
func eachShared(name string, look func(f *Facts, r *reporter, c *Shared)) check {
	return check{name: name, needs: []source{srcMarks, srcStream, srcConsumers},
		about: func(f *Facts) bool { return len(f.Shared) > 0 },
		run: func(f *Facts, r *reporter) {
			for i := range f.Shared {
				look(f, r, &f.Shared[i])
			}
		}}
}

// lag is how many messages of the stream lie behind the slowest partition. Of one with filters that is not
// known here: it is 0.
func (c *Shared) lag(f *Facts) uint64 {
	if len(c.Filters) != 1 || c.Filters[0] != ">" {
		return 0
	}
	st := f.Stream.State
	if c.Least < st.First {
		return st.Messages
	}
	return st.Last - min(c.Least, st.Last)
}

// ofConsumer is in the metadata of what an instance of package consumer reads with.
const ofConsumer = "outflow.consumer"

// readersOf counts the instances of a consumer that wait for messages now: one that was killed leaves its
// reader behind for some minutes.
func (f *Facts) readersOf(name string) (n int) {
	for i := range f.Consumers {
		c := &f.Consumers[i]
		if c.Config.Durable == "" && c.Config.Metadata[ofConsumer] == name && c.Waiting > 0 {
			n++
		}
	}
	return n
}

// earlier is what the first of two readings has of a consumer; nil: there was none.
func (f *Facts) earlier(name string) *Consumer {
	for i := range f.Earlier {
		if f.Earlier[i].Name == name {
			return &f.Earlier[i]
		}
	}
	return nil
}

// filtered reports whether it gets only some of the messages, so that sequences say little.
func (c *Consumer) filtered() bool {
	return c.Config.Filter != "" && c.Config.Filter != ">" || len(c.Config.Filters) > 0
}

// reads reports whether somebody takes messages from it.
func (c *Consumer) reads(now time.Time) bool {
	return c.Waiting > 0 || c.Push || now.Sub(c.Delivered.Last) < idleFor ||
		now.Sub(c.AckFloor.Last) < idleFor
}

var consumerChecks = []check{
	eachConsumer("consumers.reading", func(f *Facts, r *reporter, c *Consumer) {
		switch {
		case c.Pending+uint64(c.AckPending) == 0 || c.reads(f.Now.Add(f.Stream.Clock)):
		case c.Paused:
			r.find("consumer_paused", "consumer %s is paused, with %s before it", c.Name,
				units.Of(c.Pending, "message"))
		default:
			r.find("consumer_idle", "nobody reads from consumer %s, with %s before it", c.Name,
				units.Of(c.Pending+uint64(c.AckPending), "message")).Command = "nats consumer info " +
				f.Config.Stream + " " +
				finding.Word(c.Name)
		}
	}),
	eachConsumer("consumers.behind", func(f *Facts, r *reporter, c *Consumer) {
		then := f.earlier(c.Name)
		switch {
		case c.Pending <= manyPending:
		case then != nil && c.Pending > then.Pending:
			r.find("consumer_behind", "consumer %s has %d messages before it, %d more than %v ago", c.Name,
				c.Pending, c.Pending-then.Pending, f.Apart)
		case then != nil && c.Pending < then.Pending:
			r.findAs(finding.Note, "consumer_behind",
				"consumer %s has %d messages before it, %d less than %v ago",
				c.Name, c.Pending, then.Pending-c.Pending, f.Apart)
		default:
			r.find("consumer_behind", "consumer %s has %d messages before it", c.Name, c.Pending)
		}
	}),
	eachConsumer("consumers.retention", func(f *Facts, r *reporter, c *Consumer) {
		if first := f.Stream.State.First; !c.filtered() && c.Delivered.Stream+1 < first {
			r.find("consumer_lost", "stream %s begins at sequence %d, and consumer %s got messages up to "+
				"%d: %s went before it had them", f.Config.Stream, first, c.Name, c.Delivered.Stream,
				units.Of(first-c.Delivered.Stream-1, "message"))
		}
	}),
	eachConsumer("consumers.beyond_end", func(f *Facts, r *reporter, c *Consumer) {
		last := max(f.Stream.State.Last, f.Readings.Stream.LastSeq)
		if at := max(c.AckFloor.Stream, c.Delivered.Stream); at > last {
			r.find("consumer_beyond_end", "consumer %s is at sequence %d, and stream %s ends at %d", c.Name,
				at, f.Config.Stream, last).Command = fmt.Sprintf("outflow consumer rewind %s --to seq:%d",
				finding.Word(c.Name), max(last, 1))
		}
	}),
	eachConsumer("consumers.redelivery", func(f *Facts, r *reporter, c *Consumer) {
		if c.Redelivered > 0 {
			r.find("consumer_redelivers", "%s that consumer %s had and did not acknowledge came again",
				units.Of(c.Redelivered, "message"), c.Name)
		}
	}),
	eachConsumer("consumers.settings", func(f *Facts, r *reporter, c *Consumer) {
		if c.Config.MaxDeliver > 0 {
			r.find("consumer_max_deliver", "consumer %s has max_deliver %d: a message that was delivered so "+
				"often is passed over without a word", c.Name, c.Config.MaxDeliver).Command =
				"nats consumer edit " + f.Config.Stream + " " + finding.Word(c.Name) + " --max-deliver=-1"
		}
		if c.Config.Ack == "none" {
			r.find("consumer_ack_none",
				"consumer %s acknowledges nothing (ack_policy none): what a client loses "+
					"is not delivered again", c.Name)
		}
	}),
	{name: "consumers.rewind", needs: []source{srcConsumers},
		run: func(f *Facts, r *reporter) {
			for _, c := range f.durables() {
				if _, ok := c.Config.Metadata[rewindMark]; ok {
					name := strings.TrimSuffix(c.Config.Durable, "_rewinding")
					r.find("rewind_unfinished", "setting consumer %s back was interrupted", name).Command =
						"outflow consumer list"
				}
			}
			r.ok("%s", units.Of(len(f.durables()), "durable consumer"))
		}},
	eachShared("consumers.instances", func(f *Facts, r *reporter, c *Shared) {
		lag, where := c.lag(f), c.Consumer+" ("+c.Table+")"
		list := "outflow consumer list"
		switch {
		case c.Running == 0 && lag > 0:
			r.find("consumer_idle", "no instance of consumer %s runs, with %s behind its slowest "+
				"partition", where,
				units.Of(lag, "message")).Command = list
		case c.Running > 0 && c.Unowned > 0:
			r.find("consumer_unowned", "nobody works on %d of %d partitions of consumer %s; instances: %d",
				c.Unowned, c.Partitions, where, c.Running).Command = list
		}
		if len(c.Silent) > 0 {
			r.find("consumer_silent", "of consumer %s, %s", where, strings.Join(c.Silent, ", "+
				"")).Command = list
		}
		if reading := f.readersOf(c.Consumer); c.Running > 0 && reading > c.Running {
			r.find("consumer_databases", "%d instances of consumer %s read the stream, and %s knows "+
				"%d", reading,
				c.Consumer, c.Table, c.Running).Command = list
		}
		if lag > manyPending {
			r.find("consumer_behind", "consumer %s has %d messages behind its slowest "+
				"partition", where, lag).Command =
				list
		}
	}),
	eachShared("consumers.layout", func(_ *Facts, r *reporter, c *Shared) {
		if c.Wanted > 0 {
			r.find("consumer_change", "consumer %s (%s) is on its way to %s, at sequence %d: its "+
				"slowest partition is at %d, and %s", c.Consumer, c.Table,
				units.Of(c.Wanted, "partition"), c.Barrier, c.Least,
				units.Of(c.Running, "instance")+units.Agree(c.Running, " runs", " run")).Command =
				"outflow consumer list"
		}
	}),
	eachShared("consumers.lost_end", func(_ *Facts, r *reporter, c *Shared) {
		if c.Holed > 0 {
			r.find("consumer_holed", "the stream has lost the newest done message of %s of consumer "+
				"%s (%s)", units.Of(c.Holed, "partition"), c.Consumer, c.Table)
		}
	}),
	{name: "consumers.parked", needs: []source{srcParked},
		run: func(f *Facts, r *reporter) {
			for _, p := range f.Parked {
				as, since := finding.Warning, seconds(p.Seconds)
				if since > longParked {
					as = finding.Error
				}
				r.findAs(as, "events_parked", "consumer %s has %s parked in %s, the oldest for %s",
					p.Consumer, units.Of(p.Events, "event"), p.Table,
					units.Duration(since)).Command = "outflow parked list " + finding.Word(p.Consumer)
			}
		}},
}
