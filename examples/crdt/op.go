package main

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Limits of one request. An operation with all of them full still fits into a message of 1 MiB.
const (
	maxBody   = 4 << 20   // bytes of a request
	maxOps    = 500       // operations of a request
	maxUpdate = 256 << 10 // bytes of an operation's update
	maxInsert = 128 << 10 // bytes that an operation's edits insert
	maxEdits  = 1000      // edits of an operation
	maxName   = 100       // bytes of a document's or an actor's name
)

// Op is one operation on a document: what an author sends, and the payload of its event.
type Op struct {
	Doc     string `json:"doc,omitempty"`
	Version int64  `json:"version,omitempty"` // of the document, once it is stored: 1, 2, 3 ...
	Actor   string `json:"actor"`
	Counter int64  `json:"counter"` // of the actor in this document: 1, 2, 3 ...
	Update  []byte `json:"update"`  // what a Yjs document applies; base64 in JSON
	Edits   []Edit `json:"edits"`   // the same as plain edits, for those who have no Yjs
}

// Edit replaces Del code points at Pos by Ins. The edits of an operation follow each other: each one counts
// in the text that the one before it gave.
type Edit struct {
	Pos int    `json:"pos"`
	Del int    `json:"del"`
	Ins string `json:"ins"`
}

// validate says what is wrong with an operation by itself, whatever is stored already.
func (o *Op) validate() error {
	if err := validName("actor", o.Actor); err != nil {
		return err
	}
	inserted := 0
	for i, e := range o.Edits {
		if e.Pos < 0 || e.Del < 0 {
			return fmt.Errorf("edits[%d]: pos %d and del %d must not be negative", i, e.Pos, e.Del)
		}
		if strings.ContainsRune(e.Ins, 0) {
			return fmt.Errorf("edits[%d]: ins has a NUL character, which PostgreSQL's text cannot hold", i)
		}
		inserted += len(e.Ins)
	}
	switch {
	case o.Counter < 1:
		return fmt.Errorf("counter %d: an actor's first operation is number 1", o.Counter)
	case len(o.Update) == 0:
		return errors.New("update is missing: send the Yjs update in base64")
	case len(o.Update) > maxUpdate:
		return fmt.Errorf("update has %d bytes: %d is the limit, split the operation", len(o.Update),
			maxUpdate)
	case len(o.Edits) > maxEdits:
		return fmt.Errorf("%d edits: %d is the limit, split the operation", len(o.Edits), maxEdits)
	case inserted > maxInsert:
		return fmt.Errorf("the edits insert %d bytes: %d is the limit, split the operation", inserted,
			maxInsert)
	}
	return nil
}

func validName(what, name string) error {
	if name == "" || len(name) > maxName || !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
		return fmt.Errorf("%s %q: want 1 to %d bytes of UTF-8 without NUL", what, name, maxName)
	}
	return nil
}

// person is who an actor is: one person types as "Ada~x1" in one tab and as "Ada~x2" in another.
func person(actor string) string {
	name, _, _ := strings.Cut(actor, "~")
	return name
}

// apply applies edits to a text. What lies outside of the text is cut off: a reader of events that come in a
// wrong order meets such.
func apply(text []rune, edits []Edit) []rune {
	for _, e := range edits {
		at := min(e.Pos, len(text))
		rest := text[min(at+e.Del, len(text)):]
		next := make([]rune, 0, len(text)+len(e.Ins))
		text = append(append(append(next, text[:at]...), []rune(e.Ins)...), rest...)
	}
	return text
}
