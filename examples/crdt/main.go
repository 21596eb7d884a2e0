// Command crdt is a service for documents that several people write at the same time, with three projections
// that are built from its events. README.md says how to see it at work.
//
//	crdt setup      make the tables: before "outflow init"
//	crdt serve      the HTTP service and the page
//	crdt project    the three consumers: search index, audit log, billing
//	crdt relay      the polling relay beside it, for comparison
//	crdt relayed    the same three projections from the relay's stream
//	crdt verdict    rebuild the projections from nothing and compare
//
// DATABASE_URL and NATS_URL say where the servers are.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "crdt:", err)
		os.Exit(1)
	}
}

// run runs one command to its end.
func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("which command? setup, serve, project, relay, relayed or verdict")
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	listen := flags.String("listen", "127.0.0.1:8080", "serve: address")
	yjs := flags.String("yjs", "", "serve: folder with the packages yjs and lib0 (examples/crdt/fetch-yjs "+
		"prints it)")
	stage := flags.String("stage", "", "serve: address of the demo's stage, for the page's buttons")
	file := flags.String("json", "", "verdict: write it to this file as well")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("component", args[0])
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		return errors.New("DATABASE_URL is not set: postgres://user@host:port/database")
	}
	if args[0] == "setup" {
		return setup(ctx, url)
	}
	js, err := connect()
	if err != nil {
		return err
	}
	defer js.Conn().Close()
	switch args[0] {
	case "serve":
		return serve(ctx, url, js, *listen, *yjs, *stage, log)
	case "verdict":
		return printVerdict(ctx, newJudge(url, js, log), *file)
	case "project":
		return withPool(ctx, url, live, func(pool *pgxpool.Pool) error {
			return project(ctx, js, pool, live, log)
		})
	case "relayed":
		return withPool(ctx, url, relayed, func(pool *pgxpool.Pool) error {
			return projectRelayed(ctx, js, pool, log)
		})
	case "relay":
		if err := makeRelayStream(ctx, js); err != nil {
			return err
		}
		return withPool(ctx, url, relayed, func(pool *pgxpool.Pool) error {
			return relay(ctx, js, pool, log)
		})
	}
	return fmt.Errorf("no command %q: setup, serve, project, relay, relayed or verdict", args[0])
}

// connect connects to NATS, now or as soon as it is there.
func connect() (jetstream.JetStream, error) {
	url := os.Getenv("NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(250*time.Millisecond),
		nats.RetryOnFailedConnect(true))
	if err != nil {
		return nil, fmt.Errorf("NATS_URL: %w", err)
	}
	return jetstream.New(nc)
}

func withPool(ctx context.Context, url, schema string, do func(*pgxpool.Pool) error) error {
	pool, err := open(ctx, url, schema)
	if err != nil {
		return err
	}
	defer pool.Close()
	return do(pool)
}

// setup makes all tables. Safe to run again.
func setup(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return fmt.Errorf("DATABASE_URL cannot be read: %w", err)
	}
	defer pool.Close()
	if err := makeAll(ctx, pool, serviceSchema); err != nil {
		return err
	}
	for _, schema := range []string{live, relayed} {
		if err := withPool(ctx, url, schema, func(*pgxpool.Pool) error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

// printVerdict rebuilds, compares, and shows the outcome.
func printVerdict(ctx context.Context, j *judge, file string) error {
	v, err := j.rebuild(ctx)
	if err != nil {
		return err
	}
	if file != "" {
		b, err := json.Marshal(v)
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, b, 0o600); err != nil {
			return err
		}
	}
	if err := v.print(os.Stdout); err != nil {
		return err
	}
	if !v.Same {
		return errors.New("live and rebuilt projections differ")
	}
	return nil
}

const stopTimeout = 5 * time.Second // for requests that are under way

func serve(ctx context.Context, url string, js jetstream.JetStream, listen, yjs, stage string,
	log *slog.Logger) error {
	s, err := serviceParts(ctx, url, js, log)
	if err != nil {
		return err
	}
	defer s.store.pool.Close()
	defer s.views.Close()
	s.yjs, s.stage = yjs, stage
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second}
	g.Go(func() error { return s.hub.run(ctx) })
	g.Go(func() error {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		return server.Shutdown(end)
	})
	log.Info("serving", "url", "http://"+l.Addr().String()+"/")
	return g.Wait()
}
