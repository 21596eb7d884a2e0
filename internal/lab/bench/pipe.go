package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

const pipeName = "pipe"

// piper reads the WAL and publishes in one loop, in commit order, and does nothing else: how soon a message can be in a stream.
type piper struct {
	w     *world
	child *child
}

func (p *piper) name() string    { return pipeName }
func (p *piper) subject() string { return p.w.name + "_pipe" }
func (p *piper) stream() string  { return strings.ToUpper(p.subject()) }
func (p *piper) died() error     { return p.child.died() }
func (p *piper) pid() int        { return p.child.PID() }

func (p *piper) prepare(ctx context.Context, c *Case) error {
	if err := p.w.makeSlot(ctx, p.subject()); err != nil {
		return err
	}
	return p.w.makeStream(ctx, c, p.stream(), p.subject()+".>")
}

func (p *piper) start(ctx context.Context, _ *Case) (table string, err error) {
	p.child, err = p.w.startChild(ctx, task{Role: pipeName, Stream: p.stream(), Subject: p.subject(), Slot: p.subject()})
	if err != nil {
		return "", err
	}
	return outboxName, p.child.begin()
}

func (p *piper) stop(ctx context.Context) error { return p.child.end(ctx, nil) }

func (p *piper) cleanUp(ctx context.Context) error {
	if p.child != nil {
		p.child.kill()
	}
	return errors.Join(p.w.dropSlot(ctx, p.subject()), p.w.dropStream(ctx, p.stream()))
}

// pipe is the role.
func pipe(ctx context.Context, t task, ready func() error) (any, error) {
	cfg, err := pgconn.ParseConfig(t.Postgres)
	if err != nil {
		return nil, errors.New("the PostgreSQL URL cannot be read") // pgconn would show it, with its password
	}
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	wire, err := newWire(t.NATS)
	if err != nil {
		return nil, err
	}
	defer wire.nc.Close()
	err = pglogrepl.StartReplication(ctx, conn, t.Slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + t.Slot + "'"},
	})
	if err != nil {
		return nil, err
	}
	if err := ready(); err != nil {
		return nil, err
	}
	r := &relation{}
	for {
		m, err := conn.ReceiveMessage(ctx)
		if ctx.Err() != nil {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		data, ok := m.(*pgproto3.CopyData)
		if !ok {
			return nil, fmt.Errorf("PostgreSQL sends %T", m)
		}
		if err := r.take(ctx, conn, wire, t.Subject, data.Data); err != nil {
			return nil, err
		}
	}
}

// relation is where the columns are, and the rows of the transaction that is read.
type relation struct {
	doc, id, actor, counter, payload int
	rows                             []rowMessage
}

type rowMessage struct {
	subject      string
	header, data []byte
}

func (r *relation) take(ctx context.Context, conn *pgconn.PgConn, wire *wire, subject string, data []byte) error {
	switch data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		if err != nil || !k.ReplyRequested {
			return err
		}
		return pglogrepl.SendStandbyStatusUpdate(ctx, conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: k.ServerWALEnd, ClientTime: time.Now()})
	case pglogrepl.XLogDataByteID:
	default:
		return nil
	}
	x, err := pglogrepl.ParseXLogData(data[1:])
	if err != nil {
		return err
	}
	switch x.WALData[0] {
	case 'R':
		m, err := pglogrepl.Parse(x.WALData)
		if err != nil {
			return err
		}
		for i, c := range m.(*pglogrepl.RelationMessage).Columns {
			switch c.Name {
			case "doc_id":
				r.doc = i
			case "id":
				r.id = i
			case "actor_id":
				r.actor = i
			case "counter":
				r.counter = i
			case "payload":
				r.payload = i
			}
		}
	case 'I':
		columns, err := tuple(x.WALData[6:])
		if err != nil || len(columns) <= max(r.doc, r.id, r.actor, r.counter, r.payload) {
			return fmt.Errorf("a row cannot be read: %d columns, %w", len(columns), err)
		}
		var n int64
		if _, err := fmt.Sscan(string(columns[r.counter]), &n); err != nil {
			return err
		}
		r.rows = append(r.rows, rowMessage{
			subject + "." + string(columns[r.doc]), outflowHeader(string(columns[r.id]), string(columns[r.actor]), n),
			append([]byte(nil), columns[r.payload]...),
		})
	case 'C':
		for i, m := range r.rows {
			if err := wire.send(m.subject, m.header, m.data, i == len(r.rows)-1); err != nil {
				return err
			}
		}
		r.rows = r.rows[:0]
		return wire.flush()
	}
	return nil
}

// tuple reads the columns of an insert: 'N', their number, and of each its kind and, if it is text, its length and bytes.
func tuple(b []byte) (columns [][]byte, err error) {
	short := errors.New("the tuple is short")
	if len(b) < 2 {
		return nil, short
	}
	n := int(binary.BigEndian.Uint16(b))
	b = b[2:]
	for range n {
		if len(b) < 1 {
			return nil, short
		}
		kind := b[0]
		b = b[1:]
		var value []byte
		if kind == 't' || kind == 'b' {
			if len(b) < 4 || len(b)-4 < int(binary.BigEndian.Uint32(b)) {
				return nil, short
			}
			size := int(binary.BigEndian.Uint32(b))
			value, b = b[4:4+size], b[4+size:]
		}
		columns = append(columns, value)
	}
	return columns, nil
}
