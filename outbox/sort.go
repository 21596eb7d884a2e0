package outbox

import "fmt"

// Sort is the rule by which a window's events are sorted.
type Sort uint8

// The rules.
const (
	BySeqKey Sort = iota // by (doc_id, seq_key, position)
	// commit order; each sequence's events, in the places that they occupy, ascend by seq_key
	ByCommit
	// gap mode: commit order, but an event whose predecessor in its sequence, by counter, has not been
	// committed yet waits for it
	ByGap
)

// ParseSort reads "seq_key", "commit" or "gap".
func ParseSort(s string) (Sort, error) {
	switch s {
	case "seq_key":
		return BySeqKey, nil
	case "commit":
		return ByCommit, nil
	case "gap":
		return ByGap, nil
	}
	return 0, fmt.Errorf("sort %q: want seq_key, commit or gap", s)
}

func (s Sort) String() string {
	switch s {
	case ByCommit:
		return "commit"
	case ByGap:
		return "gap"
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

// letter is the rule as it stands in a header.
func (s Sort) letter() byte {
	switch s {
	case ByCommit:
		return 'c'
	case ByGap:
		return 'g'
	}
	return 's'
}

func sortOf(letter string) (Sort, error) {
	switch letter {
	case "s":
		return BySeqKey, nil
	case "c":
		return ByCommit, nil
	case "g":
		return ByGap, nil
	}
	return 0, fmt.Errorf("want s, c or g")
}
