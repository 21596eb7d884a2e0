package operate

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestInitFinishesWhatACrashHasCut: wherever a crash has cut init, the next init finishes it, and outflow
// publishes all that is written from then on.
func TestInitFinishesWhatACrashHasCut(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	dropRecord := func(t *testing.T, f *harness.Installation) {
		harness.Must(t, f.JS.DeleteStream(t.Context(), "KV_outflow-"+f.Stream))
	}
	for _, c := range []struct {
		name  string
		crash func(t *testing.T, f *harness.Installation)
		run   bool // outflow run needs no init
		made  []string
	}{
		{"nothing is missing", func(*testing.T, *harness.Installation) {}, true,
			[]string{"table public.outbox: there", ": there, confirmed up to"}},
		{"after the table", func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			dropRecord(t, f)
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
			harness.Exec(t, f.Conn, "DROP PUBLICATION "+f.Slot)
		}, false, []string{"table public.outbox: there", "publication ", "stream ", ": made"}},
		{"after the publication", func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			dropRecord(t, f)
			harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
		}, false, []string{"stream ", ": made"}},
		{"after the stream", func(t *testing.T, f *harness.Installation) { f.DropSlot(t); dropRecord(t, f) },
			false, []string{"slot ", "first checkpoint"}},
		{"after the bucket", func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			f.DeleteRecord(t)
		}, false, []string{"slot ", "first checkpoint"}},
		{"record without slot", func(t *testing.T, f *harness.Installation) {
			f.DropSlot(t)
			harness.EditRecord(t, f, harness.BeforeTheFirstCheckpoint)
		}, false, []string{"slot ", "first checkpoint"}},
		{"slot and unfinished record", func(t *testing.T, f *harness.Installation) {
			harness.EditRecord(t, f, harness.BeforeTheFirstCheckpoint)
		}, false, []string{"slot ", ": there", "first checkpoint"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "init")
			f.Init()
			c.crash(t, f)
			if !c.run {
				f.MustFail(3, []string{"run"}, "outflow init")
			}
			out := f.MustRun("init")
			f.MustContain("outflow init", out, c.made...)
			harness.Insert(t, f.Conn, "doc", 1, "{}")
			f.Start()
			harness.AwaitMessages(t, f.JS, f.Stream, 1)
			f.Init() // while it runs
			harness.Insert(t, f.Conn, "doc", 2, "{}")
			harness.AwaitMessages(t, f.JS, f.Stream, 2)
			f.MustBeComplete(f.Conn, ns.URL())
		})
	}
}

// TestInitRefusesToCoverUpALoss: what init must not paper over.
func TestInitRefusesToCoverUpALoss(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "refuse")
	harness.Exec(t, f.Conn, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
	f.MustFailInGap("record_missing", "init") // a slot that no record speaks of
	f.DropSlot(t)
	f.MustFail(2, []string{"init", "--init.max_age", "1s"}, "init.max_age", "sink.durable_after")
	f.Init()
	s, err := f.JS.Stream(t.Context(), f.Stream)
	harness.Must(t, err)
	cfg := s.CachedInfo().Config
	cfg.MaxAge, cfg.Duplicates = 1900*time.Millisecond, time.Second
	_, err = f.JS.UpdateStream(t.Context(), cfg)
	harness.Must(t, err)
	f.MustFail(3, []string{"init"}, "max_age 1.9s", "sink.durable_after", "2s")
	cfg.MaxAge = 0
	_, err = f.JS.UpdateStream(t.Context(), cfg)
	harness.Must(t, err)
	kv, err := f.JS.KeyValue(t.Context(), "outflow-"+f.Stream)
	harness.Must(t, err)
	record, err := kv.Get(t.Context(), f.Slot)
	harness.Must(t, err)
	harness.Must(t, kv.Delete(t.Context(), f.Slot))
	// neither adopted nor made anew
	f.MustFailInGap("record_missing", "init")
	_, err = kv.Put(t.Context(), f.Slot, record.Value())
	harness.Must(t, err)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 1, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.MustStop(t)
	f.DropSlot(t)
	f.MustFailInGap("slot_missing", "init") // no slot anew for a record with checkpoints
	harness.Must(t, f.JS.DeleteStream(t.Context(), f.Stream))
	f.MustFailInGap("slot_missing", "init") // nor a stream
	if _, err := f.JS.Stream(t.Context(), f.Stream); err == nil {
		t.Error("init made a stream anew that was lost")
	}
}

// TestInitDoesNotAdoptASlotThatIsBeingMade: an init that was killed leaves a server process behind that goes
// on making the slot. Its slot is not adopted before it is whole: nobody knows yet where it begins.
func TestInitDoesNotAdoptASlotThatIsBeingMade(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	f := harness.NewInstallation(t, pgtest.Server(t), ns.URL(), "halfslot")
	f.Init()
	f.DropSlot(t)
	harness.EditRecord(t, f, harness.BeforeTheFirstCheckpoint)

	open, maker := harness.Connect(t, f.URL), harness.Connect(t, f.URL)
	harness.Exec(t, open, "BEGIN")
	harness.Insert(t, open, "doc", 1, "{}") // a new slot waits for its end
	made := make(chan error, 1)
	go func() {
		_, err := maker.Exec(t.Context(), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", f.Slot)
		made <- err
	}()
	for n := 0; n == 0; time.Sleep(10 * time.Millisecond) {
		harness.Must(t, f.Conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_replication_slots WHERE "+
			"slot_name = $1", f.Slot).Scan(&n))
	}
	f.MustFail(3, []string{"init"}, f.Slot, "being made", "pid")
	harness.Exec(t, open, "ROLLBACK")
	harness.Must(t, <-made)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "doc", 2, "{}")
	harness.AwaitMessages(t, f.JS, f.Stream, 1)
	f.MustBeComplete(f.Conn, ns.URL())
}

// TestInitFindsWhatThePrintedSQLMade: the owner runs the SQL that is printed; init then finds it, and neither
// init nor run needs more than the role that docs/postgres.md describes.
func TestInitFindsWhatThePrintedSQLMade(t *testing.T) {
	t.Parallel()
	ns := natstest.Server(t)
	o, conn, url := harness.Install(t, pgtest.Server(t), ns.URL(), "print")
	harness.Exec(t, conn, "DO $$ BEGIN CREATE ROLE least LOGIN REPLICATION; EXCEPTION WHEN "+
		"duplicate_object THEN NULL; END $$")
	harness.Exec(t, conn, "REVOKE ALL ON SCHEMA public FROM public; REVOKE ALL ON DATABASE "+
		conn.Config().Database+" FROM public")
	harness.Exec(t, conn, "GRANT CONNECT ON DATABASE "+conn.Config().Database+" TO least")
	o.Set("POSTGRES_URL=" + strings.Replace(url, "postgres@", "least@", 1))
	o.MustFail(3, []string{"init"}, "may not make table", "outflow init --print")
	sql := o.MustRun("init", "--print")
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%v:\n%s", err, sql)
	}
	out := o.MustRun("init")
	o.MustContain("outflow init", out, "table public.outbox: there", "publication "+o.Slot+": there", "slot "+
		o.Slot)
	o.Start()
	harness.Insert(t, conn, "doc", 1, "{}")
	harness.AwaitMessages(t, harness.JetStream(t, ns.URL()), o.Stream, 1)
	o.MustBeComplete(conn, ns.URL())
}
