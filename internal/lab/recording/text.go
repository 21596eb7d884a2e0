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
	var splices [][3]json.RawMessage
	if err := json.Unmarshal(payload, &splices); err != nil {
		return fmt.Errorf("payload: %w", err)
	}
	for _, s := range splices {
		var at, deleted int
		var inserted string
		for i, into := range []any{&at, &deleted, &inserted} {
			if err := json.Unmarshal(s[i], into); err != nil {
				return fmt.Errorf("payload %s: %w", payload, err)
			}
		}
		if at < 0 || deleted < 0 || at+deleted > t.Len() {
			return fmt.Errorf("payload %s: the text has %d code points", payload, t.Len())
		}
		t.moveGap(at)
		t.after = t.after[:len(t.after)-deleted]
		t.before = append(t.before, []rune(inserted)...)
	}
	return nil
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
