package wiring

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// Where says which servers an installation is on, without secrets.
type Where struct {
	Postgres string `json:"postgres"` // user@host:port/database; "" if the setting can't be read
	NATS     string `json:"nats"`

	Consumers string `json:"-"` // the database of a consumer, like Postgres; "": none is asked
}

// WhereIs returns where the configuration leads.
func WhereIs(cfg config.Config) Where {
	return Where{Postgres: postgres.Target{URL: cfg.Postgres.URL}.String(), NATS: cfg.NATS.Server()}
}

func (w Where) String() string {
	s := "PostgreSQL " + w.Postgres + ", NATS " + w.NATS
	if w.Consumers != "" {
		s += ", consumers' database " + w.Consumers
	}
	return s
}

// Connect connects to NATS; its error says which setting says where.
func Connect(ctx context.Context, cfg config.Config, sc sink.Config) (*sink.Conn, error) {
	defer WaitNATS(ctx, cfg)()
	conn, err := sink.Connect(ctx, sc)
	if err != nil {
		return nil, at(cfg.NATS.Where(), err)
	}
	return conn, nil
}

// ConnectBroker connects a command that makes no messages.
func ConnectBroker(ctx context.Context, cfg config.Config, log *slog.Logger) (*sink.Conn, error) {
	sc, err := Broker(cfg, log)
	if err != nil {
		return nil, err
	}
	return Connect(ctx, cfg, sc)
}

// at says which setting an error is about; a fault says so itself, because run reports it without what it is
// wrapped in.
func at(setting string, err error) error {
	fault := outbox.FaultOf(err)
	switch {
	case fault == nil:
		return fmt.Errorf("%s: %w", setting, err)
	case strings.HasPrefix(fault.Message, setting):
		return err
	}
	named := *fault
	named.Message = setting + ": " + fault.Message
	return &named
}

// tryTimeout is how long each connection of TryConnections may take.
const tryTimeout = 5 * time.Second

// TryConnections opens a connection to each server with what the credential files hold now, closes it, and
// returns why that failed.
func TryConnections(ctx context.Context, cfg config.Config) (failed []error) {
	try := func(setting string, open func(context.Context) error) {
		ctx, cancel := context.WithTimeout(ctx, tryTimeout)
		defer cancel()
		if err := open(ctx); err != nil {
			failed = append(failed, at(setting, err))
		}
	}
	reach := func(t postgres.Target) func(context.Context) error {
		return func(ctx context.Context) error {
			conn, err := t.Connect(ctx)
			if err == nil {
				postgres.Close(conn)
			}
			return err
		}
	}
	c := Catalog(cfg)
	target := c.Target()
	try("postgres.url", func(ctx context.Context) error {
		if err := reach(target)(ctx); err != nil {
			return err
		}
		// The slot is read over one of these, which takes a right and a place of its own (max_wal_senders).
		conn, err := target.ConnectReplication(ctx)
		if err == nil {
			postgres.Close(conn)
		}
		if postgres.SQLState(err) == postgres.StateTooManyConnections {
			return nil // the last place may be the one that is open, and that says nothing about credentials
		}
		return err
	})
	if write := cfg.Postgres.WriteURL; write != cfg.Postgres.URL {
		const setting = "postgres.write_url"
		try(setting, reach(postgres.Target{Setting: setting, URL: write, Slot: cfg.Slot,
			Command: cfg.Command, Pooled: true}))
	}
	try(cfg.NATS.Where(), func(ctx context.Context) error {
		sc, err := Broker(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		conn, err := sink.Connect(ctx, sc)
		if err == nil {
			conn.Close()
		}
		return err
	})
	return failed
}

// WithStore opens a connection of its own to where the checkpoint record is.
func WithStore(ctx context.Context, cfg config.Config, do func(*checkpoint.Store) error) error {
	sc, err := Broker(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	conn, err := Connect(ctx, cfg, sc)
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(Store(cfg, conn))
}

// OpenSetup opens an ordinary connection to PostgreSQL.
func OpenSetup(ctx context.Context, cfg config.Config, c catalog.SetupConfig) (*catalog.Setup, error) {
	defer WaitPostgres(ctx, cfg)()
	return catalog.OpenSetup(ctx, c)
}

// openReplication opens a replication session that can stream.
func openReplication(ctx context.Context, cfg config.Config, rc replication.Config) (*replication.Session,
	error) {
	defer WaitPostgres(ctx, cfg)()
	return replication.Open(ctx, rc)
}

// Inspect opens a replication session that only asks, over one connection.
func Inspect(ctx context.Context, cfg config.Config, log *slog.Logger) (*replication.Session, error) {
	defer WaitPostgres(ctx, cfg)()
	return replication.Inspect(ctx, Replication(cfg, log))
}

// WaitPostgres shows that PostgreSQL is waited for until done is called, if that takes a while.
func WaitPostgres(ctx context.Context, cfg config.Config) (done func()) {
	return progress.Wait(ctx, "waiting for PostgreSQL at "+WhereIs(cfg).Postgres)
}

// WaitNATS shows that NATS is waited for until done is called, if that takes a while.
func WaitNATS(ctx context.Context, cfg config.Config) (done func()) {
	return progress.Wait(ctx, "waiting for NATS at "+WhereIs(cfg).NATS)
}
