package replay

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// The headers that a replayed message has in addition to its own.
const (
	HeaderReplay = "Outflow-Replay" // the replay's id
	// its sequence in the stream; absent if it was read from the table
	HeaderSequence = "Outflow-Replay-Sequence"
	HeaderPlace    = "Outflow-Replay-Place" // where the replay continues behind it; for outflow alone
)

// resumePoint says where a replay continues: behind this message. It is a header of the message itself, so no
// crash can separate it from what was published.
type resumePoint struct {
	n    uint64 // how many messages the replay has published, this one included
	hash string // of the selection
	from Source
	seq  uint64 // from the stream: of the message
	end  uint64 // from the stream: where the replay ends, the stream's last sequence when it began
	row  rowKey // from the table: of the row
}

// rowKey is a row's position in the canonical order.
type rowKey struct{ doc, key, id string }

func (p resumePoint) String() string {
	s := fmt.Sprintf("v=1 n=%d of=%s from=%s ", p.n, p.hash, p.from)
	if p.from == FromStream {
		return s + fmt.Sprintf("seq=%d end=%d", p.seq, p.end)
	}
	return s + fmt.Sprintf("doc=%s key=%s id=%s", url.QueryEscape(p.row.doc), url.QueryEscape(p.row.key),
		url.QueryEscape(p.row.id))
}

func parseResumePoint(text string) (p resumePoint, err error) {
	for field := range strings.FieldsSeq(text) {
		name, v, _ := strings.Cut(field, "=")
		switch name {
		case "v":
			if v != "1" {
				err = fmt.Errorf("version %s", v)
			}
		case "n":
			p.n, err = strconv.ParseUint(v, 10, 64)
		case "of":
			p.hash = v
		case "from":
			p.from = Source(v)
		case "seq":
			p.seq, err = strconv.ParseUint(v, 10, 64)
		case "end":
			p.end, err = strconv.ParseUint(v, 10, 64)
		case "doc":
			p.row.doc, err = url.QueryUnescape(v)
		case "key":
			p.row.key, err = url.QueryUnescape(v)
		case "id":
			p.row.id, err = url.QueryUnescape(v)
		}
		if err != nil {
			return resumePoint{}, fmt.Errorf("header %s: %q: %w", HeaderPlace, text, err)
		}
	}
	if p.n == 0 || p.hash == "" || p.from != FromStream && p.from != FromTable {
		return resumePoint{}, fmt.Errorf("header %s: %q is none", HeaderPlace, text)
	}
	return p, nil
}

// Source is where events are read from.
type Source string

// The sources.
const (
	FromStream Source = "stream"
	FromTable  Source = "table"
)
