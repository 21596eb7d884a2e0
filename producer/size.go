package producer

import (
	"fmt"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// protocol is what sink.max_payload counts for the protocol's own headers.
const protocol = 128

// maxHeaders is how much mapped headers may take together.
const maxHeaders = 16 << 10

// fixedHeader is what the Outflow header's line takes at most, without event id and key. An event is refused
// that would have fitted only if it is within about 160 bytes of the limit.
var fixedHeader = outbox.MaxHeaderLine(0, 0)

// longestValue is how long an id of unknown length is in the header at most.
const longestValue = 200

// messageSize is the size of a message as sink.max_payload counts it, or a little more: id and key are those
// of the header.
func messageSize(payload, id, key, mapped int) int {
	return payload + fixedHeader + id + key + mapped + protocol
}

// headerValue is the length of an id or a key in the header.
func headerValue(s string) int { return len(outbox.AppendHeaderValue(nil, s)) }

// mappedSize is what a mapped header takes.
func mappedSize(header, value string) int {
	return len(header) + len(strings.Trim(value, " \t\r\n")) + 4
}

// judgeSize refuses an event whose message would be too large, or whose mapped headers would be.
func (o *Outbox) judgeSize(e *Event, payload, id, key int, lookup func(column string, e *Event) (string,
	bool)) *Invalid {
	mapped := 0
	for header, column := range o.cfg.Headers {
		if v, ok := lookup(column, e); ok {
			mapped += mappedSize(header, v)
		}
	}
	if mapped > maxHeaders {
		return invalid("Columns", fmt.Sprintf("(%d bytes)", mapped),
			fmt.Sprintf("its mapped headers are over %d bytes", maxHeaders),
			"Map fewer or shorter columns to headers")
	}
	if size := messageSize(payload, id, key, mapped); size > o.cfg.MaxPayload {
		return invalid("Payload", shown(string(e.Payload)),
			fmt.Sprintf("it is %d bytes, with its headers up to %d, more than sink.max_payload, %d", payload,
				size, o.cfg.MaxPayload), "Make it smaller, or raise sink.max_payload and MaxPayload here")
	}
	return nil
}
