package config

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// A cluster publishes its own rows alone, also where an older record says otherwise.
func TestAClusterPublishesItsOwnRowsAlone(t *testing.T) {
	t.Parallel()
	c, err := Load(nil, []string{"CLUSTER_ID=2", "CLUSTERS_COUNT=3", "MAXIMUM_DELAY=10s"})
	if err != nil {
		t.Fatal(err)
	}
	if want := (Cluster{2, 3, 10 * time.Second}); c.Cluster != want || c.Replication.Origin != OriginOwn ||
		!c.Replication.Explicit {
		t.Errorf("%+v, %+v", c.Cluster, c.Replication)
	}
	if c, err := Load(nil, nil); err != nil || c.Replication.Explicit {
		t.Errorf("without a cluster: %+v, %v", c.Replication, err)
	}
	for _, refused := range []struct {
		args Args
		says string
	}{
		{Args{"cluster.id": "4", "cluster.count": "3"}, "not one of cluster.count"},
		{Args{"cluster.count": "3"}, "Give each cluster a number"},
		{Args{"cluster.id": "1", "replication.origin": "any"}, "Leave replication.origin out"},
		{Args{"cluster.id": "east"}, "Give a number from 1 to 64"},
	} {
		if _, err := Load(refused.args, nil); outbox.ClassOf(err) != outbox.Usage ||
			!strings.Contains(err.Error(), refused.says) {
			t.Errorf("%v: %v", refused.args, err)
		}
	}
}
