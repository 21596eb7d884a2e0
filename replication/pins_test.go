package replication

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/replication/catalog"
)

// A writer with an address of its own may go through a pooler.
func TestWriterPinsNothingBehindAPooler(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		writeURL string
		pooled   bool
	}{{"postgres://u@pooler/d", true}, {"postgres://u@h/d", false}, {"", false}} {
		w := NewWriter(Config{Config: catalog.Config{URL: "postgres://u@h/d"}, WriteURL: c.writeURL})
		if got := w.target(); got.Pooled != c.pooled {
			t.Errorf("%q: %+v", c.writeURL, got)
		}
	}
}

// The text of types that print names or money depends on the value alone.
func TestNamesAndMoneyArePrintedAlike(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.Exec("ALTER TABLE outbox ADD rel regclass, ADD fn regprocedure, ADD type regtype, ADD price money")
	name := d.Text("SELECT quote_ident(current_database())")
	d.Exec("ALTER DATABASE " + name + " SET search_path = public")
	d.Exec("ALTER DATABASE " + name + " SET lc_monetary = 'C.UTF-8'")
	d.Exec("CREATE FUNCTION mine(int) RETURNS int LANGUAGE sql AS 'SELECT 1'")
	s := d.start(0)
	d.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, rel, fn, type, price)
		VALUES ('d', 'a', 1, '{}', 'public.outbox', 'public.mine(int)', 'int', 1234.5)`)
	got := read(t, s, inserts(1)).inserts[0]
	for _, want := range []string{"public.outbox", "public.mine(integer)", "integer", "$1,234.50"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not hold %s", got, want)
		}
	}
}
