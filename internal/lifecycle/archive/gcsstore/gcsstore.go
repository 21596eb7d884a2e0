// Package gcsstore is what the archive asks of Google Cloud Storage beyond gocloud.dev/blob. It is apart from
// the archive because a program that imports it has the client of Google's in memory.
//
// It is internal to Outflow: its API may change at any time.
package gcsstore

import (
	"cloud.google.com/go/storage"
	_ "gocloud.dev/blob/gcsblob" // gs://
)

// After lets a list begin at a name, within its folder. It is a BeforeList.
func After(name string, as func(any) bool) error {
	var list *storage.Query
	if as(&list) {
		list.StartOffset = list.Prefix + name
	}
	return nil
}
