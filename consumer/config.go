package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outflowhq/outflow/consumer/internal/stream"
	"github.com/outflowhq/outflow/outbox"
)

// Handler has the effect of one event. With [Postgres] offsets tx is the transaction in which the offset
// moves: what the handler writes through it is there exactly once. It must neither commit nor roll it back,
// nor keep it. Without a database tx is nil, and an event may come again after a crash.
//
// Events of one document come one after the other, in the order of the stream; events of several documents at
// the same time. An error, a panic or a timeout rolls the transaction back, and the event is tried again
// ([Config.MaxAttempts]).
type Handler func(ctx context.Context, tx pgx.Tx, e *Event) error

// Config says what is read and how. Name and Stream must be given.
type Config struct {
	// of the consumer: the key of its offsets, and its durable's name; [A-Za-z0-9_-], 64 bytes at most
	Name   string
	Stream string // the JetStream stream

	// Filter is the subject filter: only messages on it are read. Default ">", all.
	Filter string
	// Subject is the template of the stream's subjects, as Outflow has it: where the document is. Default
	// outbox.{doc_id}.
	Subject string
	// Document finds the document of a message, for templates without {doc_id}. Default: by Subject.
	Document func(subject string, header nats.Header) string

	Partitions int // documents are divided into so many workers, each with an offset. Default 8
	// that many waiting events of a partition share a transaction, at most. 1: each event alone. Default 64
	Batch       int
	MaxInFlight int // messages that are read and not done, at most. Default 1024
	MaxBytes    int // bytes of those messages, at most (one message is always read). Default 64 MiB

	MaxAttempts int           // so often a failing event is tried before it is parked. Default 5
	Backoff     Backoff       // between the attempts
	Timeout     time.Duration // of one call of the handler. Default 30 s
	StopTimeout time.Duration // so long Run waits for running handlers when it stops. Default 10 s

	// Start says where a consumer that has no offsets yet begins.
	Start Start
	// AcceptFilter lets a consumer go on from its offsets with another Filter than they were made with: what
	// came before them on subjects that the old one did not see is never read.
	AcceptFilter bool
	// AcceptGap goes on where messages were removed from the stream before they were read, rather than to end
	// with an error.
	AcceptGap bool

	// OnPoison takes an event that failed for good, without a database; nil: Run ends with an error. An error
	// of its own ends Run.
	OnPoison func(ctx context.Context, e *Event, cause error) error
	Schema   *Schema // upcasters of old payloads

	Isolation pgx.TxIsoLevel // of the transactions. Default: the database's
	// DatabaseSchema is the PostgreSQL schema of the consumer's tables. Default: the first of the
	// connection's search_path.
	DatabaseSchema string
	// AcceptOwners are roles whose tables are used although every role may create in their schema.
	AcceptOwners []string
	NoCreate     bool          // the tables, or the bucket, are there: do not make them
	Lease        time.Duration // so long after its last sign an instance counts as dead. Default 10 s

	Registerer prometheus.Registerer // nil: no metrics
	Log        *slog.Logger          // nil: no log

	hooks stream.Hooks // of tests

	poll    time.Duration // between two looks for parked documents that are to be released; 2 s
	tick    time.Duration // how often the dispatcher looks around; 1 s
	confirm time.Duration // so much later what is missing from the stream must still be missing; 5 s
}

// Backoff is the pause after a failed attempt: First, then twice as long each time, at most Max, each with a
// jitter of a fifth.
type Backoff struct {
	First time.Duration // default 100 ms
	Max   time.Duration // default 10 s
}

// Start is where a new consumer begins.
type Start uint8

// The beginnings.
const (
	FromFirst Start = iota // with the first message that the stream has
	FromNow                // with what is published from now on
)

const (
	maxPartitions = 4096
)

var names = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// withDefaults returns the settings with defaults filled in, or what is wrong with them.
func (c Config) withDefaults() (Config, error) {
	var wrong []error
	bad := func(format string, args ...any) {
		wrong = append(wrong, fmt.Errorf("consumer: "+format, args...))
	}
	if !names.MatchString(c.Name) {
		bad("Name %q: want 1 to 64 of A-Z, a-z, 0-9, _ and -", c.Name)
	}
	if c.Stream == "" || strings.ContainsAny(c.Stream, " .*>/\\\t\r\n") {
		bad("Stream %q: want the name of a stream, as `outflow config` prints it", c.Stream)
	}
	if c.Filter == "" {
		c.Filter = ">"
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
	number(&c.Partitions, "Partitions", 8, maxPartitions)
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
	duration(&c.Timeout, "Timeout", 30*time.Second, time.Millisecond)
	duration(&c.StopTimeout, "StopTimeout", 10*time.Second, time.Millisecond)
	duration(&c.Lease, "Lease", 10*time.Second, 100*time.Millisecond)
	if c.Start > FromNow {
		bad("Start %d: want FromFirst or FromNow", c.Start)
	}
	c.confirm, c.poll, c.tick = confirm, pollParked, tickTime
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Log = c.Log.With("component", "consumer", "consumer", c.Name)
	return c, errors.Join(wrong...)
}
