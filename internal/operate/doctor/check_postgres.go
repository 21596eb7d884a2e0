package doctor

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

const (
	slowTrip      = 500 * time.Millisecond
	verySlowTrip  = time.Second
	fewFree       = 5
	oldXmin       = 100_000_000
	longOpen      = 5 * time.Minute
	veryLongOpen  = time.Hour
	mostSpilled   = 10 // percent
	leastAveraged = time.Hour
	leastKept     = 4 * time.Hour
)

var postgresChecks = []check{
	{name: "postgres.reachable", needs: []source{srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			p := f.Postgres
			if p.RoundTrip > slowTrip {
				r.find("postgres_slow", "PostgreSQL at %s takes %v to answer", p.Where, short(p.RoundTrip))
			}
			r.ok("%s, PostgreSQL %s, %v", p.Where, p.Version, short(p.RoundTrip))
		}},
	{name: "postgres.connection", needs: []source{srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			protected(r, "PostgreSQL at "+f.Postgres.Where,
				"Set sslmode=verify-full and sslrootcert in postgres.url", f.Postgres.Link)
		}},
	{name: "postgres.certificates", needs: []source{srcPostgres}, beforeInit: true,
		about: func(f *Facts) bool { return len(f.Postgres.Link.Certificates) > 0 },
		run: func(f *Facts, r *reporter) {
			expiring(f, r, f.Postgres.Link.Certificates)
		}},
	{name: "postgres.primary", needs: []source{srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			switch {
			case !f.Postgres.InRecovery:
			case f.BeforeInit:
				r.find("in_recovery", "%s is a standby, on which nothing can be made", f.Postgres.Where)
			case f.Config.Postgres.WriteURL == f.Config.Postgres.URL:
				r.find("in_recovery", "%s is a standby, and postgres.write_url is not set: heartbeats and "+
					"settings can't be written", f.Postgres.Where).Hint =
					"Point postgres.url at the primary, or set postgres.write_url to it."
			default:
				r.ok("a standby; heartbeats go to postgres.write_url")
			}
		}},
	{name: "postgres.writes", needs: []source{srcWriter},
		about: func(f *Facts) bool { return f.Writer.Where != "" },
		run: func(f *Facts, r *reporter) {
			if f.Writer.InRecovery {
				r.findAs(finding.Error, "write_standby", "postgres.write_url leads to %s, which is a standby",
					f.Writer.Where)
			}
			r.ok("%s", f.Writer.Where)
		}},
	{name: "postgres.replication", needs: []source{srcReplication}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			r.ok("system %s, timeline %d", f.Identity.SystemID, f.Identity.History.Timeline)
		}},
	{name: "postgres.wal_level", needs: []source{srcSettings}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			if err := catalog.CheckWALLevel(f.Settings["wal_level"]); err != nil {
				r.fault(err)
			}
			r.ok("logical")
		}},
	{name: "postgres.role", needs: []source{srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			if f.Postgres.Superuser && !f.BeforeInit { // init may well be run by one
				r.find("superuser_role", "role %s is a superuser", postgres.Quote(f.Postgres.Role))
			}
			r.ok("%s", f.Postgres.Role)
		}},
	{name: "postgres.free_slots", needs: []source{srcSettings, srcSlots}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			limit, used := f.number("max_replication_slots"), len(f.Slots)
			switch free := limit - used; {
			case free <= 0 && f.slot() == nil:
				r.find("max_replication_slots", "max_replication_slots is %d, %d slots exist, and %s is not "+
					"among them", limit, used, f.Config.Slot)
			case free <= 0:
				r.find("few_free_slots", "max_replication_slots is %d, and %d slots exist", limit, used)
			default:
				r.ok("%d of %d", free, limit)
			}
		}},
	{name: "postgres.free_senders", needs: []source{srcSettings, srcServer}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			limit, used := f.number("max_wal_senders"), f.Stats.Senders
			if used >= limit {
				as := finding.Error
				if s := f.slot(); s != nil && s.Active { // ours is among them
					as = finding.Warning
				}
				r.findAs(as, "no_free_senders", "max_wal_senders is %d, and %d are in use", limit, used)
			}
			r.ok("%d of %d", limit-used, limit)
		}},
	{name: "postgres.free_connections", needs: []source{srcSettings, srcServer}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			limit := f.number("max_connections")
			free := limit - f.number("superuser_reserved_connections") - f.number("reserved_connections") -
				f.Stats.Connections
			if free < fewFree {
				r.find("few_connections", "about %d of max_connections = %d are free", max(free, 0), limit)
			}
			r.ok("about %d of %d", free, limit)
		}},
	{name: "postgres.keep_size", needs: []source{srcSettings, srcServer}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			keep := f.bytesOf("max_slot_wal_keep_size", 1<<20)
			if keep < 0 {
				r.find("wal_keep_unlimited", "max_slot_wal_keep_size is -1: PostgreSQL keeps WAL for a slot "+
					"until the disk is full")
				return
			}
			if rate := f.walRate(); rate > 0 {
				lasts := seconds(float64(keep) / rate)
				if lasts < leastKept {
					r.find("wal_keep_short", "max_slot_wal_keep_size is %s, which lasts for an outage of "+
						"%v at the average rate of %s a second",
						size(keep), units.Duration(lasts), size(int64(rate)))
				}
				r.ok("%s, about %v of WAL", size(keep), units.Duration(lasts))
				return
			}
			r.ok("%s", size(keep))
		}},
	{name: "postgres.idle_timeout", needs: []source{srcSettings}, beforeInit: true,
		about: func(f *Facts) bool { return f.Settings["idle_replication_slot_timeout"] != "" },
		run: func(f *Facts, r *reporter) {
			if n := f.number("idle_replication_slot_timeout"); n > 0 {
				r.find("idle_slot_timeout",
					"idle_replication_slot_timeout is %v: a slot that nobody reads for "+
						"so long is invalidated", time.Duration(n)*time.Second)
			}
		}},
	{name: "postgres.transactions", needs: []source{srcActivity}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			for _, t := range f.Activity.Transactions {
				open := seconds(t.Seconds)
				if open < longOpen {
					continue
				}
				who, command := "pid "+strconv.Itoa(t.PID), "SELECT pg_terminate_backend("+
					strconv.Itoa(t.PID)+")"
				if t.PID == 0 {
					who = "prepared transaction " + postgres.Literal(t.Prepared)
					command = "ROLLBACK PREPARED " + postgres.Literal(t.Prepared)
				} else if t.Application != "" {
					who += " (" + t.Application + ")"
				}
				as := finding.Warning
				if open >= veryLongOpen {
					as = finding.Error
				}
				r.findAs(as, "long_transaction", "%s in database %s has been open for %v", who,
					postgres.Quote(t.Database), units.Duration(open)).Command = command
			}
		}},
	{name: "postgres.decoding", needs: []source{srcServer, srcSettings},
		about: func(f *Facts) bool { return f.Stats.TotalBytes > 0 },
		run: func(f *Facts, r *reporter) {
			if s := f.Stats; s.SpillBytes*100 > s.TotalBytes*mostSpilled {
				r.find("decoding_spills", "%s of %s that were decoded went through temporary files: "+
					"logical_decoding_work_mem is %s", size(s.SpillBytes), size(s.TotalBytes),
					size(f.bytesOf("logical_decoding_work_mem", 1<<10)))
			}
		}},
	{name: "postgres.archive", needs: []source{srcServer}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			if f.Stats.ArchiveFailing {
				r.find("archive_failing", "archiving %s failed at %s, and nothing was archived since",
					f.Stats.ArchiveWAL, f.Stats.ArchiveSince)
			}
		}},
	{name: "postgres.standby_slots", needs: []source{srcSettings, srcSlots},
		about: func(f *Facts) bool { return f.Settings["synchronized_standby_slots"] != "" },
		run: func(f *Facts, r *reporter) {
			for _, name := range split(f.Settings["synchronized_standby_slots"]) {
				i := slices.IndexFunc(f.Slots, func(s Slot) bool { return s.Name == name })
				switch {
				case i < 0:
					r.find("standby_slots_blocked",
						"synchronized_standby_slots names %s, which does not exist",
						postgres.Quote(name))
				case !f.Slots[i].Active:
					r.find("standby_slots_blocked", "synchronized_standby_slots names %s, which nobody reads",
						postgres.Quote(name))
				}
			}
		}},
	{name: "postgres.messages", needs: []source{srcServer},
		about: func(f *Facts) bool { return f.Config.Source.Messages() },
		run: func(f *Facts, r *reporter) {
			if f.Stats.PublicEmits {
				r.find("message_public",
					"PUBLIC may execute pg_logical_emit_message, so every role that can "+
						"connect to this database can write an event")
			}
		}},
	{name: "postgres.clock", needs: []source{srcPostgres}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			clock(f, r, "PostgreSQL's", f.Postgres.Clock, f.Postgres.RoundTrip)
		}},
}

// clock compares a server's clock with ours, as far as an answer that took so long allows.
func clock(f *Facts, r *reporter, whose string, ahead, trip time.Duration) {
	off := ahead.Abs() - trip/2
	if off < time.Second {
		r.ok("within %v of this host's", short(max(ahead.Abs(), trip/2)))
		return
	}
	as := finding.Warning
	if durable := f.Config.Sink.DurableAfter; durable > 0 && off > durable/10 {
		as = finding.Error
	}
	direction := "ahead of"
	if ahead < 0 {
		direction = "behind"
	}
	r.findAs(as, "clock_differs", "%s clock is %v %s this host's", whose,
		ahead.Abs().Round(100*time.Millisecond),
		direction)
}

// number is a setting that is a whole number; 0 where the server does not have it.
func (f *Facts) number(name string) int {
	n, _ := strconv.Atoi(f.Settings[name])
	return n
}

// bytesOf is a setting in units of so many bytes; -1 stays what it is.
func (f *Facts) bytesOf(name string, unit int64) int64 {
	n, _ := strconv.ParseInt(f.Settings[name], 10, 64)
	if n < 0 {
		return n
	}
	return n * unit
}

// walRate is how many bytes of WAL the server writes a second, on average since its counter was reset; 0
// where that is too short a time to say.
func (f *Facts) walRate() float64 {
	if seconds(f.Stats.WALSeconds) < leastAveraged {
		return 0
	}
	return f.Stats.WALBytes / f.Stats.WALSeconds
}

func split(list string) (all []string) {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.Trim(strings.TrimSpace(name), `"`); name != "" {
			all = append(all, name)
		}
	}
	return all
}
