package pgserver

import (
	"errors"
	"net/url"
)

// InDatabase returns the URL of a server with another database. Its error does not show the URL, which may
// hold a password.
func InDatabase(server, database string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		return "", errors.New("--postgres.url must have the form postgres://user@host:port/database")
	}
	u.Path = "/" + database
	return u.String(), nil
}
