package consumer

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// subject says where in a public subject the document is. It is made from the template that outflow makes subjects by.
type subject struct {
	text     string
	parts    []part
	document int // which part holds it
	deep     int // which part is {column:subject}, which may be several tokens; -1: none
}

// part is a token of the template, prefix{column}suffix.
type part struct {
	prefix, suffix string
	column         string // empty: prefix is the whole token
	partitions     uint64 // {partition(column, N)}: N
}

// parseSubject reads a template. It takes those that outflow takes and that have {doc_id}.
func parseSubject(text string) (*subject, error) {
	s := &subject{text: text, document: -1, deep: -1}
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("Config.Subject %q: %s. Give the subject of outflow's configuration with {doc_id} for the column that holds the "+
			"document, or Config.Document if the document is not in the subject", text, fmt.Sprintf(format, args...))
	}
	for i, token := range splitTokens(text) {
		p, deep, err := parsePart(token)
		if err != nil {
			return nil, wrong("%v", err)
		}
		if deep {
			if s.deep >= 0 {
				return nil, wrong("two columns with :subject")
			}
			s.deep = i
		}
		if p.column == "doc_id" && p.partitions == 0 && s.document < 0 && !deep {
			s.document = i
		}
		s.parts = append(s.parts, p)
	}
	if s.document < 0 {
		return nil, wrong("{doc_id} is no token of it")
	}
	return s, nil
}

// splitTokens splits at the dots outside braces.
func splitTokens(s string) (tokens []string) {
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

func parsePart(token string) (p part, deep bool, err error) {
	open := strings.IndexByte(token, '{')
	if open < 0 {
		if token == "" || strings.ContainsAny(token, "} *>\t") {
			return p, false, fmt.Errorf("token %q", token)
		}
		return part{prefix: token}, false, nil
	}
	end := strings.IndexByte(token, '}')
	if end < open {
		return p, false, fmt.Errorf("token %q: braces that don't match", token)
	}
	p = part{prefix: token[:open], suffix: token[end+1:], column: token[open+1 : end]}
	if strings.ContainsAny(p.prefix+p.suffix, "{} *>") {
		return p, false, fmt.Errorf("token %q: one column in a token at most", token)
	}
	if args, ok := strings.CutPrefix(p.column, "partition("); ok {
		args, ok = strings.CutSuffix(args, ")")
		comma := strings.LastIndexByte(args, ',')
		if !ok || comma < 0 {
			return p, false, fmt.Errorf("token %q: want {partition(column, N)}", token)
		}
		p.column = strings.TrimSpace(args[:comma])
		if p.partitions, err = strconv.ParseUint(strings.TrimSpace(args[comma+1:]), 10, 31); err != nil || p.partitions == 0 {
			return p, false, fmt.Errorf("token %q: want a number of partitions from 1", token)
		}
	} else {
		p.column, deep = strings.CutSuffix(p.column, ":subject")
	}
	if p.column == "" || deep && p.prefix+p.suffix != "" {
		return p, false, fmt.Errorf("token %q: want a column between the braces", token)
	}
	return p, deep, nil
}

// find returns the document of a public subject. ok is false where the template makes no such subject.
func (s *subject) find(public string) (document string, ok bool) {
	tokens := strings.Split(public, ".")
	spare := len(tokens) - len(s.parts) // what a :subject column takes beyond its first token
	if spare < 0 || spare > 0 && s.deep < 0 {
		return "", false
	}
	for i := range s.parts {
		if i == s.deep {
			for _, token := range tokens[:1+spare] {
				if _, ok := outbox.ParseToken(token); !ok {
					return "", false
				}
			}
			tokens = tokens[1+spare:]
			continue
		}
		value, ok := s.parts[i].match(tokens[0])
		if !ok {
			return "", false
		}
		if i == s.document {
			document = value
		}
		tokens = tokens[1:]
	}
	return document, true
}

// match reads one token.
func (p *part) match(token string) (value string, ok bool) {
	if p.column == "" {
		return "", token == p.prefix
	}
	if len(token) <= len(p.prefix)+len(p.suffix) || !strings.HasPrefix(token, p.prefix) || !strings.HasSuffix(token, p.suffix) {
		return "", false
	}
	token = token[len(p.prefix) : len(token)-len(p.suffix)]
	if p.partitions > 0 {
		n, err := strconv.ParseUint(token, 10, 31)
		return token, err == nil && n < p.partitions
	}
	return outbox.ParseToken(token)
}
