package main

import (
	"encoding/binary"
	"slices"
	"unicode/utf16"
)

// A writer of Yjs updates: as much of the format as two people who take turns at one text need, so that a
// recorded session becomes a document that the page can open. Positions are code points, as in the recording;
// Yjs counts UTF-16 units.

// unit identifies a UTF-16 unit of the text: the clock-th that a client has inserted.
type unit struct{ client, clock uint64 }

// char is a visible code point: its first unit, and how many it has.
type char struct {
	id    unit
	width uint64
}

// yText is the text of a document and who wrote what of it.
type yText struct {
	chars  []char
	clocks map[uint64]uint64 // the next clock, by client
}

// edit replaces del code points at pos by ins.
type edit struct {
	Pos int    `json:"pos"`
	Del int    `json:"del"`
	Ins string `json:"ins"`
}

const (
	textName      = "text" // of the shared text in the document
	hasOrigin     = 0x80
	hasRight      = 0x40
	contentString = 4
)

// update applies edits of a client and returns them as a Yjs update.
func (t *yText) update(client uint64, edits []edit) []byte {
	first := t.clocks[client]
	var items []byte
	n := uint64(0)
	var deleted []char
	for _, e := range edits {
		deleted = append(deleted, t.chars[e.Pos:e.Pos+e.Del]...)
		t.chars = slices.Delete(t.chars, e.Pos, e.Pos+e.Del)
		if e.Ins != "" {
			items = t.insert(items, client, e)
			n++
		}
	}
	var b []byte
	if n == 0 {
		b = append(b, 0) // no client has new items
	} else {
		b = append(b, 1)
		for _, v := range []uint64{n, client, first} {
			b = binary.AppendUvarint(b, v)
		}
		b = append(b, items...)
	}
	return appendDeleted(b, deleted)
}

// insert appends one item: what is left and right of it says where it belongs.
func (t *yText) insert(b []byte, client uint64, e edit) []byte {
	info := byte(contentString)
	at := len(b)
	b = append(b, info)
	if e.Pos > 0 {
		left := t.chars[e.Pos-1]
		b[at] |= hasOrigin
		b = binary.AppendUvarint(binary.AppendUvarint(b, left.id.client), left.id.clock+left.width-1)
	}
	if e.Pos < len(t.chars) {
		right := t.chars[e.Pos].id
		b[at] |= hasRight
		b = binary.AppendUvarint(binary.AppendUvarint(b, right.client), right.clock)
	}
	if b[at] == contentString { // the first item names the text that it is in
		b = appendString(append(b, 1), textName)
	}
	b = appendString(b, e.Ins)

	var fresh []char
	for _, r := range e.Ins {
		c := char{unit{client, t.clocks[client]}, uint64(utf16.RuneLen(r))}
		t.clocks[client] += c.width
		fresh = append(fresh, c)
	}
	t.chars = slices.Insert(t.chars, e.Pos, fresh...)
	return b
}

// appendDeleted appends the set of deleted units, by client.
func appendDeleted(b []byte, deleted []char) []byte {
	ranges := map[uint64][][2]uint64{}
	for _, c := range deleted {
		all := ranges[c.id.client]
		if last := len(all) - 1; last >= 0 && all[last][0]+all[last][1] == c.id.clock {
			all[last][1] += c.width
		} else {
			all = append(all, [2]uint64{c.id.clock, c.width})
		}
		ranges[c.id.client] = all
	}
	b = binary.AppendUvarint(b, uint64(len(ranges)))
	for client, all := range ranges {
		b = binary.AppendUvarint(binary.AppendUvarint(b, client), uint64(len(all)))
		for _, r := range all {
			b = binary.AppendUvarint(binary.AppendUvarint(b, r[0]), r[1])
		}
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}
