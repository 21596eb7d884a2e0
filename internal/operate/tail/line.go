package tail

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/operate/args"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// maxPayload is how many bytes of a payload are shown, and maxField how many of a header's value.
const (
	maxPayload = 4 << 10
	maxField   = 256
)

// Line is what is shown of a message. The JSON names are stable.
type Line struct {
	Stored   time.Time        `json:"stored"` // when the stream stored it
	Sequence uint64           `json:"sequence"`
	Position *outbox.Position `json:"position,omitempty"` // absent: the message is not Outflow's
	Subject  string           `json:"subject"`
	Document *string          `json:"document,omitempty"` // absent: the subject does not say it
	Key      string           `json:"key,omitempty"`
	ID       string           `json:"id,omitempty"`
	Type     string           `json:"type,omitempty"` // of the mapped header that has it
	Bytes    int              `json:"payload_bytes"`
	Held     uint64           `json:"held_wal_bytes"`   // WAL from its commit to what closed its window
	Home     int              `json:"home,omitempty"`   // cluster.id of whose event it is, where it names one
	Late     bool             `json:"late,omitempty"`   // as gap mode marks it
	Dead     string           `json:"dead,omitempty"`   // the reason of a dead letter
	Replay   string           `json:"replay,omitempty"` // of `outflow replay`
	Cut      *Cut             `json:"cut,omitempty"`    // it is a cut: no event
	// from the time that a mapped header says to that at which it was stored; absent: no header says one
	Latency *float64 `json:"latency_ms,omitempty"`

	Payload *string `json:"payload,omitempty"`        // text
	Base64  []byte  `json:"payload_base64,omitempty"` // anything else
	Short   bool    `json:"payload_cut,omitempty"`    // there is more of it
}

// Cut is what a cut says.
type Cut struct {
	SystemID string     `json:"system_id"` // the home's
	Timeline uint32     `json:"timeline,omitempty"`
	LSN      outbox.LSN `json:"lsn"`
	Epoch    uint64     `json:"epoch"`
	Owner    int        `json:"owner"` // cluster.id
}

// lines makes lines of messages.
type lines struct {
	template *outbox.SubjectTemplate
	doc      string   // the template's column that is the document; "": none is
	types    []string // headers that may say the event's type
	times    []string // headers that may say when it was written
	payload  bool
	json     bool
}

func newLines(cfg config.Config, o Options) (*lines, error) {
	t, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	l := &lines{template: t, payload: o.Payload, json: o.JSON}
	// The table is not asked: it is the column that is mapped, else the role of that name.
	for _, name := range []string{"doc_id", cfg.Columns.Doc.Name} {
		if slices.Contains(t.Columns(), name) {
			l.doc = name
		}
	}
	for _, h := range cfg.Headers {
		switch name := strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(h.Column)); {
		case name == "eventtype", name == "type", name == "kind":
			l.types = append(l.types, h.Name)
		case slices.Contains(args.TimeColumns, h.Column):
			l.times = append(l.times, h.Name)
		}
	}
	return l, nil
}

// filters are the subjects that the server selects by; none: all.
func (l *lines) filters(o Options) (all []string, err error) {
	if o.Filter != "" {
		if len(o.Docs) > 0 {
			return nil, usage("--doc and --filter can't both be given", "Leave one of them out")
		}
		for token := range strings.SplitSeq(o.Filter, ".") {
			if token == "" || strings.ContainsAny(token, " \t\r\n") ||
				strings.Contains("."+o.Filter, ".>.") {
				return nil, usage(fmt.Sprintf("--filter %q is no subject", o.Filter),
					"Give tokens with dots between them; * stands for one, > at the end for one or more")
			}
		}
		return []string{o.Filter}, nil
	}
	for _, doc := range o.Docs {
		if _, ok := l.template.Encoded(l.doc, doc); !ok || l.doc == "" {
			return nil, usage(fmt.Sprintf("--doc: the subject %q does not hold the document", l.template),
				"Use --filter, or read all")
		}
		all = append(all, l.template.Filter(func(column string) (string, bool) {
			return doc, column == l.doc
		}))
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func usage(message, hint string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: message, Hint: hint}
}

// of is the line of a message.
func (l *lines) of(m jetstream.Msg, meta *jetstream.MsgMetadata) ([]byte, error) {
	line := l.read(m, meta)
	if !l.json {
		return line.text(), nil
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(line); err != nil {
		return nil, err
	}
	return safeJSON(b.Bytes()), nil
}

func (l *lines) read(m jetstream.Msg, meta *jetstream.MsgMetadata) *Line {
	header := m.Headers()
	line := &Line{Stored: meta.Timestamp.UTC(), Sequence: meta.Sequence.Stream, Subject: m.Subject(),
		Bytes: len(m.Data()), Dead: header.Get(sink.HeaderDeadLetter), Replay: header.Get("Outflow-Replay")}
	if size, err := strconv.Atoi(header.Get(nats.MsgSize)); err == nil && !l.payload {
		line.Bytes = size
	}
	if h, err := outbox.ParseHeader(header.Get(outbox.HeaderName)); err == nil {
		line.Position, line.ID, line.Key, line.Late = &h.Pos, h.ID, h.Key, h.Counter.Late
		line.Held = outbox.Distance(h.Pos.LSN, h.Thru)
		line.Home, _ = outbox.HomeOf(header)
	}
	if c := outbox.CutOf(line.Subject, header); c != nil {
		line.Cut = &Cut{strconv.FormatUint(c.SystemID, 10), c.Timeline, c.LSN, c.Epoch, c.Owner}
	}
	if doc, ok := l.document(line.Subject); ok && line.Dead == "" && line.Cut == nil {
		line.Document = &doc
	}
	for _, name := range l.types {
		if line.Type == "" {
			line.Type = cut(header.Get(name), maxField)
		}
	}
	for _, name := range l.times {
		if at, ok := parseTime(header.Get(name)); ok && line.Latency == nil {
			ms := float64(meta.Timestamp.Sub(at).Microseconds()) / 1000
			line.Latency = &ms
		}
	}
	if l.payload {
		data := m.Data()[:min(len(m.Data()), maxPayload+1)]
		line.Short = len(data) > maxPayload
		if text := cut(string(data), maxPayload); utf8.ValidString(text) {
			line.Payload = &text
		} else {
			line.Base64 = data[:min(len(data), maxPayload)]
		}
	}
	return line
}

// document is the document that the subject says.
func (l *lines) document(subject string) (doc string, ok bool) {
	l.template.Parse(subject, func(column, encoded string) {
		if column != l.doc || ok {
			return
		}
		var tokens []string
		ok = true
		for token := range strings.SplitSeq(encoded, ".") {
			value, _ := outbox.ParseToken(token)
			tokens = append(tokens, value)
		}
		doc = strings.Join(tokens, ".")
	})
	return doc, ok
}

// timeForms are those of PostgreSQL's timestamptz and of RFC 3339.
var timeForms = []string{"2006-01-02 15:04:05.999999999-07", time.RFC3339Nano}

func parseTime(text string) (time.Time, bool) {
	for _, form := range timeForms {
		if at, err := time.Parse(form, text); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}

// text is the line for people.
func (line *Line) text() []byte {
	var b strings.Builder
	add := func(name, value string) {
		if value != "" {
			b.WriteString(" " + name + "=" + value)
		}
	}
	b.WriteString(line.Stored.Format("2006-01-02T15:04:05.000Z"))
	add("seq", strconv.FormatUint(line.Sequence, 10))
	switch {
	case line.Position != nil:
		add("pos", line.Position.String())
		if line.Home > 0 {
			add("origin", strconv.Itoa(line.Home))
		}
	case line.Cut != nil:
		add("cut", line.Cut.LSN.String())
		add("home", line.Cut.SystemID)
		if line.Cut.Timeline > 0 {
			add("tl", strconv.FormatUint(uint64(line.Cut.Timeline), 10))
		}
		add("epoch", strconv.FormatUint(line.Cut.Epoch, 10))
		add("owner", strconv.Itoa(line.Cut.Owner))
	default:
		add("pos", "? (not a message of Outflow's)")
	}
	add("subject", word(line.Subject))
	if line.Document != nil {
		add("doc", word(*line.Document))
	}
	add("key", word(line.Key))
	add("id", word(line.ID))
	add("type", word(line.Type))
	add("size", strconv.Itoa(line.Bytes))
	if line.Latency != nil {
		add("latency", strconv.FormatFloat(*line.Latency, 'f', -1, 64)+"ms")
	}
	if line.Held > 0 {
		add("held", strings.ReplaceAll(units.Size(line.Held), " ", "")+"-of-WAL")
	}
	if line.Late {
		b.WriteString(" late")
	}
	add("dead-letter", word(line.Dead))
	add("replay", word(line.Replay))
	if line.Payload != nil {
		add("payload", printable(*line.Payload))
	} else if line.Base64 != nil {
		add("payload", printable(string(line.Base64)))
	}
	if line.Short {
		b.WriteString("…")
	}
	b.WriteByte('\n')
	return []byte(b.String())
}

// word is a value that ends at the next space: quoted where it would not.
func word(value string) string {
	quoted := strconv.Quote(value)
	if value == "" || quoted == `"`+value+`"` && !strings.Contains(value, " ") {
		return value
	}
	return quoted
}

// printable writes everything that is not printable, and so could be meant for the terminal, as an escape.
func printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(text[i:], "\uFFFD"):
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
	}
	return b.String()
}

// safeJSON does the same to a line of JSON, whose encoder lets some of it pass. It only stands in strings.
func safeJSON(line []byte) []byte {
	b := make([]byte, 0, len(line))
	for _, r := range string(line) {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			b = utf8.AppendRune(b, r)
		case r > 0xFFFF:
			high, low := utf16.EncodeRune(r)
			b = fmt.Appendf(b, `\u%04x\u%04x`, high, low)
		default:
			b = fmt.Appendf(b, `\u%04x`, r)
		}
	}
	return b
}

// cut shortens a text to at most n bytes, and to whole characters at its end.
func cut(text string, n int) string {
	if len(text) <= n {
		return text
	}
	text = text[:n]
	for range utf8.UTFMax - 1 {
		if r, size := utf8.DecodeLastRuneInString(text); r != utf8.RuneError || size != 1 {
			break
		}
		text = text[:len(text)-1]
	}
	return text
}
