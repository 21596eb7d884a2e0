package docs

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

// composeService is what matters here of a service of docker-compose.yml.
type composeService struct {
	Image       string
	Build       any
	Command     []string
	Environment map[string]string
	ReadOnly    bool     `yaml:"read_only"`
	CapDrop     []string `yaml:"cap_drop"`
	SecurityOpt []string `yaml:"security_opt"`
	Ports       []string
}

// TestTheComposeFileWorks runs, without Docker, what docker-compose.yml says: its SQL, its NATS configuration
// and command line, and outflow with its settings. Nobody who connects is superuser.
func TestTheComposeFileWorks(t *testing.T) {
	content, err := os.ReadFile(harness.Path("docker-compose.yml"))
	harness.Must(t, err)
	var compose struct{ Services map[string]composeService }
	harness.Must(t, yaml.Unmarshal(content, &compose))
	builds := 0
	for name, s := range compose.Services {
		if s.Build != nil {
			builds++
		}
		if name != "postgres" && (!s.ReadOnly || !slices.Contains(s.CapDrop, "ALL")) ||
			!slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s may do more than it needs: %+v", name, s)
		}
		if s.Image != "outflow:local" &&
			!regexp.MustCompile(`:\d+\.\d+(\.\d+)?-[a-z]+$|@sha256:`).MatchString(s.Image) {
			t.Errorf("%s: image %s is not pinned", name, s.Image)
		}
		for _, port := range s.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s: port %s is open", name, port)
			}
		}
	}
	if builds != 1 {
		t.Errorf("%d services build the image, want one", builds)
	}

	ns := compose.Services["nats"]
	conf, err := os.ReadFile(harness.Path("docs", "samples", "nats-accounts.conf"))
	harness.Must(t, err)
	var variables strings.Builder
	for name, value := range ns.Environment {
		variables.WriteString(name + " = " + value + "\n")
	}
	args := slices.Clone(ns.Command)
	args[slices.Index(args, "/etc/outflow/nats.conf")] = harness.WriteFile(t, "nats.conf", variables.String()+
		string(conf))
	quiet := func() {}
	opts, err := server.ConfigureOptions(flag.NewFlagSet("nats-server", flag.ContinueOnError), args, quiet,
		quiet, quiet)
	server.FlagSnapshot = nil // else these options would hold for any server of this process that reloads
	harness.Must(t, err)
	t.Parallel()

	pg := pgtest.Own(t, 0)
	super := harness.Connect(t, pg.URL("postgres"))
	harness.Exec(t, super, "CREATE DATABASE app")
	sql, err := os.ReadFile(harness.Path("docs", "samples", "compose.sql"))
	harness.Must(t, err)
	for statement := range strings.SplitSeq(string(sql), ";\n") {
		harness.Exec(t, super, statement)
	}

	if opts.Host != "0.0.0.0" || opts.Port != 4222 || opts.StoreDir != "/data" || opts.HTTPPort != 8222 ||
		!opts.JetStream {
		t.Errorf("the server would have %+v", opts)
	}
	broker := natstest.Server(t,
		natsserver.Options{Tune: func(o *server.Options) { o.Accounts, o.Users = opts.Accounts, opts.Users }})

	o := harness.New(t, "", "", "compose")
	use := func(service string) {
		o.Env = slices.DeleteFunc(o.Env, func(v string) bool {
			return regexp.MustCompile(`^OUTFLOW_(POSTGRES|NATS|SLOT|PUBLICATION)`).MatchString(v)
		})
		for name, value := range compose.Services[service].Environment {
			value = strings.Replace(value, "postgres:5432", fmt.Sprintf("127.0.0.1:%d", pg.Port), 1)
			o.Env = append(o.Env, name+"="+strings.Replace(value, "nats://nats:4222", broker.URL(), 1))
		}
	}
	use("init")
	o.Init()
	use("outflow")
	o.Start()
	o.AwaitReady()
	harness.Insert(t, harness.Connect(t, strings.Replace(pg.URL("app"), "postgres@", "app@", 1)), "doc", 1,
		`{}`)
	_, stream := harness.LogIn(t, broker, "outflow-admin", ns.Environment["OUTFLOW_ADMIN_PASSWORD"])
	harness.AwaitMessages(t, stream, o.Stream, 1)
	o.MustStop(t)
	supers := harness.Value[int](t, super, "SELECT count(*) FROM pg_roles WHERE rolsuper AND rolname "+
		"IN ('app', 'outflow')")
	if supers != 0 {
		t.Errorf("%d superusers", supers)
	}
}

// TestArchivesHoldTheLicencesOfAllModules: what is passed on has the licences of everything that is linked
// in; a module without one ends it.
func TestArchivesHoldTheLicencesOfAllModules(t *testing.T) {
	tier.OnlyLong(t, "it builds the release, from nothing")
	t.Parallel()
	script := func(name string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), harness.Path("scripts", name), args...)
		cmd.Env = append(os.Environ(), "VERSION=v0", "GOOS=linux", "GOARCH=amd64")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	dir := t.TempDir()
	if out, err := script("archive", dir); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const name = "outflow-v0-linux-amd64"
	listed, err := exec.CommandContext(t.Context(), "tar", "-tzf",
		filepath.Join(dir, name+".tar.gz")).Output()
	harness.Must(t, err)
	for _, file := range []string{
		"outflow", "licences/outflow/LICENSE", "licences/go/LICENSE",
		"licences/github.com/nats-io/nats.go/LICENSE", "licences/github.com/prometheus/client_golang/NOTICE",
		"licences/github.com/prometheus/client_golang/internal/github.com/golang/gddo/LICENSE",
	} {
		if !strings.Contains(string(listed), name+"/"+file+"\n") {
			t.Errorf("%s is missing in\n%s", file, listed)
		}
	}
	unlicensed := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.org/main\n\ngo 1.26\n\nrequire example.org/part v0.0.0\n\nreplace " +
			"example.org/part => ./part\n",
		"main.go":      "package main\n\nimport _ \"example.org/part\"\n\nfunc main() {}\n",
		"part/go.mod":  "module example.org/part\n\ngo 1.26\n",
		"part/part.go": "package part\n",
	} {
		path := filepath.Join(unlicensed, filepath.FromSlash(name))
		harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		harness.Must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	if out, err := script("licences", t.TempDir(), unlicensed); err == nil ||
		!strings.Contains(out, "example.org/part has no licence") {
		t.Errorf("%v\n%s", err, out)
	}
}
