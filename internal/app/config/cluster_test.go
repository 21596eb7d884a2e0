package config

import (
	"maps"
	"slices"
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
	want := Cluster{ID: 2, Count: 3, Mode: ModeNone, MaximumDelay: 10 * time.Second}
	if c.Cluster != want || c.Replication.Origin != OriginOwn ||
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

// What can't be read on another cluster as it is at home is refused.
func TestRowsThatCannotBeReadElsewhereAreRefused(t *testing.T) {
	t.Parallel()
	home := Args{"cluster.id": "1", "cluster.control": "outflow_control"}
	if c, err := Load(home, nil); err != nil || c.Cluster.Control != "outflow_control" {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	away := maps.Clone(home)
	away["cluster.subscription"] = "from_2"
	if c, err := Load(away, nil); err != nil || c.Cluster.Subscription != "from_2" {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	mustRefuse(t, home, []refusal{
		{Args{"cluster.id": "0"}, "Set cluster.id"},
		{Args{"source": "both"}, "not replicated"},
		{Args{"shard": "0/2"}, "divided"},
		{Args{"cluster.control": "public.outbox"}, "name of its own"},
		{Args{"cluster.control": "", "cluster.subscription": "from_2"}, "what it is at home"},
		{Args{"cluster.control": "a.b.c"}, "schema.name"},
	})
}

// The shared mode goes with what it needs alone: each that is missing is named, with the way out.
func TestTheSharedModeNeedsWhatItRestsOn(t *testing.T) {
	t.Parallel()
	shared := Args{"cluster.id": "1", "cluster.count": "2", "cluster.control": "outflow_control",
		"cluster.mode": "shared", "cluster.maximum_delay": "5s", "sink.durable_after": "0s"}
	c, err := Load(shared, nil)
	if err != nil || !c.Cluster.Shared() || c.Cluster.Elsewhere() {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	away := maps.Clone(shared)
	away["cluster.subscription"] = "from_2"
	if c, err := Load(away, nil); err != nil || !c.Cluster.Elsewhere() {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	mustRefuse(t, shared, []refusal{
		{Args{"cluster.count": "1"}, "at least two clusters"},
		{Args{"cluster.count": "0"}, "at least two clusters"},
		{Args{"cluster.control": ""}, "Set cluster.control"},
		{Args{"cluster.maximum_delay": "4999ms"}, "Set at least 5s"},
		{Args{"sink.durable_after": "1ms"}, "sync_interval: always"},
		{Args{"reorder.tick": "off"}, "Set reorder.tick to wal"},
		{Args{"shard": "0/2"}, "divided"},
		{Args{"source": "both"}, "not replicated"},
		{Args{"cluster.mode": "other"}, "Give none, shared or islands"},
	})
}

// The islands mode goes with what it needs alone: each that is missing is named, with the way out.
func TestTheIslandsModeNeedsWhatItRestsOn(t *testing.T) {
	t.Parallel()
	islands := Args{"cluster.id": "1", "cluster.count": "3", "cluster.control": "outflow_control",
		"cluster.mode": "islands", "cluster.maximum_delay": "5s",
		"cluster.subscriptions": "3=from_3, 2=from_2"}
	c, err := Load(islands, nil)
	if err != nil || !c.Cluster.Islands() || c.Cluster.Elsewhere() ||
		c.Cluster.Subscriptions != "2=from_2,3=from_3" ||
		!maps.Equal(c.Cluster.Others(), map[int]string{2: "from_2", 3: "from_3"}) {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	away := maps.Clone(islands)
	away["cluster.subscription"] = "from_2"
	if c, err := Load(away, nil); err != nil || c.Cluster.Elsewhere() {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
	mustRefuse(t, islands, []refusal{
		{Args{"cluster.count": "1"}, "at least two clusters"},
		{Args{"cluster.count": "0"}, "at least two clusters"},
		{Args{"cluster.control": ""}, "Set cluster.control"},
		{Args{"cluster.maximum_delay": "4999ms"}, "Set at least 5s"},
		{Args{"reorder.mode": "gap"}, "Set reorder.mode to horizon"},
		{Args{"reorder.tick": "off"}, "Set reorder.tick to wal"},
		{Args{"shard": "0/2"}, "divided"},
		{Args{"source": "both"}, "not replicated"},
		{Args{"cluster.subscriptions": ""}, "none of cluster 2"},
		{Args{"cluster.subscriptions": "2=from_2"}, "none of cluster 3"},
		{Args{"cluster.subscriptions": "1=from_1,2=from_2,3=from_3"}, "not one of the 2 others"},
		{Args{"cluster.subscriptions": "2=from_2,3=from_3,4=from_4"}, "not one of the 2 others"},
		{Args{"cluster.subscriptions": "2=from_2,2=from_3"}, "cluster 2: there twice"},
		{Args{"cluster.subscriptions": "2=from_2,3=from_2"}, "subscription from_2: there twice"},
		{Args{"cluster.subscriptions": "2=from_2,65=from_3"}, "number=name"},
		{Args{"cluster.subscriptions": "from_2,from_3"}, "number=name"},
		{Args{"cluster.subscription": "from_4"}, "Name it for the cluster"},
		{Args{"cluster.gone": "1"}, "Name other clusters alone"},
		{Args{"cluster.gone": "4"}, "Name other clusters alone"},
		{Args{"cluster.gone": "2,2"}, "cluster 2: there twice"},
		{Args{"cluster.gone": "2,x"}, "number,number"},
	})
	islands["cluster.gone"] = "3, 2"
	if c, err := Load(islands, nil); err != nil || !slices.Equal(c.Cluster.GoneForGood(), []int{2, 3}) {
		t.Fatalf("%+v, %v", c.Cluster, err)
	}
}

// refusal is a change of settings, and what its refusal says.
type refusal struct {
	change Args
	says   string
}

// mustRefuse makes each change of settings that are good, and sees it refused.
func mustRefuse(t *testing.T, good Args, refusals []refusal) {
	t.Helper()
	for _, r := range refusals {
		args := maps.Clone(good)
		maps.Copy(args, r.change)
		if _, err := Load(args, nil); outbox.ClassOf(err) != outbox.Usage ||
			!strings.Contains(err.Error(), r.says) {
			t.Errorf("%v: %v", r.change, err)
		}
	}
}
