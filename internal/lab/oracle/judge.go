package oracle

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Judgement is what the comparison of a stream with the WAL found. Each message is counted as one thing, but
// that Changed, Header and OutOfOrder may be said of the same one.
type Judgement struct {
	Events    int // in committed transactions
	Windows   int // that the rules make of them
	Held      int // events for which nothing in the WAL has closed a window yet: no message is due
	Published int // messages in the stream

	Missing  int // events whose message is due and is not there
	Repeated int // messages beyond the first of an event
	Changed  int // messages with another subject or other data than the event
	Header   int // messages with another header than the rules give
	// messages that stand elsewhere: the fewest that would have to be moved, and those before they are due
	OutOfOrder int
	Aborted    int // messages of an event that no committed transaction wrote
	Foreign    int // messages without our header

	Repaired    int // messages that a repair published, if that is tolerated
	DeadLetters int // dead letters, if they are tolerated
	Cuts        int // cuts
	Left        int // events that another cluster publishes
	Removed     int // messages that retention removed at the beginning, if that is tolerated

	First  string // the first difference in words: sequence, what there is, what ought to be
	Digest string // SHA-256 over subject, headers and data of all messages
}

// OK reports whether the stream is the sequence that the WAL makes, message by message and byte by byte, and
// whether all that is committed is in it; but for what is tolerated.
func (j *Judgement) OK() bool {
	return j.Held == 0 && j.Missing == 0 && j.Repeated == 0 && j.Changed == 0 && j.Header == 0 &&
		j.OutOfOrder == 0 && j.Aborted == 0 && j.Foreign == 0 && j.First == ""
}

func (j *Judgement) String() string {
	s := fmt.Sprintf("%d events in the WAL, %d messages published in %d windows: missing %d, repeated %d, "+
		"changed %d, header wrong %d, "+
		"out of order %d, aborted %d, foreign %d", j.Events, j.Published, j.Windows, j.Missing, j.Repeated,
		j.Changed, j.Header, j.OutOfOrder, j.Aborted, j.Foreign)
	for _, more := range []struct {
		n    int
		what string
	}{{j.Held, "not due yet"}, {j.Repaired, "by repair"}, {j.DeadLetters, "dead letters"}, {j.Cuts, "cuts"},
		{j.Left, "left to others"}, {j.Removed, "removed by retention"}} {
		if more.n > 0 {
			s += fmt.Sprintf(", %s %d", more.what, more.n)
		}
	}
	if j.First != "" {
		s += " (first: " + j.First + ")"
	}
	return s
}

// Judge reads the whole stream and compares it with what the WAL makes. Nobody may publish meanwhile.
func Judge(ctx context.Context, js jetstream.JetStream, stream string, t *Truth, cfg Config) (Judgement,
	error) {
	c, err := newCase(t, cfg)
	if err != nil {
		return Judgement{}, err
	}
	if err := readAll(ctx, js, stream, func(m *Message) error { c.add(m); return nil }); err != nil {
		return Judgement{}, err
	}
	st, err := js.Stream(ctx, stream)
	if err != nil {
		return Judgement{}, fmt.Errorf("stream %s: %w", stream, err)
	}
	return c.judgement(int(st.CachedInfo().State.FirstSeq) - 1), nil
}

// judged is a comparison under way.
type judged struct {
	cfg  Config
	want *expectation
	j    Judgement
	sum  hash.Hash

	next   int    // where the next message is if all is well
	seen   []bool // which of want.messages were
	longs  []int  // see moved
	placed int    // messages that have been found in want.messages
	cut    *cut   // the newest one
	cutSeq uint64 // its; 0: there is none

	// To find what is not where it should be; made when it is needed.
	byID     map[string]int // where in others
	byPos    map[Position]int
	others   []*Event // those of want.messages, then those that are expected nowhere in particular
	seenMore []bool
}

func newCase(t *Truth, cfg Config) (*judged, error) {
	x, err := t.expect(cfg)
	if err != nil {
		return nil, err
	}
	return &judged{
		cfg: cfg, want: x, sum: sha256.New(), seen: make([]bool, len(x.messages)),
		j: Judgement{Events: t.Events, Windows: x.windows, Held: len(x.held), Left: len(x.left)},
	}, nil
}

// add takes the next message.
func (c *judged) add(m *Message) {
	c.j.Published++
	digest(c.sum, m)
	if m.cut != nil {
		c.addCut(m)
		return
	}
	value := m.Header.Get(packedHeader)
	if value == "" {
		c.j.Foreign++
		c.note(m, "has no %s header", packedHeader)
		return
	}
	at, want := c.next, ""
	if at < len(c.want.messages) {
		want = c.want.header(&c.want.messages[at])
	}
	if value != want {
		if at = c.find(m); at >= 0 && at < len(c.want.messages) {
			want = c.want.header(&c.want.messages[at])
		}
	}
	repaired := c.cfg.Repaired && m.Problem == nil && m.Outflow.Pos.Index >= repairedIndex
	if repaired {
		c.j.Repaired++
	}
	switch {
	case at < 0:
		c.j.Aborted++
		c.note(m, "is of an event that no committed transaction wrote")
	case at >= len(c.want.messages):
		c.stray(m, at, repaired)
	default:
		c.expected(m, at, repaired, want)
	}
}

// expected compares a message with the one that it ought to be, and its header with the one wanted.
func (c *judged) expected(m *Message, at int, repaired bool, want string) {
	e := &c.want.messages[at]
	if c.seen[at] {
		c.j.Repeated++
		c.note(m, "repeats %v", e.Event)
		return
	}
	if c.cfg.Removed && c.placed == 0 && !repaired {
		for i := range at {
			if !c.seen[i] {
				c.seen[i] = true
				c.j.Removed++
			}
		}
		c.next = at
	}
	c.seen[at] = true
	if !repaired {
		if at != c.next && !c.onlySeen(c.next, at) {
			c.note(m, "stands at a wrong place")
		}
		c.placed++
		c.moved(at)
		c.next = at + 1
		c.headers(m, e, want)
	}
	c.content(m, e.Event)
}

// onlySeen reports whether the messages from..to-1 have all been.
func (c *judged) onlySeen(from, to int) bool {
	if from > to {
		return false
	}
	for _, seen := range c.seen[from:to] {
		if !seen {
			return false
		}
	}
	return true
}

// headers compares everything in the headers with what ought to be there; want is the packed one.
func (c *judged) headers(m *Message, e *expected, want string) {
	wrong := ""
	if value := m.Header.Get(packedHeader); value != want {
		wrong = fmt.Sprintf("%s header %q, want %q", packedHeader, value, want)
	}
	if got, want := m.Header.Get(expectedHeader), strconv.FormatUint(m.Seq-1, 10); got != want &&
		wrong == "" {
		wrong = fmt.Sprintf("%s header %q, want %s", expectedHeader, got, want)
	}
	mapped := e.Mapped
	_, dead := m.Header[deadLetterHeader]
	if dead && c.cfg.DeadLetters {
		mapped = nil
	}
	var extra []string
	for name, values := range m.Header {
		switch name {
		case packedHeader, expectedHeader, deadLetterHeader, msgIDHeader, originHeader:
		case fenceSubjectHeader:
			fence, subject := m.Header.Get(fenceHeader), m.Header.Get(name)
			if (subject != cutSubject || fence != strconv.FormatUint(c.cutSeq, 10)) && wrong == "" {
				wrong = fmt.Sprintf("fence %q of %q, and the newest cut is at sequence %d", fence, subject,
					c.cutSeq)
			}
		case fenceHeader: // without the subject it would be the message's own
			if m.Header.Get(fenceSubjectHeader) == "" && wrong == "" {
				wrong = "a fence without a subject"
			}
		case lostHeader:
			got := m.Header.Get(name)
			from, err := strconv.ParseUint(got, 10, 64)
			if (err != nil || from == 0 || from >= m.Seq) && wrong == "" {
				wrong = fmt.Sprintf("%s header %q, want a sequence before %d", name, got, m.Seq)
			}
		default:
			for _, v := range values {
				extra = append(extra, name+": "+v)
			}
		}
	}
	if found := c.origin(m, e); found != "" && wrong == "" {
		wrong = found
	}
	sort.Strings(extra)
	if !c.cfg.Headers && !slices.Equal(extra, mapped) && wrong == "" {
		wrong = fmt.Sprintf("further headers %q, want %q", extra, mapped)
	}
	if wrong != "" {
		c.j.Header++
		c.note(m, "%s", wrong)
	}
}

// origin says what is wrong with the headers by which a message names its home, and one that is published
// twice is known; "": nothing.
func (c *judged) origin(m *Message, e *expected) string {
	want := map[string]string{originHeader: "", msgIDHeader: ""}
	if c.cfg.Home > 0 {
		sum := sha256.Sum256([]byte(e.ID))
		want[originHeader] = strconv.Itoa(c.cfg.Home)
		want[msgIDHeader] = fmt.Sprintf("%d-%v-%x", c.cfg.Home, e.Pos, sum[:8])
	} else if len(m.Header[msgIDHeader]) > 0 { // as sink.msg_id has it
		want[msgIDHeader] = e.Pos.String()
	}
	for _, name := range []string{originHeader, msgIDHeader} {
		if got := strings.Join(m.Header[name], ", "); got != want[name] {
			return fmt.Sprintf("%s header %q, want %q", name, got, want[name])
		}
	}
	return ""
}

// content compares subject and data.
func (c *judged) content(m *Message, e *Event) {
	if reason, dead := m.Header[deadLetterHeader]; dead {
		if c.cfg.DeadLetters {
			c.j.DeadLetters++
			return
		}
		c.j.Changed++
		c.note(m, "is a dead letter, reason %q, of %v", reason, e)
		return
	}
	switch subject := e.subject(); {
	case m.Subject != subject:
		c.j.Changed++
		c.note(m, "has the subject %q, want %q", m.Subject, subject)
	case !e.hasPayload(m.Data):
		c.j.Changed++
		c.note(m, "has other data: %d bytes %q, want %d bytes %q of %v", len(m.Data), clip(string(m.Data)),
			e.Size, e.Head, e)
	}
}

// stray judges a message that is expected nowhere: of an event that is held, or that lies before a reset or
// the start.
func (c *judged) stray(m *Message, at int, repaired bool) {
	e, i := c.others[at], at-len(c.want.messages)
	switch {
	case i >= len(c.seenMore)-len(c.want.left):
		c.j.Repeated++
		c.note(m, "is of %v, which was left to another cluster", e)
	case c.seenMore[i]:
		c.j.Repeated++
		c.note(m, "repeats %v", e)
	case repaired:
		c.content(m, e)
	default:
		c.j.OutOfOrder++
		c.note(m, "is not due: nothing in the WAL closes a window for %v", e)
	}
	c.seenMore[i] = true
}

// find looks for the event that a message is of: by id and position, which must agree unless one of them is
// wrong. -1: there is none.
func (c *judged) find(m *Message) int {
	if c.byPos == nil {
		c.index()
	}
	h := m.Outflow
	pos, known := c.byPos[h.Pos]
	id, named := c.byID[headerValue(h.ID)]
	if raw, ok := c.byID[rawID(m)]; ok {
		id, named = raw, true
	}
	switch {
	case named:
		if known && id != pos && c.others[pos].is(m) && !c.others[id].is(m) {
			return pos // the id is wrong
		}
		return id
	case known && (len(c.byID) == 0 || c.others[pos].is(m)):
		return pos
	}
	return -1
}

// rawID is what stands for the id in the header, whatever else is wrong with it.
func rawID(m *Message) string {
	for _, field := range strings.Split(m.Header.Get(packedHeader), " ") {
		if id, ok := strings.CutPrefix(field, "id="); ok {
			return id
		}
	}
	return ""
}

// is reports whether a message holds this event's subject and data.
func (e *Event) is(m *Message) bool { return m.Subject == e.subject() && e.hasPayload(m.Data) }

// index makes it possible to find messages that are not where they should be.
func (c *judged) index() {
	c.others = make([]*Event, 0, len(c.want.messages)+len(c.want.loose)+len(c.want.held)+len(c.want.before)+
		len(c.want.left))
	for i := range c.want.messages {
		c.others = append(c.others, c.want.messages[i].Event)
	}
	c.others = slices.Concat(c.others, c.want.loose, c.want.held, c.want.before, c.want.left)
	c.seenMore = make([]bool, len(c.others)-len(c.want.messages))
	c.byID, c.byPos = make(map[string]int, len(c.others)), make(map[Position]int, len(c.others))
	twice := map[string]bool{}
	for i, e := range c.others {
		c.byPos[e.Pos] = i
		if e.ID == "" {
			continue
		}
		id := headerValue(e.ID)
		if _, there := c.byID[id]; there {
			twice[id] = true // no identity
		}
		c.byID[id] = i
	}
	for id := range twice {
		delete(c.byID, id)
	}
}

// moved takes note of a message's place. longs[n] is the least place at which an ascending subsequence of n+1
// messages ends, so its length is that of the longest one: the others are those that would have to be moved.
func (c *judged) moved(at int) {
	n, _ := slices.BinarySearch(c.longs, at)
	if n == len(c.longs) {
		c.longs = append(c.longs, at)
	} else {
		c.longs[n] = at
	}
}

// judgement ends the comparison. So many messages may have been removed from the beginning of the stream.
func (c *judged) judgement(removed int) Judgement {
	j := c.j
	j.OutOfOrder += c.placed - len(c.longs)
	first := -1
	for i, seen := range c.seen {
		if !seen {
			j.Missing++
			if first < 0 {
				first = i
			}
		}
	}
	if c.cfg.Removed {
		if j.Published == 0 {
			j.Missing, j.Removed = 0, j.Missing
		}
		if more := j.Removed - max(removed, 0); more > 0 { // the stream never had so many
			j.Removed -= more
			j.Missing += more
			first = max(first, 0)
		}
	}
	if j.Missing > 0 && j.First == "" {
		e := &c.want.messages[first]
		j.First = fmt.Sprintf("message %d of the WAL is missing, header %q, subject %q", first+1,
			c.want.header(e), e.subject())
	}
	for i, e := range c.want.loose {
		if c.seenMore == nil || !c.seenMore[i] {
			j.Missing++
			if j.First == "" {
				j.First = fmt.Sprintf("no message of a repair is about %v", e)
			}
		}
	}
	if j.Held > 0 && j.First == "" {
		j.First = fmt.Sprintf("nothing in the WAL has closed a window yet for %v", c.want.held[0])
	}
	j.Digest = fmt.Sprintf("%x", c.sum.Sum(nil))
	return j
}

// note keeps the first difference, with what ought to have come.
func (c *judged) note(m *Message, format string, args ...any) {
	if c.j.First != "" {
		return
	}
	s := fmt.Sprintf("sequence %d, message %d on %q with header %q ", m.Seq, c.j.Published, m.Subject,
		m.Header.Get(packedHeader)) + fmt.Sprintf(format, args...)
	if c.next < len(c.want.messages) {
		e := &c.want.messages[c.next]
		s += fmt.Sprintf("; message %d of the WAL comes next: header %q on %q", c.next+1, c.want.header(e),
			e.subject())
	} else {
		s += "; the WAL makes no message any more"
	}
	c.j.First = s
}
