package replication

import (
	"reflect"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/faultproxy"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// A connection costs the server a process. A session that only asks opens one, and hears what one that
// streams does.
func TestASessionThatOnlyAsksHasOneConnection(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		d := ready(t, srv)
		two := d.open()
		proxy, url, err := faultproxy.To(d.URL)
		must.Succeed(t, err)
		t.Cleanup(proxy.Close)
		cfg := d.config()
		cfg.URL = url
		one, err := Inspect(within(t), cfg)
		must.Succeed(t, err)
		t.Cleanup(one.Close)
		columns := []string{"doc_id", "payload"}
		ask := func(s *Session) (answers []any) {
			server, err := s.Server(within(t))
			server.WALEnd = 0 // the server writes by itself
			answers = append(answers, server, err)
			slot, err := s.Slot(within(t))
			answers = append(answers, slot, err)
			publication, err := s.Publication(within(t), columns)
			answers = append(answers, publication, err)
			table, err := s.Table(within(t))
			answers = append(answers, table, err)
			cluster, err := s.Cluster(within(t))
			return append(answers, cluster, err)
		}
		got, want := ask(one), ask(two)
		for i := range want {
			if !reflect.DeepEqual(got[i], want[i]) {
				t.Errorf("answer %d is %+v, of two connections %+v", i, got[i], want[i])
			}
		}
		if slices.IndexFunc(want, func(a any) bool { _, is := a.(error); return is }) >= 0 {
			t.Errorf("an error among the answers: %v", want)
		}
		if n := proxy.Accepted(); n != 1 {
			t.Errorf("%d connections, want 1", n)
		}
		if err := one.Start(within(t), outbox.LSN(0), false); err == nil {
			t.Error("a session that only asks began to stream")
		}
	})
}
