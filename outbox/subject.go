package outbox

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The limit and the default of an event's public subject.
const (
	// bytes; together with the ingress and a reply it fits in the control line of a server
	MaxSubject     = 1000
	DefaultSubject = "outbox.{doc_id}"
)

// SubjectTemplate makes the public subject of an event out of its columns, and reads columns back from a
// subject. It is the setting subject: a list of tokens with dots between them.
//
//	orders                      a literal token
//	{doc_id}                    a column's value as one token, encoded by [AppendToken]
//	v1-{doc_id}-x               literals of [A-Za-z0-9_-] may adjoin it
//	{partition(doc_id, 16)}     0 to 15, by the FNV-1a hash of the value
//	{topic:subject}             a column that holds a subject: its dots separate tokens
//
// The first token is literal. A token holds at most one column, and at most one token is a :subject column.
// So a subject tells the values that made it, except that long values are cut and that NULL and empty look
// alike.
//
// A SubjectTemplate never changes, so several goroutines may use it.
type SubjectTemplate struct {
	text    string
	columns []string // each once, in the order of their first token
	tokens  []subjectToken
}

// subjectToken is a token of the template.
type subjectToken struct {
	prefix, suffix string // literals around the column; prefix alone is a literal token
	column         string // "" for a literal token
	at             int    // the column's index in SubjectTemplate.columns
	subject        bool   // {column:subject}
	partitions     uint32 // {partition(column, N)}: N, else 0
}

// ParseSubjectTemplate reads a template. Its error is a [Fault] of class [Usage].
func ParseSubjectTemplate(text string) (*SubjectTemplate, error) {
	t := &SubjectTemplate{text: text}
	subjects := 0
	for i, token := range splitTokens(text) {
		p, err := parseSubjectToken(token)
		if err == nil && i == 0 {
			err = checkFirst(p)
		}
		if p.subject {
			if subjects++; subjects > 1 {
				err = fmt.Errorf("a second :subject column")
			}
		}
		if err != nil {
			return nil, &Fault{
				Class: Usage, Code: "subject", Message: fmt.Sprintf("subject %q: %v", text, err),
				Hint: "Write tokens with dots between them, such as orders.{doc_id}; " +
					"the first one literal, " +
					"one column in a token at most.",
			}
		}
		if p.column != "" {
			if p.at = slices.Index(t.columns, p.column); p.at < 0 {
				p.at = len(t.columns)
				t.columns = append(t.columns, p.column)
			}
		}
		t.tokens = append(t.tokens, p)
	}
	return t, nil
}

// splitTokens splits at the dots outside braces.
func splitTokens(s string) []string {
	var tokens []string
	depth, start := 0, 0
	for i := range len(s) {
		switch {
		case s[i] == '{':
			depth++
		case s[i] == '}':
			depth--
		case s[i] == '.' && depth <= 0:
			tokens = append(tokens, s[start:i])
			start = i + 1
		}
	}
	return append(tokens, s[start:])
}

func parseSubjectToken(token string) (subjectToken, error) {
	open := strings.IndexByte(token, '{')
	if open < 0 {
		return subjectToken{prefix: token}, checkLiteral(token)
	}
	end := strings.IndexByte(token, '}')
	if end < open {
		return subjectToken{}, fmt.Errorf("token %q: braces that don't match", token)
	}
	p := subjectToken{prefix: token[:open], suffix: token[end+1:]}
	if !plain(p.prefix) || !plain(p.suffix) {
		return subjectToken{}, fmt.Errorf("token %q: beside its one column only [A-Za-z0-9_-] may stand",
			token)
	}
	if err := p.parseColumn(token[open+1 : end]); err != nil {
		return subjectToken{}, fmt.Errorf("token %q: %w", token, err)
	}
	if p.subject && p.prefix+p.suffix != "" {
		return subjectToken{}, fmt.Errorf("token %q: :subject makes whole tokens, nothing may adjoin it",
			token)
	}
	return p, nil
}

// parseColumn reads what is between the braces.
func (p *subjectToken) parseColumn(s string) error {
	p.column = s
	if args, ok := strings.CutPrefix(s, "partition("); ok {
		args, ok = strings.CutSuffix(args, ")")
		comma := strings.LastIndexByte(args, ',')
		if !ok || comma < 0 {
			return fmt.Errorf("want partition(column, N)")
		}
		n, err := strconv.ParseUint(strings.TrimSpace(args[comma+1:]), 10, 31)
		if err != nil || n == 0 {
			return fmt.Errorf("partition: want a number from 1 to 2147483647")
		}
		p.column, p.partitions = strings.TrimSpace(args[:comma]), uint32(n)
	} else if column, ok := strings.CutSuffix(s, ":subject"); ok {
		p.column, p.subject = column, true
	}
	if p.column == "" || strings.TrimSpace(p.column) != p.column || strings.ContainsAny(p.column, "{}") {
		return fmt.Errorf("want a column between the braces")
	}
	return nil
}

// plain reports whether s consists of characters that stand for themselves in an encoded value.
func plain(s string) bool {
	for i := range len(s) {
		if !passSubject[s[i]] {
			return false
		}
	}
	return true
}

// checkLiteral allows printable ASCII in a literal token, except for what has a meaning in subjects or in
// templates.
func checkLiteral(token string) error {
	if token == "" {
		return fmt.Errorf("an empty token")
	}
	for i := range len(token) {
		if c := token[i]; c <= ' ' || c >= 0x7F || c == '*' || c == '>' || c == '{' || c == '}' {
			return fmt.Errorf("token %q: %q may not be in it", token, c)
		}
	}
	return nil
}

// checkFirst keeps events out of the subjects that servers, clients and Outflow itself use.
func checkFirst(p subjectToken) error {
	switch {
	case p.column != "":
		return fmt.Errorf("the first token has a column")
	case p.prefix == "_outflow" || p.prefix == "_INBOX" || p.prefix[0] == '$':
		return fmt.Errorf("the first token may not be _outflow or _INBOX, nor begin with $")
	}
	return nil
}

// String returns the template as it was written.
func (t *SubjectTemplate) String() string { return t.text }

// Columns returns the columns that the template uses, each once, in the order in which they first appear.
func (t *SubjectTemplate) Columns() []string { return slices.Clone(t.columns) }

// Append appends the public subject of an event that has these values, one for each of
// [SubjectTemplate.Columns]; NULL counts as empty. The subject can turn out longer than [MaxSubject]: the
// caller has to check that.
func (t *SubjectTemplate) Append(b []byte, values []string) []byte {
	for i := range t.tokens {
		p := &t.tokens[i]
		if i > 0 {
			b = append(b, '.')
		}
		if p.column == "" {
			b = append(b, p.prefix...)
		} else {
			b = p.append(b, values[p.at])
		}
	}
	return b
}

// append appends the token or, for a :subject column, the tokens that hold the value.
func (p *subjectToken) append(b []byte, value string) []byte {
	b = append(b, p.prefix...)
	switch {
	case p.partitions > 0:
		b = strconv.AppendUint(b, uint64(partition(value, p.partitions)), 10)
	case p.subject:
		b = appendTokens(b, value)
	default:
		b = AppendToken(b, value)
	}
	return append(b, p.suffix...)
}

// appendTokens encodes each token of a subject by itself. It stops once the result is longer than a subject
// may be.
func appendTokens(b []byte, value string) []byte {
	for start := len(b); len(b)-start <= MaxSubject; b = append(b, '.') {
		token, rest, more := strings.Cut(value, ".")
		b = AppendToken(b, token)
		if !more {
			break
		}
		value = rest
	}
	return b
}

// partition is the hash of NATS's own partition() mapping: FNV-1a, 32 bits, modulo n.
func partition(v string, n uint32) uint32 {
	h := uint32(2166136261)
	for i := range len(v) {
		h = (h ^ uint32(v[i])) * 16777619
	}
	return h % n
}

// Filter returns a subject with wildcards that matches every subject that the template makes of an event
// whose columns have the known values. It may match more: a wildcard stands for a whole token, and the filter
// ends at a :subject column whose value is not known.
func (t *SubjectTemplate) Filter(known func(column string) (value string, ok bool)) string {
	var b []byte
	for i := range t.tokens {
		p := &t.tokens[i]
		if i > 0 {
			b = append(b, '.')
		}
		if p.column == "" {
			b = append(b, p.prefix...)
			continue
		}
		switch v, ok := known(p.column); {
		case ok:
			b = p.append(b, v)
		case p.subject:
			return string(append(b, '>'))
		default:
			b = append(b, '*')
		}
	}
	return string(b)
}

// Produces reports whether the subject could be that of some event. Where it can't tell it says yes: it
// doesn't check that what stands for a value is the encoding of one.
func (t *SubjectTemplate) Produces(subject string) bool {
	_, ok := t.split(subject)
	return ok
}

// Parse takes a subject of the template apart: it calls f with each column and its encoded value, which for a
// :subject column is one or more tokens. A partition tells no value. It reports whether the template could
// have made the subject, and calls f only if so.
func (t *SubjectTemplate) Parse(subject string, f func(column, encoded string)) bool {
	texts, ok := t.split(subject)
	if !ok {
		return false
	}
	for i, text := range texts {
		if p := &t.tokens[i]; p.column != "" && p.partitions == 0 {
			f(p.column, text)
		}
	}
	return true
}

// split returns what the subject has for each token of the template, without prefix and suffix.
func (t *SubjectTemplate) split(subject string) (texts []string, ok bool) {
	tokens := strings.Split(subject, ".")
	texts = tokens[:0] // never longer than what has been read of tokens
	spare := len(tokens) - len(t.tokens)
	for i := range t.tokens {
		p := &t.tokens[i]
		if p.subject { // it has the tokens that no other token of the template takes
			if spare < 0 {
				return nil, false
			}
			texts, tokens = append(texts, strings.Join(tokens[:1+spare], ".")), tokens[1+spare:]
			continue
		}
		if len(tokens) == 0 {
			return nil, false
		}
		text, ok := p.value(tokens[0])
		if !ok {
			return nil, false
		}
		texts, tokens = append(texts, text), tokens[1:]
	}
	return texts, len(tokens) == 0
}

// value cuts prefix and suffix off a token; ok is false if the template can't have made it.
func (p *subjectToken) value(token string) (text string, ok bool) {
	if p.column == "" {
		return token, token == p.prefix
	}
	if len(token) <= len(p.prefix)+len(p.suffix) ||
		!strings.HasPrefix(token, p.prefix) || !strings.HasSuffix(token, p.suffix) {
		return "", false
	}
	text = token[len(p.prefix) : len(token)-len(p.suffix)]
	if p.partitions == 0 {
		return text, true
	}
	n, err := strconv.ParseUint(text, 10, 32)
	return text, err == nil && uint32(n) < p.partitions
}

// HasToken reports whether a token of the template holds the whole value of the column, as {doc_id} and
// v1-{doc_id} do, and {doc_id:subject} and {partition(doc_id, 16)} don't. Then [SubjectTemplate.Value] finds
// it.
func (t *SubjectTemplate) HasToken(column string) bool { return t.tokenOf(column) >= 0 }

func (t *SubjectTemplate) tokenOf(column string) int {
	return slices.IndexFunc(t.tokens, func(p subjectToken) bool {
		return p.column == column && p.partitions == 0 && !p.subject
	})
}

// Value returns the value of a column that a token of the template holds, as [ParseToken] decodes it. ok is
// false if the template made no such subject of any event (unlike [SubjectTemplate.Produces] it doesn't leave
// that in doubt), and if it has no such token.
func (t *SubjectTemplate) Value(subject, column string) (value string, ok bool) {
	at := t.tokenOf(column)
	texts, ok := t.split(subject)
	if !ok || at < 0 {
		return "", false
	}
	for i, text := range texts {
		if p := &t.tokens[i]; p.column == "" || p.partitions > 0 {
			continue
		}
		for token := range strings.SplitSeq(text, ".") {
			v, ok := ParseToken(token)
			if !ok {
				return "", false
			}
			if i == at {
				value = v
			}
		}
	}
	return value, true
}

// Encoded returns a column's value as it stands in the template's subjects; ok is false if they don't hold
// it.
func (t *SubjectTemplate) Encoded(column, value string) (encoded string, ok bool) {
	for i := range t.tokens {
		switch p := &t.tokens[i]; {
		case p.column != column || p.partitions > 0:
		case p.subject:
			return string(appendTokens(nil, value)), true
		default:
			return string(AppendToken(nil, value)), true
		}
	}
	return "", false
}
