package outbox

import "fmt"

// Sort is the rule by which a window's events are sorted.
type Sort uint8

// The rules.
const (
	BySeqKey Sort = iota // by (doc_id, seq_key, position)
	// commit order; each sequence's events, in the places that they occupy, ascend by seq_key
	ByCommit
)

// ParseSort reads "seq_key" or "commit".
func ParseSort(s string) (Sort, error) {
	switch s {
	case "seq_key":
		return BySeqKey, nil
	case "commit":
		return ByCommit, nil
	}
	return 0, fmt.Errorf("sort %q: want seq_key or commit", s)
}

func (s Sort) String() string {
	if s == ByCommit {
		return "commit"
	}
	return "seq_key"
}

// MarshalText implements [encoding.TextMarshaler].
func (s Sort) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (s *Sort) UnmarshalText(b []byte) (err error) {
	*s, err = ParseSort(string(b))
	return err
}
