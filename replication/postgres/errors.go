package postgres

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/outbox"
)

// SQLSTATEs that Outflow branches on, by PostgreSQL's names.
const (
	StateInvalidPassword            = "28P01"
	StateInvalidAuthorization       = "28000"
	StateInvalidCatalogName         = "3D000"
	StateInvalidSchemaName          = "3F000"
	StateInsufficientPrivilege      = "42501"
	StateUndefinedColumn            = "42703"
	StateUndefinedObject            = "42704"
	StateDatatypeMismatch           = "42804"
	StateCannotCoerce               = "42846"
	StateDependentObjects           = "2BP01"
	StateDuplicateObject            = "42710"
	StateObjectInUse                = "55006"
	StateLockNotAvailable           = "55P03"
	StateNotInPrerequisiteState     = "55000"
	StateDiskFull                   = "53100"
	StateTooManyConnections         = "53300"
	StateConfigurationLimitExceeded = "53400"
	StateQueryCanceled              = "57014"
	StateUndefinedFile              = "58P01"
	StateUndefinedFunction          = "42883"
	StateFeatureNotSupported        = "0A000"
)

// SQLState is the SQLSTATE of the server's error in err; "" if there is none.
func SQLState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// connectError is a failed connection attempt. pgconn's own error carries the whole configuration, password
// included, to whoever prints its fields; this one keeps the text and the cause.
type connectError struct {
	text  string
	cause error // what the server said, or the context's end; nil: neither
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.cause }

// CodeConnect is the code of the transient fault of a PostgreSQL server that can't be reached or takes no
// connection now.
const CodeConnect = "postgres_connect"

// noTLS is pgconn's text for a server that answers a request for TLS with no.
const noTLS = "server refused TLS connection"

// connectFault says what a failed connection attempt means, for the setting that says where to connect to:
// what the server refuses for good is fatal, the rest is transient. Nothing of pgconn's text is taken over:
// it lists every attempt, each with its address.
func connectFault(setting string, err error) error {
	e := &connectError{text: reason(err)}
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg):
		e.text, e.cause = strings.Join(strings.Fields(pg.Error()), " "), pg
	case errors.Is(err, context.Canceled):
		e.cause = context.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		e.cause = context.DeadlineExceeded
	}
	at := server(setting, err)
	fatal := func(code, message, hint string) error { return Fatal(e, code, hint, "%s %s", at, message) }
	switch SQLState(err) {
	case StateInvalidPassword:
		return fatal("login", "refuses the password", "Set the right one in "+setting+
			", PGPASSWORD or the password file")
	case StateInvalidAuthorization:
		return fatal("login", "refuses the login",
			"Let the role log in and add a line for it, this database and this host to pg_hba.conf "+
				"(logical replication matches the database's name)")
	case StateInvalidCatalogName:
		return fatal("database_missing", "has no such database",
			"Name one that exists in "+setting)
	case StateInsufficientPrivilege:
		return fatal("no_replication_right", "does not let the role connect for replication",
			"ALTER ROLE ... REPLICATION (on managed platforms grant their replication role) and GRANT "+
				"CONNECT ON DATABASE")
	}
	f := &outbox.Fault{Class: outbox.Transient, Code: CodeConnect, Message: at + " can't be reached", Err: e,
		Hint: "See that it runs, and that host and port are right"}
	var (
		untrusted *tls.CertificateVerificationError
		unknownCA x509.UnknownAuthorityError // with verify-ca pgconn verifies it, and wraps nothing
		invalid   x509.CertificateInvalidError
	)
	switch {
	case pg != nil:
		f.Message, f.Hint = at+" takes no connection", ""
	case errors.As(err, &untrusted), errors.As(err, &unknownCA), errors.As(err, &invalid):
		f.Message = at + " has a certificate that is not accepted"
		f.Hint = "In " + setting + " sslrootcert has to name the authority that signed it, and the host " +
			"one of its names"
	case e.text == noTLS:
		f.Message = at + " offers no TLS"
		f.Hint = "Turn ssl on there, or, where nobody can listen, say sslmode=disable in " + setting
	}
	return f
}

// server names the server that a failed attempt was for: hosts, ports and database, as they were read.
func server(setting string, err error) string {
	var attempt *pgconn.ConnectError
	if !errors.As(err, &attempt) {
		return setting + ": PostgreSQL"
	}
	c := attempt.Config
	return fmt.Sprintf("%s: PostgreSQL at %s, database %q,", setting, strings.Join(hosts(c), " or "),
		cmp.Or(c.Database, c.User)) // as the server takes it
}

// hosts are the servers that a configuration names, each once.
func hosts(c *pgconn.Config) (all []string) {
	add := func(host string, port uint16) {
		if h := net.JoinHostPort(host, strconv.Itoa(int(port))); !slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	add(c.Host, c.Port)
	for _, f := range c.Fallbacks {
		add(f.Host, f.Port)
	}
	return all
}

// reason is what lies at the bottom of an error, each cause once: several attempts mostly fail alike.
func reason(err error) string {
	var all []string
	var collect func(error)
	collect = func(err error) {
		if several, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range several.Unwrap() {
				collect(e)
			}
			return
		}
		var dns *net.DNSError
		text := ""
		switch below := errors.Unwrap(err); {
		case below != nil && !errors.As(err, &dns):
			collect(below)
			return
		case dns != nil:
			text = dns.Err
		default:
			text = strings.Join(strings.Fields(err.Error()), " ")
		}
		if !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	collect(err)
	return strings.Join(all, "; ")
}

// Fatal makes a fatal fault. cause is what the server said; nil: nothing.
func Fatal(cause error, code, hint, format string, args ...any) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: fmt.Sprintf(format, args...), Hint: hint,
		Err: cause}
}
