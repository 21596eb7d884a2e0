package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
)

// matcher says which messages of the stream are selected.
type matcher struct {
	sel       *Selection
	extractor *extractor
	bounds    [][]string // of each at least one filter must match: those of the consumer that it is for
	filters   []string   // see lens.filters
	doc       predicate
	actor     predicate
	ids       map[string]bool // as they stand in the header
}

func newMatcher(l *extractor, s *Selection, bounds [][]string) (*matcher, error) {
	m := &matcher{sel: s, extractor: l, bounds: bounds, filters: l.filters(s, bounds)}
	var err error
	if m.doc, err = l.predicate("--doc", config.InDoc, s.Docs); err != nil {
		return nil, err
	}
	if m.actor, err = l.predicate("--actor", config.InActor, s.Actors); err != nil {
		return nil, err
	}
	if len(s.IDs) > 0 {
		m.ids = map[string]bool{}
		for _, id := range s.IDs {
			m.ids[string(outbox.AppendHeaderValue(nil, id))] = true
		}
	}
	return m, nil
}

// needsBody reports whether the data of a dead letter is needed too. There may be dead letters although they
// are off by now.
func (m *matcher) needsBody() bool { return m.doc != nil }

// selects reports whether a message is selected. It returns an error if the message doesn't say.
func (m *matcher) selects(msg *Message) (bool, error) {
	s := m.sel
	if s.Seq.From != nil && msg.Seq < *s.Seq.From || s.Seq.To != nil && msg.Seq > *s.Seq.To ||
		s.Time.From != nil && msg.Time.Before(*s.Time.From) || s.Time.To != nil &&
		msg.Time.After(*s.Time.To) ||
		s.Position.From != nil && msg.Outflow.Pos.Compare(*s.Position.From) < 0 ||
		s.Position.To != nil && msg.Outflow.Pos.Compare(*s.Position.To) > 0 {
		return false, nil
	}
	if !m.bounded(msg.Subject) {
		return false, nil
	}
	if m.ids != nil && !m.ids[outbox.HeaderID(msg.Header.Get(outbox.HeaderName))] {
		return false, nil
	}
	for _, t := range []predicate{m.doc, m.actor} {
		if t == nil {
			continue
		}
		if is, known := t(msg); !known {
			return false, fatal("replay_untold", fmt.Sprintf("the message at sequence %d (%s) does not say "+
				"its document or actor", msg.Seq, msg.Subject),
				"Read from the table: --from table. Or leave it out with --seq or --filter")
		} else if !is {
			return false, nil
		}
	}
	return m.keyed(msg)
}

// bounded reports whether a subject alone does not rule a message out.
func (m *matcher) bounded(subject string) bool {
	return (m.sel.Filter == "" || covers(m.sel.Filter, subject)) && inBounds(m.bounds, subject)
}

func inBounds(bounds [][]string, subject string) bool {
	for _, b := range bounds {
		if !slices.ContainsFunc(b, func(f string) bool { return covers(f, subject) }) {
			return false
		}
	}
	return true
}

// keyed compares the key. If the header has only the beginning of a long key, that may not be possible.
func (m *matcher) keyed(msg *Message) (bool, error) {
	r := m.sel.Key
	if !r.Given() {
		return true, nil
	}
	key := msg.Outflow.Key
	_, text, _ := strings.Cut(msg.Header.Get(outbox.HeaderName), " key=")
	text, _, _ = strings.Cut(text, " ")
	if begin, _, cut := strings.Cut(text, "=~"); cut {
		raw, _ := outbox.ParseHeaderValue(begin)
		for _, end := range []*string{r.From, r.To} {
			if end != nil && strings.HasPrefix(*end, raw) {
				return false, fmt.Errorf("the key of the message at sequence %d is cut: it can't be "+
					"compared with %s", msg.Seq, quoted(*end))
			}
		}
		key = raw
	}
	return (r.From == nil || key >= *r.From) && (r.To == nil || key <= *r.To), nil
}
