// Package sqlapi makes the SQL of outflow.enqueue, with which a service in any language writes events: one
// call in the service's own transaction, with the checks of package producer, which also takes the next
// counter if the service has none.
//
// The function is made for one mapping: it names the table and its columns, and is made again when they
// change. It is VOLATILE because it writes. Its search_path is pinned, so that nobody's objects can replace
// PostgreSQL's own. It is SECURITY INVOKER: a role that can't insert into the table can't enqueue, and the
// right to execute it, which PostgreSQL grants to everybody, gives nothing away.
//
// It also makes the functions with which a service in any language is an instance of a consumer: see
// consumer.sql. They work on the tables of package consumer in the schema outflow, with the rights of the
// caller.
package sqlapi
