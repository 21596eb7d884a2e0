package config

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

func TestTheDocumentIsMadeFromTheSettings(t *testing.T) {
	const name = "../../../docs/configuration.md"
	want := Document()
	if *update {
		if err := os.WriteFile(name, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != string(want) {
		t.Errorf("%s is not what the settings say: run go generate ./internal/app/config", name)
	}
	if strings.Contains(string(have), "\n## \n") {
		t.Errorf("%s has a section without a title", name)
	}
	for _, p := range paths {
		if !strings.Contains(string(have), "| `"+p+"` |") {
			t.Errorf("%s is not documented", p)
		}
	}
}

// The table itself: every row is complete, and its default is what it says that it accepts.
func TestEverySettingIsComplete(t *testing.T) {
	t.Parallel()
	envs := map[string]string{}
	for i := range settings {
		s := &settings[i]
		if s.want == "" || s.doc == "" || !strings.HasSuffix(s.doc, ".") {
			t.Errorf("%s: want %q, doc %q", s.path, s.want, s.doc)
		}
		if other := envs[s.env()]; other != "" {
			t.Errorf("%s and %s have the same name in the environment", s.path, other)
		}
		if kubernetesName().MatchString(s.env()) {
			t.Errorf("%s: Kubernetes may set %s", s.path, s.env())
		}
		envs[s.env()] = s.path
		var c Config
		v := s.bind(&c)
		if s.def == "" {
			continue
		}
		if err := v.set(s.def); err != nil {
			t.Errorf("%s: default %q: %v", s.path, s.def, err)
		}
		if got := v.text(); got != s.def {
			t.Errorf("%s: default %q prints as %q", s.path, s.def, got)
		}
		for _, choice := range s.choices {
			if err := v.set(choice); err != nil || v.text() != choice {
				t.Errorf("%s: choice %q: %v, prints as %q", s.path, choice, err, v.text())
			}
		}
	}
}
