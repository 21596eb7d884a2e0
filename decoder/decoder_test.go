package decoder

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// decodeAll gives what a session brings, and the first error. The buffer of each message is overwritten after
// it is decoded.
func decodeAll(cfg Config, messages ...[]byte) (results []Result, err error) {
	d := New(cfg)
	d.arena.block = bytes.Repeat([]byte{0xAA}, blockSize)[:0] // as uncleared may give it
	for _, msg := range messages {
		buf := append([]byte(nil), msg...)
		var r Result
		err := d.Decode(buf, &r)
		for i := range buf {
			buf[i] = 0xEE
		}
		if err != nil {
			return results, err
		}
		if r.Kind != Nothing || r.Malformed != nil || r.Missing {
			results = append(results, r)
		}
	}
	return results, nil
}

func events(results []Result) (es []relay.Event) {
	for _, r := range results {
		if r.Kind == Event {
			es = append(es, r.Event)
		}
	}
	return es
}

func commits(results []Result) (cs []relay.Commit) {
	for _, r := range results {
		if r.Kind == Commit {
			cs = append(cs, r.Commit)
		}
	}
	return cs
}

func TestATransactionGivesItsRowsInOrder(t *testing.T) {
	t.Parallel()
	results, err := decodeAll(config,
		begin(0x100), relation(tableOID, columns...), row("1", `[[0, 0, "A"]]`), row("2", `[[1, 0, " "]]`),
		commit(0x100, 0x130, 7),
		begin(0x200), row("3", `[[2, 0, "s"]]`), commit(0x200, 0x230, 5))
	must.Succeed(t, err)
	want := func(index uint32, counter int64, payload string) Result {
		return Result{Kind: Event, Event: relay.Event{
			Pos: outbox.Position{Index: index}, Doc: "friendsforever", Actor: "0",
			Key:     fmt.Sprintf("0:%020d", counter),
			Counter: outbox.Counter{First: counter, Span: 1},
			ID:      "7f0c6b1e-0c39-4f1e-9a53-1d5c2b8e4a10",
			Payload: []byte(payload), PayloadSize: len(payload),
		}}
	}
	expected := []Result{
		{Missing: true}, // the key, which is generated
		want(0, 1, `[[0, 0, "A"]]`),
		want(1, 2, `[[1, 0, " "]]`),
		{Kind: Commit, Commit: relay.Commit{LSN: 0x130, Start: 0x100, Time: 7, Kind: relay.Events,
			Events: 2}},
		want(0, 3, `[[2, 0, "s"]]`),
		{Kind: Commit, Commit: relay.Commit{LSN: 0x230, Start: 0x200, Time: 5, Kind: relay.Events,
			Events: 1}},
	}
	if !reflect.DeepEqual(results, expected) {
		t.Errorf("got  %+v\nwant %+v", results, expected)
	}
}

func TestOtherTablesAndChangesAreIgnored(t *testing.T) {
	t.Parallel()
	const leaf = tableOID + 1
	other := []val{txt("x"), null, toast}
	d := New(config)
	for _, msg := range [][]byte{
		logical(0, relay.HeartbeatPrefix, ""),
		logical(0, relay.SettingsPrefix, "nonsense"),
		begin(0x100),
		origin("upstream"),
		relation(tableOID, columns...),
		relation(leaf, columns[3], columns[0]),
		typeMessage(16400, "mood"),
		insert(leaf, txt("x"), bin("y"), null),
		updated(tableOID, 0, other...), updated(tableOID, 'K', other...), updated(leaf, 'O', other...),
		deletion(tableOID, 'K', other...), deletion(leaf, 'O', other...),
		truncate(), truncate(tableOID, leaf),
		logical(0, relay.HeartbeatPrefix, ""),
		logical(1, relay.HeartbeatPrefix+"s", ""),
		logical(1, "debezium", "{}"),
	} {
		r := Result{Kind: Event, Event: relay.Event{Doc: "of the message before"},
			Malformed: errors.New("too")}
		must.Succeed(t, d.Decode(msg, &r))
		if msg[0] == 'R' {
			r.Missing = false // the outbox's key is, which is generated
		}
		if !reflect.DeepEqual(r, Result{}) {
			t.Errorf("%q gave %+v", msg[0], r)
		}
	}
	var r Result
	if err := d.Decode(commit(0x100, 0x130, 0), &r); err != nil ||
		r.Commit != (relay.Commit{LSN: 0x130, Start: 0x100}) {
		t.Errorf("commit of an empty transaction: %+v, %v", r.Commit, err)
	}
}

func TestTheDecoderKnowsWhetherItIsInATransaction(t *testing.T) {
	t.Parallel()
	d := New(config)
	var r Result
	for _, step := range []struct {
		msg []byte
		in  bool
	}{
		{logical(0, "p", "c"), false},
		{begin(0x100), true}, {relation(tableOID, columns...), true}, {row("1", "[]"), true},
		{commit(0x100, 0x130, 0), false},
		{begin(0x200), true}, {commit(0x200, 0x230, 0), false},
	} {
		must.Succeed(t, d.Decode(step.msg, &r))
		if d.InTransaction() != step.in {
			t.Errorf("after %q: InTransaction is %v", step.msg[0], d.InTransaction())
		}
	}
}

func TestMessagesOutOfPlaceAreErrors(t *testing.T) {
	t.Parallel()
	rel := relation(tableOID, columns...)
	in := func(msgs ...[]byte) [][]byte { return append([][]byte{begin(0x100), rel}, msgs...) }
	for name, c := range map[string]struct {
		msgs [][]byte
		want string
	}{
		"empty":            {[][]byte{{}}, "empty"},
		"unknown":          {[][]byte{{'Z'}}, "not a message of protocol version 1"},
		"stream start":     {[][]byte{{'S', 0, 0, 0, 1, 1}}, "not a message of protocol version 1"},
		"begin twice":      {[][]byte{begin(0x100), begin(0x200)}, "inside a transaction"},
		"row outside":      {[][]byte{row("1", "[]")}, "outside of a transaction"},
		"commit outside":   {[][]byte{commit(0x100, 0x130, 0)}, "outside of a transaction"},
		"relation outside": {[][]byte{rel}, "outside of a transaction"},
		"tick outside": {[][]byte{logical(1, relay.HeartbeatPrefix, "")},
			"outside of a transaction"},
		"other commit":      {in(commit(0x108, 0x130, 0)), "not the one that Begin announced"},
		"commit flags":      {in([]byte("C\x01" + string(commit(0x100, 0x130, 0)[2:]))), "flags"},
		"end before commit": {in(commit(0x100, 0x100, 0)), "not after the commit LSN"},
		"commits in disorder": {in(commit(0x100, 0x130, 0), begin(0xE0), commit(0xE0, 0xF0, 0)),
			"not after that of the commit before, 0/130"},
		"same commit again": {in(commit(0x100, 0x130, 0), begin(0x100), commit(0x100, 0x130, 0)),
			"not after that of the commit before"},
		"row before relation": {[][]byte{begin(0x100), row("1", "[]")}, "before its Relation"},
		"too few columns": {in(insert(tableOID, txt("x"))),
			"1 columns where the Relation message had 6"},
		"unchanged value":       {in(insert(tableOID, toast, null, null, null, null, null)), "unchanged"},
		"unchanged, other":      {in(insert(1, toast)), "unchanged"},
		"unknown kind of value": {in(insert(1, val{kind: 'x'})), "unknown kind 'x'"},
		"not a new row":         {in(append([]byte{'I', 0, 0, 0, 1, 'K'}, 0, 0)), "unknown part 'K'"},
		"delete of a new row":   {in(deletion(1, 'N')), "unknown part 'N'"},
		"old row twice":         {in(append(updated(1, 'K')[:8], 'X')), "unknown part 'X'"},
		"message flags":         {in(logical(2, "p", "")), "flags"},
		"trailing byte":         {[][]byte{append(begin(0x100), 0)}, "goes on after its end"},
		"trailing in row":       {in(append(row("1", "[]"), 0)), "goes on after its end"},
		"columns of a relation": {in(append(relation(1)[:len(relation(1))-2], 0xFF, 0xFF)), "65535 columns"},
		"columns of a row":      {in([]byte{'I', 0, 0, 0, 1, 'N', 0xFF, 0xFF}), "65535 columns"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := decodeAll(config, c.msgs...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if outbox.ClassOf(err) != outbox.Transient || !strings.HasPrefix(err.Error(), "pgoutput: ") {
				t.Errorf("%v: %v", outbox.ClassOf(err), err)
			}
		})
	}
}

// Every message, cut at every place, is an error: none is understood in part.
func TestAMessageThatIsCutIsAnError(t *testing.T) {
	t.Parallel()
	for _, msg := range [][]byte{
		commit(0x100, 0x130, 0), origin("upstream"), relation(tableOID, columns...), relation(1, columns...),
		typeMessage(16400, "mood"),
		row("1", "[]"), insert(1, txt("x"), null, bin("y")), updated(1, 0, txt("x")), updated(1, 'K', toast),
		deletion(1, 'O', null),
		truncate(1, 2), logical(1, relay.HeartbeatPrefix, ""), logical(1, "p", "content"),
		logical(0, "p", "content"),
	} {
		for n := range len(msg) {
			d := New(config)
			var r Result
			for _, before := range [][]byte{begin(0x100), relation(tableOID, columns...)} {
				must.Succeed(t, d.Decode(before, &r))
			}
			if err := d.Decode(msg[:n], &r); err == nil {
				t.Errorf("%q of %d bytes passes with %d", msg[0], len(msg), n)
			}
			if !reflect.DeepEqual(r, Result{}) {
				t.Errorf("%q of %d bytes, cut to %d: %+v", msg[0], len(msg), n, r)
			}
		}
	}
	for n := range len(begin(0x100)) {
		if _, err := decodeAll(config, begin(0x100)[:n]); err == nil {
			t.Errorf("Begin passes with %d bytes", n)
		}
	}
}

// A length or a count is a claim: what it claims beyond the message is never made room for.
func TestClaimsAreNotBelieved(t *testing.T) {
	row := append(insert(tableOID, null, null, null, null)[:8], 'n', 'n', 'n', 'n', 't', 0x7F, 0xFF, 0xFF,
		0xFF)
	row = append(row[:6], append([]byte{0, 6}, row[8:]...)...)
	for _, msg := range [][]byte{
		row,
		append(logical(1, "p", "")[:len(logical(1, "p", ""))-4], 0xFF, 0xFF, 0xFF, 0xFF),
		{'T', 0xFF, 0xFF, 0xFF, 0xFF, 0},
		{'T', 0x40, 0, 0, 0, 0},
	} {
		if _, err := decodeAll(config, begin(0x100), relation(tableOID, columns...), msg); err == nil ||
			!strings.Contains(err.Error(), "in the middle") {
			t.Errorf("%q: %v", msg[0], err)
		}
	}
}

func TestAnErrorNamesItsMessageAndPosition(t *testing.T) {
	t.Parallel()
	_, err := decodeAll(config, begin(0x16B3748), relation(tableOID, columns...), row("1", "[]")[:20])
	for _, want := range []string{"Insert", "0/16B3748", "of 20"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
}

func TestAfterAnErrorEachCallGivesTheSame(t *testing.T) {
	t.Parallel()
	d := New(config)
	var r Result
	first := d.Decode([]byte{'Z'}, &r)
	if err := d.Decode(begin(0x100), &r); first == nil || err != first {
		t.Errorf("after %v comes %v", first, err)
	}
}

func TestTooManyExtraColumns(t *testing.T) {
	t.Parallel()
	cfg := config
	cfg.Extra = make([]string, relay.MaxExtra+1)
	if _, err := decodeAll(cfg, begin(0x100)); outbox.ClassOf(err) != outbox.Usage {
		t.Error(err)
	}
}
