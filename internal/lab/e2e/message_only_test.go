package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func emit(t *testing.T, conn *pgx.Conn, contents ...string) {
	t.Helper()
	for _, c := range contents {
		mustExec(t, conn, emitEvent, c)
	}
}

// TestMessageOnly: without any table everything works that needs none, from init to a repair; what needs one says so.
func TestMessageOnly(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		testMessageOnly(t, pg)
	})
}

func testMessageOnly(t *testing.T, pg *pgserver.Server) {
	ns := natstest.Server(t)
	o, conn, url := installation(t, pg, ns.URL(), "nothing", "SOURCE=message", "REORDER_HORIZON=0s",
		"SUBJECT=app.{tenant}.{doc_id}", "HEADERS=Type=event_type,N=counter")
	out, _, code := o.exec("init", "--print")
	if code != 0 || strings.Contains(out, "TABLE") || !strings.Contains(out, `CREATE PUBLICATION "`+o.slot+`" WITH`) {
		t.Errorf("init --print: exit code %d\n%s", code, out)
	}
	mustExec(t, conn, "CREATE PUBLICATION "+o.slot+"_always")
	o.init()
	o.init() // and again
	set := oracle.DefaultSettings
	set.Horizon = 0
	j := o.judgeOf(oracle.OfMessage, url, set)
	j.reader = oracle.NewReader(oracle.Source{
		Slot: o.slot + "_judge", Events: oracle.OfMessage, Headers: map[string]string{"Type": "event_type", "N": "counter"},
		Subject: func(r oracle.Row) string {
			return "app." + oracle.Token(r.Text("tenant")) + "." + oracle.Token(r.Text("doc_id"))
		},
	})
	o.start()
	o.ready()
	emit(t, conn,
		`{"doc_id":"a b","actor_id":"anna","counter":7,"id":"one","headers":{"event_type":"moved","tenant":"x.y","other":"-"},"payload": {"n":  1.10} }`,
		`{"doc_id":"c","seq_key":"k","payload":"\u00e9"}`)
	mustExec(t, conn, "SELECT pg_logical_emit_message(false, 'outflow.event', $1::text)", `{"doc_id":"no","seq_key":"k","payload":1}`)
	j.mustAgree(ns.URL())
	all := messages(t, js(t, ns.URL()), o.stream)
	if len(all) != 2 {
		t.Fatalf("%d messages", len(all))
	}
	if m := all[0]; m.Subject != "app.x=2Ey.a=20b" || string(m.Data) != `{"n":  1.10}` || m.Outflow.ID != "one" || m.Outflow.Key != "anna:00000000000000000007" ||
		m.Header.Get("Type") != "moved" || m.Header.Get("N") != "7" {
		t.Errorf("%+v %s", m, m.Data)
	}
	if m := all[1]; m.Subject != "app.=.c" || string(m.Data) != `"\u00e9"` || m.Outflow.ID != "" || m.Outflow.Key != "k" || m.Header.Get("Type") != "" {
		t.Errorf("%+v %s", m, m.Data)
	}
	o.counted(`outflow_ignored_total{what="not_transactional"}`, 1)
	o.mustSay("run", o.log.String(), "not written transactionally")
	eventually(t, "the page", func() error {
		if _, text := o.get("/"); !strings.Contains(text, "logical messages →") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	o.healthy("ok")
	var st struct{ Health, Source, Table string }
	out, _, _ = o.exec("status", "--json")
	if err := json.Unmarshal([]byte(out), &st); err != nil || st.Source != "message" || st.Table != "" {
		t.Errorf("status: %v %s", err, out)
	}

	// Rows of a table that somebody takes for the outbox are no events; they are noticed if the publication has them.
	mustExec(t, conn, "CREATE TABLE outbox (doc_id text)")
	mustExec(t, conn, "ALTER PUBLICATION "+o.slot+" ADD TABLE outbox")
	mustExec(t, conn, "INSERT INTO outbox VALUES ('d')")
	o.counted(`outflow_ignored_total{what="row"}`, 1)

	// One that can't be published stops it, and says where and why; as a dead letter it holds nothing up.
	emit(t, conn, `{"doc_id":"d","id":"bad \"one\"","actor_id":"a","counter":-1,"payload":1}`, `{"doc_id":"e","payload":1}`, `{"doc_id":"f","seq_key":"k","payload":1}`)
	o.ends(5, "logical message (outflow.event)", `id "bad \"one\""`, "at position", "counter is not a whole number", "docs/format.md", "dead_letter")
	out, errOut, code := o.exec("inspect", "--payload")
	if code != 0 || !strings.Contains(out, "(message)") || !strings.Contains(out, "bad: content: counter") {
		t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
	}
	o.set("SINK_ON_POISON=dead_letter")
	o.start()
	j.cfg.DeadLetters = true
	if v := j.mustAgree(ns.URL()); v.DeadLetters != 2 {
		t.Errorf("%+v", v)
	}
	letters := messages(t, js(t, ns.URL()), o.stream)[2:]
	for i, want := range []string{`{"reason":"undecodable","detail":"content: counter is not`, `{"reason":"null_seq_key","detail":"seq_key is NULL","doc_id":"e","position"`} {
		if !strings.HasPrefix(string(letters[i].Data), want) {
			t.Errorf("dead letter %d: %s, want %s...", i, letters[i].Data, want)
		}
	}
	o.log.Reset()
	if code := o.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
	out, errOut, code = o.exec("drain", "--timeout", patience.String())
	if code != 0 {
		t.Errorf("drain: exit code %d\n%s%s", code, out, errOut)
	}

	// No message is lost without a publication; but before 18 the server can't decode what other tables had meanwhile.
	mustExec(t, conn, "DROP PUBLICATION "+o.slot)
	o.fails(3, []string{"run"}, "publication", "does not exist", "outflow init")
	emit(t, conn, `{"doc_id":"g","seq_key":"k","payload":1}`)
	mustExec(t, conn, "INSERT INTO outbox VALUES ('d')")
	o.init()
	var version int
	must(t, conn.QueryRow(t.Context(), "SELECT current_setting('server_version_num')::int").Scan(&version))
	if version < 180000 {
		o.fails(3, []string{"run"}, "at this point of the WAL", "set publication to one that existed all the time")
		o.set("PUBLICATION=" + o.slot + "_always")
	}
	o.start()
	j.mustAgree(ns.URL())
	if code := o.term(); code != 0 {
		t.Errorf("stop: exit code %d", code)
	}
}

// TestSourceIsMapped: the source is part of the mapping. run with another one stops, init changes it when everything before is published,
// and from there on the new one rules.
func TestSourceIsMapped(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, _ := installation(t, pgtest.Server(t), ns.URL(), "remapped", "REORDER_HORIZON=0s")
	o.init()
	o.start()
	both := func(doc string) {
		t.Helper()
		tx, err := conn.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), insertRow, doc, "row", 1, "1")
		must(t, err)
		_, err = tx.Exec(t.Context(), emitEvent, content(doc, "message", 1, "1"))
		must(t, err)
		must(t, tx.Commit(t.Context()))
	}
	n := 0
	// turn goes over to another source; each transaction then gives so many events.
	turn := func(source string, events int, says ...string) {
		t.Helper()
		o.set("SOURCE=" + source)
		o.fails(3, []string{"init"}, "outflow is running")
		if code := o.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		o.fails(3, []string{"run"}, append(says, "source="+source, "outflow init")...)
		o.init()
		o.init()
		both(source)
		o.start()
		n += events
		awaitMessages(t, js(t, ns.URL()), o.stream, n)
		o.ready()
	}
	both("table")
	n++
	awaitMessages(t, js(t, ns.URL()), o.stream, n)
	o.ready()
	o.counted(`outflow_ignored_total{what="message"}`, 1)
	turn("both", 2, "source=table origin=own table=public.outbox")
	turn("message", 1, "source=both origin=own table=public.outbox")
	turn("table", 1, "source=message origin=own, ordered by key")
	turn("message", 1, "source=table origin=own table=public.outbox")
	mustExec(t, conn, "ALTER PUBLICATION "+o.slot+" DROP TABLE outbox") // of no account now
	both("message")
	n++
	awaitMessages(t, js(t, ns.URL()), o.stream, n)
	o.set("SOURCE=both")
	if code := o.term(); code != 0 {
		t.Fatalf("stop: exit code %d", code)
	}
	o.fails(3, []string{"init"}, "does not publish table public.outbox", "ADD TABLE")
	mustExec(t, conn, "ALTER PUBLICATION "+o.slot+" ADD TABLE outbox")
	o.init()
	o.start()
	both("both again")
	n += 2
	awaitMessages(t, js(t, ns.URL()), o.stream, n)
	var got []string
	for _, m := range messages(t, js(t, ns.URL()), o.stream) {
		got = append(got, strings.TrimPrefix(m.Subject, "outbox.")+" "+strings.Split(m.Outflow.Key, ":")[0])
	}
	want := []string{"table row", "both message", "both row", "message message", "table row", "message message", "message message", "both=20again message", "both=20again row"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// TestRepairWithoutTable: a gap that only a table could close is said to be one, and is passed only by who accepts in words that events
// are lost; a gap that needs no table is closed. With both sources the rows come back. A loss counts only when a second reading, 5 s
// later, agrees: so both sources do each step at the same time.
func TestRepairWithoutTable(t *testing.T) {
	slow(t)
	t.Parallel()
	ns := natstest.Server(t)
	type lossy struct {
		*faulty
		source             string
		want, missing      int // messages, rows
		record, look, done *repairing
		refused            []*repairing
		state              string
	}
	all := []*lossy{{source: "message"}, {source: "both"}}
	for _, l := range all {
		l.faulty = &faulty{js: js(t, ns.URL())}
		l.outflow, l.conn, l.url = installation(t, pgtest.Server(t), ns.URL(), "lossy", "SOURCE="+l.source, "REORDER_HORIZON=0s")
		l.init()
		l.start()
		emit(t, l.conn, content("a", "x", 1, "1"), content("a", "x", 2, "2"))
		l.want = 2
		if l.source == "both" {
			row(t, l.conn, "r", 1, "1")
			l.want++
		}
		awaitMessages(t, l.js, l.stream, l.want)
		if code := l.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		l.deleteRecord(t)
		l.record = l.repairing("--accept", "record_missing")
	}
	for _, l := range all {
		if r, stderr, code := l.record.wait(); code != 0 || r.Mode != "record" || !r.Repaired {
			t.Fatalf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		l.start()
		emit(t, l.conn, content("a", "x", 3, "3"))
		l.want++
		awaitMessages(t, l.js, l.stream, l.want)
		if code := l.term(); code != 0 {
			t.Fatalf("stop: exit code %d", code)
		}
		l.dropSlot(t)
		emit(t, l.conn, content("lost", "x", 1, "1"))
		if l.source == "both" {
			row(t, l.conn, "found", 1, "1")
			l.missing++
		}
		l.state = l.faulty.state(t)
		l.look = l.repairing()
		for _, words := range []string{"", "yes"} {
			l.refused = append(l.refused, l.repairing("--accept", "slot_missing", "--accept-loss", words))
		}
		l.log.Reset()
		l.start()
	}
	for _, l := range all {
		l.ends(4, "outflow repair", "can't be brought back")
		if r, stderr, code := l.look.wait(); code != 4 || r.Mode != "new-slot" || r.Missing != l.missing ||
			!strings.HasSuffix(r.Command, "--accept slot_missing --accept-loss 'message events'") {
			t.Errorf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		for _, refused := range l.refused {
			if _, stderr, code := refused.wait(); code != 2 || !strings.Contains(stderr, "source is "+l.source) || !strings.Contains(stderr, "--accept-loss 'message events'") {
				t.Errorf("%s: exit code %d: %s", l.source, code, stderr)
			}
		}
		if now := l.faulty.state(t); now != l.state {
			t.Errorf("%s: something was changed: %s, was %s", l.source, now, l.state)
		}
		l.done = l.repairing("--accept", "slot_missing", "--accept-loss", "message events")
	}
	for _, l := range all {
		if r, stderr, code := l.done.wait(); code != 0 || !r.Repaired || r.Published != l.missing {
			t.Fatalf("%s: exit code %d, %+v: %s", l.source, code, r, stderr)
		}
		l.start()
		emit(t, l.conn, content("a", "x", 4, "4"))
		l.want += l.missing + 1
		awaitMessages(t, l.js, l.stream, l.want)
		if all := messages(t, l.js, l.stream); len(all) != l.want || all[l.want-1].Outflow.ID != "m-a-x-4" {
			t.Errorf("%s: %d messages, want %d; the last one is %s", l.source, len(all), l.want, all[len(all)-1].Outflow.ID)
		}
	}
}
