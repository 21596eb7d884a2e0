package pipeline

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The first record of a session is stored at once, the others at the interval.
func TestTheFirstRecordIsStoredAtOnce(t *testing.T) {
	for name, c := range map[string]struct{ durable, interval time.Duration }{
		"a second":    {2 * time.Second, time.Second},
		"a 32nd part": {160 * time.Second, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, c.durable, func(t *testing.T, w *harness) {
				w.running(options{})
				w.sleep(time.Minute)
				n, begun := len(w.js.revisions), time.Now()
				for range 300 {
					w.write(1)
					w.sleep(100 * time.Millisecond)
				}
				revisions := w.js.revisions[n:]
				if d := revisions[0].at.Sub(begun); d > 200*time.Millisecond {
					t.Errorf("the first record after %v", d)
				}
				if got, want := len(revisions), int(30*time.Second/c.interval); got < want-1 || got > want+1 {
					t.Errorf("%d records in 30s, want about %d", got, want)
				}
				for i := 1; i < len(revisions); i++ {
					if d := revisions[i].at.Sub(revisions[i-1].at); d < c.interval-time.Millisecond {
						t.Errorf("records %v apart", d)
					}
				}
				w.wantSameStream()
			})
		})
	}
}

// A checkpoint is confirmed once it has been in the record for durable_after and the broker was heard after
// that, which is soon.
func TestACheckpointIsConfirmedOnceItIsDurable(t *testing.T) {
	const durable = 10 * time.Second
	inBubble(t, defaults, durable, func(t *testing.T, w *harness) {
		w.running(options{})
		w.sleep(time.Minute)
		for range 50 {
			w.write(1)
			w.sleep(300 * time.Millisecond)
		}
		w.sleep(time.Minute)
		stored := map[outbox.LSN]time.Time{}
		w.eachCheckpoint(func(lsn outbox.LSN, at time.Time) {
			if _, ok := stored[lsn]; !ok {
				stored[lsn] = at
			}
		})
		moments := w.pg.confirmedAt
		if len(moments) < 10 {
			t.Fatalf("%d confirmations", len(moments))
		}
		for _, m := range moments {
			at, ok := stored[m.lsn]
			if d := m.at.Sub(at); !ok || d < durable || d > durable+monitorInterval+500*time.Millisecond {
				t.Errorf("%v is confirmed %v after it was stored (%t)", m.lsn, d, ok)
			}
		}
		if top := w.pg.wal[len(w.pg.wal)-1].end; w.pg.confirmed < top {
			t.Errorf("confirmed up to %v, the WAL ends at %v", w.pg.confirmed, top)
		}
	})
}

// A broker that died in silence syncs nothing any more: what it did not have for durable_after while it was
// known to live is not confirmed, however long the silence lasts.
func TestABrokerThatDiedInSilenceConfirmsNothing(t *testing.T) {
	inBubble(t, defaults, 10*time.Second, func(t *testing.T, w *harness) {
		w.running(options{})
		w.sleep(time.Minute)
		w.write(3)
		w.published()
		w.sleep(1200 * time.Millisecond)
		checkpoints, confirmed := w.record().Checkpoints, w.pg.confirmed
		if checkpoints[len(checkpoints)-1].Due <= confirmed {
			t.Fatalf("checkpoint %v, confirmed %v: nothing is to be confirmed",
				checkpoints[len(checkpoints)-1].Due,
				confirmed)
		}
		w.with(func() { w.js.paused = time.Now().Add(time.Minute) })
		w.sleep(50 * time.Second)
		if w.pg.confirmed != confirmed {
			t.Errorf("%v was confirmed in silence, after %v", w.pg.confirmed, confirmed)
		}
	})
}

// Where the outbox is silent, keepalives move the checkpoint and the confirmed LSN; never past an event that
// is held.
func TestKeepalivesMoveTheCheckpoint(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		w.running(options{noHeartbeats: true})
		others := func() {
			for range 20 {
				w.with(func() { w.pg.grow(w.pg.end + 1000) })
				w.sleep(500 * time.Millisecond)
			}
		}
		others()
		w.sleep(5 * time.Second)
		checkpoints := w.record().Checkpoints
		if top := checkpoints[len(checkpoints)-1]; top.Due != w.pg.end || w.pg.confirmed != w.pg.end {
			t.Errorf("checkpoint %v, confirmed %v, the WAL ends at %v", top.Due, w.pg.confirmed, w.pg.end)
		}
		w.write(1)
		held := w.pg.wal[0]
		others()
		w.sleep(5 * time.Second)
		if checkpoints = w.record().Checkpoints; checkpoints[len(checkpoints)-1].Due >= held.end ||
			w.pg.confirmed >= held.end {
			t.Errorf("checkpoint %v, confirmed %v, though %v is held", checkpoints[len(checkpoints)-1].Due,
				w.pg.confirmed,
				held.end)
		}
		w.with(func() { w.pg.commit(nil, logical{prefix: relay.HeartbeatPrefix}) })
		w.published()
		others()
		w.sleep(5 * time.Second)
		if w.pg.confirmed != w.pg.end {
			t.Errorf("confirmed %v, the WAL ends at %v", w.pg.confirmed, w.pg.end)
		}
	})
}

// PostgreSQL 14 sends the transactions of other tables as empty ones. They move the checkpoint as keepalives
// do, also where none comes.
func TestEmptyTransactionsActAsKeepalives(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		w.running(options{noHeartbeats: true})
		w.with(func() { w.pg.quiet = true })
		for range 20 {
			w.with(func() { w.pg.commit(nil) })
			w.sleep(500 * time.Millisecond)
		}
		w.sleep(5 * time.Second)
		checkpoints := w.record().Checkpoints
		if top := checkpoints[len(checkpoints)-1]; top.Due != w.pg.end || w.pg.confirmed != w.pg.end {
			t.Errorf("checkpoint %v, confirmed %v, the WAL ends at %v", top.Due, w.pg.confirmed, w.pg.end)
		}
	})
}

// No checkpoint of a keepalive while a message is not acknowledged.
func TestNoKeepaliveCheckpointBeforeAcknowledgement(t *testing.T) {
	inBubble(t, relay.Settings{MaxEvents: 10, MaxBytes: 1 << 20}, 0, func(t *testing.T, w *harness) {
		w.running(options{})
		w.sleep(time.Second)
		w.with(func() { w.js.latency = 2 * time.Second })
		w.write(1)
		x := w.pg.wal[0]
		w.with(func() { w.pg.grow(w.pg.end + 1000) })
		w.sleep(3 * time.Second) // stored, not acknowledged
		if checkpoints := w.record().Checkpoints; checkpoints[len(checkpoints)-1].Due >= x.end {
			t.Errorf("the record has %v, the message of %v is not acknowledged",
				checkpoints[len(checkpoints)-1].Due,
				x.end)
		}
		w.sleep(20 * time.Second)
		if checkpoints := w.record().Checkpoints; checkpoints[len(checkpoints)-1].Due != w.pg.end {
			t.Errorf("the record has %v, the WAL ends at %v", checkpoints[len(checkpoints)-1].Due, w.pg.end)
		}
	})
}

// A record that somebody else wrote ends the session, and the next one goes on. One whose outcome is unknown
// is read again on a new connection; should it come after that, it ends the session as well.
func TestARecordOfSomebodyElseEndsTheSession(t *testing.T) {
	for name, how := range map[string]saving{"unheard": saveUnheard, "late": saveLate, "never": saveNever,
		"foreign": saveWell} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(1)
				w.published()
				w.sleep(5 * time.Second)
				w.with(func() {
					w.js.saves = how
					if how == saveWell {
						top := w.js.revisions[len(w.js.revisions)-1]
						if _, err := w.js.land(top.doc, nil, top.number); err != nil {
							t.Error(err)
						}
					}
				})
				w.write(1)
				w.until(time.Minute, "it is noticed", func() bool { return len(pr.opens)+w.js.resumed >= 2 })
				if own := how == saveUnheard || how == saveNever; own && len(pr.opens) != 1 ||
					how == saveWell && w.js.resumed+len(pr.reopens) > 0 {
					t.Errorf("%d sessions, %d went on", len(pr.opens), w.js.resumed)
				}
				w.write(1)
				w.published()
				w.sleep(10 * time.Second)
				if w.pg.confirmed < w.pg.wal[len(w.pg.wal)-1].end || pr.over() {
					t.Errorf("confirmed %v; %v", w.pg.confirmed, pr.err)
				}
				w.wantSameStream()
			})
		})
	}
}

// Rows that are written while something else is published are in no WAL data: nothing is recorded or
// confirmed after it was changed, and each start stops until a repair accepts it, also where nothing is left
// to be seen of it.
func TestAChangedPublicationStopsEverything(t *testing.T) {
	for name, c := range map[string]struct {
		change func(id *relay.PublicationIdentity)
		away   bool // while nothing runs
		lasts  bool // it can be seen without the record
	}{
		"another entry": {func(id *relay.PublicationIdentity) { id.RelXmin++ }, false, true},
		"another table": {func(id *relay.PublicationIdentity) { id.TableOID++ }, true, true},
		"rows are hidden": {func(id *relay.PublicationIdentity) {
			id.Hidden = &outbox.Fault{Code: "publication_partition"}
		}, false, false},
		"rows are hidden at start": {func(id *relay.PublicationIdentity) {
			id.Hidden = &outbox.Fault{Code: "publication_partition"}
		}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
				pr := w.running(options{})
				w.write(3)
				w.sleep(1500 * time.Millisecond)
				if c.away {
					must.Succeed(t, pr.stop())
				}
				was := w.pg.identity
				w.with(func() { c.change(&w.pg.identity) })
				revisions, changed := len(w.js.revisions), w.pg.end
				for range 20 {
					w.write(1)
					w.sleep(100 * time.Millisecond)
				}
				if c.away {
					pr = w.run(options{})
				}
				stops := func() *outbox.Fault {
					t.Helper()
					f := pr.ends(time.Minute)
					if f == nil || f.Class != outbox.Gap || f.Code != "publication_changed" {
						t.Fatalf("ended with %v", pr.err)
					}
					if f.From == 0 || f.From > changed || f.To < changed {
						t.Errorf("range %v to %v, it was changed at %v", f.From, f.To, changed)
					}
					return f
				}
				if f := stops(); !f.Observed || len(pr.opens) != 1 {
					t.Errorf("%d sessions before it counted", len(pr.opens))
				}
				remembered := func() {
					t.Helper()
					if n := len(w.js.revisions) - revisions; n != 1 ||
						w.record().Stopped != "publication_changed" || w.pg.confirmed > changed {
						t.Errorf("%d records after it, the last one says %q; confirmed %v", n,
							w.record().Stopped, w.pg.confirmed)
					}
				}
				remembered()
				if !c.lasts {
					w.with(func() { w.pg.identity = was })
				}
				pr = w.run(options{})
				stops()
				remembered() // once is enough: the revisions before it may be needed
			})
		})
	}
}

// A partition that was rewritten is no reason to stop. It may have been unlogged: that is said once, and
// recorded as it is now.
func TestRewrittenIsSaidOnce(t *testing.T) {
	inBubble(t, defaults, 2*time.Second, func(t *testing.T, w *harness) {
		var log bytes.Buffer
		pr := w.running(options{log: &log})
		w.write(3)
		w.sleep(1500 * time.Millisecond)
		w.with(func() { w.pg.identity.Rewritten = "0123456789abcdef" })
		for range 50 {
			w.write(1)
			w.sleep(100 * time.Millisecond)
		}
		must.Succeed(t, pr.stop())
		if n := strings.Count(log.String(), "outflow repair --check"); n != 1 ||
			w.record().Publication.Rewritten == "" {
			t.Errorf("said %d times; the record says %+v", n, w.record().Publication)
		}
		w.wantSameStream()
	})
}
