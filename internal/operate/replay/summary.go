package replay

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// maxSubjects is how many subjects a summary lists.
const maxSubjects = 10_000

// maxSequences is the most messages that are fetched one by one if they are few and far apart.
const maxSequences = 4096

// Summary says what is selected. The JSON names are stable.
type Summary struct {
	Source   Source    `json:"source"`
	Why      string    `json:"why"`
	Events   uint64    `json:"events"`
	First    *Brief    `json:"first,omitempty"`
	Last     *Brief    `json:"last,omitempty"`
	Subjects []Subject `json:"subjects,omitempty"` // ascending
	Further  uint64    `json:"further,omitempty"`  // events of subjects that are not listed

	bySubject map[string]*Subject
	sequences []uint64 // of the messages; nil: more than maxSequences
}

// Subject is what a summary says of one subject: of a document, where subjects hold it.
type Subject struct {
	Subject  string `json:"subject"`
	Document string `json:"document,omitempty"`
	Events   uint64 `json:"events"`
	First    Brief  `json:"first"`
	Last     Brief  `json:"last"`
}

// Brief names an event.
type Brief struct {
	Sequence uint64           `json:"sequence,omitempty"`
	Position *outbox.Position `json:"position,omitempty"`
	Subject  string           `json:"subject"`
	ID       string           `json:"id"`
	Key      string           `json:"key"`
	Time     *time.Time       `json:"time,omitempty"`
}

// brief copies what it keeps, because the message's strings may be parts of larger memory.
func brief(m *Message) Brief {
	b := Brief{Sequence: m.Seq, Subject: strings.Clone(m.Subject), ID: strings.Clone(m.Outflow.ID),
		Key: strings.Clone(m.Outflow.Key)}
	if m.Seq > 0 {
		pos := m.Outflow.Pos
		b.Position = &pos
	}
	if !m.Time.IsZero() {
		t := m.Time.UTC()
		b.Time = &t
	}
	return b
}

// String is the event for people.
func (b *Brief) String() string {
	s := fmt.Sprintf("%s, key %q, id %s", b.Subject, b.Key, b.ID)
	if b.Sequence > 0 {
		s = fmt.Sprintf("sequence %d, position %v, %s", b.Sequence, b.Position, s)
	}
	if b.Time != nil {
		s += ", " + b.Time.Format(time.RFC3339Nano)
	}
	return s
}

func (s *Summary) add(m *Message) {
	b := brief(m)
	if s.Events++; s.First == nil {
		first := b
		s.First, s.bySubject, s.sequences = &first, map[string]*Subject{}, []uint64{}
	}
	s.Last = &b
	if s.sequences != nil && m.Seq > 0 {
		if s.sequences = append(s.sequences, m.Seq); len(s.sequences) > maxSequences {
			s.sequences = nil
		}
	}
	of := s.bySubject[b.Subject]
	switch {
	case of == nil && len(s.bySubject) == maxSubjects:
		s.Further++
		return
	case of == nil:
		of = &Subject{Subject: b.Subject, First: b}
		if m.DocOK {
			of.Document = strings.Clone(m.Doc)
		}
		s.bySubject[b.Subject] = of
	}
	of.Events++
	of.Last = b
}

// close sorts what was added.
func (s *Summary) close() {
	for _, of := range s.bySubject {
		s.Subjects = append(s.Subjects, *of)
	}
	slices.SortFunc(s.Subjects, func(a, b Subject) int { return cmp.Compare(a.Subject, b.Subject) })
}

// shown is how many subjects are printed for people: those with the most events.
const shown = 20

// Lines is the summary for people.
func (s *Summary) Lines() []string {
	lines := []string{fmt.Sprintf("from     %s: %s", s.Source, s.Why), fmt.Sprintf("events   %d", s.Events)}
	if s.First != nil {
		lines = append(lines, "first    "+s.First.String(), "last     "+s.Last.String())
	}
	most := slices.Clone(s.Subjects)
	slices.SortStableFunc(most, func(a, b Subject) int { return cmp.Compare(b.Events, a.Events) })
	rest := s.Further
	for i, of := range most {
		if i < shown {
			lines = append(lines, fmt.Sprintf("%8d %s", of.Events, of.Subject))
		} else {
			rest += of.Events
		}
	}
	if rest > 0 {
		lines = append(lines, fmt.Sprintf("%8d of other subjects", rest))
	}
	return lines
}
