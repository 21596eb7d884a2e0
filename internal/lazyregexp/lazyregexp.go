// Package lazyregexp compiles regular expressions when they are first used: most commands use few of them,
// and compiling all of them at every start takes milliseconds.
package lazyregexp

import (
	"regexp"
	"sync"
)

// New returns a function that returns the compiled expression, which must be valid.
func New(expression string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })
}
