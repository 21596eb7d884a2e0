package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	documents = 4
	least     = 400                   // operations of each document
	most      = 15000                 // should the disturbances take that long
	between   = 250                   // operations from one disturbance to the next, at least
	breath    = 10 * time.Millisecond // between two requests for a document
)

// side and verdict are what "crdt verdict -json" writes, as far as it is looked at here.
type side struct {
	Digests    map[string]string `json:"digests"`
	Events     int64             `json:"events"`
	Repeats    int64             `json:"repeats"`
	Inversions int64             `json:"inversions"`
	Text       string            `json:"text"`
	Chain      string            `json:"chain"`
	Total      int64             `json:"total"`
}

type verdict struct {
	Operations int64 `json:"operations"`
	Live       side  `json:"live"`
	Rebuilt    side  `json:"rebuilt"`
	Relayed    side  `json:"relayed"`
	Same       bool  `json:"same"`
	RelayIsOff bool  `json:"relay_is_off"`
	table      string
}

// good returns nil if Outflow's side is whole and equal to the rebuilt one, and the relay's is not.
func (v *verdict) good() error {
	var errs []error
	for name, s := range map[string]side{"live": v.Live, "rebuilt": v.Rebuilt} {
		if s.Events != v.Operations || s.Repeats != 0 || s.Inversions != 0 {
			errs = append(errs, fmt.Errorf("%s: %d events of %d operations, %d repeats, %d inversions",
				name, s.Events, v.Operations, s.Repeats, s.Inversions))
		}
	}
	if !v.Same {
		errs = append(errs, errors.New("the rebuilt projections are not the live ones"))
	}
	for name, digest := range v.Live.Digests {
		if v.Relayed.Digests[name] == digest {
			errs = append(errs, fmt.Errorf("the polling relay's projection %s is the same: the crash has "+
				"not shown the difference", name))
		}
	}
	return errors.Join(errs...)
}

// scenario has recorded sessions typed into several documents while everything is killed and redeployed, and
// judges what is left.
func (w *world) scenario(ctx context.Context, out io.Writer) (*verdict, []*typist, error) {
	var typists []*typist
	for n := range documents {
		t, err := newTypist(w.url(), fmt.Sprintf("component-%d", n+1), [2]string{"Ada", "Grace"}, most,
			uint64(n))
		if err != nil {
			return nil, nil, err
		}
		t.pause = breath
		typists = append(typists, t)
	}
	enough := make(chan struct{})
	g, typing := errgroup.WithContext(ctx)
	for _, t := range typists {
		g.Go(func() error { return t.run(typing, least, enough) })
	}
	g.Go(func() error {
		defer close(enough)
		return w.storm(typing, typists, out)
	})
	if err := g.Wait(); err != nil {
		return nil, typists, err
	}
	if err := until(ctx, "everything is consumed", func() error { return w.settled(ctx) }); err != nil {
		return nil, typists, err
	}
	v, err := w.judge(ctx)
	return v, typists, err
}

// storm is what happens on the way.
func (w *world) storm(ctx context.Context, typists []*typist, out io.Writer) error {
	begun := time.Now()
	for _, d := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"kill -9: Outflow, service, consumers, relays", w.crash},
		{"kill -9: NATS", func(context.Context) error { return w.crashNATS() }},
		{"redeploy: Outflow, service, consumers, relays", w.redeploy},
		{"kill -9: PostgreSQL", w.crashPostgres},
		{"kill -9: everything, with both servers", w.killEverything},
	} {
		if err := progress(ctx, typists, between); err != nil {
			return err
		}
		fmt.Fprintf(out, "  %5.1f s  %5d operations   %s\n", time.Since(begun).Seconds(), sum(typists),
			d.what)
		if err := d.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", d.what, err)
		}
	}
	return progress(ctx, typists, between)
}

func sum(typists []*typist) (n int64) {
	for _, t := range typists {
		n += t.sent.Load()
	}
	return n
}

// progress waits until so many more operations are stored.
func progress(ctx context.Context, typists []*typist, n int64) error {
	from := sum(typists)
	return until(ctx, "operations are stored", func() error {
		if now := sum(typists); now < from+n {
			return fmt.Errorf("%d of %d", now-from, n)
		}
		return nil
	})
}

// settled returns nil if all consumers of both sides have had everything.
func (w *world) settled(ctx context.Context) error {
	var operations, unmarked int64
	err := w.pool.QueryRow(ctx, "SELECT (SELECT coalesce(sum(version), 0)::bigint FROM document), "+
		"(SELECT count(*) FROM outbox WHERE published_at IS NULL)").Scan(&operations, &unmarked)
	if err != nil {
		return err
	}
	if unmarked > 0 {
		return fmt.Errorf("%d rows are not marked as published by the relays", unmarked)
	}
	relayed, err := w.last(ctx, "RELAY")
	if err != nil {
		return err
	}
	for schema, want := range map[string]int64{"live": operations, "relayed": int64(relayed)} {
		var searched, audited, billed int64
		err := w.pool.QueryRow(ctx, fmt.Sprintf(`SELECT (SELECT coalesce(sum(events), 0)::bigint
			FROM %[1]s.search),
			(SELECT count(*) FROM %[1]s.audit), (SELECT coalesce(sum(events), 0)::bigint
			FROM %[1]s.billing_document)`, schema)).
			Scan(&searched, &audited, &billed)
		if err != nil {
			return err
		}
		if searched != want || audited != want || billed != want {
			return fmt.Errorf("%s: of %d events search has had %d, audit %d, billing %d", schema, want,
				searched, audited, billed)
		}
	}
	return nil
}

// judge rebuilds the projections from nothing and compares.
func (w *world) judge(ctx context.Context) (*verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	file := w.file("verdict.json")
	var table, said bytes.Buffer
	cmd := w.command(ctx, w.crdt, "verdict", "-json", file)
	cmd.Stdout, cmd.Stderr = &table, &said
	runErr := cmd.Run() // also if the verdict is not good: the file says so, too
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("crdt verdict: %w\n%s", errors.Join(runErr, err), said.String())
	}
	v := &verdict{table: table.String()}
	return v, json.Unmarshal(b, v)
}
