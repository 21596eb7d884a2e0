package decoder

import (
	"encoding/binary"
	"errors"
	"strconv"
)

// ErrNeedText says that a tuple brings, for a column that is read, a binary value of a type without a binary
// reader: the session must be started again with binary off.
var ErrNeedText = errors.New("a binary value of a type that is read as text only")

// The OIDs of the built-in types with a binary reader (pg_type.dat; they never change).
const (
	oidBool        = 16
	oidBytea       = 17
	oidName        = 19
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidOID         = 26
	oidJSON        = 114
	oidBpchar      = 1042
	oidVarchar     = 1043
	oidDate        = 1082
	oidTimestamp   = 1114
	oidTimestamptz = 1184
	oidUUID        = 2950
	oidJSONB       = 3802
)

// BinaryReadable reports whether binary values of the type with this OID can be read. Binary may be asked for
// only where that holds for every column that is read.
func BinaryReadable(typeOID uint32) bool {
	switch typeOID {
	case oidBool, oidBytea, oidName, oidInt8, oidInt2, oidInt4, oidText, oidOID, oidJSON, oidBpchar,
		oidVarchar, oidDate,
		oidTimestamp, oidTimestamptz, oidUUID, oidJSONB:
		return true
	}
	return false
}

// maxFixed is more than the longest text of a type of fixed size takes.
const maxFixed = 64

// The reasons for which a value can't be decoded.
const (
	badLength    = "a binary value of a wrong length"
	badBool      = "a bool that is neither 0 nor 1"
	badJSONB     = "jsonb in an unknown binary version"
	badHex       = "bytea that is not in hex form"
	badTimestamp = "a point in time out of range"
)

// The kinds of a value in a tuple.
const (
	kindNull   = 'n'
	kindText   = 't'
	kindBinary = 'b'
	kindToast  = 'u' // unchanged, left out: in updates only
)

// binaryText gives a binary value, of a type that is BinaryReadable, as PostgreSQL prints it; of a bytea the
// bytes. The result aliases raw or scratch. bad is the reason if it can't be decoded.
func binaryText(typeOID uint32, raw []byte, scratch *[maxFixed]byte) (b []byte, bad string) {
	b = scratch[:0]
	ok := true
	switch typeOID {
	case oidText, oidVarchar, oidBpchar, oidName, oidJSON, oidBytea:
		return raw, ""
	case oidJSONB:
		if len(raw) < 1 || raw[0] != 1 {
			return nil, badJSONB
		}
		return raw[1:], ""
	case oidBool:
		if ok = len(raw) == 1; ok {
			switch raw[0] {
			case 0:
				b = append(b, 'f')
			case 1:
				b = append(b, 't')
			default:
				return nil, badBool
			}
		}
	case oidInt2:
		if ok = len(raw) == 2; ok {
			b = strconv.AppendInt(b, int64(int16(binary.BigEndian.Uint16(raw))), 10)
		}
	case oidInt4:
		if ok = len(raw) == 4; ok {
			b = strconv.AppendInt(b, int64(int32(binary.BigEndian.Uint32(raw))), 10)
		}
	case oidInt8:
		if ok = len(raw) == 8; ok {
			b = strconv.AppendInt(b, int64(binary.BigEndian.Uint64(raw)), 10)
		}
	case oidOID:
		if ok = len(raw) == 4; ok {
			b = strconv.AppendUint(b, uint64(binary.BigEndian.Uint32(raw)), 10)
		}
	case oidUUID:
		if ok = len(raw) == 16; ok {
			b = appendUUID(b, raw)
		}
	case oidDate:
		if ok = len(raw) == 4; ok {
			if b, ok = appendDate(b, int32(binary.BigEndian.Uint32(raw))); !ok {
				return nil, badTimestamp
			}
		}
	case oidTimestamp, oidTimestamptz:
		if ok = len(raw) == 8; ok {
			zone := ""
			if typeOID == oidTimestamptz {
				zone = "+00"
			}
			if b, ok = appendTimestamp(b, int64(binary.BigEndian.Uint64(raw)), zone); !ok {
				return nil, badTimestamp
			}
		}
	}
	if !ok {
		return nil, badLength
	}
	return b, ""
}

func appendUUID(b, raw []byte) []byte {
	const digits = "0123456789abcdef"
	for i, c := range raw {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			b = append(b, '-')
		}
		b = append(b, digits[c>>4], digits[c&0xF])
	}
	return b
}

// hexBytea returns the digits of a bytea in text form. The session pins bytea_output to hex, so no other form
// can be right.
func hexBytea(text []byte) (digits []byte, bad string) {
	if len(text) < 2 || text[0] != '\\' || text[1] != 'x' || len(text)%2 != 0 {
		return nil, badHex
	}
	return text[2:], ""
}
