package consumeradmin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// Admin lists and rewinds the consumers of a stream.
type Admin struct {
	Stream string
	JS     jetstream.JetStream
	API    *jsapi.Client
	DB     *pgx.Conn // a consumer's database; nil: not given
	Schema string    // of its tables; "": the search path
	From   string    // the setting that names the database

	Archive string // the setting archive.url; "": none

	past *past // what a rewind may go back to in the archive; nil: nothing
}

func (a *Admin) database() *database {
	if a.DB == nil {
		return nil
	}
	return &database{a.DB, a.Schema, a.From}
}

// metadataOffsets is in the metadata of the durable of a consumer of package consumer: postgres or jetstream.
const metadataOffsets = "outflow.marks"

// The kinds of consumer as in the metadata, and plain for any other durable.
const (
	InPostgres  = "postgres"
	InJetStream = "jetstream"
	Plain       = "plain"
)

// Consumer is what is known of one consumer. The JSON names are stable.
type Consumer struct {
	Name    string   `json:"name"`
	Durable bool     `json:"durable"`
	Filters []string `json:"filters,omitempty"`
	Offsets string   `json:"marks"` // postgres, jetstream, or plain: it is not one of package consumer
	// the consumer whose instance reads with it, and which has the marks; "": it is one by itself
	Of string `json:"of,omitempty"`

	// Messages of its filters behind Sequence; of a durable those that were not delivered yet
	Pending    uint64 `json:"pending"`
	AckPending int    `json:"ack_pending"` // delivered but not acknowledged

	Sequence uint64           `json:"sequence"`           // everything up to here is done
	Position *outbox.Position `json:"position,omitempty"` // of that message, if it can be read
	Running  bool             `json:"running"`            // a client is reading from it
	Owner    string           `json:"owner,omitempty"`    // of marks in JetStream: the instance that has the lease

	Partitions int     `json:"partitions,omitempty"`
	Least      *uint64 `json:"least_mark,omitempty"`
	Most       *uint64 `json:"most_mark,omitempty"`

	Keying string  `json:"keying,omitempty"` // how the document of a message is found
	Holed  []int   `json:"holed,omitempty"`  // partitions whose newest done message the broker has lost
	Change *Change `json:"change,omitempty"` // of the layout, under way

	// Of marks in PostgreSQL
	Members         []Member `json:"members,omitempty"`
	Unowned         []int    `json:"unowned,omitempty"` // partitions that nobody works on
	Parked          *int     `json:"parked,omitempty"`  // events; absent: not known
	ParkedDocuments *int     `json:"parked_documents,omitempty"`

	Note string `json:"note,omitempty"`
}

// Lines are the details that a line of the list has no room for.
func (c *Consumer) Lines() (lines []string) {
	for _, m := range c.Members {
		state := "works on partitions " + ranges(m.Partitions)
		switch {
		case !m.Alive:
			state = "did not renew itself since " + m.Expires.UTC().Format(time.RFC3339)
		case len(m.Partitions) == 0:
			state = "has no partition"
		}
		lines = append(lines, fmt.Sprintf("instance %s, since %s: %s", m.Instance,
			m.Joined.UTC().Format(time.RFC3339), state))
	}
	if len(c.Unowned) > 0 {
		lines = append(lines, "nobody works on partitions "+ranges(c.Unowned))
	}
	if len(c.Holed) > 0 {
		lines = append(lines, "the stream has lost the newest done message of partitions "+ranges(c.Holed)+
			": what comes again is recognized")
	}
	if c.Change != nil {
		lines = append(lines, fmt.Sprintf("on its way to %s (%s): %d of %s done up to sequence %d",
			units.Of(c.Change.Partitions, "partition"), c.Change.Keying, c.Change.Reached,
			units.Of(c.Partitions, "partition"), c.Change.Barrier))
	}
	if c.Note != "" {
		lines = append(lines, c.Note)
	}
	return lines
}

// ranges writes ascending numbers as 0-3, 5.
func ranges(all []int) string {
	var parts []string
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1] == all[j]+1 {
			j++
		}
		if part := strconv.Itoa(all[i]); i == j {
			parts = append(parts, part)
		} else {
			parts = append(parts, part+"-"+strconv.Itoa(all[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}

// List reads the consumers of the stream.
func (a *Admin) List(ctx context.Context) ([]Consumer, error) {
	stream, err := a.stream(ctx)
	if err != nil {
		return nil, err
	}
	kv, err := openBucket(ctx, a.JS, a.Stream)
	if err != nil {
		return nil, err
	}
	var all []Consumer
	lister := stream.ListConsumers(ctx)
	for info := range lister.Info() {
		if c, ok := a.fromJetStream(info); ok {
			all = append(all, c)
		}
	}
	if err := lister.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, fmt.Errorf("list the consumers of stream %s: %w", a.Stream, err)
	}
	if all, err = a.addStored(ctx, all, kv); err != nil {
		return nil, err
	}
	for i := range all {
		c := &all[i]
		if c.Of != "" {
			c.Note = fmt.Sprintf("an instance of consumer %s reads with it", c.Of)
			if !slices.ContainsFunc(all, func(o Consumer) bool { return o.Name == c.Of }) {
				c.Note += ", whose marks are not here: give its database with --database"
			}
		}
		if err := a.addOffsets(ctx, stream, c, kv); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(all, func(a, b Consumer) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

func (a *Admin) stream(ctx context.Context) (jetstream.Stream, error) {
	stream, err := a.JS.Stream(ctx, a.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fatal("stream_missing", fmt.Sprintf("stream %s does not exist", a.Stream),
			"Run `outflow init`, or name the right one with --stream")
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", a.Stream, err)
	}
	return stream, nil
}

// fromJetStream reads a durable. The record of an interrupted rewind is not a consumer, but describes one.
func (a *Admin) fromJetStream(info *jetstream.ConsumerInfo) (Consumer, bool) {
	if text, ok := info.Config.Metadata[metadataRewind]; ok {
		var r record
		if json.Unmarshal([]byte(text), &r) != nil {
			return Consumer{}, false
		}
		return Consumer{
			Name: r.Config.Durable, Durable: true, Filters: filtersOf(&r.Config), Offsets: Plain,
			Pending: info.NumPending, Sequence: r.Was,
			Note: fmt.Sprintf("a rewind was interrupted: `outflow consumer rewind %s --to seq:%d` "+
				"finishes it",
				r.Config.Durable, r.To+1),
		}, true
	}
	c := Consumer{
		Name: info.Name, Durable: info.Config.Durable != "", Filters: filtersOf(&info.Config),
		Offsets: cmp.Or(info.Config.Metadata[metadataOffsets], Plain),
		Pending: info.NumPending, AckPending: info.NumAckPending, Sequence: info.AckFloor.Stream,
		Running: info.NumWaiting > 0 || info.PushBound, Of: info.Config.Metadata[metadataName],
	}
	if who := info.Config.Metadata[jsapi.MetadataReader]; who != "" {
		c.Note = who + " reads with it"
	}
	return c, true
}

// Filters are the subject filters of a consumer of package consumer: only what they let through may be
// replayed to it.
func (a *Admin) Filters(ctx context.Context, name string) ([]string, error) {
	_, kind, err := a.find(ctx, name)
	if f := outbox.FaultOf(err); f != nil && f.Code == "consumer_missing" {
		hint := "One that was never started has all before it: start it"
		if a.DB == nil {
			hint = "Name its database with --database"
		}
		return nil, fatal("replay_consumer", f.Message,
			"`outflow consumer list` names those that there are. "+hint)
	}
	if err != nil {
		return nil, err
	}
	var s *state
	switch kind {
	case InPostgres:
		if s, err = a.inDatabase(ctx, a.DB, name, free); err != nil {
			return nil, err
		}
	case InJetStream:
		kv, err := openBucket(ctx, a.JS, a.Stream)
		if err != nil {
			return nil, err
		}
		doc, err := kv.load(ctx, name)
		if err != nil || doc == nil {
			return nil, err
		}
		s = &doc.state
	default:
		return nil, fatal("replay_consumer", fmt.Sprintf("consumer %s of stream %s is not one of package "+
			"consumer: it does not know of replays", name, a.Stream),
			"Replay to a subject or stream that it reads, or set it back with `outflow consumer rewind`")
	}
	return everything(s.filters), nil
}

// addStored adds the consumers that the database or the bucket has and that have no durable, and drops the
// records of those that have one again.
func (a *Admin) addStored(ctx context.Context, all []Consumer, kv *bucket) ([]Consumer, error) {
	there := map[string]bool{}
	for _, c := range all {
		if c.Note == "" {
			there[c.Name] = true
		}
	}
	all = slices.DeleteFunc(all, func(c Consumer) bool { return c.Note != "" && there[c.Name] })
	add := func(kind string, names []string) {
		for _, name := range names {
			if i := slices.IndexFunc(all, func(c Consumer) bool { return c.Name == name }); i >= 0 {
				all[i].Offsets = cmp.Or(kind, all[i].Offsets)
				continue
			}
			all = append(all, Consumer{Name: name, Durable: true, Offsets: kind})
		}
	}
	if a.DB != nil {
		names, err := a.database().names(ctx, a.Stream)
		if err != nil {
			return nil, err
		}
		add(InPostgres, names)
	}
	names, err := kv.names(ctx)
	if err != nil {
		return nil, err
	}
	add(InJetStream, names)
	return all, nil
}

// addOffsets adds the offsets and the position.
func (a *Admin) addOffsets(ctx context.Context, stream jetstream.Stream, c *Consumer, kv *bucket) error {
	var s *state
	var err error
	switch d := a.database(); {
	case c.Of != "": // its consumer has them
	case c.Offsets == InPostgres && d != nil:
		if s, err = d.load(ctx, a.DB, c.Name, free); err != nil {
			return err
		}
		if s == nil {
			c.Note = "this database has no marks of it: give its own with --database"
			break
		}
		events, documents, err := d.parked(ctx, a.DB, c.Name)
		if err != nil {
			return err
		}
		c.Parked, c.ParkedDocuments = &events, &documents
		c.Members = s.members
		c.Unowned, c.Running = s.unowned(), len(s.alive()) > 0
	case c.Offsets == InJetStream:
		doc, err := kv.load(ctx, c.Name)
		if err != nil {
			return err
		}
		if doc != nil {
			s, c.Owner = &doc.state, doc.owner
		}
	}
	if s != nil {
		least, most := s.lowest().Seq, s.furthest()
		c.Partitions, c.Sequence, c.Filters = s.partitions, least, s.filters
		c.Keying, c.Change, c.Holed = s.keying, s.change, s.holed()
		if len(s.offsets) > 0 {
			c.Least, c.Most = &least, &most
			if c.Pending, err = a.behind(ctx, stream, least, s.filters); err != nil {
				return err
			}
		}
	}
	m, err := a.message(ctx, c.Sequence)
	if err != nil {
		return err
	}
	if m != nil {
		c.Position = &m.outflow.Pos
	}
	return nil
}

// behind counts the messages of the filters behind a sequence.
func (a *Admin) behind(ctx context.Context, stream jetstream.Stream, seq uint64, filters []string) (uint64,
	error) {
	if len(everything(filters)) > 0 {
		return a.count(ctx, stream, seq+1, filters)
	}
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, fmt.Errorf("stream %s: %w", a.Stream, err)
	}
	if seq < info.State.FirstSeq {
		return info.State.Msgs, nil
	}
	return info.State.LastSeq - min(seq, info.State.LastSeq), nil
}

// everything is nil for the filter that lets everything through, which is stored as >.
func everything(filters []string) []string {
	if slices.Equal(filters, []string{">"}) {
		return nil
	}
	return filters
}

// count is how many messages of the filters there are from a sequence on.
func (a *Admin) count(ctx context.Context, stream jetstream.Stream, from uint64, filters []string) (uint64,
	error) {
	c, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		FilterSubjects: everything(filters), HeadersOnly: true,
	})
	if err != nil {
		return 0, fmt.Errorf("count the messages of stream %s: %w", a.Stream, err)
	}
	return c.CachedInfo().NumPending, stream.DeleteConsumer(ctx, c.CachedInfo().Name)
}

func filtersOf(c *jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return append([]string{c.FilterSubject}, c.FilterSubjects...)
	}
	return c.FilterSubjects
}

// stored is a message of the stream with our header.
type stored struct {
	seq     uint64
	at      time.Time
	outflow outbox.Header
}

// message reads an event's message from the leader; nil if there is none, or it is a cut.
func (a *Admin) message(ctx context.Context, seq uint64) (*stored, error) {
	if seq == 0 {
		return nil, nil
	}
	return a.ask(ctx, jsapi.MessageRequest{Seq: seq})
}

// firstFrom reads the first event's message at or after seq that matches one of the filters.
func (a *Admin) firstFrom(ctx context.Context, seq uint64, filters []string) (first *stored, err error) {
	if len(filters) == 0 {
		filters = []string{">"}
	}
	for _, f := range filters {
		m, err := a.ask(ctx, jsapi.MessageRequest{Seq: max(seq, 1), Next: f})
		if err != nil {
			return nil, err
		}
		if m != nil && (first == nil || m.seq < first.seq) {
			first = m
		}
	}
	return first, nil
}

const askTimeout = 5 * time.Second

func (a *Admin) ask(ctx context.Context, request jsapi.MessageRequest) (*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	found, err := a.API.Message(ctx, a.Stream, request)
	if err != nil {
		return nil, fmt.Errorf("stream %s: read a message: %w", a.Stream, err)
	}
	if found == nil {
		return nil, nil
	}
	if streams.CutOf(found) != nil {
		if request.Next == "" {
			return nil, nil
		}
		request.Seq = found.Seq + 1
		return a.ask(ctx, request)
	}
	m := &stored{seq: found.Seq, at: found.Time}
	for line := range strings.SplitSeq(string(found.Header), "\r\n") {
		if v, ok := strings.CutPrefix(line, outbox.HeaderName+":"); ok {
			if m.outflow, err = outbox.ParseHeader(strings.TrimSpace(v)); err != nil {
				return nil, fatal("foreign_message", fmt.Sprintf("stream %s: the message at sequence %d is "+
					"not outflow's: %v", a.Stream, m.seq, err), "")
			}
			return m, nil
		}
	}
	return nil, fatal("foreign_message",
		fmt.Sprintf("stream %s: the message at sequence %d has no header of outflow", a.Stream, m.seq), "")
}

func fatal(code, message, hint string) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: message, Hint: hint}
}

func usage(code, message, hint string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: code, Message: message, Hint: hint}
}
