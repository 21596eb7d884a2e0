package e2e

import (
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestReplayRights runs the commands of docs/replay.md as the NATS user that it documents, who may do nothing else.
func TestReplayRights(t *testing.T) {
	t.Parallel()
	const password = "documented"
	conf, err := server.ProcessConfigFile(file(t, "nats.conf", strings.ReplaceAll(documented(t, "replay.md", "Rights", 0), "…", password)))
	must(t, err)
	broker := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Users = append(conf.Users, &server.User{Username: "admin", Password: password})
	}})
	url := pgtest.Database(t, pgtest.Server(t))
	o := newOutflow(t, url, broker.URL(), slotName("rights"), "NATS_USER=admin", "NATS_PASSWORD="+password, "REORDER_HORIZON=0s")
	o.init()
	o.start()
	nc, err := nats.Connect(broker.URL(), nats.UserInfo("admin", password), nats.Timeout(askTimeout))
	must(t, err)
	t.Cleanup(nc.Close)
	s, err := jetstream.New(nc, jetstream.WithDefaultTimeout(askTimeout))
	must(t, err)
	conn := db(t, url)
	for i := range 4 {
		row(t, conn, "doc", i, `{}`)
	}
	awaitMessages(t, s, o.stream, 4)
	p := newProjection(t, o, url, s, "texts")
	p.start()
	p.reach(4)
	p.name, p.marks = "texts-kv", consume.JetStream()
	p.make()
	p.start()
	p.reach(4)
	_, err = s.CreateConsumer(t.Context(), o.stream, jetstream.ConsumerConfig{Durable: "plain", OptStartSeq: 4, DeliverPolicy: jetstream.DeliverByStartSequencePolicy})
	must(t, err)

	o.set("NATS_USER=outflow-replay")
	for _, args := range []string{
		"replay --doc doc", "replay --doc doc --from table", "replay --seq 2 --to stream:AGAIN", "replay --seq ..3 --to stream:AGAIN --replay-id x",
		"replay --seq ..3 --to stream:AGAIN --replay-id x", "replay --doc doc --to subject:replay.AGAIN.more.>", "replay --seq 3 --to consumer:texts",
		"consumer list", "consumer rewind texts --to seq:2 --yes", "consumer rewind texts-kv --to time:1h --yes", "consumer rewind plain --to seq:2 --yes",
	} {
		if out, errOut, code := o.exec(strings.Fields(args)...); code != 0 {
			t.Errorf("outflow %s: exit code %d\n%s%s", args, code, out, errOut)
		}
	}
	o.fails(3, []string{"replay", "--doc", "doc", "--to", "stream:OTHER"}, "docs/nats.md")
}
