package sink

import (
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// ack is what a stream answers to a publish.
type ack struct {
	Stream    string      `json:"stream"`
	Seq       uint64      `json:"seq"`
	Duplicate bool        `json:"duplicate"`
	Error     *apiRefusal `json:"error"`
}

// judgeAck returns nil if the answer proves that the message predicted for seq is there. Each way in which it does not has a code,
// which metrics use as the class of the error.
func judgeAck(m *nats.Msg, stream string, seq uint64) *outbox.Fault {
	where := fmt.Sprintf("stream %s: message predicted for sequence %d", stream, seq)
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return transient("no_responders", where+": nobody answers to the stream's ingress", nil)
	}
	var a ack
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return transient("unexpected_ack", where+": an answer that is no acknowledgement", err)
	}
	switch {
	case a.Error != nil:
		return refusal(where, a.Error)
	case a.Stream != stream:
		return fatal("wrong_stream", fmt.Sprintf("%s: stream %q answered", where, a.Stream),
			"Another stream takes the ingress: no two may have the same subjects.", nil)
	case a.Duplicate:
		return transient("duplicate_ack", fmt.Sprintf("%s: taken for a duplicate of sequence %d", where, a.Seq), nil)
	case a.Seq != seq:
		return transient("unexpected_ack", fmt.Sprintf("%s: stored at sequence %d", where, a.Seq), nil)
	}
	return nil
}

// judgeOpened is judgeAck for the answer to the first message of a batch, which is empty while the batch is not committed.
func judgeOpened(m *nats.Msg, stream string) *outbox.Fault {
	where := fmt.Sprintf("stream %s: first message of a batch", stream)
	if len(m.Data) == 0 {
		if m.Header.Get("Status") == "503" {
			return transient("no_responders", where+": nobody answers to the stream's ingress", nil)
		}
		return nil
	}
	var a ack
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return transient("unexpected_ack", where+": an answer that is no acknowledgement", err)
	}
	if a.Error != nil {
		return refusal(where, a.Error)
	}
	return transient(codeBatchRefused, fmt.Sprintf("%s: stored at once, at sequence %d: the server knows no batches", where, a.Seq), nil)
}

// codeBatchRefused is the code of the faults after which the process tries no more batches.
const codeBatchRefused = "batch_refused"

// refusal says what an error of JetStream means.
func refusal(where string, r *apiRefusal) *outbox.Fault {
	switch r.ErrCode {
	case 10071, 10164:
		return transient("wrong_last_sequence", where+" refused", r)
	case 10176:
		return transient("batch_incomplete", where+" refused: not all of its batch came in", r)
	case 10201:
		return transient("duplicate_ack", where+" refused: taken for a duplicate, with its batch", r)
	case 10174, 10177, 10179, 10199, 10200, 10210:
		return transient(codeBatchRefused, where+" refused: the stream or its server does not take such batches", r)
	case 10167:
		return transient("throttled", where+" refused: the server's queue is full", r)
	case 10077:
		return transient("stream_full", where+" refused: the stream is at its limit", r)
	case 10023:
		return transient("no_storage", where+" refused: the server has no room", r)
	case 10002:
		return transient("account_full", where+" refused: the account is at its limit", r)
	case 10054:
		return fatal("too_large", where+" refused: above the stream's max_msg_size", "Raise it, or lower sink.max_payload to it.", r)
	case 10097:
		return fatal("too_large", where+" refused: headers above the server's limit", "Map fewer columns to headers.", r)
	case 10060:
		return fatal("wrong_stream", where+" refused: another stream takes the ingress", "No two streams may have the same subjects.", r)
	case 10109:
		return fatal("stream_sealed", where+" refused: the stream is sealed", "It stays so: name another stream and run `outflow init`.", r)
	}
	return transient("refused", where+" refused", r)
}
