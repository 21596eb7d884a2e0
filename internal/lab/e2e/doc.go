// Package e2e tests the built binary from outside, against real servers: what a user does, what can go wrong while it runs, and
// what the stream holds afterwards. It has no code of its own.
package e2e
