package erase

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// found is a message that goes.
type found struct {
	seq             uint64
	subject, header string
}

// asItIs is the subject of a message in the stream itself.
func asItIs(subject string, _ nats.Header) string { return subject }

// headerOf is a stored message's header.
func headerOf(m *jsapi.Message) (nats.Header, error) {
	if len(m.Header) == 0 {
		return nats.Header{}, nil
	}
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil {
		return nil, fmt.Errorf("message %d: %w", m.Seq, err)
	}
	return h, nil
}

// goes says of a message of a stream whether it goes, if it is of the document. unsure: where it lies in the
// stream of the settings is not known, and its position alone says that it stays.
type goes func(h nats.Header, seq uint64, at time.Time) (is, unsure bool)

// find reads the messages of a stream up to a sequence, and returns those of the document that go.
func (c *command) find(ctx context.Context, name string, last uint64,
	original func(subject string, h nats.Header) string, goes goes) (all []found, err error) {
	c.stays[name], c.untold[name], c.reached, c.held = nil, 0, nil, nil
	js, err := c.l.NATS.API().JetStream()
	if err != nil || last == 0 {
		return nil, err
	}
	// The leader says up to where it is read: a replica that lags has less.
	if last, err = stream.New(c.l.NATS.API(), name, c.log).AtOrBelow(ctx, last); err != nil || last == 0 {
		return nil, err
	}
	task := progress.Count(ctx, "reading stream "+name, "messages", int64(last))
	defer task.End()
	var stays []uint64
	var held outbox.Sequences
	reached := map[[2]string]uint64{}
	err = jsapi.ReadStream(ctx, js, name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, HeadersOnly: true,
	}, last, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		seq, h := meta.Sequence.Stream, m.Headers()
		if seq > last {
			return jsapi.ErrStop
		}
		task.Set(int64(seq))
		if c.rec.Erased.Has(seq) {
			held = append(held, outbox.SequenceRange{From: seq, To: seq})
		}
		if s := sourceOf(h); s != nil {
			key := [2]string{s.from, s.filters}
			reached[key] = max(reached[key], s.seq)
		}
		header := h.Get(outbox.HeaderName)
		if header == "" {
			return nil
		}
		now, unsure := goes(h, seq, meta.Timestamp)
		if !now && !unsure {
			return nil
		}
		var data []byte
		if h.Get(sink.HeaderDeadLetter) != "" {
			full, err := c.l.NATS.API().Message(ctx, name, jsapi.MessageRequest{Seq: seq})
			if err != nil || full == nil {
				return err
			}
			data = full.Data
		}
		is, known := c.doc.Is(original(m.Subject(), h), h, data)
		if !known && now {
			c.untold[name]++
		}
		switch {
		case is && now:
			all = append(all, found{seq, m.Subject(), header})
		case is:
			stays = append(stays, seq)
		}
		return nil
	})
	c.stays[name], c.reached, c.held = stays, reached, held
	return all, err
}

// inStream says of a message of the stream whether it goes.
func (c *command) inStream(h nats.Header, seq uint64, at time.Time) (goes, unsure bool) {
	made := micro(c.rd.Stream.Created)
	c.back = c.back || at.Before(made)
	return c.goesFrom(made, h.Get(outbox.HeaderName), seq)
}

// goesFrom says that of a message of a stream that was made at a time. In one that was made anew since the
// request was begun, perhaps from the archive, the position alone tells. The stream that there is now is no
// earlier one than when it was begun: if it was made before that, the broker's clock was set back.
func (c *command) goesFrom(created time.Time, header string, seq uint64) (goes, unsure bool) {
	if created.Equal(micro(c.rd.Stream.Created)) && created.Before(c.rec.Created) {
		created, seq = c.rec.Created, 0
	}
	goes = c.rec.GoesFrom(created, header, seq)
	told := seq > 0 && created.Equal(c.rec.Created)
	return goes, !goes && !told && !c.rec.IsLast(header)
}

func sequences(all []found) outbox.Sequences {
	var each []outbox.SequenceRange
	for _, f := range all {
		each = append(each, outbox.SequenceRange{From: f.seq, To: f.seq})
	}
	return outbox.Sequences(nil).With(each...)
}
