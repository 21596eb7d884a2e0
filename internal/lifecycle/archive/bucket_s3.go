//go:build s3

package archive

import "github.com/outflowhq/outflow/internal/lifecycle/archive/s3store"

// Every outflow run would have it in memory.
func init() { whole, after = s3store.Whole, append(after, s3store.After) }
