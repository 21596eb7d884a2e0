package sink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
)

// apiError is the part of JetStream's answers that says what went wrong.
type apiError struct {
	Error *apiRefusal `json:"error"`
}

func (a *apiError) refusal() *apiRefusal { return a.Error }

// apiRefusal is JetStream's error.
type apiRefusal struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (r *apiRefusal) Error() string { return fmt.Sprintf("%s (%d)", r.Description, r.ErrCode) }

// JetStream's error codes that mean something to us.
const (
	codeNoMessage      = 10037
	codeStreamExists   = 10058
	codeStreamNotFound = 10059
)

// refusedWith reports whether JetStream answered with the error code.
func refusedWith(err error, code int) bool {
	var r *apiRefusal
	return errors.As(err, &r) && r.ErrCode == code
}

// ask sends a request to JetStream's API and reads the answer. What went wrong on the way is transient; what JetStream answers is
// an *apiRefusal, without a class of its own, in the error.
func (c *Conn) ask(ctx context.Context, method string, request any, answer interface{ refusal() *apiRefusal }) error {
	var body []byte
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	subject := c.api + method
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c.mu.Lock()
	c.asking[subject] = cancel
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.asking, subject)
		c.mu.Unlock()
	}()
	m, err := c.nc.RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Data: body})
	if err != nil {
		if lost := c.Err(); lost != nil {
			return lost
		}
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("ask %s: %w", subject, err)
	}
	if err := json.Unmarshal(m.Data, answer); err != nil {
		return fmt.Errorf("ask %s: answer: %w", subject, err)
	}
	if r := answer.refusal(); r != nil {
		return fmt.Errorf("ask %s: %w", subject, r)
	}
	return nil
}
