package oracle

// Only is the truth for an outflow to which PostgreSQL's row filter lets through just the events that keep
// holds for: their indexes count those alone, and a transaction that is left without any is what else is in
// it.
func (t *Truth) Only(keep func(*Event) bool) *Truth {
	part := *t
	part.commits, part.Events, part.Messages = nil, 0, 0
	for _, c := range t.commits {
		var events []*Event
		for _, e := range c.events {
			if !keep(e) {
				continue
			}
			kept := *e
			kept.Pos.Index = uint32(len(events))
			if events = append(events, &kept); e.Message {
				part.Messages++
			}
		}
		if c.events = events; len(events) > 0 || c.tick || len(c.changes) > 0 {
			part.commits = append(part.commits, c)
		}
		part.Events += len(events)
	}
	return &part
}
