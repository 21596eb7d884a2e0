package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
)

//go:embed page
var page embed.FS

// service is the HTTP service: documents, a live feed of each, and what the projections hold.
type service struct {
	store *store
	hub   *hub
	views *pgxpool.Pool // the schema "live"
	judge *judge
	yjs   string // folder with the packages yjs and lib0
	stage string // address of the demo's stage; "": none
	log   *slog.Logger
}

func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /docs/{id}/ops", s.postOps)
	mux.HandleFunc("GET /docs/{id}/ops", s.getOps)
	mux.HandleFunc("GET /docs/{id}/feed", s.feed)
	mux.HandleFunc("POST /docs/{id}/presence", s.postPresence)
	mux.HandleFunc("GET /docs/{id}/projections", s.getProjections)
	mux.HandleFunc("GET /search", s.getSearch)
	mux.HandleFunc("GET /verdict", s.getVerdict)
	mux.HandleFunc("POST /verdict", s.postVerdict)
	mux.HandleFunc("GET /config", s.getConfig)
	mux.HandleFunc("GET /healthz", s.getHealth)
	mux.Handle("GET /yjs/", http.StripPrefix("/yjs/", library(s.yjs)))
	static, _ := fs.Sub(page, "page") // it is embedded
	mux.Handle("GET /", http.FileServerFS(static))
	return mux
}

// postOps stores operations: 200 says where they are, 409 which counter is expected, 412 that the edits were
// made on another version than the one that If-Match names.
func (s *service) postOps(w http.ResponseWriter, r *http.Request) {
	base, ops, err := readOps(w, r)
	if err != nil {
		answerError(w, http.StatusBadRequest, err)
		return
	}
	version, stored, err := s.store.append(r.Context(), r.PathValue("id"), base, ops)
	var conflict *conflictError
	var stale *staleError
	switch {
	case errors.As(err, &conflict):
		answer(w, http.StatusConflict, conflict)
	case errors.As(err, &stale):
		answer(w, http.StatusPreconditionFailed, stale)
	case err != nil:
		s.unavailable(w, r, err)
	default:
		answer(w, http.StatusOK, map[string]any{"version": version, "stored": stored})
	}
}

func readOps(w http.ResponseWriter, r *http.Request) (base int64, ops []Op, err error) {
	if err := validName("document", r.PathValue("id")); err != nil {
		return 0, nil, err
	}
	base = -1
	if match := r.Header.Get("If-Match"); match != "" {
		if base, err = strconv.ParseInt(strings.Trim(match, `"`), 10, 64); err != nil || base < 0 {
			return 0, nil, fmt.Errorf("If-Match %s: want the document's version, such as \"41\"", match)
		}
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&ops); err != nil {
		return 0, nil, fmt.Errorf("the body is no JSON array of operations: %w", err)
	}
	if len(ops) == 0 || len(ops) > maxOps {
		return 0, nil, fmt.Errorf("%d operations: want 1 to %d", len(ops), maxOps)
	}
	for i := range ops {
		if err := ops[i].validate(); err != nil {
			return 0, nil, fmt.Errorf("operation %d of the body: %w", i, err)
		}
	}
	return base, ops, nil
}

func (s *service) getOps(w http.ResponseWriter, r *http.Request) {
	since, err := versionOf(r, "since")
	if err != nil {
		answerError(w, http.StatusBadRequest, err)
		return
	}
	version, ops, err := s.store.since(r.Context(), r.PathValue("id"), since)
	if err != nil {
		s.unavailable(w, r, err)
		return
	}
	answer(w, http.StatusOK, map[string]any{"version": version, "ops": ops})
}

func (s *service) getSearch(w http.ResponseWriter, r *http.Request) {
	hits, err := findText(r.Context(), s.views,
		strings.ToValidUTF8(strings.ReplaceAll(r.FormValue("q"), "\x00", ""), ""))
	if err != nil {
		s.unavailable(w, r, err)
		return
	}
	answer(w, http.StatusOK, hits)
}

func (s *service) getProjections(w http.ResponseWriter, r *http.Request) {
	view, err := viewOf(r.Context(), s.views, r.PathValue("id"))
	if err != nil {
		s.unavailable(w, r, err)
		return
	}
	answer(w, http.StatusOK, view)
}

func (s *service) getVerdict(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, s.judge.last())
}

// postVerdict rebuilds the projections from the beginning of the stream and compares.
func (s *service) postVerdict(w http.ResponseWriter, r *http.Request) {
	v, err := s.judge.rebuild(r.Context())
	switch {
	case errors.Is(err, errRebuilding):
		answerError(w, http.StatusConflict, err)
	case err != nil:
		s.unavailable(w, r, err)
	default:
		answer(w, http.StatusOK, v)
	}
}

func (s *service) getConfig(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, map[string]any{"stage": s.stage, "yjs": s.yjs != ""})
}

func (s *service) getHealth(w http.ResponseWriter, r *http.Request) {
	if err := s.store.pool.Ping(r.Context()); err != nil {
		s.unavailable(w, r, err)
		return
	}
	answer(w, http.StatusOK, "ok")
}

// unavailable answers what the client can only try again. What PostgreSQL says is for the log.
func (s *service) unavailable(w http.ResponseWriter, r *http.Request, err error) {
	if !errors.Is(err, context.Canceled) {
		s.log.Warn("request failed", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	answerError(w, http.StatusServiceUnavailable,
		errors.New("not possible at the moment: send it again, a repeated operation is stored once"))
}

func versionOf(r *http.Request, name string) (int64, error) {
	text := r.FormValue(name)
	if text == "" {
		return 0, nil
	}
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v < 0 {
		return 0, fmt.Errorf("%s=%q: want a version, 0 or more", name, text)
	}
	return v, nil
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may have gone
}

func answerError(w http.ResponseWriter, status int, err error) {
	answer(w, status, map[string]string{"error": err.Error()})
}

// library serves the modules of yjs and lib0 as they are in their packages.
func library(dir string) http.Handler {
	if dir == "" {
		return http.NotFoundHandler()
	}
	return http.FileServer(http.Dir(dir))
}

// serviceParts makes what the service is wired from.
func serviceParts(ctx context.Context, url string, js jetstream.JetStream, log *slog.Logger) (*service,
	error) {
	base, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL cannot be read: %w", err)
	}
	st, err := newStore(base)
	if err != nil {
		return nil, err
	}
	views, err := open(ctx, url, live)
	if err != nil {
		return nil, err
	}
	return &service{store: st, hub: newHub(js, log), views: views, judge: newJudge(url, js, log), log: log},
		nil
}
