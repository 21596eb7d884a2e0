package oracle

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Message is one message of the stream.
type Message struct {
	Seq     uint64
	Subject string
	Header  nats.Header
	Outflow Header
	Problem error // why Outflow could not be read
	cut     *cut  // nil: it is none
	Data    []byte
	Stored  time.Time // the server's time
}

// Read calls f for each message of the stream from the first to the one that is the last when it is called,
// in order. A message without our header is an error, unless it is a cut: that is left out.
func Read(ctx context.Context, js jetstream.JetStream, stream string, f func(*Message) error) error {
	return readAll(ctx, js, stream, func(m *Message) error {
		switch {
		case m.Problem != nil:
			return m.Problem
		case m.cut != nil:
			return nil
		}
		return f(m)
	})
}

// silence is after which time without a message it is asked whether there is one.
const silence = 5 * time.Second

// messages reads a stream in order.
func messages(ctx context.Context, js jetstream.JetStream, stream string,
	cfg jetstream.OrderedConsumerConfig) (jetstream.MessagesContext, error) {
	cons, err := js.OrderedConsumer(ctx, stream, cfg)
	if err != nil {
		return nil, fmt.Errorf("consumer on %s: %w", stream, err)
	}
	it, err := cons.Messages()
	if err != nil {
		return nil, fmt.Errorf("consumer on %s: %w", stream, err)
	}
	return it, nil
}

// readAll is Read with messages of whatever kind.
func readAll(ctx context.Context, js jetstream.JetStream, stream string, f func(*Message) error) error {
	st, err := js.Stream(ctx, stream)
	if err != nil {
		return fmt.Errorf("stream %s: %w", stream, err)
	}
	last := st.CachedInfo().State.LastSeq
	if st.CachedInfo().State.Msgs == 0 {
		return nil
	}
	it, err := messages(ctx, js, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	defer func() { it.Stop() }()
	var batches batching
	read := uint64(0)
	for {
		wait, cancel := context.WithTimeout(ctx, silence)
		msg, err := it.Next(jetstream.NextContext(wait))
		cancel()
		// what was to come may have been removed meanwhile
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			now, err := js.Stream(ctx, stream)
			if err != nil {
				return fmt.Errorf("stream %s: %w", stream, err)
			}
			if s := now.CachedInfo().State; s.Msgs == 0 || s.FirstSeq > last {
				return nil
			}
			// An ordered consumer of a stream whose leader has moved may stay silent for ever.
			again, err := messages(ctx, js, stream, jetstream.OrderedConsumerConfig{
				DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: read + 1})
			if err != nil {
				return err
			}
			it.Stop()
			it = again
			continue
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", stream, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("message without metadata: %w", err)
		}
		m := parse(msg, meta)
		read = m.Seq
		batches.plain(m)
		if err := f(m); err != nil {
			return err
		}
		if meta.Sequence.Stream >= last || meta.NumPending == 0 { // the end of the stream may be a hole
			return nil
		}
	}
}

func parse(msg jetstream.Msg, meta *jetstream.MsgMetadata) *Message {
	m := &Message{Seq: meta.Sequence.Stream, Subject: msg.Subject(), Header: msg.Headers(), Data: msg.Data(),
		Stored: meta.Timestamp}
	value, found := msg.Headers().Get(packedHeader), msg.Headers().Get(cutHeader)
	if value == "" && m.Subject == cutSubject && found != "" {
		m.cut, m.Problem = parseCut(found)
	} else if value == "" {
		m.Problem = fmt.Errorf("message %d on %s has no %s header: not one of ours", m.Seq, m.Subject,
			packedHeader)
	} else if h, err := ParseHeader(value); err != nil {
		m.Problem = fmt.Errorf("message %d: %w", m.Seq, err)
	} else {
		m.Outflow = h
	}
	return m
}

// TableRow is one row of the outbox as the table has it.
type TableRow struct {
	Doc, Actor, Key string
	Payload         string
	Committed       time.Time // zero where the server does not track it (track_commit_timestamp)
}

// Table reads the rows of a table of the default shape, by event id.
func Table(ctx context.Context, conn *pgx.Conn, table string) (map[string]TableRow, error) {
	name := pgx.Identifier{table}
	rows, err := conn.Query(ctx, `SELECT id::text, doc_id, actor_id, seq_key, payload::text,
		CASE WHEN current_setting('track_commit_timestamp') = 'on' THEN pg_xact_commit_timestamp(xmin) END
		FROM `+name.Sanitize())
	if err != nil {
		return nil, fmt.Errorf("read table %s: %w", table, err)
	}
	out := map[string]TableRow{}
	var id string
	var r TableRow
	var committed *time.Time
	_, err = pgx.ForEachRow(rows, []any{&id, &r.Doc, &r.Actor, &r.Key, &r.Payload, &committed}, func() error {
		r.Committed = time.Time{}
		if committed != nil {
			r.Committed = *committed
		}
		out[id] = r
		return nil
	})
	return out, err
}

// Verdict is what a comparison found.
type Verdict struct {
	Written    int  // rows in the table
	Published  int  // messages in the stream
	Missing    int  // rows without a message
	Repeated   int  // messages beyond the first of a row
	Foreign    int  // messages without a row
	Changed    int  // messages with another payload, key or subject than their row
	OutOfOrder int  // messages after one with a higher seq_key of the same document and actor
	Timed      bool // the server tracks commit timestamps, so that Late can be told
	// of OutOfOrder: committed behind the close of a higher one's window, so that they have to come after it
	Late int

	Digest string // SHA-256 over subject, headers and data of all messages: equal for equal streams
	First  string // the first thing that is wrong, in words
}

// OK reports whether everything is there exactly once, unchanged. Order is judged by the caller: an event
// that committed later than the horizon comes after.
func (v *Verdict) OK() bool {
	return v.Missing == 0 && v.Repeated == 0 && v.Foreign == 0 && v.Changed == 0 && v.Written == v.Published
}

func (v *Verdict) String() string {
	s := fmt.Sprintf("written %d, published %d, missing %d, repeated %d, foreign %d, changed %d, out of "+
		"order %d (%d of them late)",
		v.Written, v.Published, v.Missing, v.Repeated, v.Foreign, v.Changed, v.OutOfOrder, v.Late)
	if v.First != "" {
		s += " (first: " + v.First + ")"
	}
	return s
}

// Checker compares messages, given in stream order, with rows.
type Checker struct {
	rows   map[string]TableRow
	seen   map[string]bool
	newest map[[2]string]string
	places lateness
	sum    hash.Hash
	v      Verdict
}

// NewChecker returns a checker for the table's rows.
func NewChecker(rows map[string]TableRow) *Checker {
	return &Checker{rows: rows, seen: map[string]bool{}, newest: map[[2]string]string{},
		places: newLateness(), sum: sha256.New(), v: Verdict{Written: len(rows)}}
}

// Add takes the next message.
func (c *Checker) Add(m *Message) {
	c.v.Published++
	digest(c.sum, m)
	row, ok := c.rows[m.Outflow.ID]
	switch {
	case !ok:
		c.v.Foreign++
		c.note("message %d (event %s) has no row", m.Seq, m.Outflow.ID)
		return
	case c.seen[m.Outflow.ID]:
		c.v.Repeated++
		c.note("message %d repeats event %s", m.Seq, m.Outflow.ID)
		return
	case row.Payload != string(m.Data) || row.Key != m.Outflow.Key:
		c.v.Changed++
		c.note("message %d (event %s) differs from its row", m.Seq, m.Outflow.ID)
	}
	c.seen[m.Outflow.ID] = true
	sequence := [2]string{row.Doc, row.Actor}
	behind := c.newest[sequence] > row.Key
	if behind {
		c.v.OutOfOrder++
	} else {
		c.newest[sequence] = row.Key
	}
	c.places.add(sequence, m, row.Committed, behind)
}

// Verdict ends the comparison. The horizon is the one that was in force.
func (c *Checker) Verdict(horizon time.Duration) Verdict {
	v := c.v
	for _, r := range c.rows {
		v.Timed = !r.Committed.IsZero()
		break // one for all: the server's setting
	}
	if v.Timed {
		v.Late = c.places.count(horizon)
	}
	for id := range c.rows {
		if !c.seen[id] {
			v.Missing++
		}
	}
	if v.Missing > 0 && v.First == "" {
		v.First = fmt.Sprintf("%d rows without a message", v.Missing)
	}
	v.Digest = fmt.Sprintf("%x", c.sum.Sum(nil))
	return v
}

func (c *Checker) note(format string, args ...any) {
	if c.v.First == "" {
		c.v.First = fmt.Sprintf(format, args...)
	}
}

// digest adds the whole of a message to a digest.
func digest(h hash.Hash, m *Message) {
	fmt.Fprintf(h, "%s\n", m.Subject)
	for _, name := range slices.Sorted(maps.Keys(m.Header)) {
		for _, v := range m.Header[name] {
			fmt.Fprintf(h, "%s: %s\n", name, v)
		}
	}
	fmt.Fprintf(h, "%d\n", len(m.Data))
	h.Write(m.Data)
}

// Compare reads stream and table and compares them.
func Compare(ctx context.Context, conn *pgx.Conn, table string, js jetstream.JetStream, stream string,
	horizon time.Duration) (Verdict, error) {
	rows, err := Table(ctx, conn, table)
	if err != nil {
		return Verdict{}, err
	}
	c := NewChecker(rows)
	err = Read(ctx, js, stream, func(m *Message) error { c.Add(m); return nil })
	return c.Verdict(horizon), err
}

// Digest reads a stream and returns its number of messages and the digest of all of them.
func Digest(ctx context.Context, js jetstream.JetStream, stream string) (n int, sum string, err error) {
	h := sha256.New()
	err = Read(ctx, js, stream, func(m *Message) error { n++; digest(h, m); return nil })
	return n, fmt.Sprintf("%x", h.Sum(nil)), err
}
