package partition

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
)

// where says where the ids of what is published are.
type where bool

const (
	// inMemory: PostgreSQL reads the rows and sends their ids, which takes it a sixth of the time of a table
	// of ids that it fills and joins; and writers wait for it.
	inMemory where = false
	// inTable: in the connection's temporary table. Memory does not grow with them, and SQL can ask for them.
	inTable where = true
)

// maxInMemory is how many ids there are in memory at most, 128 MiB, and twice that while they are put in one
// list to be sorted. If there are more, they go to the table. They come in parts of partInMemory: a list that
// grows is copied, which takes four times as much for a moment.
const (
	maxInMemory  = 8 << 20
	partInMemory = 1 << 16
)

// published is what was read of the stream.
type published struct {
	of      []*Partition // for which all ids were read of about the time of their rows
	left    []Period     // what can be read if rows are missing
	lacking ids          // of their rows, when some were missing first; nil: none were
	seen    Seen

	in     where
	hashes []hash   // in memory, sorted
	more   [][]hash // likewise, those that came behind them
}

// hash is that of an id, as two numbers, which are compared faster than bytes.
type hash [2]uint64

func hashOf(id [16]byte) hash {
	return hash{binary.BigEndian.Uint64(id[:8]), binary.BigEndian.Uint64(id[8:])}
}

func compareHashes(a, b hash) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }

// has reports whether what was read was read for a partition.
func (p *published) has(q *Partition) bool { return p != nil && slices.Contains(p.of, q) }

// add adds an id, by insert if it goes to the table.
func (p *published) add(id [16]byte, most int, insert func(...tablesnapshot.IDHash) error) error {
	if p.in == inTable {
		return insert(id)
	}
	last := len(p.more) - 1
	if last < 0 || len(p.more[last]) == partInMemory {
		p.more, last = append(p.more, make([]hash, 0, partInMemory)), last+1
	}
	p.more[last] = append(p.more[last], hashOf(id))
	if len(p.hashes)+last*partInMemory+len(p.more[last]) <= most {
		return nil
	}
	for _, part := range append(p.more, p.hashes) {
		for _, h := range part {
			binary.BigEndian.PutUint64(id[:8], h[0])
			binary.BigEndian.PutUint64(id[8:], h[1])
			if err := insert(id); err != nil {
				return err
			}
		}
	}
	p.in, p.hashes, p.more = inTable, nil, nil
	return nil
}

// knows reports whether an id in memory is one of a hash.
func (p *published) knows(id [16]byte) bool {
	if len(p.more) > 0 {
		p.hashes, p.more = slices.Concat(append(p.more, p.hashes)...), nil
		slices.SortFunc(p.hashes, compareHashes)
	}
	_, found := slices.BinarySearchFunc(p.hashes, hashOf(id), compareHashes)
	return found
}

// load reads the ids of the stream's events, in the first of some periods.
func (m *Manager) load(ctx context.Context, in []Period, to where) error {
	if _, err := m.conn.Exec(ctx, "DROP TABLE IF EXISTS "+tablesnapshot.KnownTable); err != nil {
		return fmt.Errorf("drop the temporary table of what is published: %w", err)
	}
	m.published = &published{left: in[1:], in: to}
	return m.readIDs(ctx, in[0], m.whole)
}

// whole is that all ids are wanted, if rows have some.
func (m *Manager) whole([16]byte) bool { return m.cfg.ID != "" }

// readIDs adds ids to those that were read, those that are wanted.
func (m *Manager) readIDs(ctx context.Context, in Period, wanted func(id [16]byte) bool) error {
	p, first := m.published, m.published.seen.Stream
	m.published = nil // unless all goes well
	err := tablesnapshot.LoadKnown(ctx, m.conn, m.between, func(insert func(...tablesnapshot.IDHash) error) (
		err error) {
		n := 0
		p.seen, err = m.o.Published(ctx, in, func(id [16]byte) error {
			if n++; n%fetched == 0 { // what is kept in memory, or not wanted, is not sent
				if err := insert(); err != nil {
					return err
				}
			}
			if !wanted(id) {
				return nil
			}
			return p.add(id, cmp.Or(m.cfg.inMemory, maxInMemory), insert)
		})
		p.seen.Stream.Created = p.seen.Stream.Created.Truncate(time.Microsecond)
		return err
	})
	if !first.Created.IsZero() { // some ids are of that one: nothing goes if it was made anew meanwhile
		p.seen.Stream = Stream{first.Created, max(first.LastSeq, p.seen.Stream.LastSeq)}
	}
	if err == nil {
		m.published = p
	}
	return err
}

// lack adds the ids that are not loaded of the rows of a plain table for which a condition holds. They alone
// are looked for in other periods, which may have many times as many as were loaded.
func (m *Manager) lack(ctx context.Context, lacking ids, condition string, id catalog.Column) error {
	err := m.inTx(ctx, func(tx pgx.Tx) error {
		return fetch(ctx, tx, fmt.Sprintf("SELECT %s FROM ONLY %s t WHERE %s AND NOT %s",
			tablesnapshot.HashOf("t", id), m.root.Quoted(), condition, tablesnapshot.Known("t", id)),
			func(v [][]byte) { lacking.add([16]byte(v[0])) })
	})
	if err != nil {
		return fmt.Errorf("look for rows of %s that are not published: %w", m.root.Quoted(), err)
	}
	return nil
}

// fetched is how many rows PostgreSQL sends at a time: so few that the connection's buffers have room for
// them. Then it waits for the next statement, and ends the session of a process that was stopped. To send the
// rest to it, it would wait for ever, with all locks.
const fetched = 1000

// fetch calls f with the values of each row of a query, in binary form.
func fetch(ctx context.Context, tx pgx.Tx, query string, f func(v [][]byte)) error {
	_, err := tx.Exec(ctx, "SET LOCAL cursor_tuple_fraction = 1; "+ // for all rows are read
		"DECLARE outflow_rows NO SCROLL CURSOR FOR "+query)
	for n := fetched; err == nil && n == fetched; {
		rows := tx.Conn().PgConn().ExecParams(ctx, fmt.Sprintf("FETCH %d FROM outflow_rows", fetched), nil,
			nil, nil, []int16{pgtype.BinaryFormatCode})
		for n = 0; rows.NextRow(); n++ {
			f(rows.Values())
		}
		_, err = rows.Close()
	}
	if err == nil {
		_, err = tx.Exec(ctx, "CLOSE outflow_rows")
	}
	return err
}

// unknownRow is a row whose id was not read.
type unknownRow struct {
	at   pgtype.TID
	id   [16]byte // its hash
	aged bool     // what was asked of each
}

// unknownRows calls f with the rows of a partition whose ids were not read. aged is asked of each, in SQL.
func (m *Manager) unknownRows(ctx context.Context, tx pgx.Tx, p *Partition, aged string,
	f func(unknownRow)) error {
	id, which, err := m.compared(ctx, tx, p)
	if err != nil {
		return err
	}
	if m.published.in == inTable {
		which += " AND NOT " + tablesnapshot.Known("t", id)
	}
	task := progress.Count(ctx, "comparing partition "+p.Name, "rows", p.SealedSum.Rows)
	defer task.End()
	return fetch(ctx, tx, fmt.Sprintf("SELECT t.ctid, %s, %s FROM ONLY %s t WHERE %s", aged,
		tablesnapshot.BytesOf("t."+postgres.Quote(id.Name), id), p.Name, which), func(v [][]byte) {
		task.Add(1)
		full := sha256.Sum256(v[2])
		r := unknownRow{id: [16]byte(full[:16])}
		if m.published.in == inMemory && m.published.knows(r.id) {
			return
		}
		r.aged = v[1] != nil && v[1][0] == 1
		r.at = pgtype.TID{BlockNumber: binary.BigEndian.Uint32(v[0]),
			OffsetNumber: binary.BigEndian.Uint16(v[0][4:]), Valid: true}
		f(r)
	})
}

// ids are hashes of ids, of which each stands for all with the same first bits: 32 MiB, however many. Of
// those that are not among a million 0.4 % seem to be.
type ids []uint64

const idBits = 28

func newIDs() ids { return make(ids, 1<<idBits/64) }

func (s ids) add(id [16]byte) {
	n := bit(id)
	s[n/64] |= 1 << (n % 64)
}

func (s ids) mayHave(id [16]byte) bool {
	n := bit(id)
	return s[n/64]&(1<<(n%64)) != 0
}

func bit(id [16]byte) uint64 { return binary.BigEndian.Uint64(id[:]) >> (64 - idBits) }
