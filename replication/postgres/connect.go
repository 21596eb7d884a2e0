package postgres

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/outbox"
)

// Target is a server and database to connect to.
type Target struct {
	Setting string // the setting that holds URL, as errors name it; "": postgres.url
	URL     string // connection URL or keyword string; "": libpq's PG* environment
	Slot    string // of the outflow that connects, for application_name; "": of none
	// Command is what connects for the slot in place of outflow run, and does not count among those that
	// publish or stand by.
	Command string

	// Primary is a URL of the same database where it takes writes: postgres.write_url. Connect goes there if
	// URL leads to a standby. "": it stays with that.
	Primary string

	// Same is the database that URL has to lead to, if that is retain.postgres_url. Zero: nobody knows it.
	Same Database

	// Pooled says that a pooler may stand in between. It takes no startup parameters, so nothing is pinned:
	// SQL that runs over such a connection must mean the same whatever search_path is.
	Pooled bool
}

// pins are the session settings that what a connection does depends on, as startup parameters: those come
// before what is configured for a role, a database or a server, and before what the URL says.
// transaction_timeout is pinned by [pinLater].
var pins = map[string]string{
	// What a name in our SQL means. Only a superuser creates objects in pg_catalog, so no operator, function
	// or cast of anybody else is ever called. Temporary objects come last: they are the session's own.
	"search_path": "pg_catalog, pg_temp",

	// How values are printed: their text depends on the value alone. extra_float_digits above zero gives the
	// shortest text that reads back as the same number. Names (regclass and the like) are printed with their
	// schema, because of search_path.
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

	// What would end a session or a statement that takes its time. Whatever should time out sets a limit of
	// its own.
	"statement_timeout":                   "0",
	"lock_timeout":                        "0",
	"idle_in_transaction_session_timeout": "0",
	"idle_session_timeout":                "0",
	"exit_on_error":                       "off",

	"client_min_messages": "warning", // lets the warning of a missing publication through (PostgreSQL 18)
}

// clientKeywords are parameters of libpq that pgconn does not know and would hand to the server, which
// refuses them.
var clientKeywords = []string{
	"gssencmode", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count",
	"tcp_user_timeout", "load_balance_hosts",
}

// peerTimeout is how long a peer may leave sent data unacknowledged, or a probe unanswered, before its
// connection counts as lost.
const peerTimeout = 15 * time.Second

// Connect opens an ordinary connection to the server that postgres.url names.
func Connect(ctx context.Context, url string) (*pgx.Conn, error) {
	return Target{URL: url}.Connect(ctx)
}

// Connect opens an ordinary connection. adjust may change the configuration first. It takes as long as
// connecting does: give it a context with a deadline.
func (t Target) Connect(ctx context.Context, adjust ...func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	c, err := t.config()
	if err != nil {
		return nil, err
	}
	for _, f := range adjust {
		f(c)
	}
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return nil, connectFault(t.name(), err)
	}
	if err := t.checkSame(ctx, conn); err != nil {
		Close(conn)
		return nil, err
	}
	if t.Primary == "" {
		return conn, nil
	}
	return t.toPrimary(ctx, conn, adjust)
}

func (t Target) checkSame(ctx context.Context, conn *pgx.Conn) error {
	if t.Same == (Database{}) {
		return nil
	}
	err := t.Same.Check(ctx, conn, "retain_url", t.setting())
	if SQLState(err) == StateInsufficientPrivilege {
		err = Fatal(err, "retain_url", "GRANT EXECUTE ON FUNCTION pg_control_system() TO the role, or leave "+
			t.setting()+" out", "it can't be told whether %s leads to the database of postgres.url",
			t.setting())
	}
	return err
}

// toPrimary returns conn, or a connection to the primary if that is one to a standby. What is read there
// decides what may be removed, so it has to be the same database for sure.
func (t Target) toPrimary(ctx context.Context, conn *pgx.Conn, adjust []func(*pgx.ConnConfig)) (*pgx.Conn,
	error) {
	var standby bool
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_is_in_recovery()").Scan(&standby); err != nil {
		Close(conn)
		return nil, fmt.Errorf("%s: look whether it is a standby: %w", t.setting(), err)
	}
	if !standby {
		return conn, nil
	}
	defer Close(conn)
	there := t
	there.Setting, there.URL, there.Primary, there.Pooled = "postgres.write_url", t.Primary, "", true
	primary, err := there.Connect(ctx, adjust...)
	if err != nil {
		return nil, err
	}
	here, err := Identify(ctx, conn)
	if err == nil {
		err = here.Check(ctx, primary, "write_url", there.Setting)
	}
	if err == nil {
		return primary, nil
	}
	Close(primary)
	if SQLState(err) == StateInsufficientPrivilege {
		err = Fatal(err, "write_url", "Name the primary with --database", "%s is a standby, and it can't be "+
			"told whether postgres.write_url leads to the same database", t.setting())
	}
	return nil, err
}

// Where says of a connection what String says of a target: it may have been led to the primary.
func Where(conn *pgx.Conn) string {
	c := conn.Config()
	return fmt.Sprintf("%s@%s/%s", c.User, strings.Join(hosts(&c.Config), ","), cmp.Or(c.Database, c.User))
}

// ConnectReplication opens a connection that speaks the replication protocol beside simple queries.
func (t Target) ConnectReplication(ctx context.Context, adjust ...func(*pgconn.Config)) (*pgconn.PgConn,
	error) {
	c, err := t.config()
	if err != nil {
		return nil, err
	}
	c.RuntimeParams["replication"] = "database"
	for _, f := range adjust {
		f(&c.Config)
	}
	conn, err := pgconn.ConnectConfig(ctx, &c.Config)
	if err != nil {
		return nil, connectFault(t.name(), err)
	}
	return conn, nil
}

// String says which server and database that is, and as whom: user@host:port/database; "" if the URL can't be
// read.
func (t Target) String() string {
	c, err := t.config()
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s@%s/%s", c.User, strings.Join(hosts(&c.Config), ","), cmp.Or(c.Database, c.User))
}

func (t Target) setting() string { return cmp.Or(t.Setting, "postgres.url") }

// name is the setting as a connection error names it: with what applies where it is not set.
func (t Target) name() string {
	if t.URL != "" {
		return t.setting()
	}
	return t.setting() + " is not set, nor is DATABASE_URL, and libpq's PG* variables and defaults apply"
}

// config reads the URL. No part of it appears in the error: a malformed one can hide a password anywhere.
func (t Target) config() (*pgx.ConnConfig, error) {
	if ambiguous(t.URL) {
		return nil, &outbox.Fault{
			Class: outbox.Usage, Code: "postgres_url",
			Message: t.setting() +
				" can be read in more than one way: it has an @ that does not end the password",
			Hint: "Write an @ in a user's name, a password or a parameter as %40, and a / as %2F, ? as " +
				"%3F, # as %23",
		}
	}
	c, err := pgx.ParseConfig(t.URL)
	if err != nil {
		message := t.setting() + " can't be read as a connection URL or keyword string"
		if t.URL == "" {
			message = t.setting() + " is not set and libpq's PG* environment can't be used"
		}
		f := &outbox.Fault{
			Class: outbox.Usage, Code: "postgres_url", Message: message,
			Hint: "Write it as postgres://user@host:5432/database?sslmode=verify-full, special characters " +
				"in the password as %XX",
		}
		if path := (*fs.PathError)(nil); errors.As(err, &path) {
			f.Message, f.Hint, f.Err = t.setting()+" names a file that can't be read", "", path
		}
		return nil, f
	}
	for _, k := range clientKeywords {
		delete(c.RuntimeParams, k)
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = t.applicationName()
	}
	// no prepared statements: one round trip, and poolers can take it
	c.DefaultQueryExecMode = pgx.QueryExecModeExec
	dialer := &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: peerTimeout / 3, Interval: peerTimeout / 3,
			Count: 2},
		Control: limitUnacknowledged,
	}
	c.DialFunc = dialer.DialContext
	if !t.Pooled {
		pin(&c.Config)
	}
	return c, nil
}

// Name is what application_name begins with on the connections of all outflows that have a slot.
const Name = "outflow/"

// NamePrefix is what application_name begins with on the connections of outflow run for a slot: behind it is
// the host, as far as there is room.
func NamePrefix(slot string) string {
	return cut(Name + slot + "/")
}

// CommandPrefix is what it begins with on those of the commands for a slot: behind it is which, as far as
// there is room. The colon is there in any case: without it a long slot's commands would count as outflow
// run.
func CommandPrefix(slot string) string {
	return Name + slot[:min(len(slot), maxName-len(Name)-1)] + ":"
}

// WaitsPrefix is what it begins with while outflow run publishes nothing: behind it is the code of what it
// waits at. A hash stands for the end of a long slot, so that there is room for the code.
func WaitsPrefix(slot string) string {
	if len(slot) > maxSaid {
		sum := sha256.Sum256([]byte(slot))
		hash := "~" + hex.EncodeToString(sum[:8])
		slot = slot[:maxSaid-len(hash)] + hash
	}
	return Name + slot + ":waits/"
}

// maxSaid is how much of a slot's name is said beside a code.
const maxSaid = 28

// WaitsName says that outflow run waits at what a code is of; "" where there is no room for the code.
func WaitsName(slot, code string) string {
	if name := WaitsPrefix(slot) + code; len(name) <= maxName {
		return name
	}
	return ""
}

// maxName is how much of application_name the server keeps, in bytes.
const maxName = 63

func (t Target) applicationName() string {
	if t.Slot == "" {
		return "outflow"
	}
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	if t.Command != "" {
		return cut(CommandPrefix(t.Slot) + t.Command + "/" + printable(host))
	}
	return nameOn(t.Slot, host)
}

func nameOn(slot, host string) string { return cut(NamePrefix(slot) + printable(host)) }

func cut(name string) string { return name[:min(len(name), maxName)] }

// printable leaves printable ASCII of the host's name: the server would replace the rest, each version in its
// own way.
func printable(host string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r >= 0x7f {
			return '?'
		}
		return r
	}, host)
}

// ambiguous reports whether a URL has an @ where none can stand: a part of the password would be taken for
// the host, and shown.
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

// pin sets the session settings, whatever the URL says.
func pin(c *pgconn.Config) {
	c.AfterConnect = pinLater
	maps.DeleteFunc(c.RuntimeParams, func(k, _ string) bool {
		for p := range pins {
			if strings.EqualFold(k, p) {
				return true
			}
		}
		return false
	})
	maps.Copy(c.RuntimeParams, pins)
}

// pinLater pins what not every supported version has as a setting: a startup parameter that a server does not
// know is refused.
func pinLater(ctx context.Context, conn *pgconn.PgConn) error {
	major, _, _ := strings.Cut(conn.ParameterStatus("server_version"), ".")
	if n, err := strconv.Atoi(major); err == nil && n < 17 {
		return nil
	}
	// SET reads no catalog, unlike a query of pg_settings, which was a tenth of what a connection costs the
	// server. A build that does not have the setting yet says so.
	_, err := conn.Exec(ctx, "SET transaction_timeout = 0").ReadAll()
	if err != nil && SQLState(err) != StateUndefinedObject {
		return fmt.Errorf("set transaction_timeout: %w", err)
	}
	return nil
}

// KeepBytes turns off the conversion of values where the database has no encoding (SQL_ASCII): it may hold
// any bytes, and the server would fail at the first that are not UTF-8. They are published as they are.
func KeepBytes(ctx context.Context, conn *pgconn.PgConn) error {
	if conn.ParameterStatus("server_encoding") != "SQL_ASCII" {
		return nil
	}
	if _, err := conn.Exec(ctx, "SET client_encoding = 'SQL_ASCII'").ReadAll(); err != nil {
		return fmt.Errorf("set client_encoding: %w", err)
	}
	return nil
}

// Close closes an ordinary or a replication connection without waiting long for a server that does not
// answer.
func Close(conn interface{ Close(context.Context) error }) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn.Close(ctx) //nolint:errcheck // it is closed whatever this says
}

// SimpleQuery runs a query over a replication connection, which takes the simple protocol only. No row is an
// error.
func SimpleQuery(ctx context.Context, c *pgconn.PgConn, sql string) ([][]string, error) {
	results, err := c.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) == 0 {
		return nil, fmt.Errorf("%q gave no row", sql)
	}
	rows := make([][]string, len(results[0].Rows))
	for i, r := range results[0].Rows {
		for _, v := range r {
			rows[i] = append(rows[i], string(v))
		}
	}
	return rows, nil
}
