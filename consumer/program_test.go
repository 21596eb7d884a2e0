package consumer

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/outbox"
)

// Main is a program: addresses from the environment, an end by a signal.
//
//nolint:paralleltest // the environment and the signal are the process's
func TestMainRunsUntilASignal(t *testing.T) {
	w, s := newHarness(t), &publisher{}
	js, nc := realStream(t, jetstream.StreamConfig{})
	all := s.events(20, 4)
	publish(t, js, all...)
	t.Setenv("DATABASE_URL", w.url)
	t.Setenv("NATS_URL", nc.ConnectedUrl())
	last := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- Main(context.Background(), Config{Name: "orders", Log: w.log, Partitions: 1, Batch: 1},
			func(ctx context.Context, tx pgx.Tx, e *Event) error {
				if e.seq == 20 {
					defer close(last)
				}
				return handler(ctx, tx, e)
			})
	}()
	select {
	case <-last:
	case err := <-ended:
		t.Fatal(err)
	}
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	w.exactly(all)
}

//nolint:paralleltest // the environment is the process's
func TestMainSaysWhichAddressIsMissing(t *testing.T) {
	const database = "postgres://u:secret@127.0.0.1:1/x"
	for _, c := range [][3]string{
		{"", "nats://127.0.0.1:1", "DATABASE_URL is not set"},
		{"postgres://u:secret@h:port/x", "nats://127.0.0.1:1", "DATABASE_URL can't be read"},
		{database, "", "NATS_URL is not set"},
		{database, "nats://u:p/secret@h", "NATS_URL can't be used: it is no URL"},
		{database + "?pool_max_conns=1", "nats://127.0.0.1:1", "1 connections for 1 consumers"},
	} {
		t.Setenv("DATABASE_URL", c[0])
		t.Setenv("NATS_URL", c[1])
		err := Main(t.Context(), Config{Name: "orders"}, handler)
		if f := outbox.FaultOf(err); !errors.Is(err, ErrSetup) || f.Hint == "" ||
			!strings.Contains(err.Error(), c[2]) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v, want %s", err, c[2])
		}
	}
	if err := Main(t.Context(), Config{}, handler); err == nil || !strings.Contains(err.Error(), "Name") {
		t.Errorf("without a name: %v", err)
	}
}
