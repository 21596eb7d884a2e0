package backfill

import (
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestReplayNeedsOnlyTheDocumentedRights runs the commands of docs/replay.md as the NATS user that it
// documents, who may do nothing else.
func TestReplayNeedsOnlyTheDocumentedRights(t *testing.T) {
	t.Parallel()
	const password = "documented"
	conf, err := server.ProcessConfigFile(harness.WriteFile(t, "nats.conf",
		strings.ReplaceAll(harness.DocumentedBlock(t, "replay.md", "Rights", 0), "…", password)))
	harness.Must(t, err)
	broker := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Users = append(conf.Users, &server.User{Username: "admin", Password: password})
	}})
	url := pgtest.Database(t, pgtest.Server(t))
	o := harness.New(t, url, broker.URL(), harness.SlotName("rights"), "NATS_USER=admin", "NATS_PASSWORD="+
		password, "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	nc, err := nats.Connect(broker.URL(), nats.UserInfo("admin", password), nats.Timeout(harness.AskTimeout))
	harness.Must(t, err)
	t.Cleanup(nc.Close)
	s, err := jetstream.New(nc, jetstream.WithDefaultTimeout(harness.AskTimeout))
	harness.Must(t, err)
	conn := harness.Connect(t, url)
	for i := range 4 {
		harness.Insert(t, conn, "doc", i, `{}`)
	}
	harness.AwaitMessages(t, s, o.Stream, 4)
	p := harness.NewProjection(t, o, url, s, "texts")
	p.Start()
	p.Reach(4)
	p.Name, p.Marks = "texts-kv", consume.JetStream()
	p.Make()
	p.Start()
	p.Reach(4)
	_, err = s.CreateConsumer(t.Context(), o.Stream, jetstream.ConsumerConfig{Durable: "plain",
		OptStartSeq: 4, DeliverPolicy: jetstream.DeliverByStartSequencePolicy})
	harness.Must(t, err)

	o.Set("NATS_USER=outflow-replay")
	for _, args := range []string{
		"replay --doc doc", "replay --doc doc --from table", "replay --seq 2 --to stream:AGAIN",
		"replay --seq ..3 --to stream:AGAIN --replay-id x",
		"replay --seq ..3 --to stream:AGAIN --replay-id x",
		"replay --doc doc --to subject:replay.AGAIN.more.>", "replay --seq 3 --to consumer:texts",
		"consumer list", "consumer rewind texts --to seq:2 --yes",
		"consumer rewind texts-kv --to time:1h --yes", "consumer rewind plain --to seq:2 --yes",
	} {
		o.MustRun(strings.Fields(args)...)
	}
	o.MustFail(3, []string{"replay", "--doc", "doc", "--to", "stream:OTHER"}, "docs/nats.md")
}
