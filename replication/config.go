package replication

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Config says which server, slot, publication and table.
type Config struct {
	URL         string // connection URL or keyword string; empty: libpq's PG* environment
	WriteURL    string // for ticks and changes of settings; empty: URL
	Slot        string
	Publication string
	Table       string      // schema.name, or name for one of public; a part in double quotes may hold dots. "": events are logical messages, there is no table
	Shard       relay.Shard // the part of the table that is published
	ShardBy     string      // the column that decides to which part a row belongs: the document's
	OwnOnly     bool        // transactions that were replicated from elsewhere are not asked for; below PostgreSQL 16 they come, with their origin
	Logger      *slog.Logger
}

func (c Config) logger() *slog.Logger {
	if c.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Logger.With("component", "replication")
}

// pins are the session settings that what a connection does depends on, as startup parameters: those come before what is configured for
// a role, a database or a server, and before what the URL says. transaction_timeout is pinned by [settle].
var pins = map[string]string{
	// What a name in our SQL means. Nobody but a superuser makes objects in pg_catalog, so no operator, function or cast that
	// somebody else has made is ever called. Temporary objects come last: they are the session's own.
	"search_path": "pg_catalog, pg_temp",

	// How values are printed: their text depends on the value alone. extra_float_digits above zero gives the shortest text that
	// reads back as the same number. Names (regclass and its like) are printed with their schema, because of search_path.
	"client_encoding":       "UTF8",
	"DateStyle":             "ISO",
	"IntervalStyle":         "postgres",
	"TimeZone":              "UTC",
	"bytea_output":          "hex",
	"extra_float_digits":    "1",
	"lc_monetary":           "C",
	"quote_all_identifiers": "off",

	// How our SQL is read, and what it may do.
	"standard_conforming_strings":   "on",
	"transform_null_equals":         "off",
	"default_transaction_isolation": "read committed",
	"default_transaction_read_only": "off",
	"row_security":                  "off", // a policy that hides rows is an error: the WAL has them

	// What would end a session or a statement that takes its time. What is to end sets a limit of its own.
	"statement_timeout":                   "0",
	"lock_timeout":                        "0",
	"idle_in_transaction_session_timeout": "0",
	"idle_session_timeout":                "0",
	"exit_on_error":                       "off",

	"client_min_messages": "warning", // lets the warning of a missing publication through (PostgreSQL 18)
}

// clientKeywords are parameters of libpq that pgconn does not know and would hand to the server, which refuses them.
var clientKeywords = []string{
	"gssencmode", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout", "load_balance_hosts",
}

// peerTimeout is how long a peer may leave sent data unacknowledged, or a probe unanswered, before its connection counts as lost.
const peerTimeout = 15 * time.Second

// parseConfig reads a connection URL of the setting named. No part of the URL appears in the error: a malformed one can hide a
// password anywhere.
func parseConfig(setting, url string) (*pgx.ConnConfig, error) {
	if ambiguous(url) {
		return nil, &outbox.Fault{
			Class: outbox.Usage, Code: "postgres_url", Message: setting + " can be read in more than one way: it has an @ that does not end the password",
			Hint: "Write an @ in a user's name, a password or a parameter as %40, and a / as %2F, ? as %3F, # as %23",
		}
	}
	c, err := pgx.ParseConfig(url)
	if err != nil {
		what := setting + " can't be read as a connection URL or keyword string"
		if url == "" {
			what = setting + " is not set and libpq's PG* environment can't be used"
		}
		f := &outbox.Fault{
			Class: outbox.Usage, Code: "postgres_url", Message: what,
			Hint: "Write it as postgres://user@host:5432/database?sslmode=verify-full, special characters in the password as %XX",
		}
		if path := (*fs.PathError)(nil); errors.As(err, &path) {
			f.Message, f.Hint, f.Err = setting+" names a file that can't be read", "", path
		}
		return nil, f
	}
	for _, k := range clientKeywords {
		delete(c.RuntimeParams, k)
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "outflow"
	}
	c.DefaultQueryExecMode = pgx.QueryExecModeExec // no prepared statements: one round trip, and poolers can take it
	dialer := &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: peerTimeout / 3, Interval: peerTimeout / 3, Count: 2},
		Control:         limitUnacknowledged,
	}
	c.DialFunc = dialer.DialContext
	return c, nil
}

// ambiguous reports whether a URL has an @ where none can stand: a part of the password would be taken for the host, and shown.
func ambiguous(url string) bool {
	_, rest, ok := strings.Cut(url, "://")
	if !ok || strings.ContainsAny(url[:len(url)-len(rest)-3], " =") { // keywords
		return false
	}
	authority := rest
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority = rest[:i]
	}
	return strings.Count(rest, "@") > min(1, strings.Count(authority, "@"))
}

// nameOf names a setting in an error, and says if it is not set.
func nameOf(setting, url string) string {
	if url != "" {
		return setting
	}
	return setting + " is not set, nor is DATABASE_URL, and libpq's PG* variables and defaults apply"
}

// Connect opens an ordinary connection for the setting named. Nothing is pinned: it may lead through a pooler.
func Connect(ctx context.Context, setting, url string) (*pgx.Conn, error) {
	c, err := parseConfig(setting, url)
	if err != nil {
		return nil, err
	}
	c.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return nil, connectFault(nameOf(setting, url), err)
	}
	return conn, nil
}

// pin sets the session settings, whatever the URL says.
func pin(c *pgconn.Config) {
	c.AfterConnect = settle
	for k := range c.RuntimeParams {
		for p := range pins {
			if strings.EqualFold(k, p) {
				delete(c.RuntimeParams, k)
			}
		}
	}
	for k, v := range pins {
		c.RuntimeParams[k] = v
	}
}

// settle pins what not every supported version has as a setting: a startup parameter that a server does not know is refused.
func settle(ctx context.Context, conn *pgconn.PgConn) error {
	major, _, _ := strings.Cut(conn.ParameterStatus("server_version"), ".")
	if n, err := strconv.Atoi(major); err == nil && n < 17 {
		return nil
	}
	_, err := conn.Exec(ctx, "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'").ReadAll()
	if err != nil {
		return fmt.Errorf("set transaction_timeout: %w", err)
	}
	return nil
}

// connect opens an ordinary connection with the pinned settings.
func connect(ctx context.Context, setting, url string) (*pgx.Conn, error) {
	c, err := parseConfig(setting, url)
	if err != nil {
		return nil, err
	}
	pin(&c.Config)
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return nil, connectFault(nameOf(setting, url), err)
	}
	return conn, nil
}

// asStored turns off the conversion of values where the database has no encoding (SQL_ASCII): it may hold any bytes, and the server
// would end the stream at the first that are no UTF-8. They are published as they are.
func asStored(ctx context.Context, conn *pgconn.PgConn) error {
	if conn.ParameterStatus("server_encoding") != "SQL_ASCII" {
		return nil
	}
	if _, err := conn.Exec(ctx, "SET client_encoding = 'SQL_ASCII'").ReadAll(); err != nil {
		return fmt.Errorf("set client_encoding: %w", err)
	}
	return nil
}

// closeConn closes an ordinary connection without waiting for a server that does not answer.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn.Close(ctx) //nolint:errcheck // it is closed whatever this says
}
