package outbox

// Mapping says which table is the outbox and which of its columns have the roles that decide the order and the content. It is
// settled by init and kept in the checkpoint record. An empty column name means that there is none.
type Mapping struct {
	Table   string `json:"table"` // schema.name
	Doc     string `json:"doc_id"`
	Actor   string `json:"actor_id,omitempty"`
	Counter string `json:"counter,omitempty"`
	Key     string `json:"seq_key,omitempty"`
	Payload string `json:"payload"`
}

// Keyed reports whether events have a seq_key: a column of their own, or actor and counter to make it from.
func (m Mapping) Keyed() bool { return m.Key != "" || m.Actor != "" && m.Counter != "" }
