package sink

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// The server's own mapping decides what the partition of a value is.
func TestPartitionIsTheServers(t *testing.T) {
	t.Parallel()
	const n = 7
	template, err := outbox.ParseSubjectTemplate(fmt.Sprintf("out.{partition(doc_id, %d)}.{doc_id}", n))
	must.Succeed(t, err)
	s := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		account := server.NewAccount("A")
		if err := account.AddMapping("in.*", fmt.Sprintf("out.{{partition(%d,1)}}.{{wildcard(1)}}",
			n)); err != nil {
			t.Error(err)
		}
		o.Accounts = []*server.Account{account}
		o.Users = []*server.User{{Username: "u", Password: "p", Account: account}}
		o.NoAuthUser = "u"
	}})
	nc, _ := natstest.Connect(t, s.URL(), nats.NoReconnect())
	sub, err := nc.SubscribeSync("out.>")
	must.Succeed(t, err)
	seen := map[string]bool{}
	for i := range 50 {
		v := fmt.Sprintf("doc-%d", i*i)
		must.Succeed(t, nc.Publish("in."+v, nil))
		m, err := sub.NextMsg(time.Minute)
		must.Succeed(t, err)
		if want := string(template.Append(nil, []string{v})); m.Subject != want {
			t.Errorf("the server maps to %s, we to %s", m.Subject, want)
		}
		seen[strings.TrimSuffix(m.Subject, v)] = true
	}
	if len(seen) != n {
		t.Errorf("only %d partitions of %d", len(seen), n)
	}
}
