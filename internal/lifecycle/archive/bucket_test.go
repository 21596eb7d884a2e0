package archive

import (
	"bytes"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lifecycle/archive/s3store"
	"github.com/outflowhq/outflow/outbox"
)

// bucketOf opens a bucket of an S3 server. wrap may change what that does.
func bucketOf(t *testing.T, wrap func(http.Handler) http.Handler) Store {
	t.Helper()
	backend := s3mem.New()
	must.Succeed(t, backend.CreateBucket("past"))
	s := httptest.NewServer(wrap(gofakes3.New(backend,
		gofakes3.WithLogger(gofakes3.StdLog(log.New(io.Discard, "", 0)))).Server()))
	t.Cleanup(s.Close)
	store, err := Open(t.Context(), "s3://past?region=eu-central-1&use_path_style=true&prefix=orders/"+
		"&endpoint="+s.URL)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	return store
}

func init() { whole, after = s3store.Whole, append(after, s3store.After) }

func credentials(t *testing.T) {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "anna")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hush")
}

// TestABucketIsAStore: of S3.
func TestABucketIsAStore(t *testing.T) {
	credentials(t)
	listed := 0
	store := bucketOf(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			if q.Has("uploads") || q.Has("uploadId") {
				t.Errorf("an object is written in several parts: %s %s", r.Method, r.URL)
			}
			if q.Get("start-after") != "" {
				listed++
			}
			h.ServeHTTP(w, r)
		})
	})
	isAStore(t, store)
	if listed == 0 {
		t.Error("the server was never asked for a part of a list")
	}
}

// isAStore: a bucket holds what a folder holds, one object at a time and as an archive, and a list has only
// what is asked for. That each object is written by one request, for which CheckCreate speaks, is for the
// caller to see.
func isAStore(t *testing.T, store Store) {
	t.Helper()
	ctx := t.Context()
	must.Succeed(t, CheckCreate(ctx, store))
	must.Succeed(t, CheckCreate(ctx, store))
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<20+1) // the clients would divide it
	for name, data := range map[string][]byte{"v1/S/1.json": []byte("{}"), "v1/S/1.zst": large, "v1/a": {0}} {
		must.Succeed(t, store.Create(ctx, name, data))
		if err := store.Create(ctx, name, []byte("another")); !errors.Is(err, ErrExists) {
			t.Errorf("%s was created twice: %v", name, err)
		}
		got, err := store.Read(ctx, name, int64(len(data)))
		must.Succeed(t, err)
		if !bytes.Equal(got, data) {
			t.Errorf("%s has %d bytes, not %d", name, len(got), len(data))
		}
		if _, err := store.Read(ctx, name, int64(len(data))-1); err == nil {
			t.Errorf("%s is read beyond the limit", name)
		}
	}
	if _, err := store.Read(ctx, "v1/S/2.json", 10); !errors.Is(err, ErrMissing) {
		t.Errorf("what is not there: %v", err)
	}
	names, err := store.List(ctx, "v1/", "")
	must.Succeed(t, err)
	if !slices.Equal(names, []string{"S/", "a", "create-if-absent"}) {
		t.Errorf("%q", names)
	}
	names, err = store.List(ctx, "v1/S/", "1.json")
	must.Succeed(t, err)
	if !slices.Equal(names, []string{"1.zst"}) {
		t.Errorf("behind 1.json: %q", names)
	}
	must.Succeed(t, store.Replace(ctx, "v1/S/1.json", []byte("{1}")))
	if got, err := store.Read(ctx, "v1/S/1.json", 10); string(got) != "{1}" {
		t.Errorf("what was replaced is %q, %v", got, err)
	}

	a := load(t, store, nil)
	must.Succeed(t, add(t, a, 100))
	must.Succeed(t, add(t, a, 150))
	n := uint64(0)
	must.Succeed(t, load(t, store, nil).Read(ctx, 1, func(m *Message) error {
		n++
		if m.Seq != n || m.Hash() != message(n).Hash() {
			t.Errorf("message %d is %+v", n, m)
		}
		return nil
	}))
	if folders, err := Folders(ctx, store, "S"); err != nil || n != 150 || len(folders) != 1 {
		t.Errorf("%d messages in %v, %v", n, folders, err)
	}
}

// TestABucketThatAnswersInChunksIsAStore: a proxy before it passes objects on as they come, and says no size.
func TestABucketThatAnswersInChunksIsAStore(t *testing.T) {
	credentials(t)
	isAStore(t, bucketOf(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				w = sizeless{w}
			}
			h.ServeHTTP(w, r)
		})
	}))
}

type sizeless struct{ http.ResponseWriter }

func (w sizeless) WriteHeader(status int) {
	w.Header().Del("Content-Length")
	w.ResponseWriter.WriteHeader(status)
}

func (w sizeless) Write(p []byte) (int, error) {
	w.Header().Del("Content-Length")
	return w.ResponseWriter.Write(p)
}

// TestABucketThatRefusesSaysSo, whatever is asked of it.
func TestABucketThatRefusesSaysSo(t *testing.T) {
	credentials(t)
	store := bucketOf(t, func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, "<Error><Code>AccessDenied</Code></Error>")
		})
	})
	refuses(t, store)
}

// refuses: a store that answers nothing but 403 says so, whatever is asked.
func refuses(t *testing.T, store Store) {
	t.Helper()
	_, read := store.Read(t.Context(), "v1/S/1.json", 10)
	_, list := store.List(t.Context(), "v1/S/", "")
	for _, err := range []error{read, list, store.Create(t.Context(), "v1/S/1.json", []byte("{}")),
		store.Replace(t.Context(), "v1/S/1.json", []byte("{}"))} {
		if f := outbox.FaultOf(err); f == nil || f.Code != "archive_denied" {
			t.Error(err)
		}
	}
}

// TestAStoreThatOverwritesIsRefused: the promise rests on conditional writes, which not every server has.
func TestAStoreThatOverwritesIsRefused(t *testing.T) {
	credentials(t)
	store := bucketOf(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-None-Match")
			h.ServeHTTP(w, r)
		})
	})
	f := outbox.FaultOf(CheckCreate(t.Context(), store))
	if f == nil || f.Code != "archive_url" {
		t.Errorf("%v", f)
	}
}
