package consumeradmin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// Admin lists and rewinds the consumers of a stream.
type Admin struct {
	Stream string
	JS     jetstream.JetStream
	Conn   *sink.Conn
	DB     *pgx.Conn // a consumer's database; nil: not given
	Schema string    // of its tables; "": the search path
	From   string    // the setting that names the database
}

func (a *Admin) database() *database {
	if a.DB == nil {
		return nil
	}
	return &database{a.DB, a.Schema}
}

// The metadata of the durable of a consumer of package consumer.
const (
	metadataOffsets    = "outflow.marks" // postgres or jetstream
	metadataPartitions = "outflow.partitions"
)

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

	Pending    uint64 `json:"pending"`     // messages not yet delivered
	AckPending int    `json:"ack_pending"` // delivered but not acknowledged

	Sequence uint64           `json:"sequence"`           // everything up to here is done
	Position *outbox.Position `json:"position,omitempty"` // of that message, if it can be read
	Running  bool             `json:"running"`            // a client is reading from it
	Owner    string           `json:"owner,omitempty"`    // the instance that has the lease

	Partitions int     `json:"partitions,omitempty"`
	Least      *uint64 `json:"least_mark,omitempty"`
	Most       *uint64 `json:"most_mark,omitempty"`
	Parked     *int    `json:"parked,omitempty"` // events; absent: not known

	Note string `json:"note,omitempty"`
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
	if all, err = a.addFromDatabase(ctx, all); err != nil {
		return nil, err
	}
	for i := range all {
		if err := a.addOffsets(ctx, &all[i], kv); err != nil {
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
		Running: info.NumWaiting > 0 || info.PushBound,
	}
	return c, true
}

// addFromDatabase adds the database's consumers that have no durable now, and drops the records of those
// that have one again.
func (a *Admin) addFromDatabase(ctx context.Context, all []Consumer) ([]Consumer, error) {
	there := map[string]bool{}
	for _, c := range all {
		if c.Note == "" {
			there[c.Name] = true
		}
	}
	all = slices.DeleteFunc(all, func(c Consumer) bool { return c.Note != "" && there[c.Name] })
	if a.DB == nil {
		return all, nil
	}
	d := a.database()
	rows, err := a.DB.Query(ctx, `SELECT name, filter FROM `+d.table("outflow_consumer")+` WHERE stream = $1`,
		a.Stream)
	if err == nil {
		var name, filter string
		_, err = pgx.ForEachRow(rows, []any{&name, &filter}, func() error {
			if !there[name] {
				all = append(all, Consumer{Name: name, Durable: true, Filters: strings.Fields(filter),
					Offsets: InPostgres, Note: "its durable is not there: it makes it when it starts"})
			}
			return nil
		})
	}
	if err != nil && !missingTable(err) {
		return nil, fmt.Errorf("%s: read the consumers: %w", a.From, err)
	}
	return all, nil
}

// addOffsets adds the offsets and the position.
func (a *Admin) addOffsets(ctx context.Context, c *Consumer, kv *bucket) error {
	var s *state
	switch d := a.database(); {
	case c.Offsets == InPostgres && d != nil:
		var err error
		if s, err = d.load(ctx, a.DB, c.Name, false); err != nil {
			return err
		}
		if s == nil {
			c.Note = "this database has no marks of it: give its own with --database"
			break
		}
		parked := 0
		err = a.DB.QueryRow(ctx, `SELECT count(*) FROM `+d.table("outflow_parked")+` WHERE name = $1`,
			c.Name).Scan(&parked)
		if err != nil && !missingTable(err) {
			return fmt.Errorf("%s: count what is parked: %w", a.From, err)
		}
		c.Parked = &parked
	case c.Offsets == InJetStream:
		doc, err := kv.load(ctx, c.Name)
		if err != nil {
			return err
		}
		if doc != nil {
			s = &doc.state
		}
	}
	if s != nil {
		least, most := s.lowest().Seq, s.furthest()
		c.Partitions, c.Owner, c.Sequence = s.partitions, s.owner, least
		c.Running = c.Running || s.owner != "" && c.Offsets == InPostgres
		if len(s.offsets) > 0 {
			c.Least, c.Most = &least, &most
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

func filtersOf(c *jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return append([]string{c.FilterSubject}, c.FilterSubjects...)
	}
	return c.FilterSubjects
}

// stored is a message of the stream with our header.
type stored struct {
	seq     uint64
	subject string
	at      time.Time
	outflow outbox.Header
}

// message reads a message from the leader; nil if there is none, or it has no Outflow header.
func (a *Admin) message(ctx context.Context, seq uint64) (*stored, error) {
	if seq == 0 {
		return nil, nil
	}
	return a.ask(ctx, jsapi.MessageRequest{Seq: seq})
}

// firstFrom reads the first message at or after seq that matches one of the filters.
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
	found, err := a.Conn.API().Message(ctx, a.Stream, request)
	if err != nil {
		return nil, fmt.Errorf("stream %s: read a message: %w", a.Stream, err)
	}
	if found == nil {
		return nil, nil
	}
	m := &stored{seq: found.Seq, subject: found.Subject, at: found.Time}
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
