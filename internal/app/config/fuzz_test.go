package config

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/outflowhq/outflow/outbox"
)

// Any file gives a configuration or a usage error; what is printed of a configuration can be read.
func FuzzFile(f *testing.F) {
	f.Add([]byte("stream: A\nreorder: {horizon: 20ms}\nheaders: {A: b}\n"))
	f.Add([]byte("nats:\n  tls:\n    ca: x\n- a\n? b\n: c"))
	f.Add([]byte("a: &x [*x, !!int \"1\"]\n<<: *x\n--- >-\n t\n...\n"))
	f.Add([]byte("columns:\n  id: |\n    x\n  seq_key: 0x1F\n  counter: .inf\n"))
	f.Add([]byte(strings.Repeat("[", 1000)))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := newLoader(nil)
		l.file("outflow.yaml", data)
		c, err := l.load(nil, nil)
		if err != nil {
			if outbox.ClassOf(err) != outbox.Usage {
				t.Fatalf("not a usage error: %v", err)
			}
			return
		}
		again := newLoader(nil)
		again.file("outflow.yaml", c.YAML())
		for _, p := range again.problems {
			t.Errorf("%v\n%s", p, c.YAML())
		}
	})
}

// Any value of any setting, as a flag or in the environment, gives a configuration or a usage error that
// shows no secret.
func FuzzValue(f *testing.F) {
	for i := range settings {
		f.Add(uint8(i), settings[i].def, true)
	}
	f.Add(uint8(0), "postgres://u:p@h/db?sslmode=verify-full", false)
	f.Add(uint8(0), "host=h password='a b' user=u", false)
	f.Add(uint8(2), "nats://a:b@h:4222,tls://t@h", true)
	f.Fuzz(func(t *testing.T, which uint8, text string, flag bool) {
		s := &settings[int(which)%len(settings)]
		args, environ := Args{}, []string(nil)
		if flag {
			args[s.path] = text
		} else {
			environ = []string{s.env() + "=" + text}
		}
		c, err := newLoader(environ).load(args, nil)
		if err != nil {
			if outbox.ClassOf(err) != outbox.Usage {
				t.Fatalf("not a usage error: %v", err)
			}
			return
		}
		again := newLoader(nil)
		again.file("outflow.yaml", c.YAML())
		for _, p := range again.problems {
			t.Errorf("%v\n%s", p, c.YAML())
		}
	})
}

// What is shown of a connection string holds no password, whatever the rest of it is.
func FuzzRedact(f *testing.F) {
	f.Add("app", "s3cret!", "db:5432/app", uint8(0))
	f.Add("app", "p@ss:w/rd?", "h/db?sslmode=require", uint8(0))
	f.Add("", "tok en", "h", uint8(1))
	f.Add("app", `a'b\`, "dbname=x", uint8(2))
	f.Fuzz(func(t *testing.T, user, password, rest string, form uint8) {
		secret := "Q" + strings.Map(func(r rune) rune {
			if r == ' ' || r == '\'' || r == '\\' || r == '*' || r == utf8.RuneError {
				return 'x'
			}
			return r
		}, password) + "Q"
		if strings.Contains(user+rest, "Q") || strings.ContainsAny(user, ":/?#@,=") ||
			strings.ContainsAny(rest, "@,") {
			return
		}
		var shown string
		switch form % 4 {
		case 0:
			shown = postgresKey.show("postgres://" + user + ":" + secret + "@" + rest)
		case 1:
			if strings.ContainsAny(secret, ",") {
				return
			}
			shown = natsKey.show("nats://" + secret + "@" + rest)
		case 2:
			shown = postgresKey.show("user=u password='" + secret + "' " + rest)
		case 3:
			if strings.ContainsFunc(secret, unicode.IsSpace) {
				return
			}
			shown = postgresKey.show("user=u password=" + secret + " " + rest)
		}
		if strings.Contains(shown, secret) {
			t.Fatalf("%q shows %q", shown, secret)
		}
	})
}
