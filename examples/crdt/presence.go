package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

const (
	presenceLasts   = 12 * time.Second
	presenceMost    = 100 // people whom a document's newcomers are told of
	presenceSubject = "crdt.presence."
)

// Presence is a person in front of a document.
type Presence struct {
	Actor string `json:"actor"`
	Name  string `json:"name"`
	Color string `json:"color"`
	Caret int    `json:"caret"` // in UTF-16 units; -1: nowhere
	Gone  bool   `json:"gone,omitempty"`
}

func (h *hub) passPresence(msg *nats.Msg) {
	var p struct {
		Doc string `json:"doc"`
		Presence
	}
	if err := json.Unmarshal(msg.Data, &p); err != nil {
		return
	}
	data, err := json.Marshal(p.Presence)
	if err != nil {
		return
	}
	h.note(p.Doc, p.Presence, data)
	h.pass(p.Doc, news{"presence", 0, data})
}

// note remembers who is there, for those who join later. Of documents that nobody looks at here it keeps
// nothing.
func (h *hub) note(doc string, p Presence, data []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	here := h.here[doc]
	switch {
	case h.feeds[doc] == nil:
		return
	case here == nil:
		here = map[string]seen{}
		h.here[doc] = here
	}
	for actor, s := range here {
		if time.Since(s.at) > presenceLasts {
			delete(here, actor)
		}
	}
	delete(here, p.Actor)
	if !p.Gone && len(here) < presenceMost {
		here[p.Actor] = seen{time.Now(), data}
	}
}

var plainColor = regexp.MustCompile(`^#[0-9a-f]{6}$`)

// postPresence tells the others who is there. Nothing is stored.
func (s *service) postPresence(w http.ResponseWriter, r *http.Request) {
	doc := r.PathValue("id")
	var p Presence
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(&p)
	if err == nil {
		err = errors.Join(validName("document", doc), validName("actor", p.Actor), validName("name", p.Name))
	}
	if err == nil && !plainColor.MatchString(p.Color) {
		err = fmt.Errorf("color %q: want #rrggbb", p.Color)
	}
	if err != nil {
		answerError(w, http.StatusBadRequest, err)
		return
	}
	data, err := json.Marshal(struct {
		Doc string `json:"doc"`
		Presence
	}{doc, p})
	if err == nil {
		err = s.hub.js.Conn().Publish(string(outbox.AppendToken([]byte(presenceSubject), doc)), data)
	}
	if err != nil {
		s.unavailable(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
