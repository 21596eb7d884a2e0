package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// buttons are what the page of a demo can ask of the stage: a recorded session, and to kill everything.
type buttons struct {
	w       *world
	l       net.Listener
	plays   atomic.Int64
	playing context.Context
}

const (
	playOps   = 1200
	playPause = 60 * time.Millisecond
)

func newButtons(w *world) (*buttons, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w.stage = "http://" + l.Addr().String()
	return &buttons{w: w, l: l}, nil
}

// serve answers until ctx is cancelled.
func (b *buttons) serve(ctx context.Context) error {
	b.playing = ctx
	mux := http.NewServeMux()
	mux.HandleFunc("POST /play", b.play)
	mux.HandleFunc("POST /kill", b.kill)
	server := &http.Server{Handler: allow(b.w.url(), mux), ReadHeaderTimeout: 10 * time.Second}
	go func() {
		<-ctx.Done()
		_ = server.Close() // nothing is lost
	}()
	if err := server.Serve(b.l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// allow lets the service's page ask, and no other one.
func allow(page string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != page {
			http.Error(w, "only the demo's page may ask", http.StatusForbidden)
			return
		}
		w.Header().Set("Access-Control-Allow-Origin", page)
		h.ServeHTTP(w, r)
	})
}

// play types a recorded session into a document of its own.
func (b *buttons) play(w http.ResponseWriter, _ *http.Request) {
	n := b.plays.Add(1)
	t, err := newTypist(b.w.url(), fmt.Sprintf("recorded-%d", n), [2]string{"Ada", "Grace"}, playOps,
		uint64(n))
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	t.pause = playPause
	go func() {
		if err := t.run(b.playing, playOps, nil); err != nil && b.playing.Err() == nil {
			fmt.Println(err)
		}
	}()
	say(w, "Two people from a recording write in ", t.doc)
}

// kill kills everything, with both servers, and starts it again.
func (b *buttons) kill(w http.ResponseWriter, r *http.Request) {
	begun := time.Now()
	if err := b.w.killEverything(context.WithoutCancel(r.Context())); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	say(w, fmt.Sprintf("kill -9 for PostgreSQL, NATS, Outflow, the service, consumers and relays; all are "+
		"back after %.1f s.",
		time.Since(begun).Seconds()), "")
}

func say(w http.ResponseWriter, text, doc string) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{"text": text, "doc": doc}) // the page may have gone
}
