package wiring

import (
	"context"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/sink"
)

// Layout is the configuration applied to the table as it is: which column is what.
type Layout struct {
	config.Resolved
	Table catalog.Table
	catalog.Cluster
	Binary bool // every type that is read has a binary reader
}

// Columns lists every column that is read.
func (l *Layout) Columns() []string {
	m := l.Mapping
	var all []string
	if !m.Source.Rows() {
		return nil
	}
	for _, name := range append([]string{l.ID, m.Doc, m.Actor, m.Counter, m.Span, m.Key, m.Payload},
		l.Extra...) {
		if name != "" {
			all = append(all, name)
		}
	}
	return all
}

// Needed lists the columns that rows can't be published without: all but a generated key that can be made of
// actor and counter, which is in the WAL only where the publication has it.
func (l *Layout) Needed() []string {
	m := l.Mapping
	return slices.DeleteFunc(l.Columns(), func(name string) bool {
		c, _ := l.Table.Column(name)
		return name == m.Key && c.Generated && m.Actor != "" && m.Counter != "" &&
			!slices.Contains(l.Extra, name)
	})
}

// Follow takes over from the checkpoint record what the configuration leaves to it. A set-up that is older
// than replication.origin goes on as it was; rec nil: there is no record.
func (l *Layout) Follow(cfg config.Config, rec *checkpoint.Record) {
	if rec != nil {
		l.Mapping.OwnOnly = ownOnly(cfg, rec)
	}
}

// ownOnly reports whether nothing is published that was replicated from other servers.
func ownOnly(cfg config.Config, rec *checkpoint.Record) bool {
	if rec != nil && !rec.Creating && !cfg.Replication.Explicit {
		return rec.Mapping.OwnOnly
	}
	return cfg.Replication.Origin == config.OriginOwn && cfg.Cluster.Subscription == ""
}

// ReadsTable reads a table's description.
type ReadsTable interface {
	Table(ctx context.Context) (catalog.Table, error)
	Cluster(ctx context.Context) (catalog.Cluster, error)
}

// Apply reads the table, if there is one, and applies the configuration to it.
func Apply(ctx context.Context, cfg config.Config, from ReadsTable) (*Layout, error) {
	if !cfg.Source.Rows() {
		return ApplyTo(cfg, catalog.Table{})
	}
	t, err := from.Table(ctx)
	if err != nil {
		return nil, err
	}
	l, err := ApplyTo(cfg, t)
	if err == nil {
		l.Cluster, err = from.Cluster(ctx)
	}
	return l, err
}

// NeedTable refuses what there has to be a table for.
func NeedTable(cfg config.Config, what string) error {
	if cfg.Source.Rows() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "no_table",
		Message: fmt.Sprintf("source is message: there is no outbox table, and %s can only come from one",
			what),
		Hint: "What is in the stream can be read again from the stream. What is neither there nor in " +
			"the WAL any more is nowhere",
	}
}

// NeedHome refuses what reads the table where it has rows of several clusters: it does not tell whose a row
// is.
func NeedHome(cfg config.Config, what string) error {
	if cfg.Cluster.Subscription == "" {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "subscription",
		Message: fmt.Sprintf("%s is not for a stream of another cluster's rows (cluster.subscription is "+
			"%q): the table does not say whose a row is", what, cfg.Cluster.Subscription),
		Hint: "Run it at home, for the home's own stream",
	}
}

// NeedAll refuses what takes each row that is in no message for a missing one, where other clusters publish
// what the home does not.
func NeedAll(cfg config.Config, what string) error {
	if !cfg.Cluster.Islands() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: checkpoint.CodeMode,
		Message: fmt.Sprintf("%s is not for a stream that leaves events to other clusters (cluster.mode is "+
			"islands): it would publish again what those have published", what),
		Hint: "Start the stream anew: `outflow uninstall`, then `outflow init`. What the stream lacks can " +
			"be published with `outflow replay`",
	}
}

// ApplyTo applies the configuration to a table; without rows, to none.
func ApplyTo(cfg config.Config, t catalog.Table) (*Layout, error) {
	template, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		names[i] = c.Name
	}
	r, err := config.ResolveMapping(cfg, names, template.Columns())
	if err != nil {
		return nil, err
	}
	l := &Layout{Resolved: r, Table: t, Binary: true}
	l.Mapping.Subscription = cfg.Cluster.Subscription
	l.Mapping.OwnOnly = ownOnly(cfg, nil)
	if cfg.Cluster.Islands() {
		l.Mapping.Cluster = cfg.Cluster.ID
	}
	if !cfg.Source.Rows() {
		return l, nil
	}
	l.Mapping.Table = t.Schema + "." + t.Name
	if cfg.Cluster.Control != "" {
		schema, name, err := catalog.SplitTable(cfg.Cluster.Control)
		if err != nil {
			return nil, err
		}
		l.Mapping.Control = schema + "." + name
	}
	for _, name := range l.Columns() {
		if c, ok := t.Column(name); ok && !decoder.BinaryReadable(c.TypeOID) {
			l.Binary = false
		}
	}
	return l, nil
}

// CheckKey refuses an order key whose order is not that of its text: keys are compared as the bytes that
// PostgreSQL prints.
func (l *Layout) CheckKey() error {
	c, ok := l.Table.Column(l.Mapping.Key)
	if !ok || !c.PrintsUnordered() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "key_type",
		Message: fmt.Sprintf("columns.seq_key is column %q of table %s, of type %s: keys are compared as "+
			"text, and in text 10 comes before 9",
			c.Name, l.Mapping.Table, c.TypeName),
		Hint: fmt.Sprintf("Set columns.actor_id to the column that says who counts, columns.counter to %s "+
			"and columns.seq_key to \"\": the key is made of both. "+
			"Or give the table a text column that the services fill with the number at one length, as "+
			"lpad(number::text, 20, '0') does, and set "+
			"columns.seq_key to that. Or set columns.seq_key to \"\" alone: events keep the order in which "+
			"their transactions commit", c.Name),
	}
}

// field says where the value of a column that subject or headers name is in an event.
func (l *Layout) field(column string) (sink.Field, bool) {
	use, ok := l.Uses[column]
	if !ok {
		return 0, false
	}
	switch use.Role {
	case config.InExtra:
		return sink.Field(use.Extra), true
	case config.InDoc:
		return sink.FieldDoc, true
	case config.InActor:
		return sink.FieldActor, true
	case config.InKey:
		return sink.FieldKey, true
	case config.InID:
		return sink.FieldID, true
	}
	return 0, false // the payload is no part of a subject or a header
}

// ReadLayout reads the table over a connection of its own and applies the configuration to it.
func ReadLayout(ctx context.Context, cfg config.Config) (*Layout, error) {
	defer WaitPostgres(ctx, cfg)()
	pg, err := OpenSetup(ctx, cfg, catalog.SetupConfig{Config: Catalog(cfg)})
	if err != nil {
		return nil, at("postgres.url", err)
	}
	defer pg.Close()
	return Apply(ctx, cfg, pg)
}
