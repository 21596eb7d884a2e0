package sink

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func TestTemplates(t *testing.T) {
	t.Parallel()
	e := relay.Event{Doc: "doc 1", Actor: "", ID: "7", Extra: []string{"orders.eu west..>", ""}}
	for _, test := range []struct{ template, want, columns string }{
		{"outbox", "outbox", ""},
		{"outbox.{doc_id}", "outbox.doc=201", "doc_id"},
		{"a/b.v1-{doc_id}_x.{actor_id}", "a/b.v1-doc=201_x.=", "doc_id actor_id"},
		{"a.{type:subject}.{doc_id}", "a.orders.eu=20west.=.=3E.doc=201", "type doc_id"},
		{"a.{trace:subject}", "a.=", "trace"},
		{"a.p{partition(doc_id, 10)}.{doc_id}", "a.p" + strconv.Itoa(int(partition("doc 1", 10))) + ".doc=201", "doc_id"},
		{"a.{partition(actor_id,1)}", "a.0", "actor_id"},
	} {
		tpl, err := ParseTemplate(test.template)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := strings.Join(tpl.Columns(), " "); got != test.columns {
			t.Errorf("%s has columns %q", test.template, got)
		}
		if err := tpl.bind(testResolve); err != nil {
			t.Fatal(err)
		}
		if got := string(tpl.append(nil, &e)); got != test.want || !tpl.Produces(got) {
			t.Errorf("%s makes %q, want %q (produces: %v)", test.template, got, test.want, tpl.Produces(got))
		}
	}
}

func TestTemplatesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", ".", "a.", ".a", "a..b", "a b.c", "a.*", "a.>", "a.b>", "ä", "a.\x00",
		"{doc_id}", "x{doc_id}.a", "_outflow.a", "_INBOX", "$JS.API", "$x",
		"a.{}", "a.{ doc_id}", "a.{doc_id", "a.doc_id}", "a.}{", "a.{{doc_id}}", "a.{doc_id}{id}", "a.{doc_id}-{id}", "a.x.y{id}/",
		"a.{x:subject}.{y:subject}", "a.p{x:subject}", "a.{:subject}",
		"a.{partition(x)}", "a.{partition(x, 0)}", "a.{partition(x, -1)}", "a.{partition(x, 2}", "a.{partition(, 2)}", "a.{partition(x, 4294967296)}",
	} {
		if tpl, err := ParseTemplate(text); err == nil {
			t.Errorf("%q is taken: %+v", text, tpl.parts)
		} else {
			wantFault(t, err, outbox.Usage, "subject")
		}
	}
}

func TestProduces(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		template, subject string
		want              bool
	}{
		{"outbox.{doc_id}", "OUTBOX.dead_letter", false},
		{"outbox.{doc_id}", "outbox.dead_letter", true},
		{"outbox.{doc_id}", "outbox.dead.letter", false},
		{"outbox.{doc_id}", "outbox", false},
		{"outbox.v1-{doc_id}", "outbox.v2-x", false},
		{"outbox.v1-{doc_id}", "outbox.v1-", false},
		{"a.{t:subject}.z", "a.z", false},
		{"a.{t:subject}.z", "a.b.z", true},
		{"a.{t:subject}.z", "a.b.c.z", true},
		{"a.{t:subject}.z", "a.b.c.y", false},
		{"a.{partition(d, 4)}", "a.3", true},
		{"a.{partition(d, 4)}", "a.4", false},
	} {
		tpl, err := ParseTemplate(test.template)
		if err != nil {
			t.Fatal(err)
		}
		if got := tpl.Produces(test.subject); got != test.want {
			t.Errorf("%s produces %s: %v", test.template, test.subject, got)
		}
	}
}

// The server's own mapping decides what the partition of a value is.
func TestPartitionIsTheServers(t *testing.T) {
	t.Parallel()
	const n = 7
	s := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		account := server.NewAccount("A")
		if err := account.AddMapping("in.*", fmt.Sprintf("out.{{partition(%d,1)}}.{{wildcard(1)}}", n)); err != nil {
			t.Error(err)
		}
		o.Accounts = []*server.Account{account}
		o.Users = []*server.User{{Username: "u", Password: "p", Account: account}}
		o.NoAuthUser = "u"
	}})
	nc, err := nats.Connect(s.URL(), nats.NoReconnect(), nats.Timeout(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	sub, err := nc.SubscribeSync("out.>")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint32]bool{}
	for i := range 50 {
		v := fmt.Sprintf("doc-%d", i*i)
		if err := nc.Publish("in."+v, nil); err != nil {
			t.Fatal(err)
		}
		m, err := sub.NextMsg(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("out.%d.%s", partition(v, n), v); m.Subject != want {
			t.Errorf("the server maps to %s, we to %s", m.Subject, want)
		}
		seen[partition(v, n)] = true
	}
	if len(seen) != n {
		t.Errorf("only %d partitions of %d", len(seen), n)
	}
}

// What is parsed makes subjects that hold no wildcard, no space and no empty token, begin with the literal, and are known.
func FuzzTemplate(f *testing.F) {
	for _, s := range []string{"outbox.{doc_id}", "a.{b:subject}.c", "a.x{partition(d, 5)}y", "a.{b}.{b}", "a.{", "é"} {
		f.Add(s, "doc. 1*>", uint8(1))
	}
	f.Fuzz(func(t *testing.T, text, value string, null uint8) {
		tpl, err := ParseTemplate(text)
		if err != nil {
			return
		}
		if tpl.String() != text {
			t.Fatalf("%q became %q", text, tpl)
		}
		if err := tpl.bind(func(string) (Field, bool) { return 0, true }); err != nil {
			t.Fatal(err)
		}
		e := relay.Event{Extra: []string{value}}
		if null == 0 {
			e.Extra[0] = ""
			e.SetExtraNull(0)
		}
		subject := string(tpl.append(nil, &e))
		tokens := strings.Split(subject, ".")
		if slices.Contains(tokens, "") && len(subject) <= maxSubject || strings.ContainsAny(subject, "*> \r\n\t\x00") {
			t.Fatalf("%q makes of %q the subject %q", text, value, subject)
		}
		if first, _, _ := strings.Cut(text, "."); tokens[0] != first {
			t.Fatalf("%q makes %q", text, subject)
		}
		if len(subject) <= maxSubject && !tpl.Produces(subject) {
			t.Fatalf("%q made %q but says it can't", text, subject)
		}
	})
}
