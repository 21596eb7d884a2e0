package sink

import (
	"fmt"
	"log/slog"
	"net/url"
	"sort"
	"strings"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// The defaults and limits of a [Config].
const (
	DefaultMaxPayload = 1 << 20
	minMaxPayload     = 1 << 10 // so that a dead letter always fits

	maxHeaders = 16 << 10 // bytes of the mapped headers
	overhead   = 128      // bytes that a message counts for the protocol's headers, whatever they take
	fenceBytes = 112      // likewise, for those of the fence
	homeBytes  = 40       // likewise, for what names the home

	defaultInbox = "_INBOX.outflow" // a narrow prefix that a server's permissions can name
)

// Config says where to connect, what to publish to, and how an event becomes a message.
type Config struct {
	// one or several server URLs, separated by commas; overrides the context's. Empty without Context: the
	// local server
	URL     string
	Context string // a context of the nats command, by name or as the absolute path of its file
	Creds   string // file with a user's JWT and seed
	NKey    string // file with a user's seed

	User, Password string
	Token          string
	TLS            TLS

	Name string // of the connection, shown by the server; default "outflow"
	// of the subjects that answers come back on; default the context's, else _INBOX.outflow
	InboxPrefix string

	Table   string // schema.name of the outbox, for messages and dead letters
	Stream  string
	Subject string // template; default outbox.DefaultSubject
	// Resolve says where the value of a column that the template or a mapped header names is found in an
	// event. nil: the roles doc_id, actor_id, seq_key and id only.
	Resolve func(column string) (Field, bool)
	Headers []MappedHeader
	// the table has a seq_key, or what it is made from: a NULL one is a row that can't be published
	Keyed bool

	// what to do with a row that can't be published: false stop, true publish a dead letter in its place
	DeadLetter        bool
	DeadLetterSubject string // default <stream>.dead_letter
	// DeadLettered is called, from Publish, for each dead letter that is made; nil: it is not called.
	DeadLettered func(Reason)
	// bytes that a message may count; default DefaultMaxPayload, at least minMaxPayload
	MaxPayload int
	MsgID      bool // set Nats-Msg-Id to the position
	// Home is cluster.id of the cluster whose events these are, where clusters publish for one another: each
	// message names it, and its Nats-Msg-Id is the same whoever publishes the event. 0: none is named.
	Home int
	// Fence lets each message name the newest cut of the stream, in the shared mode: see
	// [Publisher.BehindCut].
	Fence bool

	// Batches allows atomic batches where the stream allows them, has one replica on file, and its server
	// syncs each write: it says so by being slow. nil: none.
	Batches *Batches

	Logger *slog.Logger // nil: none
}

// TLS names the PEM files for TLS: the certificates that sign the server's, and our own certificate with its
// key. Each may be empty.
type TLS struct{ CA, Cert, Key string }

// MappedHeader is a header whose value is a column's.
type MappedHeader struct{ Name, Column string }

// Field says where a column's value is in an event. 0 and above: an index of Event.Extra.
type Field int

// The fields that are not in Event.Extra.
const (
	FieldDoc Field = -1 - iota
	FieldActor
	FieldKey
	FieldID
)

// RoleField resolves the names of the roles.
func RoleField(name string) (Field, bool) {
	switch name {
	case "doc_id":
		return FieldDoc, true
	case "actor_id":
		return FieldActor, true
	case "seq_key":
		return FieldKey, true
	case "id":
		return FieldID, true
	}
	return 0, false
}

// value returns the field's value; it is empty where null is true.
func (f Field) value(e *relay.Event) (v string, null bool) {
	switch f {
	case FieldDoc:
		return e.Doc, e.Null&relay.NullDoc != 0
	case FieldActor:
		return e.Actor, e.Null&relay.NullActor != 0
	case FieldKey:
		return e.Key, e.Null&relay.NullKey != 0
	case FieldID:
		return e.ID, e.Null&relay.NullID != 0
	}
	return e.Extra[f], e.ExtraNull(int(f))
}

// withDefaults fills in what is empty.
func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = "outflow"
	}
	if c.Subject == "" {
		c.Subject = outbox.DefaultSubject
	}
	if c.DeadLetterSubject == "" {
		c.DeadLetterSubject = c.Stream + ".dead_letter"
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = DefaultMaxPayload
	}
	if c.Resolve == nil {
		c.Resolve = RoleField
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate names the first setting that can't be, as a fault of class Usage. It opens no file and no
// connection.
func (c Config) Validate() error {
	c = c.withDefaults()
	if err := c.validateServers(); err != nil {
		return err
	}
	if !stream.IsName(c.Stream, 255) {
		return usage("stream", fmt.Sprintf("stream %q: not a name of 1 to 255 letters, digits, _ and -",
			c.Stream), "Choose another name.")
	}
	if c.MaxPayload < minMaxPayload {
		return usage("max_payload", fmt.Sprintf("sink.max_payload %d: below %d bytes", c.MaxPayload,
			minMaxPayload), "Raise it.")
	}
	_, err := newEncoder(c)
	return err
}

// validateServers reads the URLs before anyone else does, because an error of nats.go would quote them, with
// the password.
func (c Config) validateServers() error {
	if c.URL == "" {
		return nil
	}
	for i, s := range strings.Split(c.URL, ",") {
		if s = strings.TrimSpace(s); !strings.Contains(s, "://") {
			s = "nats://" + s
		}
		_, rest, _ := strings.Cut(s, "://")
		if authority, _, _ := strings.Cut(rest, "/"); strings.Count(rest, "@") > min(1,
			strings.Count(authority, "@")) {
			return usage("nats_url", fmt.Sprintf("nats.url: server %d of the list can be read in more than "+
				"one way: it has an @ that does not end the password", i+1),
				"Write an @ in a password or token as %40, a / as %2F, ? as %3F, # as %23.")
		}
		u, err := url.Parse(s)
		if err != nil || u.Hostname() == "" {
			return usage("nats_url", fmt.Sprintf("nats.url: server %d of the list is not a URL", i+1),
				"Write nats://host:port, and escape special characters of a password as %XX.")
		}
		switch u.Scheme {
		case "nats", "tls":
		default:
			return usage("nats_url", fmt.Sprintf("nats.url: server %d of the list has the unknown scheme %q",
				i+1, u.Scheme),
				"Write nats://host:port or tls://host:port.")
		}
	}
	return nil
}

// header is a mapped header whose column is resolved.
type header struct {
	name  string
	field Field
}

// bindHeaders resolves the mapped headers and sorts them by name: the order of the settings means nothing.
func bindHeaders(mapped []MappedHeader, resolve func(string) (Field, bool)) ([]header, error) {
	seen := map[string]bool{}
	var headers []header
	for _, m := range mapped {
		low := strings.ToLower(m.Name)
		switch {
		case !validHeaderName(m.Name):
			return nil, usage("header_name", fmt.Sprintf("headers: %q is not a header name", m.Name),
				"Use letters, digits and -.")
		case strings.HasPrefix(low, "nats-") || strings.HasPrefix(low, "outflow"):
			return nil, usage("header_name", fmt.Sprintf("headers: %q: names that begin with Nats- or "+
				"Outflow are taken", m.Name), "Choose another name.")
		case seen[low]:
			return nil, usage("header_name", fmt.Sprintf("headers: %q is there twice", m.Name),
				"Names are compared without case: take one away.")
		}
		seen[low] = true
		field, ok := resolve(m.Column)
		if !ok {
			return nil, usage("header_column", fmt.Sprintf("headers: %s: the table has no column %q", m.Name,
				m.Column),
				"Name a column of the table, or one of the roles doc_id, actor_id, seq_key, id.")
		}
		headers = append(headers, header{m.Name, field})
	}
	sort.Slice(headers, func(i, j int) bool { return headers[i].name < headers[j].name })
	return headers, nil
}

// validHeaderName holds a name to the characters of HTTP's header names; nats.go drops others in silence.
func validHeaderName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' ||
			strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0) {
			return false
		}
	}
	return s != ""
}

func usage(code, message, hint string) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Usage, Code: code, Message: message, Hint: hint}
}

func fatal(code, message, hint string, cause error) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: message, Hint: hint, Err: cause}
}

func transient(code, message string, cause error) *outbox.Fault {
	return &outbox.Fault{Class: outbox.Transient, Code: code, Message: message, Err: cause}
}
