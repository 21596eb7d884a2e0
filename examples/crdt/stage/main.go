// Command stage is examples/crdt/demo: it starts PostgreSQL, NATS, Outflow, the service, its consumers and
// the polling relays for the moment, and leaves nothing behind. With -check nobody looks on: recorded
// sessions are typed while everything is killed, and it ends with the verdict.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/examples/internal/stage"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// errInterrupted takes the place of whatever a signal has cut.
var errInterrupted = errors.New("interrupted; nothing is left behind")

func main() {
	natsserver.Child()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "crdt:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	var o options
	flag.StringVar(&o.outflow, "outflow", "bin/outflow", "Outflow's binary")
	flag.StringVar(&o.crdt, "crdt", "bin/crdt", "the example's binary")
	flag.StringVar(&o.yjs, "yjs", "", "folder with the packages yjs and lib0")
	flag.StringVar(&o.listen, "listen", "", "address of the page; empty: a free port")
	check := flag.Bool("check", false, "no page: type, kill, rebuild, and end with the verdict")
	stage.ParseFlags("examples/crdt/demo [--check] [--listen 127.0.0.1:8080]")

	if err := free(o.listen); err != nil {
		return err
	}
	w := &world{options: o}
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = errInterrupted
		}
		err = errors.Join(err, w.close())
	}()
	if *check {
		return w.check(ctx)
	}
	return w.show(ctx)
}

// free says that the page's address can be had, before anything is started.
func free(address string) error {
	if address == "" {
		return nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("-listen %s: %w. Name a free address, or leave it out", address, err)
	}
	return l.Close()
}

// check runs the scenario and prints the verdict.
func (w *world) check(ctx context.Context) error {
	fmt.Println("starting PostgreSQL, NATS, Outflow, the service, three consumers, two polling relays")
	if err := w.start(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, w.logs())
	}
	fmt.Printf("two people type into each of %d documents, from a recorded session; meanwhile\n", documents)
	begun := time.Now()
	v, _, err := w.scenario(ctx, os.Stdout)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, w.logs())
	}
	fmt.Printf(
		"then the projections are dropped and built again from the first event (%.1f s in all)\n\n%s\n",
		time.Since(begun).Seconds(), v.table)
	if err := v.good(); err != nil {
		return err
	}
	fmt.Println("Live and rebuilt are equal, byte for byte. The polling relay's projections are not.")
	return nil
}

// show lets people try it until Ctrl-C.
func (w *world) show(ctx context.Context) error {
	s, err := newButtons(w)
	if err != nil {
		return err
	}
	if err := w.start(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, w.logs())
	}
	if w.yjs == "" {
		fmt.Println("the CRDT library is not here, so the page cannot edit: see examples/crdt/fetch-yjs")
	}
	fmt.Printf("\nOpen it twice, side by side:\n\n  %s/?doc=note&as=Ada\n  %s/?doc=note&as=Grace\n\n",
		w.url(), w.url())
	fmt.Println("Ctrl-C ends it and leaves nothing behind.")
	return s.serve(ctx)
}
