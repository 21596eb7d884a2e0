package consumer

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// Poison wraps an error of a handler to say that trying the event again is useless: it is parked at once.
func Poison(err error) error {
	if err == nil {
		return nil
	}
	return &poison{err}
}

type poison struct{ err error }

func (p *poison) Error() string { return p.err.Error() }
func (p *poison) Unwrap() error { return p.err }

// isPoison reports whether err is or wraps an error made by Poison.
func isPoison(err error) bool {
	var p *poison
	return errors.As(err, &p)
}

// PanicError is a panic of a handler, which is treated like any other error. Its text includes the stack.
type PanicError struct {
	Value any // what panic was called with
	Stack []byte
}

// Error implements error.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack) }

// Unwrap returns the value, if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// recovered turns a panic of the function that defers it into an error.
func recovered(err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{Value: v, Stack: debug.Stack()}
	}
}
