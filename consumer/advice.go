package consumer

import (
	"errors"
	"time"
)

// Poison wraps an error of a handler to say that trying the event again is useless: it is parked at once.
// Poison(nil) is nil, as are RetryAfter(nil, d) and Halt(nil).
//
// Where one of the three wraps another, the outermost counts.
func Poison(err error) error { return advise(err, advice{how: parked}) }

// RetryAfter wraps an error of a handler to say when the event can succeed: it is tried again after d, or
// after the usual pause if d is not positive. That does not count as an attempt, so the event is never parked
// for it. Later events of its partition wait meanwhile.
func RetryAfter(err error, d time.Duration) error { return advise(err, advice{how: later, after: d}) }

// Halt wraps an error of a handler to say that the event is not the reason, and that others would fail
// likewise: something that they need is down, or wrong. The partition stays at the event and tries it again
// with the usual pauses until it succeeds, however long that takes. It is never parked for it. The log and
// [State] say so.
func Halt(err error) error { return advise(err, advice{how: halt}) }

// advice is an error of a handler that says what to do with the event.
type advice struct {
	err   error
	how   how
	after time.Duration // later
}

type how uint8

const (
	again how = iota // as for any error: try again, some day park
	parked
	later
	halt
)

func (a *advice) Error() string { return a.err.Error() }
func (a *advice) Unwrap() error { return a.err }

func advise(err error, a advice) error {
	if err == nil {
		return nil
	}
	a.err = err
	return &a
}

// adviceOf returns what an error says should be done.
func adviceOf(err error) advice {
	var a *advice
	if errors.As(err, &a) && a != nil {
		return *a
	}
	return advice{err: err}
}

// waits reports whether the error is no failure of the event: it is tried again without counting.
func (a advice) waits() bool { return a.how == later || a.how == halt }
