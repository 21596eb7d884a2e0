// Command outflow publishes the inserts of a PostgreSQL outbox table to a NATS JetStream stream, in order and
// exactly once.
//
// It prints results on standard output, errors and the log on standard error. The exit code says what
// follows: 0 a clean stop, 1 something unexpected, 2 a wrong command line or configuration, 3 a set-up that
// can't work, 4 a gap or a divergence that an operator has to decide about, 5 a row that can't be published.
package main

import "github.com/outflowhq/outflow/cmd/internal/cli"

func main() { cli.Main(&cli.App{Name: "outflow"}, (*cli.App).Outflow) }
