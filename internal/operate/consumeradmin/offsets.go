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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/outbox"
)

// offset is how far a partition is, as package consumer stores it.
type offset struct {
	Seq uint64          `json:"seq"`
	Due outbox.LSN      `json:"due"`
	N   uint32          `json:"n"`
	Pos outbox.Position `json:"pos"`

	// the broker has lost that message, and what it lost is published again under new sequences
	Lost bool `json:"holed,omitempty"`
}

// oldLayout holds the offsets of an earlier number of partitions.
type oldLayout struct {
	Source  string   `json:"source"`
	Offsets []offset `json:"marks"`
}

// live is the source of the offsets in the stream itself.
const live = "live"

// state is the stored state of a consumer of package consumer.
type state struct {
	partitions int
	filters    []string
	stream     string
	oldLayouts []oldLayout
	replayedTo uint64
	offsets    []offset // live, by partition; none: it has read nothing yet
	owner      string   // who has the lease; "": nobody
}

// furthest is the newest offset of any partition, including those of old layouts.
func (s *state) furthest() (most uint64) {
	for _, m := range s.offsets {
		most = max(most, m.Seq)
	}
	for _, g := range s.oldLayouts {
		for _, m := range g.Offsets {
			if g.Source == live {
				most = max(most, m.Seq)
			}
		}
	}
	return most
}

func (s *state) lowest() offset {
	if len(s.offsets) == 0 {
		return offset{}
	}
	return slices.MinFunc(s.offsets, func(a, b offset) int { return cmp.Compare(a.Seq, b.Seq) })
}

// lower moves every offset beyond another one back to it, and records up to where events are replayed.
func (s *state) lower(to offset) {
	s.replayedTo = max(s.replayedTo, s.furthest())
	capped := func(offsets []offset) {
		for i := range offsets {
			if offsets[i].Seq > to.Seq {
				offsets[i] = to
			}
		}
	}
	capped(s.offsets)
	before := s.oldLayouts[:0]
	for _, g := range s.oldLayouts {
		if g.Source == live {
			capped(g.Offsets)
			if !slices.ContainsFunc(g.Offsets, func(m offset) bool {
				return m.Lost || m.Seq > s.lowest().Seq
			}) {
				continue // nothing of it is left
			}
		}
		before = append(before, g)
	}
	s.oldLayouts = before
}

// database is a consumer's database.
type database struct {
	conn   *pgx.Conn
	schema string
}

func (d *database) table(name string) string {
	if d.schema == "" {
		return pgx.Identifier{name}.Sanitize()
	}
	return pgx.Identifier{d.schema, name}.Sanitize()
}

// load reads a consumer; nil if there is none, or no table. With lock nobody else can change it.
func (d *database) load(ctx context.Context, q consumer.DB, name string, lock bool) (*state, error) {
	sql := `SELECT stream, filter, partitions, before::text, replayed_to, CASE
		WHEN expires > clock_timestamp() THEN owner END
		FROM ` + d.table("outflow_consumer") + ` WHERE name = $1`
	if lock {
		sql += ` FOR UPDATE`
	}
	s := &state{}
	var filters, before string
	var replayedTo int64
	var owner *string
	err := q.QueryRow(ctx, sql, name).Scan(&s.stream, &filters, &s.partitions, &before, &replayedTo, &owner)
	if errors.Is(err, pgx.ErrNoRows) || missingTable(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read consumer %s: %w", name, err)
	}
	s.filters = strings.Fields(filters)
	if s.replayedTo = uint64(replayedTo); owner != nil {
		s.owner = *owner
	}
	if err := json.Unmarshal([]byte(before), &s.oldLayouts); err != nil {
		return nil, fmt.Errorf("read consumer %s: column before: %w", name, err)
	}
	rows, err := q.Query(ctx, `SELECT partition, seq, due::text, n, lsn::text, i, holed FROM `+
		d.table("outflow_mark")+` WHERE name = $1 AND source = $2 ORDER BY partition`, name, live)
	if err != nil {
		return nil, fmt.Errorf("read the marks of consumer %s: %w", name, err)
	}
	var partition int
	var seq, n, index int64
	var due, lsn string
	var lost bool
	_, err = pgx.ForEachRow(rows, []any{&partition, &seq, &due, &n, &lsn, &index, &lost}, func() error {
		m := offset{Seq: uint64(seq), N: uint32(n), Lost: lost}
		m.Pos.Index = uint32(index)
		var also error
		m.Due, err = outbox.ParseLSN(due)
		m.Pos.LSN, also = outbox.ParseLSN(lsn)
		if partition != len(s.offsets) {
			return fmt.Errorf("partition %d is missing", len(s.offsets))
		}
		s.offsets = append(s.offsets, m)
		return errors.Join(err, also)
	})
	if err != nil {
		return nil, fmt.Errorf("read the marks of consumer %s: %w", name, err)
	}
	return s, nil
}

// missingTable reports whether a table does not exist.
func missingTable(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && (e.Code == "42P01" || e.Code == "3F000")
}

// save writes what lower has changed, and ends the epoch, so that everything an earlier instance still tries
// fails.
func (d *database) save(ctx context.Context, tx pgx.Tx, name string, s *state) error {
	before, err := json.Marshal(append([]oldLayout{}, s.oldLayouts...))
	if err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, `UPDATE `+d.table("outflow_consumer")+` SET before = $2::jsonb, replayed_to = $3,
		owner = NULL, expires = NULL, epoch = epoch + 1
		WHERE name = $1`, name, string(before), int64(s.replayedTo))
	if err == nil && tag.RowsAffected() != 1 {
		err = errors.New("its row is gone")
	}
	for p, m := range s.offsets {
		if err == nil {
			_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_mark")+` SET seq = $4, due = $5::text::pg_lsn,
				n = $6, lsn = $7::text::pg_lsn, i = $8, holed = $9,
				updated_at = now() WHERE name = $1 AND source = $2 AND partition = $3`, name, live, p, int64(m.Seq), m.Due.String(), int64(m.N),
				m.Pos.LSN.String(), int64(m.Pos.Index), m.Lost)
		}
	}
	if err == nil {
		_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_mark")+` SET epoch = (SELECT epoch FROM `+
			d.table("outflow_consumer")+` WHERE name = $1) WHERE name = $1`, name)
	}
	if err != nil {
		return fmt.Errorf("set consumer %s back: %w", name, err)
	}
	return nil
}

// parkedBehind lists the sequences of the live events beyond seq that are parked.
func (d *database) parkedBehind(ctx context.Context, q consumer.DB, name string, seq uint64) ([]int64,
	error) {
	rows, err := q.Query(ctx, `SELECT seq FROM `+d.table("outflow_parked")+
		` WHERE name = $1 AND source = $2 AND seq > $3 ORDER BY seq`, name, live, int64(seq))
	if err != nil {
		return nil, fmt.Errorf("read what consumer %s has parked: %w", name, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("read what consumer %s has parked: %w", name, err)
	}
	return all, nil
}

// bucket has the offsets of consumers without a database.
type bucket struct{ kv jetstream.KeyValue }

// openBucket finds it; nil if there is none.
func openBucket(ctx context.Context, js jetstream.JetStream, stream string) (*bucket, error) {
	kv, err := js.KeyValue(ctx, consumer.Bucket(stream))
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", consumer.Bucket(stream), err)
	}
	return &bucket{kv}, nil
}

// document is a consumer's document in the bucket. Fields that this version does not know are preserved.
type document struct {
	revision uint64
	fields   map[string]json.RawMessage
	lease    time.Duration
	state
}

func (b *bucket) load(ctx context.Context, name string) (*document, error) {
	if b == nil {
		return nil, nil
	}
	e, err := b.kv.Get(ctx, name)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	var known struct {
		Version    int                 `json:"v"`
		Stream     string              `json:"stream"`
		Filters    []string            `json:"filters"`
		Partitions int                 `json:"partitions"`
		Before     []oldLayout         `json:"before"`
		ReplayedTo uint64              `json:"replayed_to"`
		Marks      map[string][]offset `json:"marks"`
		Owner      string              `json:"owner"`
		Lease      time.Duration       `json:"lease"`
	}
	d := &document{revision: e.Revision()}
	err = errors.Join(json.Unmarshal(e.Value(), &known), json.Unmarshal(e.Value(), &d.fields))
	if err == nil && known.Version != 1 {
		err = fmt.Errorf("version %d", known.Version)
	}
	if err != nil {
		return nil, fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	d.lease = known.Lease
	d.state = state{
		stream: known.Stream, filters: known.Filters, partitions: known.Partitions, oldLayouts: known.Before,
		replayedTo: known.ReplayedTo,
		offsets:    known.Marks[live], owner: known.Owner,
	}
	return d, nil
}

// save writes what lower has changed, unless somebody else has written to the document.
func (b *bucket) save(ctx context.Context, name string, d *document) error {
	var offsets map[string]json.RawMessage
	err := json.Unmarshal(d.fields["marks"], &offsets)
	set := func(fields map[string]json.RawMessage, key string, v any) {
		text, e := json.Marshal(v)
		fields[key] = text
		err = errors.Join(err, e)
	}
	if offsets == nil {
		offsets = map[string]json.RawMessage{}
	}
	set(offsets, live, d.offsets)
	set(d.fields, "marks", offsets)
	set(d.fields, "before", append([]oldLayout{}, d.oldLayouts...))
	set(d.fields, "replayed_to", d.replayedTo)
	delete(d.fields, "owner")
	delete(d.fields, "lease")
	value, e := json.Marshal(d.fields)
	if err = errors.Join(err, e); err != nil {
		return err
	}
	if _, err := b.kv.Update(ctx, name, value, d.revision); err != nil {
		return fmt.Errorf("key %s of bucket %s: %w", name, b.kv.Bucket(), err)
	}
	return nil
}
