// Package sqlapi makes the SQL of outflow.enqueue, with which a service in any language writes events: one call in its own transaction, the
// same checks as package producer, and the counter taken if the service has none.
//
// The function is made for one mapping: it names the table and its columns, and it is made again when they change. It is VOLATILE, for
// it writes; its search_path is pinned, so that nobody's objects stand in for PostgreSQL's own; and it is not SECURITY DEFINER: it runs
// with the rights of who calls it. Whoever may not insert into the table may not enqueue, and no grant has to be thought of that
// PostgreSQL gives to all by default.
package sqlapi
