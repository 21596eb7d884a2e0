package postgres

import (
	"strings"

	"github.com/jackc/pgx/v5"
)

// Quote quotes an identifier.
func Quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// Literal quotes a string, for SQL with standard_conforming_strings and for the replication grammar, which
// knows no backslashes.
func Literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
