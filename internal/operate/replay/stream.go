package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// clockSlack is by how much stored times may decrease from one message to the next, when another server
// becomes the leader.
const clockSlack = time.Minute

// askTimeout bounds a question to the stream's leader, which may have to be elected.
const askTimeout = 20 * time.Second

// streamSource reads from the stream.
type streamSource struct {
	js        jetstream.JetStream
	api       *jsapi.Client
	name      string
	match     *matcher
	extractor *extractor

	stream  jetstream.Stream
	info    *jetstream.StreamInfo
	first   uint64 // sequence of the first message; beyond last if there is none
	last    uint64 // the stream's last sequence
	firstAt time.Time
	header  *outbox.Header // of the first message; nil if it has none
	end     uint64         // the replay ends at this sequence
	past    *past          // nil: no archive, or none is needed

	closePast func() error // nil: no archive was opened
}

// open reads the stream's state. A stream that does not exist is an empty one.
func (s *streamSource) open(ctx context.Context) error {
	defer progress.Wait(ctx, "waiting for NATS: stream "+s.name)()
	st, err := s.js.Stream(ctx, s.name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s.first = 1
		return nil
	}
	if err != nil {
		return fmt.Errorf("stream %s: %w", s.name, err)
	}
	info, err := st.Info(ctx, jetstream.WithDeletedDetails(true))
	if err != nil {
		return fmt.Errorf("stream %s: %w", s.name, err)
	}
	s.stream, s.info, s.last, s.end = st, info, info.State.LastSeq, info.State.LastSeq
	s.first = max(info.State.FirstSeq, 1)
	if info.State.Msgs == 0 {
		s.first = s.last + 1
		return nil
	}
	m, err := s.get(ctx, jsapi.MessageRequest{Seq: s.first})
	if err != nil {
		return err
	}
	if m == nil {
		return fmt.Errorf("stream %s: its first message went away while it was read", s.name)
	}
	s.firstAt = m.Time
	s.setHeader(m.Subject, m.Header)
	return nil
}

// setHeader takes the header of the first message. A cut counts as the message that ends the window before
// it: what came before has no position behind it.
func (s *streamSource) setHeader(subject string, header nats.Header) {
	s.header = nil
	if h, err := outbox.ParseHeader(header.Get(outbox.HeaderName)); err == nil {
		s.header = &h
	} else if c := outbox.CutOf(subject, header); c != nil {
		s.header = &outbox.Header{Pos: outbox.Position{LSN: c.LSN}, Due: c.LSN, Thru: c.LSN}
	}
}

// exists says what the stream has; it is for errors.
func (s *streamSource) exists() string {
	switch {
	case s.info == nil:
		return fmt.Sprintf("stream %s does not exist", s.name)
	case s.first > s.last:
		return fmt.Sprintf("stream %s is empty, its last sequence was %d", s.name, s.last)
	}
	text := fmt.Sprintf("%s has sequence %d (stored %s", s.whole(), s.first,
		s.firstAt.UTC().Format(time.RFC3339))
	if s.header != nil {
		text += fmt.Sprintf(", position %v", s.header.Pos)
	}
	return text + fmt.Sprintf(") to %d", s.last)
}

// whole names what is read.
func (s *streamSource) whole() string {
	if s.past == nil {
		return "stream " + s.name
	}
	return "stream " + s.name + " with its archive"
}

// holds reports whether the stream still has every message of the selection that it ever had, and says why.
//
// Messages are removed from the beginning (by retention) and from within (by a person, a limit per subject,
// or a broker that lost its end). A removed message can't be looked at. It is known not to belong to the
// selection if the selection's lower end is behind it:
//
//   - by sequence: directly;
//   - by time: messages are stored in the order of time, so what was removed from the beginning was stored no
//     later than the first message;
//   - by position: a window has no event that was read behind its thru, and thru never decreases, so what was
//     removed from the beginning has no position behind the thru of the first message.
func (s *streamSource) holds() (bool, string) {
	sel := s.match.sel
	gone := uint64(s.numDeleted())
	switch {
	case s.info == nil || s.first > s.last:
		return s.info != nil && s.last == 0, s.exists()
	case sel.Seq.From != nil && *sel.Seq.From >= s.first || sel.Seq.Given() && s.complete():
		return s.holdsSequences()
	case sel.Seq.Given():
		return false, fmt.Sprintf("the sequences below %d are gone", s.first)
	case gone > 0:
		return false, fmt.Sprintf(
			"%d messages inside of %s are gone, and nobody knows whose they were", gone, s.whole())
	case s.complete():
		return true, s.whole() + " has every message from sequence 1 on"
	case sel.Time.From != nil && sel.Time.From.After(s.firstAt.Add(clockSlack)):
		return true, fmt.Sprintf("%s, and what it had before was stored before that", s.exists())
	case sel.Position.From != nil && s.header != nil && sel.Position.From.LSN > s.header.Thru:
		return true, fmt.Sprintf("%s, and what it had before lies at or below %v", s.exists(), s.header.Thru)
	}
	return false, fmt.Sprintf("%s: %d older messages are gone, and nobody knows whether they belong to the "+
		"selection", s.exists(), s.first-1)
}

// stillHolds makes sure, after the selection behind a sequence was summarized, that the stream holds it
// still: what retention took after it was opened, and before it was read, would be missing without a word.
func (s *streamSource) stillHolds(ctx context.Context, after uint64) error {
	from, to := s.span(after)
	if s.stream == nil || from > to || s.past != nil && from < s.past.hot {
		return nil // see stillAll
	}
	now := streamSource{js: s.js, api: s.api, name: s.name, match: s.match, extractor: s.extractor}
	if err := now.open(ctx); err != nil {
		return err
	}
	begun := after > 0 || s.past != nil // only what is gone from its beginning was looked at
	if holds, why := now.holds(); !holds && (now.first > from || !begun) {
		return s.vanished("some of the selection may have been removed while it was read: " + why)
	}
	return nil
}

// holdsSequences says whether the messages of a range of sequences are all there.
func (s *streamSource) holdsSequences() (bool, string) {
	r := s.match.sel.Seq
	erased := s.erased()
	for _, seq := range s.info.State.Deleted {
		if !erased.Has(seq) && (r.From == nil || seq >= *r.From) && (r.To == nil || seq <= *r.To) {
			return false, fmt.Sprintf("sequence %d of stream %s is gone", seq, s.name)
		}
	}
	for _, gone := range s.past.missing() {
		if (r.From == nil || gone.To >= *r.From) && (r.To == nil || gone.From <= *r.To) {
			return false, fmt.Sprintf("sequence %d of %s is gone", gone.From, s.whole())
		}
	}
	return true, s.exists()
}

func (s *streamSource) numDeleted() int {
	if s.info == nil {
		return 0
	}
	n := max(s.info.State.NumDeleted, len(s.info.State.Deleted))
	erased := s.erased()
	for _, seq := range s.info.State.Deleted {
		if erased.Has(seq) {
			n--
		}
	}
	for _, gone := range s.past.missing() {
		if gone.From < s.past.hot { // the stream counts the others
			n += int(min(gone.To, s.past.hot-1) - gone.From + 1)
		}
	}
	return n
}

// span is the range of sequences that the selection can be in. It is empty if from is greater than to.
func (s *streamSource) span(after uint64) (from, to uint64) {
	from, to = max(s.first, after+1), min(s.end, s.last)
	if r := s.match.sel.Seq; r.From != nil {
		from = max(from, *r.From)
	}
	if r := s.match.sel.Seq; r.To != nil {
		to = min(to, *r.To)
	}
	return from, to
}

// summarize summarizes the selection behind a sequence and calls f, if it is not nil, with each message. It
// reads headers only.
func (s *streamSource) summarize(ctx context.Context, after uint64, sum *Summary,
	f func(*Message) error) error {
	from, to := s.span(after)
	err := s.read(ctx, from, to, true, func(m *Message) error {
		if m.Header.Get(headerDead) != "" && s.match.needsBody() && len(m.Data) == 0 {
			if err := s.fetchBody(ctx, m); err != nil {
				return err
			}
		}
		ok, err := s.match.selects(m)
		if err != nil || !ok {
			return err
		}
		m.Doc, m.DocOK = s.extractor.document(m)
		sum.add(m)
		if f != nil {
			return f(m)
		}
		return nil
	})
	sum.close()
	return err
}

func (s *streamSource) fetchBody(ctx context.Context, m *Message) error {
	full, err := s.get(ctx, jsapi.MessageRequest{Seq: m.Seq})
	if err == nil && full == nil {
		err = s.removed(m.Seq)
	}
	if err == nil {
		m.Data = full.Data
	}
	return err
}

// each calls f with each message of the selection behind a sequence. It fails if messages that sum counted
// are gone by now.
func (s *streamSource) each(ctx context.Context, after uint64, sum *Summary, f func(*Message) error) error {
	if sum.Events == 0 {
		return nil
	}
	var n uint64
	take := func(m *Message) error {
		ok, err := s.match.selects(m)
		if err != nil || !ok {
			return err
		}
		n++
		m.Doc, m.DocOK = s.extractor.document(m)
		m.resume = resumePoint{from: FromStream, seq: m.Seq, end: s.end}
		return f(m)
	}
	from, to := max(sum.First.Sequence, after+1), sum.Last.Sequence
	var err error
	few, archived := sum.sequences, s.past != nil && from < s.past.hot
	if few != nil && !archived && uint64(len(few))*8 < to-from {
		err = s.fetch(ctx, few, take)
	} else {
		err = s.read(ctx, from, to, false, take)
	}
	if err == nil && n != sum.Events {
		err = s.vanished(fmt.Sprintf("%d of %d events were removed from stream %s while it was read",
			sum.Events-n, sum.Events, s.name))
	}
	return err
}

func (s *streamSource) vanished(what string) error {
	return fatal("replay_removed", what, "What came before them was read in order. Look with --dry-run "+
		"what there is now, and go on with --from table")
}

func (s *streamSource) removed(seq uint64) error {
	return s.vanished(fmt.Sprintf("sequence %d was removed from stream %s while it was read", seq, s.name))
}

// get reads a message from the stream's leader: a replica that lags may not have it yet. nil: there is none.
func (s *streamSource) get(ctx context.Context, r jsapi.MessageRequest) (*Message, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	raw, err := s.api.Message(ctx, s.name, r)
	if err != nil {
		return nil, fmt.Errorf("stream %s: read sequence %d: %w", s.name, r.Seq, err)
	}
	if raw == nil {
		return nil, nil
	}
	m := &Message{Seq: raw.Seq, Subject: raw.Subject, Data: raw.Data, Time: raw.Time}
	if len(raw.Header) > 0 {
		if m.Header, err = nats.DecodeHeadersMsg(raw.Header); err != nil {
			return nil, fmt.Errorf("stream %s, sequence %d: headers: %w", s.name, raw.Seq, err)
		}
	}
	return m, nil
}

// fetch reads messages one by one.
func (s *streamSource) fetch(ctx context.Context, sequences []uint64, f func(*Message) error) error {
	defer progress.Wait(ctx, "waiting for NATS: messages of stream "+s.name)()
	for _, seq := range sequences {
		m, err := s.get(ctx, jsapi.MessageRequest{Seq: seq})
		if err == nil && m == nil {
			err = s.removed(seq)
		}
		if err != nil {
			return err
		}
		if err := s.event(m, f); err != nil {
			return err
		}
	}
	return nil
}

// read calls f with each message from one sequence to another whose subject matches the filters.
func (s *streamSource) read(ctx context.Context, from, to uint64, headersOnly bool,
	f func(*Message) error) error {
	if from > to || len(s.match.filters) == 0 {
		return nil
	}
	begin := from
	from, err := s.readPast(ctx, begin, to, f)
	if err != nil || from > to {
		return err
	}
	if !headersOnly {
		begin = from // each counts: what goes behind the reader is not missed
	}
	oc := jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from, HeadersOnly: headersOnly,
		FilterSubjects: s.match.filters,
	}
	if slices.Equal(oc.FilterSubjects, []string{">"}) {
		oc.FilterSubjects = nil
	}
	newest, err := s.newest(ctx)
	if err != nil {
		return err
	}
	if t := s.match.sel.Time.From; t != nil && t.After(s.firstAt.Add(2*clockSlack)) && from == s.first {
		start := t.Add(-clockSlack)
		oc.DeliverPolicy, oc.OptStartSeq, oc.OptStartTime = jetstream.DeliverByStartTimePolicy, 0, &start
		if newest != nil && newest.Time.Before(start) {
			newest = nil
		}
	}
	if newest == nil || newest.Seq < from {
		return s.stillAll(ctx, begin, from)
	}
	task := progress.Count(ctx, "reading stream "+s.name, "messages", int64(to-from+1))
	defer task.End()
	err = jsapi.ReadStream(ctx, s.js, s.name, oc, newest.Seq,
		func(raw jetstream.Msg, meta *jetstream.MsgMetadata) error {
			task.Set(int64(min(meta.Sequence.Stream, to) - from + 1))
			m := &Message{Seq: meta.Sequence.Stream, Subject: raw.Subject(), Header: raw.Headers(),
				Data: raw.Data(), Time: meta.Timestamp}
			if m.Seq > to || s.tooLate(m.Time) {
				return jsapi.ErrStop
			}
			if err := s.event(m, f); err != nil {
				return err
			}
			if m.Seq == to {
				return jsapi.ErrStop
			}
			return nil
		})
	if err != nil {
		return err
	}
	return s.stillAll(ctx, begin, from)
}

// newest is the newest message of the stream that a filter lets through, by its leader; nil: there is none. A
// replica that lags has not got that far, and would end the reading where it is.
func (s *streamSource) newest(ctx context.Context) (newest *jsapi.Message, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for _, filter := range s.match.filters {
		m, err := s.api.Message(ctx, s.name, jsapi.MessageRequest{Last: filter})
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", s.name, err)
		}
		if m != nil && (newest == nil || m.Seq > newest.Seq) {
			newest = m
		}
	}
	return newest, nil
}

// event calls f with a message, unless it is a cut: that is nothing to be replayed.
func (s *streamSource) event(m *Message, f func(*Message) error) (err error) {
	if outbox.CutOf(m.Subject, m.Header) != nil {
		return nil
	}
	if m.Outflow, err = outbox.ParseHeader(m.Header.Get(outbox.HeaderName)); err != nil {
		return fatal("foreign_message", fmt.Sprintf("stream %s: the message at sequence %d (%s) is not "+
			"outflow's: %v", s.name, m.Seq, m.Subject, err),
			"Leave it out: replay what is before and behind it with --seq")
	}
	return f(m)
}
