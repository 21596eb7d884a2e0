package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	consume "github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

const accountPassword = "documented"

// accountsConfig is docs/samples/nats-accounts.conf.
func accountsConfig(t *testing.T) *server.Options {
	t.Helper()
	conf, err := os.ReadFile("../../../docs/samples/nats-accounts.conf")
	must(t, err)
	text := string(conf)
	for _, variable := range regexp.MustCompile(`\$[A-Z_]+PASSWORD`).FindAllString(text, -1) {
		text = variable[1:] + " = " + accountPassword + "\n" + text
	}
	sample, err := server.ProcessConfigFile(file(t, "nats.conf", text))
	must(t, err)
	return sample
}

// accounts starts a server with it.
func accounts(t *testing.T) *natsserver.Server {
	t.Helper()
	sample := accountsConfig(t)
	return natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) { o.Accounts, o.Users = sample.Accounts, sample.Users }})
}

// loginTo connects as a user of that file.
func loginTo(t *testing.T, s *natsserver.Server, user string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	return loginWith(t, s, user, accountPassword)
}

func loginWith(t *testing.T, s *natsserver.Server, user, password string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(s.URL(), nats.UserInfo(user, password), nats.Timeout(askTimeout),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	must(t, err)
	t.Cleanup(nc.Close)
	prefix := "$JS.API"
	if user == "search" {
		prefix = "OUTFLOW"
	}
	js, err := jetstream.NewWithAPIPrefix(nc, prefix, jetstream.WithDefaultTimeout(askTimeout))
	must(t, err)
	return nc, js
}

// documentedRequests sends what docs/nats.md says in its n-th block: nats --user USER request SUBJECT BODY.
func documentedRequests(t *testing.T, s *natsserver.Server, n int) {
	t.Helper()
	all := regexp.MustCompile(`(?s)nats --user (\S+) request '([^']+)' '([^']+)'`).FindAllStringSubmatch(documented(t, "nats.md", "An account of its own", n), -1)
	if len(all) == 0 {
		t.Fatal("no requests there")
	}
	for _, r := range all {
		nc, _ := loginTo(t, s, r[1])
		m, err := nc.Request(r[2], []byte(r[3]), askTimeout)
		must(t, err)
		var answer struct{ Error *jetstream.APIError }
		must(t, json.Unmarshal(m.Data, &answer))
		if answer.Error != nil {
			t.Fatalf("%s: %v", r[2], answer.Error)
		}
	}
}

// contents is all that a stream holds.
func contents(t *testing.T, js jetstream.JetStream, stream string) (all []string) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	must(t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		must(t, err)
		all = append(all, fmt.Sprint(seq, m.Subject, m.Header, string(m.Data)))
	}
	return all
}

// TestAccounts: with the accounts of docs/nats.md whoever reads can't write. JetStream answers to any reply subject, with its own rights;
// across accounts the reply stays in the account of whoever asked.
func TestAccounts(t *testing.T) {
	t.Parallel()
	broker := accounts(t)
	url := pgtest.Database(t, pgtest.Server(t))
	slot := slotName("accounts")
	o := newOutflow(t, url, broker.URL(), slot, "NATS_USER=outflow-init", "NATS_PASSWORD="+accountPassword, "REORDER_HORIZON=5ms")
	o.init()
	documentedRequests(t, broker, 0)
	o.set("NATS_USER=outflow")
	o.start()
	o.ready()
	conn := db(t, url)
	const events = 5
	for i := range events {
		row(t, conn, fmt.Sprint("doc", i%2), i, `{}`)
	}
	_, admin := loginTo(t, broker, "outflow-admin")
	awaitMessages(t, admin, "OUTBOX", events)

	// Honest consumers: package consumer on the copy, a plain one on the durable.
	reader, readers := loginTo(t, broker, "reader")
	mustConsume(t, readers, events)
	o.set("NATS_USER=reader")
	for _, args := range []string{"consumer list", "replay --doc doc1", "replay --seq 2.. --to stream:AGAIN"} {
		if out, errOut, code := o.exec(strings.Fields(args)...); code != 0 {
			t.Errorf("outflow %s: exit code %d\n%s%s", args, code, out, errOut)
		}
	}
	search, searching := loginTo(t, broker, "search")
	durable, err := searching.Consumer(t.Context(), "OUTBOX", "search")
	must(t, err)
	batch, err := durable.Fetch(events, jetstream.FetchMaxWait(patience))
	must(t, err)
	var acked uint64
	for m := range batch.Messages() {
		meta, err := m.Metadata()
		must(t, err)
		acked = meta.Sequence.Stream
		must(t, m.DoubleAck(t.Context()))
	}
	must(t, batch.Error())
	if acked != events {
		t.Errorf("search read up to %d", acked)
	}

	if code := o.term(); code != 0 { // the record stands still
		t.Fatalf("exit code %d", code)
	}
	stream := contents(t, admin, "OUTBOX")
	source, err := admin.Stream(t.Context(), "OUTBOX")
	must(t, err)
	first, err := source.GetMsg(t.Context(), 1)
	must(t, err)
	ingress := strings.TrimSuffix(source.CachedInfo().Config.Subjects[0], ">") + "outbox.doc1"
	targets := []string{ingress, "$KV.outflow-OUTBOX." + slot, "$JS.API.CONSUMER.DELETE.OUTBOX.search"}

	// A forged event, in a stream of the attacker's own account.
	ask := func(nc *nats.Conn, subject, body string) {
		t.Helper()
		if _, err := nc.Request(subject, []byte(body), askTimeout); err != nil {
			t.Errorf("%s: %v", subject, err)
		}
	}
	ask(reader, "$JS.API.STREAM.CREATE.TENANT", `{"name": "TENANT", "subjects": ["tenant.>"], "storage": "memory", "retention": "limits"}`)
	ask(reader, "$JS.API.CONSUMER.CREATE.TENANT.c", `{"stream_name": "TENANT", "config": {"name": "c", "durable_name": "c", "ack_policy": "none", "deliver_policy": "all"}}`)
	forged := nats.NewMsg("tenant.x")
	forged.Header.Set("Outflow", first.Header.Get("Outflow"))
	forged.Data = []byte(`{"forged": true}`)
	for range targets {
		if _, err := reader.RequestMsg(forged, askTimeout); err != nil {
			t.Fatal(err)
		}
	}
	for i := range events { // there is something to be delivered
		row(t, conn, "late", i, `{}`)
	}
	for _, target := range targets {
		for _, attack := range []struct {
			nc            *nats.Conn
			subject, body string
		}{
			{reader, target, `{}`},
			{reader, "$JS.API.STREAM.INFO.OUTBOX", ""},
			{reader, "$JS.API.STREAM.MSG.GET.OUTBOX", `{"seq": 1}`},
			{reader, "$JS.API.CONSUMER.MSG.NEXT.TENANT.c", `{"batch": 1, "no_wait": true}`},
			{reader, "OUTFLOW.CONSUMER.RESET.OUTBOX.readers", ""},
			{reader, "OUTFLOW.CONSUMER.RESET.OUTBOX.readers", `{"seq": 1}`},
			{reader, "OUTFLOW.STREAM.INFO.OUTBOX", ""},
			{reader, "OUTFLOW.CONSUMER.CREATE.OUTBOX.evil", `{"stream_name": "OUTBOX", "config": {"name": "evil", "deliver_subject": "` + target + `", "deliver_policy": "all"}}`},
			{reader, "$JS.FC.OUTBOX.readers.x", ""},
			{search, target, `{}`},
			{search, "$JS.API.STREAM.INFO.OUTBOX", ""},
			{search, "OUTFLOW.CONSUMER.INFO.OUTBOX.search", ""},
			{search, "OUTFLOW.CONSUMER.MSG.NEXT.OUTBOX.search", `{"batch": 1, "no_wait": true}`},
			{search, "OUTFLOW.CONSUMER.MSG.NEXT.OUTBOX.search", `{"batch": 1, "no_wait": true, "expires": 1}`}, // a bad request is answered too
			{search, "$JS.ACK.OUTBOX.search.1.1.1.1.0", "+NXT"},
			{search, "$JS.ACK.OUTBOX.search.1.1.1.1.0", "+ACK"},
		} {
			m := &nats.Msg{Subject: attack.subject, Reply: target, Data: []byte(attack.body), Header: nats.Header{"Nats-Trace-Dest": {target}}}
			must(t, attack.nc.PublishMsg(m))
			m.Header = nil
			must(t, attack.nc.PublishMsg(m))
		}
		// A push consumer of the attacker's own.
		ask(reader, "$JS.API.CONSUMER.CREATE.TENANT.push", `{"stream_name": "TENANT", "config": {"name": "push", "deliver_subject": "`+target+`", "ack_policy": "none", "deliver_policy": "all"}}`)
		ask(reader, "$JS.API.CONSUMER.DELETE.TENANT.push", "")
	}
	must(t, reader.FlushTimeout(patience))
	must(t, search.FlushTimeout(patience))

	// Outflow finds stream and record as it left them, and goes on.
	o.set("NATS_USER=outflow")
	o.start()
	awaitMessages(t, admin, "OUTBOX", 2*events)
	mustConsume(t, readers, 2*events)
	if code := o.term(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	all := contents(t, admin, "OUTBOX")
	if len(all) != len(stream)+events || !slices.Equal(all[:len(stream)], stream) || strings.Contains(strings.Join(all, ""), "forged") {
		t.Errorf("the stream is\n%s\nand was\n%s", strings.Join(all, "\n"), strings.Join(stream, "\n"))
	}

	// The same request from a user of Outflow's account does write: the attack is one.
	inside, _ := loginTo(t, broker, "outflow-admin")
	must(t, inside.PublishRequest("$JS.API.STREAM.INFO.OUTBOX", ingress, nil))
	awaitMessages(t, admin, "OUTBOX", 2*events+1)
}

// mustConsume reads a stream with package consumer from its beginning until it has had n events.
func mustConsume(t *testing.T, js jetstream.JetStream, n int) {
	t.Helper()
	c, err := consume.New(js, consume.Memory(), consume.Config{Name: "honest", Stream: "OUTBOX"})
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var mu sync.Mutex
	seen := map[string]int{}
	err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consume.Event) error {
		mu.Lock()
		defer mu.Unlock()
		if seen[fmt.Sprint(e.Sequence, e.Document)]++; len(seen) == n {
			cancel()
		}
		return nil
	})
	must(t, err)
	if len(seen) != n {
		t.Errorf("%d events consumed, want %d: %v", len(seen), n, seen)
	}
}
