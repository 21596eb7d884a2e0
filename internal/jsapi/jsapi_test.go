package jsapi

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// answering is a client whose requests answer takes.
func answering(t *testing.T, answer nats.MsgHandler) *Client {
	t.Helper()
	nc, _ := natstest.Connect(t, natstest.Server(t).URL())
	_, err := nc.Subscribe("api.>", answer)
	must.Succeed(t, err)
	must.Succeed(t, nc.Flush())
	return New(nc, "api")
}

// TestEachForbiddenRequestEnds: of several on one subject the server reports each.
func TestEachForbiddenRequestEnds(t *testing.T) {
	t.Parallel()
	came := make(chan *nats.Msg, 3)
	c := answering(t, func(m *nats.Msg) { came <- m })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ended := make(chan error, 3)
	var asked []*nats.Msg
	for range 3 {
		go func() { ended <- c.Ask(ctx, "INFO", nil, &Answer{}) }()
		asked = append(asked, <-came)
	}
	must.Succeed(t, asked[1].Respond([]byte("{}")))
	must.Succeed(t, <-ended) // the others are still under way
	denied := errors.New("denied")
	violation := errors.New(`nats: permissions violation for publish to "api.INFO"`)
	for range 2 {
		if !c.Forbidden(violation, denied) {
			t.Error("there is no such request")
		}
	}
	for range 2 {
		if err := <-ended; !errors.Is(err, denied) {
			t.Errorf("got %v", err)
		}
	}
	if c.Forbidden(violation, denied) {
		t.Error("there is one more")
	}
}

// TestAnAnswerThatNeverComesIsNotWaitedForForever, as that of a leader that was lost.
func TestAnAnswerThatNeverComesIsNotWaitedForForever(t *testing.T) {
	t.Parallel()
	c := answering(t, func(*nats.Msg) {})
	c.wait = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err := c.Ask(ctx, "INFO", nil, &Answer{})
	if err == nil || !strings.Contains(err.Error(), "no answer within 50ms") || ctx.Err() != nil {
		t.Errorf("got %v", err)
	}
}
