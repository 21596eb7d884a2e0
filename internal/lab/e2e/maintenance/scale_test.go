package maintenance

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
)

// edit changes the configuration of a stream, as `nats stream edit` does. A cluster that is busy may refuse
// it for a moment.
func edit(t *testing.T, natsURL, stream string, change func(*jetstream.StreamConfig)) {
	t.Helper()
	js := harness.JetStream(t, natsURL)
	harness.Eventually(t, "edit stream "+stream, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		s, err := js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		cfg := s.CachedInfo().Config
		change(&cfg)
		_, err = js.UpdateStream(ctx, cfg)
		return err
	})
}

// replicas waits until a stream has n replicas that are all up to date.
func replicas(t *testing.T, natsURL, stream string, n int) {
	t.Helper()
	js := harness.JetStream(t, natsURL)
	harness.Eventually(t, fmt.Sprintf("%d replicas of %s", n, stream), func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		s, err := js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		info := s.CachedInfo()
		if info.Config.Replicas != n || info.Cluster == nil || info.Cluster.Leader == "" ||
			len(info.Cluster.Replicas) != n-1 {
			return fmt.Errorf("%d replicas, cluster %+v", info.Config.Replicas, info.Cluster)
		}
		for _, r := range info.Cluster.Replicas {
			if !r.Current {
				return fmt.Errorf("%s lags", r.Name)
			}
		}
		return nil
	})
}

// TestReplicasChangeUnderLoad: stream and bucket go from one replica to three and back under load.
// init.replicas says how init makes a stream, so that another number stops nothing.
func TestReplicasChangeUnderLoad(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	c := natstest.Cluster(t, 3)
	p := underLoad(t, timedServer(t), c.URLs(), "scale", 1000, nil)
	bucket := "KV_outflow-" + p.Stream
	for _, n := range []int{3, 1} {
		for _, stream := range []string{p.Stream, bucket} {
			edit(t, c.URLs(), stream, func(cfg *jetstream.StreamConfig) { cfg.Replicas = n })
			p.publishing()
			replicas(t, c.URLs(), stream, n)
		}
		p.publishing()
		if n == 3 {
			p.Init() // init.replicas is 1
			p.MustStop(t)
			p.Set("INIT_REPLICAS=3")
			p.Start()
			p.publishing()
		}
	}
	p.end()
}

// TestTheIngressChangesUnderLoad: the stream gets another private ingress under load, as when the old one has
// become known to somebody.
func TestTheIngressChangesUnderLoad(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	p := underLoad(t, timedServer(t), ns.URL(), "ingress", 1500, nil)
	for _, token := range []string{"0123456789abcdef", "other"} {
		edit(t, ns.URL(), p.Stream, func(cfg *jetstream.StreamConfig) {
			cfg.Subjects = []string{"_outflow." + token + ".>"}
		})
		p.publishing()
	}
	p.Init()
	p.end()
}
