package docpage

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// Kind is what is done with a block.
type Kind int

// The kinds of blocks.
const (
	Run        Kind = iota // run by bash or psql
	Background             // run by bash, in the background
	Kill                   // ends a background command
	File                   // written
)

// Block is one fenced block that means something.
type Block struct {
	Line int    // of its fence in the page, from 1
	Kind Kind   //
	Lang string // of what is run: sh or sql
	Name string // of a file, relative to the page's folder
	// without the fences, ends with a newline. In the background: what precedes the last command
	Body       string
	Command    string // in the background: the last command, without " &"
	Job        int    // of Kill: which background command of the page, from 1
	Exit       int    // the exit code that it must have
	Eventually bool   // run it again until the output is right
	Want       string // the output that it must have
	Checked    bool   // whether Want says anything
}

var (
	fence    = regexp.MustCompile("^( *)(`{3,})([^`]*)$")
	fileLine = regexp.MustCompile(`^(?://|#|--) file: (\S+)$`)
	killLine = regexp.MustCompile(`^kill %([1-9][0-9]*)\n$`)
)

// Parse returns the blocks of a page that are run or written, in order.
func Parse(page string) ([]Block, error) {
	raw, err := split(page)
	if err != nil {
		return nil, err
	}
	var all []Block
	behind := false // the block before this one was run
	for _, r := range raw {
		if r.words[0] == "text" {
			if behind {
				last := &all[len(all)-1]
				last.Want, last.Checked = r.body, true
			}
			behind = false
			continue
		}
		b, means, err := r.block()
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", r.line, err)
		}
		behind = means && (b.Kind == Run || b.Kind == Background)
		if means {
			all = append(all, b)
		}
	}
	for _, b := range all {
		if b.Eventually && !b.Checked {
			return nil, fmt.Errorf("line %d: eventually, but no output is given behind it", b.Line)
		}
	}
	return all, nil
}

// Section leaves of a page only the section under a heading of level two. All else becomes empty lines, so
// that lines keep their numbers.
func Section(page, title string) (string, error) {
	var b strings.Builder
	inside, found, ticks := false, false, ""
	for line := range strings.Lines(page) {
		if m := fence.FindStringSubmatch(strings.TrimRight(line, "\r\n")); m != nil {
			switch {
			case ticks == "":
				ticks = m[2]
			case ticks == m[2] && strings.TrimSpace(m[3]) == "":
				ticks = ""
			}
		}
		if heading, ok := strings.CutPrefix(line, "## "); ok && ticks == "" {
			inside = strings.TrimSpace(heading) == title
			found = found || inside
		}
		if inside {
			b.WriteString(line)
		} else {
			b.WriteString("\n")
		}
	}
	if !found {
		return "", fmt.Errorf("there is no section %q", title)
	}
	return b.String(), nil
}

// raw is a fenced block as it stands in the page.
type raw struct {
	line  int
	words []string // of the fence's line, never empty: the first is the language, "" if there is none
	body  string
}

func split(page string) (all []raw, err error) {
	var open *raw
	var indent, ticks string
	n := 0
	for line := range strings.Lines(page) {
		n++
		line = strings.TrimRight(line, "\r\n")
		m := fence.FindStringSubmatch(line)
		switch {
		case open == nil && m != nil:
			indent, ticks = m[1], m[2]
			open = &raw{line: n, words: strings.Fields(m[3])}
			if len(open.words) == 0 {
				open.words = []string{""}
			}
		case open != nil && m != nil && m[2] == ticks && strings.TrimSpace(m[3]) == "":
			all = append(all, *open)
			open = nil
		case open != nil:
			open.body += strings.TrimPrefix(line, indent) + "\n"
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: the block is not closed", open.line)
	}
	return all, nil
}

// block says what the block means; means is false for one that is only shown.
func (r raw) block() (b Block, means bool, err error) {
	b = Block{Line: r.line, Lang: r.words[0], Body: r.body}
	run := b.Lang == "sh" || b.Lang == "sql"
	for _, w := range r.words[1:] {
		exit, isExit := strings.CutPrefix(w, "exit=")
		switch {
		case w == "norun":
			return b, false, nil
		case run && w == "eventually":
			b.Eventually = true
		case run && isExit:
			if b.Exit, err = strconv.Atoi(exit); err != nil || b.Exit < 1 || b.Exit > 255 {
				return b, false, fmt.Errorf("%s: want a number of 1 to 255", w)
			}
		default:
			return b, false, fmt.Errorf("a block %q cannot be %q", b.Lang, w)
		}
	}
	first, _, _ := strings.Cut(r.body, "\n")
	if m := fileLine.FindStringSubmatch(first); m != nil {
		b.Kind, b.Name = File, m[1]
		if path.IsAbs(b.Name) || path.Clean(b.Name) != b.Name || strings.HasPrefix(b.Name, "..") {
			return b, false, fmt.Errorf("file %s: want a path inside the page's folder", b.Name)
		}
		return b, true, nil
	}
	if b.Lang == "go" {
		return b, false, fmt.Errorf("a go block begins with a line // file: NAME, or its fence has the " +
			"word norun")
	}
	if !run {
		return b, false, nil
	}
	if m := killLine.FindStringSubmatch(r.body); m != nil && b.Lang == "sh" {
		b.Kind = Kill
		b.Job, err = strconv.Atoi(m[1])
		return b, true, err
	}
	if command, ok := strings.CutSuffix(strings.TrimRight(r.body, "\n"), " &"); ok && b.Lang == "sh" {
		b.Kind = Background
		b.Body, b.Command = lastCommand(command)
		if b.Exit != 0 || b.Eventually {
			return b, false, fmt.Errorf("what runs in the background ends with exit code 0, and is not run " +
				"again")
		}
	}
	return b, true, nil
}

// lastCommand cuts a script before its last line, or before the first of the lines that a backslash joins
// with it.
func lastCommand(script string) (before, last string) {
	lines := strings.Split(script, "\n")
	i := len(lines) - 1
	for i > 0 && strings.HasSuffix(lines[i-1], `\`) {
		i--
	}
	if i > 0 {
		before = strings.Join(lines[:i], "\n") + "\n"
	}
	return before, strings.Join(lines[i:], "\n")
}
