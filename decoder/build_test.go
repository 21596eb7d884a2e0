package decoder

import (
	"encoding/binary"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The builders below make messages as PostgreSQL's proto.c writes them.

const tableOID = 16385

var be = binary.BigEndian

func cstring(b []byte, s string) []byte { return append(append(b, s...), 0) }

func begin(final outbox.LSN) []byte {
	b := be.AppendUint64([]byte{'B'}, uint64(final))
	b = be.AppendUint64(b, 740_000_000_000_000)
	return be.AppendUint32(b, 731)
}

func commit(final, end outbox.LSN, at int64) []byte {
	b := be.AppendUint64([]byte{'C', 0}, uint64(final))
	b = be.AppendUint64(b, uint64(end))
	return be.AppendUint64(b, uint64(at))
}

type col struct {
	name string
	typ  uint32
}

func relation(oid uint32, cols ...col) []byte {
	b := be.AppendUint32([]byte{'R'}, oid)
	b = cstring(cstring(b, "public"), "outbox")
	b = append(b, 'd')
	b = be.AppendUint16(b, uint16(len(cols)))
	for _, c := range cols {
		b = cstring(append(b, 0), c.name)
		b = be.AppendUint32(b, c.typ)
		b = be.AppendUint32(b, 0xFFFFFFFF)
	}
	return b
}

// val is a value of a tuple; null and toast are those without bytes.
type val struct {
	kind byte
	data string
}

var (
	null  = val{kind: kindNull}
	toast = val{kind: kindToast}
)

func txt(s string) val { return val{kindText, s} }
func bin(s string) val { return val{kindBinary, s} }

func tuple(b []byte, vals ...val) []byte {
	b = be.AppendUint16(b, uint16(len(vals)))
	for _, v := range vals {
		b = append(b, v.kind)
		if v.kind == kindText || v.kind == kindBinary {
			b = be.AppendUint32(b, uint32(len(v.data)))
			b = append(b, v.data...)
		}
	}
	return b
}

func insert(oid uint32, vals ...val) []byte {
	return tuple(append(be.AppendUint32([]byte{'I'}, oid), 'N'), vals...)
}

func updated(oid uint32, part byte, vals ...val) []byte {
	b := be.AppendUint32([]byte{'U'}, oid)
	if part != 0 {
		b = tuple(append(b, part), vals...)
	}
	return tuple(append(b, 'N'), vals...)
}

func deletion(oid uint32, part byte, vals ...val) []byte {
	return tuple(append(be.AppendUint32([]byte{'D'}, oid), part), vals...)
}

func truncate(oids ...uint32) []byte {
	b := append(be.AppendUint32([]byte{'T'}, uint32(len(oids))), 1)
	for _, oid := range oids {
		b = be.AppendUint32(b, oid)
	}
	return b
}

func origin(name string) []byte { return cstring(be.AppendUint64([]byte{'O'}, 0x16B3748), name) }

func typeMessage(oid uint32, name string) []byte {
	return cstring(cstring(be.AppendUint32([]byte{'Y'}, oid), "public"), name)
}

func logical(flags byte, prefix, content string) []byte {
	b := cstring(be.AppendUint64([]byte{'M', flags}, 0x16B3700), prefix)
	return append(be.AppendUint32(b, uint32(len(content))), content...)
}

// mapping is that of the table that init makes; the columns are without seq_key, as below PostgreSQL 18.
var mapping = relay.Mapping{
	Table: "public.outbox", Doc: "doc_id", Actor: "actor_id", Counter: "counter", Key: "seq_key",
	Payload: "payload",
}

var config = Config{TableOID: tableOID, Mapping: mapping, ID: "id", Slot: "outflow"}

var columns = []col{
	{"id", oidUUID}, {"doc_id", oidText}, {"actor_id", oidText}, {"counter", oidInt8}, {"payload", oidJSONB},
	{"created_at", oidTimestamptz},
}

// row is the n-th edit of a document, for columns.
func row(counter, payload string) []byte {
	return insert(tableOID, txt("7f0c6b1e-0c39-4f1e-9a53-1d5c2b8e4a10"), txt("friendsforever"), txt("0"),
		txt(counter), txt(payload), txt("2024-05-01 12:00:00+00"))
}
