package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// YAML returns the effective settings in the form of the file, each with its origin as a comment, secrets
// hidden.
func (c Config) YAML() []byte {
	var b bytes.Buffer
	var open []string // the sections that the last line was in
	for i := range settings {
		s := &settings[i]
		parts := strings.Split(s.path, ".")
		depth := len(parts) - 1
		same := 0
		for same < min(len(open), depth) && open[same] == parts[same] {
			same++
		}
		for ; same < depth; same++ {
			fmt.Fprintf(&b, "%s%s:\n", indent(same), parts[same])
		}
		open = parts[:depth]
		c.line(&b, s, indent(depth)+parts[depth]+":")
	}
	return b.Bytes()
}

func (c Config) line(b *bytes.Buffer, s *setting, key string) {
	v := s.bind(&c)
	comment := "  # " + c.from[s.path].String()
	if col, ok := v.(columnValue); ok && !col.required && !col.p.Explicit && col.p.Name != "" {
		comment += ", if the table has it"
	}
	comment += "\n"
	if _, ok := v.(headersValue); ok && len(c.Headers) > 0 {
		b.WriteString(key + comment)
		for _, h := range c.Headers {
			fmt.Fprintf(b, "  %s: %s\n", quote(h.Name), quote(h.Column))
		}
		return
	}
	text := s.secret.show(v.text())
	switch v.(type) {
	case headersValue:
		text = "{}"
	case boolValue, intValue, durationValue, sizeValue[int], sizeValue[int64]:
	default:
		text = quote(text)
	}
	b.WriteString(key + " " + text + comment)
}

func indent(depth int) string { return strings.Repeat("  ", depth) }

// plain matches what every YAML parser takes for a string without quotes; words that some take for something
// else are not.
var (
	plain   = lazyregexp.New(`^[A-Za-z_/][A-Za-z0-9_./-]*$`)
	special = lazyregexp.New(`^(?i:true|false|yes|no|on|off|null|y|n)$`)
)

func quote(s string) string {
	if plain().MatchString(s) && !special().MatchString(s) {
		return s
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		panic(err) // a string always can be encoded
	}
	return strings.TrimSuffix(b.String(), "\n")
}
