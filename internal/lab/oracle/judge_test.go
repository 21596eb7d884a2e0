package oracle

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// script is a WAL as test_decoding prints it: each item is a transaction, lines separated by semicolons; the
// n-th ends at 0/n00.
func script(t *testing.T, s Source, transactions ...string) *Truth {
	t.Helper()
	r := NewReader(s)
	for i, tx := range transactions {
		lines := []string{"BEGIN"}
		for line := range strings.SplitSeq(tx, ";") {
			switch kind, rest, _ := strings.Cut(line, " "); kind {
			case "insert": // id doc actor counter
				w := strings.Fields(rest)
				n, err := strconv.Atoi(w[3])
				must.Succeed(t, err)
				lines = append(lines,
					fmt.Sprintf(
						`table public.outbox: INSERT: id[text]:'%s' doc_id[text]:'%s' actor_id[text]:'%s' counter[bigint]:%d `+
							`seq_key[text]:'%s:%020d' payload[jsonb]:'{"n": "%s"}'`, w[0], w[1], w[2], n,
						w[2], n,
						w[0]))
			case "message": // prefix content
				prefix, content, _ := strings.Cut(rest, " ")
				lines = append(lines, fmt.Sprintf("message: transactional: 1 prefix: %s, sz: %d content:%s",
					prefix, len(content), content))
			default:
				lines = append(lines, line)
			}
		}
		lsn := LSN(i+1) << 8
		// a millisecond apart
		lines = append(lines, fmt.Sprintf("COMMIT (at 2026-11-21 17:40:26.%03d+00)", i+1))
		for _, l := range lines {
			must.Succeed(t, r.line(lsn, []byte(l)))
		}
	}
	return r.Truth()
}

// stream is what an outflow publishes.
func stream(t *testing.T, truth *Truth, cfg Config) (all []*Message) {
	t.Helper()
	x, err := truth.expect(cfg)
	must.Succeed(t, err)
	for i := range x.messages {
		e := &x.messages[i]
		m := &Message{Subject: e.subject(), Header: nats.Header{packedHeader: {x.header(e)}},
			Data: []byte(e.Head)}
		for _, l := range e.Mapped {
			name, v, _ := strings.Cut(l, ": ")
			m.Header[name] = []string{v}
		}
		all = append(all, m)
	}
	return all
}

// judgeOf numbers the messages and judges them. Removed is how many are gone before the first.
func judgeOf(t *testing.T, truth *Truth, cfg Config, all []*Message, removed int) Judgement {
	t.Helper()
	c, err := newCase(truth, cfg)
	must.Succeed(t, err)
	for i, published := range all {
		m := &Message{Seq: uint64(removed + i + 1), Subject: published.Subject, Data: published.Data,
			cut: published.cut}
		m.Header = nats.Header{expectedHeader: {fmt.Sprint(removed + i)}}
		for name, values := range published.Header {
			m.Header[name] = values
		}
		if m.Header.Get(packedHeader) != "" {
			m.Outflow, m.Problem = ParseHeader(m.Header.Get(packedHeader))
		}
		c.add(m)
	}
	return c.judgement(removed)
}

func counts(j Judgement) string {
	return fmt.Sprintf("missing %d repeated %d changed %d header %d order %d aborted %d foreign %d",
		j.Missing, j.Repeated, j.Changed, j.Header, j.OutOfOrder, j.Aborted, j.Foreign)
}

var eight = []string{
	"insert e1 doc ann 1;insert e2 doc ann 2", "insert e3 doc ben 1",
	"insert e4 other ann 1;insert e5 other ann 2", "insert e6 doc ann 3",
	"insert e7 doc ann 4;insert e8 doc ben 2",
}

// Each fault is found, counted as what it is, and said precisely.
func TestJudgeFindsEachFault(t *testing.T) {
	t.Parallel()
	cfg := Config{Slot: "outflow", Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}
	truth := script(t, Source{}, eight...)
	header := func(old, with string) func([]*Message) []*Message { // of message 6: e6, at 0/400-0
		return func(all []*Message) []*Message {
			v := all[5].Header.Get(packedHeader)
			if !strings.Contains(v, old) {
				t.Fatalf("no %q in %q", old, v)
			}
			all[5].Header = nats.Header{packedHeader: {strings.Replace(v, old, with, 1)}}
			return all
		}
	}
	const none = "missing 0 repeated 0 changed 0 header 0 order 0 aborted 0 foreign 0"
	one := func(what string) string { return strings.Replace(none, what+" 0", what+" 1", 1) }
	for name, test := range map[string]struct {
		fault func([]*Message) []*Message
		want  string
		says  []string
	}{
		"none": {func(all []*Message) []*Message { return all }, none, nil},
		"drop": {func(all []*Message) []*Message { return slices.Delete(all, 2, 3) }, one("missing"),
			[]string{"sequence 3", "id=e4", "message 3 of the WAL", "id=e3"}},
		"drop two": {func(all []*Message) []*Message { return slices.Delete(all, 2, 4) },
			strings.Replace(none, "missing 0", "missing 2", 1), nil},
		"drop the last": {func(all []*Message) []*Message { return all[:7] }, one("missing"),
			[]string{"message 8 of the WAL is missing", "id=e8"}},
		"repeat": {func(all []*Message) []*Message { return slices.Insert(all, 3, all[2]) },
			one("repeated"), []string{"sequence 4", "repeats", "event e3"}},
		"repeat later": {func(all []*Message) []*Message { return append(all, all[0]) }, one("repeated"),
			[]string{"sequence 9", "no message any more"}},
		"swap": {func(all []*Message) []*Message { all[3], all[4] = all[4], all[3]; return all },
			one("order"), []string{"sequence 4", "wrong place", "id=e5", "id=e4"}},
		"early": {func(all []*Message) []*Message { return append([]*Message{all[7]}, all[:7]...) },
			one("order"), []string{"sequence 1", "id=e8", "id=e1"}},
		"late": {func(all []*Message) []*Message { return append(all[1:8:8], all[0]) }, one("order"),
			[]string{"sequence 1", "id=e2", "id=e1"}},
		"data": {func(all []*Message) []*Message { all[5].Data = []byte(`{"n": "e7"}`); return all },
			one("changed"),
			[]string{"sequence 6", "other data", `"{\"n\": \"e7\"}"`, `"{\"n\": \"e6\"}"`}},
		"subject": {func(all []*Message) []*Message { all[5].Subject = "outbox.dod"; return all },
			one("changed"), []string{"sequence 6", `"outbox.dod", want "outbox.doc"`}},
		"header v":    {header("v=1", "v=2"), one("header"), []string{"sequence 6", "v=2", "want", "v=1"}},
		"header lsn":  {header("lsn=0/400", "lsn=0/401"), one("header"), nil},
		"another lsn": {header("lsn=0/400", "lsn=0/200"), one("header"), nil},
		"header i":    {header(" i=0", " i=1"), one("header"), nil},
		"header n":    {header(" n=0", " n=1"), one("header"), nil},
		"header of":   {header(" of=1", " of=2"), one("header"), nil},
		"header due":  {header("due=0/400", "due=0/300"), one("header"), nil},
		"header thru": {header("thru=0/400", "thru=0/500"), one("header"), nil},
		"header pull": {header("pull=0", "pull=1"), one("header"), nil},
		"header tl":   {header("tl=1", "tl=2"), one("header"), nil},
		"header sort": {header("sort=s", "sort=c"), one("header"), nil},
		"header id":   {header("id=e6", "id=e9"), one("header"), nil},
		"another id":  {header("id=e6", "id=e7"), one("header"), nil},
		"header key": {header("key=ann:00000000000000000003", "key=ann:00000000000000000004"),
			one("header"), nil},
		"header more": {header("key=ann", "more=1 key=ann"), one("header"), nil},
		"no number":   {header(" i=0", " i=x"), one("header"), nil},
		"other header": {func(all []*Message) []*Message {
			all[5].Header["Event-Type"] = []string{"x"}
			return all
		}, one("header"), []string{"further headers", "Event-Type: x"}},
		"message id": {func(all []*Message) []*Message {
			all[5].Header[msgIDHeader] = []string{"0/400-1"}
			return all
		}, one("header"), []string{"0/400-0"}},
		"lost before itself": {func(all []*Message) []*Message {
			all[5].Header[lostHeader] = []string{"6"}
			return all
		}, one("header"), []string{"Outflow-Lost"}},
		"dead letter": {func(all []*Message) []*Message {
			all[5].Header[deadLetterHeader] = []string{"x"}
			return all
		}, one("changed"), []string{"dead letter"}},
		"aborted": {func(all []*Message) []*Message {
			return slices.Insert(all, 1, &Message{Subject: "outbox.doc", Data: []byte(`"x"`),
				Header: nats.Header{packedHeader: {
					"v=1 lsn=0/100 i=1 n=1 of=3 due=0/100 thru=0/100 pull=0 tl=1 sort=s id=gone key=ann:1"}}})
		}, one("aborted"), []string{"sequence 2", "no committed transaction", "id=gone"}},
		"foreign": {func(all []*Message) []*Message {
			return slices.Insert(all, 4, &Message{Subject: "outbox.doc", Data: []byte("{}"),
				Header: nats.Header{}})
		},
			one("foreign"), []string{"sequence 5", "no Outflow header"}},
		"nothing": {func([]*Message) []*Message { return nil },
			strings.Replace(none, "missing 0", "missing 8", 1), []string{"message 1 of the WAL", "id=e1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := judgeOf(t, truth, cfg, test.fault(stream(t, truth, cfg)), 0)
			if got := counts(j); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
			if ok := name == "none"; j.OK() != ok || (j.First == "") != ok {
				t.Errorf("OK %v: %s", j.OK(), j.String())
			}
			for _, s := range test.says {
				if !strings.Contains(j.String(), s) {
					t.Errorf("%s\ndoes not say %q", j.String(), s)
				}
			}
		})
	}
}

// Each message names its home, and has the id that it has from every cluster, or none does.
func TestTheJudgeKnowsWhoseEventsTheyAre(t *testing.T) {
	t.Parallel()
	truth := script(t, Source{}, eight...)
	plain := Config{Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}
	homes := plain
	homes.Home = 3
	named := func() []*Message {
		all := stream(t, truth, plain)
		for i, m := range all {
			h, err := ParseHeader(m.Header.Get(packedHeader))
			must.Succeed(t, err)
			m.Header[originHeader] = []string{"3"}
			m.Header[msgIDHeader] = []string{fmt.Sprintf("3-%v-%s", h.Pos, idSums[i])}
		}
		return all
	}
	if j := judgeOf(t, truth, homes, named(), 0); !j.OK() {
		t.Error(j.String())
	}
	if j := judgeOf(t, truth, plain, named(), 0); j.OK() || j.Header != 8 {
		t.Errorf("nobody's: %s", j.String())
	}
	if j := judgeOf(t, truth, homes, stream(t, truth, plain), 0); j.OK() || j.Header != 8 {
		t.Errorf("without the headers: %s", j.String())
	}
	for _, change := range []struct{ name, value string }{
		{originHeader, ""}, {originHeader, "2"}, {msgIDHeader, ""}, {msgIDHeader, "0/400-0"},
		{msgIDHeader, "2-0/400-0-" + idSums[5]}, {msgIDHeader, "3-0/400-1-" + idSums[5]},
		{msgIDHeader, "3-0/400-0-" + idSums[6]},
	} {
		all := named()
		if all[5].Header.Set(change.name, change.value); change.value == "" {
			all[5].Header.Del(change.name)
		}
		j := judgeOf(t, truth, homes, all, 0)
		if j.OK() || j.Header != 1 || !strings.Contains(j.First, change.name) {
			t.Errorf("%s %q: %s", change.name, change.value, j.String())
		}
	}
}

// idSums begin the SHA-256 of e1 to e8, by sha256sum.
var idSums = []string{"8b5cc4df7eec7d32", "ac0f09c0f8bf5e7a", "cef7fc13a3818093", "449777124b1466a8",
	"43700797e2f9d4ad", "f33422b95e3b9831", "f3e2e400523c5068", "c33352e36a529830"}

// The message's own sequence stands in its header.
func TestTheJudgeReadsTheSequenceOfTheHeader(t *testing.T) {
	t.Parallel()
	truth, cfg := script(t, Source{}, eight...), Config{Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}
	c, err := newCase(truth, cfg)
	must.Succeed(t, err)
	for i, m := range stream(t, truth, cfg) {
		m.Seq = uint64(i + 1)
		m.Header[expectedHeader] = []string{"0"}
		c.add(m)
	}
	if j := c.judgement(0); j.Header != 7 || !strings.Contains(j.First, `"0", want 1`) {
		t.Error(j.String())
	}
}

func TestTheJudgeToleratesWhatRetentionRemoved(t *testing.T) {
	t.Parallel()
	set := Settings{0, BySeqKey, 100, 1 << 20, Gap{}}
	truth := script(t, Source{}, eight...)
	all := func() []*Message { return stream(t, truth, Config{Settings: set}) }

	removed := Config{Settings: set, Removed: true}
	if j := judgeOf(t, truth, removed, all()[3:], 3); !j.OK() || j.Removed != 3 {
		t.Errorf("retention: %s", j.String())
	}
	if j := judgeOf(t, truth, removed, nil, 8); !j.OK() || j.Removed != 8 {
		t.Errorf("retention of everything: %s", j.String())
	}
	if j := judgeOf(t, truth, removed, all()[3:], 2); j.OK() || j.Missing != 1 || j.Removed != 2 {
		t.Errorf("less than is missing was ever there: %s", j.String())
	}
	if j := judgeOf(t, truth, removed, slices.Delete(all()[3:], 1, 2), 3); j.OK() || j.Missing != 1 {
		t.Errorf("retention and a loss: %s", j.String())
	}

	dead := all()
	dead[2].Subject, dead[2].Data, dead[2].Header[deadLetterHeader] =
		"dead", []byte("{}"), []string{"too_large"}
	if j := judgeOf(t, truth, Config{Settings: set, DeadLetters: true}, dead, 0); !j.OK() ||
		j.DeadLetters != 1 {
		t.Errorf("a dead letter: %s", j.String())
	}

	// A repair that has published transactions 3 and 4 in its own order; e7 and e8 then come as usual.
	repaired := all()
	for i, at := range []int{5, 4, 3} {
		m := *all()[at]
		h, err := ParseHeader(m.Header.Get(packedHeader))
		must.Succeed(t, err)
		h.Pos, h.Due, h.N, h.Of = Position{0x450, uint32(repairedIndex + i)}, 0x450, i, 3
		m.Header = nats.Header{packedHeader: {h.String()}}
		repaired[3+i] = &m
	}
	for _, cfg := range []Config{{Settings: set, Repaired: true},
		{Settings: set, Repaired: true, Resets: []Reset{{At: 0x450}}}} {
		if j := judgeOf(t, truth, cfg, repaired, 0); !j.OK() || j.Repaired != 3 {
			t.Errorf("a repair: %s", j.String())
		}
	}
	changed := *repaired[4]
	changed.Data = []byte("{}")
	if j := judgeOf(t, truth, Config{Settings: set, Repaired: true},
		append(append(slices.Clone(repaired[:4]), &changed), repaired[5:]...), 0); j.OK() || j.Changed != 1 {
		t.Errorf("a repair that changes a message: %s", j.String())
	}
	if j := judgeOf(t, truth, Config{Settings: set}, repaired, 0); j.OK() {
		t.Errorf("a repair that is not tolerated: %s", j.String())
	}
}

// What a reset leaves without a window has to come by repair.
func TestWhatAResetLeavesComesByRepair(t *testing.T) {
	t.Parallel()
	cfg := Config{Settings: DefaultSettings, Repaired: true,
		Resets: []Reset{{At: 0x280, Settings: &Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}}}
	truth := script(t, Source{}, eight...)
	all := stream(t, truth, cfg)
	if len(all) != 5 {
		t.Fatalf("%d messages after the reset, want 5", len(all))
	}
	if j := judgeOf(t, truth, cfg, all, 0); j.OK() || j.Missing != 3 ||
		!strings.Contains(j.First, "event e1") {
		t.Errorf("without the repair: %s", j.String())
	}
	var by []*Message
	for i, e := range truth.commits[0].events {
		h := Header{Pos: Position{0x280, uint32(repairedIndex + i)}, ID: e.ID}
		by = append(by, &Message{Subject: e.subject(), Data: []byte(e.Head),
			Header: nats.Header{packedHeader: {h.String()}}})
	}
	if j := judgeOf(t, truth, cfg, append(by, all...), 0); j.OK() || j.Missing != 1 || j.Repaired != 2 {
		t.Errorf("with a part of the repair: %s", j.String())
	}
	e := truth.commits[1].events[0]
	h := Header{Pos: Position{0x280, repairedIndex + 2}, ID: e.ID}
	by = append(by, &Message{Subject: e.subject(), Data: []byte(e.Head),
		Header: nats.Header{packedHeader: {h.String()}}})
	if j := judgeOf(t, truth, cfg, append(by, all...), 0); !j.OK() || j.Repaired != 3 {
		t.Errorf("with the repair: %s", j.String())
	}
}

// The stream is what the rules make of the WAL and the cuts: one more, one less or another one is seen.
func TestTheJudgeKnowsTheCuts(t *testing.T) {
	t.Parallel()
	truth := script(t, Source{}, eight...)
	with := func(cuts ...LSN) Config {
		return Config{Settings: Settings{time.Hour, BySeqKey, 100, 1 << 20, Gap{}}, Cuts: cuts}
	}
	all := stream(t, truth, with(0x250, 0x500)) // between two commits, and at the last
	if v := all[2].Header.Get(packedHeader); len(all) != 8 || !strings.HasPrefix(v,
		"v=1 lsn=0/200 i=0 n=2 of=3 due=0/250 thru=0/250 pull=0 ") {
		t.Fatalf("%d messages, the third is %s", len(all), v)
	}
	if j := judgeOf(t, truth, with(0x050, 0x250, 0x250, 0x500), all, 0); !j.OK() || j.Windows != 2 {
		t.Errorf("one before the first commit, and one twice: %s", j.String())
	}
	for name, cuts := range map[string][]LSN{"one less": {0x500}, "one more": {0x100, 0x250, 0x500},
		"an earlier one": {0x1FF, 0x500}, "another LSN": {0x250, 0x501}, "the last is missing": {0x250}} {
		if j := judgeOf(t, truth, with(cuts...), all, 0); j.OK() {
			t.Errorf("%s: %s", name, j.String())
		}
	}
	reset := with(0x250)
	reset.Resets = []Reset{{At: 0x280}}
	for _, cfg := range []Config{with(0x500, 0x250), reset} {
		if _, err := truth.expect(cfg); err == nil {
			t.Errorf("cuts at %v with %d resets are judged", cfg.Cuts, len(cfg.Resets))
		}
	}
}

// The stream is what the rules make of the WAL, without what was left to others: one that was published all
// the same, one that is missing and another list are seen.
func TestTheJudgeKnowsWhatIsLeftToOthers(t *testing.T) {
	t.Parallel()
	truth := script(t, Source{}, eight...)
	with := func(left ...Left) Config {
		return Config{Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}, Left: left}
	}
	whole, cfg := stream(t, truth, with()), with(Left{Due: 0x300, To: 0x400}, Left{Due: 0x500, To: 0x500})
	all := stream(t, truth, cfg) // without e5, e6 and e8
	if j := judgeOf(t, truth, cfg, all, 0); !j.OK() || j.Left != 3 || len(all) != 5 {
		t.Fatalf("%d messages: %s", len(all), j.String())
	}
	if j := judgeOf(t, truth, cfg, whole, 0); j.Repeated != 3 || j.Missing != 0 || j.OK() {
		t.Errorf("what was left is there: %s", j.String())
	}
	if j := judgeOf(t, truth, cfg, all[:4], 0); j.Missing != 1 || j.OK() {
		t.Errorf("one more is missing: %s", j.String())
	}
	for name, cfg := range map[string]Config{"nothing": with(), "less": with(Left{Due: 0x300, To: 0x400}),
		"more":                    with(Left{Due: 0x300, To: 0x400}, Left{Due: 0x400, N: 1, To: 0x500}),
		"from an earlier message": with(Left{Due: 0x200, N: 1, To: 0x400}, Left{Due: 0x500, To: 0x500}),
	} {
		if j := judgeOf(t, truth, cfg, all, 0); j.OK() {
			t.Errorf("%s: %s", name, j.String())
		}
	}
	cfg.Settings = Settings{Sort: ByGap, MaxEvents: 100, MaxBytes: 1 << 20, Gap: Gap{Memory: 10}}
	if _, err := truth.expect(cfg); err == nil {
		t.Error("gap mode is judged")
	}
}

// Transactions are inputs as the rules say.
func TestTransactionsAreInputsAsTheRulesSay(t *testing.T) {
	t.Parallel()
	const to = "message outflow.settings v=1 slot=%s horizon=%s sort=commit max_events=9 max_bytes=999"
	change := func(slot, horizon string) string { return fmt.Sprintf(to, slot, horizon) }
	const aside = "v=1 slot=outflow horizon=0s sort=commit max_events=9 max_bytes=999"
	for name, test := range map[string]struct {
		between string // a transaction after one with an event, under a horizon that never ends
		window  bool   // it closes the event's window
	}{
		// but for the limits and horizons there is nothing to close it
		"a tick":          {"message outflow.tick ", false},
		"horizon 0":       {change("outflow", "0s"), true},
		"of another slot": {change("other", "0s"), false},
		"malformed":       {"message outflow.settings v=1 slot=outflow horizon=0s", false},
		"several: the last": {change("outflow", "1h") + ";" + change("outflow", "0s") + ";" +
			change("other", "1h"), true},
		"several: not the first": {change("outflow", "0s") + ";" + change("outflow", "1h"), false},
		"the last malformed":     {change("outflow", "0s") + ";message outflow.settings v=1", true},
		"another prefix": {strings.Replace(change("outflow", "0s"), "outflow.settings",
			"outflow.setting", 1), false},
		"beside an event of the table": {change("outflow", "0s") + ";insert e2 doc ann 2", false},
		"beside another table": {change("outflow", "0s") +
			";table public.other: INSERT: id[text]:'x'", true},
		"not transactional": {fmt.Sprintf("message: transactional: 0 prefix: outflow.settings, "+
			"sz: %d content:%s", len(aside), aside), false},
	} {
		truth := script(t, Source{}, "insert e1 doc ann 1", test.between)
		x, err := truth.expect(Config{Slot: "outflow", Settings: Settings{24 * 3600e9, BySeqKey, 100,
			1 << 20, Gap{}}})
		must.Succeed(t, err)
		if got := len(x.messages) == 1; got != test.window {
			t.Errorf("%s: closes the window: %v", name, got)
		}
		if test.window && x.messages[0].window.sort != ByCommit {
			t.Errorf("%s: the sort of before", name)
		}
	}
	newer := script(t, Source{}, "insert e1 doc ann 1", "message outflow.settings v=2 slot=outflow x")
	if x, err := newer.expect(Config{Slot: "outflow"}); err != nil || len(x.held) != 1 {
		t.Errorf("a later version: %v", err)
	}
	tick := script(t, Source{}, "insert e1 doc ann 1", "message outflow.tick x;"+change("other", "0s"))
	if x, err := tick.expect(Config{Settings: Settings{1e6, BySeqKey, 100, 1 << 20, Gap{}}}); err != nil ||
		len(x.messages) != 1 || x.messages[0].window.due != 0x200 {
		t.Errorf("a tick a horizon later: %v", err)
	}
}

// A table with columns, subject and headers of its own.
func TestATableMayHaveItsOwnColumnsAndSubject(t *testing.T) {
	t.Parallel()
	s := Source{
		Tables: []string{`public."P 1"`, "public.p2"}, Columns: Columns{ID: "no", Doc: "topic", Actor: "who",
			Counter: "c", Payload: "body"},
		Subject: func(r Row) string {
			return "events." + Token(r.Text("topic")) + "." + Token(r.Text("kind"))
		},
		Headers: map[string]string{"Event-Type": "kind", "A": "nothing"},
	}
	truth := script(t, s, `table public."P 1": INSERT: no[integer]:1 topic[text]:'a b' kind[text]:'x`+"\n"+
		`y' nothing[text]:null body[bytea]:'\x6869' who[text]:'w' c[integer]:7`,
		`table public.p2: INSERT: no[integer]:2 topic[text]:null kind[text]:'z' nothing[text]:'t' body[text]:'' who[text]:null c[integer]:7`,
		`table public.p3: INSERT: no[integer]:3`)
	if truth.Events != 2 || truth.Commits != 3 {
		t.Fatalf("%d events, %d transactions", truth.Events, truth.Commits)
	}
	cfg := Config{Unkeyed: true}
	all := stream(t, truth, cfg)
	h := all[0].Header
	if all[0].Subject != "events.a=20b.x=0Ay" || string(all[0].Data) != "hi" ||
		h.Get("Event-Type") != "x y" || h.Get("A") != "" ||
		!strings.HasSuffix(h.Get(packedHeader), "sort=c id=1 key=w:00000000000000000007") {
		t.Errorf("message 1: %+v", all[0])
	}
	if e := truth.commits[1].events[0]; !e.NullDoc || !e.NullKey || all[1].Subject != "events.=.z" ||
		all[1].Header.Get("A") != "t" {
		t.Errorf("message 2: %+v of %+v", all[1], e)
	}
	if j := judgeOf(t, truth, cfg, all, 0); !j.OK() {
		t.Error(j.String())
	}
	all[1].Header["A"] = []string{"T"}
	if j := judgeOf(t, truth, cfg, all, 0); j.Header != 1 {
		t.Error(j.String())
	}
}

// Lines that can't be are errors, and a transaction that comes again after a crash counts once.
func TestLinesThatCannotBeAreErrors(t *testing.T) {
	t.Parallel()
	for _, lines := range [][]string{
		{"COMMIT (at 2026-11-21 17:40:26+00)"}, {"BEGIN", "BEGIN"}, {"BEGIN", "COMMIT"},
		{"table public.outbox: INSERT: id[text]:'x'"},
		{"BEGIN", "table public.outbox: INSERT: (no-tuple-data)"}, {"BEGIN", "message: unknown"},
	} {
		r := NewReader(Source{})
		var err error
		for _, l := range lines {
			if err == nil {
				err = r.line(1, []byte(l))
			}
		}
		if err == nil {
			t.Errorf("%q is taken", lines)
		}
	}
	r := NewReader(Source{})
	for range 2 {
		for _, l := range []string{"BEGIN", "table public.outbox: INSERT: id[text]:'x'",
			"table public.outbox: DELETE: id[text]:'x'", "COMMIT (at 2026-11-21 17:40:26+00)"} {
			must.Succeed(t, r.line(0x100, []byte(l)))
		}
	}
	if r.Truth().Events != 1 || r.Truth().Commits != 1 {
		t.Errorf("%+v", r.Truth())
	}
}

// A cut is no foreign message, and must be behind the one before it.
func TestJudgeKnowsCuts(t *testing.T) {
	t.Parallel()
	cfg := Config{Slot: "outflow", Settings: Settings{0, BySeqKey, 100, 1 << 20, Gap{}}}
	truth := script(t, Source{}, eight...)
	at := func(lsn string) *Message {
		m := &Message{Subject: cutSubject, Header: nats.Header{cutHeader: {"v=1 sys=7 tl=1 lsn=" + lsn +
			" epoch=2 owner=2 later=1"}}}
		var err error
		m.cut, err = parseCut(m.Header.Get(cutHeader))
		must.Succeed(t, err)
		return m
	}
	all := stream(t, truth, cfg)
	good := slices.Insert(slices.Clone(all), 2, at("0/1A0"))
	good = append(good, at("0/501"))
	if j := judgeOf(t, truth, cfg, good, 0); !j.OK() || j.Cuts != 2 ||
		!strings.Contains(j.String(), "cuts 2") {
		t.Errorf("%v", &j)
	}
	j := judgeOf(t, truth, cfg, append(slices.Clone(good), at("0/501")), 0)
	if j.OK() || j.Header != 1 || !strings.Contains(j.First, "cut at 0/501") {
		t.Errorf("one that goes back: %v", &j)
	}
	for _, wrong := range []string{"", "v=2 sys=7 tl=1 lsn=0/1 epoch=2 owner=2",
		"v=1 sys=18446744073709551616 tl=1 lsn=0/1 epoch=2 owner=2", "v=1 sys=7 tl=1 lsn=0/0 epoch=2 owner=2",
		"v=1 sys=7 tl=1 lsn=0/1 epoch=2 owner=65", "v=1 sys=7 tl=1 lsn=0/1 epoch=2 owner=2x"} {
		if _, err := parseCut(wrong); err == nil {
			t.Errorf("%q is taken for a cut", wrong)
		}
	}
}
