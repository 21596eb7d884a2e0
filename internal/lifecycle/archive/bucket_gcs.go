//go:build gcs

package archive

import "github.com/outflowhq/outflow/internal/lifecycle/archive/gcsstore"

func init() { after, denies = append(after, gcsstore.After), append(denies, gcsstore.Denied) }
