package sqlapi

import (
	_ "embed"
	"strings"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// consumerSQL makes the functions with which a service in any language is an instance of a consumer. They
// work on the tables of package consumer in the schema of the functions.
//
//go:embed consumer.sql
var consumerSQL string

var functionName = lazyregexp.New(`(?m)^CREATE OR REPLACE FUNCTION outflow\.(\w+)\(`)

// ConsumerFunctions are the names of the functions for consumers, without their schema.
func ConsumerFunctions() (names []string) {
	for _, m := range functionName().FindAllStringSubmatch(consumerSQL+createTables(), -1) {
		names = append(names, m[1])
	}
	return names
}

// createTables is the function that makes the consumers' tables, for those who have no instance in Go.
func createTables() string {
	return "CREATE OR REPLACE FUNCTION " + Schema + ".create_tables() RETURNS void\n" +
		"LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS " +
		dollars("BEGIN\n"+consumer.Tables(Schema)+"END ")
}

// consumerStatements are those that make them.
func consumerStatements() (all []string) {
	all = append(all, createTables())
	for _, s := range strings.SplitAfter(strings.TrimSpace(consumerSQL), "$outflow$;\n") {
		all = append(all, strings.TrimSuffix(strings.TrimSpace(s), ";"))
	}
	return all
}
