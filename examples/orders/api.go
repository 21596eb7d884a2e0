package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/producer"
)

// shop is the service that takes orders.
type shop struct {
	pool   *pgxpool.Pool
	outbox *producer.Outbox
}

const (
	maxBody     = 4 << 10
	stopTimeout = 5 * time.Second
)

// serve answers until ctx ends.
func serve(ctx context.Context, listen string, outbox *producer.Outbox) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	s := &shop{pool: pool, outbox: outbox}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /orders/{id}", s.put)
	server := &http.Server{Addr: listen, Handler: mux, ReadHeaderTimeout: stopTimeout}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		stopped <- server.Shutdown(last)
	})
	err = server.ListenAndServe()
	if !errors.Is(err, http.ErrServerClosed) || stop() {
		return err
	}
	return <-stopped
}

// put takes an order. The customer chooses its id, so that it can be sent again until an answer comes.
func (s *shop) put(w http.ResponseWriter, r *http.Request) {
	var o order
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&o); err != nil {
		http.Error(w, "the body is no order: "+err.Error(), http.StatusBadRequest)
		return
	}
	o.ID = r.PathValue("id")
	if err := o.check(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	placed, err := s.place(r.Context(), o)
	switch {
	case err != nil:
		slog.Error("an order was not placed", "order", o.ID, "err", err)
		http.Error(w, "try again", http.StatusServiceUnavailable)
	case placed:
		w.WriteHeader(http.StatusCreated)
	default:
		w.WriteHeader(http.StatusOK)
	}
}
