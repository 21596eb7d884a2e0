package oracle

import (
	"fmt"
	"testing"
	"time"
)

// TestLateIsWhatTheWALHasBehindAClosedWindow: what is late is what the WAL has behind the close of a higher
// one's window, if that had to be closed. One actor's second event stands ahead of the first; another actor's
// may close its window. The horizon is 20 ms.
func TestLateIsWhatTheWALHasBehindAClosedWindow(t *testing.T) {
	t.Parallel()
	type commit struct {
		lsn LSN
		at  int // ms
	}
	for _, test := range []struct {
		name      string
		second    commit
		due, thru LSN
		between   []commit // of another actor
		first     commit
		late      int
	}{
		{"committed and written later", commit{10, 0}, 10, 20, []commit{{20, 25}}, commit{30, 26}, 1},
		{"stamped in time, written later", commit{10, 0}, 10, 20, []commit{{20, 25}}, commit{30, 1}, 1},
		{"stamped before the higher one", commit{10, 5}, 10, 20, []commit{{20, 25}}, commit{30, 0}, 1},
		{"written before the close", commit{10, 0}, 10, 20, []commit{{20, 25}}, commit{15, 1}, 0},
		{"written before the close, stamped later", commit{10, 0}, 10, 20, []commit{{20, 25}},
			commit{15, 1000}, 0},
		{"part of the close", commit{10, 0}, 10, 20, nil, commit{20, 25}, 0},
		{"closed too early", commit{10, 0}, 10, 20, []commit{{20, 19}}, commit{30, 1000}, 0},
		{"closed by a tick", commit{10, 0}, 10, 20, nil, commit{30, 1}, 1},
		{"written before the tick", commit{10, 0}, 10, 20, nil, commit{15, 1}, 0},
		{"what closed is not the horizon later, but than one behind it", commit{10, 30}, 20, 20,
			[]commit{{12, 5}, {20, 25}}, commit{30, 6}, 1},
		{"nor than one behind it", commit{10, 30}, 20, 20, []commit{{12, 6}, {20, 25}}, commit{30, 6}, 0},
		{"one ahead of it in the WAL does not count", commit{10, 30}, 20, 20, []commit{{8, 5}, {20, 25}},
			commit{30, 6}, 0},
		{"what is due is a tick", commit{10, 30}, 12, 20, []commit{{20, 31}}, commit{30, 32}, 1},
	} {
		begun := time.Unix(1000, 0)
		rows := map[string]TableRow{}
		c := NewChecker(rows)
		add := func(actor string, key int, at commit, due, thru LSN) {
			id := fmt.Sprint(actor, key)
			rows[id] = TableRow{Doc: "note", Actor: actor, Key: fmt.Sprint(key),
				Committed: begun.Add(time.Duration(at.at) * time.Millisecond)}
			c.Add(&Message{Outflow: Header{Pos: Position{LSN: at.lsn}, Due: due, Thru: thru, ID: id,
				Key: fmt.Sprint(key)}})
		}
		add("anna", 2, test.second, test.due, test.thru)
		for i, other := range test.between {
			add("bert", i, other, other.lsn, 1000)
		}
		add("anna", 1, test.first, test.first.lsn, 1000)
		if v := c.Verdict(20 * time.Millisecond); v.OutOfOrder != 1 || v.Late != test.late {
			t.Errorf("%s: out of order %d, late %d, want 1 and %d", test.name, v.OutOfOrder, v.Late,
				test.late)
		}
	}
}
