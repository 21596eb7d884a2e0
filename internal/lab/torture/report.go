package torture

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/lab/oracle"
)

// Report is what a run found.
type Report struct {
	Good     bool   `json:"good"`
	Seed     uint64 `json:"seed"`
	Settings string `json:"settings"`
	// what outflow did that it must not do: it ended by itself, or did not catch up
	Failure string        `json:"failure,omitempty"`
	Took    time.Duration `json:"took"`
	CatchUp time.Duration `json:"catch_up"` // from the end of the attack until everything was published

	Rows         int    `json:"rows"`            // committed
	Messages     int    `json:"messages"`        // committed, in place of rows
	RolledBack   int64  `json:"rolled_back"`     // rows
	Large        int64  `json:"large"`           // transactions that are larger than the buffer
	Transactions int    `json:"transactions"`    // in the WAL
	Ticks        int    `json:"ticks"`           //
	Changes      int    `json:"changes"`         // of settings
	Table        string `json:"table,omitempty"` // the first difference between WAL and table

	Streams []Stream `json:"streams"`
	Faults  []*Tally `json:"faults"`
	Kills   Kills    `json:"kills"`
	LeftOut int      `json:"left_out"` // faults for which there was no time

	Backlogs int `json:"backlogs"` // installations that were away for a while
}

// Stream is the verdict about one of the streams; the first is the twin's.
type Stream struct {
	Name   string `json:"name"`
	Slot   string `json:"slot"`
	Good   bool   `json:"good"`
	Digest string `json:"digest"` // without sequence numbers
	Twin   string `json:"twin,omitempty"`
	oracle.Judgement
}

// Tally is what happened with one kind of fault.
type Tally struct {
	Fault    string `json:"fault"`
	Injected int    `json:"strikes"`
	Missed   int    `json:"missed"` // there was nothing to strike at
	// published from the fault's beginning to the recovery from it, all such faults together
	Events      int64 `json:"events"`
	Unrecovered int   `json:"unrecovered"` // where that took longer than was waited

	// from the fault's end until all that was committed by then was published
	Median time.Duration `json:"recovery_median"`
	Max    time.Duration `json:"recovery_max"`

	recovered []time.Duration
	leaders   int // of the servers that were struck
}

// Kills are how often something was ended hard.
type Kills struct {
	Outflow  int `json:"outflow"`
	Postgres int `json:"postgres"` // kill -9 and immediate stops
	NATS     int `json:"nats"`
	Leaders  int `json:"leader_changes"` // of replicated streams: step-downs, and kills of the leader
}

func (a *attack) report() *Report {
	o := a.w.o
	r := &Report{
		Seed: o.Seed, Settings: fmt.Sprintf("%s source=%s replicas=%d", textOf(a.w.shape),
			o.Source, o.Replicas),
		Took: time.Since(a.begun), CatchUp: a.catchUp, RolledBack: a.w.load.rolled.Load(),
		Large: a.w.load.large.Load(), LeftOut: a.leftOut,
		Backlogs: int(a.w.backlogs.Load()),
	}
	if err := a.w.failed(); err != nil {
		r.Failure = err.Error()
	}
	for _, f := range all {
		t := a.tally[f.name]
		if t == nil {
			continue
		}
		slices.Sort(t.recovered)
		if n := len(t.recovered); n > 0 {
			t.Median, t.Max = t.recovered[n/2], t.recovered[n-1]
		}
		r.Faults = append(r.Faults, t)
		switch f.name {
		case "outflow.kill", "outflow.point":
			r.Kills.Outflow += t.Injected
		case "postgres.kill", "postgres.immediate":
			r.Kills.Postgres += t.Injected
		case "nats.kill", "nats.away", "nats.tail":
			r.Kills.NATS += t.Injected
			r.Kills.Leaders += t.leaders
		case "nats.stepdown":
			r.Kills.Leaders += t.Injected
		}
	}
	return r
}

// decide gives the verdict.
func (r *Report) decide() {
	r.Good = r.Failure == "" && r.Table == "" && len(r.Streams) > 0
	for i := range r.Streams {
		s := &r.Streams[i]
		r.Good = r.Good && s.Good && s.Twin != "DIFFERENT"
	}
}

func (r *Report) write(file string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o600)
}
