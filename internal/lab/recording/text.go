package recording

import (
	"encoding/json"
	"fmt"
)

// Text is a document that edits are applied to. The zero value is the empty document. Of a trace with one
// actor, all payloads in order give its final text.
type Text struct {
	// A gap buffer: the text is before + after reversed, and the last edit was between them, where the next
	// one most likely is.
	before, after []rune
}

// Apply applies the payload of one operation. After an error the text is the one that the valid part of the
// payload gave.
func (t *Text) Apply(payload []byte) error {
	splices, err := readSplices(payload)
	for _, s := range splices {
		if s.at < 0 || s.deleted < 0 || s.at+s.deleted > t.Len() {
			return fmt.Errorf("payload %s: the text has %d code points", payload, t.Len())
		}
		t.moveGap(s.at)
		t.after = t.after[:len(t.after)-s.deleted]
		t.before = append(t.before, []rune(s.inserted)...)
	}
	return err
}

// splice is a part of an operation.
type splice struct {
	at, deleted int
	inserted    string
}

// readSplices reads a payload. With an error it returns those before what is wrong.
func readSplices(payload []byte) ([]splice, error) {
	var raw [][3]json.RawMessage
	if err := json.Unmarshal(payload, &raw); err != nil {
		return nil, fmt.Errorf("payload: %w", err)
	}
	all := make([]splice, len(raw))
	for n, r := range raw {
		for i, into := range []any{&all[n].at, &all[n].deleted, &all[n].inserted} {
			if err := json.Unmarshal(r[i], into); err != nil {
				return all[:n], fmt.Errorf("payload %s: %w", payload, err)
			}
		}
	}
	return all, nil
}

// Len returns the number of code points.
func (t *Text) Len() int { return len(t.before) + len(t.after) }

func (t *Text) String() string {
	all := append([]rune(nil), t.before...)
	for i := len(t.after) - 1; i >= 0; i-- {
		all = append(all, t.after[i])
	}
	return string(all)
}

func (t *Text) moveGap(at int) {
	for len(t.before) > at {
		t.after = append(t.after, t.before[len(t.before)-1])
		t.before = t.before[:len(t.before)-1]
	}
	for len(t.before) < at {
		t.before = append(t.before, t.after[len(t.after)-1])
		t.after = t.after[:len(t.after)-1]
	}
}
