// Package relay holds the values that the stages hand to one another: events and commits, the settings that
// decide the order, checkpoints, and what PostgreSQL and JetStream say of themselves. Every stage may import
// it; it imports only package outbox.
package relay
