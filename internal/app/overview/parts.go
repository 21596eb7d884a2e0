package overview

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// Part is a part of the chain.
type Part struct {
	Name    string
	Level   Level
	Word    string // the state
	Figures []Figure
	Old     string // how old the figures are, or why there are none; "" if they are of now
}

// Figure is a value with its limit.
type Figure struct {
	Name  string
	Value string
	Of    string  // the limit; "" if there is none
	Share float64 // of the limit; 0 if there is none
}

// Percent is Share for a bar.
func (f Figure) Percent() string { return strconv.FormatFloat(100*f.Share, 'f', 1, 64) }

func (p *Part) add(name, value string) {
	p.Figures = append(p.Figures, Figure{Name: name, Value: value})
}

func (p *Part) limited(name, value, limit string, n, of float64) {
	f := Figure{Name: name, Value: value}
	if of > 0 {
		f.Of, f.Share = limit, min(n/of, 1)
	}
	p.Figures = append(p.Figures, f)
}

// Parts returns the chain and the retention.
func (r *Report) Parts() []Part { return append(r.Chain(), r.Retention()...) }

// Chain returns the parts from PostgreSQL to the consumers, and of several active databases how this one and
// the others are.
func (r *Report) Chain() []Part {
	parts := []Part{r.postgres(), r.slot()}
	if r.Pipeline != nil {
		parts = append(parts, r.buffer(), r.inFlight())
	}
	parts = append(parts, r.stream(), r.consumers())
	if r.Cluster != nil {
		parts = append(parts, r.cluster())
	}
	return parts
}

// read sets the state of a part whose figures were read at some time; older ones than old are marked with
// their age. If they no longer can be read, it has the level failing. It reports whether there are figures.
func (r *Report) read(p *Part, at *watch.Read, old time.Duration, failing Level, word string) bool {
	switch {
	case at.Error != "":
		p.Level, p.Word = failing, word
	case at.At.IsZero():
		p.Level, p.Word = Unknown, "not read yet"
	}
	if age := r.now.Sub(at.At); !at.At.IsZero() && age > old {
		p.Old = "read " + units.Duration(age) + " ago"
	}
	return !at.At.IsZero()
}

func (r *Report) postgres() Part {
	pg := &r.Postgres
	p := Part{Name: "PostgreSQL", Level: Good, Word: "reachable"}
	if !r.read(&p, &pg.Read, fresh, Bad, "not reachable") {
		return p
	}
	version := pg.Version
	if pg.Standby {
		version += ", a standby server"
	}
	rate := "not known yet"
	if pg.WALRate > 0 {
		rate = units.Size(uint64(pg.WALRate)) + "/s"
	}
	p.add("WAL written", rate)
	p.add("round trip", units.Latency(pg.RoundTrip))
	p.add("version", version)
	p.add("server", pg.Host)
	return p
}

func (r *Report) slot() Part {
	s := &r.Slot
	p := Part{Name: "Slot", Level: Good, Word: "held"}
	if !r.read(&p, &s.Read, fresh, Unknown, "not known") {
		return p
	}
	if !s.Exists {
		if s.Error == "" {
			p.Level, p.Word = Bad, "missing"
		}
		return p
	}
	if s.Error == "" {
		switch level, _, _ := s.risk(); {
		case s.lost():
			p.Level, p.Word = Bad, "lost"
		case level != Good:
			p.Level, p.Word = level, "at risk"
		case !s.Active:
			p.Level, p.Word = Warning, "held by nobody"
		}
	}
	limit := 0.0
	if s.Safe != nil {
		limit = float64(s.safe() + s.Retained)
	}
	p.limited("WAL kept", units.Size(s.Retained), units.Size(uint64(limit)), float64(s.Retained), limit)
	switch {
	case s.Safe != nil:
		p.add("left", units.Size(s.safe()))
	case !s.lost(): // else PostgreSQL doesn't say
		p.add("limit", "none is set")
	}
	p.add("wal_status", s.WALStatus)
	if s.Active {
		p.add("held by", strings.TrimSpace(fmt.Sprintf("%s pid %d", s.Holder, s.PID)))
	}
	return p
}

func (r *Report) buffer() Part {
	s := r.Pipeline
	p := Part{Name: "Buffer", Level: Good, Word: "room left"}
	if !s.Holds() {
		p.Level, p.Word = Idle, "not in use"
		return p
	}
	if s.Held == 0 {
		p.Level, p.Word = Good, "empty"
	}
	p.limited("events", units.Count(s.Held), units.Count(s.HeldLimit), float64(s.Held), float64(s.HeldLimit))
	p.limited("bytes", units.Size(uint64(max(s.HeldBytes, 0))), units.Size(uint64(max(s.HeldLimitBytes, 0))),
		float64(s.HeldBytes), float64(s.HeldLimitBytes))
	for _, f := range p.Figures {
		if f.Share > 0.9 {
			p.Level, p.Word = Warning, "nearly full"
		}
	}
	p.add("oldest", units.Duration(s.Age(r.now)))
	p.add("late events", units.Count(s.Late))
	if !s.Unlisted.IsZero() && p.Level == Good {
		p.Level, p.Word = Warning, "no checkpoint"
	}
	if s.OpenGaps > 0 {
		p.add("open gaps", units.Count(s.OpenGaps))
	}
	return p
}

func (r *Report) inFlight() Part {
	s, limit := r.Pipeline, r.Outflow.InFlightLimit
	p := Part{Name: "In flight", Level: Good, Word: "acknowledged"}
	if !s.Holds() {
		p.Level, p.Word = Idle, "not in use"
		return p
	}
	if s.InFlight > 0 {
		p.Word = "moving"
	}
	if s.State == pipeline.StateAway || s.State == pipeline.StateEchoes {
		p.Level, p.Word = Warning, "waiting"
	}
	p.limited("messages", units.Count(s.InFlight), units.Count(limit), float64(s.InFlight), float64(limit))
	p.add("sequence", units.Count(s.Seq))
	p.add("sessions", units.Count(s.Sessions))
	return p
}

func (r *Report) stream() Part {
	s, n := &r.Stream, &r.NATS
	p := Part{Name: "Stream", Level: Good, Word: "stored"}
	if r.Pipeline != nil && r.Pipeline.State == pipeline.StateAway {
		p.Level, p.Word = Bad, "not reachable"
	}
	if !r.read(&p, &s.Read, fresh, Bad, "not reachable") {
		return p
	}
	if !s.Exists {
		if s.Error == "" {
			p.Level, p.Word = Bad, "missing"
		}
		return p
	}
	p.add("last sequence", units.Count(s.LastSeq))
	if !s.LastTime.IsZero() {
		p.add("stored", units.Duration(r.now.Sub(s.LastTime))+" ago")
	}
	p.limited("size", units.Size(s.Bytes), units.Size(s.MaxBytes), float64(s.Bytes), float64(s.MaxBytes))
	late := 0
	for _, replica := range s.Replicas {
		if replica.Offline || !replica.Current {
			late++
		}
	}
	if len(s.Replicas) > 0 {
		p.add("replicas", fmt.Sprintf("%d of %d current", len(s.Replicas)+1-late, len(s.Replicas)+1))
		if late > 0 && p.Level == Good {
			p.Level, p.Word = Warning, "replica behind"
		}
	}
	if n.StorageLimit > 0 {
		p.limited("JetStream", units.Size(n.Storage), units.Size(n.StorageLimit), float64(n.Storage),
			float64(n.StorageLimit))
	}
	if r.filling() != "" && p.Level == Good {
		p.Level, p.Word = Warning, "nearly full"
	}
	p.add("round trip", units.Latency(n.RoundTrip))
	server := n.Server
	if name, address, ok := strings.Cut(server, " "); ok && len(name) == serverID {
		server = address
	}
	p.add("server", strings.TrimSpace(server+" "+n.Version))
	return p
}

// filling says what is nearly full and refuses messages when it is; "" if nothing is.
func (r *Report) filling() string {
	s, n := &r.Stream, &r.NATS
	nearly := func(used, limit uint64) bool { return limit > 0 && float64(used) > nearlyFull*float64(limit) }
	switch {
	case s.Refuses && nearly(s.Bytes, s.MaxBytes):
		return fmt.Sprintf("stream %s has %s of max_bytes = %s", s.Name, units.Size(s.Bytes),
			units.Size(s.MaxBytes))
	case nearly(n.Storage, n.StorageLimit):
		return fmt.Sprintf("the account's JetStream storage is used up to %s of %s", units.Size(n.Storage),
			units.Size(n.StorageLimit))
	}
	return ""
}

const nearlyFull = 0.9

// serverID is how long the name of a NATS server is that was given none.
const serverID = 56

// keepsUp is how many messages a consumer may be behind before that is said.
const keepsUp = 1000

// ConsumerLevel says how a consumer is.
func ConsumerLevel(c *watch.Consumer) (Level, string) {
	switch {
	case c.Paused:
		return Idle, "paused"
	case c.Readers == 0 && c.Pending > 0 && c.Waiting == 0 && c.AckPending == 0:
		return Warning, "nobody reads"
	case c.Pending > keepsUp:
		return Warning, "behind"
	}
	return Good, "keeps up"
}

func (r *Report) consumers() Part {
	p := Part{Name: "Consumers", Level: Good, Word: "keep up"}
	list := r.ConsumerList
	if !r.Stream.At.IsZero() && r.Stream.Error == "" && list.Error != "" {
		p.Level, p.Word, p.Old = Unknown, "not known", list.Error // a right is missing
		return p
	}
	if !r.read(&p, &list, seldom, Unknown, "not known") {
		return p
	}
	if len(r.Consumers) == 0 {
		if p.Level == Good {
			p.Level, p.Word = Idle, "none"
		}
		return p
	}
	worst, good, redelivered := r.Consumers[0], 0, 0
	for i := range r.Consumers {
		c := &r.Consumers[i]
		if level, _ := ConsumerLevel(c); level == Good {
			good++
		}
		if c.Pending > worst.Pending {
			worst = *c
		}
		redelivered += c.Redelivered
	}
	if good < len(r.Consumers) && p.Level == Good {
		p.Level, p.Word = Warning, "behind"
	}
	p.add("keep up", fmt.Sprintf("%d of %d", good, len(r.Consumers)))
	if worst.Pending > 0 {
		p.add("farthest behind", fmt.Sprintf("%s, %s", worst.Name, units.Count(worst.Pending)))
	}
	p.add("redelivered", units.Count(redelivered))
	return p
}

// Position is a place in the WAL.
type Position struct {
	Name   string
	LSN    outbox.LSN
	Behind string // the end of WAL; "" if that is this, or not known
	Means  string
}

// Positions returns how far each step has come.
func (r *Report) Positions() []Position {
	end := r.Postgres.WALEnd
	all := []Position{{"End of WAL", end, "", "where PostgreSQL writes"}}
	add := func(name string, lsn outbox.LSN, means string) {
		p := Position{Name: name, LSN: lsn, Means: means}
		if end != 0 && lsn != 0 {
			p.Behind = units.Size(outbox.Distance(min(lsn, end), end))
		}
		all = append(all, p)
	}
	if s := r.Pipeline; s != nil && s.Holds() {
		end = max(end, s.WALEnd, s.Received)
		all[0].LSN = end
		add("Received", s.Received, "read from the WAL")
		add("Published", s.Published, "acknowledged by JetStream up to here")
	}
	add("Confirmed", r.Slot.Confirmed, "durable in the stream: PostgreSQL may forget it")
	add("Kept from", r.Slot.Restart, "the oldest WAL that PostgreSQL keeps for the slot")
	return all
}

// Age says how long ago something was.
func (r *Report) Age(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	return units.Duration(r.now.Sub(at))
}
