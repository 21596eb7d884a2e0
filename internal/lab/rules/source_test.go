package rules

import (
	"go/scanner"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// maxColumns is how long a line of Go may be, where a tab counts four.
const maxColumns = 110

func columns(line string) int { return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t") }

// Raw strings are left out: some hold what others print.
func TestLinesFitOnAScreen(t *testing.T) {
	t.Parallel()
	for name, source := range files(t, ".go") {
		raw := map[int]bool{}
		set := token.NewFileSet()
		file := set.AddFile(name, set.Base(), len(source))
		var s scanner.Scanner
		s.Init(file, []byte(source), nil, 0)
		for {
			pos, tok, text := s.Scan()
			if tok == token.EOF {
				break
			}
			if tok == token.STRING && text[0] == '`' {
				for i := range strings.Count(text, "\n") + 1 {
					raw[file.Line(pos)+i] = true
				}
			}
		}
		n := 0
		for line := range strings.Lines(source) {
			if n++; columns(strings.TrimSuffix(line, "\n")) > maxColumns && !raw[n] {
				t.Errorf("%s:%d has %d columns, %d are allowed", name, n, columns(line), maxColumns)
			}
		}
	}
}

// A goroutine that panics would end the program with Go's own exit code, which is that of a wrong option. The
// packages that services import leave that to the service.
func TestEachGoroutineReportsItsPanic(t *testing.T) {
	t.Parallel()
	begins := regexp.MustCompile(`(\bgo|\.Go\()\s*func\(\).*\{.*(\n.*)?`)
	for name, source := range files(t, ".go") {
		root, _, _ := strings.Cut(name, "/")
		if strings.HasSuffix(name, "_test.go") || within(name, "internal/lab") ||
			!slices.Contains([]string{"cmd", "internal", "pipeline", "sink", "replication"}, root) {
			continue
		}
		for _, begin := range begins.FindAllString(source, -1) {
			if !strings.HasSuffix(begin, "\tdefer crash.Guard()") {
				t.Errorf("%s: begin it with defer crash.Guard():\n%s", name, begin)
			}
		}
	}
}
