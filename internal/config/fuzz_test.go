package config

import (
	"strings"
	"testing"

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
