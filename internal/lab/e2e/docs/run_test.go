package docs

import (
	"os"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/docpage"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// docPages are the pages of docs that are run as they stand, and what else is done around some of them.
var docPages = []struct {
	name string
	// makes the page's world; finish comes behind the last block
	around func(t *testing.T, p *pageRun) (finish func())
}{
	{name: "first-event"},
	{name: "first-consumer"},
	{name: "replay"},
	{name: "snapshot"},
	{name: "ordering"},
	{name: "from-polling", around: aroundPolling},
}

// TestThePagesWorkAsWritten does what the pages say, block by block, against real servers, and sees what they
// say that a reader sees.
func TestThePagesWorkAsWritten(t *testing.T) {
	t.Parallel()
	harness.SkipIfShort(t)
	// A server of its own: the pages use slots by their default name.
	pg := pgtest.Own(t, 0)
	for _, page := range docPages {
		t.Run(page.name, func(t *testing.T) {
			text, err := os.ReadFile(harness.Path("docs", page.name+".md"))
			harness.Must(t, err)
			blocks, err := docpage.Parse(string(text))
			if err != nil {
				t.Fatalf("docs/%s.md: %v", page.name, err)
			}
			if len(blocks) == 0 {
				t.Fatalf("docs/%s.md has no block that is run", page.name)
			}
			p := newPageRun(t, page.name, pg)
			finish := func() {}
			if page.around != nil {
				finish = page.around(t, p)
			}
			for _, b := range blocks {
				p.do(b)
			}
			finish()
			p.stop()
		})
	}
}
