// Package browser gives tests a browser of their own.
package browser

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

// Find finds Chromium, and skips the test where there is none and none is required.
func Find(t *testing.T) (path string) {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	tier.Missing(t, "browser", "no browser is here: install chromium")
	return ""
}

// Open starts a browser of this test's own, without a window.
func Open(t *testing.T, path string) context.Context {
	t.Helper()
	allocator, end := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(path), chromedp.Headless, chromedp.NoSandbox, chromedp.NoFirstRun,
		chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-gpu", true), chromedp.Flag("no-default-browser-check", true),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("no-proxy-server", true),
		chromedp.WindowSize(1280, 800))
	t.Cleanup(end)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // closes the browser and waits for its end
		cancel()
	})
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	return ctx
}

// Picture takes a picture of what is at the top of a tab's page, in a colour scheme, light or dark.
func Picture(ctx context.Context, file, scheme string, width, height int64) error {
	_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	if err != nil {
		return err
	}
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(width, height)); err != nil {
		return err
	}
	if _, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("scrollTo(0, 0), true")); err != nil {
		return err
	}
	picture, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		return err
	}
	return os.WriteFile(file, picture, 0o644) //nolint:gosec // everybody may see it
}
