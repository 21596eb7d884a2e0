package torture

import (
	"encoding/json"
	"fmt"

	"github.com/outflowhq/outflow/internal/lab/recording"
)

// operation is a row to be, or a logical message in place of one.
type operation struct {
	doc, actor string
	counter    int64
	span       int64 // how many counters it takes; 0: the table has no column that says so
	payload    json.RawMessage
	message    bool
}

// statement writes it.
func (op *operation) statement(table string) (sql string, args []any) {
	if !op.message {
		return insert(table, op, 1), op.values()
	}
	members := map[string]any{
		"doc_id": op.doc, "actor_id": op.actor, "counter": op.counter,
		"id": fmt.Sprintf("%s/%s/%d", op.doc, op.actor, op.counter), "payload": op.payload,
	}
	if op.span > 0 {
		members["span"] = op.span
	}
	content, err := json.Marshal(members)
	if err != nil {
		panic("torture: content of a message: " + err.Error()) // strings, a number and JSON
	}
	return "SELECT pg_logical_emit_message(true, 'outflow.event', $1::text)", []any{string(content)}
}

// operations are those of all traces, interleaved, again and again; each round has documents of its own.
type operations struct {
	all   []recording.Op
	n     int  // handed out
	gaps  bool // one in neverComes is left out: its counter never comes
	spans bool // an operation takes as many counters as spanned says
}

const neverComes = 1009

// spanned are the counters of an operation that takes one to four of them, so that those of a sequence stay
// without gaps: the recorded counters count its operations from 1.
func spanned(counter int64) (first, span int64) {
	lap, n := (counter-1)/4, (counter-1)%4
	return 10*lap + n*(n+1)/2 + 1, n + 1
}

func newOperations() (*operations, error) {
	var lists [][]recording.Op
	total := 0
	for _, name := range recording.Names() {
		ops, err := recording.Load(name)
		if err != nil {
			return nil, err
		}
		lists, total = append(lists, ops), total+len(ops)
	}
	o := &operations{all: make([]recording.Op, 0, total)}
	taken := make([]int, len(lists))
	for len(o.all) < total {
		best := -1 // the one that is furthest behind
		for i, l := range lists {
			if taken[i] < len(l) && (best < 0 || taken[i]*len(lists[best]) < taken[best]*len(l)) {
				best = i
			}
		}
		o.all = append(o.all, lists[best][taken[best]])
		taken[best]++
	}
	return o, nil
}

// next hands out the next n.
func (o *operations) next(n int) []operation {
	out := make([]operation, n)
	for i := range out {
		if o.gaps && o.n%neverComes == neverComes-1 {
			o.n++
		}
		op, round := &o.all[o.n%len(o.all)], o.n/len(o.all)
		out[i] = operation{doc: op.Doc, actor: op.Actor, counter: op.Counter, payload: op.Payload}
		if o.spans {
			out[i].counter, out[i].span = spanned(op.Counter)
		}
		if round > 0 {
			out[i].doc = fmt.Sprintf("%s-%d", op.Doc, round+1)
		}
		o.n++
	}
	return out
}
