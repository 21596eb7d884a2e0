package progress

import (
	"io"
	"os"
	"strings"
	"unicode"

	"golang.org/x/term"
	"golang.org/x/text/width"
)

// defaultWidth is that of a terminal that does not say how wide it is.
const defaultWidth = 80

// Of returns the configuration for a process's outputs. A terminal that can't rewrite a line (TERM is dumb,
// or not set) counts as none.
func Of(stdout, stderr io.Writer) Config {
	c := Config{Stdout: stdout, Stderr: stderr}
	f := terminal(stderr)
	if name := os.Getenv("TERM"); f == nil || name == "" || name == "dumb" {
		return c
	}
	c.Shared = terminal(stdout) != nil
	c.Width = func() int {
		if columns, _, err := term.GetSize(int(f.Fd())); err == nil && columns > 0 {
			return columns
		}
		return defaultWidth
	}
	return c
}

// terminal returns the terminal that an output is; nil: it is none.
func terminal(w io.Writer) *os.File {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return f
}

// more ends what was cut.
const more = "..."

// fit cuts a text so that it leaves the last column of a line free: a terminal may begin a new line there.
// What does not print is made visible.
func fit(text string, columns int) string {
	var b strings.Builder
	room, used := max(columns-1, 0), 0
	end := 0 // of b, where more still fits behind it
	for _, r := range text {
		if !unicode.IsPrint(r) {
			r = '?'
		}
		if used += columnsOf(r); used > room {
			if room <= len(more) {
				return strings.Repeat(".", room)
			}
			return b.String()[:end] + more
		}
		b.WriteRune(r)
		if used <= room-len(more) {
			end = b.Len()
		}
	}
	return b.String()
}

// columnsOf is how many columns a character takes.
func columnsOf(r rune) int {
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}
