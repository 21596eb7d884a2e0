// Package jsapi asks JetStream's API: one request, one answer, by the stream's leader where it matters.
// nats.go asks for messages with a direct get, which any replica may answer, out of date; whoever decides by
// what a stream holds must not use that. [ReadStream] reads many messages through a consumer.
package jsapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Client asks over one connection, which stays the caller's. It may be used from any goroutine.
type Client struct {
	// Lost, if set before the first request, says why the connection is of no more use, or nil: then a
	// request that failed returns that.
	Lost func() error

	nc     *nats.Conn
	prefix string // with its last dot

	wait time.Duration // 0: unanswered

	mu       sync.Mutex
	requests map[*request]bool // those under way
}

// request is one of possibly several with its subject.
type request struct {
	subject string
	end     context.CancelCauseFunc
}

// unanswered is how long an answer may take. That of a leader that was lost never comes.
const unanswered = 30 * time.Second

// New returns a client. prefix is that of the API's subjects, with or without the last dot: "" is the
// default, a domain d has $JS.d.API.
func New(nc *nats.Conn, prefix string) *Client {
	if prefix == "" {
		prefix = jetstream.DefaultAPIPrefix
	}
	return &Client{nc: nc, prefix: strings.TrimSuffix(prefix, ".") + ".",
		requests: map[*request]bool{}}
}

// NATS returns the connection.
func (c *Client) NATS() *nats.Conn { return c.nc }

// Clustered reports whether more than one server may keep a stream. With a prefix others answer than the
// server that this connection is to, and it is not known.
func (c *Client) Clustered() bool {
	return c.nc.ConnectedClusterName() != "" || c.prefix != jetstream.DefaultAPIPrefix
}

// JetStream returns nats.go's view of the same JetStream.
func (c *Client) JetStream() (jetstream.JetStream, error) {
	return jetstream.NewWithAPIPrefix(c.nc, strings.TrimSuffix(c.prefix, "."))
}

// PublishSubject returns where to publish what is to arrive at subject: behind the prefix, unless that is the
// default.
func (c *Client) PublishSubject(subject string) string {
	if c.prefix == jetstream.DefaultAPIPrefix {
		return subject
	}
	return c.prefix + subject
}

// Answer is the part of all answers that says what went wrong. Types of answers embed it.
type Answer struct {
	Error *Error `json:"error"`
}

func (a *Answer) refusal() *Error { return a.Error }

// Ack is the answer to a publish.
type Ack struct {
	Answer
	Stream    string `json:"stream"`
	Seq       uint64 `json:"seq"`
	Duplicate bool   `json:"duplicate"`
}

// Ask sends a request, or an empty one if it is nil, and reads the answer. A refusal of JetStream is an
// *[Error] within the error; whatever went wrong on the way is an error without a class.
func (c *Client) Ask(ctx context.Context, method string, request any,
	answer interface{ refusal() *Error }) error {
	var body []byte
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	m := &nats.Msg{Subject: c.prefix + method, Data: body}
	if err := c.send(ctx, m, answer); err != nil {
		return fmt.Errorf("ask %s: %w", m.Subject, err)
	}
	return nil
}

// Publish publishes a message, and waits until it is stored, with the errors of [Client.Ask].
func (c *Client) Publish(ctx context.Context, m *nats.Msg) error { return c.send(ctx, m, &Answer{}) }

// send sends a request and reads the answer. It ends at once if the server forbids it: [Client.Forbidden].
func (c *Client) send(ctx context.Context, m *nats.Msg, answer interface{ refusal() *Error }) error {
	wait := cmp.Or(c.wait, unanswered)
	ctx, late := context.WithTimeoutCause(ctx, wait, fmt.Errorf("no answer within %v", wait))
	defer late()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &request{m.Subject, cancel}
	c.mu.Lock()
	c.requests[r] = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.requests, r)
		c.mu.Unlock()
	}()
	got, err := c.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		if c.Lost != nil {
			if lost := c.Lost(); lost != nil {
				return lost
			}
		}
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return err
	}
	if err := json.Unmarshal(got.Data, answer); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if r := answer.refusal(); r != nil {
		return r
	}
	return nil
}

// Forbidden ends a request under way that the server's error is about, with cause, and reports whether there
// is one. The server doesn't answer a request that its permissions forbid; it reports an error for each on
// the connection instead.
func (c *Client) Forbidden(violation, cause error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.requests {
		if strings.Contains(violation.Error(), `"`+r.subject+`"`) {
			r.end(cause)
			delete(c.requests, r)
			return true
		}
	}
	return false
}

// MessageRequest selects a message of a stream: the one at Seq, or the first at or above Seq whose subject
// matches Next, or the last one with the subject Last.
type MessageRequest struct {
	Seq  uint64 `json:"seq,omitempty"`
	Next string `json:"next_by_subj,omitempty"`
	Last string `json:"last_by_subj,omitempty"`
}

// Message is a message as it lies in a stream.
type Message struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Header  []byte    `json:"hdrs"` // the whole block, from NATS/1.0 to the empty line; empty: none
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

// Message reads a message from the stream's leader. It returns nil if there is none.
func (c *Client) Message(ctx context.Context, stream string, r MessageRequest) (*Message, error) {
	var answer struct {
		Answer
		Message *Message `json:"message"`
	}
	err := c.Ask(ctx, "STREAM.MSG.GET."+stream, r, &answer)
	if Refused(err, jetstream.JSErrCodeMessageNotFound) {
		return nil, nil
	}
	if err == nil && answer.Message == nil {
		err = fmt.Errorf("stream %s: an answer without a message", stream)
	}
	return answer.Message, err
}

// Error is a refusal by JetStream.
type Error struct {
	Code        int                 `json:"code"`
	ErrCode     jetstream.ErrorCode `json:"err_code"`
	Description string              `json:"description"`
}

func (r *Error) Error() string { return fmt.Sprintf("%s (%d)", r.Description, r.ErrCode) }

// Refused reports whether JetStream refused with one of the codes.
func Refused(err error, codes ...jetstream.ErrorCode) bool {
	var r *Error
	if errors.As(err, &r) {
		for _, code := range codes {
			if r.ErrCode == code {
				return true
			}
		}
	}
	return false
}

// The error codes that nats.go has no name for. The names are the server's.
const (
	AccountResourcesExceeded              jetstream.ErrorCode = 10002
	InsufficientResources                 jetstream.ErrorCode = 10023
	StreamNotMatch                        jetstream.ErrorCode = 10060
	StreamStoreFailed                     jetstream.ErrorCode = 10077
	StreamHeaderExceedsMaximum            jetstream.ErrorCode = 10097
	StreamSealed                          jetstream.ErrorCode = 10109
	StreamTooManyRequests                 jetstream.ErrorCode = 10167
	AtomicPublishDisabled                 jetstream.ErrorCode = 10174
	AtomicPublishIncompleteBatch          jetstream.ErrorCode = 10176
	AtomicPublishUnsupportedHeaderBatch   jetstream.ErrorCode = 10177
	AtomicPublishInvalidBatchID           jetstream.ErrorCode = 10179
	AtomicPublishTooLargeBatch            jetstream.ErrorCode = 10199
	AtomicPublishInvalidBatchCommit       jetstream.ErrorCode = 10200
	AtomicPublishContainsDuplicateMessage jetstream.ErrorCode = 10201
	AtomicPublishTooManyInflight          jetstream.ErrorCode = 10210
)
