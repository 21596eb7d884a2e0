package main

import (
	"context"
	"fmt"
	"strings"
)

// forgotten is the item that is erased.
const forgotten = "sku-0"

// forget erases an item everywhere: in table, stream, archive, and the copy of the past.
func (p *play) forget(ctx context.Context, v *verdict) error {
	until := p.moved
	var err error
	if v.erased, err = p.known(ctx, until); err != nil {
		return err
	}
	if err := p.Until(ctx, forgotten+" is erased", func(ctx context.Context) error {
		if err := p.move(ctx, 6, 3); err != nil { // the newest events can't go before others follow
			return err
		}
		_, err := p.Command(ctx, "erase", "--doc", forgotten, "--request", "demo", "--copy", pastStream,
			"--wait", "500ms", "--yes")
		return err
	}); err != nil {
		return err
	}
	if v.left, err = p.known(ctx, until); err != nil {
		return err
	}
	if _, err := p.Command(ctx, "archive", "verify"); err != nil {
		return err
	}
	p.Say("erasure    %d events of %s have gone from table, stream, copy and archive, which is still "+
		"proven to have all others", v.erased, forgotten)
	return nil
}

// known counts what archive and stream have of the item among the first events.
func (p *play) known(ctx context.Context, until int) (int, error) {
	out, err := p.Command(ctx, "replay", "--seq", fmt.Sprintf("1..%d", until), "--to", "stdout")
	return strings.Count(out, `"subject":"stock.item.`+forgotten+`"`), err
}
