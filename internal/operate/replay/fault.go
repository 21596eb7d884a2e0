package replay

import "github.com/outflowhq/outflow/outbox"

func usage(code, what, cure string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: code, Message: what, Hint: cure}
}

func fatal(code, what, cure string) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: what, Hint: cure}
}
