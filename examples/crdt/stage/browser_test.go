package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"

	"github.com/outflowhq/outflow/examples/internal/browser"
)

// tab is one person in front of the document.
type tab struct {
	t    *testing.T
	name string
	ctx  context.Context
}

func openTab(t *testing.T, in context.Context, w *world, doc, name string) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(in)
	t.Cleanup(cancel)
	p := &tab{t, name, ctx}
	// The first use makes the tab, which lives as long as the context of that.
	if err := chromedp.Do(ctx); err != nil {
		t.Fatal(err)
	}
	p.do(func(ctx context.Context) error {
		if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
			return err
		}
		return chromedp.Do(ctx, chromedp.Navigate(w.url()+"/?doc="+url.QueryEscape(doc)+"&as="+name))
	})
	p.ready()
	return p
}

func (p *tab) ready() {
	p.t.Helper()
	p.until("the editor is ready",
		`!document.getElementById('text').disabled && page.session.state === 'live'`)
}

// do does something in the tab.
func (p *tab) do(what func(context.Context) error) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := what(ctx); err != nil {
		p.t.Fatalf("%s's tab: %v", p.name, err)
	}
}

// write types as a person does, key by key.
func (p *tab) write(text string) error {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	return chromedp.Do(ctx, chromedp.SendKeys("#text", text))
}

func eval[T any](p *tab, expression string) (T, error) {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate[T](expression))
}

func (p *tab) until(what, condition string) {
	p.t.Helper()
	err := until(p.t.Context(), what, func() error {
		ok, err := eval[bool](p, "Boolean("+condition+")")
		if err != nil || ok {
			return err
		}
		return errors.New(condition)
	})
	if err != nil {
		p.t.Fatalf("%s's tab: %v", p.name, err)
	}
}

// emulateNetwork is the command that cuts a tab's network, connections that are open as well.
var emulateNetwork = cdp.Command[network.OverrideNetworkStateParams,
	cdp.Empty]{Method: "Network.emulateNetworkConditions"}

// offline cuts the tab's network, or mends it.
func (p *tab) offline(cut bool) {
	p.t.Helper()
	p.do(func(ctx context.Context) error {
		_, err := chromedp.Call(ctx, emulateNetwork, network.OverrideNetworkStateParams{
			Offline: cut, DownloadThroughput: -1, UploadThroughput: -1,
		})
		return err
	})
	if cut {
		p.until("the page notices", `page.session.state === 'offline'`)
	}
}

func (p *tab) text() string {
	p.t.Helper()
	s, err := eval[string](p, `document.getElementById('text').value`)
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

// TestTwoPeopleInABrowser: two tabs type into one document at the same time, one of them also without a
// network. Both end with the same text, the index has exactly that text, what is rebuilt is what is live, and
// a reload shows it again, also when everything is killed meanwhile.
func TestTwoPeopleInABrowser(t *testing.T) {
	t.Parallel()
	path, yjs := browser.Find(t), library(t)
	w := newWorld(t, yjs, "")
	b := browser.Open(t, path)
	recorded(t, w, b)
	const doc = "minutes of 3 & 4"
	ada, grace := openTab(t, b, w, doc, "Ada"), openTab(t, b, w, doc, "Grace")
	ada.until("Ada sees Grace", `document.getElementById('people').children.length === 2`)

	together(t, ada, "Agenda: the order of events.\n", grace, "Grace was here 🙂\n")
	written := len([]rune("Agenda: the order of events.\n" + "Grace was here 🙂\n"))
	converge(t, written, ada, grace)

	grace.offline(true)
	together(t, ada, "Ada goes on alone. ", grace, "Nobody sees this yet. ")
	if strings.Contains(ada.text(), "Nobody sees this yet") {
		t.Error("Grace's words came through a network that is cut")
	}
	grace.until("her words wait", `page.session.pending.length === 22`)
	grace.offline(false)
	written += len([]rune("Ada goes on alone. " + "Nobody sees this yet. "))
	text := converge(t, written, ada, grace)
	for _, words := range []string{"Ada goes on alone. ", "Nobody sees this yet. "} {
		if !strings.Contains(text, words) {
			t.Errorf("%q is not in %q", words, text)
		}
	}

	// Everything dies while both type.
	killed := make(chan error, 1)
	go func() { killed <- w.killEverything(t.Context()) }()
	together(t, ada, "Was there a crash? ", grace, "I did not notice. ")
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	// What is not sent yet survives a reload.
	if _, err := eval[bool](ada,
		`page.session.send = async () => { throw new Error('cut') }, true`); err != nil {
		t.Fatal(err)
	}
	if err := ada.write("Not sent yet. "); err != nil {
		t.Fatal(err)
	}
	reload(ada)
	ada.ready()
	written += len([]rune("Was there a crash? I did not notice. Not sent yet. "))
	text = converge(t, written, ada, grace)

	projections(t, w, doc, text)
	var v verdict
	if err := w.request(http.MethodPost, "/verdict", &v); err != nil {
		t.Fatal(err)
	}
	if !v.Same || v.Live.Events != v.Operations || v.Live.Repeats+v.Live.Inversions != 0 {
		t.Errorf("the verdict is %+v", v)
	}

	reload(ada)
	ada.ready()
	if got := ada.text(); got != text {
		t.Errorf("after a reload the text is %q, not %q", got, text)
	}
}

// recorded types a recording and opens it: its Yjs updates are what Yjs makes the recorded text of.
func recorded(t *testing.T, w *world, b context.Context) {
	t.Helper()
	const n = 300
	recording, err := newTypist(w.url(), "recorded", [2]string{"Ada", "Grace"}, n, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := recording.run(t.Context(), n, nil); err != nil {
		t.Fatal(err)
	}
	want, err := recording.text(n)
	if err != nil {
		t.Fatal(err)
	}
	reader := openTab(t, b, w, "recorded", "Ada")
	if got := reader.text(); got != want {
		t.Errorf("the page shows\n%q, the recording has\n%q", got, want)
	}
	projections(t, w, "recorded", want)
}

func reload(p *tab) {
	p.t.Helper()
	p.do(func(ctx context.Context) error { return chromedp.Do(ctx, chromedp.Reload()) })
}

// projections waits until all three have had each operation of the document, and compares the index with the
// text.
func projections(t *testing.T, w *world, doc, text string) {
	t.Helper()
	path := "/docs/" + url.PathEscape(doc)
	var stored struct {
		Version int64             `json:"version"`
		Ops     []json.RawMessage `json:"ops"`
	}
	if err := w.request(http.MethodGet, path+"/ops", &stored); err != nil {
		t.Fatal(err)
	}
	err := until(t.Context(), "the projections are level", func() error { return w.settled(t.Context()) })
	if err != nil {
		t.Fatal(err)
	}
	var view struct {
		Search struct {
			Events int64
			Body   string
		}
		Audit []struct{ N int64 }
	}
	if err := w.request(http.MethodGet, path+"/projections", &view); err != nil {
		t.Fatal(err)
	}
	if view.Search.Body != text || view.Search.Events != stored.Version || len(view.Audit) == 0 ||
		view.Audit[0].N != stored.Version {
		t.Errorf("after %d operations of %q the projections are %+v", stored.Version, text, view)
	}
}

// together types in both tabs at the same time.
func together(t *testing.T, a *tab, first string, b *tab, second string) {
	t.Helper()
	done := make(chan error, 2)
	go func() { done <- a.write(first) }()
	go func() { done <- b.write(second) }()
	for range 2 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// shown is what a tab shows and what it has.
type shown struct {
	Text    string `json:"text"`
	Doc     string `json:"doc"` // what the service has
	Pending int    `json:"pending"`
}

// converge waits until both tabs show the same text of so many characters, with nothing waiting, and returns
// it.
func converge(t *testing.T, written int, tabs ...*tab) string {
	t.Helper()
	var texts [2]string
	err := until(t.Context(), "both tabs show the same", func() error {
		for i, p := range tabs {
			state, err := eval[shown](p, `({text: document.getElementById('text').value, doc: page.session.server.getText('text').toString(),
				pending: page.session.pending.length})`)
			if err != nil {
				return err
			}
			if state.Pending > 0 || state.Text != state.Doc || len([]rune(state.Text)) != written {
				return fmt.Errorf("%s: %+v, %d characters were written", p.name, state, written)
			}
			texts[i] = state.Text
		}
		if texts[0] != texts[1] {
			return fmt.Errorf("%q and %q", texts[0], texts[1])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return texts[0]
}

// request asks the service and decodes its answer.
func (w *world) request(method, path string, into any) error {
	req, err := http.NewRequest(method, w.url()+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(body))
	}
	return json.Unmarshal(body, into)
}
