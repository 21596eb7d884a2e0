package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// file takes settings from a YAML document. Values are read as the text that was written, by the same rules
// as flags and the environment: a stream may be named by a number without quotes.
func (l *loader) file(name string, data []byte) {
	w := walker{l, name}
	if !utf8.Valid(data) {
		l.problem(name+": not UTF-8", "Save it as UTF-8")
		return
	}
	docs, err := parse(data)
	if err != nil {
		// The error's own text quotes the lines around it, and with them secrets.
		var syntax *yaml.SyntaxError
		if errors.As(err, &syntax) && syntax.Token != nil && syntax.Token.Position != nil {
			name = fmt.Sprintf("%s:%d", name, syntax.Token.Position.Line)
			err = errors.New(syntax.Message)
		}
		l.problem(fmt.Sprintf("%s: not YAML: %v", name, err), "See docs/configuration.md for the form")
		return
	}
	found := false
	for _, doc := range docs.Docs {
		if doc.Body == nil || doc.Body.Type() == ast.CommentType {
			continue
		}
		if found {
			l.problem(w.at(doc.Body)+": a second document", "Leave one")
			return
		}
		found = true
		w.section("", doc.Body)
	}
}

// parse guards against what the parser itself does on odd input: it is to end in a message, not in a stack
// trace.
func parse(data []byte) (f *ast.File, err error) {
	defer func() {
		if r := recover(); r != nil {
			f, err = nil, errors.New("the parser gave up")
		}
	}()
	return parser.ParseBytes(data, 0)
}

type walker struct {
	*loader
	name string
}

// at is where a node is, as file:line.
func (w walker) at(n ast.Node) string {
	if t := n.GetToken(); t != nil && t.Position != nil {
		return fmt.Sprintf("%s:%d", w.name, t.Position.Line)
	}
	return w.name
}

// section reads the mapping under prefix, "" for the whole document. An empty one is allowed.
func (w walker) section(prefix string, n ast.Node) {
	if n.Type() == ast.NullType {
		return
	}
	entries, ok := mapping(n)
	if !ok {
		what := prefix
		if what == "" {
			what = "the document"
		}
		w.problem(fmt.Sprintf("%s: %s is not a mapping", w.at(n), what),
			"Write settings as key: value below it")
		return
	}
	for _, e := range entries {
		w.entry(prefix, e)
	}
}

func (w walker) entry(prefix string, e *ast.MappingValueNode) {
	key, ok := scalar(e.Key)
	if !ok {
		w.problem(w.at(e.Key)+": a key that is not a plain word",
			"Write settings as key: value; merge keys, anchors and tags are not supported")
		return
	}
	path := key
	if prefix != "" {
		path = prefix + "." + key
	}
	s, isSetting := byPath[path]
	switch {
	case strings.Contains(key, "."):
		w.unknown(e, path)
	case isSetting && s.path == "headers":
		w.headers(e)
	case isSetting:
		w.leaf(path, e)
	case slices.Contains(sections, path):
		w.section(path, e.Value)
	default:
		w.unknown(e, path)
	}
}

func (w walker) unknown(e *ast.MappingValueNode, path string) {
	if s := byPath[path]; s != nil {
		w.problem(fmt.Sprintf("%s: %s is written in one word", w.at(e.Key), path),
			"Nest it: "+strings.ReplaceAll(path, ".", ": {")+": ..."+
				strings.Repeat("}", strings.Count(path, ".")))
		return
	}
	names := paths
	if _, ok := mapping(e.Value); ok {
		names = append([]string{"headers"}, sections...)
	}
	w.problem(fmt.Sprintf("%s: %s: there is no such key", w.at(e.Key), path), orAll(Nearest(path, names)))
}

func (w walker) leaf(path string, e *ast.MappingValueNode) {
	text, ok := scalar(e.Value)
	if !ok {
		w.notText(path, e.Value)
		return
	}
	w.give(path, given{text: text, from: origin{fromFile, w.at(e.Key)}})
}

func (w walker) notText(path string, n ast.Node) {
	if n.Type() == ast.NullType {
		w.problem(fmt.Sprintf("%s: %s has no value", w.at(n), path),
			`Give one, "" for an empty one, or leave the line out`)
		return
	}
	w.problem(fmt.Sprintf("%s: %s is not a single value", w.at(n), path),
		"Give a plain value; lists, anchors and tags are not supported")
}

// headers reads the one setting that is a mapping itself.
func (w walker) headers(e *ast.MappingValueNode) {
	entries, ok := mapping(e.Value)
	if !ok {
		w.leaf("headers", e)
		return
	}
	headers := make([]Header, 0, len(entries))
	for _, h := range entries {
		name, okName := scalar(h.Key)
		column, okColumn := scalar(h.Value)
		if !okName || !okColumn {
			w.notText("headers."+name, h.Value)
			continue
		}
		headers = append(headers, Header{name, column})
	}
	w.give("headers", given{headers: headers, from: origin{fromFile, w.at(e.Key)}})
}

// mapping returns a mapping's entries.
func mapping(n ast.Node) ([]*ast.MappingValueNode, bool) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return n.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, true
	}
	return nil, false
}

// scalar returns a scalar as it was written, without quotes.
func scalar(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	}
	return "", false
}
