package oracle

import (
	"maps"
	"strconv"
	"strings"
)

// The headers of an atomic batch: only its first message has an expected sequence, which holds for all.
const (
	batchHeader    = "Nats-Batch-"
	batchIDHeader  = batchHeader + "Id"
	batchSeqHeader = batchHeader + "Sequence"
)

// batching reads the headers of batches. How messages are cut into batches is not part of what a stream says,
// so none of it is left: a message that follows its batch's one before gets the expected sequence that this
// stands for.
type batching struct {
	read bool   // a message was
	seq  uint64 // of the last one,
	id   string // its batch, and
	n    uint64 // its place there
}

func (b *batching) plain(m *Message) {
	id := m.Header.Get(batchIDHeader)
	if id == "" {
		*b = batching{read: true, seq: m.Seq}
		return
	}
	n, _ := strconv.ParseUint(m.Header.Get(batchSeqHeader), 10, 64)
	header := maps.Clone(m.Header)
	maps.DeleteFunc(header, func(name string, _ []string) bool {
		return strings.HasPrefix(name, batchHeader)
	})
	// What came before the first message that is read may have been removed.
	follows := !b.read || b.id == id && b.seq+1 == m.Seq && b.n+1 == n
	if _, there := header[expectedHeader]; !there && n > 1 && follows {
		header.Set(expectedHeader, strconv.FormatUint(m.Seq-1, 10))
	}
	m.Header = header
	*b = batching{true, m.Seq, id, n}
}
