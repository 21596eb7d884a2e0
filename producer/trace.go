package producer

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/traceparent"
)

// bindTrace finds the columns of the trace context. Without one for the traceparent Inject would do nothing,
// in silence.
func (o *Outbox) bindTrace() error {
	if o.cfg.Inject == nil {
		return nil
	}
	for header, column := range o.cfg.Headers {
		switch strings.ToLower(header) {
		case traceparent.Name:
			o.parent = column
		case traceparent.State:
			o.state = column
		}
	}
	if o.parent == "" {
		return errors.New("producer: Inject is set, and Headers has no traceparent. Give Headers what the " +
			"setting headers has, with traceparent and its column")
	}
	return nil
}

// traced returns the events with the trace context of a call, as far as they have none of their own. What is
// no valid context is left out: nobody's transaction fails for the sake of its trace.
func (o *Outbox) traced(ctx context.Context, events []Event) []Event {
	if o.cfg.Inject == nil {
		return events
	}
	carrier := map[string]string{}
	o.cfg.Inject(ctx, carrier)
	parent, state := carrier[traceparent.Name], carrier[traceparent.State]
	if _, ok := traceparent.Parse(parent); !ok {
		return events
	}
	events = slices.Clone(events)
	for i := range events {
		e := &events[i]
		columns := maps.Clone(e.Columns)
		if columns == nil {
			columns = map[string]any{}
		}
		_, own := columns[o.parent]
		if !own {
			columns[o.parent] = parent
		}
		if _, ok := columns[o.state]; !ok && o.state != "" && validState(state) {
			if columns[o.state] = state; own {
				columns[o.state] = nil // it belongs to another context
			}
		}
		e.Columns = columns
	}
	return events
}

// validState reports whether a tracestate may be passed on: printable ASCII of a length that everybody takes.
func validState(s string) bool {
	return s != "" && len(s) <= traceparent.MaxState &&
		!strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}
