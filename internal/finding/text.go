package finding

import (
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// textWidth is how long the lines of [Finding.Text] are.
const textWidth = 100

var (
	link     = lazyregexp.New(`\[([^\]]*)\]\(([^)]*)\)`)
	listItem = lazyregexp.New(`^\s*(- |\d+\. )?`)
)

// Text returns what to do as plain text for a terminal: links say where they lead.
func (f Finding) Text() string {
	text := f.Hint
	if f.Runbook != "" {
		text += "\n\n" + f.Runbook
	}
	text = strings.ReplaceAll(text, "**", "")
	return Wrap(link().ReplaceAllStringFunc(text, func(l string) string {
		m := link().FindStringSubmatch(l)
		if strings.HasPrefix(m[2], "#") {
			return m[1]
		}
		return m[1] + " (docs/" + m[2] + ")"
	}), textWidth)
}

// Wrap breaks the lines of a text that are longer than width, but for those of code, which are indented.
func Wrap(text string, width int) string {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		indent := strings.Repeat(" ", len(listItem().FindString(line)))
		for len(line) > width && !strings.HasPrefix(line, "    ") {
			at := strings.LastIndexByte(line[:width+1], ' ')
			if at <= len(indent) {
				break
			}
			b.WriteString(line[:at] + "\n")
			line = indent + line[at+1:]
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}
