// Package gcsstore is what the archive asks of Google Cloud Storage beyond gocloud.dev/blob. It is apart from
// the archive because a program that imports it has the client of Google's in memory.
package gcsstore

import (
	"errors"
	"net/http"

	"cloud.google.com/go/storage"
	_ "gocloud.dev/blob/gcsblob" // gs://
	"google.golang.org/api/googleapi"
)

// Denied reports whether the store has refused a request. The driver calls that NotFound.
func Denied(err error) bool {
	var e *googleapi.Error
	return errors.As(err, &e) && e.Code == http.StatusForbidden
}

// After lets a list begin at a name, within its folder. It is a BeforeList.
func After(name string, as func(any) bool) error {
	var list *storage.Query
	if as(&list) {
		list.StartOffset = list.Prefix + name
	}
	return nil
}
