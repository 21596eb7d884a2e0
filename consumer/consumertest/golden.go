package consumertest

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer"
)

var update = flag.Bool("consumertest.update", false, "write the golden files of consumertest.Golden anew")

// Golden tests the upcasters of a schema with files. Each file VERSION.json or VERSION_anything.json in dir
// is a payload of that version (any extension but .golden will do); the file of the same name with .golden is
// the expected result. Every version of [consumer.Schema.Up] needs one. The flag -consumertest.update
// rewrites the golden files: review the changes before you commit them.
func Golden(t testing.TB, schema *consumer.Schema, dir string) {
	t.Helper()
	for _, err := range golden(schema, dir, *update) {
		t.Error(err)
	}
}

// golden returns all that is wrong.
func golden(schema *consumer.Schema, dir string, update bool) (wrong []error) {
	bad := func(format string, args ...any) {
		wrong = append(wrong, fmt.Errorf("consumertest: "+format, args...))
	}
	if err := schema.Check(); err != nil {
		return []error{err}
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return []error{err}
	}
	covered, results := map[string]bool{}, map[string]bool{}
	for _, f := range files {
		name, ext := strings.TrimSuffix(f.Name(), filepath.Ext(f.Name())), filepath.Ext(f.Name())
		if f.IsDir() || ext == ".golden" || strings.HasPrefix(f.Name(), ".") {
			continue
		}
		version := versionOf(schema, name)
		if version == "" {
			bad("%s: %q is of no version that the schema knows. Name it after one, such as %s%s",
				filepath.Join(dir, f.Name()), name, schema.Current, ext)
			continue
		}
		result := filepath.Join(dir, name+".golden")
		if results[result] {
			bad("%s: another file has the same golden file %s", filepath.Join(dir, f.Name()), result)
			continue
		}
		covered[version], results[result] = true, true
		if err := goldenFile(schema, version, filepath.Join(dir, f.Name()), result, update); err != nil {
			bad("%w", err)
		}
	}
	for version := range schema.Up {
		if !covered[version] {
			bad("%s has no file of version %q: put a payload of that version into %s.json", dir, version,
				version)
		}
	}
	for _, f := range files {
		if name := filepath.Join(dir, f.Name()); filepath.Ext(name) == ".golden" && !results[name] {
			bad("%s: there is no payload that becomes it", name)
		}
	}
	slices.SortFunc(wrong, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return wrong
}

// versionOf is the longest version that is a file's name, or its beginning before a _.
func versionOf(schema *consumer.Schema, name string) (version string) {
	versions := []string{schema.Current}
	for v := range schema.Up {
		versions = append(versions, v)
	}
	for _, v := range versions {
		if (name == v || strings.HasPrefix(name, v+"_")) && len(v) > len(version) {
			version = v
		}
	}
	return version
}

func goldenFile(schema *consumer.Schema, version, from, to string, update bool) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if in, err := schema.From(nats.Header{}, data); err == nil && in != "" && in != version {
		return fmt.Errorf("%s: the name says version %q, the payload %q", from, version, in)
	}
	got, err := schema.Upcast(version, data)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if again, err := schema.Upcast(version, data); err != nil || !bytes.Equal(got, again) {
		return fmt.Errorf("%s: the upcasters make something else of it the second time: they must depend "+
			"on the payload alone", from)
	}
	if update {
		return os.WriteFile(to, got, 0o644)
	}
	want, err := os.ReadFile(to)
	if err != nil {
		return fmt.Errorf("%w. Make it with -consumertest.update", err)
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s becomes something else than %s (- expected, + found):\n%s", from, to,
			diff(string(want), string(got)))
	}
	return nil
}
