package replay

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// Message is an event that is replayed.
type Message struct {
	Seq     uint64 // in the stream; 0: read from the table
	Subject string
	Header  nats.Header // without those of the protocol
	Data    []byte
	Outflow outbox.Header
	Doc     string // the document, if DocOK
	DocOK   bool
	Time    time.Time // when it was stored in the stream, or the table's time column; zero if unknown

	resume resumePoint // where a replay goes on behind it; its number is not set
}

// line is a message as a line of JSON. The names are stable.
type line struct {
	Sequence uint64              `json:"sequence,omitempty"`
	Subject  string              `json:"subject"`
	Headers  map[string][]string `json:"headers"`
	Position *outbox.Position    `json:"position,omitempty"` // of what comes from the stream
	Document *string             `json:"document,omitempty"`
	ID       string              `json:"id"`
	Key      string              `json:"key"`
	Time     *time.Time          `json:"time,omitempty"`
	Data     json.RawMessage     `json:"data,omitempty"`
	Base64   []byte              `json:"data_base64,omitempty"`
}

// appendLine appends the message as a line of JSON. Data that is JSON is copied as it is, compacted if it has
// line breaks; all other data is written as base64.
func (m *Message) appendLine(b []byte) ([]byte, error) {
	l := line{Sequence: m.Seq, Subject: m.Subject, Headers: m.Header, ID: m.Outflow.ID, Key: m.Outflow.Key}
	if m.Seq > 0 {
		l.Position = &m.Outflow.Pos
	}
	if m.DocOK {
		l.Document = &m.Doc
	}
	if !m.Time.IsZero() {
		t := m.Time.UTC()
		l.Time = &t
	}
	isJSON := len(m.Data) > 0 && utf8.Valid(m.Data) && json.Valid(m.Data)
	if !isJSON {
		l.Base64 = m.Data
		if l.Base64 == nil {
			l.Base64 = []byte{}
		}
	}
	head := bytes.NewBuffer(b)
	e := json.NewEncoder(head)
	e.SetEscapeHTML(false)
	if err := e.Encode(l); err != nil {
		return b, err
	}
	if !isJSON {
		if len(m.Data) == 0 {
			head.Truncate(head.Len() - len("}\n"))
			head.WriteString(`,"data_base64":""}` + "\n")
		}
		return head.Bytes(), nil
	}
	// The encoder would rewrite the data, so it is appended by hand.
	head.Truncate(head.Len() - len("}\n"))
	head.WriteString(`,"data":`)
	if bytes.ContainsAny(m.Data, "\r\n") {
		if err := json.Compact(head, m.Data); err != nil {
			return b, err
		}
	} else {
		head.Write(m.Data)
	}
	head.WriteString("}\n")
	return head.Bytes(), nil
}

// eventHeaders are the headers of an event, without those for the publish itself and those of another replay.
func eventHeaders(h nats.Header) nats.Header {
	out := nats.Header{}
	for name, values := range h {
		if !strings.HasPrefix(strings.ToLower(name), "nats-") && !strings.HasPrefix(name, HeaderReplay) &&
			name != outbox.HeaderLost {
			out[name] = values
		}
	}
	return out
}

// deadLetterDoc is the document that a dead letter names.
func deadLetterDoc(header nats.Header, data []byte) (doc string, isOne bool) {
	if header.Get(sink.HeaderDeadLetter) == "" {
		return "", false
	}
	var d sink.DeadLetter
	if json.Unmarshal(data, &d) != nil {
		return "", true
	}
	return d.Doc, true
}

func quoted(s string) string { return strconv.Quote(s) }

const headerDead = sink.HeaderDeadLetter
