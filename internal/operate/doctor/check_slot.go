package doctor

import (
	"errors"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/replication/postgres"
)

const (
	little     = 25 // percent of the room that max_slot_wal_keep_size gives
	veryLittle = 10
	nearLoss   = 24 * time.Hour
	atLoss     = 4 * time.Hour
	muchWAL    = 10 << 30
	farBehind  = 1 << 30
)

var slotChecks = []check{
	// What a start of outflow run would find: everything that is compared with something else.
	{name: "slot.start", needs: []source{srcSlots, srcRecord, srcStream, srcReplication, srcPublication},
		run: func(f *Facts, r *reporter) {
			switch start, err := f.resolve(); {
			case errors.Is(err, checkpoint.ErrStandby):
				r.unknown("%v", err)
			case err != nil:
				r.fault(err)
			case start.Loss != "":
				lost := r.find("stream_tail_lost", "%s", start.Loss)
				if names := f.Readings.Stream.Durables; len(names) > 0 {
					lost.Message += "; durable consumers that may have had more: " + strings.Join(names, ", ")
				}
			}
			r.ok("outflow run can start")
		}},
	{name: "slot.usable", needs: []source{srcSlots},
		run: func(f *Facts, r *reporter) {
			s := f.slot()
			switch {
			case f.resolvedTo() != nil && !f.hasSlot():
				r.fault(f.resolvedTo()) // which has the LSN range, and says whether there has to be a slot
			case s == nil && f.known(srcRecord) && f.Readings.Record == nil:
				r.find("not_initialised", "there is no slot %s at %s, and no checkpoint record",
					f.Config.Slot,
					f.Postgres.Where)
			case s == nil && f.Readings.Record.Uninstalled(f.Readings.Stream) > 0:
				r.find("not_initialised", "outflow uninstall has removed slot %s, and left stream %s",
					f.Config.Slot, f.Config.Stream)
			case s == nil:
				r.find("slot_missing", "replication slot %s does not exist at %s", f.Config.Slot,
					f.Postgres.Where)
			case f.Readings.Slot.Invalidation != "":
				r.find("slot_invalidated", "replication slot %s was invalidated: %s", s.Name,
					f.Readings.Slot.Invalidation)
			default:
				if fault := f.checkpoint().ForeignSlot(f.Readings.Slot,
					databaseOf(f.Postgres.Where)); fault != nil {
					r.fault(fault)
				}
				r.ok("%s, wal_status %s, %s kept", s.Name, s.WALStatus, size(s.Retained))
			}
		}},
	{name: "slot.headroom", needs: []source{srcSlots, srcServer}, about: (*Facts).hasSlot,
		run: func(f *Facts, r *reporter) {
			s := f.slot()
			if s.WALStatus == "unreserved" {
				r.find("slot_unreserved",
					"slot %s keeps %s, more than max_slot_wal_keep_size, and is lost at "+
						"the next checkpoint", s.Name, size(s.Retained))
				return
			}
			if s.Safe == nil {
				if s.Retained > muchWAL {
					r.find("slot_retains", "slot %s keeps %s of WAL", s.Name, size(s.Retained))
				}
				r.ok("no limit")
				return
			}
			safe, percent := max(*s.Safe, 0), int64(100)
			if safe+s.Retained > 0 {
				percent = 100 * safe / (safe + s.Retained)
			}
			left, worst := "", finding.Note
			if rate := f.walRate(); rate > 0 {
				lasts := seconds(float64(safe) / rate)
				left = ", about " + units.Duration(lasts) + " at the average rate of WAL"
				if lasts < nearLoss && !s.Active {
					worst = finding.Warning
				}
				if lasts < atLoss && !s.Active {
					worst = finding.Critical
				}
			}
			switch {
			case percent < veryLittle:
				worst = finding.Critical
			case percent < little:
				worst = max(worst, finding.Warning)
			}
			if worst > finding.Note {
				r.findAs(worst, "slot_headroom", "slot %s keeps %s, and is lost after another %s of WAL%s",
					s.Name, size(s.Retained), size(safe), left)
			}
			r.ok("%s more%s", size(safe), left)
		}},
	{name: "slot.active", needs: []source{srcPostgres, srcSlots}, about: (*Facts).hasSlot,
		run: func(f *Facts, r *reporter) {
			s := f.slot()
			switch {
			case f.Waiting.Code != "":
				r.findAs(max(entry(f.Waiting.Code).Severity, finding.Error), f.Waiting.Code,
					"outflow run publishes nothing: it says that it waits at %s; its log and page have the "+
						"error", f.Waiting.Code)
			case !s.Active:
				unused := r.find("slot_unused",
					"nobody reads from slot %s: nothing is published, and it keeps WAL (%s)", s.Name,
					size(s.Retained))
				if f.resolvedTo() != nil {
					unused.Hint = "First see slot.start: outflow run can't start now."
				} else {
					unused.Command = "outflow run"
				}
			case s.Holder != "" && s.Holder != f.Postgres.Name && !strings.HasPrefix(s.Holder, "outflow"):
				r.find("slot_reader", "slot %s is read by %q (pid %d)", s.Name, s.Holder, s.PID)
			default:
				r.ok("pid %d", s.PID)
			}
		}},
	{name: "slot.restart", needs: []source{srcSlots}, about: (*Facts).hasSlot,
		run: func(f *Facts, r *reporter) {
			if s := f.slot(); s.Behind > farBehind {
				r.find("slot_restart_behind",
					"slot %s keeps %s of WAL below what is confirmed: a transaction "+
						"that began there was still open", s.Name, size(s.Behind))
			}
		}},
	{name: "slot.catalog_xmin", needs: []source{srcSlots}, about: (*Facts).hasSlot,
		run: func(f *Facts, r *reporter) {
			s := f.slot()
			if s.XminAge > oldXmin {
				r.find("old_catalog_xmin", "slot %s holds back the cleaning of the system catalogs: its "+
					"catalog_xmin is %d transactions old", s.Name, s.XminAge)
			}
			r.ok("%d transactions", s.XminAge)
		}},
	{name: "slot.failover", needs: []source{srcPostgres, srcSlots, srcServer},
		about: func(f *Facts) bool {
			return f.hasSlot() && f.Postgres.Number >= 170000 && f.Stats.Standbys > 0 &&
				!f.Postgres.InRecovery
		},
		run: func(f *Facts, r *reporter) {
			if s := f.slot(); !s.Failover {
				n := f.Stats.Standbys
				r.find("slot_no_failover", "slot %s lacks the failover property, and %s %s from %s", s.Name,
					units.Of(n, "standby"), units.Agree(n, "streams", "stream"), f.Postgres.Where).Command =
					"ALTER_REPLICATION_SLOT " + s.Name + " (FAILOVER true)"
			}
		}},
	{name: "slot.orphans", needs: []source{srcSlots, srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			for _, s := range f.Slots {
				if s.Active || s.Plugin != "pgoutput" || s.Name == f.Config.Slot || s.Synced ||
					s.Database != databaseOf(f.Postgres.Where) ||
					!strings.HasPrefix(s.Name, f.Config.Slot) && !strings.Contains(s.Name, "outflow") {
					continue
				}
				r.find("slot_orphan", "slot %s of database %s is read by nobody, and keeps %s of WAL", s.Name,
					postgres.Quote(s.Database), size(s.Retained)).Command =
					"SELECT pg_drop_replication_slot(" + postgres.Literal(s.Name) + ")"
			}
		}},
}

// resolve is what a start of outflow run makes of the readings.
func (f *Facts) resolve() (checkpoint.Start, error) {
	return checkpoint.Resolve(f.checkpoint(), f.Readings)
}

// resolvedTo is why outflow run could not start; nil: it could, or that can't be said.
func (f *Facts) resolvedTo() error {
	if !f.known(srcSlots, srcRecord, srcStream, srcReplication, srcPublication) {
		return nil
	}
	_, err := f.resolve()
	return err
}

// checkpoint says what the readings are of.
func (f *Facts) checkpoint() checkpoint.Config {
	if f.Layout == nil {
		return wiring.Checkpoint(f.Config, &wiring.Layout{})
	}
	return wiring.Checkpoint(f.Config, f.Layout)
}

// databaseOf is the one that a connection is to.
func databaseOf(where string) string {
	_, name, _ := strings.Cut(where, "/")
	return name
}

// newest is the newest recorded checkpoint; nil: there is none.
func (f *Facts) newest() *checkpoint.StoredCheckpoint {
	if rec := f.Readings.Record; rec != nil && len(rec.Checkpoints) > 0 {
		return &rec.Checkpoints[len(rec.Checkpoints)-1]
	}
	return nil
}
