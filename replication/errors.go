package replication

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/outbox"
)

// What callers branch on.
var (
	// ErrSlotInUse says that another connection holds the slot: wait, watch [Session.Slot], and call Start again.
	ErrSlotInUse = errors.New("the replication slot is in use")
	// ErrClosed says that the session was ended from our side, by Stop or Close.
	ErrClosed = errors.New("the replication session is closed")
)

// SQLSTATEs that decide something here.
const (
	codeInvalidPassword    = "28P01"
	codeInvalidAuth        = "28000"
	codeNoDatabase         = "3D000"
	codeNoSchema           = "3F000"
	codeNoPrivilege        = "42501"
	codeUndefinedColumn    = "42703"
	codeUndefinedObject    = "42704"
	codeTypeMismatch       = "42804"
	codeCannotCoerce       = "42846"
	codeDuplicateObject    = "42710"
	codeObjectInUse        = "55006"
	codeLockTimeout        = "55P03"
	codeNotInPrerequisite  = "55000"
	codeDiskFull           = "53100"
	codeConfigurationLimit = "53400"
	codeQueryCanceled      = "57014"
	codeUndefinedFile      = "58P01"
	codeUndefinedFunction  = "42883"
	codeNotSupported       = "0A000"
)

func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// connectError is a failed connection attempt. pgconn's own error carries the whole configuration, password included, to whoever
// prints its fields; this one keeps the text and the cause.
type connectError struct {
	text  string
	cause error // what the server said, or the context's end; nil: neither
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.cause }

// CodeConnect is the code of the transient fault of a PostgreSQL server that can't be reached or takes no connection now.
const CodeConnect = "postgres_connect"

// connectFault says what a failed connection attempt means, for the setting that says where to connect to: what the server refuses for good
// is fatal, the rest is transient. Of pgconn's text nothing is taken over: it holds every attempt, and each with its address.
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
	at := place(setting, err)
	fatal := func(code, what, cure string) error {
		return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: at + " " + what, Hint: cure, Err: e}
	}
	switch sqlState(err) {
	case codeInvalidPassword:
		return fatal("login", "refuses the password", "Set the right one in "+setting+", PGPASSWORD or the password file")
	case codeInvalidAuth:
		return fatal("login", "refuses the login",
			"Let the role log in and add a line for it, this database and this host to pg_hba.conf "+
				"(logical replication matches the database's name)")
	case codeNoDatabase:
		return fatal("database_missing", "has no such database", "Name the database that holds the outbox in "+setting)
	case codeNoPrivilege:
		return fatal("no_replication_right", "does not let the role connect for replication",
			"ALTER ROLE ... REPLICATION (on managed platforms grant their replication role) and GRANT CONNECT ON DATABASE")
	}
	f := &outbox.Fault{Class: outbox.Transient, Code: CodeConnect, Message: at + " can't be reached", Err: e,
		Hint: "See that it runs, and that host and port are right"}
	if pg != nil {
		f.Message, f.Hint = at+" takes no connection", ""
	}
	return f
}

// place names the server that a failed attempt was for: hosts, ports and database, as they were read.
func place(setting string, err error) string {
	var attempt *pgconn.ConnectError
	if !errors.As(err, &attempt) {
		return setting + ": PostgreSQL"
	}
	c := attempt.Config
	var hosts []string
	add := func(host string, port uint16) {
		if h := net.JoinHostPort(host, strconv.Itoa(int(port))); !slices.Contains(hosts, h) {
			hosts = append(hosts, h)
		}
	}
	add(c.Host, c.Port)
	for _, f := range c.Fallbacks {
		add(f.Host, f.Port)
	}
	database := c.Database
	if database == "" {
		database = c.User // as the server takes it
	}
	return fmt.Sprintf("%s: PostgreSQL at %s, database %q,", setting, strings.Join(hosts, " or "), database)
}

// reason is what lies at the bottom of an error, each once: what was tried several times mostly fails alike.
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

// fatal makes a fatal fault.
func fatal(code, cure, format string, args ...any) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: fmt.Sprintf(format, args...), Hint: cure}
}

const publicationCure = "Rows that were written while it did not exist are not in the stream of changes: " +
	"find out who dropped it, then run `outflow init`"

// emptyPublicationCure is that of a slot without a table.
const emptyPublicationCure = "Run `outflow init`: it makes an empty one. Nothing is missing for that. Where the server can't read the WAL from before it was " +
	"made, set publication to one that existed all the time, whatever it publishes"

// publicationMissing is what a stream or a peek finds; the catalog of the moment may say otherwise.
func publicationMissing(name string, table bool, cause error) *outbox.Fault {
	cure := publicationCure
	if !table {
		cure = emptyPublicationCure
	}
	f := fatal("publication_missing", cure, "publication %q does not exist at this point of the WAL", name)
	f.Err = cause
	return f
}
