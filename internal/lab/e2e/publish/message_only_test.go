package publish

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/oracle"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestWithoutATableEverythingWorksThatNeedsNone: without any table everything works that needs none, from
// init to a repair; what needs one says so.
func TestWithoutATableEverythingWorksThatNeedsNone(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, pg *pgserver.Server) {
		t.Parallel()
		testMessageOnly(t, pg)
	})
}

func testMessageOnly(t *testing.T, pg *pgserver.Server) {
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pg, ns.URL(), "nothing", "SOURCE=message", "REORDER_HORIZON=0s",
		"SUBJECT=app.{tenant}.{doc_id}", "HEADERS=Type=event_type,N=counter")
	out, _, code := o.Run("init", "--print")
	if code != 0 || strings.Contains(out, "TABLE") ||
		!strings.Contains(out, `CREATE PUBLICATION "`+o.Slot+`" WITH`) {
		t.Errorf("init --print: exit code %d\n%s", code, out)
	}
	harness.Exec(t, conn, "CREATE PUBLICATION "+o.Slot+"_always")
	o.Init()
	o.Init() // and again
	set := oracle.DefaultSettings
	set.Horizon = 0
	j := judgeEvents(o, oracle.OfMessage, url, set)
	j.reader = oracle.NewReader(oracle.Source{
		Slot: o.Slot + "_judge", Events: oracle.OfMessage, Headers: map[string]string{"Type": "event_type",
			"N": "counter"},
		Subject: func(r oracle.Row) string {
			return "app." + oracle.Token(r.Text("tenant")) + "." + oracle.Token(r.Text("doc_id"))
		},
	})
	o.Start()
	o.AwaitReady()
	harness.EmitAll(t, conn,
		`{"doc_id":"a b","actor_id":"anna","counter":7,"id":"one","headers":{"event_type":"moved","tenant":"x.y","other":"-"},"payload": {"n":  1.10} }`,
		`{"doc_id":"c","seq_key":"k","payload":"\u00e9"}`)
	harness.Exec(t, conn, "SELECT pg_logical_emit_message(false, 'outflow.event', $1::text)",
		`{"doc_id":"no","seq_key":"k","payload":1}`)
	j.mustAgree(ns.URL())
	all := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)
	if len(all) != 2 {
		t.Fatalf("%d messages", len(all))
	}
	if m := all[0]; m.Subject != "app.x=2Ey.a=20b" || string(m.Data) != `{"n":  1.10}` ||
		m.Outflow.ID != "one" || m.Outflow.Key != "anna:00000000000000000007" ||
		m.Header.Get("Type") != "moved" || m.Header.Get("N") != "7" {
		t.Errorf("%+v %s", m, m.Data)
	}
	if m := all[1]; m.Subject != "app.=.c" || string(m.Data) != `"\u00e9"` || m.Outflow.ID != "" ||
		m.Outflow.Key != "k" || m.Header.Get("Type") != "" {
		t.Errorf("%+v %s", m, m.Data)
	}
	awaitMetric(o, `outflow_ignored_events_total{what="not_transactional"}`, 1)
	harness.Eventually(t, "the log names what was ignored", func() error { // it follows the count
		if text := o.Log.String(); !strings.Contains(text, "not written transactionally") {
			return errors.New(text)
		}
		return nil
	})
	harness.Eventually(t, "the page", func() error {
		if _, text := o.Get("/"); !strings.Contains(text, "<b>logical messages</b> at <b>") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	o.AwaitHealth("ok")
	var st struct{ Health, Source, Table string }
	out, _, _ = o.Run("status", "--json")
	if err := json.Unmarshal([]byte(out), &st); err != nil || st.Source != "message" || st.Table != "" {
		t.Errorf("status: %v %s", err, out)
	}

	// Rows of a table that somebody takes for the outbox are no events; they are noticed if the publication
	// has them.
	harness.Exec(t, conn, "CREATE TABLE outbox (doc_id text)")
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" ADD TABLE outbox")
	harness.Exec(t, conn, "INSERT INTO outbox VALUES ('d')")
	awaitMetric(o, `outflow_ignored_events_total{what="row"}`, 1)

	// One that can't be published stops it, and says where and why; as a dead letter it holds nothing up.
	harness.EmitAll(t, conn, `{"doc_id":"d","id":"bad \"one\"","actor_id":"a","counter":-1,"payload":1}`,
		`{"doc_id":"e","payload":1}`, `{"doc_id":"f","seq_key":"k","payload":1}`)
	o.MustEnd(5, "logical message (outflow.event)", `id "bad \"one\""`, "at position",
		"counter is not a whole number", "docs/format.md", "dead_letter")
	out, errOut, code := o.Run("inspect", "--payload")
	if code != 0 || !strings.Contains(out, "(message)") || !strings.Contains(out, "bad: content: counter") {
		t.Errorf("inspect: exit code %d\n%s%s", code, out, errOut)
	}
	o.Set("SINK_ON_POISON=dead_letter")
	o.Start()
	j.cfg.DeadLetters = true
	if v := j.mustAgree(ns.URL()); v.DeadLetters != 2 {
		t.Errorf("%+v", v)
	}
	letters := harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream)[2:]
	for i, want := range []string{`{"reason":"undecodable","detail":"content: counter is not`,
		`{"reason":"null_seq_key","detail":"seq_key is NULL","doc_id":"e","position"`} {
		if !strings.HasPrefix(string(letters[i].Data), want) {
			t.Errorf("dead letter %d: %s, want %s...", i, letters[i].Data, want)
		}
	}
	o.MustStop(t)
	o.MustRun("drain", "--timeout", harness.Patience.String())

	// No message is lost without a publication; but before 18 the server can't decode what other tables had
	// meanwhile.
	harness.Exec(t, conn, "DROP PUBLICATION "+o.Slot)
	o.MustFail(3, []string{"run"}, "publication", "does not exist", "outflow init")
	harness.EmitAll(t, conn, `{"doc_id":"g","seq_key":"k","payload":1}`)
	harness.Exec(t, conn, "INSERT INTO outbox VALUES ('d')")
	o.Init()
	version := harness.Value[int](t, conn, "SELECT current_setting('server_version_num')::int")
	if version < 180000 {
		o.MustFail(3, []string{"run"}, "at this point of the WAL",
			"set publication to one that existed all the time")
		o.Set("PUBLICATION=" + o.Slot + "_always")
	}
	o.Start()
	j.mustAgree(ns.URL())
	o.MustStop(t)
}

// TestTheSourceChangesOnlyByInit: the source is part of the mapping. run with another one stops, init changes
// it when everything before is published, and from there on the new one rules.
func TestTheSourceChangesOnlyByInit(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	// a server of its own: init waits for all transactions of a server before a slot is made
	o, conn, _ := harness.Install(t, pgtest.Own(t, 0), ns.URL(), "remapped", "REORDER_HORIZON=0s")
	o.Init()
	o.Start()
	both := func(doc string) {
		t.Helper()
		tx, err := conn.Begin(t.Context())
		harness.Must(t, err)
		_, err = tx.Exec(t.Context(), insertRow, doc, "row", 1, "1")
		harness.Must(t, err)
		_, err = tx.Exec(t.Context(), harness.EmitEvent, harness.EventContent(doc, "message", 1, "1"))
		harness.Must(t, err)
		harness.Must(t, tx.Commit(t.Context()))
	}
	n := 0
	// turn goes over to another source; each transaction then gives so many events.
	turn := func(source string, events int, says ...string) {
		t.Helper()
		o.Set("SOURCE=" + source)
		o.MustFail(3, []string{"init"}, "outflow is running")
		o.MustStop(t)
		o.MustFail(3, []string{"run"}, append(says, "source="+source, "outflow init")...)
		o.Init()
		o.Init()
		both(source)
		o.Start()
		n += events
		harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
		o.AwaitReady()
	}
	both("table")
	n++
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
	o.AwaitReady()
	awaitMetric(o, `outflow_ignored_events_total{what="message"}`, 1)
	turn("both", 2, "source=table origin=own table=public.outbox")
	turn("message", 1, "source=both origin=own table=public.outbox")
	turn("table", 1, "source=message origin=own, ordered by key")
	turn("message", 1, "source=table origin=own table=public.outbox")
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" DROP TABLE outbox") // of no account now
	both("message")
	n++
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
	o.Set("SOURCE=both")
	o.MustStop(t)
	o.MustFail(3, []string{"init"}, "does not publish table public.outbox", "ADD TABLE")
	harness.Exec(t, conn, "ALTER PUBLICATION "+o.Slot+" ADD TABLE outbox")
	o.Init()
	o.Start()
	both("both again")
	n += 2
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, n)
	var got []string
	for _, m := range harness.Messages(t, harness.JetStream(t, ns.URL()), o.Stream) {
		got = append(got, strings.TrimPrefix(m.Subject, "outbox.")+" "+strings.Split(m.Outflow.Key, ":")[0])
	}
	want := []string{"table row", "both message", "both row", "message message", "table row",
		"message message", "message message", "both=20again message", "both=20again row"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}
