package pipeline

import "time"

// Agreement is how a process stands with the other clusters, where they share nothing and publish for one
// another.
type Agreement struct {
	Hello   uint64 `json:"hello"`             // the newest one of the home that was read; 0: none was
	Yielded bool   `json:"yielded,omitempty"` // the home leaves its events to others until the next one
	// at a home: the clusters whose answers to that it waits for; it publishes nothing until it has them
	WaitsFor []int `json:"waits_for,omitempty"`

	// at a reader: when the newest sign of life was committed at home, of those that this process has read,
	// by the home's clock; zero: it has read none
	Heard time.Time `json:"heard,omitzero"`
	// likewise: up to its newest commit with events that was read, WAL of the home behind what it has said to
	// have published and others have claimed
	Unsettled uint64 `json:"unsettled_bytes,omitempty"`
	// likewise: this cluster was the last to publish for the home, which is silent since, or has yielded
	Publishes bool `json:"publishes,omitempty"`
}

// agreement is nil without the mode.
func (s *session) agreement() *Agreement {
	switch {
	case s.reader != nil:
		return s.reader.agreement()
	case s.island != nil:
		return s.island.agreement()
	}
	return nil
}

func (i *island) agreement() *Agreement {
	state := i.State()
	return &Agreement{Hello: state.Hello, Yielded: state.Yielded, WaitsFor: state.WaitsFor(i.cfg.Self)}
}

func (r *reader) agreement() *Agreement {
	state := r.State()
	a := &Agreement{Hello: state.Hello, Yielded: state.Yielded, Heard: r.heard, Publishes: r.publishes}
	if state.Newest > state.Settled {
		a.Unsettled = uint64(state.Newest - state.Settled)
	}
	return a
}
