package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/outflowhq/outflow/internal/lab/recording"
)

// typist sends a recorded session to a document as if two people took turns at it. Whatever dies, it sends
// again until the service says that it has the operation.
type typist struct {
	service string // address
	doc     string
	people  [2]string
	pause   time.Duration // between requests; 0: none
	sent    atomic.Int64  // operations that the service has

	recorded []recording.Op
	ops      []operation // those of the recording's beginning, as far as they were needed
	turns    *rand.Rand
	written  yText
	who      int // writes
	turn     int // operations that are left of this turn
	counters [2]int64
}

type operation struct {
	Actor   string `json:"actor"`
	Counter int64  `json:"counter"`
	Update  []byte `json:"update"`
	Edits   []edit `json:"edits"`
}

const (
	longestTurn = 60 // operations that one person writes before the other takes over, at most
	mostAtOnce  = 4  // operations of a request
)

// newTypist types the recording's first n operations into a document. The seed says when the people take
// turns.
func newTypist(service, doc string, people [2]string, n int, seed uint64) (*typist, error) {
	recorded, err := recording.Load(recording.SvelteComponent)
	if err != nil {
		return nil, err
	}
	if n > len(recorded) {
		return nil, fmt.Errorf("the recording has %d operations, not %d", len(recorded), n)
	}
	return &typist{
		service: service, doc: doc, people: people, recorded: recorded[:n],
		turns:   rand.New(rand.NewPCG(seed, 0)),
		written: yText{clocks: map[uint64]uint64{}},
	}, nil
}

// slice returns operations of the recording, made for two people.
func (t *typist) slice(from, end int) ([]operation, error) {
	for _, r := range t.recorded[len(t.ops):max(end, len(t.ops))] {
		if t.turn == 0 {
			t.who, t.turn = 1-t.who, 1+t.turns.IntN(longestTurn)
		}
		t.turn--
		edits, err := editsOf(r.Payload)
		if err != nil {
			return nil, err
		}
		t.counters[t.who]++
		update := t.written.update(uint64(t.who+1), edits)
		t.ops = append(t.ops, operation{t.people[t.who] + "~recorded", t.counters[t.who], update, edits})
	}
	return t.ops[from:end], nil
}

// editsOf reads the recording's form: [[pos, del, ins], ...].
func editsOf(payload []byte) (edits []edit, err error) {
	var splices [][3]json.RawMessage
	if err := json.Unmarshal(payload, &splices); err != nil {
		return nil, err
	}
	for _, s := range splices {
		var e edit
		for i, into := range []any{&e.Pos, &e.Del, &e.Ins} {
			if err := json.Unmarshal(s[i], into); err != nil {
				return nil, err
			}
		}
		edits = append(edits, e)
	}
	return edits, nil
}

// text returns the document's text after so many operations.
func (t *typist) text(n int) (string, error) {
	var text recording.Text
	for _, r := range t.recorded[:n] {
		if err := text.Apply(r.Payload); err != nil {
			return "", err
		}
	}
	return text.String(), nil
}

var errSomebodyElse = errors.New("somebody else writes in the document: the recording ends")

// run sends the operations, at least the first least and then until enough is closed, or all.
func (t *typist) run(ctx context.Context, least int, enough <-chan struct{}) error {
	sizes := rand.New(rand.NewPCG(uint64(len(t.doc)), 1))
	for at := 0; at < len(t.recorded); {
		if at >= least {
			select {
			case <-enough:
				return nil
			default:
			}
		}
		n := min(1+sizes.IntN(mostAtOnce), len(t.recorded)-at)
		ops, err := t.slice(at, at+n)
		if err == nil {
			err = t.insist(ctx, at, ops)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", t.doc, err)
		}
		at += n
		t.sent.Store(int64(at))
		if t.pause > 0 && !wait(ctx, t.pause) {
			return ctx.Err()
		}
	}
	return nil
}

// insist sends a request until it is answered for good.
func (t *typist) insist(ctx context.Context, base int, ops []operation) error {
	body, err := json.Marshal(ops)
	if err != nil {
		return err
	}
	for {
		status, answer := t.post(ctx, base, body)
		switch {
		case status == http.StatusOK:
			return nil
		case status == http.StatusPreconditionFailed:
			return errSomebodyElse
		case status >= 400 && status < 500:
			return fmt.Errorf("operation %d: HTTP %d: %s", base+1, status, answer)
		}
		if !wait(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// post returns status 0 if there is no answer.
func (t *typist) post(ctx context.Context, base int, body []byte) (status int, answer string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.service+"/docs/"+url.PathEscape(t.doc)+
		"/ops", bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("If-Match", fmt.Sprintf("%q", fmt.Sprint(base)))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// wait waits and reports whether ctx is still good.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
