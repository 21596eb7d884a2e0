package security

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// accounts starts a server with it.
func accounts(t *testing.T) *natsserver.Server {
	t.Helper()
	sample := harness.AccountsConfig(t)
	return natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Accounts, o.Users = sample.Accounts, sample.Users
	}})
}

// loginTo connects as a user of that file.
func loginTo(t *testing.T, s *natsserver.Server, user string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	return harness.LogIn(t, s, user, harness.AccountPassword)
}

// documentedRequests sends what docs/nats.md says in its n-th block: nats --user USER request SUBJECT BODY.
func documentedRequests(t *testing.T, s *natsserver.Server, n int) {
	t.Helper()
	all := regexp.MustCompile(`(?s)nats --user (\S+) request '([^']+)' '([^']+)'`).FindAllStringSubmatch(
		harness.DocumentedBlock(t, "nats.md", "An account of its own", n), -1)
	if len(all) == 0 {
		t.Fatal("no requests there")
	}
	for _, r := range all {
		nc, _ := loginTo(t, s, r[1])
		m, err := nc.Request(r[2], []byte(r[3]), harness.AskTimeout)
		harness.Must(t, err)
		var answer struct{ Error *jetstream.APIError }
		harness.Must(t, json.Unmarshal(m.Data, &answer))
		if answer.Error != nil {
			t.Fatalf("%s: %v", r[2], answer.Error)
		}
	}
}

// contents is all that a stream holds.
func contents(t *testing.T, js jetstream.JetStream, stream string) (all []string) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	harness.Must(t, err)
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		harness.Must(t, err)
		all = append(all, fmt.Sprint(seq, m.Subject, m.Header, string(m.Data)))
	}
	return all
}

// TestAccountsThatReadCannotWrite: with the accounts of docs/nats.md whoever reads can't write. JetStream
// answers to any reply subject, with its own rights; across accounts the reply stays in the account of
// whoever asked.
func TestAccountsThatReadCannotWrite(t *testing.T) {
	t.Parallel()
	broker := accounts(t)
	url := pgtest.Database(t, pgtest.Server(t))
	slot := harness.SlotName("accounts")
	o := harness.New(t, url, broker.URL(), slot, "NATS_USER=outflow-init", "NATS_PASSWORD="+
		harness.AccountPassword, "REORDER_HORIZON=5ms")
	o.Init()
	documentedRequests(t, broker, 0)
	o.Set("NATS_USER=outflow")
	o.Start()
	o.AwaitReady()
	conn := harness.Connect(t, url)
	const events = 5
	for i := range events {
		harness.Insert(t, conn, fmt.Sprint("doc", i%2), i, `{}`)
	}
	_, admin := loginTo(t, broker, "outflow-admin")
	harness.AwaitMessages(t, admin, "OUTBOX", events)

	// Honest consumers: package consumer on the copy, a plain one on the durable.
	reader, readers := loginTo(t, broker, "reader")
	mustConsume(t, readers, events)
	o.Set("NATS_USER=reader")
	for _, args := range []string{"consumer list", "replay --doc doc1",
		"replay --seq 2.. --to stream:AGAIN"} {
		o.MustRun(strings.Fields(args)...)
	}
	search, searching := loginTo(t, broker, "search")
	durable, err := searching.Consumer(t.Context(), "OUTBOX", "search")
	harness.Must(t, err)
	batch, err := durable.Fetch(events, jetstream.FetchMaxWait(harness.Patience))
	harness.Must(t, err)
	var acked uint64
	for m := range batch.Messages() {
		meta, err := m.Metadata()
		harness.Must(t, err)
		acked = meta.Sequence.Stream
		harness.Must(t, m.DoubleAck(t.Context()))
	}
	harness.Must(t, batch.Error())
	if acked != events {
		t.Errorf("search read up to %d", acked)
	}

	if code := o.Stop(); code != 0 { // the record stands still
		t.Fatalf("exit code %d", code)
	}
	stream := contents(t, admin, "OUTBOX")
	source, err := admin.Stream(t.Context(), "OUTBOX")
	harness.Must(t, err)
	first, err := source.GetMsg(t.Context(), 1)
	harness.Must(t, err)
	ingress := strings.TrimSuffix(source.CachedInfo().Config.Subjects[0], ">") + "outbox.doc1"
	targets := []string{ingress, "$KV.outflow-OUTBOX." + slot, "$JS.API.CONSUMER.DELETE.OUTBOX.search"}

	// A forged event, in a stream of the attacker's own account.
	ask := func(nc *nats.Conn, subject, body string) {
		t.Helper()
		if _, err := nc.Request(subject, []byte(body), harness.AskTimeout); err != nil {
			t.Errorf("%s: %v", subject, err)
		}
	}
	ask(reader, "$JS.API.STREAM.CREATE.TENANT",
		`{"name": "TENANT", "subjects": ["tenant.>"], "storage": "memory", "retention": "limits"}`)
	ask(reader, "$JS.API.CONSUMER.CREATE.TENANT.c",
		`{"stream_name": "TENANT", "config": {"name": "c", "durable_name": "c", "ack_policy": "none", "deliver_policy": "all"}}`)
	forged := nats.NewMsg("tenant.x")
	forged.Header.Set("Outflow", first.Header.Get("Outflow"))
	forged.Data = []byte(`{"forged": true}`)
	for range targets {
		if _, err := reader.RequestMsg(forged, harness.AskTimeout); err != nil {
			t.Fatal(err)
		}
	}
	for i := range events { // there is something to be delivered
		harness.Insert(t, conn, "late", i, `{}`)
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
			{reader, "OUTFLOW.CONSUMER.CREATE.OUTBOX.evil",
				`{"stream_name": "OUTBOX", "config": {"name": "evil", "deliver_subject": "` + target +
					`", "deliver_policy": "all"}}`},
			{reader, "$JS.FC.OUTBOX.readers.x", ""},
			{search, target, `{}`},
			{search, "$JS.API.STREAM.INFO.OUTBOX", ""},
			{search, "OUTFLOW.CONSUMER.INFO.OUTBOX.search", ""},
			{search, "OUTFLOW.CONSUMER.MSG.NEXT.OUTBOX.search", `{"batch": 1, "no_wait": true}`},
			// a bad request is answered too
			{search, "OUTFLOW.CONSUMER.MSG.NEXT.OUTBOX.search",
				`{"batch": 1, "no_wait": true, "expires": 1}`},
			{search, "$JS.ACK.OUTBOX.search.1.1.1.1.0", "+NXT"},
			{search, "$JS.ACK.OUTBOX.search.1.1.1.1.0", "+ACK"},
		} {
			m := &nats.Msg{Subject: attack.subject, Reply: target, Data: []byte(attack.body),
				Header: nats.Header{"Nats-Trace-Dest": {target}}}
			harness.Must(t, attack.nc.PublishMsg(m))
			m.Header = nil
			harness.Must(t, attack.nc.PublishMsg(m))
		}
		// A push consumer of the attacker's own.
		ask(reader, "$JS.API.CONSUMER.CREATE.TENANT.push",
			`{"stream_name": "TENANT", "config": {"name": "push", "deliver_subject": "`+target+
				`", "ack_policy": "none", "deliver_policy": "all"}}`)
		ask(reader, "$JS.API.CONSUMER.DELETE.TENANT.push", "")
	}
	harness.Must(t, reader.FlushTimeout(harness.Patience))
	harness.Must(t, search.FlushTimeout(harness.Patience))

	// Outflow finds stream and record as it left them, and goes on.
	o.Set("NATS_USER=outflow")
	o.Start()
	harness.AwaitMessages(t, admin, "OUTBOX", 2*events)
	mustConsume(t, readers, 2*events)
	o.MustStop(t)
	all := contents(t, admin, "OUTBOX")
	if len(all) != len(stream)+events || !slices.Equal(all[:len(stream)], stream) ||
		strings.Contains(strings.Join(all, ""), "forged") {
		t.Errorf("the stream is\n%s\nand was\n%s", strings.Join(all, "\n"), strings.Join(stream, "\n"))
	}

	// The same request from a user of Outflow's account does write: the attack is one.
	inside, _ := loginTo(t, broker, "outflow-admin")
	harness.Must(t, inside.PublishRequest("$JS.API.STREAM.INFO.OUTBOX", ingress, nil))
	harness.AwaitMessages(t, admin, "OUTBOX", 2*events+1)
}

// mustConsume reads a stream with package consumer from its beginning until it has had n events.
func mustConsume(t *testing.T, js jetstream.JetStream, n int) {
	t.Helper()
	c, err := consume.New(js, consume.Memory(), consume.Config{Name: "honest", Stream: "OUTBOX"})
	harness.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
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
	harness.Must(t, err)
	if len(seen) != n {
		t.Errorf("%d events consumed, want %d: %v", len(seen), n, seen)
	}
}
