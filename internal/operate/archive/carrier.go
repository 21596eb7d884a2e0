package archive

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// carrier takes the columns of a row from its message.
type carrier struct {
	columns  []string // in the order of the values
	layout   *wiring.Layout
	template *outbox.SubjectTemplate
	headers  []config.Header
	computed bool // actor and counter are in the key
	nullable map[string]bool
	binary   bool // the payload is bytea
	bytes    map[string]bool
}

// errCut: of some value the message has only the beginning.
var errCut = errors.New("a value was cut")

func newCarrier(cfg config.Config, l *wiring.Layout) (*carrier, error) {
	t, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	m := l.Mapping
	key, _ := l.Table.Column(m.Key)
	c := &carrier{layout: l, template: t, headers: cfg.Headers, nullable: map[string]bool{},
		bytes:    map[string]bool{m.Key: key.TypeOID == byteaOID}, // it may be generated
		computed: m.Actor != "" && m.Counter != "" && (m.Key == "" || key.Generated)}
	add := func(name string) {
		if column, ok := l.Table.Column(name); ok && !column.Generated && !slices.Contains(c.columns, name) {
			c.columns = append(c.columns, name)
			c.nullable[name], c.bytes[name] = !column.NotNull, column.TypeOID == byteaOID
		}
	}
	add(l.ID)
	add(m.Payload)
	add(m.Key)
	if c.computed {
		add(m.Actor)
		add(m.Counter)
	}
	for _, name := range t.Columns() {
		if _, carried := t.Encoded(name, ""); carried {
			add(c.column(name))
		}
	}
	for _, h := range cfg.Headers {
		add(c.column(h.Column))
	}
	payload, _ := l.Table.Column(m.Payload)
	c.binary = payload.TypeOID == byteaOID
	return c, nil
}

// column is the table's column that a name in the template or in the mapped headers stands for.
func (c *carrier) column(name string) string {
	u, ok := c.layout.Uses[name]
	m := c.layout.Mapping
	switch {
	case !ok:
		return ""
	case u.Role == config.InDoc:
		return m.Doc
	case u.Role == config.InActor:
		return m.Actor
	case u.Role == config.InKey:
		return m.Key
	case u.Role == config.InID:
		return c.layout.ID
	}
	return c.layout.Extra[u.Extra]
}

// counterDigits is the length of a counter in a key that is made of actor and counter.
const counterDigits = 20

// row is the row of a message: a value for each column, and the key as the message has it. What the subject
// says counts before a mapped header, in which line breaks are spaces.
func (c *carrier) row(m *archive.Message) (values []any, key string, err error) {
	packed := m.Header.Get(outbox.HeaderName)
	h, err := outbox.ParseHeader(packed)
	if err != nil {
		return nil, "", &outbox.Fault{Class: outbox.Fatal, Code: "foreign_message", Err: err,
			Message: fmt.Sprintf("the archived message %d is not outflow's", m.Seq)}
	}
	if strings.Contains(fieldOf(packed, "id"), "=~") || strings.Contains(fieldOf(packed, "key"), "=~") {
		return nil, "", errCut
	}
	l, found := c.layout, map[string]any{}
	set := func(column string, v any) {
		if _, ok := found[column]; !ok {
			found[column] = v
		}
	}
	set(l.ID, h.ID)
	set(l.Mapping.Key, h.Key)
	if n := len(h.Key) - counterDigits - 1; c.computed && n >= 0 && h.Key[n] == ':' &&
		strings.Trim(h.Key[n+1:], "0123456789") == "" {
		set(l.Mapping.Actor, h.Key[:n])
		set(l.Mapping.Counter, strings.TrimLeft(h.Key[n+1:len(h.Key)-1], "0")+h.Key[len(h.Key)-1:])
	} else if c.computed {
		return nil, "", &outbox.Fault{Class: outbox.Fatal, Code: "rows_columns",
			Message: fmt.Sprintf("the key of message %d, %q, is not made of actor and counter", m.Seq, h.Key)}
	}
	cut := false
	ours := c.template.Parse(m.Subject, func(name, encoded string) {
		var tokens []string
		for token := range strings.SplitSeq(encoded, ".") {
			v, whole := outbox.ParseToken(token)
			cut = cut || !whole || strings.Contains(token, "=~")
			tokens = append(tokens, v)
		}
		column := c.column(name)
		if v := strings.Join(tokens, "."); v != "" || !c.nullable[column] {
			set(column, v)
		}
	})
	if !ours {
		return nil, "", &outbox.Fault{Class: outbox.Fatal, Code: "rows_columns",
			Message: fmt.Sprintf("the template %s makes no subject %q, that of message %d: the setting "+
				"subject was another one", c.template, m.Subject, m.Seq),
			Hint: fmt.Sprintf("Give the one of then to this command (OUTFLOW_SUBJECT), and --from %d. Where "+
				"it was changed later, that ends there in the same way", m.Seq)}
	}
	if cut {
		return nil, "", errCut
	}
	for _, mapped := range c.headers {
		if v, ok := m.Header[mapped.Name]; ok {
			set(c.column(mapped.Column), strings.Join(v, ""))
		}
	}
	if c.binary {
		set(l.Mapping.Payload, m.Data)
	} else {
		set(l.Mapping.Payload, string(m.Data))
	}
	for _, name := range c.columns {
		values = append(values, found[name])
	}
	return values, h.Key, nil
}

// stored are the values as a statement gets them, and the key behind them, if the table has a column for it.
// A bytea column gets bytes: in text PostgreSQL would read a backslash as an escape.
func (c *carrier) stored(values []any, key string) []any {
	names := c.columns
	if column, ok := c.layout.Table.Column(c.layout.Mapping.Key); ok {
		names, values = append(slices.Clip(names), column.Name), append(values, key)
	}
	for i, name := range names {
		if text, ok := values[i].(string); ok && c.bytes[name] {
			values[i] = []byte(text)
		}
	}
	return values
}

// fieldOf is a field of the packed header as it stands there.
func fieldOf(packed, name string) string {
	_, text, _ := strings.Cut(packed, " "+name+"=")
	text, _, _ = strings.Cut(text, " ")
	return text
}
