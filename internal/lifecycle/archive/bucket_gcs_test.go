//go:build gcs

package archive

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

// googleBucket opens a bucket of fake-gcs-server. see may change its requests.
func googleBucket(t *testing.T, see func(*http.Request)) Store {
	t.Helper()
	address := emulator(t, "fake-gcs", "OUTFLOW_TEST_FAKE_GCS", func(port, address string) []string {
		return []string{"-scheme", "http", "-host", "127.0.0.1", "-port", port, "-backend", "memory",
			"-public-host", address, "-external-url", "http://" + address}
	}, see)
	t.Setenv("STORAGE_EMULATOR_HOST", address)
	r, err := http.Post("http://"+address+"/storage/v1/b?project=p", "application/json", // its client's way
		strings.NewReader(`{"name": "past"}`))
	must.Succeed(t, err)
	must.Succeed(t, r.Body.Close())
	store, err := Open(t.Context(), "gs://past?prefix=orders/")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	return store
}

// TestABucketOfGoogleIsAStore: of Google Cloud Storage.
func TestABucketOfGoogleIsAStore(t *testing.T) {
	listed, written := 0, 0
	isAStore(t, googleBucket(t, func(r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("uploadType") == "resumable":
			t.Errorf("an object is written in several parts: %s %s", r.Method, r.URL)
		case q.Get("uploadType") != "":
			written++
		case q.Get("startOffset") != "":
			listed++
		}
	}))
	if listed == 0 || written == 0 {
		t.Errorf("the server was asked %d times for a part of a list, and to write %d objects", listed,
			written)
	}
}

// TestWhatGoogleRefusesIsNotMissing: an object that may not be read would count as lost.
func TestWhatGoogleRefusesIsNotMissing(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(s.Close)
	t.Setenv("STORAGE_EMULATOR_HOST", s.Listener.Addr().String())
	store, err := Open(t.Context(), "gs://past?prefix=orders/")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	refuses(t, store)
}

// TestABucketOfGoogleThatOverwritesIsRefused, as any other store.
func TestABucketOfGoogleThatOverwritesIsRefused(t *testing.T) {
	f := outbox.FaultOf(CheckCreate(t.Context(), googleBucket(t, func(r *http.Request) {
		q := r.URL.Query()
		q.Del("ifGenerationMatch")
		r.URL.RawQuery = q.Encode()
	})))
	if f == nil || f.Code != "archive_url" {
		t.Errorf("%v", f)
	}
}
