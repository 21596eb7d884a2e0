package erasure

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/outbox"
)

// TestADocumentThatAHeaderCannotSayIsRefused, and why: it has white space that a header has not. A subject
// has that.
func TestADocumentThatAHeaderCannotSayIsRefused(t *testing.T) {
	t.Parallel()
	is := config.Resolved{Uses: map[string]config.Use{"doc_id": {Role: config.InDoc}}}
	for _, c := range []struct{ subject, header, doc, says string }{
		{"outbox.{doc_id}", "", "gone  ", ""},
		{"outbox.{partition(doc_id, 4)}", "Doc", "gone", ""},
		{"outbox.{partition(doc_id, 4)}", "Doc", "gone  ", "only header Doc has the document"},
		{"outbox.{partition(doc_id, 4)}", "Doc", "go\nne", "only header Doc has the document"},
		{"outbox.{partition(doc_id, 4)}", "", "gone", "neither the subject outbox.{partition(doc_id, 4)}"},
	} {
		cfg := config.Config{Subject: c.subject}
		if c.header != "" {
			cfg.Headers = []config.Header{{Name: c.header, Column: "doc_id"}}
		}
		_, err := NewDocument(cfg, is, c.doc)
		if f := outbox.FaultOf(err); (f == nil) != (c.says == "") || f != nil && (f.Code != "erase_untold" ||
			!strings.HasPrefix(f.Message, c.says)) {
			t.Errorf("%s, header %q, %q: %v", c.subject, c.header, c.doc, err)
		}
	}
}
