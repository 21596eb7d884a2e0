package main

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/outflowhq/outflow/examples/internal/browser"
)

// TestTheReadmesPicturesAreTaken takes the pictures of README.md: OUTFLOW_SCREENSHOTS names the folder.
func TestTheReadmesPicturesAreTaken(t *testing.T) {
	dir := os.Getenv("OUTFLOW_SCREENSHOTS")
	if dir == "" {
		t.Skip("takes pictures into the folder that OUTFLOW_SCREENSHOTS names")
	}
	path, yjs := browser.Find(t), library(t)
	buttons, err := newButtons(&world{})
	if err != nil {
		t.Fatal(err)
	}
	defer buttons.l.Close()
	w := newWorld(t, yjs, buttons.w.stage)
	if _, _, err := w.scenario(t.Context(), t.Output()); err != nil {
		t.Fatal(err)
	}
	b := browser.Open(t, path)
	ada, grace := openTab(t, b, w, "minutes", "Ada"), openTab(t, b, w, "minutes", "Grace")
	for _, step := range []struct {
		who  *tab
		text string
	}{
		{ada, "# Minutes\n\nWhat we found when the relay went down on Friday:\n\n"},
		{grace, "- it had published a hundred rows and marked none of them\n"},
		{ada, "- the other one went on with the next hundred\n"},
		{grace, "- then the first hundred came again\n\n"},
		{ada, "The index had words twice, the audit log had a history that never was, and three customers " +
			"paid for somebody else's pen.\n\n"},
		{grace, "Decided: the order is the one of the commits. "},
	} {
		if _, err := eval[bool](step.who,
			`document.getElementById('text').setSelectionRange(1e6, 1e6), true`); err != nil {
			t.Fatal(err)
		}
		if err := step.who.write(step.text); err != nil {
			t.Fatal(err)
		}
		levelled(t, ada, grace)
	}
	click(ada, "#rebuild")
	ada.until("the verdict is there", `document.getElementById('said').dataset.state === 'good'`)
	search :=
		`document.getElementById('q').value = 'hundred', document.getElementById('q').dispatchEvent(new Event('input'))`
	if _, err := eval[bool](ada, search); err != nil {
		t.Fatal(err)
	}
	ada.until("something is found", `document.querySelector('#hits mark') !== null`)
	ada.until("the index is level", `document.getElementById('index').dataset.state === 'good'`)
	ada.picture(dir, "crdt", "light", 1280, 1060)
	ada.picture(dir, "crdt-dark", "dark", 1280, 1060)
	ada.picture(dir, "crdt-narrow", "light", 420, 1500)

	grace.offline(true)
	if err := grace.write("Nobody reads this until the train has left the tunnel."); err != nil {
		t.Fatal(err)
	}
	grace.picture(dir, "crdt-offline", "light", 1280, 1060)
}

// levelled waits until both tabs show the same.
func levelled(t *testing.T, a, b *tab) {
	t.Helper()
	for _, p := range []*tab{a, b} {
		p.until("nothing waits", `page.session.pending.length === 0`)
	}
	for _, pair := range [][2]*tab{{a, b}, {b, a}} {
		version, err := eval[int](pair[0], `page.session.version`)
		if err != nil {
			t.Fatal(err)
		}
		pair[1].until("it has caught up", `page.session.version >= `+strconv.Itoa(version))
	}
}

func click(p *tab, selector string) {
	p.t.Helper()
	p.do(func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.Click(selector)) })
}

func (p *tab) picture(dir, name, scheme string, width, height int64) {
	p.t.Helper()
	p.do(func(ctx context.Context) error {
		return browser.Picture(ctx, filepath.Join(dir, name+".png"), scheme, width, height)
	})
}
