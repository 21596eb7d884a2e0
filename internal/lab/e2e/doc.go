// Package e2e holds the end-to-end tests, in a package for each thing that they prove: they run the built
// program from outside, against real servers. It has no code of its own, internal/lab/harness has what they
// share.
package e2e
