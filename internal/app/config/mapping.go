package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Resolved is the mapping of settings to the columns that a table has.
type Resolved struct {
	Mapping relay.Mapping
	ID      string   // column; "" if there is none
	Extra   []string // the columns that only subject and headers use, without repetition
	// Uses says of each name that the template or a mapped header uses where its value is in an event.
	Uses map[string]Use
}

// Use is where an event has a value: in the field of a role, or in Extra.
type Use struct {
	Role  Role
	Extra int // index into Event.Extra, if Role is InExtra
}

// Role is a field of an event.
type Role uint8

// The roles. Counter and span have no field of text: where subject or headers use them, they are further
// columns.
const (
	InExtra Role = iota
	InDoc
	InActor
	InKey
	InID
)

// ResolveMapping applies the settings to a table's columns. A column that was named and doesn't exist is a
// Fault of class Fatal; one with only its default name is then absent, except document and payload. template
// lists the columns that the subject's template uses. A name there or among the headers is a column of the
// table, otherwise the column of the role with that name (doc_id, actor_id, counter, span, seq_key, id). It
// must not be the payload.
//
// If there are only messages, table is not used: the name of a role's column stands for the member of that
// role in the message, and every other name for a header.
func ResolveMapping(c Config, table, template []string) (Resolved, error) {
	r := resolver{c: c, table: table}
	r.Uses = map[string]Use{}
	if c.Source == relay.FromMessage {
		r.withoutTable()
		c = r.c
	}
	r.Mapping = relay.Mapping{
		Source:  c.Source,
		Table:   c.Table,
		Shard:   c.Shard,
		Doc:     r.role("columns.doc_id", c.Columns.Doc, true),
		Actor:   r.role("columns.actor_id", c.Columns.Actor, false),
		Counter: r.role("columns.counter", c.Columns.Counter, false),
		Span:    r.role("columns.span", c.Columns.Span, false),
		Key:     r.role("columns.seq_key", c.Columns.Key, false),
		Payload: r.role("columns.payload", c.Columns.Payload, true),
	}
	r.ID = r.role("columns.id", c.Columns.ID, false)
	for _, name := range template {
		r.use("subject", name)
	}
	for _, h := range c.Headers {
		r.use("headers."+h.Name, h.Column)
	}
	if len(r.missing) > 0 {
		return Resolved{}, &outbox.Fault{
			Class: outbox.Fatal, Code: "column_missing",
			Message: fmt.Sprintf("table %s lacks %s; it has %s", c.Table, strings.Join(r.missing, ", "),
				strings.Join(table, ", ")),
			Hint: r.hint,
		}
	}
	if c.Reorder.Mode == ModeGap && r.Mapping.Counter == "" {
		return Resolved{}, &outbox.Fault{
			Class: outbox.Fatal, Code: "counter_missing",
			Message: fmt.Sprintf("reorder.mode is gap, and table %s lacks column %q (columns.counter); it "+
				"has %s",
				c.Table, c.Columns.Counter.Name, strings.Join(table, ", ")),
			Hint: "Set columns.counter to the column that counts the events of an actor, or reorder.mode " +
				"to horizon.",
		}
	}
	if r.payload != "" {
		return Resolved{}, &outbox.Fault{
			Class: outbox.Usage, Code: "payload_column",
			Message: fmt.Sprintf("%s uses the column of the payload, %q", r.payload, r.Mapping.Payload),
			Hint:    "Use another column: the payload is the message's data.",
		}
	}
	if len(r.Extra) > relay.MaxExtra {
		return Resolved{}, &outbox.Fault{
			Class: outbox.Usage, Code: "too_many_columns",
			Message: fmt.Sprintf("subject and headers use %d columns beside those with a role", len(r.Extra)),
			Hint:    fmt.Sprintf("Use at most %d.", relay.MaxExtra),
		}
	}
	return r.Resolved, nil
}

type resolver struct {
	Resolved
	c       Config
	table   []string
	missing []string // for the message
	paths   []string // the settings at fault
	hint    string   // the hint for the first of missing
	payload string   // the setting that uses the payload, if one does

	alias map[string]string // without a table: what a role's column is called in the settings
}

// withoutTable calls each column by the name of its role. A setting that says that there is no such column
// stays in force.
func (r *resolver) withoutTable() {
	r.c.Table, r.alias = "", map[string]string{}
	for _, role := range []struct {
		name   string
		column *Column
	}{
		{"doc_id", &r.c.Columns.Doc}, {"actor_id", &r.c.Columns.Actor}, {"counter", &r.c.Columns.Counter},
		{"span", &r.c.Columns.Span},
		{"seq_key", &r.c.Columns.Key}, {"id", &r.c.Columns.ID}, {"payload", &r.c.Columns.Payload},
	} {
		if role.column.Name != "" {
			r.alias[role.column.Name] = role.name
			r.table = append(r.table, role.name)
			role.column.Name = role.name
		}
	}
}

func (r *resolver) lack(column, path, hint string) {
	r.missing = append(r.missing, fmt.Sprintf("column %q (%s)", column, path))
	r.paths = append(r.paths, path)
	if r.hint == "" {
		r.hint = hint
	}
}

// role returns the column of a role, "" if it is absent.
func (r *resolver) role(path string, col Column, required bool) string {
	switch {
	case col.Name == "" || slices.Contains(r.table, col.Name):
		return col.Name
	case required:
		r.lack(col.Name, path, "Set "+path+" to one of them.")
	case col.Explicit:
		r.lack(col.Name, path, "Set "+path+` to one of them, or to "" if there is none.`)
	}
	return ""
}

// use finds where an event has the value that subject or a header calls by name.
func (r *resolver) use(path, name string) {
	if _, known := r.Uses[name]; known {
		return
	}
	m := r.Mapping
	roles := []struct {
		name, column string
		role         Role
	}{
		{"doc_id", m.Doc, InDoc}, {"actor_id", m.Actor, InActor}, {"seq_key", m.Key, InKey},
		{"id", r.ID, InID},
		{"payload", m.Payload, InExtra}, {"counter", m.Counter, InExtra}, {"span", m.Span, InExtra},
	}
	column := name
	if role, ok := r.alias[name]; ok {
		column = role
	}
	if !slices.Contains(r.table, column) {
		column = ""
		for _, role := range roles {
			if role.name == name {
				column = role.column
			}
		}
		if column == "" && name == "seq_key" && m.Keyed() {
			r.Uses[name] = Use{Role: InKey} // computed
			return
		}
	}
	if column == "" && r.alias != nil {
		column = name // of headers
	}
	if column == "" && slices.Contains(r.paths, "columns."+name) {
		return // one message is enough
	}
	if column == "" {
		r.lack(name, path, "Use columns of the table, or roles that have one, in "+path+".")
		return
	}
	if column == m.Payload {
		r.payload = path
		return
	}
	for _, role := range roles {
		if role.column == column && role.role != InExtra {
			r.Uses[name] = Use{Role: role.role}
			return
		}
	}
	i := slices.Index(r.Extra, column)
	if i < 0 {
		i = len(r.Extra)
		r.Extra = append(r.Extra, column)
	}
	r.Uses[name] = Use{Extra: i}
}
