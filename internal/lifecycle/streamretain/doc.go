// Package streamretain decides what leaves the front of the stream: messages that somebody else durably has,
// and that nobody needs here. JetStream's own limits ask nobody.
//
// The rule is a list of clauses. Each says up to which sequence messages may go for its sake, and who or what
// needs those behind it; the least of them holds. Age, size and number choose how much of that goes, never
// whether it may. It is a function of [Facts] alone: what they are is read in internal/operate/streamretain.
package streamretain
