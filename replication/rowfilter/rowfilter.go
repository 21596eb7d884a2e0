// Package rowfilter is the condition that divides an outbox table into shards: the row filter of a shard's
// publication, and the same condition wherever the table itself is read.
//
// It is internal to Outflow: its API may change at any time.
package rowfilter

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/internal/relay"
)

// MinVersion is the first PostgreSQL that has row filters, as in server_version_num.
const MinVersion = 150000

// Condition is the condition of a shard's rows; "" for a table that is not divided. column is the column that
// decides, as it stands in SQL. Each row belongs to exactly one shard.
//
// A row filter may call immutable built-in functions only, which casts to text mostly are not. hash_array
// takes every built-in type that has a hash, and NULL. PostgreSQL prints a filter that was written like this
// in the same words again.
func Condition(s relay.Shard, column string) string {
	if s.Whole() {
		return ""
	}
	return fmt.Sprintf("(((hash_array(ARRAY[%s]) & 2147483647) %% %d) = %d)", column, s.Of, s.Index)
}

var printed = lazyregexp.New(`^\(\(\(hash_array\(ARRAY\[(.+)\]\) & 2147483647\) % (\d+)\) = (\d+)\)$`)

// Parse reads a filter as PostgreSQL prints it: which shard, in the form index/number, and by which column.
// ok is false for a filter that is not Outflow's.
func Parse(filter string) (shard, column string, ok bool) {
	m := printed().FindStringSubmatch(filter)
	if m == nil {
		return "", "", false
	}
	return m[3] + "/" + m[2], m[1], true
}
