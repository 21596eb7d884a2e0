// Package deptest holds the rules of who may import whom. It holds tests only.
package deptest
