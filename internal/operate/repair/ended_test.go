package repair

import (
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/internal/operate/uninstall"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// TestALostEndIsNotWhatAKilledOutflowPublished: behind a repair that had nothing to publish there it may
// stay. But what a checkpoint says that lies in it is not published.
func TestALostEndIsNotWhatAKilledOutflowPublished(t *testing.T) {
	t.Parallel()
	ctx, cfg, s, db := archived(t, 1, rows)
	cfg.Archive.URL = ""
	_, js := natstest.Connect(t, cfg.NATS.URL)
	ingress := strings.TrimSuffix(s.CachedInfo().Config.Subjects[0], ">")
	_, err := js.Publish(ctx, ingress+"outbox.d", nil)
	must.Succeed(t, err)
	must.Succeed(t, s.DeleteMsg(ctx, rows+1))
	remapped := cfg
	remapped.Source = relay.FromBoth
	initialized := func() error {
		return initialize.Run(ctx, remapped, quiet, func(string, ...any) {}, nil)
	}
	uninstalled := func(stream bool) error {
		_, err := uninstall.Run(ctx, cfg, quiet, uninstall.Options{Stream: stream,
			Progress: func(string, ...any) {}})
		return err
	}
	db.Exec("INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', $1, '{}')", rows+1)
	l, err := backfill.Open(ctx, cfg, quiet)
	must.Succeed(t, err)
	defer l.Close()
	rd, err := l.Read(ctx)
	must.Succeed(t, err)
	was, with := *rd.Record, *rd.Record
	lost := relay.Checkpoint{Due: rd.Server.WALEnd, Seq: rows + 1, Settings: was.Checkpoints[0].Settings,
		Timeline: was.Checkpoints[0].Timeline}
	with.Checkpoints = append(was.Checkpoints[:1:1], checkpoint.StoredCheckpoint{Checkpoint: lost,
		Since: time.Now().UTC()})
	revision, err := l.Store.Save(ctx, &with, rd.Revision)
	must.Succeed(t, err)
	f := outboxdb.WantFault(t, initialized(), outbox.Fatal, "not_published")
	if !strings.Contains(f.Message, "ends at sequence 20") {
		t.Error(f)
	}
	if err := uninstalled(true); err == nil || !strings.Contains(err.Error(), "not published") {
		t.Error(err)
	}
	db.Exec("SELECT pg_replication_slot_advance($1, pg_current_wal_insert_lsn())", db.Slot)
	rd, err = l.Read(ctx)
	must.Succeed(t, err)
	was.Checkpoints[0].Due = rd.Slot.Confirmed
	_, err = l.Store.Save(ctx, &was, revision)
	must.Succeed(t, err)
	must.Succeed(t, uninstalled(false))
	must.Succeed(t, initialized())
}
