package rules

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/tier"
)

const module = "github.com/outflowhq/outflow"

// The stages know the vocabulary and outside libraries, never each other: what moves between them moves
// through pipeline.
var stages = []string{"decoder", "replication", "reorder", "sink", "checkpoint"}

// What the stages share: no behaviour of a stage.
var shared = []string{
	module + "/internal/crash", module + "/internal/lazyregexp",
	module + "/outbox", module + "/internal/relay", module + "/internal/jsapi", module + "/internal/jsontext",
}

// list returns a field of each package of the module: Imports is what it imports itself, Deps what it
// reaches.
func list(t *testing.T, field string) map[string][]string {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		tier.Missing(t, "go", "needs the go command: %v", err)
	}
	cmd := exec.Command("go", "list", "-f", "{{.ImportPath}} {{join ."+field+" \" \"}}", "./...")
	cmd.Dir = filepath.Join("..", "..", "..")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal("go list:", err)
	}
	all := map[string][]string{}
	for l := range strings.Lines(string(out)) {
		words := strings.Fields(l)
		all[words[0]] = words[1:]
	}
	return all
}

func of(t *testing.T, all map[string][]string, name string) []string {
	t.Helper()
	got, ok := all[module+"/"+name]
	if !ok {
		t.Fatalf("no package %s", name)
	}
	return got
}

// within reports whether path is the package root or lies under it.
func within(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

func outside(path string) bool { return strings.Contains(strings.SplitN(path, "/", 2)[0], ".") }

func TestStagesDoNotImportEachOther(t *testing.T) {
	t.Parallel()
	for pkg, deps := range list(t, "Deps") {
		i := slices.IndexFunc(stages, func(s string) bool { return within(pkg, module+"/"+s) })
		if i < 0 {
			continue
		}
		for _, path := range deps {
			if within(path, module) && !slices.Contains(shared, path) && !within(path, module+"/"+stages[i]) {
				t.Errorf("%s reaches %s", pkg, path)
			}
		}
	}
}

// The packages of replication, each with those of the others that it may import.
var replication = map[string][]string{
	"replication":               {"replication/catalog", "replication/postgres", "replication/socket"},
	"replication/catalog":       {"replication/postgres", "replication/rowfilter"},
	"replication/postgres":      nil,
	"replication/rowfilter":     nil,
	"replication/socket":        nil,
	"replication/tablesnapshot": {"replication/catalog", "replication/postgres", "replication/rowfilter"},
}

func TestPackagesInsideReplicationPointOneWay(t *testing.T) {
	t.Parallel()
	for pkg, imports := range list(t, "Imports") {
		if !within(pkg, module+"/replication") {
			continue
		}
		may, ok := replication[strings.TrimPrefix(pkg, module+"/")]
		if !ok {
			t.Errorf("%s is not in the list", pkg)
		}
		for _, path := range imports {
			if within(path, module+"/replication") &&
				!slices.Contains(may, strings.TrimPrefix(path, module+"/")) {
				t.Errorf("%s imports %s", pkg, path)
			}
		}
	}
}

// What the service does depends on the settings that replication/postgres pins, so nothing else opens a
// connection.
func TestOnlyOnePackageConnectsToPostgreSQL(t *testing.T) {
	t.Parallel()
	connects := regexp.MustCompile(`\b(pgx|pgconn|pgxpool)\.(Connect|New)\w*\(`)
	for name, source := range files(t, ".go") {
		one := within(name, "replication/postgres")
		if strings.HasSuffix(name, "_test.go") || !one && !within(name, "replication") &&
			!within(name, "internal/operate") && !within(name, "internal/lifecycle") &&
			!within(name, "internal/app") && !within(name, "cmd/outflow") && !within(name, "cmd/internal") {
			continue
		}
		if call := connects.FindString(source); call != "" && !one {
			t.Errorf("%s calls %s", name, call)
		} else if call == "" && name == "replication/postgres/connect.go" {
			t.Errorf("%s does not: this looks for the wrong thing", name)
		}
	}
}

func TestOutboxIsTheStandardLibraryOnly(t *testing.T) {
	t.Parallel()
	for _, path := range of(t, list(t, "Deps"), "outbox") {
		if outside(path) {
			t.Errorf("outbox reaches %s", path)
		}
	}
}

// What a user's service imports to write knows the vocabulary, how JSON is read, and a database driver, but
// nothing of the program.
func TestProducerIsAloneWithOutbox(t *testing.T) {
	t.Parallel()
	for _, path := range of(t, list(t, "Deps"), "producer") {
		if path != module+"/outbox" && path != module+"/internal/jsontext" &&
			path != module+"/internal/traceparent" && within(path, module) {
			t.Errorf("producer reaches %s", path)
		}
	}
}

// TestProducerBringsOnlyTheDriver: what go get of producer writes into a service's go.mod is pgx and what pgx
// needs.
func TestProducerBringsOnlyTheDriver(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", module+
		"/producer").Output()
	if err != nil {
		t.Fatal("go list:", err)
	}
	got := slices.Compact(slices.Sorted(strings.FieldsSeq(string(out))))
	want := []string{
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/pgx/v5", module,
		"golang.org/x/text",
	}
	if !slices.Equal(got, want) {
		t.Errorf("producer needs the modules %q, want %q", got, want)
	}
}

// One package knows OpenTelemetry. A service that writes or reads events brings its own, or none.
func TestOpenTelemetryIsKnownToOnePackage(t *testing.T) {
	t.Parallel()
	const otel, knows = "go.opentelemetry.io", module + "/internal/app/tracing"
	for pkg, imports := range list(t, "Imports") {
		known := slices.ContainsFunc(imports, func(path string) bool { return within(path, otel) })
		if known != (pkg == knows) {
			t.Errorf("%s imports OpenTelemetry, or %s does not", pkg, knows)
		}
	}
	all := list(t, "Deps")
	for _, name := range []string{"outbox", "producer", "consumer", "consumer/consumertest", "pipeline"} {
		for _, path := range of(t, all, name) {
			if within(path, otel) {
				t.Errorf("%s reaches %s", name, path)
			}
		}
	}
}

// The pipeline declares the interfaces that it needs; what connects is wired elsewhere.
func TestThePipelineOpensNoConnection(t *testing.T) {
	t.Parallel()
	for _, path := range of(t, list(t, "Imports"), "pipeline") {
		for _, root := range []string{
			"github.com/nats-io", "github.com/jackc", module + "/replication", module + "/sink", module +
				"/internal", module + "/cmd", "net",
		} {
			if within(path, root) && path != module+"/internal/relay" && path != module+"/internal/crash" &&
				path != module+"/internal/lazyregexp" && path != module+"/internal/claim" {
				t.Errorf("pipeline imports %s", path)
			}
		}
	}
}

// What a user's service imports brings nothing of the program along.
func TestConsumerIsALibrary(t *testing.T) {
	t.Parallel()
	all := list(t, "Deps")
	for _, name := range []string{"consumer", "consumer/consumertest"} {
		for _, path := range of(t, all, name) {
			if path != module+"/outbox" && !within(path, module+"/consumer") && within(path, module) {
				t.Errorf("%s reaches %s", name, path)
			}
		}
	}
}

// Who reads no archive does not get what that takes: drivers of object stores, and a decoder.
func TestConsumerBringsNoArchive(t *testing.T) {
	t.Parallel()
	all := list(t, "Deps")
	for _, name := range []string{"producer", "consumer", "consumer/consumertest"} {
		for _, path := range of(t, all, name) {
			for _, root := range []string{"gocloud.dev", "google.golang.org/api", "github.com/aws",
				"github.com/klauspost/compress/zstd", "github.com/nats-io/nats-server"} {
				if within(path, root) || within(path, module+"/consumer/archive") {
					t.Errorf("%s reaches %s", name, path)
				}
			}
		}
	}
	for _, path := range of(t, all, "consumer/archive") {
		for _, root := range []string{"github.com/aws", "github.com/nats-io/nats-server", module +
			"/internal/operate", module + "/internal/lab"} {
			if within(path, root) {
				t.Errorf("consumer/archive reaches %s", path)
			}
		}
	}
}

// The judge is a second opinion: it shares no code with what it judges, not even the vocabulary.
func TestTheJudgeSharesNothing(t *testing.T) {
	t.Parallel()
	for _, path := range of(t, list(t, "Deps"), "internal/lab/oracle") {
		if within(path, module) {
			t.Errorf("internal/lab/oracle reaches %s", path)
		}
	}
}

// The service does not carry what attacks and measures it: neither a NATS server nor failpoints nor recorded
// traces.
func TestTheServiceHasNoLaboratory(t *testing.T) {
	t.Parallel()
	for _, path := range of(t, list(t, "Deps"), "cmd/outflow") {
		if within(path, module+"/internal/lab") || within(path, "github.com/nats-io/nats-server") {
			t.Errorf("cmd/outflow reaches %s", path)
		}
	}
}

// Each group of internal may use the ones before it, app, lifecycle, operate, lab, and never one behind it.
// What is on top of the tree uses none, but for what reads archives for consumers.
func TestGroupsOfInternalPointOneWay(t *testing.T) {
	t.Parallel()
	groups := []string{"internal/app", "internal/lifecycle", "internal/operate", "internal/lab"}
	for pkg, imports := range list(t, "Imports") {
		rank := slices.IndexFunc(groups, func(g string) bool { return within(pkg, module+"/"+g) })
		if within(pkg, module+"/cmd") {
			continue
		}
		for _, path := range imports {
			if pkg == module+"/consumer/archive" && path == module+"/internal/lifecycle/archive" {
				continue
			}
			if of := slices.IndexFunc(groups, func(g string) bool {
				return within(path, module+"/"+g)
			}); of > rank {
				t.Errorf("%s imports %s", pkg, path)
			}
		}
	}
}

// A user's service that imports the vocabulary, producer or consumer gets nothing of the rest.
func TestNobodyImportsTheProgram(t *testing.T) {
	t.Parallel()
	for pkg, imports := range list(t, "Imports") {
		for _, path := range imports {
			if within(path, module+"/cmd") && !within(pkg, module+"/cmd") {
				t.Errorf("%s imports %s", pkg, path)
			}
			if path == module+"/pipeline" &&
				slices.ContainsFunc(stages, func(s string) bool { return within(pkg, module+"/"+s) }) {
				t.Errorf("%s imports the pipeline", pkg)
			}
		}
	}
}

// A command does not import another one. What several of them need is in a helper package beside them, such
// as conns or backfill.
func TestCommandsDoNotImportEachOther(t *testing.T) {
	t.Parallel()
	commands := []string{"archive", "consumeradmin", "drain", "initialize", "inspect", "maintain", "parked",
		"partition", "plan", "repair", "replay", "snapshot", "status", "streamretain", "support", "tail",
		"uninstall"}
	all := list(t, "Imports")
	for _, name := range commands {
		of(t, all, "internal/operate/"+name)
	}
	for pkg, imports := range all {
		for _, path := range imports {
			name, ok := strings.CutPrefix(path, module+"/internal/operate/")
			if ok && within(pkg, module+"/internal/operate") && slices.Contains(commands, name) {
				t.Errorf("%s imports the command %s", pkg, path)
			}
		}
	}
}
