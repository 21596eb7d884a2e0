// Package rules holds the rules of who may import whom, and of what the documents may name: sections, tests
// and codes that are there. It holds tests only.
package rules
