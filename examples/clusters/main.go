// Command clusters is examples/clusters/demo: three clusters on this machine for the moment, each a
// PostgreSQL that takes writes and is replicated to the others, with an Outflow for each home. Links are cut,
// a cluster is killed and comes back, an Outflow sleeps; in the end each event is counted where it is read.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/examples/internal/stage"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

func main() {
	natsserver.Child()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	if err != nil && ctx.Err() != nil {
		err = errors.New("interrupted; nothing is left behind")
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "clusters:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var o options
	flag.StringVar(&o.outflow, "outflow", "../bin/outflow", "the program outflow")
	flag.IntVar(&o.events, "events", 300, "events that are written before each act")
	flag.StringVar(&o.mode, "mode", shared, "cluster.mode: shared or islands")
	flag.DurationVar(&o.delay, "delay", 5*time.Second, "cluster.maximum_delay: 5s or more")
	stage.ParseFlags("examples/clusters/demo [-mode shared] [-events 300] [-delay 5s]")
	if o.events < 50 {
		return fmt.Errorf("-events %d: want 50 or more", o.events)
	}
	if o.mode != shared && o.mode != islands {
		return fmt.Errorf("-mode %s: want %s or %s", o.mode, shared, islands)
	}
	if o.delay < 5*time.Second {
		return fmt.Errorf("-delay %v: want 5s or more", o.delay)
	}
	v, err := play(ctx, o, os.Stdout)
	if err != nil {
		return err
	}
	return v.good()
}

type options struct {
	outflow string        // the program
	events  int           // written before each act
	mode    string        // cluster.mode
	delay   time.Duration // cluster.maximum_delay
}

// play starts everything, plays the acts and prints the verdict. Nothing is left behind.
func play(ctx context.Context, o options, out io.Writer) (v verdict, err error) {
	ctx, cancel := context.WithCancel(ctx)
	m := &mesh{options: o, story: newStory(out), enough: make(chan struct{}),
		failed: make(chan error, 1)}
	defer func() {
		cancel()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, m.logs())
		}
		err = errors.Join(err, m.close())
	}()
	acts, judge := []func(context.Context) error{
		m.raise, m.begin, m.cutLink, m.killCluster, m.sleep, m.end,
	}, m.judge
	if o.mode == islands {
		acts, judge = []func(context.Context) error{
			m.raise, m.begin, m.killNATS, m.killIsland, m.sleepAlone, m.end,
		}, m.judgeTogether
	}
	for _, act := range acts {
		if err := act(ctx); err != nil {
			return nil, err
		}
	}
	if v, err = judge(ctx); err == nil {
		m.story.quiet()
		fmt.Fprint(out, v)
	}
	return v, err
}
