package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// verdict is what was found. Only bad ought not to be 0.
type verdict struct {
	events  int
	before  int // items that were wrong with deploy 1
	bad     int // with deploy 2
	after   int // with deploy 3, after the repair
	bytes   int // of the projection
	rebuilt bool

	dropped int    // rows that left the table
	first   uint64 // message of the stream
	items   int    // of the projection of the past
	unlike  int    // of them, those that are not what the stream had

	erased int // events of the item that is erased
	left   int // of them, those that archive or stream still have
}

func (v verdict) good() bool {
	return v.before == 0 && v.bad > 0 && v.after == 0 && v.rebuilt && v.bytes > 0 &&
		v.dropped > 0 && v.first > 1 && v.items > 0 && v.unlike == 0 &&
		v.erased > 0 && v.left == 0
}

func (v verdict) String() string {
	same := "equal, byte for byte, to"
	if !v.rebuilt {
		same = "NOT EQUAL to"
	}
	return fmt.Sprintf("\nverdict: %d events; items that are wrong: %d before the bad deploy, %d by it, %d "+
		"after its repair\n"+
		"         the projection (%d bytes), built from nothing once more, is %s the one that lived "+
		"through it\n"+
		"         the past, from the archive alone: %d of %d items are not what the stream had\n"+
		"         the item that was erased: %d of its %d events are left\n",
		v.events, v.before, v.bad, v.after, v.bytes, same, v.unlike, v.items, v.left, v.erased)
}

// counted waits until the ledger has each event that was written. (More would show in the sums.)
func (p *play) counted(ctx context.Context) error {
	var n int
	if err := p.DB.QueryRow(ctx, "SELECT count(*) FROM ledger").Scan(&n); err != nil {
		return err
	}
	if n < p.moved {
		return fmt.Errorf("%d of %d events", n, p.moved)
	}
	return nil
}

// wrong counts the items whose stock is not what the stream's events make, in its order.
func (p *play) wrong(ctx context.Context) (n int, err error) {
	want, err := p.model(ctx)
	if err != nil {
		return 0, err
	}
	rows, err := p.DB.Query(ctx, "SELECT warehouse || '/' || sku, quantity FROM stock")
	if err != nil {
		return 0, err
	}
	var item string
	var quantity int64
	_, err = pgx.ForEachRow(rows, []any{&item, &quantity}, func() error {
		if w, ok := want[item]; !ok || w != quantity {
			n++
		}
		delete(want, item)
		return nil
	})
	return n + len(want), err
}

// model adds up the stream by itself: it shares nothing with the consumer.
func (p *play) model(ctx context.Context) (map[string]int64, error) {
	s, err := p.JS.Stream(ctx, "STOCK")
	if err != nil {
		return nil, err
	}
	sums := map[string]int64{}
	err = p.each(ctx, s.CachedInfo().State.LastSeq, func(kind, item string, quantity int64) error {
		switch kind {
		case "received":
			sums[item] += quantity
		case "shipped":
			sums[item] -= quantity
		case "counted":
			sums[item] = quantity
		default:
			return fmt.Errorf("event type %q", kind)
		}
		return nil
	})
	return sums, err
}

// shipped adds up what was shipped in the first events of the stream, which it still has all of.
func (p *play) shipped(ctx context.Context, until int) (sums map[string]int64, events int, err error) {
	sums = map[string]int64{}
	last := uint64(until) //nolint:gosec // not below 0
	err = p.each(ctx, last, func(kind, item string, quantity int64) error {
		if kind == "shipped" {
			sums[item], events = sums[item]+quantity, events+1
		}
		return nil
	})
	return sums, events, err
}

// each reads the stream's messages up to a sequence.
func (p *play) each(ctx context.Context, last uint64,
	do func(kind, item string, quantity int64) error) error {
	s, err := p.JS.Stream(ctx, "STOCK")
	if err != nil {
		return err
	}
	for seq := uint64(1); seq <= last; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			return fmt.Errorf("message %d: %w", seq, err)
		}
		var v struct {
			Item, SKU, Warehouse string
			Boxes, Quantity      int64
			PerBox               int64 `json:"per_box"`
		}
		if err := json.Unmarshal(m.Data, &v); err != nil {
			return fmt.Errorf("message %d: %w", seq, err)
		}
		err = do(m.Header.Get("Event-Type"), "main/"+v.Item+v.SKU, v.Quantity+v.Boxes*v.PerBox)
		if err != nil {
			return fmt.Errorf("message %d: %w", seq, err)
		}
	}
	return nil
}

// projection is all that the consumer has made, as text; but for who counted.
func (p *play) projection(ctx context.Context) (string, error) {
	var b strings.Builder
	for _, sql := range []string{
		"SELECT s::text FROM stock s ORDER BY warehouse, sku",
		"SELECT (sequence, warehouse, sku, quantity)::text FROM ledger ORDER BY sequence",
	} {
		rows, err := p.DB.Query(ctx, sql)
		if err != nil {
			return "", err
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return "", err
		}
		b.WriteString(strings.Join(lines, "\n") + "\n")
	}
	return b.String(), nil
}
