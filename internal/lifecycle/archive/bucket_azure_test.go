//go:build azure

package archive

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestWhatAzureRefusesIsDenied, for want of a right as well.
func TestWhatAzureRefusesIsDenied(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("x-ms-error-code", "AuthorizationPermissionMismatch")
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(s.Close)
	t.Setenv("AZURE_STORAGE_ACCOUNT", "anna")
	t.Setenv("AZURE_STORAGE_KEY", "aHVzaA==")
	store, err := Open(t.Context(), "azblob://past?protocol=http&domain="+s.Listener.Addr().String())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	refuses(t, store)
}

// TestAContainerOfAzureIsAStore: of Azure Blob Storage.
func TestAContainerOfAzureIsAStore(t *testing.T) {
	const key = "aHVzaA=="
	t.Setenv("AZURITE_ACCOUNTS", "anna:"+key)
	written := 0
	address := emulator(t, "azurite", "OUTFLOW_TEST_AZURITE", func(port, _ string) []string {
		return []string{"--blobHost", "127.0.0.1", "--blobPort", port, "--silent", "--inMemoryPersistence",
			"--skipApiVersionCheck", "--disableTelemetry"}
	}, func(r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("comp") == "block", q.Get("comp") == "blocklist":
			t.Errorf("an object is written in several parts: %s %s", r.Method, r.URL)
		case r.Header.Get("If-None-Match") == "*":
			written++
		}
	})
	at := "http://" + address + "/anna"
	t.Setenv("AZURE_STORAGE_ACCOUNT", "anna")
	t.Setenv("AZURE_STORAGE_KEY", key)
	c, err := container.NewClientFromConnectionString(
		"DefaultEndpointsProtocol=http;AccountName=anna;AccountKey="+key+";BlobEndpoint="+at, "past", nil)
	must.Succeed(t, err)
	_, err = c.Create(t.Context(), nil)
	must.Succeed(t, err)
	store, err := Open(t.Context(), "azblob://past?protocol=http&domain="+address+"&prefix=orders/")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, store.Close()) })
	isAStore(t, store)
	if written == 0 {
		t.Error("no object was created on condition")
	}
}
