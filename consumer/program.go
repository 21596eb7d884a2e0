package consumer

import (
	"context"
	"errors"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Main is the whole of a program that is one consumer. It connects to the PostgreSQL database at the address
// in DATABASE_URL, where the offsets and the handler's effects are, and to the NATS server at NATS_URL. It
// runs the consumer until ctx ends, or a SIGINT or SIGTERM comes, and then returns nil after a clean stop.
// Servers that can't be reached are waited for. Errors are those of [New] and [Consumer.Run].
//
// The pool has Partitions + 2 connections, unless DATABASE_URL says pool_max_conns. What needs more than the
// two addresses, such as credentials in a file, another database driver, metrics or [State], calls [New].
func Main(ctx context.Context, cfg Config, h Handler) (err error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	valid, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	pool, err := openPool(ctx, os.Getenv("DATABASE_URL"), &valid)
	if err != nil {
		return err
	}
	defer pool.Close()
	nc, err := openNATS(os.Getenv("NATS_URL"), cfg.Name)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	c, err := New(js, Postgres(pool), cfg)
	if err != nil {
		return err
	}
	return c.Run(ctx, h)
}

// openPool does not connect yet.
func openPool(ctx context.Context, address string, cfg *Config) (*pgxpool.Pool, error) {
	if address == "" {
		return nil, fault(ErrSetup, nil, "Set it to the address of the database, such as "+
			"postgres://user@host/database", "DATABASE_URL is not set")
	}
	pooled, err := pgxpool.ParseConfig(address) // its error has no password
	if err != nil {
		return nil, fault(ErrSetup, err, "Set it to the address of the database, such as "+
			"postgres://user@host/database", "DATABASE_URL can't be read")
	}
	if !strings.Contains(address, "pool_max_conns") {
		pooled.MaxConns = int32(cfg.Partitions + 2) //nolint:gosec // maxPartitions
	}
	if params := pooled.ConnConfig.RuntimeParams; params["application_name"] == "" {
		params["application_name"] = "consumer " + cfg.Name
	}
	return pgxpool.NewWithConfig(ctx, pooled)
}

// openNATS returns also while no server can be reached: the client goes on trying.
func openNATS(address, name string) (*nats.Conn, error) {
	if address == "" {
		return nil, fault(ErrSetup, nil, "Set it to the address of the server, such as nats://host:4222",
			"NATS_URL is not set")
	}
	nc, err := nats.Connect(address, nats.Name("consumer "+name), nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true), nats.Timeout(10*time.Second))
	var unreadable *url.Error
	if errors.As(err, &unreadable) { // it quotes the address, which may hold a password
		err = errors.New("it is no URL")
	}
	if err != nil {
		return nil, fault(ErrSetup, err, "Set it to the address of the server, such as nats://host:4222",
			"NATS_URL can't be used")
	}
	return nc, nil
}
