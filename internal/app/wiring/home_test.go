package wiring

import (
	"log/slog"
	"testing"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Messages name this cluster or, where another one's rows are read, that one. What one database alone
// publishes names none.
func TestMessagesNameTheClusterWhoseRowsAreRead(t *testing.T) {
	t.Parallel()
	cfg, err := config.Load(nil, nil)
	must.Succeed(t, err)
	var table catalog.Table
	for _, name := range []string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload"} {
		table.Columns = append(table.Columns, catalog.Column{Name: name})
	}
	clusters := map[string]int{"": 2, "pg_16500": 1, "pg_16501": 3}
	for _, test := range []struct {
		cluster catalog.Cluster
		want    int
	}{
		{catalog.Cluster{}, 0},
		{catalog.Cluster{Origin: "pg_16500"}, 0},
		{catalog.Cluster{Clusters: clusters}, 2},
		{catalog.Cluster{Clusters: clusters, Origin: "pg_16501"}, 3},
	} {
		l, err := ApplyTo(cfg, table)
		must.Succeed(t, err)
		l.Cluster = test.cluster
		sc, err := Sink(cfg, l, slog.New(slog.DiscardHandler))
		must.Succeed(t, err)
		if sc.Home != test.want {
			t.Errorf("%+v: messages name %d, want %d", test.cluster, sc.Home, test.want)
		}
		if got := Decoder(cfg, l).Clusters; len(got) != len(test.cluster.Clusters) {
			t.Errorf("%+v: the decoder knows %v", test.cluster, got)
		}
	}
}
