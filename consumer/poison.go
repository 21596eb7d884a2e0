package consumer

import (
	"fmt"
	"runtime/debug"
)

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
