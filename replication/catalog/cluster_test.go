package catalog

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAControlTableHasTheKeyThatItsRowsNeed: init makes such a table, and takes over no other one.
func TestAControlTableHasTheKeyThatItsRowsNeed(t *testing.T) {
	t.Parallel()
	d := newDatabase(t, pgtest.Server(t))
	d.cfg.Control = "public.outflow_control"
	s := d.setup()
	defer s.Close()
	made, err := s.EnsureControl(within(t))
	if err != nil || !made {
		t.Fatal(made, err)
	}
	if made, err = s.EnsureControl(within(t)); err != nil || made {
		t.Fatal(made, err)
	}
	for _, id := range []string{
		"id bigint PRIMARY KEY DEFAULT 1", "id uuid PRIMARY KEY", "id uuid DEFAULT gen_random_uuid()",
		"id uuid UNIQUE DEFAULT gen_random_uuid()", "key uuid PRIMARY KEY DEFAULT gen_random_uuid()",
		"id uuid DEFAULT gen_random_uuid(), n int, PRIMARY KEY (id, n)",
		"id uuid PRIMARY KEY DEFERRABLE DEFAULT gen_random_uuid()",
	} {
		d.Exec("DROP TABLE outflow_control")
		d.Exec("CREATE TABLE outflow_control (" + id + ", outbox text, prefix text, content text)")
		_, err := s.EnsureControl(within(t))
		if f := wantFault(t, err, outbox.Fatal, "control_table"); !strings.Contains(f.Message, `"id"`) {
			t.Errorf("%s: %v", id, f)
		}
	}
	d.Exec("DROP TABLE outflow_control")
	d.Exec(`CREATE TABLE outflow_control (note text, content text, prefix text, outbox text,
		id uuid DEFAULT gen_random_uuid(), PRIMARY KEY (id))`)
	_, err = s.EnsureControl(within(t))
	must.Succeed(t, err)
}
