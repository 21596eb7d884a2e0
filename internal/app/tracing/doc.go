// Package tracing reports a span to OpenTelemetry for each message that JetStream has acknowledged, if the
// event brought the trace context of a sampled trace. docs/tracing.md is for users.
//
// The span is a child of the writer's, which the message goes on carrying: a span id of ours in the message
// would make its bytes depend on whether tracing is on. The id of our span is a hash of the trace, slot,
// stream and position, so a message that is made again after a crash has the same span.
//
// Nothing here may hold up publishing. The loop notes a few values of a sampled event and hands them over
// when the message is acknowledged, to a queue that drops and counts what does not fit. All that costs more
// is done by another goroutine, and by those of the OpenTelemetry SDK.
package tracing
