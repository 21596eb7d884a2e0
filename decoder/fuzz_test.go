package decoder

import (
	"bytes"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// frame joins the messages of a session, each after its length in two bytes.
func frame(msgs [][]byte) []byte {
	var b []byte
	for _, msg := range msgs {
		b = append(be.AppendUint16(b, uint16(len(msg))), msg...)
	}
	return b
}

// unframe takes any bytes apart; the last message may be shorter than its length says.
func unframe(b []byte) (msgs [][]byte) {
	for len(b) >= 2 {
		n := min(int(be.Uint16(b)), len(b)-2)
		msgs = append(msgs, b[2:2+n])
		b = b[2+n:]
	}
	return msgs
}

// FuzzDecode feeds damaged sessions. Whatever the bytes: no panic, no event or commit out of a transaction,
// nothing after an error, memory in proportion to the bytes, and values that stay what they are while later
// messages are read.
func FuzzDecode(f *testing.F) {
	for _, server := range load(f) {
		for _, c := range server.Captures {
			which := uint8(slices.IndexFunc(scenarios, func(sc scenario) bool {
				return sc.name == c.Scenario
			}))
			if len(c.Messages) < 64 {
				f.Add(c.TableOID, which, uint16(0), frame(c.Messages))
				continue
			}
			// Long sessions in parts: each with a transaction and the last description of the table before
			// it.
			var relation []byte
			for i := 0; i < len(c.Messages); i++ {
				msg := c.Messages[i]
				if msg[0] == 'R' && be.Uint32(msg[1:]) == c.TableOID {
					relation = msg
				}
				if msg[0] != 'B' {
					continue
				}
				end := i + slices.IndexFunc(c.Messages[i:], func(m []byte) bool { return m[0] == 'C' })
				part := slices.Insert(slices.Clone(c.Messages[i:end+1]), 1, relation)
				if relation == nil {
					part = c.Messages[i : end+1]
				}
				f.Add(c.TableOID, which, uint16(i), frame(part))
			}
		}
	}
	f.Fuzz(func(t *testing.T, oid uint32, which uint8, limit uint16, session []byte) {
		cfg := scenarios[int(which)%len(scenarios)].config
		cfg.TableOID, cfg.MaxPayload = oid, int(limit)
		d := New(cfg)
		before := allocated()
		var kept, printed []relay.Event
		var size, values int
		var failed error
		var index uint32
		for _, msg := range unframe(session) {
			in, r := d.InTransaction(), Result{}
			buf := bytes.Clone(msg)
			err := d.Decode(buf, &r)
			for i := range buf {
				buf[i] = 0xEE
			}
			size += len(msg)
			switch {
			case failed != nil && err != failed:
				t.Fatalf("%v after %v", err, failed)
			case err != nil && !reflect.DeepEqual(r, Result{}):
				t.Fatalf("%+v beside %v", r, err)
			case r.Kind == Event && !(in && d.InTransaction() && msg[0] == 'I' &&
				r.Event.Pos == outbox.Position{Index: index}):
				t.Fatalf("event %v, expected index %d, of a %q message, in a transaction: %v", r.Event.Pos,
					index, msg[0], in)
			case r.Kind == Commit && !(in && !d.InTransaction() && msg[0] == 'C' &&
				r.Commit.Events == int(index)):
				t.Fatalf("commit %+v, %d events, of a %q message, in a transaction: %v", r.Commit, index,
					msg[0], in)
			}
			failed = err
			switch r.Kind {
			case Event:
				index++
				values += checkEvent(t, cfg, &r.Event)
				kept, printed = append(kept, r.Event), append(printed, deepCopy(r.Event))
			case Commit:
				index = 0
			}
		}
		// A value may be read for each role that the configuration gives its column, and a short binary one
		// prints longer.
		if limit := (len(cfg.Extra) + 6) * (size*8 + 64*len(kept)); values > limit {
			t.Errorf("%d bytes of values from %d", values, size)
		}
		if got := allocated() - before; got > 2<<20+200*uint64(size) {
			t.Errorf("%d bytes allocated for %d", got, size)
		}
		if !reflect.DeepEqual(kept, printed) {
			t.Error("an event has changed since it was given out")
		}
	})
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// checkEvent checks what holds of any event and gives the size of its values.
func checkEvent(t *testing.T, cfg Config, e *relay.Event) (size int) {
	if e.Payload == nil && e.PayloadSize > 0 && e.PayloadSize <= cfg.MaxPayload {
		t.Errorf("a payload of %d bytes was left out", e.PayloadSize)
	}
	if e.Payload != nil && (len(e.Payload) != e.PayloadSize || cfg.MaxPayload > 0 &&
		len(e.Payload) > cfg.MaxPayload) {
		t.Errorf("payload of %d bytes, size %d, limit %d", len(e.Payload), e.PayloadSize, cfg.MaxPayload)
	}
	if len(e.Extra) != len(cfg.Extra) {
		t.Errorf("%d further columns, want %d", len(e.Extra), len(cfg.Extra))
	}
	for i, v := range append([]string{e.Doc, e.Actor, e.Key, e.ID, string(e.Payload)}, e.Extra...) {
		if e.Null&(1<<i) != 0 && v != "" {
			t.Errorf("NULL value %d is %q", i, v)
		}
		size += len(v)
	}
	return size
}

func deepCopy(e relay.Event) relay.Event {
	for _, s := range []*string{&e.Doc, &e.Actor, &e.Key, &e.ID, &e.Bad} {
		*s = strings.Clone(*s)
	}
	e.Payload, e.Extra = bytes.Clone(e.Payload), slices.Clone(e.Extra)
	for i := range e.Extra {
		e.Extra[i] = strings.Clone(e.Extra[i])
	}
	return e
}
