package main

import (
	"net/http"
	"net/url"
	"testing"
)

// TestARebuiltProjectionIsTheLiveOne: service, Outflow, consumers, NATS and PostgreSQL are killed and
// redeployed while people write. Afterwards the projections hold exactly what was written, and rebuilt from
// nothing they are the same, byte for byte. Those behind the polling relays, to which the same has happened,
// are not.
func TestARebuiltProjectionIsTheLiveOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "", "")
	v, typists, err := w.scenario(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", v.table)
	if err := v.good(); err != nil {
		t.Error(err)
	}
	if v.Relayed.Repeats == 0 {
		t.Error("no event came twice through the relays, though they were killed between publish and mark")
	}
	for _, p := range typists {
		sent := int(p.sent.Load())
		want, err := p.text(sent)
		if err != nil {
			t.Fatal(err)
		}
		var view struct {
			Search struct {
				Events int
				Body   string
			}
			Audit []struct{ N, Version int }
		}
		if err := w.request(http.MethodGet, "/docs/"+url.PathEscape(p.doc)+"/projections",
			&view); err != nil {
			t.Fatal(err)
		}
		if view.Search.Events != sent || view.Search.Body != want {
			t.Errorf("%s: after %d operations the index has had %d and holds %q, not %q", p.doc, sent,
				view.Search.Events, view.Search.Body, want)
		}
		if len(view.Audit) == 0 || view.Audit[0].N != sent || view.Audit[0].Version != sent {
			t.Errorf("%s: after %d operations the audit log ends with %v", p.doc, sent, view.Audit)
		}
	}
}
