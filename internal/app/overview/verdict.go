package overview

import (
	"fmt"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// Verdict is the first thing to read.
type Verdict struct {
	Level  Level     `json:"level"`
	State  string    `json:"state"` // in two or three words
	Since  time.Time `json:"since,omitzero"`
	Code   string    `json:"code,omitempty"`   // of what is wrong; see outflow explain
	Cause  string    `json:"cause,omitempty"`  // what is wrong, in a line
	Detail string    `json:"detail,omitempty"` // this time: with servers, objects and values
	// what that means for the data: what waits where, and when it would be lost
	Effect string `json:"effect"`
	Do     string `json:"do"`
}

// The figures of a part that are older are marked with their age: those of each reading, and those that are
// read seldom.
const (
	fresh  = 10 * time.Second
	seldom = fresh + watch.ListInterval
)

// What a lag has to be until it is said, and what is left of the slot's limit until it is a risk.
const (
	behind   = 10 * time.Second
	headroom = 0.25
)

const (
	nothingToDo = "Nothing"
	notLost     = "Nothing is lost"
)

func (r *Report) ofPipeline() Verdict {
	s := r.Pipeline
	v := Verdict{Since: s.Since, Level: Good, Do: nothingToDo, Effect: r.kept(s.Ready())}
	if f := s.Fault; f != nil {
		return r.risk(v.stoppedAt(f))
	}
	switch s.State {
	case pipeline.StateRunning:
		v.State = "Publishing"
		if !s.Unlisted.IsZero() {
			v.Level, v.Cause = Warning, "More sequences wait for missing counters than a checkpoint can list"
			v.Do = "See the open gaps: until fewer wait, PostgreSQL keeps the WAL"
		}
		if lag := s.Lag(r.now); lag > behind {
			v.Level, v.State = Warning, "Publishing, "+units.Duration(lag)+" behind"
			v.Cause = "More is written than has been published so far"
			v.Do = "Nothing, unless it grows: outflow catches up by itself"
		}
		return r.risk(v)
	case pipeline.StateComparing:
		v.Level, v.State = Warning, "Catching up"
		v.Cause = "What was read before is compared with what is in the stream, message by message"
		v.Do = "Nothing: new events follow by themselves"
		return r.risk(v)
	case pipeline.StateEchoes:
		v.Level, v.State = Warning, "Waiting for the other clusters"
		v.Cause = "They may publish for this one, until each of them has read that it is back"
		v.Do = "Nothing, unless it stays: then see whether Outflow and replication run at each of them"
		return r.risk(v)
	case pipeline.StateStandby:
		v.Level, v.State = Idle, "Standing by"
		v.Effect = "Another outflow publishes. " + v.Effect
		v.Do = "Nothing: this one takes over when the other one ends"
		if r.Slot.Holder != "" {
			v.Cause = "The slot is held by " + r.Slot.Holder
		}
		return r.risk(v)
	case pipeline.StateStopping:
		v.Level, v.State, v.Do = Warning, "Stopping", "Start it again to go on"
		v.Cause = "It was told to: what is in flight is acknowledged first"
		return r.risk(v)
	case pipeline.StateStopped:
		v.Level, v.State, v.Do = Bad, "Stopped", "Start it again to go on"
		return r.risk(v)
	}
	// Between sessions, or before the first one.
	v.Level, v.State, v.Since = Bad, "Not publishing", s.ReadyChanged
	switch {
	case r.NATS.Error != "":
		v.find(sink.CodeConnect, r.NATS.Error, "")
	case s.State == pipeline.StateAway: // it may be there, and refuse
		code := s.Code
		if code == "" {
			code = sink.CodeConnect
		}
		v.find(code, s.Error, "")
	case r.Postgres.Error != "":
		v.find(postgres.CodeConnect, r.Postgres.Error, "")
	case s.Error != "":
		v.Cause, v.Do = s.Error, "Nothing, unless it stays: outflow tries again by itself"
		if s.Code != "" {
			v.find(s.Code, s.Error, "")
		}
	default:
		v.Level, v.State, v.Do = Unknown, "Starting", "Wait a moment"
	}
	return r.risk(v)
}

// stoppedAt is the verdict of a process that holds a fault.
func (v Verdict) stoppedAt(f *pipeline.Fault) Verdict {
	v.Level, v.State, v.Since = Bad, "Stopped at a fault", f.Since
	v.find(f.Code, f.Message, f.Hint)
	return v
}

// find says what the catalogue has about a code, and what was found this time.
func (v *Verdict) find(code, detail, hint string) {
	entry, _ := finding.Of(code)
	if finding.MayLose(code) {
		v.Effect = strings.Replace(v.Effect, notLost, "Events may be missing from the stream", 1)
	}
	v.Code, v.Detail = code, detail
	v.Cause = first(entry.Title, detail)
	v.Do = strings.TrimSuffix(first(hint, entry.Hint, v.Do), ".")
	// errors end with their hints
	if sentence, _, _ := strings.Cut(v.Do, ". "); sentence != "" {
		v.Detail, _, _ = strings.Cut(detail, ". "+sentence)
	}
}

// risk says if the slot is in danger, whatever else there is.
func (r *Report) risk(v Verdict) Verdict {
	level, cause, do := r.Slot.risk()
	if level == Good {
		return r.beside(v)
	}
	if v.Level == Good || v.Level == Idle || level == Bad && r.Slot.lost() {
		v.Level, v.Cause, v.Do, v.Code, v.Detail = level, cause, do, "", ""
		return v
	}
	v.Do = strings.TrimSuffix(v.Do, ".") + ". " + cause + ": " + lower(do)
	return v
}

// beside says that there is something to do that publishing does not need: without a partition the services'
// own transactions fail.
func (r *Report) beside(v Verdict) Verdict {
	if v.Do != nothingToDo {
		return v
	}
	if full := r.filling(); full != "" {
		v.Level = Warning
		v.Cause = "NATS soon refuses what is published: " + full
		v.Do = "Make room, or raise the limit: `outflow doctor` says how"
		return v
	}
	var names []string
	for _, p := range r.Retention() {
		if p.Level == Bad || p.Level == Warning {
			names = append(names, fmt.Sprintf("%s (%s)", lower(p.Name), p.Word))
		}
	}
	if len(names) > 0 {
		v.Do = "Nothing for publishing. See to " + strings.Join(names, ", ") + ": `outflow doctor` says how"
	}
	return v
}

func (s *Slot) lost() bool {
	return s.Exists && (s.WALStatus == "lost" || s.Invalidation != "")
}

// risk returns how far the slot is from being lost.
func (s *Slot) risk() (level Level, cause, do string) {
	const grow = "Raise max_slot_wal_keep_size (a reload is enough), and let outflow publish"
	switch {
	case s.At.IsZero():
	case s.lost():
		return Bad, "The slot is lost: PostgreSQL has removed WAL that was not published",
			"`outflow repair` publishes from the table what is missing"
	case s.WALStatus == "unreserved":
		return Bad, "The slot is lost at the next checkpoint: it needs more WAL than " +
			"max_slot_wal_keep_size allows", grow
	case s.Safe != nil && s.left() < headroom:
		return Warning, fmt.Sprintf("The slot may keep only %s more", units.Size(s.safe())), grow
	}
	return Good, "", ""
}

func (s *Slot) safe() uint64 { return uint64(max(*s.Safe, 0)) }

// left is the share of the slot's limit that is left.
func (s *Slot) left() float64 {
	return float64(s.safe()) / float64(max(s.safe()+s.Retained, 1))
}

// kept says what PostgreSQL keeps, and when that ends.
func (r *Report) kept(publishing bool) string {
	s := &r.Slot
	switch {
	case s.At.IsZero():
		return "What PostgreSQL keeps is not known: it has not been read yet"
	case !s.Exists:
		return "There is no slot: PostgreSQL keeps nothing for outflow"
	case s.lost():
		return "Events are missing in the stream"
	}
	text := notLost + ". PostgreSQL keeps " + units.Size(s.Retained) + " of WAL for the slot"
	if age := r.now.Sub(s.At); age > fresh {
		text += " (read " + units.Duration(age) + " ago)"
	}
	left := r.timeLeft()
	switch {
	case s.Safe == nil:
		return text + ", as long as its disk has room: max_slot_wal_keep_size is not set"
	case publishing && left != "":
		return text + "; if publishing stopped now, the slot would be lost in " + left
	case left != "":
		return text + "; the slot is lost in " + left + ", when " + units.Size(s.safe()) + " more are written"
	}
	if publishing {
		text += "; if publishing stopped now, the slot would be"
	} else {
		text += "; the slot is"
	}
	return text + " lost when " + units.Size(s.safe()) + " more are written"
}

// timeLeft says when the slot is lost if nothing is published and as much WAL is written as now; "" if that
// is not known.
func (r *Report) timeLeft() string {
	if r.Slot.Safe == nil || r.Postgres.WALRate <= 0 {
		return ""
	}
	const month = 30 * 24 * time.Hour
	seconds := float64(r.Slot.safe()) / r.Postgres.WALRate
	if seconds > month.Seconds() {
		return "more than a month"
	}
	return "about " + units.Duration(time.Duration(seconds)*time.Second)
}

// OfHealth is the verdict of somebody who read both servers as a start would: fault is what such a start
// would end with, or wait for, active whether an outflow holds the slot, held what another one has said that
// it waits at, and ended what the last one has ended with; nil: none does, or has. A start does not see which
// row it will not be able to publish, so only ended tells that.
func (r *Report) OfHealth(fault error, active bool, held *pipeline.Fault, ended *checkpoint.End) {
	waits := r.Slot.WaitsAt
	v := Verdict{Level: Good, State: "Running", Do: nothingToDo,
		Effect: r.kept(fault == nil && active && waits == "")}
	switch {
	case fault != nil:
		v.Level, v.State, v.Cause, v.Do = Bad, "Not publishing", fault.Error(), "Read the cause"
		if f := outbox.FaultOf(fault); f != nil {
			bare := *f
			bare.Hint = ""
			v.find(f.Code, bare.Error(), f.Hint)
		}
	case waits != "" && held == nil: // what can be read of NATS is well where it refuses what is written
		v.Level, v.State = Bad, "Not publishing"
		v.find(waits, "outflow run says that it waits at "+waits+"; its log and page have the error", "")
	case active:
	case held != nil:
		v = v.stoppedAt(held)
	case ended != nil && ended.Class == outbox.Poison.String():
		v.Level, v.State = Bad, "Not running"
		v.Cause = "The last outflow ended at a row that it could not publish"
		v.Do = strings.TrimSuffix(ended.Hint, ".") + ". Then start `outflow run`"
	default:
		v.Level, v.State, v.Cause, v.Do = Warning, "Not running", "No outflow holds the slot",
			"Start `outflow run`. If it runs, its log and /readyz say why it does not hold the slot"
	}
	r.say(r.risk(v))
}

// say sets the verdict, in which each suggested command is complete.
func (r *Report) say(v Verdict) {
	for _, text := range []*string{&v.Cause, &v.Detail, &v.Effect, &v.Do} {
		*text = r.repeat.In(*text)
	}
	r.Verdict = v
}

func first(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}

func lower(text string) string {
	if text == "" || strings.HasPrefix(text, "`outflow") {
		return text
	}
	return strings.ToLower(text[:1]) + text[1:]
}
