package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// extractor finds document and actor in a message. They are not in the Outflow header: they are in the
// subject, in a mapped header, or in a key that is made of actor and counter. If they are in none of these,
// only the table has them.
type extractor struct {
	template    *outbox.SubjectTemplate
	uses        map[string]config.Use
	headers     []config.Header
	computed    bool   // the key is actor:counter
	deadLetters string // subject of dead letters; "" if there are none
}

func newExtractor(cfg config.Config, r config.Resolved, generatedKey bool) (*extractor, error) {
	t, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	m := r.Mapping
	l := &extractor{template: t, uses: r.Uses, headers: cfg.Headers}
	// a message may bring a key
	l.computed = m.Actor != "" && m.Counter != "" && (m.Key == "" || generatedKey) && !cfg.Source.Messages()
	if cfg.Sink.OnPoison == config.PoisonDeadLetter {
		if l.deadLetters = cfg.Sink.DeadLetterSubject; l.deadLetters == "" {
			l.deadLetters = cfg.Stream + ".dead_letter"
		}
	}
	return l, nil
}

// columns are the template's columns that have the role.
func (l *extractor) columns(role config.Role) (names []string) {
	for _, c := range l.template.Columns() {
		if u, ok := l.uses[c]; ok && u.Role == role {
			names = append(names, c)
		}
	}
	return names
}

// document is the event's document, if the message says it.
func (l *extractor) document(m *Message) (doc string, ok bool) {
	if doc, isDead := deadLetterDoc(m.Header, m.Data); isDead {
		return doc, doc != ""
	}
	columns := l.columns(config.InDoc)
	l.template.Parse(m.Subject, func(column, encoded string) {
		if ok || !slices.Contains(columns, column) {
			return
		}
		var tokens []string
		ok = true
		for token := range strings.SplitSeq(encoded, ".") {
			value, whole := outbox.ParseToken(token)
			ok = ok && whole && !strings.Contains(token, "=~") // of what was cut only a part is known
			tokens = append(tokens, value)
		}
		doc = strings.Join(tokens, ".")
	})
	if ok {
		return doc, true
	}
	for _, h := range l.headers {
		if u, used := l.uses[h.Column]; used && u.Role == config.InDoc {
			if v := m.Header.Get(h.Name); v != "" {
				return v, true
			}
		}
	}
	return "", false
}

// predicate reports whether an event has one of the wanted values; known is false if its message doesn't say.
type predicate func(m *Message) (is, known bool)

// predicate makes a predicate for a role. Its error says why messages don't hold it.
func (l *extractor) predicate(flag string, role config.Role, wanted []string) (predicate, error) {
	if len(wanted) == 0 {
		return nil, nil
	}
	for _, column := range l.columns(role) {
		encoded := map[string]bool{}
		for _, v := range wanted {
			if text, ok := l.template.Encoded(column, v); ok {
				encoded[text] = true
			}
		}
		if len(encoded) > 0 {
			return l.orDeadLetter(role, wanted, func(m *Message) (is, known bool) {
				l.template.Parse(m.Subject, func(c, text string) {
					if c == column {
						is, known = encoded[text], true
					}
				})
				return is, known
			}), nil
		}
	}
	for _, h := range l.headers {
		if u, used := l.uses[h.Column]; used && u.Role == role &&
			!slices.ContainsFunc(wanted, alteredByHeader) {
			return l.orDeadLetter(role, wanted, func(m *Message) (is, known bool) {
				values, there := m.Header[h.Name]
				return there && slices.Contains(wanted, strings.Join(values, "")), true
			}), nil
		}
	}
	if role == config.InActor && l.computed {
		return func(m *Message) (is, known bool) {
			actor, ok := actorOf(m.Outflow.Key)
			return ok && slices.Contains(wanted, actor), ok
		}, nil
	}
	return nil, fmt.Errorf("%s: the stream's messages do not say it: neither the subject %s nor a mapped "+
		"header holds it", flag, quoted(l.template.String()))
}

// alteredByHeader reports whether a value is changed when it is written as a header.
func alteredByHeader(v string) bool {
	return v == "" || strings.TrimSpace(v) != v || strings.ContainsAny(v, "\r\n")
}

// orDeadLetter makes a predicate work for dead letters, which have another subject and no mapped headers:
// their document is in the body, their actor in the key.
func (l *extractor) orDeadLetter(role config.Role, wanted []string, t predicate) predicate {
	return func(m *Message) (is, known bool) {
		if m.Header.Get(sink.HeaderDeadLetter) == "" {
			return t(m)
		}
		if role == config.InDoc {
			doc, _ := deadLetterDoc(m.Header, m.Data)
			return slices.Contains(wanted, doc), true
		}
		actor, ok := actorOf(m.Outflow.Key)
		return ok && slices.Contains(wanted, actor), true
	}
}

// counterDigits is the length of a counter in a key that is made of actor and counter.
const counterDigits = 20

// actorOf takes the counter off a key.
func actorOf(key string) (string, bool) {
	n := len(key) - counterDigits - 1
	if n < 0 || key[n] != ':' || strings.Trim(key[n+1:], "0123456789") != "" {
		return "", false
	}
	return key[:n], true
}

// maxFilters is the most filters that a consumer is given. For more documents than that the whole stream is
// read.
const maxFilters = 50

// filters are subject filters that match every event of the selection, and maybe others. They don't overlap.
// Without any, no subject can match.
func (l *extractor) filters(s *Selection, bounds [][]string) []string {
	known := func(doc *string) string {
		return l.template.Filter(func(column string) (string, bool) {
			u, ok := l.uses[column]
			switch {
			case ok && u.Role == config.InDoc && doc != nil:
				return *doc, true
			case ok && u.Role == config.InActor && len(s.Actors) == 1:
				return s.Actors[0], true
			}
			return "", false
		})
	}
	all := []string{">"}
	switch {
	case len(s.Docs) > 0 && len(s.Docs) <= maxFilters && len(l.columns(config.InDoc)) > 0:
		all = nil
		for i := range s.Docs {
			all = append(all, known(&s.Docs[i]))
		}
		if l.deadLetters != "" {
			all = append(all, l.deadLetters)
		}
	case len(s.Actors) == 1 && len(l.columns(config.InActor)) > 0:
		all = []string{known(nil)}
		if l.deadLetters != "" {
			all = append(all, l.deadLetters)
		}
	}
	if s.Filter != "" {
		bounds = append(slices.Clone(bounds), []string{s.Filter})
	}
	for _, bound := range bounds {
		var next []string
		for _, a := range all {
			for _, b := range bound {
				if c, ok := intersect(a, b); ok {
					next = append(next, c)
				}
			}
		}
		all = next
	}
	slices.Sort(all)
	all = slices.Compact(all)
	for i := range all {
		for j := range i {
			if overlap(all[i], all[j]) {
				return []string{">"} // each message is checked anyway
			}
		}
	}
	return all
}
