package e2e

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/outflowhq/outflow/internal/docpage"
	"github.com/outflowhq/outflow/internal/pgtest"
)

// docPages are the pages of docs that are run as they stand, and what else is done around some of them.
var docPages = []struct {
	name   string
	around func(t *testing.T, p *pageRun) // prepares the page's world, and registers what is checked at the end
}{
	{name: "first-event"},
	{name: "first-consumer"},
	{name: "replay"},
	{name: "snapshot"},
	{name: "from-polling"},
}

// TestDocs does what the pages say, block by block, against real servers, and sees what they say that a reader sees.
func TestDocs(t *testing.T) {
	t.Parallel()
	slow(t)
	// A server of its own: the pages use slots by their default name.
	pg := pgtest.Own(t, 0)
	for _, page := range docPages {
		t.Run(page.name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("..", "..", "docs", page.name+".md"))
			if errors.Is(err, fs.ErrNotExist) {
				t.Skip("the page is not there")
			}
			if err != nil {
				t.Fatal(err)
			}
			blocks, err := docpage.Parse(string(text))
			if err != nil {
				t.Fatalf("docs/%s.md: %v", page.name, err)
			}
			if len(blocks) == 0 {
				t.Fatalf("docs/%s.md has no block that is run", page.name)
			}
			p := newPageRun(t, page.name, pg)
			if page.around != nil {
				page.around(t, p)
			}
			for _, b := range blocks {
				p.do(b)
			}
			p.stop()
		})
	}
}
