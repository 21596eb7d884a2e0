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

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
)

// World is where consumers are looked for.
type World struct {
	Stream string
	JS     jetstream.JetStream
	Conn   *sink.Conn
	DB     *pgx.Conn // a consumer's database; nil: not given
	Schema string    // of its tables; "": the search path
	From   string    // which setting says where the database is
}

func (w *World) database() *database {
	if w.DB == nil {
		return nil
	}
	return &database{w.DB, w.Schema}
}

// The metadata of the durable of a consumer of package consumer.
const (
	metadataMarks      = "outflow.marks" // postgres or jetstream
	metadataPartitions = "outflow.partitions"
)

// The kinds of consumer, as metadata has them, and Plain for those of others.
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
	Marks   string   `json:"marks"` // postgres, jetstream, or plain: it is not one of package consumer

	Pending    uint64 `json:"pending"`     // messages that it has not been given
	AckPending int    `json:"ack_pending"` // given, and not acknowledged

	Sequence uint64           `json:"sequence"`           // everything up to here is done
	Position *outbox.Position `json:"position,omitempty"` // of the message there, where it can be read
	Running  bool             `json:"running"`            // somebody reads from it now
	Owner    string           `json:"owner,omitempty"`    // who has the lease

	Partitions int     `json:"partitions,omitempty"`
	Least      *uint64 `json:"least_mark,omitempty"`
	Most       *uint64 `json:"most_mark,omitempty"`
	Parked     *int    `json:"parked,omitempty"` // events; absent: not known

	Note string `json:"note,omitempty"`
}

// List reads the consumers of the stream.
func (w *World) List(ctx context.Context) ([]Consumer, error) {
	stream, err := w.stream(ctx)
	if err != nil {
		return nil, err
	}
	kv, err := openBucket(ctx, w.JS, w.Stream)
	if err != nil {
		return nil, err
	}
	var all []Consumer
	lister := stream.ListConsumers(ctx)
	for info := range lister.Info() {
		if c, ok := w.describe(info); ok {
			all = append(all, c)
		}
	}
	if err := lister.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, fmt.Errorf("list the consumers of stream %s: %w", w.Stream, err)
	}
	if all, err = w.addStored(ctx, all); err != nil {
		return nil, err
	}
	for i := range all {
		if err := w.complete(ctx, &all[i], kv); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(all, func(a, b Consumer) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

func (w *World) stream(ctx context.Context) (jetstream.Stream, error) {
	stream, err := w.JS.Stream(ctx, w.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fatal("stream_missing", fmt.Sprintf("stream %s does not exist", w.Stream), "Run `outflow init`, or name the right one with --stream")
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", w.Stream, err)
	}
	return stream, nil
}

// describe takes what JetStream says. A record of a rewind that was cut short is no consumer: it says what one was.
func (w *World) describe(info *jetstream.ConsumerInfo) (Consumer, bool) {
	if text, ok := info.Config.Metadata[metadataRewind]; ok {
		var r record
		if json.Unmarshal([]byte(text), &r) != nil {
			return Consumer{}, false
		}
		return Consumer{
			Name: r.Config.Durable, Durable: true, Filters: filtersOf(&r.Config), Marks: Plain, Pending: info.NumPending, Sequence: r.Was,
			Note: fmt.Sprintf("a rewind was interrupted: outflow consumer rewind %s --to seq:%d finishes it", r.Config.Durable, r.To+1),
		}, true
	}
	c := Consumer{
		Name: info.Name, Durable: info.Config.Durable != "", Filters: filtersOf(&info.Config), Marks: cmp.Or(info.Config.Metadata[metadataMarks], Plain),
		Pending: info.NumPending, AckPending: info.NumAckPending, Sequence: info.AckFloor.Stream, Running: info.NumWaiting > 0 || info.PushBound,
	}
	return c, true
}

// addStored adds those of the database whose durable is not there now, and drops records of consumers that are there again.
func (w *World) addStored(ctx context.Context, all []Consumer) ([]Consumer, error) {
	there := map[string]bool{}
	for _, c := range all {
		if c.Note == "" {
			there[c.Name] = true
		}
	}
	all = slices.DeleteFunc(all, func(c Consumer) bool { return c.Note != "" && there[c.Name] })
	if w.DB == nil {
		return all, nil
	}
	d := w.database()
	rows, err := w.DB.Query(ctx, `SELECT name, filter FROM `+d.table("outflow_consumer")+` WHERE stream = $1`, w.Stream)
	if err == nil {
		var name, filter string
		_, err = pgx.ForEachRow(rows, []any{&name, &filter}, func() error {
			if !there[name] {
				all = append(all, Consumer{Name: name, Durable: true, Filters: []string{filter}, Marks: InPostgres, Note: "its durable is not there: it makes it when it starts"})
			}
			return nil
		})
	}
	if err != nil && !missingTable(err) {
		return nil, fmt.Errorf("%s: read the consumers: %w", w.From, err)
	}
	return all, nil
}

// complete adds what the marks say, and the position.
func (w *World) complete(ctx context.Context, c *Consumer, kv *bucket) error {
	var s *state
	switch d := w.database(); {
	case c.Marks == InPostgres && d != nil:
		var err error
		if s, err = d.load(ctx, w.DB, c.Name, false); err != nil {
			return err
		}
		if s == nil {
			c.Note = "this database has no marks of it: give its own with --database"
			break
		}
		parked := 0
		err = w.DB.QueryRow(ctx, `SELECT count(*) FROM `+d.table("outflow_parked")+` WHERE name = $1`, c.Name).Scan(&parked)
		if err != nil && !missingTable(err) {
			return fmt.Errorf("%s: count what is parked: %w", w.From, err)
		}
		c.Parked = &parked
	case c.Marks == InJetStream:
		doc, err := kv.load(ctx, c.Name)
		if err != nil {
			return err
		}
		if doc != nil {
			s = &doc.state
		}
	}
	if s != nil {
		least, most := s.least().Seq, s.reach()
		c.Partitions, c.Owner, c.Sequence = s.partitions, s.owner, least
		c.Running = c.Running || s.owner != "" && c.Marks == InPostgres
		if len(s.marks) > 0 {
			c.Least, c.Most = &least, &most
		}
	}
	m, err := w.get(ctx, c.Sequence)
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

// get reads a message from the leader; nil if it is not there, or has no header of ours.
func (w *World) get(ctx context.Context, seq uint64) (*stored, error) {
	if seq == 0 {
		return nil, nil
	}
	return w.ask(ctx, fmt.Sprintf(`{"seq":%d}`, seq))
}

// next reads the first message at or behind seq that one of the filters matches.
func (w *World) next(ctx context.Context, seq uint64, filters []string) (first *stored, err error) {
	if len(filters) == 0 {
		filters = []string{">"}
	}
	for _, f := range filters {
		m, err := w.ask(ctx, fmt.Sprintf(`{"seq":%d,"next_by_subj":%q}`, max(seq, 1), f))
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

func (w *World) ask(ctx context.Context, request string) (*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := w.Conn.NATS().RequestWithContext(ctx, w.Conn.APIPrefix()+"STREAM.MSG.GET."+w.Stream, []byte(request))
	if err != nil {
		return nil, fmt.Errorf("stream %s: read a message: %w", w.Stream, err)
	}
	var a struct {
		Message *struct {
			Seq     uint64    `json:"seq"`
			Subject string    `json:"subject"`
			Header  []byte    `json:"hdrs"`
			Time    time.Time `json:"time"`
		} `json:"message"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(answer.Data, &a); err != nil {
		return nil, fmt.Errorf("stream %s: read a message: %w", w.Stream, err)
	}
	if a.Error != nil && a.Error.ErrorCode != jetstream.JSErrCodeMessageNotFound {
		return nil, fmt.Errorf("stream %s: read a message: %w", w.Stream, a.Error)
	}
	if a.Message == nil {
		return nil, nil
	}
	m := &stored{seq: a.Message.Seq, subject: a.Message.Subject, at: a.Message.Time}
	for line := range strings.SplitSeq(string(a.Message.Header), "\r\n") {
		if v, ok := strings.CutPrefix(line, outbox.HeaderName+":"); ok {
			if m.outflow, err = outbox.ParseHeader(strings.TrimSpace(v)); err != nil {
				return nil, fatal("foreign_message", fmt.Sprintf("stream %s: the message at sequence %d is not outflow's: %v", w.Stream, m.seq, err), "")
			}
			return m, nil
		}
	}
	return nil, fatal("foreign_message", fmt.Sprintf("stream %s: the message at sequence %d has no header of outflow", w.Stream, m.seq), "")
}

func fatal(code, what, cure string) error {
	return &outbox.Fault{Class: outbox.Fatal, Code: code, Message: what, Hint: cure}
}

func usage(code, what, cure string) error {
	return &outbox.Fault{Class: outbox.Usage, Code: code, Message: what, Hint: cure}
}
