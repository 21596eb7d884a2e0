package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// pastStream is filled from archive and stream.
const pastStream = "STOCK_PAST"

// past lets table and stream forget, and makes a projection of what only the archive has.
func (p *play) past(ctx context.Context, v *verdict) error {
	until := p.moved // the events so far
	want, events, err := p.shipped(ctx, until)
	if err != nil {
		return err
	}
	// Old rows go while new ones come: the newest events are not confirmed before others follow.
	if err := p.Until(ctx, "partitions are archived and dropped", func(ctx context.Context) error {
		if err := p.move(ctx, 6, 3); err != nil {
			return err
		}
		if err := p.DB.QueryRow(ctx, "SELECT coalesce(sum(rows), 0) FROM outflow_partitions WHERE state = "+
			"'dropped'").Scan(&v.dropped); err != nil {
			return err
		}
		if v.dropped < until {
			return fmt.Errorf("%d of %d rows have left the table", v.dropped, until)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := p.Until(ctx, "old messages leave the stream", func(ctx context.Context) error {
		if _, err := p.Command(ctx, "stream", "apply", "--retain.stream.messages", "1"); err != nil {
			return err
		}
		s, err := p.JS.Stream(ctx, "STOCK")
		if err != nil {
			return err
		}
		v.first = s.CachedInfo().State.FirstSeq
		if v.first <= uint64(until) { //nolint:gosec // it is not below 0
			if err := p.stocktaking(ctx); err != nil {
				return err
			}
			return fmt.Errorf("the stream begins at %d", v.first)
		}
		return nil
	}); err != nil {
		return err
	}
	p.Say("past       %d rows have left the table, and the stream begins at event %d: the archive has the "+
		"others", v.dropped, v.first)

	_, err = p.Command(ctx, "replay", "--seq", fmt.Sprintf("1..%d", until), "--to", "stream:"+pastStream)
	if err != nil {
		return err
	}
	shipped, err := p.Start("shipped", p.binary, "shipped", "-lease", "1s", "-stream", pastStream)
	if err != nil {
		return err
	}
	if err := p.Until(ctx, "the new projection is built", func(ctx context.Context) error {
		var n int
		err := p.DB.QueryRow(ctx, "SELECT coalesce(sum(events), 0) FROM shipped").Scan(&n)
		if err == nil && n < events {
			err = fmt.Errorf("%d of %d events", n, events)
		}
		return err
	}); err != nil {
		return err
	}
	if err := shipped.Stop(ctx); err != nil {
		return err
	}
	rows, err := p.DB.Query(ctx, "SELECT warehouse || '/' || sku, quantity FROM shipped")
	if err != nil {
		return err
	}
	got := map[string]int64{}
	var item string
	var quantity int64
	_, err = pgx.ForEachRow(rows, []any{&item, &quantity}, func() error {
		got[item] = quantity
		return nil
	})
	for item := range want {
		if got[item] != want[item] {
			v.unlike++
		}
	}
	v.items = len(got)
	p.Say("projection what was ever shipped, which nobody had asked for before: %d events of the archive, "+
		"%d items", events, v.items)
	return err
}

// stocktaking lets the consumer of the stock come to the end: what it has not read stays in the stream.
func (p *play) stocktaking(ctx context.Context) error {
	stock, err := p.deploy("3")
	if err != nil {
		return err
	}
	if err := p.Until(ctx, "everything is counted", p.counted); err != nil {
		return err
	}
	if err := stock.Stop(ctx); err != nil {
		return err
	}
	return p.move(ctx, 6, 3)
}
