// Package bench is `outflow-lab bench`: it measures Outflow beside other ways to do the same, in one run and
// on the same data.
//
// What is compared are contenders: outflow (and other builds of it), pg_recvlogical that throws the same WAL
// away, a publisher that has the messages in memory already, and a polling relay. A case says what they are
// given: a backlog to drain, or a steady rate whose delay counts. A repetition of a case is a turn: every
// contender once, one after the other, each turn in another order. Ratios are taken within a turn and the
// median of them is reported, so that a machine that is slower for a minute is slower for both sides;
// docs/decisions/0016-bench.md argues for it.
//
// A contender is a process of its own, and so is whoever writes: this program once more (Child), so that CPU
// time and memory are the contender's alone. A run in which a message is missing is an error, not a figure.
package bench
