package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Config is the configuration of a consumer. Only Name is required.
type Config struct {
	Name   string // key of the offsets: 1 to 64 of [A-Za-z0-9_-]
	Stream string // the JetStream stream. Default OUTBOX, as in Outflow's configuration

	// Filters are subject filters: only messages that match one of them are read. No subject may match two
	// of them. Default: all messages.
	Filters []string
	// Subject is the subject template of Outflow's configuration, with {doc_id} or {doc_id:subject} for the
	// column that holds the document. Default outbox.{doc_id}.
	Subject string
	// Document returns the document of a message, for templates without {doc_id}. Default: by Subject.
	Document func(subject string, header nats.Header) string
	// Keying names what Document does: it is stored with the offsets, and has to change when Document does.
	// Default: Subject, or "Document" if that is set.
	Keying string
	// AcceptKeying lets a consumer go on from offsets that were made with another Keying. First all that is
	// in the stream by then is divided as it was; then instances with the old Keying stand by. If the old
	// one names a function, only instances that have it can do that: one of them has to run until then.
	// Release what is parked before.
	AcceptKeying bool

	// Partitions is the number of workers among which documents are divided, each with an offset. A new
	// consumer has 8 if it is not set. Of a consumer that has offsets it changes the number: when all
	// instances have come to what is the end of the stream now, they go on with the other one.
	Partitions int
	// OnAssigned and OnRevoked are told of partitions that this instance has from now on, or no longer. It
	// does not handle events meanwhile, for as long as Timeout and some seconds: one that has not returned by
	// then is left behind, and the log says so. Another instance may have a revoked one already.
	OnAssigned, OnRevoked func(ctx context.Context, partitions []int)

	Batch       int // most events of a partition in one transaction; 1: each event alone. Default 64
	MaxInFlight int // most messages read but not done. Default 1024
	MaxBytes    int // most bytes of those messages (one message is always read). Default 64 MiB

	MaxAttempts int // attempts before a failing event is parked. Default 5
	// ParkAfter is for how long an event must have failed as well: what it needs may be down for that long.
	// It does not count for [Poison], nor where the database refuses the data (SQLSTATE 22..., 23...).
	// Default 15 min
	ParkAfter time.Duration
	// ParkLimit is how many events are parked at most in 10 minutes for failing, those behind them not
	// counted. It is for those that ParkAfter does not delay, as where a new version of the handler refuses
	// every event: they are tried again until they succeed, or until parking is allowed again. Default 100;
	// below 0: no limit
	ParkLimit   int
	Backoff     Backoff       // between the attempts
	Timeout     time.Duration // of one call of the handler. Default 30 s
	StopTimeout time.Duration // how long Run waits for running handlers when it stops. Default 10 s

	// Start is where a consumer without offsets begins. In a stream that is full, where each message that
	// comes takes the first one, FromFirst is the first one that there is when it comes to read.
	Start Start
	// Archive is where messages are read that retention has taken from the stream: package consumer/archive
	// opens that of `outflow archive`. Without it, such messages are a gap.
	Archive Archive
	// AcceptFilter lets a consumer continue from offsets that were made with other Filters. Earlier messages
	// that those left out are never read.
	AcceptFilter bool
	// AcceptGap continues where messages were removed from the stream before they were read. By default that
	// is an error. With Filters it is only seen where the oldest messages of the stream were removed, and not
	// of a consumer without Archive that reads on within the five seconds until it looks.
	AcceptGap bool

	// Use are wrapped around the handler and around DeadLetters, the first one outermost. They see the event
	// before its payload is upcast, which happens behind them: one that decrypts writes to Data.
	Use []Middleware
	// OnParked is told of each event that was parked because it failed, once that is committed, with the
	// error. After a crash at that moment it is not. The events behind it are parked without a call. Its
	// context ends after Timeout, and the partition waits for it.
	OnParked func(ctx context.Context, e *Event, cause error)
	// OnPoison is given an event that failed for good, if there is no database to park it in. If it is nil
	// or returns an error, Run ends with an error.
	OnPoison func(ctx context.Context, e *Event, cause error) error
	// DeadLetters is given dead letters: rows that Outflow could not publish ([Event.DeadLetter]), whose Data
	// names the row and is not the payload. Without it they are parked, and never reach the handler.
	DeadLetters Handler
	Schema      *Schema // upcasters of old payloads

	Isolation pgx.TxIsoLevel // of the transactions. Default: the database's
	// DatabaseSchema is the PostgreSQL schema of the consumer's tables. Default: the first one in the
	// connection's search_path.
	DatabaseSchema string
	// AcceptOwners lists roles whose tables may be used even if every role may create in their schema.
	AcceptOwners []string
	NoCreate     bool          // do not create the tables or the bucket: they exist
	Lease        time.Duration // how long after its last renewal an instance counts as dead. Default 10 s

	Registerer prometheus.Registerer // nil: no metrics
	Log        *slog.Logger          // nil: slog.Default()

	hooks stream.Hooks // set by tests

	partitionsSet bool // Partitions was set

	poll     time.Duration // how often to look for parked documents to release; 2 s
	interval time.Duration // how often the dispatcher does its periodic work; 1 s
	hang     time.Duration // how long a handler may take to return after its context has ended; 5 s
	confirm  time.Duration // how much later a loss must still be seen to be reported; 5 s
}

// Backoff is the pause after a failed attempt: First, doubled each time up to Max, with 20 % jitter.
type Backoff struct {
	First time.Duration // default 100 ms
	Max   time.Duration // default 10 s
}

// Start is where a new consumer begins.
type Start uint8

// Where a consumer may begin.
const (
	FromFirst Start = iota // at the first message in the stream
	FromNow                // at the next message published
)

const (
	defaultStream = "OUTBOX"
	maxPartitions = 4096
)

// isName reports whether s is 1 to 64 letters, digits, _ and -.
func isName(s string) bool {
	const possible = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
	return s != "" && len(s) <= 64 && strings.Trim(s, possible) == ""
}

// withDefaults fills in the defaults. Its error lists everything that is wrong.
func (c Config) withDefaults() (Config, error) {
	var wrong []error
	bad := func(format string, args ...any) {
		wrong = append(wrong, fmt.Errorf("consumer: "+format, args...))
	}
	if !isName(c.Name) {
		bad("Name %q: want 1 to 64 of A-Z, a-z, 0-9, _ and -", c.Name)
	}
	if c.Stream == "" {
		c.Stream = defaultStream
	}
	if strings.ContainsAny(c.Stream, " .*>/\\\t\r\n") {
		bad("Stream %q: want the name of a stream, as `outflow config` prints it", c.Stream)
	}
	if c.Subject == "" {
		c.Subject = outbox.DefaultSubject
	}
	number := func(v *int, name string, otherwise, most int) {
		if *v == 0 {
			*v = otherwise
		}
		if *v < 1 || *v > most {
			bad("%s %d: want 1 to %d", name, *v, most)
		}
	}
	c.partitionsSet = c.Partitions != 0
	number(&c.Partitions, "Partitions", 8, maxPartitions)
	if c.Keying == "" && c.Document != nil {
		c.Keying = "Document"
	} else if c.Keying == "" {
		c.Keying = c.Subject
	}
	if len(c.Keying) > 1000 || !utf8.ValidString(c.Keying) || strings.ContainsRune(c.Keying, 0) {
		bad("Keying: want a name of at most 1000 bytes")
	}
	number(&c.Batch, "Batch", 64, 10_000)
	number(&c.MaxInFlight, "MaxInFlight", 1024, 100_000)
	number(&c.MaxBytes, "MaxBytes", 64<<20, 4<<30)
	number(&c.MaxAttempts, "MaxAttempts", 5, 1_000_000)
	duration := func(v *time.Duration, name string, otherwise, least time.Duration) {
		if *v == 0 {
			*v = otherwise
		}
		if *v < least {
			bad("%s %v: want %v or more", name, *v, least)
		}
	}
	duration(&c.Backoff.First, "Backoff.First", 100*time.Millisecond, time.Nanosecond)
	duration(&c.Backoff.Max, "Backoff.Max", max(10*time.Second, c.Backoff.First), c.Backoff.First)
	duration(&c.ParkAfter, "ParkAfter", 15*time.Minute, 0)
	if c.ParkLimit == 0 {
		c.ParkLimit = 100
	}
	duration(&c.Timeout, "Timeout", 30*time.Second, time.Millisecond)
	duration(&c.StopTimeout, "StopTimeout", 10*time.Second, time.Millisecond)
	duration(&c.Lease, "Lease", 10*time.Second, 100*time.Millisecond)
	filters, err := checkFilters(c.Filters)
	if c.Filters = filters; err != nil {
		wrong = append(wrong, err)
	}
	if slices.ContainsFunc(c.Use, func(m Middleware) bool { return m == nil }) {
		bad("Use: one of them is nil")
	}
	if c.Start > FromNow {
		bad("Start %d: want FromFirst or FromNow", c.Start)
	}
	c.hang, c.confirm, c.poll, c.interval = hangAfter, confirm, pollParked, dispatchInterval
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Log = c.Log.With("component", "consumer", "consumer", c.Name)
	return c, errors.Join(wrong...)
}

// layout is the configuration's layout.
func (c *Config) layout() layout { return layout{Keying: c.Keying, Partitions: c.Partitions} }

// worksWith reports whether this configuration can divide documents as offsets of a keying do: it is its own
// or, on its way out, a template.
func (c *Config) worksWith(keying string) bool {
	return keying == c.Keying || c.AcceptKeying && templateOf(keying) != nil
}

// templateOf is the subject template that a keying is; nil if it is none.
func templateOf(keying string) *outbox.SubjectTemplate {
	t, err := outbox.ParseSubjectTemplate(keying)
	if err != nil || !t.HasToken(documentColumn) {
		return nil
	}
	return t
}

// readsAll reports whether no message is filtered out.
func (c *Config) readsAll() bool { return len(c.Filters) == 1 && c.Filters[0] == ">" }
