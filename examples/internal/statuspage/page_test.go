package statuspage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/examples/internal/browser"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// TestMain builds the program, unless OUTFLOW_TEST_BINARY names it: the harness would look for it in this
// module.
func TestMain(m *testing.M) {
	natstest.RunChild()
	if os.Getenv("OUTFLOW_TEST_BINARY") == "" {
		dir, err := os.MkdirTemp("", "outflow-page-test-")
		if err == nil {
			binary := filepath.Join(dir, "outflow")
			build := exec.Command("go", "build", "-o", binary, "./cmd/outflow")
			build.Dir = filepath.Join("..", "..", "..") // by the sums of that module
			err = build.Run()
			_ = os.Setenv("OUTFLOW_TEST_BINARY", binary)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "build outflow:", err)
			os.Exit(1)
		}
	}
	harness.Main(m)
}

// tab is a tab of the browser with an instance's page.
type tab struct {
	t   *testing.T
	ctx context.Context
}

// open opens the page of an instance, also in a tab that runs no scripts.
func open(t *testing.T, in context.Context, of *harness.Outflow, scripts bool) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(in)
	t.Cleanup(cancel)
	harness.Must(t, chromedp.Do(ctx))
	if !scripts {
		_, err := chromedp.Call(ctx, emulation.SetScriptExecutionDisabled,
			emulation.SetScriptExecutionDisabledParams{Value: true})
		harness.Must(t, err)
	}
	p := &tab{t, ctx}
	harness.Eventually(t, "the page is served", func() error {
		limited, cancel := context.WithTimeout(ctx, harness.AskTimeout)
		defer cancel()
		return chromedp.Do(limited, chromedp.Navigate("http://"+of.Listen+"/"))
	})
	return p
}

func eval[T any](p *tab, expression string) (T, error) {
	ctx, cancel := context.WithTimeout(p.ctx, harness.AskTimeout)
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate[T](expression))
}

// text is what the page shows in an element.
func (p *tab) text(selector string) (string, error) {
	return eval[string](p, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
}

// shows waits until an element shows some texts.
func (p *tab) shows(selector string, texts ...string) {
	p.t.Helper()
	harness.Eventually(p.t, selector+" shows "+strings.Join(texts, ", "), func() error {
		shown, err := p.text(selector)
		if err != nil {
			return err
		}
		for _, text := range texts {
			if !strings.Contains(shown, text) {
				return fmt.Errorf("no %q in %q", text, shown)
			}
		}
		return nil
	})
}

// moves waits until an element shows something else than now.
func (p *tab) moves(selector string) {
	p.t.Helper()
	before, err := p.text(selector)
	harness.Must(p.t, err)
	harness.Eventually(p.t, selector+" moves", func() error {
		now, err := p.text(selector)
		if err == nil && (now == before || now == "") {
			err = fmt.Errorf("it shows %q", now)
		}
		return err
	})
}

// picture takes a picture for the documentation, if that is asked for.
func (p *tab) picture(name, scheme string, width, height int64) {
	p.t.Helper()
	if dir := os.Getenv("OUTFLOW_SCREENSHOTS"); dir != "" {
		harness.Must(p.t, browser.Picture(p.ctx, filepath.Join(dir, name+".png"), scheme, width, height))
	}
}

// history waits until the curves have something to show, if pictures are taken: OUTFLOW_SCREENSHOTS_AFTER
// says how long.
func history(t *testing.T, share float64) {
	t.Helper()
	if os.Getenv("OUTFLOW_SCREENSHOTS") == "" {
		return
	}
	after, err := time.ParseDuration(os.Getenv("OUTFLOW_SCREENSHOTS_AFTER"))
	harness.Must(t, err)
	time.Sleep(time.Duration(float64(after) * share))
}

// TestThePageInABrowser: one look at the page says how a pair of instances is, while all is well, while NATS
// is away and after it came back, on the standby, with what retention does, and when publishing has stopped
// at a fault; figures move without a reload, and also where no scripts run.
func TestThePageInABrowser(t *testing.T) {
	path := browser.Find(t)
	if _, err := pgserver.Find(0); err != nil {
		tier.Missing(t, "postgres", "%v", err)
	}
	ns := natstest.Process(t)
	pg := pgtest.Own(t, 0, "max_slot_wal_keep_size=256MB")
	url, err := pg.CreateDatabase(t.Context(), "shop")
	harness.Must(t, err)
	conn := harness.Connect(t, url)
	settings := []string{"ON_FAULT=hold", "RETAIN_TABLE_METHOD=delete", "RETAIN_TABLE_AGE=1h",
		"RETAIN_STREAM_AGE=1h", "ARCHIVE_URL=file://" + t.TempDir()}
	active := harness.New(t, url, ns.URL(), "orders", settings...)
	active.Init()
	active.Start()
	active.AwaitState("running")
	standby := harness.New(t, url, ns.URL(), "orders", settings...)
	standby.Start()
	standby.AwaitState("standby")
	write(t, url)
	billing, err := harness.JetStream(t, ns.URL()).CreateConsumer(t.Context(), active.Stream,
		jetstream.ConsumerConfig{Durable: "billing", AckPolicy: jetstream.AckExplicitPolicy})
	harness.Must(t, err)
	reading, err := billing.Consume(func(m jetstream.Msg) { _ = m.Ack() })
	harness.Must(t, err)
	t.Cleanup(reading.Stop)

	in := browser.Open(t, path)
	page := open(t, in, active, true)
	page.shows("#verdict", "Publishing", "Nothing is lost")
	page.shows("#chain", "PostgreSQL", "reachable", "held", "of 65,536", "of 2,000", "stored")
	page.shows("#consumers", "billing", "keeps up")
	page.shows("#log", "outflow started")
	// What it shows comes without another page, and the reader stays where he reads.
	if _, err := eval[bool](page, "window.same = true, scrollTo(0, 120), true"); err != nil {
		t.Fatal(err)
	}
	page.moves("#positions tr:nth-child(2) .mono")
	page.moves("#chain li:nth-child(5) dd")
	if ok, err := eval[bool](page, "window.same === true && scrollY === 120"); err != nil || !ok {
		t.Errorf("the page was loaded again, or scrolled: %v", err)
	}
	harness.Eventually(t, "the curves are drawn", func() error {
		drawn, err := eval[bool](page, `[...document.querySelectorAll('.chart .line1')].every(
			p => p.getAttribute('d').includes('L'))`)
		if err == nil && !drawn {
			err = errors.New("not all of them")
		}
		return err
	})
	plain := open(t, in, active, false)
	plain.shows("#verdict", "Publishing")
	plain.moves("#positions tr:nth-child(2) .mono")
	other := open(t, in, standby, true)
	other.shows("#verdict", "Standing by", "Another outflow publishes")
	other.shows("#instances", "standby", "active")
	history(t, 1)
	page.picture("status", "light", 1180, 1240)
	page.picture("status-dark", "dark", 1180, 1240)
	other.picture("status-standby", "light", 1180, 920)
	active.MustRun("maintain", "--once")
	page.shows("#retention", "Old rows", "Archive", "Stream")
	if ok, err := eval[bool](page, `[...document.querySelectorAll('.part')].every(
		p => p.offsetWidth > 150)`); err != nil || !ok {
		t.Errorf("a card is too narrow to read: %v", err)
	}
	page.picture("status-retention", "light", 1180, 900)

	harness.Must(t, ns.Stop())
	page.shows("#verdict", "Not publishing", "nats_connect", "Nothing is lost")
	page.shows("#chain li:nth-child(5)", "not reachable")
	page.moves("#chain li:nth-child(2) dd") // what PostgreSQL keeps: in the outage that it is for
	history(t, 0.2)
	page.picture("status-nats-away", "light", 1180, 900)
	page.picture("status-phone", "light", 390, 844)
	page.picture("status-phone-dark", "dark", 390, 844)
	harness.Must(t, ns.Start())
	up, idle := harness.AwaitRoles(active, standby) // after a long outage either of them has the slot
	if up == standby {
		page = other
	}
	page.shows("#verdict", "Publishing")
	page.moves("#chain li:nth-child(5) dd")

	idle.MustStop(t)
	harness.Exec(t, conn, "ALTER PUBLICATION orders SET (publish = 'update')")
	up.Kill() // a session that runs need not notice
	up.Start()
	page.shows("#verdict", "Stopped at a fault", "publication_insert", "ALTER PUBLICATION")
	history(t, 0.1)
	page.picture("status-fault", "light", 1180, 620)
}

// write inserts a few rows a second until the test ends.
func write(t *testing.T, url string) {
	t.Helper()
	conn := harness.Connect(t, url)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- insert(ctx, conn) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func insert(ctx context.Context, conn *pgx.Conn) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		_, err := conn.Exec(ctx, "INSERT INTO outbox (doc_id, actor_id, counter, payload) SELECT 'order-' "+
			"|| $1 % 50, "+
			"'shop', $1 * 10 + i, '{\"n\": 1}' FROM generate_series(1, 1 + $1 / 100 % 7) i", n)
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
}
