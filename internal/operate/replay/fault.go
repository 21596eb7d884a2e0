package replay

import "github.com/outflowhq/outflow/outbox"

func usage(code, message, hint string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: code, Message: message, Hint: hint}
}

func fatal(code, message, hint string) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: message, Hint: hint}
}
