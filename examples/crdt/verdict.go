package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
)

// Verdict compares the three ways in which the projections were built.
type Verdict struct {
	At         time.Time     `json:"at"`
	Took       time.Duration `json:"took"`
	Operations int64         `json:"operations"` // that the service has stored
	Live       Side          `json:"live"`
	Rebuilt    Side          `json:"rebuilt"`
	Relayed    Side          `json:"relayed"`
	Same       bool          `json:"same"`         // live and rebuilt, byte for byte
	RelayIsOff bool          `json:"relay_is_off"` // relayed and rebuilt differ
}

// Side is one set of projections.
type Side struct {
	Digests    map[string]string `json:"digests"`    // of everything that a projection holds
	Events     int64             `json:"events"`     // that it has had
	Repeats    int64             `json:"repeats"`    // events that came again
	Inversions int64             `json:"inversions"` // events that came after a later one of their document
	TextDigest string            `json:"text"`
	ChainHead  string            `json:"chain"`
	Total      int64             `json:"total"` // of the bills, in tenths of a cent
}

// sideOf reads one schema inside of a transaction.
func sideOf(ctx context.Context, tx pgx.Tx, schema string) (s Side, err error) {
	if err := useSchema(ctx, tx, schema); err != nil {
		return s, err
	}
	s.Digests = map[string]string{}
	for _, p := range projections {
		lines, err := column(ctx, tx, p.dump)
		if err != nil {
			return s, err
		}
		s.Digests[p.name] = digest([]byte(strings.Join(lines, "\n")))
	}
	texts, err := column(ctx, tx, "SELECT doc_id || ' ' || body FROM search ORDER BY doc_id")
	if err != nil {
		return s, err
	}
	heads, err := column(ctx, tx, "SELECT DISTINCT ON (doc_id) doc_id || ' ' || hash FROM audit ORDER BY "+
		"doc_id, n DESC")
	if err != nil {
		return s, err
	}
	s.TextDigest, s.ChainHead = digest([]byte(strings.Join(texts, "\n"))), digest(
		[]byte(strings.Join(heads, "\n")))
	if err := tx.QueryRow(ctx, "SELECT coalesce(sum(amount), 0)::bigint FROM billing_account").Scan(
		&s.Total); err != nil {
		return s, err
	}
	// The audit log has the events in the order in which they came.
	err = tx.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE again > 1),
		count(*) FILTER (WHERE again = 1 AND version < highest)
		FROM (SELECT version, row_number() OVER (PARTITION BY doc_id, version ORDER BY n) AS again,
			max(version) OVER (PARTITION BY doc_id ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING
			AND 1 PRECEDING) AS highest FROM audit) a`).
		Scan(&s.Events, &s.Repeats, &s.Inversions)
	return s, err
}

func column(ctx context.Context, tx pgx.Tx, sql string) ([]string, error) {
	rows, err := tx.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// compare reads all three. The transaction makes it one moment.
func compare(ctx context.Context, tx pgx.Tx) (v Verdict, err error) {
	if err := tx.QueryRow(ctx, "SELECT coalesce(sum(version), 0)::bigint FROM public.document").Scan(
		&v.Operations); err != nil {
		return v, err
	}
	for schema, side := range map[string]*Side{live: &v.Live, rebuilt: &v.Rebuilt, relayed: &v.Relayed} {
		if *side, err = sideOf(ctx, tx, schema); err != nil {
			return v, fmt.Errorf("read schema %s: %w", schema, err)
		}
	}
	v.At, v.Same = time.Now(), true
	for _, p := range projections {
		v.Same = v.Same && v.Live.Digests[p.name] == v.Rebuilt.Digests[p.name]
		v.RelayIsOff = v.RelayIsOff || v.Relayed.Digests[p.name] != v.Rebuilt.Digests[p.name]
	}
	return v, nil
}

// eventsIn returns how many events the projection of a schema has had.
func (p *projection) eventsIn(ctx context.Context, tx pgx.Tx, schema string) (n int64, err error) {
	if err := useSchema(ctx, tx, schema); err != nil {
		return 0, err
	}
	err = tx.QueryRow(ctx, p.seen).Scan(&n)
	return n, err
}

// useSchema makes a schema the one that names without one mean, until the transaction ends.
func useSchema(ctx context.Context, tx pgx.Tx, schema string) error {
	_, err := tx.Exec(ctx, "SET LOCAL search_path TO "+pgx.Identifier{schema}.Sanitize())
	return err
}

// print shows a verdict as a table.
func (v Verdict) print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	row := func(what string, cell func(Side) string) {
		l, r, y := cell(v.Live), cell(v.Rebuilt), cell(v.Relayed)
		note := "the relay's is the same"
		if y != r {
			note = "the relay's differs"
		}
		if l != r {
			note = "LIVE AND REBUILT DIFFER"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", what, l, r, y, note)
	}
	fmt.Fprintf(t, "\tlive\trebuilt\tpolling relay\t\n")
	row("events", func(s Side) string { return fmt.Sprint(s.Events) })
	row("repeats", func(s Side) string { return fmt.Sprint(s.Repeats) })
	row("inversions", func(s Side) string { return fmt.Sprint(s.Inversions) })
	row("search text", func(s Side) string { return s.TextDigest[:12] })
	row("audit chain head", func(s Side) string { return s.ChainHead[:12] })
	row("billing total", func(s Side) string { return fmt.Sprintf("$%.3f", float64(s.Total)/1000) })
	for _, p := range projections {
		row("all of "+p.name, func(s Side) string { return s.Digests[p.name][:12] })
	}
	return t.Flush()
}
