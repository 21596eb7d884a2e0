package oracle

import (
	"context"
	"fmt"
	"regexp"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"
)

// The subject and the header of a message that is no event.
const (
	cutSubject = "cut"
	cutHeader  = "Outflow-Cut"
)

// cut is what a cut says of its place: of which WAL, and where in it.
type cut struct {
	wal string
	lsn LSN
}

var cutForm = regexp.MustCompile(`^v=1 sys=([1-9][0-9]*) tl=(0|[1-9][0-9]*) ` +
	`lsn=([0-9A-F]+/[0-9A-F]+) epoch=([1-9][0-9]*) owner=([1-9][0-9]?)( .*)?$`)

// parseCut reads the header of a cut.
func parseCut(value string) (*cut, error) {
	wrong := fmt.Errorf("header %q is none of a cut", value)
	m := cutForm.FindStringSubmatch(value)
	if m == nil {
		return nil, wrong
	}
	for i, bits := range map[int]int{1: 64, 2: 32, 4: 64} {
		if _, err := strconv.ParseUint(m[i], 10, bits); err != nil {
			return nil, wrong
		}
	}
	lsn, err := ParseLSN(m[3])
	if owner, _ := strconv.Atoi(m[5]); err != nil || lsn == 0 || owner > 64 {
		return nil, wrong
	}
	return &cut{m[1] + " " + m[2], lsn}, nil
}

// Cuts reads the cuts of a stream, for [Config.Cuts].
func Cuts(ctx context.Context, js jetstream.JetStream, stream string) (cuts []LSN, err error) {
	err = readAll(ctx, js, stream, func(m *Message) error {
		if m.cut != nil {
			cuts = append(cuts, m.cut.lsn)
		}
		return nil
	})
	return cuts, err
}

// addCut judges a cut by itself. What it closes is not known here yet: the windows that the WAL makes without
// it are expected behind it.
func (c *judged) addCut(m *Message) {
	c.j.Cuts++
	switch {
	case c.cut != nil && m.cut.wal == c.cut.wal && m.cut.lsn <= c.cut.lsn:
		c.j.Header++
		c.note(m, "is a cut at %v, and the one before it was at %v", m.cut.lsn, c.cut.lsn)
	case m.Header.Get(expectedHeader) != strconv.FormatUint(m.Seq-1, 10):
		c.j.Header++
		c.note(m, "is a cut with %s header %q", expectedHeader, m.Header.Get(expectedHeader))
	}
	c.cut, c.cutSeq = m.cut, m.Seq
}
