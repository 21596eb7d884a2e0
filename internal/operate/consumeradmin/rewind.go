package consumeradmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// Rewind says which consumer is set back, and where to.
type Rewind struct {
	Name    string
	To      string // start, seq:N, position:P or time:T
	Running bool   // also while instances run, which then go on from there
	DryRun  bool   // only Confirm is called

	// Confirm is called with the plan; nothing is changed if it returns an error.
	Confirm func(p *Plan) error

	target target       // To, parsed
	reopen func() error // reads what the archive has again
}

// Plan is what a rewind does. The JSON names are stable.
type Plan struct {
	Name     string           `json:"name"`
	Offsets  string           `json:"marks"`
	Was      uint64           `json:"was"`   // the sequence up to which it was done
	To       uint64           `json:"to"`    // the last sequence that stays done
	Exact    bool             `json:"-"`     // Again is exact: all partitions were at Was
	Again    uint64           `json:"again"` // number of events that are delivered again
	First    uint64           `json:"first,omitempty"`
	Position *outbox.Position `json:"first_position,omitempty"`
	Stored   *time.Time       `json:"first_stored,omitempty"`
	// parked events that are delivered again as well, and no longer parked
	Parked   int      `json:"parked"`
	Replayed bool     `json:"replayed"` // they are marked as replayed
	Running  []string `json:"running,omitempty"`

	// of Again, those that the archive has and the stream does not
	Archived uint64 `json:"archived,omitempty"`

	lost    []int     // partitions that are set back, and whose newest done message the broker has lost
	created time.Time // of the stream
	removed uint64    // sequences behind To, up to Was, that the stream has no message of
}

// stands reports whether a plan says what a later one does. While instances run, they park and process. What
// leaves the front of the stream comes from the archive, if some of it did before: the consumer has one.
func (p *Plan) stands(now *Plan, running bool) bool {
	same := p.created.Equal(now.created) && p.Was == now.Was && p.To == now.To &&
		p.removed-p.Archived == now.removed-now.Archived && (p.Archived > 0) == (now.Archived > 0) &&
		p.First == now.First && (p.Parked == now.Parked || running)
	if same && p.Position != nil && now.Position != nil {
		same = *p.Position == *now.Position && p.Stored.Equal(*now.Stored)
	}
	return same
}

// asked asks whether to do what the plan says, and looks again then: while somebody thinks, messages may be
// removed or erased, and somebody else may set the consumer back. false: it is a dry run.
func (r *Rewind) asked(p *Plan, look func() (*Plan, error)) (bool, error) {
	if err := r.Confirm(p); err != nil || r.DryRun {
		return false, err
	}
	if err := r.reopen(); err != nil {
		return false, err
	}
	now, err := look()
	if err == nil && !p.stands(now, r.Running) {
		err = fatal("rewind_changed", fmt.Sprintf("consumer %s, or its stream, has changed since it was "+
			"asked whether to set it back to sequence %d; now it would be: %s", p.Name, p.To,
			strings.Join(now.Lines(), "; ")), "Nothing was done. Run it again")
	}
	return err == nil, err
}

// Lines is the plan in words.
func (p *Plan) Lines() []string {
	lines := []string{
		fmt.Sprintf("consumer %s goes back from sequence %d to %d", p.Name, p.Was, p.To),
	}
	about := "up to "
	if p.Exact {
		about = ""
	}
	if p.Again > 0 {
		lines = append(lines, fmt.Sprintf("again    %s%s: from sequence %d (position %v, stored %s) "+
			"to sequence %d", about, units.Of(p.Again, "event"), p.First, p.Position,
			p.Stored.UTC().Format(time.RFC3339), p.Was))
	} else {
		lines = append(lines, "again    no event of its filter")
	}
	if p.Archived > 0 {
		lines = append(lines, fmt.Sprintf("archive  %s%d of them are in the archive alone: the consumer "+
			"needs Config.Archive", about, p.Archived))
	}
	if p.Parked > 0 {
		lines = append(lines, fmt.Sprintf("parked   %d of them are parked: they come again in their order, "+
			"and are taken out of the table", p.Parked))
	}
	if len(p.Running) > 0 {
		lines = append(lines, fmt.Sprintf("runs     %s: what is not committed yet is given up, and comes "+
			"again", strings.Join(p.Running, ", ")))
	}
	if len(p.lost) > 0 {
		lines = append(lines, fmt.Sprintf("lost     the broker has lost the newest done message of "+
			"partitions %s: what is published again is not recognized any more, and not marked",
			ranges(p.lost)))
	}
	if p.Replayed {
		lines = append(lines, "marked   Event.Replayed is true for them")
	} else {
		lines = append(lines, "marked   nothing tells them from new ones")
	}
	return lines
}

// Rewind moves a consumer back.
func (a *Admin) Rewind(ctx context.Context, r Rewind) (err error) {
	if r.target, err = parseTarget(r.To, time.Now()); err != nil {
		return err
	}
	stream, err := a.stream(ctx)
	if err != nil {
		return err
	}
	info, offsets, err := a.find(ctx, r.Name)
	if err != nil {
		return err
	}
	closed := func() {}
	defer func() { closed() }()
	r.reopen = func() error {
		closed()
		a.past, closed = nil, func() {}
		if offsets == Plain { // which would not know of it
			return nil
		}
		_, err := stream.Info(ctx)
		if err != nil {
			return fmt.Errorf("stream %s: %w", a.Stream, err)
		}
		closed, err = a.openPast(ctx, stream)
		return err
	}
	if err := r.reopen(); err != nil {
		return err
	}
	switch offsets {
	case InPostgres:
		return a.rewindDatabase(ctx, stream, r)
	case InJetStream:
		return a.rewindBucket(ctx, stream, r, info)
	default:
		return a.rewindPlain(ctx, stream, r)
	}
}

// find looks for the consumer and returns its kind, and its durable if it has one.
func (a *Admin) find(ctx context.Context, name string) (*jetstream.ConsumerInfo, string, error) {
	var info *jetstream.ConsumerInfo
	c, err := a.JS.Consumer(ctx, a.Stream, name)
	switch {
	case err == nil:
		info = c.CachedInfo()
	case !errors.Is(err, jetstream.ErrConsumerNotFound) && !errors.Is(err, jetstream.ErrInvalidConsumerName):
		return nil, "", fmt.Errorf("consumer %s of stream %s: %w", name, a.Stream, err)
	}
	if a.DB != nil {
		if s, err := a.database().load(ctx, a.DB, name, free); err != nil {
			return nil, "", err
		} else if s != nil && s.stream == a.Stream {
			return info, InPostgres, nil
		}
	}
	kv, err := openBucket(ctx, a.JS, a.Stream)
	if err != nil {
		return nil, "", err
	}
	if doc, err := kv.load(ctx, name); err != nil {
		return nil, "", err
	} else if doc != nil {
		return info, InJetStream, nil
	}
	if info != nil {
		switch kind := info.Config.Metadata[metadataOffsets]; {
		case kind != "":
			return info, kind, nil
		case info.Config.Durable == "":
			return nil, "", fatal("consumer_ephemeral", fmt.Sprintf("consumer %s of stream %s is not "+
				"durable: it begins where its program says", name, a.Stream), "Start it anew from there")
		}
		return info, Plain, nil
	}
	if _, err := a.JS.Consumer(ctx, a.Stream, recordName(name)); err == nil {
		return nil, Plain, nil
	}
	return nil, "", fatal("consumer_missing", fmt.Sprintf("stream %s has no consumer %s", a.Stream, name),
		"`outflow consumer list` names those that there are")
}

// runningFault is the error for a consumer that is running.
func runningFault(name, how string) error {
	return fatal("consumer_running", fmt.Sprintf("consumer %s runs: %s", name, how),
		hintStop)
}

// refuseInUse returns an error if a client is waiting for messages from the durable.
func refuseInUse(name string, info *jetstream.ConsumerInfo) error {
	switch {
	case info == nil:
		return nil
	case info.NumWaiting > 0:
		return runningFault(name, fmt.Sprintf("%d pulls wait for messages", info.NumWaiting))
	case info.PushBound:
		return runningFault(name, "messages are pushed to a subscriber")
	}
	return nil
}

// resolve finds the last sequence that stays done. Everything after it is delivered again.
func (a *Admin) resolve(ctx context.Context, stream jetstream.Stream, name string, p target) (uint64, error) {
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("stream %s: %w", a.Stream, err)
	}
	first := max(info.State.FirstSeq, 1)
	if info.State.Msgs == 0 {
		first = info.State.LastSeq + 1
	}
	if to, found, err := a.past.resolve(ctx, p); found || err != nil {
		return to, err
	}
	if a.past != nil && first > a.past.hot {
		return 0, fmt.Errorf("stream %s: messages %d to %d were removed while the archive was read", a.Stream,
			a.past.hot, first-1)
	}
	switch p.kind {
	case "position":
		return a.lastBefore(ctx, first, info.State.LastSeq, jetstream.OrderedConsumerConfig{
			DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first,
		}, func(_ time.Time, h *outbox.Header) bool {
			return h.Pos.Compare(p.position) >= 0
		}, func(h *outbox.Header) error {
			if first > 1 && a.past == nil && p.position.LSN <= h.Thru {
				return a.removedFault(name, first,
					fmt.Sprintf("what was at or behind position %v may be among it", p.position))
			}
			return nil
		})
	case "time":
		return a.lastBefore(ctx, first, info.State.LastSeq, jetstream.OrderedConsumerConfig{
			DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &p.time,
		}, func(at time.Time, _ *outbox.Header) bool { return !at.Before(p.time) }, nil)
	}
	if p.seq < first {
		return 0, a.removedFault(name, first, fmt.Sprintf("sequence %d is among it", p.seq))
	}
	return p.seq - 1, nil
}

// removedFault is the error for a target that retention has removed.
func (a *Admin) removedFault(name string, first uint64, why string) error {
	return fatal("rewind_removed", fmt.Sprintf("stream %s begins at sequence %d: what came before is "+
		"removed, and %s", a.Stream, first, why),
		fmt.Sprintf("`--to seq:%d` goes back to what there is; `outflow replay --from table --to "+
			"consumer:%s` reads what the table has. A consumer that keeps its marks in PostgreSQL or "+
			"JetStream and has Config.Archive can go back to what is archived: archive.url, docs/replay.md",
			first, name))
}

// lastBefore finds the sequence before the first message for which is holds; the stream's last one if there
// is none.
func (a *Admin) lastBefore(ctx context.Context, first, last uint64, oc jetstream.OrderedConsumerConfig,
	is func(time.Time, *outbox.Header) bool, check func(first *outbox.Header) error,
) (uint64, error) {
	if first > last {
		return last, nil
	}
	// A consumer on a replica that lags would end before that, and the place would be an earlier one.
	newest, err := a.API.Message(ctx, a.Stream, jsapi.MessageRequest{Last: ">"})
	switch {
	case err != nil:
		return 0, fmt.Errorf("stream %s: %w", a.Stream, err)
	case newest == nil:
		return last, nil
	}
	upTo := newest.Seq
	if oc.OptStartTime != nil && newest.Time.Before(*oc.OptStartTime) {
		upTo = 0 // it need not come
	}
	oc.HeadersOnly = true
	found, n := last, 0
	err = jsapi.ReadStream(ctx, a.JS, a.Stream, oc, upTo,
		func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
			if outbox.CutOf(m.Subject(), m.Headers()) != nil {
				found = meta.Sequence.Stream
				return nil
			}
			h, err := outbox.ParseHeader(m.Headers().Get(outbox.HeaderName))
			if err != nil {
				return fatal("foreign_message", fmt.Sprintf("stream %s: the message at sequence %d is not "+
					"outflow's: %v", a.Stream, meta.Sequence.Stream, err), "")
			}
			if n++; n == 1 && check != nil {
				if err := check(&h); err != nil {
					return err
				}
			}
			if found = meta.Sequence.Stream; is(meta.Timestamp, &h) {
				found--
				return jsapi.ErrStop
			}
			return nil
		})
	return found, err
}

// plan finds out what is delivered again when a consumer goes back from was to to.
func (a *Admin) plan(ctx context.Context, stream jetstream.Stream, name, offsets string, was, to uint64,
	filters []string) (*Plan, error) {
	p := &Plan{Name: name, Offsets: offsets, Was: was, To: to}
	if to == was {
		return nil, fatal("rewind_ahead", fmt.Sprintf("consumer %s is there already: it has come up to "+
			"sequence %d, and goes on behind it", name, was),
			"A rewind only goes back: name an earlier place")
	}
	if to > was {
		return nil, fatal("rewind_ahead", fmt.Sprintf("consumer %s has come up to sequence %d, and nothing "+
			"up to there lies behind this place (sequence %d)", name, was, to+1),
			"A rewind only goes back: name an earlier place")
	}
	info, err := stream.Info(ctx, jetstream.WithDeletedDetails(true))
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", a.Stream, err)
	}
	p.created = info.Created
	first := min(max(info.State.FirstSeq, to+1), was+1)
	p.removed = first - to - 1
	for _, seq := range info.State.Deleted {
		if seq >= first && seq <= was {
			p.removed++
		}
	}
	from, err := a.count(ctx, stream, to+1, filters)
	if err != nil {
		return nil, err
	}
	rest, err := a.count(ctx, stream, was+1, filters)
	if err != nil {
		return nil, err
	}
	p.Archived = a.past.count(to+1, was)
	p.Again = from - min(rest, from) + p.Archived
	if p.Again == 0 {
		return p, nil
	}
	begins, err := a.past.first(ctx, to+1, filters)
	if err == nil && begins == nil {
		begins, err = a.firstFrom(ctx, to+1, everything(filters))
	}
	if err != nil {
		return nil, err
	}
	if begins == nil || begins.seq > was { // what the archive has was counted whatever the filter
		p.Again = 0
		return p, nil
	}
	p.First, p.Position, p.Stored = begins.seq, &begins.outflow.Pos, &begins.at
	return p, nil
}

// offsetAt is the offset at a sequence.
func (a *Admin) offsetAt(ctx context.Context, seq uint64) (offset, error) {
	m, err := a.past.message(ctx, seq)
	if err == nil && m == nil {
		m, err = a.message(ctx, seq)
	}
	if err != nil {
		return offset{}, err
	}
	to := offset{Seq: seq}
	if m != nil { // otherwise the consumer does not compare it
		to.Due, to.N, to.Pos = m.outflow.Due, uint32(m.outflow.N), m.outflow.Pos
		if to.Pos.Repaired() {
			to.N = to.Pos.Index
		}
	}
	return to, nil
}

// hasRead returns an error for a consumer that has read nothing.
func hasRead(name string, s *state) error {
	if len(s.offsets) == 0 {
		return fatal("rewind_ahead", fmt.Sprintf("consumer %s has read nothing yet", name),
			"It begins where its program says")
	}
	return nil
}

// planOffsets plans what is done with stored offsets. of is the plan that was asked about; nil: none yet.
func (a *Admin) planOffsets(ctx context.Context, stream jetstream.Stream, r Rewind, offsets string,
	s *state, of *Plan) (*Plan, error) {
	if err := hasRead(r.Name, s); err != nil {
		return nil, err
	}
	to, err := a.resolve(ctx, stream, r.Name, r.target)
	if err != nil {
		return nil, err
	}
	was := s.furthest()
	if of != nil && r.Running { // what its instances have processed since
		was = min(was, of.Was)
	}
	p, err := a.plan(ctx, stream, r.Name, offsets, was, to, s.filters)
	if p != nil {
		p.lost = slices.DeleteFunc(s.holed(), func(n int) bool { return s.offsets[n].Seq <= to })
		p.Replayed = true
		p.Exact = s.lowest().Seq == s.furthest() && (p.Archived == 0 || everything(s.filters) == nil)
	}
	return p, err
}

// inDatabase reads a consumer whose offsets are in the database.
func (a *Admin) inDatabase(ctx context.Context, q consumer.DB, name string, h hold) (*state, error) {
	if a.DB == nil {
		return nil, fatal("consumer_database", fmt.Sprintf("consumer %s keeps its marks in PostgreSQL", name),
			"Say where with --database")
	}
	s, err := a.database().load(ctx, q, name, h)
	if err == nil && (s == nil || s.stream != a.Stream) {
		err = fatal("consumer_database", fmt.Sprintf("%s: this database has no marks of "+
			"consumer %s of stream %s", a.From, name, a.Stream),
			"Give the consumer's own database with --database, and --schema if its tables are not on "+
				"the search path")
	}
	return s, err
}

// refuseAlive returns an error if an instance of a consumer runs.
func refuseAlive(name, hint string, s *state) error {
	alive := s.alive()
	if len(alive) == 0 {
		return nil
	}
	return fatal("consumer_running", fmt.Sprintf("consumer %s runs: %s", name,
		strings.Join(alive, ", ")), hint)
}

const hintStop = "Stop all its instances first; one that was killed counts as dead when its lease has run out"

// rewindDatabase lowers the offsets in a consumer's database, in one transaction that also fences its
// instances.
func (a *Admin) rewindDatabase(ctx context.Context, stream jetstream.Stream, r Rewind) error {
	d := a.database()
	look := func(q consumer.DB, h hold) (*state, error) {
		s, err := a.inDatabase(ctx, q, r.Name, h)
		if err == nil && !r.Running {
			err = refuseAlive(r.Name, hintStop+". If its effects bear it, --running sets it back while it "+
				"runs", s)
		}
		return s, err
	}
	var s *state
	var p *Plan // that was asked about
	var parked []parkedEvent
	var kept []int64
	plan := func() (now *Plan, err error) {
		if s, err = look(a.DB, free); err == nil {
			now, err = a.planOffsets(ctx, stream, r, InPostgres, s, p)
		}
		if err == nil {
			now.Running = s.alive()
			parked, err = d.parkedLive(ctx, a.DB, r.Name)
		}
		if err == nil {
			kept, err = a.again(ctx, s, now.To, parked)
			now.Parked = len(kept)
			// What stays is looked at again: its partition may run, and come to the place meanwhile.
			parked = slices.DeleteFunc(parked, func(e parkedEvent) bool { return s.keeps(e, now.To) })
		}
		return now, err
	}
	var err error
	if p, err = plan(); err != nil {
		return err
	}
	if yes, err := r.asked(p, plan); !yes {
		return err
	}
	to, err := a.offsetAt(ctx, p.To)
	if err != nil {
		return err
	}
	return d.change(ctx, r.Name, func(tx pgx.Tx) error {
		now, err := look(tx, moves)
		switch {
		case err != nil:
			return err
		case now.partitions != s.partitions || now.keying != s.keying,
			!r.Running && !slices.Equal(now.offsets, s.offsets):
			return fatal("consumer_running", fmt.Sprintf("consumer %s has moved meanwhile", r.Name), hintStop)
		}
		all, err := d.parkedLive(ctx, tx, r.Name)
		if err != nil {
			return err
		}
		// Nothing is parked any more while the offsets are locked.
		more, err := a.again(ctx, now, p.To, without(all, parked))
		if err != nil {
			return err
		}
		if err := d.lower(ctx, tx, r.Name, now, to); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `DELETE FROM `+d.table("outflow_parked")+
			` WHERE name = $1 AND ord = ANY($2)`, r.Name, append(kept, more...))
		if err != nil {
			return fmt.Errorf("take out what is parked: %w", err)
		}
		return d.fence(ctx, tx, r.Name)
	})
}

// without returns the parked events that are not among others.
func without(all, others []parkedEvent) []parkedEvent {
	known := make(map[int64]bool, len(others))
	for _, e := range others {
		known[e.ord] = true
	}
	return slices.DeleteFunc(all, func(e parkedEvent) bool { return known[e.ord] })
}

// again returns the rows of parked events, which ascend, that stream or archive have behind a place: those
// are delivered again. A row whose message is gone is the only copy, and stays. So does one in whose place
// there is another event's, as in a stream that was made anew or put back. One that was parked before the
// place may come again, too: the broker lost it, and it was published again behind that. But a partition that
// has not come to the place keeps its offset, which says that what the broker lost is done.
func (a *Admin) again(ctx context.Context, s *state, to uint64, parked []parkedEvent) ([]int64, error) {
	kept, elsewhere := []int64{}, map[event][]int64{}
	for ; len(parked) > 0 && uint64(parked[0].seq) <= to; parked = parked[1:] {
		if e := parked[0]; !s.keeps(e, to) {
			elsewhere[e.event] = append(elsewhere[e.event], e.ord)
		}
	}
	archived, err := a.past.positions(ctx, parked)
	if err != nil {
		return nil, err
	}
	for _, e := range parked {
		m, err := a.message(ctx, uint64(e.seq))
		if err != nil {
			return nil, err
		}
		at, again := archived[e.seq]
		if m != nil {
			at, again = m.outflow.Pos.String(), true
		}
		if again && at == e.position {
			kept = append(kept, e.ord)
		} else {
			elsewhere[e.event] = append(elsewhere[e.event], e.ord)
		}
	}
	republished, err := a.republished(ctx, to, elsewhere)
	return append(kept, republished...), err
}

// keeps reports whether an event was parked before a place to which its partition has not come.
func (s *state) keeps(e parkedEvent, to uint64) bool {
	return uint64(e.seq) <= to && s.offsets[e.hash%int64(len(s.offsets))].Seq <= to
}

// republished returns those of rows whose events archive or stream have behind a place under another
// sequence: the broker lost them, and they were published again.
func (a *Admin) republished(ctx context.Context, to uint64, of map[event][]int64) (rows []int64, err error) {
	if len(of) == 0 {
		return nil, nil
	}
	var subjects []string
	var positions []outbox.Position
	for e := range of {
		subjects = append(subjects, e.subject)
		var p outbox.Position
		if err := p.UnmarshalText([]byte(e.position)); err == nil {
			positions = append(positions, p)
		}
	}
	slices.Sort(subjects)
	slices.SortFunc(positions, outbox.Position.Compare)
	if subjects = slices.Compact(subjects); len(subjects) > maxSubjects {
		subjects = []string{">"}
	}
	take := func(subject string, header nats.Header) (more bool) {
		if h, err := outbox.ParseHeader(header.Get(outbox.HeaderName)); err == nil {
			e := event{subject, h.Pos.String(), h.ID}
			rows = append(rows, of[e]...)
			delete(of, e)
		}
		return len(of) > 0
	}
	err = a.past.read(ctx, to+1, func(s *archive.Manifest) bool {
		if s.Least == nil || s.Greatest == nil {
			return false
		}
		i, _ := slices.BinarySearchFunc(positions, *s.Least, outbox.Position.Compare)
		return i < len(positions) && positions[i].Compare(*s.Greatest) <= 0
	}, func(m *archive.Message) (bool, error) { return take(m.Subject, m.Header), nil })
	newest := uint64(0) // by the leader: a consumer on a replica that lags would end before that
	for _, subject := range subjects {
		m, failed := a.API.Message(ctx, a.Stream, jsapi.MessageRequest{Last: subject})
		if err = cmp.Or(err, failed); m != nil {
			newest = max(newest, m.Seq)
		}
	}
	if err != nil || len(of) == 0 || newest <= to {
		return rows, err
	}
	err = jsapi.ReadStream(ctx, a.JS, a.Stream, jetstream.OrderedConsumerConfig{FilterSubjects: subjects,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: to + 1, HeadersOnly: true,
	}, newest, func(m jetstream.Msg, _ *jetstream.MsgMetadata) error {
		if !take(m.Subject(), m.Headers()) {
			return jsapi.ErrStop
		}
		return nil
	})
	return rows, err
}

// maxSubjects is how many subjects a request names: with many it would be larger than NATS takes.
const maxSubjects = 256

// rewindBucket lowers the offsets in the bucket, by compare-and-set.
func (a *Admin) rewindBucket(ctx context.Context, stream jetstream.Stream, r Rewind,
	info *jetstream.ConsumerInfo) error {
	if err := refuseInUse(r.Name, info); err != nil {
		return err
	}
	kv, err := openBucket(ctx, a.JS, a.Stream)
	if err != nil {
		return err
	}
	var doc *document
	plan := func() (*Plan, error) {
		if doc, err = a.idleDocument(ctx, kv, r.Name); err != nil {
			return nil, err
		}
		return a.planOffsets(ctx, stream, r, InJetStream, &doc.state, nil)
	}
	p, err := plan()
	if err != nil {
		return err
	}
	if yes, err := r.asked(p, plan); !yes {
		return err
	}
	to, err := a.offsetAt(ctx, p.To)
	if err != nil {
		return err
	}
	doc.lower(to)
	if err := kv.save(ctx, r.Name, doc); err != nil {
		if errors.Is(err, jetstream.ErrKeyExists) {
			return runningFault(r.Name, "it has moved meanwhile")
		}
		return err
	}
	return nil
}

// idleDocument reads a consumer's document, if nobody has the lease. An owner counts as dead if the
// document has not changed for the time of the lease.
func (a *Admin) idleDocument(ctx context.Context, kv *bucket, name string) (*document, error) {
	doc, err := kv.load(ctx, name)
	if err != nil {
		return nil, err
	}
	if doc == nil {
		return nil, fatal("consumer_missing", fmt.Sprintf("bucket %s has no marks of consumer %s",
			consumer.Bucket(a.Stream), name), "It has read nothing yet")
	}
	for seen := time.Now(); doc.owner != ""; {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		asked := time.Now()
		now, err := kv.load(ctx, name)
		if err != nil {
			return nil, err
		}
		if now == nil || now.revision != doc.revision {
			return nil, runningFault(name, "instance "+doc.owner+" has the lease")
		}
		if asked.Sub(seen) > doc.lease {
			doc.owner = ""
		}
	}
	return doc, nil
}
