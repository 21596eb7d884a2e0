package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outflowhq/outflow/internal/app/gclimit"
	"github.com/outflowhq/outflow/internal/finding"
)

const (
	leastSpill = 1 << 30
	standbyLag = 64 << 20
)

var hostChecks = []check{
	{name: "host.spill_dir", needs: []source{srcHost}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			h := f.Host
			switch {
			case h.SpillError != "":
				r.find("spill_dir", "reorder.spill_dir: %s can't be written to: %s", h.SpillDir, h.SpillError)
			case h.SpillMemory:
				r.find("spill_memory", "reorder.spill_dir: %s is in memory", h.SpillDir)
			case h.SpillFree < leastSpill:
				r.find("spill_space", "reorder.spill_dir: %s has %s left", h.SpillDir,
					size(int64(h.SpillFree)))
			default:
				r.ok("%s, %s free", h.SpillDir, size(int64(h.SpillFree)))
			}
		}},
	{name: "host.memory", needs: []source{srcHost}, beforeInit: true,
		about: func(f *Facts) bool { return f.Host.MemoryLimit > 0 },
		run: func(f *Facts, r *reporter) {
			s, max := f.Config.Reorder.Settings(), f.Host.MemoryLimit
			if need := gclimit.Limit(s, f.Config.Sink.MaxPayload); need > max/10*8 {
				r.find("memory_limit", "with reorder.max_events and reorder.max_bytes as they are outflow "+
					"takes up to "+
					"%s, and this control group has %s", size(need), size(max))
			} else {
				r.ok("up to %s of %s", size(need), size(max))
			}
		}},
	{name: "process.listen", needs: []source{srcProcess},
		about: func(f *Facts) bool { return f.Config.Listen != "" },
		run: func(f *Facts, r *reporter) {
			p, at := f.Process, f.Config.Listen
			switch {
			case !p.Listens:
				r.find("process_absent", "nothing listens at %s: no outflow runs here", at)
			case !p.Outflow:
				r.find("listen", "listen: something else than outflow listens at %s", at)
			case p.Slot.Name != f.Config.Slot || p.Stream.Name != f.Config.Stream:
				r.find("process_other", "the outflow that listens at %s has slot %s and stream %s, this "+
					"configuration "+
					"%s and %s", at, p.Slot.Name, p.Stream.Name, f.Config.Slot, f.Config.Stream)
			default:
				r.ok("outflow %s at %s", p.Self.Version, at)
			}
		}},
	{name: "process.instances", needs: []source{srcServer},
		about: func(f *Facts) bool { return f.Stats.Instances > 0 },
		run: func(f *Facts, r *reporter) {
			if n := f.Stats.Instances; n == 1 {
				r.find("single_instance", "one host has an outflow for slot %s", f.Config.Slot)
			}
			r.ok("%d hosts", f.Stats.Instances)
		}},
	{name: "process.state", needs: []source{srcProcess},
		about: func(f *Facts) bool { return f.Process.Outflow && f.Process.Slot.Name == f.Config.Slot },
		run: func(f *Facts, r *reporter) {
			p := f.Process
			switch v := p.Verdict; {
			case p.Ready:
				r.ok("%s", v.State)
			case v.Code != "": // as bad as the code, and no less than that nothing is published
				r.findAs(max(entry(v.Code).Severity, finding.Error), v.Code, "the outflow at %s says: %s",
					f.Config.Listen, v.Cause)
			default:
				r.find("process_not_ready", "the outflow at %s says: %s", f.Config.Listen,
					strings.TrimSuffix(v.State+": "+v.Cause, ": "))
			}
		}},
}

var standbyChecks = []check{
	{name: "standby.reachable", needs: []source{srcStandby},
		run: func(f *Facts, r *reporter) {
			if !f.Standby.InRecovery {
				r.find("standby_not_standby", "%s is no standby: it is not in recovery", f.Standby.Where)
			}
			r.ok("%s, PostgreSQL %s", f.Standby.Where, f.Standby.Version)
		}},
	{name: "standby.cluster", needs: []source{srcStandby, srcReplication},
		run: func(f *Facts, r *reporter) {
			switch s, p := f.Standby, f.Postgres; {
			case s.SystemID != f.Identity.SystemID:
				r.find("standby_other_cluster", "%s has system identifier %s, %s has %s", s.Where, s.SystemID,
					p.Where, f.Identity.SystemID)
			case s.Number/10000 != p.Number/10000:
				r.find("standby_other_cluster", "%s is PostgreSQL %s, %s is %s", s.Where, s.Version, p.Where,
					p.Version)
			default:
				r.ok("system %s", s.SystemID)
			}
		}},
	{name: "standby.database", needs: []source{srcStandby, srcPostgres},
		run: func(f *Facts, r *reporter) {
			if a, b := databaseOf(f.Standby.Where), databaseOf(f.Postgres.Where); a != b {
				r.find("standby_other_cluster", "--standby names database %s, postgres.url %s", quote(a),
					quote(b))
			}
		}},
	{name: "standby.settings", needs: []source{srcStandby},
		run: func(f *Facts, r *reporter) {
			s := f.Standby
			need := func(name, want string) {
				if got := s.Settings[name]; got != want {
					r.find("standby_setting", "%s is %s at %s", name, quoted(got), s.Where).Command =
						fmt.Sprintf("ALTER SYSTEM SET %s = %s", name, want)
				}
			}
			need("wal_level", "logical")
			if s.Number < 170000 {
				return
			}
			need("sync_replication_slots", "on")
			need("hot_standby_feedback", "on")
			if s.Settings["primary_slot_name"] == "" {
				r.find("standby_setting", "primary_slot_name is not set at %s", s.Where)
			}
		}},
	{name: "standby.slot", needs: []source{srcStandby, srcSlots},
		run: func(f *Facts, r *reporter) {
			s, ours := f.Standby, f.Config.Slot
			if s.Number < 170000 {
				r.find("standby_slot", "%s is PostgreSQL %s, which keeps no logical slots on standbys: "+
					"slot %s will be "+
					"missing after the switchover", s.Where, s.Version, ours).Hint =
					"Stop the writers and run `outflow drain` before the switchover, and `outflow repair " +
						"--accept slot_missing` after it."
				return
			}
			for _, one := range s.Slots {
				switch {
				case one.Name != ours:
					continue
				case !one.Synced || one.Temporary:
					r.find("standby_slot", "slot %s at %s is not synchronised yet", ours, s.Where)
				case one.Invalidation != "" || one.WALStatus == "lost":
					r.find("standby_slot", "slot %s at %s is invalidated: %s", ours, s.Where,
						one.Invalidation)
				default:
					r.ok("%s is synchronised", ours)
				}
				return
			}
			r.find("standby_slot", "%s does not have slot %s", s.Where, ours)
		}},
	{name: "standby.waited_for", needs: []source{srcStandby, srcSettings},
		about: func(f *Facts) bool { return f.Postgres.Number >= 170000 },
		run: func(f *Facts, r *reporter) {
			if name := f.Standby.Settings["primary_slot_name"]; name != "" &&
				!slices.Contains(split(f.Settings["synchronized_standby_slots"]), name) {
				r.find("standby_not_waited_for",
					"synchronized_standby_slots of %s does not name %s, the slot of %s",
					f.Postgres.Where, quote(name), f.Standby.Where)
			}
		}},
	{name: "standby.capacity", needs: []source{srcStandby, srcSettings},
		run: func(f *Facts, r *reporter) {
			for _, name := range []string{"max_replication_slots", "max_wal_senders"} {
				if there := numberOf(f.Standby.Settings[name]); there < f.number(name) {
					r.findAs(finding.Warning, "standby_setting", "%s is %d at %s, and %d at %s", name, there,
						f.Standby.Where,
						f.number(name), f.Postgres.Where)
				}
			}
		}},
	{name: "standby.replay", needs: []source{srcStandby},
		run: func(f *Facts, r *reporter) {
			if b := f.Standby.Behind; b > standbyLag {
				r.find("standby_behind", "%s has %s of WAL to replay", f.Standby.Where, size(b))
			}
			r.ok("%s to replay", size(max(f.Standby.Behind, 0)))
		}},
}
