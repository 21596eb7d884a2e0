package sink

import (
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// checkAck returns nil if the answer proves that the message predicted for seq is there. Each way in which it
// does not has a code, which metrics use as the class of the error.
func checkAck(m *nats.Msg, stream string, seq uint64) *outbox.Fault {
	where := fmt.Sprintf("stream %s: message predicted for sequence %d", stream, seq)
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return transient("no_responders", where+": nobody answers to the stream's ingress", nil)
	}
	var a jsapi.Ack
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
		return transient("duplicate_ack", fmt.Sprintf("%s: taken for a duplicate of sequence %d", where,
			a.Seq), nil)
	case a.Seq != seq:
		return transient("unexpected_ack", fmt.Sprintf("%s: stored at sequence %d", where, a.Seq), nil)
	}
	return nil
}

// checkBatchStart is checkAck for the answer to the first message of a batch, which is empty if the server
// took the message.
func checkBatchStart(m *nats.Msg, stream string) *outbox.Fault {
	where := fmt.Sprintf("stream %s: first message of a batch", stream)
	if len(m.Data) == 0 {
		if m.Header.Get("Status") == "503" {
			return transient("no_responders", where+": nobody answers to the stream's ingress", nil)
		}
		return nil
	}
	var a jsapi.Ack
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return transient("unexpected_ack", where+": an answer that is no acknowledgement", err)
	}
	if a.Error != nil {
		return refusal(where, a.Error)
	}
	return transient(codeBatchRefused,
		fmt.Sprintf("%s: stored at once, at sequence %d: the server knows no batches", where, a.Seq), nil)
}

// codeBatchRefused is the code of the faults after which the process tries no more batches.
const codeBatchRefused = "batch_refused"

// codeWrongSequence is the code of a refusal for the expected last sequence, or for the fence.
const codeWrongSequence = "wrong_last_sequence"

// refusal says what an error of JetStream means.
func refusal(where string, r *jsapi.Error) *outbox.Fault {
	switch r.ErrCode {
	case jetstream.JSErrCodeStreamWrongLastSequence, jetstream.JSErrCodeStreamWrongLastSequenceConstant:
		return transient(codeWrongSequence, where+" refused", r)
	case jsapi.AtomicPublishIncompleteBatch:
		return transient("batch_incomplete", where+" refused: not all of its batch came in", r)
	case jsapi.AtomicPublishContainsDuplicateMessage:
		return transient("duplicate_ack", where+" refused: taken for a duplicate, with its batch", r)
	case jsapi.AtomicPublishDisabled, jsapi.AtomicPublishUnsupportedHeaderBatch,
		jsapi.AtomicPublishInvalidBatchID,
		jsapi.AtomicPublishTooLargeBatch, jsapi.AtomicPublishInvalidBatchCommit,
		jsapi.AtomicPublishTooManyInflight:
		return transient(codeBatchRefused, where+
			" refused: the stream or its server does not take such batches", r)
	case jsapi.StreamTooManyRequests:
		return transient("throttled", where+" refused: the server's queue is full", r)
	case jsapi.StreamStoreFailed:
		return transient("stream_full", where+" refused: the stream is at its limit", r)
	case jsapi.InsufficientResources:
		return transient("no_storage", where+" refused: the server has no room", r)
	case jsapi.AccountResourcesExceeded:
		return transient("account_full", where+" refused: the account is at its limit", r)
	case jetstream.JSErrCodeStreamMessageExceedsMaximum:
		return fatal("too_large", where+" refused: above the stream's max_msg_size",
			"Raise it, or lower sink.max_payload to it.", r)
	case jsapi.StreamHeaderExceedsMaximum:
		return fatal("too_large", where+" refused: headers above the server's limit",
			"Map fewer columns to headers.", r)
	case jsapi.StreamNotMatch:
		return fatal("wrong_stream", where+" refused: another stream takes the ingress",
			"No two streams may have the same subjects.", r)
	case jsapi.StreamSealed:
		return fatal("stream_sealed", where+" refused: the stream is sealed",
			"It stays so: name another stream and run `outflow init`.", r)
	}
	return transient("refused", where+" refused", r)
}
