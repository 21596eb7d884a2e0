package outbox

import (
	"fmt"
	"strconv"
	"strings"
)

// HeaderCut is the name of the header that makes a message a cut: see [Cut].
const HeaderCut = "Outflow-Cut"

// CutSubject is the subject of a cut in the stream. It is published to the stream's ingress with this token
// behind it.
const CutSubject = "cut"

// Cut is a message of the stream that is not an event: another cluster goes on with the stream of a home that
// has fallen silent, and closes by it what it holds. All of the home's events at or below LSN that no window
// has closed yet are one window, whose messages follow. A reader of events passes over it.
//
// Its text is v=1 sys=7301234567890123456 tl=1 lsn=0/16B3748 epoch=7 owner=2. A cut has no data, and no
// header [HeaderName].
type Cut struct {
	SystemID uint64 // the system identifier of the home's PostgreSQL server
	Timeline uint32 // the timeline of the home that LSN lies on; 0: its writer did not know
	LSN      LSN    // the newest input of the home that it closes
	Epoch    uint64 // of the ownership under which it was written, from 1
	Owner    int    // cluster.id of its writer, from 1 to [MaxCluster]
}

// MaxCluster is the greatest cluster.id.
const MaxCluster = 64

// maxCutText is the length of the longest text that is read as a cut. The longest one of version 1 has 100
// bytes, which leaves room for fields that come later.
const maxCutText = 512

// Append appends the header's value to b.
func (c *Cut) Append(b []byte) []byte {
	b = strconv.AppendUint(append(b, "v=1 sys="...), c.SystemID, 10)
	b = strconv.AppendUint(append(b, " tl="...), uint64(c.Timeline), 10)
	b = c.LSN.Append(append(b, " lsn="...))
	b = strconv.AppendUint(append(b, " epoch="...), c.Epoch, 10)
	return strconv.AppendInt(append(b, " owner="...), int64(c.Owner), 10)
}

// String is the header's value.
func (c *Cut) String() string { return string(c.Append(nil)) }

// ParseCut reads the value of a header [HeaderCut] of version 1, written exactly as [Cut.String] writes it.
// Further fields are passed over, so that a later addition does not stop a consumer.
func ParseCut(value string) (Cut, error) {
	var c Cut
	if len(value) > maxCutText {
		return c, fmt.Errorf("cut of %d bytes: at most %d are read", len(value), maxCutText)
	}
	rest := value
	for _, name := range cutFields {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		v, ok := strings.CutPrefix(field, name)
		if !ok {
			return Cut{}, fmt.Errorf("cut %q: want %s next", value, name)
		}
		if err := c.set(name, v); err != nil {
			return Cut{}, fmt.Errorf("cut %q: %s%s: %w", value, name, v, err)
		}
	}
	if text := c.String(); value != text && !strings.HasPrefix(value, text+" ") {
		return Cut{}, fmt.Errorf("cut %q: it would be written %q", value, text)
	}
	return c, nil
}

var cutFields = [...]string{"v=", "sys=", "tl=", "lsn=", "epoch=", "owner="}

func (c *Cut) set(field, v string) (err error) {
	var u uint64
	least, most := uint64(1), uint64(0) // most 0: no limit but the type's
	switch field {
	case "v=":
		if v != "1" {
			return fmt.Errorf("unknown version")
		}
		return nil
	case "lsn=":
		c.LSN, err = ParseLSN(v)
		u = uint64(c.LSN)
	case "sys=":
		c.SystemID, err = strconv.ParseUint(v, 10, 64)
		u = c.SystemID
	case "tl=":
		u, err = strconv.ParseUint(v, 10, 32)
		c.Timeline, least = uint32(u), 0
	case "epoch=":
		c.Epoch, err = strconv.ParseUint(v, 10, 64)
		u = c.Epoch
	case "owner=":
		u, err = strconv.ParseUint(v, 10, 31)
		c.Owner, most = int(u), MaxCluster
	}
	if err == nil && (u < least || most > 0 && u > most) {
		return fmt.Errorf("out of range")
	}
	return err
}

// CutOf returns the cut that a message of the stream is, nil if it is none: by its subject and its header,
// which is there once and valid, beside no header of an event. Any other message on that subject that is no
// event is not Outflow's.
func CutOf(subject string, header map[string][]string) *Cut {
	if subject != CutSubject || len(header[HeaderCut]) != 1 || len(header[HeaderName]) > 0 {
		return nil
	}
	if c, err := ParseCut(header[HeaderCut][0]); err == nil {
		return &c
	}
	return nil
}

// GoesBack reports whether a cut can't come behind an earlier one of the same stream: both speak of the same
// WAL, and it is not above the earlier one. Where they name different servers or timelines nobody can tell.
func (c *Cut) GoesBack(earlier *Cut) bool {
	return c.SystemID == earlier.SystemID && c.Timeline == earlier.Timeline && c.LSN <= earlier.LSN
}

// Of reports whether a cut is one of the home with a system identifier, in decimal.
func (c *Cut) Of(systemID string) bool { return systemID == strconv.FormatUint(c.SystemID, 10) }
