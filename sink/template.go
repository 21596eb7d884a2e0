package sink

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Template makes an event's public subject. It is a list of tokens with dots between them:
//
//	orders                      a literal token
//	{doc_id}                    a column's value as one token
//	v1-{doc_id}-x               literals of [A-Za-z0-9_-] may adjoin it
//	{partition(doc_id, 16)}     0 to 15, by the FNV-1a hash of the value
//	{topic:subject}             a column that holds a subject: its dots separate tokens
//
// The first token is literal. A token holds one column at most, and one :subject column is allowed, which stands alone in its
// place: so a subject tells the values that made it (up to the cut of long ones, and except that of :subject NULL and empty are
// alike).
type Template struct {
	text  string
	parts []part
}

// part is a token of the template.
type part struct {
	prefix, suffix string // literals around the column; prefix alone is a literal token
	column         string // "" for a literal token
	field          Field  // set by bind
	subject        bool   // {column:subject}
	partitions     uint32 // {partition(column, N)}: N, else 0
}

// ParseTemplate reads a template. Its error is a fault of class Usage.
func ParseTemplate(text string) (*Template, error) {
	t := &Template{text: text}
	subjects := 0
	for i, token := range splitTokens(text) {
		p, err := parsePart(token)
		if err == nil && i == 0 {
			err = checkFirst(p)
		}
		if p.subject {
			if subjects++; subjects > 1 {
				err = fmt.Errorf("a second :subject column")
			}
		}
		if err != nil {
			return nil, usage("subject", fmt.Sprintf("subject %q: %v", text, err),
				"Write tokens with dots between them, such as orders.{doc_id}; the first one literal, one column in a token at most.")
		}
		t.parts = append(t.parts, p)
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

func parsePart(token string) (part, error) {
	open := strings.IndexByte(token, '{')
	if open < 0 {
		return part{prefix: token}, checkLiteral(token)
	}
	end := strings.IndexByte(token, '}')
	if end < open {
		return part{}, fmt.Errorf("token %q: braces that don't match", token)
	}
	p := part{prefix: token[:open], suffix: token[end+1:]}
	if !plain(p.prefix) || !plain(p.suffix) {
		return part{}, fmt.Errorf("token %q: beside its one column only [A-Za-z0-9_-] may stand", token)
	}
	if err := p.parseColumn(token[open+1 : end]); err != nil {
		return part{}, fmt.Errorf("token %q: %w", token, err)
	}
	if p.subject && p.prefix+p.suffix != "" {
		return part{}, fmt.Errorf("token %q: :subject makes whole tokens, nothing may adjoin it", token)
	}
	return p, nil
}

// parseColumn reads what is between the braces.
func (p *part) parseColumn(s string) error {
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

// plain reports whether s consists of characters that encoded values pass unchanged.
func plain(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// checkLiteral holds a literal token to printable ASCII without what has a meaning in subjects or in templates.
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

// checkFirst keeps messages out of the names that servers, clients and we ourselves use.
func checkFirst(p part) error {
	switch {
	case p.column != "":
		return fmt.Errorf("the first token has a column")
	case p.prefix == "_outflow" || p.prefix == "_INBOX" || p.prefix[0] == '$':
		return fmt.Errorf("the first token may not be _outflow or _INBOX, nor begin with $")
	}
	return nil
}

// String is the template as it was written.
func (t *Template) String() string { return t.text }

// Columns lists the columns that the template uses, each once, in their order.
func (t *Template) Columns() []string {
	var columns []string
	seen := map[string]bool{}
	for _, p := range t.parts {
		if p.column != "" && !seen[p.column] {
			seen[p.column] = true
			columns = append(columns, p.column)
		}
	}
	return columns
}

// bind resolves the columns.
func (t *Template) bind(resolve func(string) (Field, bool)) error {
	for i := range t.parts {
		p := &t.parts[i]
		if p.column == "" {
			continue
		}
		f, ok := resolve(p.column)
		if !ok {
			return usage("subject_column", fmt.Sprintf("subject %q: the table has no column %q", t.text, p.column),
				"Name a column of the table, or one of the roles doc_id, actor_id, seq_key, id.")
		}
		p.field = f
	}
	return nil
}

// append appends the event's public subject. It may be longer than a subject is allowed to be.
func (t *Template) append(b []byte, e *relay.Event) []byte {
	for i := range t.parts {
		p := &t.parts[i]
		if i > 0 {
			b = append(b, '.')
		}
		b = append(b, p.prefix...)
		if p.column == "" {
			continue
		}
		v, _ := p.field.value(e)
		switch {
		case p.partitions > 0:
			b = strconv.AppendUint(b, uint64(partition(v, p.partitions)), 10)
		case p.subject:
			b = appendSubject(b, v)
		default:
			b = outbox.AppendToken(b, v)
		}
		b = append(b, p.suffix...)
	}
	return b
}

// appendSubject encodes each token of a subject by itself. It stops once the result is longer than a subject may be.
func appendSubject(b []byte, v string) []byte {
	for start := len(b); len(b)-start <= maxSubject; b = append(b, '.') {
		token, rest, more := strings.Cut(v, ".")
		b = outbox.AppendToken(b, token)
		if !more {
			break
		}
		v = rest
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

// Produces reports whether some event's subject could be the given one. Where it is in doubt it says yes.
func (t *Template) Produces(subject string) bool {
	tokens := strings.Split(subject, ".")
	spare := len(tokens) - len(t.parts) // what a :subject column takes beyond its first token
	for _, p := range t.parts {
		if len(tokens) == 0 {
			return false
		}
		if p.subject {
			if spare < 0 {
				return false
			}
			tokens, spare = tokens[1+spare:], 0
			continue
		}
		if !p.produces(tokens[0]) {
			return false
		}
		tokens = tokens[1:]
	}
	return len(tokens) == 0
}

func (p *part) produces(token string) bool {
	if p.column == "" {
		return token == p.prefix
	}
	if len(token) <= len(p.prefix)+len(p.suffix) || !strings.HasPrefix(token, p.prefix) || !strings.HasSuffix(token, p.suffix) {
		return false
	}
	if p.partitions == 0 {
		return true
	}
	n, err := strconv.ParseUint(token[len(p.prefix):len(token)-len(p.suffix)], 10, 32)
	return err == nil && uint32(n) < p.partitions
}
