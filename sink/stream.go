package sink

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/outflowhq/outflow/internal/jsapi"
)

// StreamOptions says how [Conn.EnsureStream] makes a stream. What it does not say is fixed: limits retention, discard old (at
// MaxBytes and MaxAge the oldest messages go, as retention), direct get allowed; atomic batches allowed where Config.Batches is
// set and they can be of use.
type StreamOptions struct {
	Replicas int           // default 1
	Storage  string        // "file" (default) or "memory"
	MaxAge   time.Duration // 0: no limit
	MaxBytes int64         // 0: no limit
}

// The transform of the stream, from the ingress to the public subjects. The source has a wildcard where the ingress has its
// random token, so that a new ingress needs no new transform: to change a transform while messages flow is not safe.
const (
	transformSource = "_outflow.*.>"
	transformDest   = ">"
)

// streamConfig is what we read and write of a stream's configuration.
type streamConfig struct {
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
}

type subjectTransform struct {
	Source string `json:"src"`
	Dest   string `json:"dest"`
}

// ingressSubject is the only subject of a stream of ours.
var ingressSubject = regexp.MustCompile(`^_outflow\.[A-Za-z0-9_-]{1,64}\.>$`)

// ingress is the prefix that publishes go to, with its last dot.
func (s *streamConfig) ingress() string { return strings.TrimSuffix(s.Subjects[0], ">") }

// EnsureStream makes the stream with a new private ingress, unless there is one of the name already: that one is checked as
// CheckStream does, and left as it is.
func (c *Conn) EnsureStream(ctx context.Context, o StreamOptions) error {
	info, err := c.streamInfo(ctx)
	if err != nil {
		return err
	}
	if info == nil {
		if err := c.createStream(ctx, o); err != nil {
			return err
		}
	}
	return c.CheckStream(ctx)
}

// newIngress returns a subject that nobody knows yet.
func newIngress() (string, error) {
	token := make([]byte, 8)
	_, err := rand.Read(token)
	return "_outflow." + hex.EncodeToString(token) + ".>", err
}

// RenewIngress gives the stream a new private ingress. Nothing else of it is changed, nor what this program does not know of it. Who
// knows the old one publishes to nobody from then on; but what the server had taken in before it may still store, until it has
// acknowledged a message through the new one. This connection is of no use for publishing afterwards: it watches the old one.
func (c *Conn) RenewIngress(ctx context.Context) error {
	var info struct {
		jsapi.Answer
		Config map[string]json.RawMessage `json:"config"`
	}
	if err := c.api.Ask(ctx, "STREAM.INFO."+c.cfg.Stream, nil, &info); err != nil {
		return err
	}
	subject, err := newIngress()
	if err != nil {
		return err
	}
	if info.Config["subjects"], err = json.Marshal([]string{subject}); err != nil {
		return err
	}
	return c.api.Ask(ctx, "STREAM.UPDATE."+c.cfg.Stream, info.Config, &streamInfo{})
}

func (c *Conn) createStream(ctx context.Context, o StreamOptions) error {
	subject, err := newIngress()
	if err != nil {
		return err
	}
	cfg := streamConfig{
		Name: c.cfg.Stream, Subjects: []string{subject},
		Transform: &subjectTransform{transformSource, transformDest},
		Retention: "limits", Discard: "old", Storage: o.Storage, Replicas: max(o.Replicas, 1), AllowDirect: true,
		MaxAge: o.MaxAge, MaxBytes: o.MaxBytes, MaxConsumers: -1, MaxMsgs: -1, MaxMsgsPer: -1, MaxMsgSize: -1,
	}
	if cfg.Storage == "" {
		cfg.Storage = "file"
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = -1
	}
	// Not where it is of no use: a server before 2.12 does not know it, so it stands in the way of going back to one.
	cfg.AllowAtomic = c.cfg.Batches != nil && c.level >= batchLevel && cfg.Replicas == 1 && cfg.Storage == "file"
	err = c.api.Ask(ctx, "STREAM.CREATE."+c.cfg.Stream, cfg, &streamInfo{})
	var r *jsapi.Error
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNameInUse): // somebody else made it at the same time
		return nil
	case errors.As(err, &r) && r.Code != 503:
		return fatal("stream_create", fmt.Sprintf("stream %s can't be made", c.cfg.Stream), "Check init.replicas, init.storage, init.max_age and init.max_bytes against what the account may have.", r)
	}
	return err
}

// CheckStream reads the stream's configuration and refuses, with a fault of class Fatal, one that would let others in, change or
// lose messages. It learns the ingress. A stream that is missing is no error here: see [Conn.State].
func (c *Conn) CheckStream(ctx context.Context) error {
	info, err := c.streamInfo(ctx)
	if err != nil {
		return err
	}
	if info == nil {
		c.learn(nil)
		return nil
	}
	if err := info.Config.check(); err != nil {
		return err
	}
	if err := c.checkLimits(&info.Config); err != nil {
		return err
	}
	c.learn(&info.Config)
	return nil
}

func (c *Conn) learn(s *streamConfig) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stream = s
}

// Ingress returns the subject prefix that CheckStream learned, with its last dot; "" before.
func (c *Conn) Ingress() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stream == nil {
		return ""
	}
	return c.stream.ingress()
}

// CheckMaxAge refuses a stream whose maximum age is below twice durableAfter: messages could be gone before what they prove is
// confirmed. It speaks of the stream that CheckStream saw last.
func (c *Conn) CheckMaxAge(durableAfter time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stream == nil || c.stream.MaxAge == 0 || c.stream.MaxAge >= 2*durableAfter {
		return nil
	}
	return fatal("stream_max_age", fmt.Sprintf("stream %s: max_age %v is below twice sink.durable_after %v", c.cfg.Stream, c.stream.MaxAge, durableAfter),
		fmt.Sprintf("Set max_age to %v or more, or lower sink.durable_after.", 2*durableAfter), nil)
}

// check holds what the server returns against what the argument in the package's documentation needs.
func (s *streamConfig) check() error {
	refuse := func(code, what, cure string) error {
		return fatal(code, fmt.Sprintf("stream %s: %s", s.Name, what), cure, nil)
	}
	const another = "It can't be changed: name another stream and run `outflow init`."
	switch {
	case s.Mirror != nil:
		return refuse("stream_mirror", "it mirrors another stream", another)
	case len(s.Sources) > 0:
		return refuse("stream_sources", "messages of other streams flow into it (sources)", "Take the sources away; a stream that collects may source from this one.")
	case s.Sealed:
		return refuse("stream_sealed", "it is sealed", another)
	case len(s.Subjects) != 1 || !ingressSubject.MatchString(s.Subjects[0]):
		return refuse("stream_subjects", fmt.Sprintf("its subjects are %q, not one private ingress such as _outflow.3f9a17c0.>", s.Subjects),
			"Outflow needs a stream that nobody else publishes to: name another one and run `outflow init`, or set exactly one subject of that form.")
	case s.Transform == nil || *s.Transform != subjectTransform{transformSource, transformDest}:
		return refuse("stream_transform", fmt.Sprintf("its subject transform is %s, not from %s to %s", s.Transform, transformSource, transformDest),
			fmt.Sprintf("While nothing is published, set subject_transform to source %s, destination %s.", transformSource, transformDest))
	case s.Retention != "limits":
		return refuse("stream_retention", fmt.Sprintf("its retention is %s", s.Retention), another+" Retention must be limits.")
	case s.PersistMode == "async":
		return refuse("stream_persist_mode", "its persist_mode is async: it acknowledges messages before they are written", another)
	case s.NoAck:
		return refuse("stream_no_ack", "no_ack is set: it acknowledges nothing", "Set no_ack to false.")
	case s.AllowCounter:
		return refuse("stream_counter", "allow_msg_counter is set: it refuses messages with an expected sequence", another)
	case s.DeleteMarkerTTL != 0:
		return refuse("stream_delete_marker", "subject_delete_marker_ttl is set: the server itself adds messages to it", "Set subject_delete_marker_ttl to 0.")
	}
	return nil
}

// checkLimits refuses limits below sink.max_payload. Which rows can be published must follow from the settings alone, or two
// Outflows, or one before and after a change of the server, would make different streams of the same WAL.
func (c *Conn) checkLimits(s *streamConfig) error {
	if s.MaxMsgSize >= 0 && int(s.MaxMsgSize) < c.cfg.MaxPayload {
		return fatal("stream_max_msg_size", fmt.Sprintf("stream %s: max_msg_size %d is below sink.max_payload %d", s.Name, s.MaxMsgSize, c.cfg.MaxPayload),
			"Raise max_msg_size, or lower sink.max_payload to it.", nil)
	}
	if n := c.nc.MaxPayload(); n < int64(c.cfg.MaxPayload) {
		return fatal("server_max_payload", fmt.Sprintf("the server takes messages of %d bytes, sink.max_payload is %d", n, c.cfg.MaxPayload),
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
