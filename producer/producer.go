package producer

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
)

// Event is one event to enqueue.
type Event struct {
	Document string // never empty
	Actor    string // who wrote it; only where the table has the column
	// 0 or more, the actor's own; only where the table has the column. With NextCounter it is taken, and must
	// be 0 here: the receipt has it
	Counter int64
	// Key orders the document's events. It is given only where the table has a plain column for it. There,
	// and empty, it is made from Actor and Counter if the table has both; else it must be given.
	Key string
	// Payload is a JSON text where the column is json or jsonb, text where it is text, and any bytes where it
	// is bytea.
	Payload []byte
	ID      string // empty: what the column's default or its identity gives
	// Columns are further columns, such as event_type; nil is NULL, a column that is not named has its
	// default. All events of a call name the same. A value may be a string, bytes (hex for bytea, else text),
	// a number, a bool, a time, a driver.Valuer or an encoding.TextMarshaler. With [Message] they are the
	// event's headers.
	Columns map[string]any
}

// JSONEvent returns an event of a document whose payload is v, as json.Marshal prints it; what else the event
// has is set by the caller. An error is that of json.Marshal.
func JSONEvent(document string, v any) (Event, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return Event{}, fmt.Errorf("producer: the payload of document %s, a %T: %w", shown(document), v, err)
	}
	return Event{Document: document, Payload: payload}, nil
}

// DefaultMaxPayload is the default of sink.max_payload.
const DefaultMaxPayload = 1 << 20

// Config describes the outbox as the setting of the same names of Outflow do. Its zero value is the table
// that `outflow init` makes.
type Config struct {
	// schema.name, or name for the search path to find; a part with dots stands in double quotes. Default
	// public.outbox
	Table   string
	Columns Columns
	// NextCounter: the counter of each event is the next one of its document and actor, taken in the same
	// transaction: without a gap, whatever is rolled back. Two transactions that write for one document and
	// actor then wait for each other. It needs the table of [Outbox.Schema].
	NextCounter  bool
	CounterTable string // schema.name; default outflow_counter, in the schema of Table
	// MaxPayload is the setting sink.max_payload, in bytes: an event whose message could be larger is
	// refused. Default [DefaultMaxPayload].
	MaxPayload int
	// Headers is the setting headers, name and column: they count in the size of the message.
	Headers map[string]string
	// Inject, if it is given, puts the trace context of a call's ctx into a carrier: traceparent and
	// tracestate of W3C Trace Context, under these names. The columns that Headers maps them to get them in
	// all events of the call, but for events that name traceparent's column in their own Columns. What is not
	// valid is left out. With OpenTelemetry:
	//
	//	Inject: func(ctx context.Context, to map[string]string) {
	//		propagation.TraceContext{}.Inject(ctx, propagation.MapCarrier(to))
	//	},
	//
	// It may be called from several goroutines.
	Inject func(ctx context.Context, to map[string]string)
	// Publication is the setting publication. If it is given, an event for a table that it does not publish
	// is refused: it would be skipped in silence.
	Publication string
}

// Columns names the table's columns, as the setting columns does. One that is not named has its default name,
// id, doc_id, actor_id, counter, seq_key, payload, and ID, Actor, Counter and Key are then absent where the
// table has no such column. "-" says that there is none.
type Columns struct {
	ID, Document, Actor, Counter, Key, Payload string
}

// Outbox enqueues events. It is made once and safe for concurrent use.
type Outbox struct {
	cfg     Config
	table   name
	counter name
	message bool
	// where Inject's values go; state may be empty
	parent, state string
	layout        atomic.Pointer[layout] // what the first call read of the table; nil: read it again
}

// New checks a configuration. It connects to nothing: the first call reads the table's columns, over its own
// transaction.
func New(cfg Config) (*Outbox, error) {
	if cfg.Table == "" {
		cfg.Table = "public.outbox"
	}
	o := &Outbox{cfg: cfg}
	o.cfg.Headers = maps.Clone(cfg.Headers)
	if o.cfg.MaxPayload == 0 {
		o.cfg.MaxPayload = DefaultMaxPayload
	}
	if o.cfg.MaxPayload < 1<<10 || o.cfg.MaxPayload > 64<<20 {
		return nil, fmt.Errorf("producer: MaxPayload %d is not possible. Give what sink.max_payload has, 1 "+
			"KiB to 64 MiB", cfg.MaxPayload)
	}
	var err error
	if o.table, err = parseName("Table", cfg.Table); err != nil {
		return nil, err
	}
	o.counter = name{o.table.schema, "outflow_counter"}
	if cfg.CounterTable != "" {
		if o.counter, err = parseName("CounterTable", cfg.CounterTable); err != nil {
			return nil, err
		}
	}
	for _, header := range slices.Sorted(maps.Keys(cfg.Headers)) {
		if header == "" || cfg.Headers[header] == "" {
			return nil, fmt.Errorf("producer: Headers[%q] is %q. Give each header the name of a column",
				header, cfg.Headers[header])
		}
	}
	if err := o.bindTrace(); err != nil {
		return nil, err
	}
	return o, nil
}

// Schema returns the statement that makes the table of counters that NextCounter needs. `outflow init
// --sql-api` runs it.
func (o *Outbox) Schema() string {
	return "CREATE TABLE IF NOT EXISTS " + o.counter.quoted() + " (\n" +
		"  doc_id text COLLATE \"C\" NOT NULL,\n" +
		"  actor_id text COLLATE \"C\" NOT NULL,\n" +
		"  counter bigint NOT NULL,\n" +
		"  PRIMARY KEY (doc_id, actor_id)\n" +
		") WITH (fillfactor = 50)"
}

// CounterTable is the quoted name of the table of counters.
func (o *Outbox) CounterTable() string { return o.counter.quoted() }

// name is the name of a table; schema may be empty.
type name struct{ schema, table string }

func (n name) quoted() string {
	if n.schema == "" {
		return quote(n.table)
	}
	return quote(n.schema) + "." + quote(n.table)
}

// quote makes an identifier of SQL.
func quote(identifier string) string { return `"` + strings.ReplaceAll(identifier, `"`, `""`) + `"` }

// parseName reads schema.name or name, as the setting table is read: a part that holds dots stands in double
// quotes, and nothing is folded to lower case.
func parseName(setting, text string) (name, error) {
	bad := func() (name, error) {
		return name{}, fmt.Errorf("producer: %s %q is not a table's name. Write schema.name, or name; a "+
			"part that holds dots in double quotes",
			setting, text)
	}
	var parts []string
	for rest, more := text, true; more; {
		var part string
		if strings.HasPrefix(rest, `"`) {
			end := 1
			for ; end < len(rest); end++ {
				if rest[end] != '"' {
					continue
				}
				if end+1 == len(rest) || rest[end+1] != '"' {
					break
				}
				end++
			}
			if end >= len(rest) {
				return bad()
			}
			part, rest = strings.ReplaceAll(rest[1:end], `""`, `"`), rest[end+1:]
			if rest != "" && rest[0] != '.' {
				return bad()
			}
			rest, more = strings.CutPrefix(rest, ".")
		} else {
			part, rest, more = strings.Cut(rest, ".")
		}
		if part == "" || strings.ContainsRune(part, 0) {
			return bad()
		}
		parts = append(parts, part)
	}
	switch len(parts) {
	case 1:
		return name{"", parts[0]}, nil
	case 2:
		return name{parts[0], parts[1]}, nil
	}
	return bad()
}
