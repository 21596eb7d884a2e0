package outbox

// EventPrefix is the prefix of a logical message that is an event, where Outflow is set up to read those.
const EventPrefix = "outflow.event"
