package sqlapi

import (
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/producer"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Name is the function's name, with its schema.
const (
	Schema   = "outflow"
	Function = "enqueue"
	Name     = Schema + "." + Function
)

// API is what `outflow init --sql-api` makes.
type API struct {
	CounterTable string   // quoted; "" if the table has no column for a counter
	Counters     []string // the statements that make it, and fill it from the rows that there are
	Function     []string // the statements that make the schema and the functions
	Needs        []string // columns that each call has to name in its argument columns
}

// Statements are all of them in their order.
func (a *API) Statements() []string { return append(append([]string{}, a.Counters...), a.Function...) }

// New makes the SQL for a configuration and the table that it maps.
func New(cfg config.Config, l *wiring.Layout) (*API, error) {
	counters, err := countersOf(cfg.Table)
	if err != nil {
		return nil, err
	}
	w := &writer{cfg: cfg, l: l, api: &API{CounterTable: counters.CounterTable()}}
	if !cfg.Source.Rows() {
		w.payload = "jsonb"
		w.api.Counters = []string{counters.Schema()}
		w.message()
		return w.api, nil
	}
	if err := w.readTable(); err != nil {
		return nil, err
	}
	if w.m.Counter == "" {
		w.api.CounterTable = ""
	} else {
		w.api.Counters = []string{counters.Schema(), w.fill()}
	}
	w.insert()
	return w.api, nil
}

func countersOf(table string) (*producer.Outbox, error) {
	schema, name, err := catalog.SplitTable(table)
	if err != nil {
		return nil, err
	}
	return producer.New(producer.Config{Table: quote(schema, name)})
}

// CounterTable is the quoted name of the table of counters that belongs to an outbox table.
func CounterTable(table string) (string, error) {
	o, err := countersOf(table)
	if err != nil {
		return "", err
	}
	return o.CounterTable(), nil
}

func quote(parts ...string) string { return pgx.Identifier(parts).Sanitize() }

func literal(s string) string {
	if strings.Contains(s, `\`) {
		return ` E'` + strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), `'`, `''`) + `'`
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// writer writes one API.
type writer struct {
	cfg     config.Config
	l       *wiring.Layout
	m       relay.Mapping
	api     *API
	payload string // the type of the argument payload

	table    string // quoted
	key      string // the key column, if it is a plain one
	makesKey bool   // from actor and counter
}

// readTable looks at the table's columns: which the function fills, and which each call has to name.
func (w *writer) readTable() error {
	w.m, w.table = w.l.Mapping, quote(w.l.Table.Schema, w.l.Table.Name)
	filled := map[string]bool{}
	for _, name := range []string{w.m.Doc, w.m.Actor, w.m.Counter, w.m.Payload} {
		c, ok := w.l.Table.Column(name)
		if ok && (c.Generated || c.Identity) {
			return &outbox.Fault{
				Class: outbox.Fatal, Code: "sql_api",
				Message: fmt.Sprintf("%s cannot be made: column %q of %s is generated", Name, name,
					w.m.Table), Hint: "Map a plain column",
			}
		}
		filled[name] = true
	}
	p, _ := w.l.Table.Column(w.m.Payload)
	w.payload = payloadType(p)
	if c, ok := w.l.Table.Column(w.m.Key); ok && !c.Generated {
		w.key = w.m.Key
		if w.m.Actor != "" && w.m.Counter != "" {
			w.makesKey = true
			filled[w.key] = true
		}
	}
	for _, c := range w.l.Table.Columns {
		if !filled[c.Name] && c.NotNull && !c.Default {
			w.api.Needs = append(w.api.Needs, c.Name)
		}
	}
	return nil
}

// payloadType is the type of the argument payload: that of the column, so that the bytes stay what they are.
func payloadType(c catalog.Column) string {
	switch c.TypeOID {
	case pgtype.JSONBOID:
		return "jsonb"
	case pgtype.JSONOID:
		return "json"
	case pgtype.ByteaOID:
		return "bytea"
	}
	return "text"
}

// fill starts the counters of documents that have rows already where these end.
func (w *writer) fill() string {
	actor, group := "''", "1"
	if w.m.Actor != "" {
		actor, group = "coalesce("+quote(w.m.Actor)+"::text, '')", "1, 2"
	}
	return "INSERT INTO " + w.api.CounterTable + " (doc_id, actor_id, counter)\n" +
		"  SELECT " + quote(w.m.Doc) + "::text, " + actor + ", max(" + quote(w.m.Counter) + ") FROM " +
		w.table +
		" WHERE " + quote(w.m.Doc) + " IS NOT NULL AND " + quote(w.m.Counter) + " IS NOT NULL GROUP BY " +
		group + " ON CONFLICT DO NOTHING"
}

// dollars quotes a text with a tag that is not in it: names of columns are.
func dollars(text string) string {
	tag := "$outflow$"
	for n := 1; strings.Contains(text, tag); n++ {
		tag = fmt.Sprintf("$outflow%d$", n)
	}
	return tag + text + tag
}

// create writes the statements that make schema and function. Functions with another type of payload, of an
// earlier mapping, go: with two a call would be ambiguous.
func (w *writer) create(comment, body string) {
	arguments := func(payload string) string { return Name + "(text, text, bigint, " + payload + ", jsonb)" }
	all := []string{"CREATE SCHEMA IF NOT EXISTS outflow"}
	for _, other := range []string{"jsonb", "json", "text", "bytea"} {
		if other != w.payload {
			all = append(all, "DROP FUNCTION IF EXISTS "+arguments(other))
		}
	}
	all = append(all,
		"CREATE OR REPLACE FUNCTION "+Name+"(doc_id text, actor_id text, counter bigint, payload "+w.payload+
			", columns jsonb DEFAULT NULL)\n"+
			"RETURNS text LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp "+
			"AS "+dollars("#variable_conflict use_column\n"+body),
		"COMMENT ON FUNCTION "+arguments(w.payload)+" IS "+literal(comment))
	w.api.Function = append(all, consumerStatements()...)
}
