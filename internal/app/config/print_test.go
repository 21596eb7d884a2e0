package config

import (
	"reflect"
	"strings"
	"testing"
)

const password = "s3cr3t"

func TestAddressesAreShownWithoutPasswords(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                         "",
		"postgres://u@h/db":        "postgres://u@h/db",
		"postgres://h:5432/db":     "postgres://h:5432/db",
		"postgres://u:s3cr3t@h/db": "postgres://u:***@h/db",
		"postgres://u:s3cr3t@x:s3cr3t/s3cr3t#s3cr3t?s3cr3t@h/db":  "postgres://u:***@h/db",
		"postgres://u:s3cr3t%@h/db":                               "postgres://u:***@h/db",
		"postgres://h/db?password=s3cr3t&sslmode=off":             "postgres://h/db?password=***&sslmode=off",
		"postgres://h/db?user=a&sslpassword=s3cr3t@s3cr3t:s3cr3t": "postgres://h/db?user=a&sslpassword=***",
		"postgres://u:s3cr3t?password=s3cr3t@h/db":                "postgres://u:***@h/db",
		"postgres://u:s3cr3t@h/db?options=a@b":                    "postgres://u:***@b",
		"host=h password=s3cr3t dbname=d":                         "host=h password=*** dbname=d",
		`password = 's3cr3t \' s3cr3t' host=h`:                    "password = *** host=h",
		`host=h sslpassword=s3cr3t\ s3cr3t user=u`:                "host=h sslpassword=*** user=u",
		"PASSWORD='s3cr3t":                                        "PASSWORD=***",
		"password=s3cr3t://s3cr3t@s3cr3t":                         "password=***",
		"u:s3cr3t@h/db":                                           "***",
		"postgres://u@h/db?pasword=s3cr3t&x=y":                    "postgres://u@h/db?pasword=***&x=***",
		"postgres://u@h/db?options=-c%20x.y%3Ds3cr3t":             "postgres://u@h/db?options=***",
		"postgres://u@h/db?s3cr3t":                                "postgres://u@h/db?***",
		"postgres://h/db?x=s3cr3t:s3cr3t@y":                       "postgres://***",
		"host=h pasword=s3cr3t options='-c x=s3cr3t' dbname=d":    "host=h pasword=*** options=*** dbname=d",
		"host=h password=x s3cr3t s3cr3t":                         "host=h password=*** ***",
		"u:s3cr3t=@h/db":                                          "***",
	} {
		if got := postgresKey.show(text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	for text, want := range map[string]string{
		"":                                    "",
		"nats://n:4222":                       "nats://n:4222",
		"nats://u:s3cr3t@n":                   "nats://***@n",
		"nats://s3cr3t@n:4222,tls://s3cr3t@m": "nats://***@n:4222,tls://***@m",
		"s3cr3t@n":                            "***@n",
		"nats://u:s3cr3t,s3cr3t@n":            "***",
		"nats://u:s3cr3t@s3cr3t@n":            "nats://***@n",
	} {
		if got := natsKey.show(text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	if got := secret.show(password); got != "***" {
		t.Error(got)
	}
}

// No way to print a configuration, nor an error about it, shows a secret.
func TestNoPrintedConfigurationShowsASecret(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]Args{
		"fine": {"postgres.url": "postgres://u:s3cr3t@h/db", "postgres.write_url": "host=h password=s3cr3t",
			"nats.url": "nats://n", "nats.user": "u", "nats.password": password,
			"archive.url": "gs://past?prefix=orders/"},
		"token": {"nats.token": password},
		"two logins": {"nats.token": password, "nats.url": "nats://s3cr3t@n", "nats.user": "u",
			"nats.password": password},
		"bucket":     {"archive.url": "s3://past?region=eu&endpoint=http://u:s3cr3t@h"},
		"folder":     {"archive.url": "file://u:s3cr3t@h/past"},
		"container":  {"archive.url": "azblob://u:s3cr3t@past?storage_account=a"},
		"two tokens": {"nats.token": password, "nats.token_file": "f"},
		"no user":    {"nats.password": password},
		"impossible": {"postgres.url": "mysql://u:s3cr3t@h", "nats.url": "http://u:s3cr3t@n",
			"nats.token": password + "\x00"},
		"no YAML": {"config": write(t, "nats: {token: s3cr3t\nstream: [\n")},
		"twice":   {"config": write(t, "nats: {token: s3cr3t, token: s3cr3t}\n")},
		"wrong shape": {"config": write(t, "nats: {token: [s3cr3t], password: {s3cr3t: s3cr3t}, user: "+
			"s3cr3t_u}\npostgres: s3cr3t\n")},
		"unterminated": {"config": write(t, "nats:\n  token: \"s3cr3t\n")},
	} {
		c, err := Load(args, nil)
		text := string(c.YAML())
		if err != nil {
			text += err.Error()
		}
		if strings.Contains(strings.ReplaceAll(text, "s3cr3t_u", ""), password) {
			t.Errorf("%s: %s", name, text)
		}
		if (name == "fine" || name == "token") != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestYAMLOfAbsentColumns(t *testing.T) {
	t.Parallel()
	c, err := Load(Args{"columns.counter": "counter"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"  actor_id: actor_id  # default, if the table has it\n",
		"  counter: counter  # flag --columns.counter\n"} {
		if !strings.Contains(string(c.YAML()), line) {
			t.Errorf("%q is not in\n%s", line, c.YAML())
		}
	}
}

// What is printed can be read again, and means the same.
func TestAPrintedConfigurationIsReadAsTheSame(t *testing.T) {
	t.Parallel()
	c, err := loadText(t, `
postgres: {url: "postgres://u@h/db?application_name=a:%20b"}
nats: {url: "nats://n:4222", creds: "a b.creds", tls: {ca: "on"}}
table: "app.Some Table"
columns: {id: "", counter: "true", actor_id: "1", seq_key: "a'\"\\b: #c"}
headers: {Event-Type: event_type, "null": "~"}
reorder: {horizon: 1500us, sort: commit, max_bytes: 1GB, tick: off}
sink: {msg_id: true, durable_after: 90m}
listen: ""
log: {level: debug}
`, "OUTFLOW_STREAM=ENV")
	if err != nil {
		t.Fatal(err)
	}
	text := string(c.YAML())
	for _, line := range []string{
		"postgres:\n  url: \"postgres://u@h/db?application_name=a:%20b\"  # file ",
		"  write_url: \"postgres://u@h/db?application_name=a:%20b\"  # default: postgres.url\n",
		"  tls:\n    ca: \"on\"  # file ",
		"table: \"app.Some Table\"  # file ",
		"  id: \"\"  # file ",
		"  payload: payload  # default\n",
		"  span: \"\"  # default\n",
		"  first_counter: 1  # default\n",
		"headers:  # file ",
		"  Event-Type: event_type\n",
		"  horizon: 1500us  # file ",
		"  max_bytes: 1GB  # file ",
		"  tick: \"off\"  # file ",
		"  max_payload: 1MiB  # default\n",
		"stream: ENV  # environment OUTFLOW_STREAM\n",
		"  durable_after: 90m  # file ",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("%q is not in\n%s", line, text)
		}
	}
	again, err := loadText(t, text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, col := range []*Column{&again.Columns.Doc, &again.Columns.Payload, &again.Columns.Span} {
		col.Explicit = false // the print names them
	}
	again.Replication.Explicit = false
	c.from, again.from, c.Repeat, again.Repeat = nil, nil, nil, nil
	if !reflect.DeepEqual(c, again) {
		t.Errorf("%+v\nread again:\n%+v", c, again)
	}
}
