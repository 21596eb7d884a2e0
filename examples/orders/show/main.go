// Command show plays the shop: customers order, everything is killed on the way, and a verdict is read from
// the database and the stream.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
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
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var p play
	flag.StringVar(&p.outflow, "outflow", "outflow", "the program outflow")
	flag.StringVar(&p.binary, "orders-binary", "orders", "the program of the example")
	flag.StringVar(&p.config, "config", "outflow.yaml", "outflow's configuration")
	flag.StringVar(&p.schema, "schema", "schema.sql", "the example's tables")
	flag.IntVar(&p.orders, "orders", 3000, "orders that are placed")
	stage.ParseFlags("examples/orders/demo [-orders 3000]")
	if p.orders < len(acts) {
		return fmt.Errorf("-orders %d: want %d or more", p.orders, len(acts))
	}
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
	orders                          int

	*stage.Stage
	api       string // its URL
	shop      *stage.Actor
	streamer  *stage.Actor
	reservers [2]*stage.Actor
}

// stock is what there is of each item in the beginning: of some too little.
var stock = map[string]int{"tea": 100_000, "coffee": 100_000, "cocoa": 100_000, "sugar": 100_000, "milk": 300,
	"honey": 40, "mint": 0}

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
		Out: os.Stdout})
	if err != nil {
		return v, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for item, n := range stock {
		if _, err := p.DB.Exec(ctx, "INSERT INTO stock (item, available) VALUES ($1, $2)", item,
			n); err != nil {
			return v, err
		}
	}
	if err := p.enter(ctx); err != nil {
		return v, err
	}
	p.Say("\n%d orders, and everything is killed on the way:", p.orders)
	if err := p.perform(ctx); err != nil {
		return v, err
	}
	if err := p.Until(ctx, "the stream has an answer to each order", p.answered); err != nil {
		return v, err
	}
	for _, a := range []*stage.Actor{p.shop, p.reservers[0], p.reservers[1], p.streamer} {
		if err := a.Stop(ctx); err != nil {
			return v, err
		}
	}
	return p.judge(ctx)
}
