package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

const (
	envPrefix = "OUTFLOW_"
	fileArg   = "config"
	fileEnv   = envPrefix + "CONFIG"
)

// otherNames have our prefix but are not settings: the file, the database of a consumer, and what demo,
// scripts and tests read.
var otherNames = []string{fileEnv, ConsumerDatabaseEnv, envPrefix + "PG_BIN", envPrefix + "CACHE"}

// ConsumerDatabaseEnv is the variable that names the database of a consumer for the commands that look into
// it.
const ConsumerDatabaseEnv = envPrefix + "CONSUMER_DATABASE"

const testPrefix = envPrefix + "TEST_"

// kubernetesName matches what Kubernetes puts into every pod for a Service whose name is or begins with
// "outflow".
var kubernetesName = lazyregexp.New(
	`^OUTFLOW(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// readEnviron takes settings from the environment and finds names that look like settings but are not.
func (l *loader) readEnviron() {
	known := map[string]bool{}
	for _, name := range otherNames {
		known[name] = true
	}
	for i := range settings {
		s := &settings[i]
		known[s.env()] = true
		for _, name := range s.fallback {
			if text := l.environ[name]; text != "" {
				l.give(s.path, given{text: text, from: origin{fromFallback, name}})
				break
			}
		}
		if text, ok := l.environ[s.env()]; ok {
			l.give(s.path, given{text: text, from: origin{fromEnv, s.env()}})
		}
	}
	var unknown []string
	for name := range l.environ {
		if strings.HasPrefix(name, envPrefix) && !known[name] && !strings.HasPrefix(name, testPrefix) &&
			!kubernetesName().MatchString(name) {
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	for _, name := range unknown {
		near := Nearest(strings.TrimPrefix(name, envPrefix), paths)
		if near != "" {
			near = byPath[near].env()
		}
		l.problem(fmt.Sprintf("environment %s: there is no such setting", name), orAll(near))
	}
}

// libpq says where the connection comes from if postgres.url is empty.
func (l *loader) libpq() origin {
	var names []string
	for _, name := range []string{"PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"} {
		if l.environ[name] != "" {
			names = append(names, name)
		}
	}
	if names == nil {
		return origin{name: "libpq's"}
	}
	return origin{fromFallback, strings.Join(names, ", ")}
}
