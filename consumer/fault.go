package consumer

import (
	"errors"
	"fmt"
)

// What ends Run with an error: somebody has to decide. Each error of Run that is none of the context is one of these, for errors.Is, or
// an error of the settings, of the setup (a missing stream, a missing right), or of Config.OnPoison.
var (
	ErrGap        = errors.New("messages were removed before they were read")
	ErrForeign    = errors.New("a message that Outflow did not publish")
	ErrStream     = errors.New("the stream is not the one that the marks count in")
	ErrRepeat     = errors.New("an event is in the stream twice")
	ErrPartitions = errors.New("another instance runs with another number of partitions")
	ErrFilter     = errors.New("the marks were made with another filter")
	ErrPoison     = errors.New("an event failed for good")
	ErrHandler    = errors.New("the handler ended the transaction itself")
)

// Fault is an error that ends [Consumer.Run], with what to do about it.
type Fault struct {
	Kind error  // one of the Err variables; nil: the setup is wrong
	What string // where, and what it is
	Cure string
	Err  error // what the database, the server or the handler said; may be nil

	// sign names what is missing from a stream, where that tells it: it counts when a second reading agrees. Retention may have removed
	// more by then. "": it counts at once.
	sign string
}

func (f *Fault) Error() string {
	s := "consumer: " + f.What
	if f.Err != nil {
		s += ": " + f.Err.Error()
	}
	if f.Cure != "" {
		s += ". " + f.Cure
	}
	return s
}

// Unwrap returns the kind and the cause.
func (f *Fault) Unwrap() []error {
	var all []error
	for _, err := range []error{f.Kind, f.Err} {
		if err != nil {
			all = append(all, err)
		}
	}
	return all
}

// The ways in which a session ends that is to be followed by another one.
var (
	errMoved   = errors.New("another instance has taken over")
	errUnknown = errors.New("the answer to a commit was lost")
)

// heldError says that another instance is active.
type heldError struct {
	owner      string
	partitions int
}

func (h *heldError) Error() string { return fmt.Sprintf("instance %s is active", h.owner) }

// crashError is a fault that was put in: nothing is said goodbye to.
type crashError struct{ err error }

func (c crashError) Error() string { return "consumer: " + c.err.Error() }
func (c crashError) Unwrap() error { return c.err }
