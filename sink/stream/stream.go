// Package stream creates, checks and reads the JetStream stream that Outflow publishes to. What it decides by
// comes from the stream's leader, never from a replica that may lag.
//
// It is internal to Outflow: its API may change at any time.
package stream

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Stream is one stream, seen through one connection. It may be used from any goroutine.
type Stream struct {
	api    *jsapi.Client
	name   string
	log    *slog.Logger
	noList atomic.Bool // the user may not list consumers
}

// New returns the stream with a name, whether it exists or not.
func New(api *jsapi.Client, name string, log *slog.Logger) *Stream {
	return &Stream{api: api, name: name, log: log}
}

// Options says how [Stream.Ensure] creates a stream. The rest is fixed: limits retention, discard old (beyond
// MaxBytes and MaxAge the oldest messages go), direct get allowed.
type Options struct {
	Replicas int           // default 1
	Storage  string        // "file" (default) or "memory"
	MaxAge   time.Duration // 0: no limit
	MaxBytes int64         // 0: no limit
	Atomic   bool          // allow atomic batches if they can be of use: with one replica, on file
	InTurns  bool          // they are of use in any case: messages go in turns

	Restoring string // what it is restored from, see [Stream.Restored]; "": it is a new one
	First     uint64 // the sequence that it begins at; 0: 1
	Erased    outbox.Sequences
}

// The names in a stream's metadata of the folder of the archive that it is being restored from, or was: it is
// a copy of the messages there.
const (
	MetadataRestoring = "outflow-restoring"
	MetadataRestored  = "outflow-restored"
)

// The transform of the stream, from the ingress to the public subjects. The source has a wildcard where the
// ingress has its random token, so that a new ingress needs no new transform: to change a transform while
// messages flow is not safe.
const (
	transformSource = "_outflow.*.>"
	transformDest   = ">"
)

// Config is what we read and write of a stream's configuration.
type Config struct {
	Name            string            `json:"name"`
	Subjects        []string          `json:"subjects,omitempty"`
	Retention       string            `json:"retention"`
	MaxConsumers    int               `json:"max_consumers"`
	MaxMsgs         int64             `json:"max_msgs"`
	MaxBytes        int64             `json:"max_bytes"`
	MaxAge          time.Duration     `json:"max_age"`
	MaxMsgsPer      int64             `json:"max_msgs_per_subject"`
	MaxMsgSize      int32             `json:"max_msg_size"`
	Discard         string            `json:"discard"`
	Storage         string            `json:"storage"`
	Replicas        int               `json:"num_replicas"`
	NoAck           bool              `json:"no_ack,omitempty"`
	AllowDirect     bool              `json:"allow_direct"`
	AllowAtomic     bool              `json:"allow_atomic,omitempty"`
	Mirror          *struct{}         `json:"mirror,omitempty"`
	Sources         []struct{}        `json:"sources,omitempty"`
	Sealed          bool              `json:"sealed,omitempty"`
	Transform       *subjectTransform `json:"subject_transform,omitempty"`
	AllowCounter    bool              `json:"allow_msg_counter,omitempty"`
	PersistMode     string            `json:"persist_mode,omitempty"`
	DeleteMarkerTTL time.Duration     `json:"subject_delete_marker_ttl,omitempty"`
	Metadata        map[string]string `json:"metadata,omitempty"`
	FirstSeq        uint64            `json:"first_seq,omitempty"`
	DuplicateWindow time.Duration     `json:"duplicate_window,omitempty"`
}

type subjectTransform struct {
	Source string `json:"src"`
	Dest   string `json:"dest"`
}

// IsName reports whether s is 1 to most letters, digits, _ and -.
func IsName(s string, most int) bool {
	const possible = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
	return s != "" && len(s) <= most && strings.Trim(s, possible) == ""
}

// isIngress reports whether a subject may be the only one of a stream of ours: a name between "_outflow." and
// ".>".
func isIngress(subject string) bool {
	name, ours := strings.CutPrefix(subject, "_outflow.")
	name, all := strings.CutSuffix(name, ".>")
	return ours && all && IsName(name, 64)
}

// Ingress is the prefix that publishes go to, with its last dot.
func (c *Config) Ingress() string { return strings.TrimSuffix(c.Subjects[0], ">") }

// Ensure creates the stream with a new private ingress, unless there is one of the name: that one is left as
// it is. It doesn't check it: see [Stream.Check].
func (s *Stream) Ensure(ctx context.Context, o Options) error {
	info, err := s.info(ctx)
	if err != nil || info != nil {
		return err
	}
	return s.create(ctx, o)
}

// newIngress returns a subject that nobody knows yet.
func newIngress() (string, error) {
	token := make([]byte, 8)
	_, err := rand.Read(token)
	return "_outflow." + hex.EncodeToString(token) + ".>", err
}

// RenewIngress gives the stream a new private ingress. Nothing else of it is changed, nor what this program
// does not know of it. Who knows the old one publishes to nobody from then on; but what the server had taken
// in before it may still store, until it has acknowledged a message through the new one. This connection is
// of no use for publishing afterwards: it watches the old one.
func (s *Stream) RenewIngress(ctx context.Context) error {
	subject, err := newIngress()
	if err != nil {
		return err
	}
	if err := s.update(ctx, func(c map[string]json.RawMessage) (err error) {
		c["subjects"], err = json.Marshal([]string{subject})
		return err
	}); err != nil {
		return err
	}
	// Who had read the configuration before that, and changes something else, puts the old one back.
	info, err := s.info(ctx)
	if err == nil && (info == nil || !slices.Equal(info.Config.Subjects, []string{subject})) {
		err = &outbox.Fault{Class: outbox.Transient, Code: relay.CodeStreamMoved, Hint: "Run it again",
			Message: fmt.Sprintf("stream %s was changed by somebody else while it was given a new ingress",
				s.name)}
	}
	return err
}

// Restored lets a stream be used that was made with Options.Restoring: until then no start and no repair
// takes it for whole.
func (s *Stream) Restored(ctx context.Context) error {
	return s.update(ctx, func(c map[string]json.RawMessage) error {
		delete(c, "duplicate_window") // the server's default
		metadata := map[string]string{}
		err := json.Unmarshal(c["metadata"], &metadata)
		if from, ok := metadata[MetadataRestoring]; ok { // another run may have been here first
			metadata[MetadataRestored] = from
			delete(metadata, MetadataRestoring)
			c["metadata"], err = json.Marshal(metadata)
		}
		return err
	})
}

// maxErased bounds the text of what was erased. The server takes 128 KiB of metadata.
const maxErased = 100 << 10

// RestoreWindow is how long a stream that is being restored remembers message ids, the least that the server
// takes: the archive may have the same one twice, of messages that were stored at other times.
const RestoreWindow = 100 * time.Millisecond

// Erased reads from the leader which sequences of the stream were erased, and when the stream was made, of
// which they are; zero: there is none.
func (s *Stream) Erased(ctx context.Context) (all outbox.Sequences, made time.Time, err error) {
	info, err := s.info(ctx)
	if err != nil || info == nil {
		return nil, made, err
	}
	all, err = info.Config.erased()
	return all, info.Created, err
}

func (c *Config) erased() (outbox.Sequences, error) {
	all, err := outbox.ParseSequences(c.Metadata[outbox.MetadataErased])
	if err != nil {
		err = fatal("stream_erased", fmt.Sprintf("stream %s: metadata %s: %v", c.Name,
			outbox.MetadataErased, err), "Somebody changed it. Set it to what it was, or remove it.", nil)
	}
	return all, err
}

// NoteErased adds sequences to those that the stream's metadata say were erased, before they are: whoever
// finds that they are missing looks there. Where there is no room for all, those that lie before the front of
// the stream, and behind a message that was removed from there, are left out: nobody can read up to them.
func (s *Stream) NoteErased(ctx context.Context, more outbox.Sequences) error {
	info, err := s.info(ctx)
	if err != nil {
		return err
	}
	if info == nil {
		return fmt.Errorf("stream %s does not exist", s.name)
	}
	was, err := info.Config.erased()
	if err != nil {
		return err
	}
	all := was.With(more...)
	text := all.String()
	if first := max(info.State.First, 1); len(text) > maxErased {
		if removed := all.Lacking(1, first-1); len(removed) > 0 {
			all = all.Within(removed[len(removed)-1].To, math.MaxUint64)
		}
		if text = all.String(); len(text) > maxErased {
			hint := "Let messages leave the front of the stream (`outflow stream apply`), then go on."
			if info.Config.Metadata[MetadataRestoring] != "" {
				hint = fmt.Sprintf("`nats stream rm %s`, then restore what is behind some of them: `outflow "+
					"archive restore --from %d`.", s.name, roomFrom(all))
			}
			return s.noRoom(all, hint)
		}
	}
	if len(was) > 0 && was.String() == text {
		return nil
	}
	return s.setErased(ctx, text)
}

// ForgetErased takes those of the sequences that lie behind the end of the stream out of what its metadata
// say was erased: the broker has lost them, and other messages come under them. It may be called again.
func (s *Stream) ForgetErased(ctx context.Context, lost outbox.Sequences) error {
	if len(lost) == 0 {
		return nil
	}
	info, err := s.info(ctx)
	if err != nil || info == nil {
		return err
	}
	was, err := info.Config.erased()
	if err != nil {
		return err
	}
	lost = lost.Within(info.State.Last+1, math.MaxUint64)
	var left outbox.Sequences
	for _, e := range was {
		left = append(left, lost.Lacking(e.From, e.To)...)
	}
	if left.Count() == was.Count() {
		return nil
	}
	return s.setErased(ctx, left.String())
}

// setErased writes what was erased into the stream's metadata.
func (s *Stream) setErased(ctx context.Context, text string) error {
	return s.update(ctx, func(c map[string]json.RawMessage) error {
		metadata := map[string]string{}
		if raw, ok := c["metadata"]; ok {
			if err := json.Unmarshal(raw, &metadata); err != nil {
				return err
			}
		}
		if metadata[outbox.MetadataErased] = text; text == "" {
			delete(metadata, outbox.MetadataErased)
		}
		var err error
		c["metadata"], err = json.Marshal(metadata)
		return err
	})
}

func (s *Stream) noRoom(all outbox.Sequences, hint string) error {
	return fatal("erase_room", fmt.Sprintf("stream %s: there is no room in its metadata to note %d erased "+
		"messages", s.name, all.Count()), hint, nil)
}

// roomFrom is the sequence from which on there is room for all that was erased, of which there is too much.
func roomFrom(all outbox.Sequences) uint64 {
	fit := sort.Search(len(all), func(i int) bool { return len(all[i:].String()) <= maxErased })
	return all[fit-1].To + 1
}

// update changes the stream's configuration as the server gave it.
func (s *Stream) update(ctx context.Context, change func(config map[string]json.RawMessage) error) error {
	info, err := jsapi.Stream[map[string]json.RawMessage](ctx, s.api, s.name)
	if err != nil {
		return err
	}
	if info == nil {
		return fatal("stream_missing", fmt.Sprintf("stream %s does not exist", s.name),
			"Run `outflow init`, or name the right stream and account", nil)
	}
	if err := change(info.Config); err != nil {
		return err
	}
	return s.api.Ask(ctx, "STREAM.UPDATE."+s.name, info.Config, &jsapi.Answer{})
}

func (s *Stream) create(ctx context.Context, o Options) error {
	subject, err := newIngress()
	if err != nil {
		return err
	}
	cfg := Config{
		Name: s.name, Subjects: []string{subject},
		Transform: &subjectTransform{transformSource, transformDest},
		Retention: "limits", Discard: "old", Storage: o.Storage, Replicas: max(o.Replicas, 1),
		AllowDirect: true,
		MaxAge:      o.MaxAge, MaxBytes: o.MaxBytes, MaxConsumers: -1, MaxMsgs: -1, MaxMsgsPer: -1,
		MaxMsgSize: -1, FirstSeq: o.First,
	}
	if o.Restoring != "" {
		cfg.Metadata = map[string]string{MetadataRestoring: o.Restoring}
		cfg.DuplicateWindow = RestoreWindow
		if text := o.Erased.String(); len(text) > maxErased {
			return s.noRoom(o.Erased, fmt.Sprintf("Restore what is behind some of them: `outflow archive "+
				"restore --from %d`. Nothing was made.", roomFrom(o.Erased)))
		} else if text != "" {
			cfg.Metadata[outbox.MetadataErased] = text
		}
	}
	if cfg.Storage == "" {
		cfg.Storage = "file"
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = -1
	}
	// Not where it is of no use: servers before 2.12 don't know it, so it would rule out going back to one.
	cfg.AllowAtomic = o.Atomic && (cfg.Replicas == 1 && cfg.Storage == "file" || o.InTurns)
	err = s.api.Ask(ctx, "STREAM.CREATE."+s.name, cfg, &jsapi.Answer{})
	var r *jsapi.Error
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNameInUse): // somebody else made it at the same time
		return nil
	case errors.As(err, &r) && r.Code != 503:
		return fatal("stream_create", fmt.Sprintf("stream %s can't be made", s.name),
			"Check init.replicas, init.storage, init.max_age and init.max_bytes against what the account "+
				"may have.", r)
	}
	return err
}

// Check reads the stream's configuration and refuses, with a fault of class Fatal, one that would let others
// in, change or lose messages, or has limits below maxPayload, the setting sink.max_payload. It returns nil
// if there is no stream: that is no error here, see [Stream.State].
func (s *Stream) Check(ctx context.Context, maxPayload int) (*Config, error) {
	info, err := s.info(ctx)
	if err != nil || info == nil {
		return nil, err
	}
	if err := info.Config.check(); err != nil {
		return nil, err
	}
	return &info.Config, s.checkLimits(&info.Config, maxPayload)
}

// CheckMaxAge refuses a stream whose maximum age is below twice durableAfter: messages could be gone before
// what they prove is confirmed.
func (c *Config) CheckMaxAge(durableAfter time.Duration) error {
	if c.MaxAge == 0 || c.MaxAge >= 2*durableAfter {
		return nil
	}
	return fatal("stream_max_age", fmt.Sprintf("stream %s: max_age %v is below twice sink.durable_after %v",
		c.Name, c.MaxAge, durableAfter),
		fmt.Sprintf("Set max_age to %v or more, or lower sink.durable_after.", 2*durableAfter), nil)
}

// Limits are those by which a stream removes messages by itself; 0 is none.
type Limits struct {
	Age                  time.Duration
	Messages, PerSubject int64
	Bytes                int64
	Average              int64 // bytes of a message, at present; 0 where there is none
}

// None reports whether the stream removes nothing by itself.
func (l Limits) None() bool {
	return l.Age == 0 && l.Messages == 0 && l.PerSubject == 0 && l.Bytes == 0
}

// Limits reads the stream's limits. Where it refuses new messages instead of discarding old ones, those on
// messages and bytes are none.
func (s *Stream) Limits(ctx context.Context) (l Limits, err error) {
	info, err := s.info(ctx)
	if err != nil || info == nil {
		return l, err
	}
	c := &info.Config
	l = Limits{Age: c.MaxAge, PerSubject: max(c.MaxMsgsPer, 0)}
	if c.Discard != "new" {
		l.Messages, l.Bytes = max(c.MaxMsgs, 0), max(c.MaxBytes, 0)
	}
	if n := info.State.Messages; n > 0 {
		l.Average = int64(info.State.Bytes / n)
	}
	return l, nil
}

// check refuses what breaks the argument in the documentation of package sink. What opens a stream comes
// before all else that can be changed later, so that nothing hides it.
func (c *Config) check() error {
	refuse := func(code, what, cure string) error {
		return fatal(code, fmt.Sprintf("stream %s: %s", c.Name, what), cure, nil)
	}
	const another = "It can't be changed: name another stream and run `outflow init`."
	switch {
	case c.Mirror != nil:
		return refuse("stream_mirror", "it mirrors another stream", another)
	case len(c.Sources) > 0:
		return refuse("stream_sources", "messages of other streams flow into it (sources)",
			"Take the sources away; a stream that collects may source from this one.")
	case len(c.Subjects) != 1 || !isIngress(c.Subjects[0]):
		return refuse("stream_subjects", fmt.Sprintf("its subjects are %q, not one private ingress such as "+
			"_outflow.3f9a17c0.>", c.Subjects),
			"Outflow needs a stream that nobody else publishes to: name another one and run `outflow "+
				"init`, or set exactly one subject of that form.")
	case c.DeleteMarkerTTL != 0:
		return refuse("stream_delete_marker", "subject_delete_marker_ttl is set: the server itself adds "+
			"messages to it", "Set subject_delete_marker_ttl to 0.")
	case c.Sealed:
		return refuse("stream_sealed", "it is sealed", another)
	case c.Transform == nil || *c.Transform != subjectTransform{transformSource, transformDest}:
		return refuse("stream_transform", fmt.Sprintf("its subject transform is %s, not from %s to %s",
			c.Transform, transformSource, transformDest),
			fmt.Sprintf("While nothing is published, set subject_transform to source %s, destination %s.",
				transformSource, transformDest))
	case c.Retention != "limits":
		return refuse("stream_retention", fmt.Sprintf("its retention is %s", c.Retention), another+
			" Retention must be limits.")
	case c.PersistMode == "async":
		return refuse("stream_persist_mode",
			"its persist_mode is async: it acknowledges messages before they are written", another)
	case c.NoAck:
		return refuse("stream_no_ack", "no_ack is set: it acknowledges nothing", "Set no_ack to false.")
	case c.AllowCounter:
		return refuse("stream_counter",
			"allow_msg_counter is set: it refuses messages with an expected sequence", another)
	}
	return nil
}

// opens are the codes of what lets messages of others in, or of the server itself.
var opens = []string{"stream_sources", "stream_subjects", "stream_delete_marker"}

// checkLimits refuses limits below sink.max_payload. Which rows can be published must follow from the
// settings alone, or two Outflows, or one before and after a change of the server, would make different
// streams of the same WAL.
func (s *Stream) checkLimits(c *Config, maxPayload int) error {
	if c.MaxMsgSize >= 0 && int(c.MaxMsgSize) < maxPayload {
		return fatal("stream_max_msg_size", fmt.Sprintf("stream %s: max_msg_size %d is below "+
			"sink.max_payload %d", c.Name, c.MaxMsgSize, maxPayload),
			"Raise max_msg_size, or lower sink.max_payload to it.", nil)
	}
	if n := s.api.NATS().MaxPayload(); n < int64(maxPayload) {
		return fatal("server_max_payload",
			fmt.Sprintf("the server takes messages of %d bytes, sink.max_payload is %d", n, maxPayload),
			"Raise max_payload of the server, or lower sink.max_payload to it.", nil)
	}
	return nil
}

func (t *subjectTransform) String() string {
	if t == nil {
		return "missing"
	}
	return fmt.Sprintf("from %q to %q", t.Source, t.Dest)
}

// HeaderOf finds Outflow's header in a message's header block, nil if it has none.
func HeaderOf(block []byte) *outbox.Header {
	for line := range bytes.SplitSeq(block, []byte("\r\n")) {
		if v, ok := bytes.CutPrefix(line, []byte(outbox.HeaderName+":")); ok {
			if h, err := outbox.ParseHeader(string(bytes.TrimSpace(v))); err == nil {
				return &h
			}
			return nil
		}
	}
	return nil
}

// CutOf returns the cut that a message is, nil if it is none.
func CutOf(m *jsapi.Message) *outbox.Cut {
	if m.Subject != outbox.CutSubject { // few are, and to decode a header costs
		return nil
	}
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil {
		return nil // a message of somebody else
	}
	return outbox.CutOf(m.Subject, h)
}

func fatal(code, message, hint string, cause error) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: message, Hint: hint, Err: cause}
}

func transient(code, message string) error {
	return &outbox.Fault{Class: outbox.Transient, Code: code, Message: message}
}
