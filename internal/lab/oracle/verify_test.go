package oracle

import (
	"fmt"
	"testing"
	"time"
)

// The judge must find each fault: rows 1 to 4 of one actor, committed a millisecond apart, and a message for
// each.
func TestCheckerFindsEachFault(t *testing.T) {
	t.Parallel()
	begun := time.Unix(1000, 0)
	rows := func() map[string]TableRow {
		m := map[string]TableRow{}
		for i := 1; i <= 4; i++ {
			m[fmt.Sprint("id", i)] = TableRow{Doc: "note", Actor: "a", Key: fmt.Sprint("a:", i),
				Payload: fmt.Sprint(i), Committed: begun.Add(time.Duration(i) * time.Millisecond)}
		}
		return m
	}
	message := func(i int) *Message {
		// closed by a tick
		h := Header{Pos: Position{LSN: LSN(i)}, Due: LSN(i), Thru: 50, ID: fmt.Sprint("id", i),
			Key: fmt.Sprint("a:", i)}
		return &Message{Subject: "outbox.note", Outflow: h, Data: []byte(fmt.Sprint(i))}
	}
	behind := message(1)
	behind.Outflow.Pos.LSN = 51
	changed := message(3)
	changed.Data = []byte("three")
	other := message(3)
	other.Outflow.Key = "a:5"
	for name, test := range map[string]struct {
		messages []*Message
		want     string
		ok       bool
	}{
		"all well": {[]*Message{message(1), message(2), message(3), message(4)}, "0 0 0 0 0 0", true},
		"missing":  {[]*Message{message(1), message(2), message(4)}, "1 0 0 0 0 0", false},
		"repeated": {[]*Message{message(1), message(2), message(2), message(3), message(4)},
			"0 1 0 0 0 0", false},
		"foreign": {[]*Message{message(1), message(2), message(9), message(3), message(4)},
			"0 0 1 0 0 0", false},
		"payload":      {[]*Message{message(1), message(2), changed, message(4)}, "0 0 0 1 0 0", false},
		"key":          {[]*Message{message(1), message(2), other, message(4)}, "0 0 0 1 0 0", false},
		"out of order": {[]*Message{message(2), message(1), message(3), message(4)}, "0 0 0 0 1 0", true},
		"late":         {[]*Message{message(2), message(3), message(4), behind}, "0 0 0 0 1 1", true},
	} {
		c := NewChecker(rows())
		for _, m := range test.messages {
			c.Add(m)
		}
		v := c.Verdict(20 * time.Millisecond)
		got := fmt.Sprint(v.Missing, v.Repeated, v.Foreign, v.Changed, v.OutOfOrder, v.Late)
		if got != test.want || v.OK() != test.ok {
			t.Errorf("%s: missing, repeated, foreign, changed, out of order, late are %s, want %s; ok %t",
				name, got, test.want, v.OK())
		}
	}
}

// Streams that differ in anything have other digests.
func TestDifferentStreamsHaveDifferentDigests(t *testing.T) {
	t.Parallel()
	digestOf := func(change func(*Message)) string {
		m := &Message{Subject: "outbox.note", Header: map[string][]string{"Outflow": {"v=1"}, "A": {"b"}},
			Data: []byte("x")}
		change(m)
		c := NewChecker(nil)
		c.Add(m)
		v := c.Verdict(0)
		return v.Digest
	}
	same := digestOf(func(*Message) {})
	if same != digestOf(func(*Message) {}) {
		t.Error("it changes from one time to the next")
	}
	for name, change := range map[string]func(*Message){
		"subject": func(m *Message) { m.Subject = "outbox.other" },
		"header":  func(m *Message) { m.Header["A"] = []string{"c"} },
		"data":    func(m *Message) { m.Data = []byte("y") },
	} {
		if digestOf(change) == same {
			t.Errorf("another %s is not seen", name)
		}
	}
}
