package pipeline

import "time"

// unconfirmed is a loss that one reading has shown and no recheck has confirmed yet.
type unconfirmed struct {
	loss  string // what shows it; "": there is none
	at    time.Time
	after time.Duration // how much later the recheck may begin
}

// confirmedBy reports whether a reading that shows loss and was begun at asked confirms it. One that was
// asked soon after the first and answered late does not.
func (u *unconfirmed) confirmedBy(loss string, asked time.Time) bool {
	return u.loss == loss && asked.Sub(u.at) >= u.after
}

// errUnconfirmed ends a session that saw a loss for the first time.
type errUnconfirmed struct{ unconfirmed }

func (e *errUnconfirmed) Error() string { return "to be read again: " + e.loss }
