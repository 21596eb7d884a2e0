package config

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/outbox"
)

// Impossible values: each one's message names the setting, its value, where it came from and what to give.
func TestAnImpossibleValueIsNamedWithItsWayOut(t *testing.T) {
	t.Parallel()
	for path, values := range map[string][]string{
		"postgres.url":    {"mysql://db", "db.example.com", "postgres://\x00"},
		"nats.url":        {"http://n:4222", "nats://", "nats://a,nats://", "nats://a:b:c"},
		"table":           {"", ".outbox", "public.", "a.b.c", strings.Repeat("t", 64), "a\nb"},
		"shard":           {"1", "4/4", "0/65", "0/0", "-1/2", "01/2", "a/b", "1/2/3"},
		"columns.doc_id":  {"", strings.Repeat("c", 64)},
		"columns.payload": {""},
		"columns.seq_key": {"a\tb"},
		"slot":            {"", "Outflow", "out-flow", strings.Repeat("s", 64)},
		"publication":     {"", strings.Repeat("p", 64)},
		"stream":          {"", "A.B", "A B", "ÄB", strings.Repeat("S", 245)},
		"subject":         {""},
		"reorder.horizon": {"", "20", "-1ms", "24h1us", "1500ns", "soon"},
		"reorder.sort":    {"", "key", "SEQ_KEY", "gap"},
		"reorder.mode":    {"", "gaps", "commit"},
		"reorder.bound":   {"0s", "-1s", "24h1us", "1500ns", "10"},
		"reorder.cold":    {"-1ms", "1500ns", "11s"},
		"reorder.memory":  {"0", "1048577"},

		"reorder.first_counter": {"-1", "2"},
		"reorder.gap_scope":     {"", "actor"},

		"reorder.max_events":   {"", "0", "-1", "1e3", "4194305", "99999999999999999999"},
		"reorder.max_bytes":    {"", "0", "64XiB", "1.5GiB", "-1", "MiB", "9999999TiB", "1 MiB"},
		"reorder.tick":         {"", "on"},
		"reorder.spill_dir":    {""},
		"sink.durable_after":   {"-1s", "150"},
		"sink.on_poison":       {"skip"},
		"sink.max_payload":     {"0", "1023", "65MiB"},
		"sink.msg_id":          {"yes", ""},
		"init.replicas":        {"0", "6"},
		"init.storage":         {"disk"},
		"init.max_age":         {"-1s", "1ms", "299s"},
		"init.max_bytes":       {"-1"},
		"init.partition.by":    {"doc_id", "a\x01"},
		"init.partition.every": {"0s", "1500ms"},
		"retain.other_slots":   {"a,,b", "A", "a b"},
		"retain.table.every":   {"500ms", "-1s", "24"},
		"retain.table.ahead":   {"1", "65"},
		"retain.table.rows":    {"-1"},
		"retain.stream.size":   {"-1", "many"},

		"retain.stream.ignore_consumers": {"a,,b", "a b", "a.b", ">"},
		"listen_hosts":                   {"outflow:7422", "http://outflow", "a,,b", "*", "a b"},
		"maintain.listen":                {"7423", "localhost"},
		"listen": {"7422", "localhost", "localhost:http", "localhost:65536",
			"http://localhost:80"},
		"log.format":   {"xml"},
		"log.level":    {"INFO", "trace"},
		"stop_timeout": {"-1s", "10"},
		"headers": {"X", "=a", "X=", "Nats-Msg-Id=id", "nats-x=id", "outflow=id",
			"OutflowX=id", "A b=id", "X=a,x=b", "Ü=a"},
		"sink.dead_letter_subject": {"a\x7fb"},
	} {
		for _, value := range values {
			_, err := Load(Args{path: value}, nil)
			if outbox.ClassOf(err) != outbox.Usage {
				t.Errorf("%s = %q: %v, want a usage error", path, value, err)
				continue
			}
			for _, part := range []string{path + " = ", "(flag --" + path + ")", "Give "} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%s = %q: %v, want it to say %q", path, value, err, part)
				}
			}
		}
	}
}

func TestPossibleValuesAreAccepted(t *testing.T) {
	t.Parallel()
	for path, values := range map[string][]string{
		"postgres.url": {"", "postgres://u:p@h/db", "postgresql:///db", "host=/run dbname=x",
			"dbname=postgres://x"},
		"nats.url":                       {"localhost", "tls://a:4222, nats://b:4222"},
		"table":                          {"outbox", "app.Outbox"},
		"shard":                          {"", "0/1", "63/64"},
		"slot":                           {"o", strings.Repeat("s", 63)},
		"stream":                         {"a-B_9", strings.Repeat("S", 244)},
		"reorder.horizon":                {"0", "0s", "24h", "1us", "0.5ms"},
		"reorder.mode":                   {"horizon", "gap"},
		"reorder.bound":                  {"20ms", "24h"},
		"reorder.cold":                   {"0s", "10s"},
		"reorder.memory":                 {"1", "1048576"},
		"reorder.gap_scope":              {"sequence", "document"},
		"columns.span":                   {"", "length"},
		"reorder.max_bytes":              {"1", "1KiB", "1kb", "1GB", "1GiB", "5B"},
		"sink.durable_after":             {"0s", "1h30m"},
		"sink.max_payload":               {"1KiB", "64MiB"},
		"init.max_age":                   {"0s", "300s"},
		"retain.other_slots":             {"", "debezium", "debezium, other_1"},
		"retain.stream.ignore_consumers": {"", "texts", "texts, Search_1-x"},
		"listen_hosts":                   {"", "outflow", "outflow.svc.cluster.local, status.example.org"},
		"maintain.listen":                {"", ":7423"},
		"listen":                         {"", ":7422", "[::1]:0", "0.0.0.0:65535"},
		"headers":                        {"", "traceparent=trace", "X=a, Y=b"},
	} {
		for _, value := range values {
			if _, err := Load(Args{path: value}, nil); err != nil {
				t.Errorf("%s = %q: %v", path, value, err)
			}
		}
	}
}

func TestSizesAreReadWithTheirUnits(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "64MiB": 64 << 20, "1mib": 1 << 20, "1GB": 1e9, "1KB": 1000, "1kib": 1024, "7B": 7,
		"2TiB": 2 << 40,
	} {
		if got, ok := parseSize(text); !ok || got != want {
			t.Errorf("%q: %d %v, want %d", text, got, ok, want)
		}
	}
	for n, want := range map[int64]string{0: "0", 1: "1", 1 << 20: "1MiB", 3 << 30: "3GiB", 1e9: "1GB",
		1500: "1500", 1536 << 10: "1536KiB"} {
		if got := formatSize(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestMoreThanOneWayToLogInIsRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"{user: u, password: p}":                   "",
		"{user: u, password_file: f}":              "",
		"{token_file: f}":                          "",
		"{context: prod}":                          "",
		"{tls: {ca: ca.pem}}":                      "",
		"{tls: {cert: c, key: k}, creds: x}":       "",
		"{context: prod, creds: x.creds}":          "more than one way",
		"{nkey: a, user: u}":                       "more than one way",
		"{token: t, token_file: f}":                "Leave one of them out",
		"{user: u, password: p, token: t}":         "more than one way",
		"{url: 'nats://u:p@n', creds: x}":          "more than one way",
		"{user: u, password: p, password_file: f}": "Leave one of them out",
		"{password: p}":                            "Set nats.user",
		"{tls: {cert: c}}":                         "Set both",
		"{tls: {key: k}}":                          "Set both",
		"{context: prod, url: 'nats://n'}":         "names servers as well",
		`{url: ""}`:                                "no server",
	} {
		_, err := loadText(t, "nats: "+text)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestOutflowsOwnSlotIsNoOther(t *testing.T) {
	t.Parallel()
	for text, refused := range map[string]bool{
		"retain: {other_slots: outflow}":                     true,
		"slot: mine\nretain: {other_slots: 'debezium,mine'}": true,
		"slot: mine\nretain: {other_slots: outflow}":         false,
	} {
		_, err := loadText(t, text)
		if refused != (err != nil && strings.Contains(err.Error(), "one of them is Outflow's own")) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// What is wrong with the form of a file: the message has the line, the key and the nearest that there is.
func TestAnErrorOfAFileNamesLineAndKey(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ text, want string }{
		{"stream: A\nreorder:\n  horizn: 20ms\n",
			"outflow.yaml:3: reorder.horizn: there is no such key. The nearest is reorder.horizon"},
		{"horizon: 20ms", "outflow.yaml:1: horizon: there is no such key. The nearest is reorder.horizon"},
		{"reoder:\n  horizon: 20ms\n",
			"outflow.yaml:1: reoder: there is no such key. The nearest is reorder"},
		{"reoder: {a: 1, b: 2}", "The nearest is reorder"},
		{"header: {A: b}", "The nearest is headers"},
		{"retain: {stream: {agee: 72h}}", "retain.stream.agee: there is no such key. The nearest is " +
			"retain.stream.age."},
		{"nats:\n  tls:\n    certificate: x\n",
			"outflow.yaml:3: nats.tls.certificate: there is no such key. The nearest is nats.tls."},
		{"reorder.horizon: 20ms", "outflow.yaml:1: reorder.horizon is written in one word. Nest it: " +
			"reorder: {horizon: ...}"},
		{"nats: {tls.ca: x}", "Nest it: nats: {tls: {ca: ...}}"},
		{"stream:\n", "outflow.yaml:1: stream has no value"},
		{"stream: [A]", "outflow.yaml:1: stream is not a single value"},
		{"stream: {A: b}", "outflow.yaml:1: stream is not a single value"},
		{"stream: &a A", "stream is not a single value"},
		{"stream: !!str A", "stream is not a single value"},
		{"<<: {stream: A}", "a key that is not a plain word"},
		{"reorder: 20ms", "outflow.yaml:1: reorder is not a mapping"},
		{"- stream", "the document is not a mapping"},
		{"stream", "the document is not a mapping"},
		{"headers: {A: [x]}", "outflow.yaml:1: headers.A is not a single value"},
		{"headers: {A:}", "headers.A has no value"},
		{"headers: {Nats-X: id}", `headers (file `},
		{"stream: A\nslot: b\nstream: C\n", "outflow.yaml:3: not YAML"},
		{"stream: \"A\n", "not YAML"},
		{"stream: A\n---\nstream: B\n", "a second document"},
		{"\xff", "not UTF-8"},
		{"stream: A.B", `outflow.yaml:1) is not possible. Give 1 to 244 characters`},
		{strings.Repeat("#", maxFile+1), "larger than 64KiB"},
	} {
		_, err := loadText(t, tt.text)
		if outbox.ClassOf(err) != outbox.Usage || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%.60q: %v, want %q", tt.text, err, tt.want)
		}
	}
	_, err := Load(Args{"config": "/nonexistent/outflow.yaml"}, nil)
	if err == nil || !strings.Contains(err.Error(), "--config") ||
		!strings.Contains(err.Error(), "/nonexistent/outflow.yaml") {
		t.Errorf("no file: %v", err)
	}
}

// A file of comments, or of sections without settings, says nothing.
func TestAFileOfCommentsSaysNothing(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "\n", "# nothing\n", "nats:\n", "nats:\n  # url: x\nslot: a\n", "---\n",
		"{}", "nats: {}"} {
		if _, err := loadText(t, text); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestAnUnknownVariableIsToldItsNearest(t *testing.T) {
	t.Parallel()
	for name, near := range map[string]string{
		"OUTFLOW_REORDER_HORIZN": "OUTFLOW_REORDER_HORIZON",
		"OUTFLOW_HORIZON":        "OUTFLOW_REORDER_HORIZON",
		"OUTFLOW_STREEM":         "OUTFLOW_STREAM",
		"OUTFLOW_POSTGRESURL":    "OUTFLOW_POSTGRES_URL",
		"OUTFLOW_":               "",
		"OUTFLOW_PORTS":          "",
		"OUTFLOW_NATS_TLS_CERTS": "OUTFLOW_NATS_TLS_CERT",
		"OUTFLOW_CONFIG_FILE":    "",
		"OUTFLOW_WATCH":          "",
		"OUTFLOW_stream":         "OUTFLOW_STREAM",
		"OUTFLOW_SINK_STREAM":    "OUTFLOW_STREAM",
	} {
		_, err := Load(nil, []string{name + "=x"})
		if outbox.ClassOf(err) != outbox.Usage || !strings.Contains(err.Error(), "environment "+name+":") ||
			!strings.Contains(err.Error(), orAll(near)) {
			t.Errorf("%s: %v, want %q", name, err, near)
		}
	}
	// A Service named outflow makes these in every pod of its namespace.
	if _, err := Load(nil, []string{
		"OUTFLOW_SERVICE_HOST=10.0.0.1", "OUTFLOW_SERVICE_PORT=7422", "OUTFLOW_SERVICE_PORT_METRICS=7422",
		"OUTFLOW_PORT=tcp://10.0.0.1:7422", "OUTFLOW_PORT_7422_TCP=tcp://10.0.0.1:7422",
		"OUTFLOW_PORT_7422_TCP_PROTO=tcp",
		"OUTFLOW_PORT_7422_TCP_PORT=7422", "OUTFLOW_PORT_7422_TCP_ADDR=10.0.0.1",
		"OUTFLOW_METRICS_SERVICE_HOST=10.0.0.2",
		"OUTFLOW_METRICS_PORT=tcp://10.0.0.2:7422", "OUTFLOWER=1", "outflow_x=1",
		"OUTFLOW_PG_BIN=/usr/bin", "OUTFLOW_TEST_PG=all",
	}); err != nil {
		t.Error(err)
	}
}

// All problems of all sources come at once.
func TestAllProblemsComeAtOnce(t *testing.T) {
	t.Parallel()
	_, err := Load(Args{"config": write(t, "streem: A\nslot: B-C\n"), "init.replicas": "7"},
		[]string{"OUTFLOW_REORDER_SORT=up", "OUTFLOW_FOO=1"})
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"5 problems", "streem", `slot = "B-C" (file `, `init.replicas = "7"`,
		`reorder.sort = "up" (environment OUTFLOW_REORDER_SORT)`, "OUTFLOW_FOO"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v\nwant it to say %s", err, part)
		}
	}
}
