package sink

import (
	"encoding/json"
	"errors"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

func TestAStreamIsMadeOrChecked(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := connect(t, config(s.URL()))
	if st := state(t, c); st.Exists || c.Ingress() != "" {
		t.Fatalf("state %+v of a stream that is not there", st)
	}
	o := stream.Options{MaxAge: time.Hour, MaxBytes: 1 << 20, Storage: "memory"}
	must.Succeed(t, c.EnsureStream(t.Context(), o))
	first := c.Ingress()
	if !regexp.MustCompile(`^_outflow\.[0-9a-f]{16}\.$`).MatchString(first) {
		t.Errorf("ingress %q", first)
	}
	if k := c.config; k.MaxAge != time.Hour || k.MaxBytes != 1<<20 || k.Storage != "memory" ||
		k.Discard != "old" || !k.AllowDirect || k.Replicas != 1 {
		t.Errorf("made as %+v", k)
	}
	if err := c.CheckMaxAge(30 * time.Minute); err != nil {
		t.Error(err)
	}
	wantFault(t, c.CheckMaxAge(31*time.Minute), outbox.Fatal, "stream_max_age")
	mustPublish(t, c.Publisher(0), edits(t, 3))

	again := connect(t, config(s.URL()))
	must.Succeed(t, again.EnsureStream(t.Context(), stream.Options{}))
	if again.Ingress() != first || state(t, again).LastSeq != 3 {
		t.Errorf("made anew: %s", again.Ingress())
	}
	other := config(s.URL())
	other.Stream = "OTHER"
	if c := door(t, other); c.Ingress() == first {
		t.Error("two streams have the same ingress")
	}
}

func TestStreamThatCantBeMade(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := connect(t, config(s.URL()))
	// of one server
	wantFault(t, c.EnsureStream(t.Context(), stream.Options{Replicas: 3}), outbox.Fatal, "stream_create")
}

func TestStreamsThatAreRefused(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	admin := connect(t, config(s.URL()))
	create := func(t *testing.T, cfg map[string]any) {
		t.Helper()
		if err := admin.api.Ask(t.Context(), "STREAM.CREATE."+cfg["name"].(string), cfg,
			&jsapi.Answer{}); err != nil {
			t.Fatal(err)
		}
	}
	create(t, map[string]any{"name": "SOURCE", "subjects": []string{"source"}, "retention": "limits",
		"storage": "memory"})
	const remove = "remove"
	for _, test := range []struct {
		code   string // "": taken
		change map[string]any
	}{
		{"", nil},
		{"", map[string]any{"max_msg_size": 1 << 20, "metadata": map[string]string{"a": "b"},
			"max_msgs_per_subject": 1, "deny_delete": true}},
		{"stream_subjects", map[string]any{"subjects": []string{"refused.>"}}},
		{"stream_subjects", map[string]any{"subjects": []string{"_outflow.three.x.>"}}},
		{"stream_subjects", map[string]any{"subjects": []string{"_outflow.four.*"}}},
		{"stream_subjects", map[string]any{"subjects": []string{"_outflow.five.>", "_outflow.six.>"}}},
		{"stream_transform", map[string]any{"subject_transform": remove}},
		{"stream_transform", map[string]any{"subject_transform": map[string]string{"src": "_outflow.*.>",
			"dest": "orders.>"}}},
		{"stream_retention", map[string]any{"retention": "workqueue"}},
		{"stream_retention", map[string]any{"retention": "interest"}},
		{"stream_persist_mode", map[string]any{"persist_mode": "async", "storage": "file"}},
		{"stream_no_ack", map[string]any{"no_ack": true}},
		{"stream_counter", map[string]any{"allow_msg_counter": true}},
		{"stream_delete_marker", map[string]any{"allow_msg_ttl": true, "subject_delete_marker_ttl": time.Hour,
			"allow_rollup_hdrs": true}},
		{"stream_mirror", map[string]any{"mirror": map[string]string{"name": "SOURCE"}, "subjects": remove,
			"subject_transform": remove}},
		{"stream_sources", map[string]any{"sources": []map[string]string{{"name": "SOURCE"}}}},
		{"stream_max_msg_size", map[string]any{"max_msg_size": 1<<20 - 1}},
	} {
		name := "S" + string(rune('A'+len(test.code))) + strings.ToUpper(test.code)
		cfg := map[string]any{
			"name": name, "subjects": []string{"_outflow.ab" + name + ".>"}, "retention": "limits",
			"storage":           "memory",
			"subject_transform": map[string]string{"src": "_outflow.*.>", "dest": ">"},
		}
		maps.Copy(cfg, test.change)
		maps.DeleteFunc(cfg, func(_ string, v any) bool { return v == remove })
		create(t, cfg)
		own := config(s.URL())
		own.Stream = name
		err := connect(t, own).CheckStream(t.Context())
		if test.code == "" && err != nil {
			t.Errorf("%v: %v", test.change, err)
		}
		if test.code != "" {
			if f := wantFault(t, err, outbox.Fatal, test.code); !strings.Contains(f.Message, name) ||
				f.Hint == "" {
				t.Errorf("%v", f)
			}
		}
		must.Succeed(t, admin.api.Ask(t.Context(), "STREAM.DELETE."+name, nil, &jsapi.Answer{}))
	}
}

func TestServerTakesLessThanMaxPayload(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{MaxPayload: 100_000})
	c := connect(t, config(s.URL()))
	f := wantFault(t, c.EnsureStream(t.Context(), stream.Options{}), outbox.Fatal, "server_max_payload")
	if !strings.Contains(f.Error(), "100000") {
		t.Error(f)
	}
	cfg := config(s.URL())
	cfg.MaxPayload = 100_000
	door(t, cfg)
}

// A message that counts as much as it may is stored by a stream and a server with that very limit.
func TestLargestMessageIsTaken(t *testing.T) {
	t.Parallel()
	const limit = 10_000
	s := natstest.Server(t, natsserver.Options{MaxPayload: limit})
	cfg := config(s.URL())
	cfg.MaxPayload, cfg.MsgID = limit, true
	c := door(t, cfg)
	g := event(0, "doc", make([]byte, limit-overhead-len(eventHeader)))
	mustPublish(t, c.Publisher(0), []given{g})
}

// An erasure that notes its messages, or an operator, may have read the configuration before.
func TestAnIngressThatSomebodyPutBackIsNotNew(t *testing.T) {
	t.Parallel()
	c := answering(t, map[string][]string{"STREAM.INFO": {`{"config":{"subjects":["_outflow.a.>"]}}`},
		"STREAM.UPDATE": {`{}`}})
	wantFault(t, c.RenewIngress(t.Context()), outbox.Transient, "stream_moved")
}

// A new ingress changes nothing but the subjects, and who knows the old one publishes to nobody.
func TestANewIngressShutsTheOldPublisherOut(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	mustPublish(t, c.Publisher(0), edits(t, 3))
	ask := func() (config map[string]json.RawMessage) {
		var info struct {
			jsapi.Answer
			Config map[string]json.RawMessage `json:"config"`
		}
		must.Succeed(t, c.api.Ask(t.Context(), "STREAM.INFO.OUTBOX", nil, &info))
		return info.Config
	}
	before, old := ask(), c.Ingress()
	must.Succeed(t, c.RenewIngress(t.Context()))
	after := ask()
	if string(before["subjects"]) == string(after["subjects"]) {
		t.Error("the ingress is the old one")
	}
	for name := range after {
		if name != "subjects" && string(before[name]) != string(after[name]) || len(after) != len(before) {
			t.Errorf("%s was %s, is %s", name, before[name], after[name])
		}
	}
	if _, err := c.NATS().Request(old+"outbox.sleeper", nil, time.Second); !errors.Is(err,
		nats.ErrNoResponders) {
		t.Errorf("through the old ingress: %v", err)
	}
	next := connect(t, config(s.URL()))
	must.Succeed(t, next.CheckStream(t.Context()))
	mustPublish(t, next.Publisher(3), edits(t, 3))
}
