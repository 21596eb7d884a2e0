package doctor

import (
	"context"
	"net"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// Broker is the NATS server that answered.
type Broker struct {
	Server    string // name and address
	Version   string
	RoundTrip time.Duration
	Cluster   string // "": it is alone
	Link      Link
}

// Account is what JetStream says of the account. A limit of 0 or less is none.
type Account struct {
	Storage uint64        `json:"storage"`
	Memory  uint64        `json:"memory"`
	Limits  AccountLimits `json:"limits"`
	Tiers   map[string]struct {
		Storage uint64        `json:"storage"`
		Memory  uint64        `json:"memory"`
		Limits  AccountLimits `json:"limits"`
	} `json:"tiers"`
}

// AccountLimits are an account's, or a tier's.
type AccountLimits struct {
	Storage int64 `json:"max_storage"`
	Memory  int64 `json:"max_memory"`
}

// Stream is what JetStream says of the stream.
type Stream struct {
	Config  streamConfig
	State   jsapi.StreamState
	Cluster *jsapi.Cluster

	Fault error         // what a start would refuse it for
	Clock time.Duration // its server's clock is ahead of ours by so much
	Asked time.Duration // and off by half of this at most
}

// streamConfig is what doctor reads of the stream's configuration.
type streamConfig struct {
	streamretain.Limits
	Name     string `json:"name"`
	Storage  string `json:"storage"`
	Replicas int    `json:"num_replicas"`
}

// Consumer is a consumer of the stream.
type Consumer struct {
	Name   string `json:"name"`
	Config struct {
		Durable    string            `json:"durable_name"`
		Ack        string            `json:"ack_policy"`
		MaxDeliver int               `json:"max_deliver"`
		Filter     string            `json:"filter_subject"`
		Filters    []string          `json:"filter_subjects"`
		Metadata   map[string]string `json:"metadata"`
	} `json:"config"`
	Delivered   consumerAt `json:"delivered"`
	AckFloor    consumerAt `json:"ack_floor"`
	AckPending  int        `json:"num_ack_pending"`
	Redelivered int        `json:"num_redelivered"`
	Waiting     int        `json:"num_waiting"`
	Pending     uint64     `json:"num_pending"`
	Push        bool       `json:"push_bound"`
	Paused      bool       `json:"paused"`
}

type consumerAt struct {
	Stream uint64    `json:"stream_seq"`
	Last   time.Time `json:"last_active"`
}

// natsReader reads from NATS.
type natsReader struct {
	*reader
	conn  *sink.Conn
	store *checkpoint.Store
}

func (r *natsReader) close() {
	if r.conn != nil {
		r.conn.Close()
	}
}

func (r *natsReader) connect(ctx context.Context) {
	cfg := r.f.Config
	r.from(ctx, srcNATS, func(ctx context.Context) (err error) {
		if r.conn, err = wiring.ConnectBroker(ctx, cfg, r.log); err != nil {
			return err
		}
		r.store = wiring.Store(cfg, r.conn)
		nc := r.conn.NATS()
		b := &Broker{Server: nc.ConnectedAddr(),
			Version: nc.ConnectedServerVersion(), Cluster: nc.ConnectedClusterName()}
		if name := nc.ConnectedServerName(); name != nc.ConnectedServerId() {
			b.Server = name + " at " + b.Server
		}
		asked := time.Now()
		if err := nc.FlushWithContext(ctx); err != nil {
			return err
		}
		b.RoundTrip = time.Since(asked)
		b.Link.Local = isLocalAddress(nc.ConnectedAddr())
		if state, err := nc.TLSConnectionState(); err == nil {
			b.Link.TLS = true
			b.Link.Verified = nc.Opts.TLSConfig == nil || !nc.Opts.TLSConfig.InsecureSkipVerify
			b.Link.Certificates = certificates("NATS", state.PeerCertificates, nc.Opts.TLSConfig,
				nc.Opts.TLSCertCB)
		}
		if until := credentialsUntil(cfg); !until.IsZero() {
			b.Link.Certificates = append(b.Link.Certificates,
				Certificate{"the user of nats.creds (" + cfg.NATS.Creds + ")", until})
		}
		r.f.NATS = b
		return nil
	})
}

func isLocalAddress(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// credentialsUntil is when the JWT of the credentials file expires; zero: never, or there is none.
func credentialsUntil(cfg config.Config) time.Time {
	content, err := os.ReadFile(cfg.NATS.Creds)
	if cfg.NATS.Creds == "" || err != nil {
		return time.Time{}
	}
	token, err := nkeys.ParseDecoratedJWT(content)
	if err != nil {
		return time.Time{}
	}
	return expiry(token)
}

func (r *natsReader) readRecord(ctx context.Context) {
	r.from(ctx, srcRecord, func(ctx context.Context) (err error) {
		if _, err := r.store.CheckBucket(ctx); err != nil {
			return err
		}
		rd := &r.f.Readings
		rd.Record, rd.Revision, err = r.store.Load(ctx)
		if err == nil {
			err = r.store.CheckAlone(ctx)
		}
		if err == nil {
			r.f.Maintained, err = watch.ReadMaintained(ctx, r.store)
		}
		return err
	})
}

func (r *natsReader) readStream(ctx context.Context) {
	r.from(ctx, srcStream, func(ctx context.Context) (err error) {
		if r.f.Readings.Stream, err = r.conn.State(ctx); err != nil {
			return err
		}
		if !r.f.Readings.Stream.Exists {
			return nil
		}
		asked := time.Now()
		info, err := jsapi.Stream[streamConfig](ctx, r.conn.API(), r.f.Config.Stream)
		if err != nil {
			return err
		}
		if info == nil { // it was deleted just now
			r.f.Readings.Stream = relay.StreamState{}
			return nil
		}
		r.f.Stream = Stream{Config: info.Config, State: info.State, Cluster: info.Cluster,
			Asked: time.Since(asked)}
		if !info.Now.IsZero() {
			r.f.Stream.Clock = info.Now.Sub(asked.Add(r.f.Stream.Asked / 2))
		}
		err = r.conn.CheckStream(ctx)
		if err == nil {
			err = r.conn.CheckMaxAge(r.f.Config.Sink.DurableAfter)
		}
		if outbox.FaultOf(err) != nil {
			r.f.Stream.Fault, err = err, nil
		}
		return err
	})
}

func (r *natsReader) readRest(ctx context.Context) {
	r.from(ctx, srcAccount, func(ctx context.Context) error {
		var info struct {
			jsapi.Answer
			Account
		}
		err := r.conn.API().Ask(ctx, "INFO", nil, &info)
		r.f.Account = info.Account
		return err
	})
	if r.f.hasStream() && r.f.known(srcStream) {
		// what it has to hold is a matter of the table as well, whose name is in the checkpoint's
		// configuration
		r.from(ctx, srcStream, func(ctx context.Context) error {
			err := wiring.CheckLimits(ctx, r.conn,
				wiring.Checkpoint(r.f.Config, &wiring.Layout{}), r.f.Config.Reorder.Settings())
			if f := outbox.FaultOf(err); f != nil && f.Class == outbox.Fatal && r.f.Stream.Fault == nil {
				r.f.Stream.Fault, err = f, nil
			}
			return err
		})
	}
	r.from(ctx, srcConsumers, func(ctx context.Context) (err error) {
		if !r.f.hasStream() {
			return nil
		}
		r.f.Consumers, err = r.consumers(ctx)
		return err
	})
	if r.o.Deep && len(r.f.Consumers) > 0 {
		r.from(ctx, srcConsumers, func(ctx context.Context) (err error) {
			if err := sleep(ctx, between(r.o.Timeout)); err != nil {
				return err
			}
			r.f.Earlier, r.f.Apart = r.f.Consumers, between(r.o.Timeout)
			r.f.Consumers, err = r.consumers(ctx)
			return err
		})
	}
}

// between is how long after the first reading of the consumers the second one is made.
func between(timeout time.Duration) time.Duration { return min(3*time.Second, timeout/2) }

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// consumers lists the stream's consumers, the first of them where there are very many.
func (r *natsReader) consumers(ctx context.Context) (all []Consumer, err error) {
	method := "CONSUMER.LIST." + r.f.Config.Stream
	for len(all) < most {
		var page struct {
			jsapi.Answer
			Total     int        `json:"total"`
			Consumers []Consumer `json:"consumers"`
		}
		err := r.conn.API().Ask(ctx, method, map[string]int{"offset": len(all)}, &page)
		if f := outbox.FaultOf(err); f != nil && f.Code == "nats_permission" {
			return nil, noRight("let the user publish to $JS.API." + method)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, page.Consumers...)
		if len(page.Consumers) == 0 || len(all) >= page.Total {
			break
		}
	}
	return all, nil
}

// expiry reads when a JWT expires, without checking it: that is the server's to do.
func expiry(token string) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}
	}
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if decode(parts[1], &claims) != nil || claims.Expires == 0 {
		return time.Time{}
	}
	return time.Unix(claims.Expires, 0)
}
