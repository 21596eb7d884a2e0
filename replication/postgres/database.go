package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// A Database is what a connection leads to.
type Database struct {
	System string // the identifier of the server, which its standbys have as well
	Name   string
}

func (d Database) String() string { return fmt.Sprintf("database %s of system %s", d.Name, d.System) }

// Identify says which database a connection leads to, also through a pooler. A platform may hide the system
// from the role, with StateInsufficientPrivilege: then it is not known. What changes rows must not guess, and
// refuses; ticks are written all the same, since elsewhere they are only missed.
func Identify(ctx context.Context, conn *pgx.Conn) (d Database, err error) {
	err = conn.QueryRow(ctx, `SELECT s.system_identifier::pg_catalog.text, pg_catalog.current_database()
		FROM pg_catalog.pg_control_system() s`).Scan(&d.System, &d.Name)
	if err != nil {
		err = fmt.Errorf("ask which database the connection leads to: %w", err)
	}
	return d, err
}

// Check refuses, by a fault with the code, a connection of a setting that leads to another database. Where
// that is not known the error is that of Identify.
func (d Database) Check(ctx context.Context, conn *pgx.Conn, code, setting string) error {
	is, err := Identify(ctx, conn)
	if err == nil && is != d {
		err = Fatal(nil, code, "", "%s leads to %v, postgres.url to %v", setting, is, d)
	}
	return err
}
