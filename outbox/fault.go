package outbox

import (
	"errors"
	"fmt"
)

// Class says what follows from a failure.
type Class uint8

// The classes.
const (
	Transient Class = iota // drop the session, back off, start again; also every error without a class
	Fatal                  // a setting or the set-up is wrong: stop, exit code 3
	Gap                    // gap or divergence: stop, exit code 4, an operator decides
	Poison                 // a row that can't be published: stop, exit code 5
	Usage                  // command line or configuration: exit code 2
)

func (c Class) String() string {
	return [...]string{"transient", "fatal", "gap", "poison", "usage"}[c]
}

// Fault is a failure with its class and a hint at the way out. Message and Hint are sentences for the
// operator: Message names the object and its value, Hint what to do about it. From and To give the LSN range
// that is affected; From 0 means the beginning, To 0 that there is none.
type Fault struct {
	Class    Class
	Code     string // a short stable word for logs and metrics, e.g. "slot_missing"
	Message  string
	Hint     string
	From, To LSN
	Observed bool  // it was seen to happen: no recheck is needed before it counts
	Err      error // the cause, if there is one
}

// Error implements error: the message, the LSN range, the cause, the hint.
func (f *Fault) Error() string {
	s := f.Message
	if f.To != 0 {
		s += fmt.Sprintf("; LSN range %v to %v", f.From, f.To)
		if f.From == 0 {
			s += ", which is all from the beginning"
		}
	}
	if f.Err != nil {
		s += ": " + f.Err.Error()
	}
	if f.Hint != "" {
		s += ". " + f.Hint
	}
	return s
}

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// Is reports whether target is a fault with the same code, for [errors.Is] with variables such as
// consumer.ErrGap.
func (f *Fault) Is(target error) bool {
	t, ok := target.(*Fault)
	return ok && t.Code != "" && t.Code == f.Code
}

// FaultOf returns the fault that err is or wraps, or nil.
func FaultOf(err error) *Fault {
	var f *Fault
	if errors.As(err, &f) {
		return f
	}
	return nil
}

// ClassOf returns the class of err; an error without one is transient.
func ClassOf(err error) Class {
	if f := FaultOf(err); f != nil {
		return f.Class
	}
	return Transient
}
