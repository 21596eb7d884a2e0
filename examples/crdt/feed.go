package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

const (
	feedHeartbeat = 15 * time.Second // so that a proxy does not take silence for the end
	sendLimit     = 30 * time.Second // for a reader that does not read
)

// feed is GET /docs/{id}/feed?since=: server-sent events, each operation of the document after a version once
// and in order.
func (s *service) feed(w http.ResponseWriter, r *http.Request) {
	doc := r.PathValue("id")
	since, err := versionOf(r, "since")
	if again := r.Header.Get("Last-Event-ID"); err == nil && again != "" {
		since, err = strconv.ParseInt(again, 10, 64)
	}
	if err != nil {
		answerError(w, http.StatusBadRequest, err)
		return
	}
	out := &sse{w: w, flush: http.NewResponseController(w), version: since}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	if err := s.follow(r.Context(), doc, out); err != nil && r.Context().Err() == nil {
		s.log.Debug("a feed ends", "doc", doc, "err", err)
	}
}

func (s *service) follow(ctx context.Context, doc string, out *sse) error {
	feed, present := s.hub.join(doc)
	defer s.hub.leave(doc, feed)
	for _, data := range present {
		if err := out.send("presence", 0, data); err != nil {
			return err
		}
	}
	// From the database what is there already; from the stream what comes.
	if err := s.catchUp(ctx, doc, out); err != nil {
		return err
	}
	heartbeat := time.NewTicker(feedHeartbeat)
	defer heartbeat.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-heartbeat.C:
			err = out.comment()
		case n, ok := <-feed:
			switch {
			case !ok:
				return errors.New("the reader is too slow, or the service stops")
			case n.event == "op" && n.version <= out.version:
			case n.event == "op" && n.version > out.version+1:
				err = s.catchUp(ctx, doc, out)
			default:
				err = out.send(n.event, n.version, n.data)
			}
		}
		if err != nil {
			return err
		}
	}
}

// catchUp sends what the database has and the reader has not.
func (s *service) catchUp(ctx context.Context, doc string, out *sse) error {
	for {
		version, ops, err := s.store.since(ctx, doc, out.version)
		if err != nil {
			return err
		}
		for _, op := range ops {
			if err := out.send("op", out.version+1, op); err != nil {
				return err
			}
		}
		if out.version >= version || len(ops) == 0 {
			return out.comment()
		}
	}
}

// sse writes server-sent events.
type sse struct {
	w       io.Writer
	flush   *http.ResponseController
	version int64 // of the newest operation that was sent
}

func (s *sse) send(event string, version int64, data []byte) error {
	id := ""
	if event == "op" {
		s.version = version
		id = fmt.Sprintf("id: %d\n", version)
	}
	return s.write(fmt.Sprintf("%sevent: %s\ndata: %s\n\n", id, event, data))
}

func (s *sse) comment() error { return s.write(":\n\n") }

func (s *sse) write(text string) error {
	if err := s.flush.SetWriteDeadline(time.Now().Add(sendLimit)); err != nil {
		return err
	}
	if _, err := io.WriteString(s.w, text); err != nil {
		return err
	}
	return s.flush.Flush()
}
