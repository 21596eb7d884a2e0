package backfill

import (
	"encoding/binary"
	"fmt"

	"github.com/outflowhq/outflow/decoder"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Rows turns rows of the table into events. Each row goes through the decoder as the insert that the WAL
// would bring, so only the decoder decides what an event holds and which rows can't be published.
type Rows struct {
	dec *decoder.Decoder
	oid uint32
	buf []byte
	res decoder.Result
}

// NewRows takes the columns in the order of a row's values.
func NewRows(cfg config.Config, l *wiring.Layout, columns []catalog.Column) (*Rows, error) {
	r := &Rows{dec: decoder.New(wiring.Decoder(cfg, l)), oid: l.Table.OID}
	be := binary.BigEndian
	begin := be.AppendUint64([]byte{'B'}, 1)
	begin = be.AppendUint64(begin, 0)
	begin = be.AppendUint32(begin, 1)
	relation := be.AppendUint32([]byte{'R'}, l.Table.OID)
	relation = append(relation, l.Table.Schema+"\x00"+l.Table.Name+"\x00d"...)
	relation = be.AppendUint16(relation, uint16(len(columns)))
	for _, c := range columns {
		relation = append(append(relation, 0), c.Name+"\x00"...)
		relation = be.AppendUint32(relation, c.TypeOID)
		relation = be.AppendUint32(relation, 0xFFFF_FFFF)
	}
	for _, m := range [][]byte{begin, relation} {
		if err := r.dec.Decode(m, &r.res); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Event returns the event of a row, given the text of its columns as PostgreSQL prints them, nil for NULL.
// The caller sets the position.
func (r *Rows) Event(values [][]byte) (*relay.Event, error) {
	be := binary.BigEndian
	b := be.AppendUint32(append(r.buf[:0], 'I'), r.oid)
	b = be.AppendUint16(append(b, 'N'), uint16(len(values)))
	for _, v := range values {
		if v == nil {
			b = append(b, 'n')
			continue
		}
		b = be.AppendUint32(append(b, 't'), uint32(len(v)))
		b = append(b, v...)
	}
	r.buf = b
	if err := r.dec.Decode(b, &r.res); err != nil {
		return nil, err
	}
	if r.res.Kind != decoder.Event {
		return nil, fmt.Errorf("a row of %d columns is no event", len(values))
	}
	return &r.res.Event, nil
}
