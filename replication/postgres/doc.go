// Package postgres opens connections to PostgreSQL, and nothing else in Outflow does: with the session
// settings pinned that the meaning of our SQL and the text of values depend on, with keepalives that find a
// peer that is gone, and with faults that say which setting and server they are about and hold no password.
//
// It is internal to Outflow: its API may change at any time.
package postgres
