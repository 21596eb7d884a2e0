package erasure

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// Document tells a document's messages from others: by the subject, or by a header that the document is
// mapped to. A dead letter says it in its body.
type Document struct {
	name     string
	template *outbox.SubjectTemplate
	encoded  map[string]string // by column of the template, how the document is written there
	header   string            // that has the document; "": none is needed
	dead     string            // the subject of dead letters
	subject  string            // the only one that its messages have; "": there may be several
}

// NewDocument fails where messages do not say which document they are of.
func NewDocument(cfg config.Config, r config.Resolved, name string) (*Document, error) {
	t, err := outbox.ParseSubjectTemplate(cfg.Subject)
	if err != nil {
		return nil, err
	}
	d := &Document{name: name, template: t, encoded: map[string]string{}, dead: cfg.Sink.DeadLetterSubject}
	if d.dead == "" {
		d.dead = cfg.Stream + ".dead_letter"
	}
	inDoc := func(column string) bool {
		u, ok := r.Uses[column]
		return ok && u.Role == config.InDoc
	}
	for _, c := range t.Columns() {
		if text, ok := t.Encoded(c, name); ok && inDoc(c) {
			d.encoded[c] = text
		}
	}
	filter := t.Filter(func(column string) (string, bool) { return name, inDoc(column) })
	if !strings.ContainsAny(filter, "*>") {
		d.subject = filter
	}
	if len(d.encoded) > 0 {
		return d, nil
	}
	message := fmt.Sprintf("neither the subject %s nor a header has the document", t)
	for _, h := range cfg.Headers {
		if !inDoc(h.Column) {
			continue
		}
		if strings.TrimSpace(name) == name && !strings.ContainsAny(name, "\r\n") {
			d.header = h.Name
			return d, nil
		}
		message = fmt.Sprintf("only header %s has the document, and a header has neither white space at its "+
			"ends nor line breaks, which this document has", h.Name)
	}
	return nil, &outbox.Fault{Class: outbox.Fatal, Code: "erase_untold",
		Message: message + ": which messages are its nobody can tell"}
}

// Template is the one by which a subject says the document.
func (d *Document) Template() string { return d.template.String() }

// Dead is the subject of dead letters.
func (d *Document) Dead() string { return d.dead }

// Subject is the only subject that its messages have, but for dead letters; "": there may be several.
func (d *Document) Subject() string { return d.subject }

// deadCut is the least length of a value that a dead letter may have cut.
const deadCut = 190

// Is reports whether a message is of the document; known is false where it does not say. Of a dead letter the
// data is needed.
func (d *Document) Is(subject string, h nats.Header, data []byte) (is, known bool) {
	if h.Get(sink.HeaderDeadLetter) != "" {
		var dead sink.DeadLetter
		if json.Unmarshal(data, &dead) != nil || dead.Doc == "" {
			return false, false
		}
		long := len(dead.Doc) >= deadCut && len(d.name) > len(dead.Doc)
		return dead.Doc == d.name, !long || !strings.HasPrefix(d.name, dead.Doc)
	}
	if d.header != "" {
		values, there := h[d.header]
		return there && strings.Join(values, "") == d.name, there
	}
	is = true
	if !d.template.Parse(subject, func(column, text string) {
		if want, ok := d.encoded[column]; ok {
			known = true
			is = is && text == want
		}
	}) {
		return false, false
	}
	return is && known, known
}
