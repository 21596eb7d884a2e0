package outbox_test

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// The header of a message says which event it is: its position is unique, and is its rank in the order of the
// WAL.
func ExampleParseHeader() {
	h, err := outbox.ParseHeader("v=1 lsn=0/16B3748 i=3 n=0 of=12 due=0/16B3748 thru=0/16B37F0 pull=0 tl=1 " +
		"sort=s id=7 key=a:1")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(h.Pos, h.ID, h.Key, h.Pos.LSN < h.Thru)
	// Output:
	// 0/16B3748-3 7 a:1 true
}

// A document's name may hold what a token of a subject can't.
func ExampleAppendToken() {
	token := outbox.AppendToken(nil, "a note")
	value, ok := outbox.ParseToken(string(token))
	fmt.Printf("%s %q %v\n", token, value, ok)
	// Output:
	// a=20note "a note" true
}
