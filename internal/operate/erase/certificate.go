package erase

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// Copy is a stream with copies of the messages. The JSON names are stable.
type Copy struct {
	Stream   string `json:"stream"`
	Messages uint64 `json:"messages"` // that were erased from it, or would be
}

// Report is the certificate: what was reached, and what was not. The JSON names are stable.
type Report struct {
	Request   string     `json:"request"`
	Document  string     `json:"document_hmac,omitempty"`
	Table     string     `json:"table"`
	Stream    string     `json:"stream"`
	Requested *time.Time `json:"requested,omitempty"`
	Finished  *time.Time `json:"finished,omitempty"` // absent: it has not
	Erased    bool       `json:"erased"`             // false: nothing was changed by this run

	Notified    string     `json:"notified,omitempty"` // the id of the last event
	Rows        int64      `json:"rows"`
	Cut         outbox.LSN `json:"cut"`          // what was committed below it goes
	CutSequence uint64     `json:"cut_sequence"` // and what the stream had up to here
	Messages    uint64     `json:"messages"`     // of the stream
	Copies      []Copy     `json:"copies"`
	Parked      int64      `json:"parked"`    // events that consumers had parked
	Databases   []string   `json:"databases"` // that were looked into for them
	Archived    int64      `json:"archived"`  // messages of the archive
	Folders     []string   `json:"archive_folders"`

	Away       []string `json:"replicas_away,omitempty"` // when messages had been erased
	Waiting    []string `json:"waiting,omitempty"`       // what has to come before the rest can go
	NotReached []string `json:"not_reached"`
}

// Lines is the report in words.
func (r *Report) Lines() []string {
	verb := "would go"
	if r.Erased {
		verb = "went"
	}
	lines := []string{}
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	say("request %s", r.Request)
	if r.Document != "" {
		say("document (HMAC) %s", r.Document)
	}
	if r.Notified != "" {
		say("the last event is the row with id %s", r.Notified)
	}
	say("table %s: %s %s", r.Table, units.Of(r.Rows, "row"), verb)
	if r.Cut != 0 {
		say("cut: what was committed below %v, or in the stream up to %d", r.Cut, r.CutSequence)
	}
	say("stream %s: %s %s", r.Stream, units.Of(r.Messages, "message"), verb)
	for _, c := range r.Copies {
		say("stream %s, a copy: %s %s", c.Stream, units.Of(c.Messages, "message"), verb)
	}
	if len(r.Databases) > 0 {
		say("parked by consumers in %s: %s %s", strings.Join(r.Databases, ", "),
			units.Of(r.Parked, "event"), verb)
	}
	if len(r.Folders) > 0 {
		say("archive: %s %s", units.Of(r.Archived, "message"), verb)
	}
	for _, w := range r.Waiting {
		say("waiting: %s", w)
	}
	for _, n := range r.NotReached {
		say("not reached: %s", n)
	}
	switch {
	case r.Finished != nil:
		say("finished at %s", r.Finished.UTC().Format(time.RFC3339))
	case r.Erased:
		say("not finished: run it again")
	}
	return lines
}

// copy reports whether a stream is one of the copies.
func (r *Report) copy(stream string) bool {
	return slices.ContainsFunc(r.Copies, func(k Copy) bool { return k.Stream == stream })
}

// any reports whether the report has anything of the document.
func (r *Report) any() bool {
	return r.Rows > 0 || r.Messages > 0 || r.Parked > 0 || r.Archived > 0 ||
		slices.ContainsFunc(r.Copies, func(k Copy) bool { return k.Messages > 0 })
}

// unsaid is how many messages do not say which document they are of.
func (c *command) unsaid() (n uint64) {
	for _, some := range c.untold {
		n += some
	}
	return n
}

// limits names what is not reached.
func (c *command) limits() {
	r := c.rep
	r.NotReached = []string{
		"PostgreSQL's WAL, its archive and base backups, standbys until they have replayed the deletion, " +
			"dead rows until vacuum, and statistics, which hold values of rows, until ANALYZE",
		"what consumers have made of the events, and what they have parked in other databases than those " +
			"that --database names",
		"what was removed from a stream before, by its limits, a purge or `outflow stream apply`: a NATS " +
			"server's file has it until the messages beside it are gone as well",
		"what was erased, where a NATS server encrypts its files (a JetStream key in its configuration): " +
			"it overwrites nothing, and its file has it, encrypted, until the messages beside it are gone",
		"backups of NATS servers, copies of the archive, and older versions that a bucket keeps",
		"streams of other accounts and domains that mirror this one or source from it",
	}
	add := func(format string, args ...any) {
		r.NotReached = append(r.NotReached, fmt.Sprintf(format, args...))
	}
	anew := func(in string, n []uint64) {
		add("%s of the document in %s, which was made anew since, from %d on: by their positions "+
			"written after the erasure began. If they are of an earlier database cluster, erase the "+
			"document with another request", units.Of(len(n), "message"), in, n[0])
	}
	if slices.ContainsFunc(c.list, func(s streamInfo) bool {
		return s.replicas > 1 && (s.name == c.cfg.Stream || r.copy(s.name))
	}) {
		add("logs of Raft, by which NATS servers replicate a stream: they have what was published until " +
			"the servers shorten them, some minutes later")
	}
	r.NotReached = append(r.NotReached, c.parked.Unseen...)
	for _, s := range c.list {
		if c.ours(s.restored) && s.live && s.name != c.cfg.Stream {
			add("stream %s, which was restored from the archive, and to which an Outflow publishes: erase "+
				"the document with the settings of that one", s.name)
		}
		if n := c.stays[s.name]; len(n) > 0 && s.name == c.cfg.Stream {
			anew("stream "+s.name, n)
		} else if len(n) > 0 {
			add("%s of the document in stream %s, from %d on: by their positions written "+
				"after the erasure began. If they are of an earlier database cluster, delete "+
				"them: `nats stream rmm %[2]s SEQUENCE`", units.Of(len(n), "message"), s.name, n[0])
		}
		if s.outflow && s.name != c.cfg.Stream && !r.copy(s.name) {
			add("stream %s of the account, which has messages of an Outflow: if they are copies of these, "+
				"name it with --copy %[1]s", s.name)
		}
	}
	for _, name := range r.Folders {
		if n := c.stays[archived(name)]; len(n) > 0 {
			anew("archive "+name+" of stream "+c.cfg.Stream, n)
		}
	}
	if n := len(c.stays[parkedEvents]); n > 0 {
		add("%s of the document that consumers have parked: by their positions written after the erasure "+
			"began. If they are of an earlier database cluster, delete them: `outflow parked skip`",
			units.Of(n, "event"))
	}
	for _, name := range c.theirs {
		add("partition %s, which somebody else detached: delete the rows of the document there", name)
	}
	readers := c.l.Readers(c.rd, c.others)
	for _, o := range c.others {
		why, may := readers.May[o.Slot]
		switch {
		case o.Stream == c.cfg.Stream || r.copy(o.Stream):
		case slices.Contains(readers.Others, o.Slot):
			add("stream %s, to which another Outflow publishes the rows of this table, with slot %s: erase "+
				"the document with the settings of that one", o.Stream, o.Slot)
		case may:
			add("stream %s, to which another Outflow may publish the rows of this table, with slot %s (%s): "+
				"erase the document with the settings of that one", o.Stream, o.Slot, why)
		}
	}
	for _, replica := range r.Away {
		add("the files of %s: it was away when messages were erased, and may not have overwritten them. Let "+
			"the server make them anew: `nats stream cluster peer-remove`", replica)
	}
	if c.former {
		add("what has the document as column %s prints it today: rows whose values were changed with the "+
			"column's type, and messages since: erase that as well, with another request",
			c.l.Layout.Mapping.Doc)
	}
	if untold := c.unsaid(); untold > 0 {
		add("%s that %s not say the document: dead letters without one, or "+
			"published while `subject` was another one; run it again with that `subject`, and the same "+
			"request", units.Of(untold, "message"), units.Agree(untold, "does", "do"))
	}
	if c.passed > 0 {
		add("%s of the archive, passed over because by `subject` (%s) and "+
			"`sink.dead_letter_subject` (%s) no message in them is the document's: if some were published "+
			"while one of these was another one, run it again with that one, and the same request",
			units.Of(c.passed, "segment"), c.doc.Template(), c.doc.Dead())
	}
	if n := len(c.nowhere); n > 0 {
		add("%s, from %d to %d, gone from the stream, and which the archive lacks: if another "+
			"one has them, as of a volume that is not mounted, run it again with that one, and the "+
			"same request", units.Of(c.nowhere.Count(), "message"), c.nowhere[0].From, c.nowhere[n-1].To)
	}
	if of, _, ok := archive.StreamOf(c.rd.Stream.Restored); ok && of != c.cfg.Stream {
		add("folder %s of the archive of stream %s, from which stream %s was restored: erase the document "+
			"with the settings of that one, or remove the folder if nobody needs it", c.rd.Stream.Restored,
			of, c.cfg.Stream)
	}
	for _, name := range c.leftovers {
		add("object %s of the archive, which a run left that was killed before the stream was made again: "+
			"no manifest names it, and it may be deleted", name)
	}
	if id := c.cfg.Cluster.ID; id > 0 {
		add("what clusters other than %d have: rows, unless the deletion is replicated to them; streams and "+
			"archives of what was written there: erase the document there as well; and streams of what "+
			"they have published of the rows of this one, from which no command erases it: `nats stream rmm "+
			"STREAM SEQUENCE`", id)
	}
	if !c.cfg.Shard.Whole() {
		add("streams of other shards than %v", c.cfg.Shard)
	}
	switch {
	case c.store == nil:
		add("an archive, because archive.url is not set")
	case c.empty:
		add("an archive: that of archive.url has nothing of a stream %s. If there is one, as of a volume "+
			"that is not mounted, run it again with that one, and the same request", c.cfg.Stream)
	}
}
