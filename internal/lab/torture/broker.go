package torture

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

// broker is a victim's NATS: one server or three of our own, or somebody else's.
type broker struct {
	stream  string
	urls    []string
	nodes   []*natsserver.Process // ours
	cluster *natsserver.Cluster   // of three
	conn    *nats.Conn
	js      jetstream.JetStream
}

func newBroker(ctx context.Context, dir, url string, replicas int, stream string) (b *broker, err error) {
	b = &broker{stream: stream}
	switch {
	case url != "":
		b.urls = strings.Split(url, ",")
	case replicas == 1:
		node, err := natsserver.StartProcess(natsserver.Options{Dir: filepath.Join(dir, "node0")})
		if err != nil {
			return nil, err
		}
		b.nodes, b.urls = []*natsserver.Process{node}, []string{node.URL()}
	default:
		if b.cluster, err = natsserver.StartCluster(dir, replicas); err != nil {
			return nil, err
		}
		for n := range b.cluster.Len() {
			b.nodes, b.urls = append(b.nodes, b.cluster.Node(n)), append(b.urls, b.cluster.Node(n).URL())
		}
	}
	await(ctx, catchUpLimit, func() bool { err = b.connect(); return err == nil })
	return b, err
}

// connect connects to the servers, which may stand still for a moment.
func (b *broker) connect() (err error) {
	b.conn, err = nats.Connect(strings.Join(b.urls, ","), nats.MaxReconnects(-1),
		nats.ReconnectWait(50*time.Millisecond),
		nats.ReconnectJitter(20*time.Millisecond, 20*time.Millisecond), nats.IgnoreDiscoveredServers(),
		nats.PingInterval(time.Second), nats.MaxPingsOutstanding(2), nats.Timeout(time.Second),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err == nil {
		b.js, err = jetstream.New(b.conn)
	}
	return err
}

// messages returns how many messages the stream holds.
func (b *broker) messages(ctx context.Context) (int64, bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := b.js.Stream(ctx, b.stream)
	if err != nil {
		return 0, false
	}
	info := s.CachedInfo()
	if info.Cluster != nil && info.Cluster.Leader == "" && len(info.Cluster.Replicas) > 0 {
		return 0, false // a follower's, which may lag
	}
	return int64(info.State.Msgs), true
}

// close ends our servers, or removes the stream and the bucket from somebody else's.
func (b *broker) close(stream string) error {
	var errs []error
	if len(b.nodes) == 0 && b.js != nil {
		ctx, cancel := context.WithTimeout(context.Background(), catchUpLimit)
		defer cancel()
		for _, name := range []string{stream, "KV_" + checkpoint.Bucket(stream)} {
			var err error
			await(ctx, catchUpLimit, func() bool {
				once, end := context.WithTimeout(ctx, askTimeout)
				defer end()
				if err = b.js.DeleteStream(once, name); errors.Is(err, jetstream.ErrStreamNotFound) {
					err = nil
				}
				return err == nil
			})
			errs = append(errs, err)
		}
	}
	if b.conn != nil {
		b.conn.Close()
	}
	for _, n := range b.nodes {
		if n.Running() {
			errs = append(errs, n.Kill())
		}
	}
	return errors.Join(errs...)
}
