package consumeradmin

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// durable is what a server says of one that was just used: it was given n messages by now, each answer takes
// as long as late says.
type durable struct {
	given func(since time.Duration) uint64
	late  func(question int) time.Duration

	begun     time.Time
	questions []time.Duration
}

func (d *durable) look() (*jetstream.ConsumerInfo, error) {
	if d.begun.IsZero() {
		d.begun = time.Now()
	}
	asked := time.Since(d.begun)
	d.questions = append(d.questions, asked)
	info := &jetstream.ConsumerInfo{TimeStamp: time.Now(), NumAckPending: 1}
	info.Delivered.Consumer = d.given(asked)
	time.Sleep(d.late(len(d.questions)))
	return info, nil
}

// What a durable has been left alone for counts from an answer to a later question: an answer that comes
// late, of a server or a command that stood still, is no time in which nobody used it.
func TestALateAnswerProvesNoIdleTime(t *testing.T) {
	t.Parallel()
	at := func(question int) func(int) time.Duration {
		return func(n int) time.Duration {
			if n == question {
				return 2 * unusedFor
			}
			return 0
		}
	}
	for name, late := range map[string]func(int) time.Duration{"no": at(0), "first": at(1), "second": at(2)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := &durable{given: func(time.Duration) uint64 { return 4 }, late: late}
				if _, err := awaitUnused(t.Context(), "search", d.look); err != nil {
					t.Fatal(err)
				}
				if n := len(d.questions); n < 3 || d.questions[n-1]-d.questions[0] < unusedFor {
					t.Errorf("it was asked at %v", d.questions)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				// a client between two pulls
				used := func(since time.Duration) uint64 { return uint64(since / (4 * time.Second)) }
				d := &durable{given: used, late: late}
				if _, err := awaitUnused(t.Context(), "search", d.look); err == nil ||
					!strings.Contains(err.Error(), "used while it was looked at") {
					t.Errorf("error %v, asked at %v", err, d.questions)
				}
			})
		})
	}
}
