//go:build gcs

package archive

import "github.com/outflowhq/outflow/internal/lifecycle/archive/gcsstore"

func init() { after = append(after, gcsstore.After) }
