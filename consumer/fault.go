package consumer

import (
	"errors"
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// The errors with which Run ends when somebody has to decide, for errors.Is. Such an error is an
// [outbox.Fault] with the code of one of these; its Hint says what can be done. Other errors of Run come from
// [Config.OnPoison].
var (
	ErrGap     = kind(outbox.Gap, "consumer_gap", "messages were removed before they were read")
	ErrForeign = kind(outbox.Fatal, "consumer_foreign", "a message that Outflow did not publish")
	ErrStream  = kind(outbox.Gap, "consumer_stream", "the stream is not the one that the marks count in")
	ErrArchive = kind(outbox.Gap, "consumer_archive", "the archive can't be read, or is of other messages")
	ErrRepeat  = kind(outbox.Gap, "consumer_repeat", "an event is in the stream twice")
	ErrKeying  = kind(outbox.Fatal, "consumer_keying", "the marks were made with another keying")
	ErrFilter  = kind(outbox.Fatal, "consumer_filter", "the marks were made with other filters")
	ErrPoison  = kind(outbox.Poison, "consumer_poison", "an event failed for good")
	ErrHandler = kind(outbox.Fatal, "consumer_handler", "the handler ended the transaction itself")
	ErrSetup   = kind(outbox.Fatal, "consumer_setup",
		"the database, the stream or a connection can't be used")
)

func kind(class outbox.Class, code, message string) error {
	return &outbox.Fault{Class: class, Code: code, Message: message}
}

// fault is an error of the kind. The message says where and what it is, the hint what to do about it; cause
// is what the database, the server or the handler said, or nil.
func fault(kind, cause error, hint, message string, args ...any) *outbox.Fault {
	f := *outbox.FaultOf(kind)
	f.Message, f.Hint, f.Err = "consumer: "+fmt.Sprintf(message, args...), hint, cause
	return &f
}

// deleted is the error of an instance whose consumer was deleted while it ran. To begin anew by itself would
// repeat effects.
func deleted(cfg *Config) *outbox.Fault {
	return fault(ErrSetup, nil, "Start it again if it is to begin anew: Config.Start says where",
		"somebody has deleted consumer %s while this instance ran", cfg.Name)
}

// possibleLoss is a fault that counts only when a later session sees the same: something is missing from the
// stream, or from the bucket of the offsets.
type possibleLoss struct {
	*outbox.Fault
	what string // what is missing. Retention may remove more from one session to the next
}

func (l *possibleLoss) Unwrap() error { return l.Fault }

// Errors that end a session, but not Run.
var (
	errMoved   = errors.New("another instance has taken over")
	errUnknown = errors.New("the answer to a commit was lost")
	errAnew    = errors.New("another session is to follow") // at once
)

// heldError says that there is nothing for this instance to do: others have all partitions, or have to reach
// the barrier first.
type heldError struct{ why string }

func (h *heldError) Error() string { return h.why }

// crashError is a crash that a test asked for: the session ends without releasing its lease.
type crashError struct{ err error }

func (c crashError) Error() string { return "consumer: " + c.err.Error() }
func (c crashError) Unwrap() error { return c.err }
