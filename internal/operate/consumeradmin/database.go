package consumeradmin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// database is a consumer's database.
type database struct {
	conn   *pgx.Conn
	schema string
	from   string // the setting that names it
}

func (d *database) table(name string) string {
	if d.schema == "" {
		return pgx.Identifier{name}.Sanitize()
	}
	return pgx.Identifier{d.schema, name}.Sanitize()
}

// names lists the consumers of a stream; none if there are no tables.
func (d *database) names(ctx context.Context, stream string) ([]string, error) {
	rows, err := d.conn.Query(ctx, `SELECT name FROM `+d.table("outflow_consumer")+` WHERE stream = $1`, stream)
	if err == nil {
		var all []string
		if all, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return all, nil
		}
	}
	if missingTable(err) {
		return nil, nil
	}
	return nil, d.failed("read the consumers", err)
}

// hold is what load keeps others from until the transaction ends.
type hold int

const (
	free   hold = iota
	claims      // to claim partitions, or to change the layout
	moves       // also to move an offset; what was open on them has ended
)

// locking is the end of a query that takes at least the rows of a hold.
func (h hold) locking(rows hold) string {
	if h < rows {
		return ""
	}
	return " FOR UPDATE"
}

// load reads a consumer; nil if there is none, or no table.
func (d *database) load(ctx context.Context, q consumer.DB, name string, h hold) (*state, error) {
	s := &state{}
	var replayedTo int64
	var wantedKeying *string
	var wantedPartitions *int
	var barrier *int64
	var created *time.Time
	err := q.QueryRow(ctx, `SELECT stream, stream_created, filters, keying, partitions, replayed_to,
		wanted_keying, wanted_partitions, barrier FROM `+d.table("outflow_consumer")+
		` WHERE name = $1`+h.locking(claims), name).
		Scan(&s.stream, &created, &s.filters, &s.keying, &s.partitions, &replayedTo, &wantedKeying,
			&wantedPartitions, &barrier)
	if errors.Is(err, pgx.ErrNoRows) || missingTable(err) {
		return nil, nil
	}
	if err != nil {
		return nil, d.failed("read consumer "+name, err)
	}
	s.replayedTo = uint64(replayedTo)
	if created != nil {
		s.created = *created
	}
	if err := d.loadMembers(ctx, q, name, s); err != nil {
		return nil, d.failed("read the instances of consumer "+name, err)
	}
	if err := d.loadOffsets(ctx, q, name, h, s); err != nil {
		return nil, d.failed("read the marks of consumer "+name, err)
	}
	if wantedPartitions != nil && wantedKeying != nil && barrier != nil {
		s.change = s.changeTo(*wantedPartitions, *wantedKeying, uint64(*barrier))
	}
	return s, nil
}

func (d *database) loadOffsets(ctx context.Context, q consumer.DB, name string, h hold, s *state) error {
	rows, err := q.Query(ctx, `SELECT partition, seq, due::pg_catalog.text, n, lsn::pg_catalog.text, i, holed,
			coalesce(owner, '')
		FROM `+d.table("outflow_mark")+` WHERE name = $1 AND source = $2 ORDER BY partition`+h.locking(moves), name,
		live)
	if err != nil {
		return err
	}
	var partition int
	var seq, n, index int64
	var due, lsn, owner string
	var lost bool
	columns := []any{&partition, &seq, &due, &n, &lsn, &index, &lost, &owner}
	_, err = pgx.ForEachRow(rows, columns, func() error {
		m := offset{Seq: uint64(seq), N: uint32(n), Lost: lost}
		m.Pos.Index = uint32(index)
		var err, also error
		m.Due, err = outbox.ParseLSN(due)
		m.Pos.LSN, also = outbox.ParseLSN(lsn)
		if partition != len(s.offsets) {
			return fmt.Errorf("partition %d is missing", len(s.offsets))
		}
		s.own(partition, &owner)
		s.offsets, s.owners = append(s.offsets, m), append(s.owners, owner)
		return errors.Join(err, also)
	})
	return err
}

// own notes that an instance works on a partition. An owner that does not run is none.
func (s *state) own(partition int, owner *string) {
	for i := range s.members {
		if m := &s.members[i]; m.Instance == *owner && m.Alive {
			m.Partitions = append(m.Partitions, partition)
			return
		}
	}
	*owner = ""
}

func (d *database) loadMembers(ctx context.Context, q consumer.DB, name string, s *state) error {
	rows, err := q.Query(ctx, `SELECT instance, joined, expires, expires > pg_catalog.clock_timestamp()
		FROM `+d.table("outflow_member")+` WHERE name = $1 ORDER BY joined, instance`, name)
	if err != nil {
		return err
	}
	s.members, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (m Member, err error) {
		m.Partitions = []int{}
		err = row.Scan(&m.Instance, &m.Joined, &m.Expires, &m.Alive)
		return m, err
	})
	return err
}

// lockTimeout bounds the wait for a transaction of a handler. Its own bounds are Config.Timeout and some
// seconds.
const lockTimeout = time.Minute

// change runs do in a transaction that waits for those of handlers, with a bound. The server ends it if this
// process freezes in it: the instances wait for it. A statement may take long, for much that is parked.
func (d *database) change(ctx context.Context, name string, do func(tx pgx.Tx) error) error {
	err := pgx.BeginFunc(ctx, d.conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %[1]d; "+
			"SET LOCAL idle_in_transaction_session_timeout = %[1]d", lockTimeout.Milliseconds()))
		if err != nil {
			return err
		}
		return do(tx)
	})
	var e *pgconn.PgError
	if errors.As(err, &e) && (e.Code == "55P03" || e.Code == "40P01") {
		return &outbox.Fault{Class: outbox.Fatal, Code: "consumer_busy", Err: err,
			Message: fmt.Sprintf("a transaction of consumer %s does not let go of its marks", name),
			Hint:    "Run it again, or stop the consumer's instances first. Nothing was changed"}
	}
	return err
}

// seeing runs do in a transaction that sees all rows, and reads only.
func seeing(ctx context.Context, conn *pgx.Conn, from string, do func(tx pgx.Tx) error) error {
	// A pooler may stand in between, so nothing is set but for a transaction. It is not a read-only one: with
	// that some poolers ask a standby.
	tx, err := conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("%s: begin: %w", from, err)
	}
	defer tx.Rollback(ctx) //nolint:errcheck // nothing was written
	if err := seeAll(ctx, tx, from); err != nil {
		return err
	}
	return do(tx)
}

// seeAll makes sure that a transaction sees all rows that were committed: a policy that hides some is an
// error, an operator of somebody else hides none, and no standby is asked. What is not seen is not waited
// for, and not erased. Where an error was, PostgreSQL says without the statement's values, which may be
// documents: so that it was in a trigger or another function, if it says anything.
func seeAll(ctx context.Context, tx pgx.Tx, from string) error {
	const all = "SET LOCAL row_security = off; SET LOCAL search_path = pg_catalog, pg_temp; " +
		"SET LOCAL log_parameter_max_length_on_error = 0"
	if _, err := tx.Exec(ctx, all); err != nil {
		return fmt.Errorf("%s: see all rows: %w", from, err)
	}
	var standby bool
	if err := tx.QueryRow(ctx, "SELECT pg_catalog.pg_is_in_recovery()").Scan(&standby); err != nil {
		return fmt.Errorf("%s: look whether it is a standby: %w", from, err)
	}
	if standby {
		return postgres.Fatal(nil, "in_recovery", "Name the primary with --database or "+
			"OUTFLOW_CONSUMER_DATABASE", "%s is a standby: it may not know yet of a consumer, of what one "+
			"has parked, or that one was set back", from)
	}
	return nil
}

// fence gives all of the consumer's partitions a new epoch and no owner: whatever an instance still tries
// with the old one fails, and who runs claims them anew.
func (d *database) fence(ctx context.Context, tx pgx.Tx, name string) error {
	var epoch int64
	err := tx.QueryRow(ctx, `UPDATE `+d.table("outflow_consumer")+` SET epoch = epoch OPERATOR(pg_catalog.+) 1
		WHERE name = $1 RETURNING epoch`, name).Scan(&epoch)
	if err == nil {
		_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_mark")+` SET epoch = $2, owner = NULL
			WHERE name = $1`, name, epoch)
	}
	if err != nil {
		return fmt.Errorf("fence consumer %s: %w", name, err)
	}
	return nil
}

// lower moves every offset beyond another one back to it, and records up to where events are replayed. An
// offset that stays keeps what is known of its message: if the broker has lost that, events that come again
// are recognized by it.
func (d *database) lower(ctx context.Context, tx pgx.Tx, name string, now *state, to offset) error {
	_, err := tx.Exec(ctx, `UPDATE `+d.table("outflow_consumer")+` SET replayed_to =
		GREATEST(replayed_to, $2::pg_catalog.int8) WHERE name = $1`, name, int64(now.furthest()))
	if err == nil {
		_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_mark")+` SET seq = $3,
			due = $4::pg_catalog.text::pg_catalog.pg_lsn, n = $5, lsn = $6::pg_catalog.text::pg_catalog.pg_lsn,
			i = $7, holed = false, updated_at = pg_catalog.now()
			WHERE name = $1 AND source = $2 AND seq > $3`, name, live, int64(to.Seq), to.Due.String(),
			int64(to.N), to.Pos.LSN.String(), int64(to.Pos.Index))
	}
	if err != nil {
		return fmt.Errorf("set consumer %s back: %w", name, err)
	}
	return nil
}

// event is what tells an event from others, whatever its sequence.
type event struct{ subject, position, id string }

// parkedEvent is a row of what is parked.
type parkedEvent struct {
	event
	ord, seq int64
	hash     int64 // of its document: modulo the number of partitions it is the partition
}

// parkedLive lists the live events that are parked.
func (d *database) parkedLive(ctx context.Context, q consumer.DB, name string) ([]parkedEvent, error) {
	rows, err := q.Query(ctx, `SELECT ord, seq, hash, subject, position, event_id FROM `+d.table("outflow_parked")+
		` WHERE name = $1 AND source = $2 ORDER BY seq, ord`, name, live)
	if err == nil {
		var all []parkedEvent
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e parkedEvent, err error) {
			err = row.Scan(&e.ord, &e.seq, &e.hash, &e.subject, &e.position, &e.id)
			return e, err
		})
		if err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("read what consumer %s has parked: %w", name, err)
}

// parked counts what a consumer has parked.
func (d *database) parked(ctx context.Context, q consumer.DB, name string) (events, documents int,
	err error) {
	err = q.QueryRow(ctx, `SELECT pg_catalog.count(*), pg_catalog.count(DISTINCT document) FROM `+
		d.table("outflow_parked")+` WHERE name = $1`, name).Scan(&events, &documents)
	if err != nil {
		return 0, 0, d.failed("count what consumer "+name+" has parked", err)
	}
	return events, documents, nil
}

// remove deletes everything that the database has of a consumer.
func (d *database) remove(ctx context.Context, tx pgx.Tx, name string) error {
	for _, table := range []string{"outflow_parked", "outflow_mark", "outflow_member", "outflow_consumer"} {
		if _, err := tx.Exec(ctx, `DELETE FROM `+d.table(table)+` WHERE name = $1`, name); err != nil {
			return d.failed("delete consumer "+name, err)
		}
	}
	return nil
}

// failed explains an error of the database.
func (d *database) failed(doing string, err error) error {
	var e *pgconn.PgError
	where := ""
	if errors.As(err, &e) && e.Where != "" { // a trigger of the owner, see seeAll
		where = ": " + e.Where
	}
	if where == "" && e != nil && (e.Code == "42703" || e.Code == "42P01") {
		return &outbox.Fault{Class: outbox.Fatal, Code: "consumer_tables", Err: err,
			Message: fmt.Sprintf("%s: the consumers' tables are those of another version", d.from),
			Hint:    "A consumer brings them up to date when it starts: start one that has this version"}
	}
	if e != nil && e.Code == "42501" {
		return &outbox.Fault{Class: outbox.Fatal, Code: "no_right", Err: err,
			Message: fmt.Sprintf("%s: %s%s", d.from, doing, where),
			Hint: "Connect as the consumer's role, or as one that may SELECT, UPDATE and DELETE in its " +
				"tables"}
	}
	return fmt.Errorf("%s: %s: %w%s", d.from, doing, err, where)
}

// missingTable reports whether a table does not exist.
func missingTable(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && (e.Code == "42P01" || e.Code == "3F000")
}
