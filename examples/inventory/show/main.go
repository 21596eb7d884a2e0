// Command show plays the warehouse: old payloads and new ones, a deploy that counts wrong, and its repair; a
// past that is in the archive alone, and what is made of it; an item that is erased; and a verdict that is
// computed from the stream.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/outflowhq/outflow/examples/internal/stage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; nothing is left behind")
		}
		fmt.Fprintln(os.Stderr, "inventory:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var p play
	flag.StringVar(&p.outflow, "outflow", "outflow", "the program outflow")
	flag.StringVar(&p.binary, "inventory-binary", "inventory", "the program of the example")
	flag.StringVar(&p.config, "config", "outflow.yaml", "outflow's configuration")
	flag.StringVar(&p.schema, "schema", "schema.sql", "the example's tables")
	flag.IntVar(&p.events, "events", 3000, "movements of stock")
	stage.ParseFlags("examples/inventory/demo [-events 3000]")
	if p.events < 300 {
		return fmt.Errorf("-events %d: want 300 or more", p.events)
	}
	p.events = (p.events + 5) / 6 * 6 // they come in sixths
	v, err := p.run(ctx)
	if err != nil {
		return err
	}
	fmt.Print(v)
	if !v.good() {
		return errors.New("the verdict is not good")
	}
	return nil
}

// play is one performance.
type play struct {
	outflow, binary, config, schema string
	events                          int

	*stage.Stage
	moved int // events that were written
}

func (p *play) run(ctx context.Context) (v verdict, err error) {
	schema, err := os.ReadFile(p.schema)
	if err != nil {
		return v, err
	}
	config, err := filepath.Abs(p.config)
	if err != nil {
		return v, err
	}
	p.Stage, err = stage.Raise(ctx, stage.Options{Outflow: p.outflow, Config: config, Schema: string(schema),
		Archive: true, Out: os.Stdout})
	if err != nil {
		return v, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if _, err := p.Outflow(ctx); err != nil {
		return v, err
	}
	if _, err := p.Start("maintain", p.outflow, "maintain"); err != nil {
		return v, err
	}
	for _, act := range []func(context.Context, *verdict) error{p.deploys, p.rebuild, p.past,
		p.forget} {
		if err := act(ctx, &v); err != nil {
			return v, err
		}
	}
	return v, nil
}

// deploys has a good consumer, a bad one, and the repair by a third.
func (p *play) deploys(ctx context.Context, v *verdict) error {
	p.Say("\n%d movements of stock, in payloads of three versions", p.events)
	stock, err := p.deploy("1")
	if err != nil {
		return err
	}
	for format := range 3 { // rows without a version, version 1, version 2
		if err := p.move(ctx, p.events/6, format); err != nil {
			return err
		}
	}
	if err := p.Until(ctx, "deploy 1 has counted", p.counted); err != nil {
		return err
	}
	if v.before, err = p.wrong(ctx); err != nil {
		return err
	}
	p.Say("deploy 1   has counted %d events; %d of the items are wrong", p.moved, v.before)
	if err := stock.Stop(ctx); err != nil {
		return err
	}

	if stock, err = p.deploy("2", "-bug"); err != nil {
		return err
	}
	if err := p.move(ctx, p.events/6, 3); err != nil {
		return err
	}
	if err := stock.Kill(); err != nil { // it counts wrong, but each event once
		return err
	}
	if err := stock.Again(); err != nil {
		return err
	}
	if err := p.Until(ctx, "deploy 2 has counted", p.counted); err != nil {
		return err
	}
	if v.bad, err = p.wrong(ctx); err != nil {
		return err
	}
	p.Say("deploy 2   was killed on the way and went on; it has a bug: %d of the items are wrong", v.bad)

	// Movements go on while it is repaired.
	writer, err := p.Start("move", p.binary, "move", "-events", fmt.Sprint(p.events/3), "-format", "3")
	if err != nil {
		return err
	}
	p.moved += p.events / 3
	if _, err := p.Run(ctx, p.binary, "undo", "-deploy", "2"); err == nil {
		return errors.New("undo did not refuse while the consumer runs")
	}
	if err := stock.Stop(ctx); err != nil {
		return err
	}
	var first string // the instance that was killed counts as active for as long as it has said
	err = p.Until(ctx, "no instance is active", func(ctx context.Context) (err error) {
		first, err = p.Run(ctx, p.binary, "undo", "-deploy", "2")
		return err
	})
	if err != nil {
		return err
	}
	first = strings.TrimSpace(first)
	p.Say("undo       takes back what was counted from event %s on", first)
	if err := p.rewind(ctx, first); err != nil {
		return err
	}
	if stock, err = p.deploy("3"); err != nil {
		return err
	}
	if err := errors.Join(writer.Wait(ctx), p.Until(ctx, "deploy 3 has counted", p.counted)); err != nil {
		return err
	}
	if v.after, err = p.wrong(ctx); err != nil {
		return err
	}
	p.Say("deploy 3   has counted them again, and what came meanwhile: %d of the items are wrong", v.after)
	return stock.Stop(ctx)
}

// rebuild makes the projection from nothing, and compares it with the one that had lived through all that.
func (p *play) rebuild(ctx context.Context, v *verdict) error {
	lived, err := p.projection(ctx)
	if err != nil {
		return err
	}
	if _, err := p.DB.Exec(ctx, "TRUNCATE stock, ledger"); err != nil {
		return err
	}
	if err := p.rewind(ctx, "1"); err != nil {
		return err
	}
	stock, err := p.deploy("3")
	if err != nil {
		return err
	}
	if err := p.Until(ctx, "everything is counted again", p.counted); err != nil {
		return err
	}
	if err := stock.Stop(ctx); err != nil {
		return err
	}
	again, err := p.projection(ctx)
	v.events, v.bytes, v.rebuilt = p.moved, len(lived), lived == again
	return err
}

// deploy starts the consumer.
func (p *play) deploy(version string, flags ...string) (*stage.Actor, error) {
	return p.Start("stock-"+version, p.binary, append([]string{"stock", "-lease", "3s", "-deploy", version},
		flags...)...)
}

func (p *play) move(ctx context.Context, n, format int) error {
	p.moved += n
	_, err := p.Run(ctx, p.binary, "move", "-events", fmt.Sprint(n), "-format", fmt.Sprint(format))
	return err
}

// rewind sets the consumer back so that this event is the next.
func (p *play) rewind(ctx context.Context, sequence string) error {
	_, err := p.Command(ctx, "consumer", "rewind", "stock", "--to", "seq:"+sequence, "--yes")
	return err
}
