package config

import (
	"bytes"
	"fmt"
	"strings"
)

const documentHead = `# Configuration

<!-- Made from the table in internal/app/config/settings.go by "go generate ./internal/app/config". -->

Every setting has a path, such as ` + "`reorder.horizon`" + `. Its value comes from the first of these that gives one:

1. a flag: ` + "`--reorder.horizon 50ms`" + `;
2. the environment: ` + "`OUTFLOW_REORDER_HORIZON=50ms`" + `, the path in upper case with ` + "`_`" + ` for each dot;
3. a YAML file: ` + "`reorder: {horizon: 50ms}`" + `. A file is read only if ` + "`--config outflow.yaml`" + ` or ` + "`OUTFLOW_CONFIG`" + ` names it;
4. the default.

` + "`outflow config`" + ` prints the effective settings in the format of the file, with where each value came from and without secrets. An
unknown key, flag or ` + "`OUTFLOW_`" + ` variable and an invalid value are errors: all of them are reported at once, with exit code 2.
(Variables that Kubernetes sets for a Service named ` + "`outflow`" + `, such as ` + "`OUTFLOW_PORT`" + `, are ignored.)

Durations have a unit: ` + "`us`, `ms`, `s`, `m`, `h`" + `. Sizes are bytes, or have a unit: ` + "`KiB`, `MiB`, `GiB`, `TiB`" + ` (powers of 1024) or
` + "`KB`, `MB`, `GB`, `TB`" + ` (powers of 1000). Sample files: [crdt](samples/crdt.yaml), [topic](samples/topic.yaml),
[partitioned](samples/partitioned.yaml). Where spans are exported to is set by OpenTelemetry's own variables: [tracing](tracing.md).

`

const documentColumns = `A table may lack the columns ` + "`id`, `actor_id`, `counter` and `seq_key`" + `: a default name that it does not have counts as not
set, and ` + "`\"\"`" + ` says so explicitly. A name that you give must be a column of the table (exit code 3). Without ` + "`seq_key`" + `, the
key is made of actor and counter; without those as well, events keep commit order.

`

var documentSections = map[string]string{
	"postgres": "PostgreSQL", "replication": "Replication", "nats": "NATS", "columns": "Columns",
	"cluster": "Several active databases",
	"reorder": "Order", "sink": "Publishing and confirming",
	"init": "How init makes the stream", "retain": "What goes from the database and the stream",
	"archive": "The archive", "maintain": "Maintenance", "log": "Log", "": "Names",
}

// Document returns docs/configuration.md.
func Document() []byte {
	var b bytes.Buffer
	b.WriteString(documentHead)
	groups := map[string][]*setting{}
	var order []string
	for i := range settings {
		s := &settings[i]
		group, _, nested := strings.Cut(s.path, ".")
		if !nested {
			group = ""
		}
		if groups[group] == nil {
			order = append(order, group)
		}
		groups[group] = append(groups[group], s)
	}
	for _, group := range order {
		fmt.Fprintf(&b, "## %s\n\n", documentSections[group])
		if group == "columns" {
			b.WriteString(documentColumns)
		}
		b.WriteString("| setting | default | accepts | meaning |\n|---|---|---|---|\n")
		for _, s := range groups[group] {
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", s.path, documentDefault(s), cell(s.want),
				cell(documentMeaning(s)))
		}
		b.WriteString("\n")
	}
	return append(bytes.TrimRight(b.Bytes(), "\n"), '\n')
}

func documentDefault(s *setting) string {
	switch {
	case s.defDoc != "":
		return cell(s.defDoc)
	case s.def == "":
		return "none"
	}
	return "`" + cell(s.def) + "`"
}

func documentMeaning(s *setting) string {
	doc := s.doc
	if s.fallback != nil {
		doc += " Falls back to `" + strings.Join(s.fallback, "`, `") + "`."
	}
	if s.reloads {
		doc += " `run` takes a change over at SIGHUP."
	}
	if s.secret != open {
		doc += " Never printed"
		if s.secret != secret {
			doc += " with its passwords"
		}
		doc += "."
	}
	return doc
}

// cell escapes what Markdown would take for something else.
func cell(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", ">", "&gt;", "*", `\*`).Replace(s)
}
