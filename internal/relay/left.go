package relay

import "github.com/outflowhq/outflow/outbox"

// Left says what a home has left to other clusters (decision 0057): of the messages that its WAL makes behind
// the one with Due and N, those of commits up to To are published by others. It names a message, not a
// sequence: so it is the same one when the broker has lost some, and the messages come again.
type Left struct {
	Due outbox.LSN `json:"due"` // 0: there was no message before
	N   int        `json:"n,omitempty"`
	To  outbox.LSN `json:"to"`
}

// LeftFrom leaves to others, from the message with header h on, commits up to an LSN.
func LeftFrom(h *outbox.Header, to outbox.LSN) Left {
	if h.N > 0 {
		return Left{Due: h.Due, N: h.N - 1, To: to}
	}
	return Left{Due: h.Due - 1, To: to} // behind whatever window came before
}

// Covers reports whether a message is left to others.
func (l Left) Covers(h *outbox.Header) bool {
	return (h.Due > l.Due || h.Due == l.Due && h.N > l.N) && h.Pos.LSN <= l.To
}

// Before reports whether l names an earlier message.
func (l Left) Before(o Left) bool { return l.Due < o.Due || l.Due == o.Due && l.N < o.N }
