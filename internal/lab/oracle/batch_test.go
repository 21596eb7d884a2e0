package oracle

import (
	"strconv"
	"testing"

	"github.com/nats-io/nats.go"
)

// A stream of batches reads as one of single messages; a message that does not follow its batch has no
// expected sequence.
func TestBatchesReadAsSingleMessages(t *testing.T) {
	t.Parallel()
	type in struct {
		seq      uint64
		id, n    string
		expected string
	}
	for name, test := range map[string]struct {
		in   []in
		want []string // the expected sequences; "": none
	}{
		"single": {[]in{{1, "", "", "0"}, {2, "", "", "1"}}, []string{"0", "1"}},
		"batches": {[]in{{1, "a", "1", "0"}, {2, "a", "2", ""}, {3, "b", "1", "2"},
			{4, "b", "2", ""}, {5, "", "", "4"}}, []string{"0", "1", "2", "3", "4"}},
		"its head removed":   {[]in{{8, "a", "3", ""}, {9, "a", "4", ""}}, []string{"7", "8"}},
		"a hole":             {[]in{{1, "a", "1", "0"}, {2, "a", "3", ""}}, []string{"0", ""}},
		"another's":          {[]in{{1, "a", "1", "0"}, {2, "b", "2", ""}}, []string{"0", ""}},
		"a missing sequence": {[]in{{1, "a", "1", "0"}, {3, "a", "2", ""}}, []string{"0", ""}},
		"no first":           {[]in{{1, "", "", "0"}, {2, "a", "1", ""}}, []string{"0", ""}},
		"a wrong first": {[]in{{1, "", "", "0"}, {2, "a", "1", "5"}, {3, "a", "2", ""}},
			[]string{"0", "5", "2"}},
	} {
		var b batching
		for i, x := range test.in {
			h := nats.Header{packedHeader: {"v"}}
			if x.id != "" {
				h[batchIDHeader], h[batchSeqHeader], h["Nats-Batch-Commit"] =
					[]string{x.id}, []string{x.n}, []string{"1"}
			}
			if x.expected != "" {
				h[expectedHeader] = []string{x.expected}
			}
			m := &Message{Seq: x.seq, Header: h}
			b.plain(m)
			if got := m.Header.Get(expectedHeader); got != test.want[i] {
				t.Errorf("%s: message %d expects %q, want %q", name, i+1, got, test.want[i])
			}
			if want := 1 + min(1, len(test.want[i])); len(m.Header) != want {
				t.Errorf("%s: message %s has headers %v", name, strconv.Itoa(i+1), m.Header)
			}
		}
	}
}
