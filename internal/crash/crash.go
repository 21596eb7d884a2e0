// Package crash says how the program ends when it panics. Go's own way is exit code 2, which says that a
// setting is wrong.
package crash

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
)

var (
	end  atomic.Pointer[func(v any, stack []byte)]
	once sync.Once
)

// Set makes f end the process at a panic: with what was panicked with, and the stack of the goroutine.
func Set(f func(v any, stack []byte)) { end.Store(&f) }

// Guard is deferred by main and by each goroutine that the program starts, first of all, so that their other
// deferred functions run before it. Where nothing is set, as in tests, the panic goes on. A panic in a
// goroutine of a library, and what Go does not let anybody recover from, end the process in Go's own way.
func Guard() {
	v := recover()
	if v == nil {
		return
	}
	f := end.Load()
	if f == nil {
		panic(v)
	}
	once.Do(func() { (*f)(v, debug.Stack()) }) // another one waits for the end of the process
}
