package doctor

import (
	"maps"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/outbox"
)

const (
	filling  = 75 // percent
	full     = 90
	manySubj = 1_000_000
	muchLag  = 200
	oldWAL   = 64 << 20
	oldPlace = 10 * time.Minute
)

var natsChecks = []check{
	{name: "nats.reachable", needs: []source{srcNATS}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			n := f.NATS
			switch {
			case n.RoundTrip > verySlowTrip:
				r.findAs(finding.Error, "nats_slow", "NATS (%s) takes %v to answer", n.Server,
					short(n.RoundTrip))
			case n.RoundTrip > slowTrip:
				r.find("nats_slow", "NATS (%s) takes %v to answer", n.Server, short(n.RoundTrip))
			}
			r.ok("%s, nats-server %s, %v", n.Server, n.Version, short(n.RoundTrip))
		}},
	{name: "nats.connection", needs: []source{srcNATS}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			protected(r, "NATS ("+f.NATS.Server+")", "Use tls:// in nats.url, and nats.tls.ca if the "+
				"server's certificate is not signed by a public authority", f.NATS.Link)
		}},
	{name: "nats.certificates", needs: []source{srcNATS}, beforeInit: true,
		about: func(f *Facts) bool { return len(f.NATS.Link.Certificates) > 0 },
		run: func(f *Facts, r *reporter) {
			expiring(f, r, f.NATS.Link.Certificates)
		}},
	{name: "nats.storage", needs: []source{srcAccount}, beforeInit: true,
		run: func(f *Facts, r *reporter) {
			a, limited := f.Account, 0
			look := func(of string, used uint64, limit int64) {
				if limit <= 0 {
					return
				}
				limited++
				if p := percent(used, limit); p >= filling {
					r.findAs(worse(p >= full), "nats_storage", "the account's %s is used to %d %%: %s of %s",
						of, p,
						size(int64(used)), size(limit))
				}
			}
			look("file storage", a.Storage, a.Limits.Storage)
			look("memory storage", a.Memory, a.Limits.Memory)
			for _, tier := range slices.Sorted(maps.Keys(a.Tiers)) {
				t := a.Tiers[tier]
				look("file storage in tier "+tier, t.Storage, t.Limits.Storage)
				look("memory storage in tier "+tier, t.Memory, t.Limits.Memory)
			}
			if limited == 0 {
				r.ok("the account has no limit; the server's can't be seen from here")
			}
		}},
}

var streamChecks = []check{
	{name: "stream.usable", needs: []source{srcStream},
		run: func(f *Facts, r *reporter) {
			switch {
			case f.Stream.Fault != nil:
				r.fault(f.Stream.Fault)
			case f.hasStream():
				r.ok("%s, %s, last sequence %d", f.Config.Stream,
					units.Of(f.Stream.State.Messages, "message"), f.Stream.State.Last)
			case f.resolvedTo() != nil:
				r.fault(f.resolvedTo())
			case f.known(srcRecord) && f.Readings.Record == nil:
				r.find("not_initialised", "there is no stream %s at %s, and no checkpoint record",
					f.Config.Stream,
					f.NATS.Server)
			default:
				r.find("stream_missing", "stream %s does not exist at %s", f.Config.Stream, f.NATS.Server)
			}
		}},
	{name: "stream.replicas", needs: []source{srcNATS, srcStream}, about: (*Facts).hasStream,
		run: func(f *Facts, r *reporter) {
			c := f.Stream.Config
			if c.Replicas < 2 {
				if f.NATS.Cluster != "" {
					r.find("stream_unreplicated", "stream %s has one replica, in cluster %s", c.Name,
						f.NATS.Cluster)
				}
				r.ok("one, on a server that is alone")
				return
			}
			if f.Stream.Cluster != nil {
				for _, p := range f.Stream.Cluster.Replicas {
					switch {
					case p.Offline:
						r.findAs(finding.Warning, "stream_replica", "replica %s of stream %s is offline",
							p.Name, c.Name)
					case !p.Current || p.Lag > muchLag:
						r.findAs(finding.Warning, "stream_replica",
							"replica %s of stream %s is %d operations behind",
							p.Name, c.Name, p.Lag)
					}
				}
			}
			r.ok("%d", c.Replicas)
		}},
	{name: "stream.storage", needs: []source{srcStream}, about: (*Facts).hasStream,
		run: func(f *Facts, r *reporter) {
			if c := f.Stream.Config; c.Storage == "memory" {
				r.find("stream_memory", "stream %s is stored in memory", c.Name)
			}
			r.ok("%s", f.Stream.Config.Storage)
		}},
	{name: "stream.fill", needs: []source{srcStream}, about: (*Facts).hasStream,
		run: func(f *Facts, r *reporter) {
			c, s := f.Stream.Config, f.Stream.State
			if c.Discard != "new" { // a full one removes its oldest messages, as it is meant to
				r.ok("it removes its oldest messages where it is full")
				return
			}
			if c.MaxBytes > 0 && percent(s.Bytes, c.MaxBytes) >= filling {
				r.findAs(worse(percent(s.Bytes, c.MaxBytes) >= full), "stream_filling",
					"stream %s has %s of "+
						"max_bytes = %s, and refuses messages (discard new) when it is full", c.Name,
					size(int64(s.Bytes)),
					size(c.MaxBytes)).Command = "nats stream edit " + c.Name + " --max-bytes=-1"
			}
			if c.MaxMsgs > 0 && percent(s.Messages, c.MaxMsgs) >= filling {
				r.findAs(worse(percent(s.Messages, c.MaxMsgs) >= full), "stream_filling",
					"stream %s has %d of "+
						"max_msgs = %d, and refuses messages (discard new) when it is full", c.Name,
					s.Messages,
					c.MaxMsgs).Command = "nats stream edit " + c.Name + " --max-msgs=-1"
			}
		}},
	{name: "stream.archive", needs: []source{srcStream}, about: (*Facts).isArchived,
		run: func(f *Facts, r *reporter) {
			if limits := f.Stream.Config.Limits.String(); limits != "" {
				r.find("archive_limits", "stream %s has %s, and archive.url is set: messages may go that "+
					"are not archived", f.Config.Stream, limits).Command = "nats stream edit " +
					f.Config.Stream + " --max-age=0 --max-msgs=-1 --max-bytes=-1 --max-msgs-per-subject=-1"
			}
			r.ok("the stream removes nothing by itself")
		}},
	{name: "stream.subjects", needs: []source{srcStream}, about: (*Facts).hasStream,
		run: func(f *Facts, r *reporter) {
			if n := f.Stream.State.Subjects; n > manySubj {
				r.find("many_subjects", "stream %s has %d subjects", f.Config.Stream, n)
			}
			r.ok("%d", f.Stream.State.Subjects)
		}},
	{name: "stream.clock", needs: []source{srcStream}, about: (*Facts).hasStream,
		run: func(f *Facts, r *reporter) { clock(f, r, "NATS's", f.Stream.Clock, f.Stream.Asked) }},
}

var recordChecks = []check{
	{name: "record.readable", needs: []source{srcRecord},
		run: func(f *Facts, r *reporter) {
			switch p := f.newest(); {
			case p != nil:
				r.ok("%v = sequence %d", p.Due, p.Seq)
			case f.resolvedTo() != nil:
				r.fault(f.resolvedTo())
			case f.hasSlot() && f.known(srcSlots):
				r.find("record_missing", "there is no checkpoint record of slot %s", f.Config.Slot)
			default:
				r.find("not_initialised", "there is no checkpoint record of slot %s", f.Config.Slot)
			}
		}},
	{name: "record.age", needs: []source{srcRecord, srcSlots, srcReplication},
		about: func(f *Facts) bool { return f.newest() != nil && f.hasSlot() && f.slot().Active },
		run: func(f *Facts, r *reporter) {
			p := f.newest()
			age, behind := f.Now.Sub(p.Since), int64(f.Identity.WALEnd)-int64(p.At())
			if age > oldPlace && behind > oldWAL {
				r.find("record_old", "the newest recorded checkpoint is %v old and %s of WAL behind, "+
					"although slot %s is read", units.Duration(age), size(behind),
					f.Config.Slot).Command = "outflow status"
			}
			r.ok("%s of WAL behind the end", size(max(behind, 0)))
		}},
	{name: "maintain.runs", needs: []source{srcRecord}, about: (*Facts).isMaintained,
		run: func(f *Facts, r *reporter) {
			m := f.Maintained
			at := m.At.UTC().Format("2006-01-02 15:04:05 UTC")
			if m.Overdue(f.Now) {
				r.find("maintain_absent", "outflow maintain has not run since %s; it was pid %d on %s", at,
					m.PID, m.Host)
			}
			for _, p := range m.Parts {
				if p.Failing.IsZero() {
					continue
				}
				as := finding.Note
				entry, _ := finding.Of(p.Code) // what somebody has to decide does not end by itself
				if slices.Contains(entry.Classes, outbox.Gap) || f.Now.Sub(p.Failing) > watch.LongFailing {
					as = finding.Warning
				}
				r.findAs(as, "maintain_failing", "part %s of outflow maintain fails since %s: %s", p.Name,
					p.Failing.UTC().Format("2006-01-02 15:04:05 UTC"), p.Message)
			}
			r.ok("last at %s", at)
		}},
	{name: "archive.behind", needs: []source{srcRecord}, about: func(f *Facts) bool {
		return f.isMaintained() && f.Maintained.Archive != nil
	}, run: func(f *Facts, r *reporter) {
		a := f.Maintained.Archive
		if f.Maintained.ArchiveBehind(f.Now) {
			r.find("archive_behind", "the archive ends at sequence %d; %d confirmed messages wait, the "+
				"oldest since %s", a.Sequence, a.Messages, a.Oldest.UTC().Format("2006-01-02 15:04:05 UTC"))
		}
		r.ok("archived up to sequence %d", a.Sequence)
	}},
}

func percent(used uint64, limit int64) int64 { return int64(float64(used) * 100 / float64(limit)) }

func worse(yes bool) finding.Severity {
	if yes {
		return finding.Error
	}
	return finding.Warning
}
